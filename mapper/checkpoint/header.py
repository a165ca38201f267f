"""The header of a safetensors file, checked as the safetensors library checks it.

A file is `length (8 bytes, little endian) | header (JSON) | data`; the tensors cover the data without overlap, hole or rest.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import repeat
from typing import Any, NamedTuple

from mapper.checkpoint import json_text
from mapper.checkpoint.entries import AGAIN, IN_FILE, REWRITE, Columns, Problem, fold, require_columns
from mapper.diagnostics import Diagnostic, finding

MAX_HEADER_SIZE = 100_000_000  # bytes; the limit of the safetensors library

_LENGTH_SIZE = 8


class TensorHeader(NamedTuple):
    """One tensor as its file describes it.

    `dtype` is the safetensors name, `file` the position in `Checkpoint.files`, [start, stop) its bytes in that file.
    In a manifest `file` is -1 and `start` 0; `stop - start` is the size in bytes everywhere.
    """

    dtype: str
    shape: tuple[int, ...]
    file: int
    start: int
    stop: int


class FileStamp(NamedTuple):
    """What a file looked like when its header was read: after a change of either the header may not hold any more."""

    size: int
    modified_ns: int


class FileHeader(NamedTuple):
    tensors: dict[str, TensorHeader]
    stamp: FileStamp


def read_file_header(path: str, *, file: int, findings: list[Diagnostic]) -> FileHeader | None:
    """Return the header of `path`, file number `file` of its checkpoint, and append to `findings` what is wrong with the file.

    Return None where that leaves no telling which tensors it holds.
    """
    try:
        with open(path, "rb") as stream:
            status = os.fstat(stream.fileno())
            start = stream.read(len(json_text.LFS_POINTER))
            problem = _start_problem(path, start=start, size=status.st_size)
            if problem is not None:
                findings.append(problem)
                return None
            stream.seek(_LENGTH_SIZE)
            data = stream.read(_header_size(start))
    except FileNotFoundError:
        findings.append(json_text.absent(path))
        return None
    except OSError as error:
        findings.append(json_text.unreadable(path, error))
        return None
    tensors = _parse_header(data, path=path, file=file, size=status.st_size, findings=findings)
    return None if tensors is None else FileHeader(tensors, FileStamp(status.st_size, status.st_mtime_ns))


def _header_size(start: bytes) -> int:
    return int.from_bytes(start[:_LENGTH_SIZE], "little")


def _start_problem(path: str, *, start: bytes, size: int) -> Diagnostic | None:
    if start == json_text.LFS_POINTER:
        return json_text.lfs_pointer(path)
    if size < _LENGTH_SIZE:
        return finding("M430", subject=path, hint=AGAIN, path=path, size=size)
    header_size = _header_size(start)
    if header_size > MAX_HEADER_SIZE:
        hint = "the file is of another kind (a page, a zip, a pickle?) or damaged: download it again"
        values: dict[str, Any] = {"start": start[:_LENGTH_SIZE], "length": header_size, "limit": MAX_HEADER_SIZE}
        return finding("M431", subject=path, hint=hint, path=path, **values)
    if _LENGTH_SIZE + header_size > size:
        return finding("M432", subject=path, hint=AGAIN, path=path, expected=_LENGTH_SIZE + header_size, size=size)
    return None


def _parse_header(
    data: bytes, *, path: str, file: int, size: int, findings: list[Diagnostic]
) -> dict[str, TensorHeader] | None:
    try:
        text = data.decode("utf-8")
        entries = json_text.loads(text)
    except ValueError as error:
        findings.append(finding("M433", subject=path, hint=AGAIN, path=path, reason=str(error)))
        return None
    if not isinstance(entries, dict):
        findings.append(_wrong_header(path, "an object of {name: {dtype, shape, data_offsets}}", found=entries))
        return None
    num_other_strings = ("__metadata__" in entries) + json_text.count_strings(entries.get("__metadata__"))
    findings += _metadata_problems(path, entries.pop("__metadata__", None))
    columns = require_columns(text, entries, keys=IN_FILE, num_other_strings=num_other_strings, path=path, findings=findings)
    if columns is None:
        return None
    data_start = _LENGTH_SIZE + len(data)
    findings += _coverage_problems(path, list(entries), columns, data_start=data_start, size=size)
    starts = [begin + data_start for begin in columns.begins]
    stops = [end + data_start for end in columns.ends]
    rows = zip(columns.dtypes, columns.shapes, repeat(file, len(starts)), starts, stops, strict=True)
    return dict(zip(entries, map(TensorHeader._make, rows), strict=True))


def _coverage_problems(path: str, names: list[str], columns: Columns, *, data_start: int, size: int) -> Iterator[Diagnostic]:
    """Yield what keeps the tensors from covering the data of the file once, without holes, to its end."""
    if columns.begins != [0, *columns.ends][: len(names)]:
        yield from fold(_gaps(names, columns), path=path)
    expected = data_start + max(columns.ends, default=0)
    if size < expected:
        rows = zip(columns.begins, columns.ends, names, strict=True)
        past = sorted((begin, name) for begin, end, name in rows if data_start + end > size)
        _, first = past[0]
        hint, num_tensors = "download the file again", json_text.plural(len(past), "tensor")
        yield finding(
            "M443", subject=path, hint=hint, path=path, expected=expected, size=size, num_tensors=num_tensors, name=first
        )
    if size > expected:
        yield finding("M444", subject=path, hint=AGAIN, path=path, expected=expected, size=size)


def _gaps(names: list[str], columns: Columns) -> Iterator[Problem]:
    position, last = 0, ""
    for begin, end, name in sorted(zip(columns.begins, columns.ends, names, strict=True)):
        if begin < position:
            yield Problem("M441", name, {"found": begin, "other": last, "expected": position})
        elif begin > position:
            yield Problem("M442", name, {"found": begin, "expected": position})
        if end > position:
            position, last = end, name


def _metadata_problems(path: str, metadata: Any) -> Iterator[Diagnostic]:
    if metadata is None:
        return
    if not isinstance(metadata, dict):
        yield _wrong_header(path, "an object with an object of texts at '__metadata__'", found=metadata)
        return
    for key, value in metadata.items():
        if not isinstance(value, str):
            yield _wrong_header(path, f"an object with a text at '__metadata__', {key!r}", found=value)


def _wrong_header(path: str, expected: str, *, found: Any) -> Diagnostic:
    return finding("M434", subject=path, hint=REWRITE, path=path, expected=expected, found=json_text.kind_of(found))
