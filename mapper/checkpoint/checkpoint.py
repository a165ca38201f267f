"""A checkpoint as its headers tell it: which tensors, where, of which dtype and shape. No tensor data is read."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mapper.checkpoint import json_text
from mapper.checkpoint.collector import collector_paused
from mapper.checkpoint.header import FileHeader, FileStamp, TensorHeader, read_file_header
from mapper.checkpoint.index import Index, is_index_name, parse_index, read_index, select_tensors
from mapper.checkpoint.manifest import parse_manifest
from mapper.diagnostics import Diagnostic, MapperError, finding

StrPath = str | os.PathLike[str]

_MAIN_INDEX = "model.safetensors.index.json"
_MANIFEST_ENDINGS = (".header.json.gz", ".header.json", ".json.gz", ".json")
_OTHER_FORMATS = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")
_PART = re.compile(r"(?P<stem>.+[-_])(?P<number>\d{5,6})-of-(?P<total>\d{5,6})\.safetensors")


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The tensors of a checkpoint, by name, from headers that were checked against each other and against the files.

    `files` are absolute paths, empty for a manifest, and `stamps` what they looked like; `config` is the config.json beside
    them. `ignored` are notes on what lies there and is not part of the checkpoint.
    """

    path: str
    files: tuple[str, ...]
    tensors: dict[str, TensorHeader]
    config: dict[str, Any] | None
    ignored: tuple[str, ...]
    stamps: tuple[FileStamp, ...]

    @staticmethod
    def open(path: StrPath | Sequence[StrPath]) -> Checkpoint:
        """Open a folder, an index, a .safetensors file, a list of such files, or a manifest; read headers only.

        A folder is read by its index, or without one every .safetensors file in it; subfolders are not read.
        Raises MapperError with every finding.
        """
        with collector_paused():
            if not isinstance(path, str | os.PathLike):
                return _open_list([os.path.abspath(each) for each in path])
            absolute = os.path.abspath(path)
            if os.path.isdir(absolute):
                return _open_folder(absolute)
            if not os.path.exists(absolute):
                raise MapperError([json_text.absent(absolute)])
            if absolute.endswith(".safetensors"):
                return _open_files([absolute], path=absolute, folder=os.path.dirname(absolute))
            if absolute.endswith((".json", ".json.gz")):
                return _open_json(absolute)
            raise MapperError([finding("M404", subject=absolute, path=absolute)])

    @property
    def is_manifest(self) -> bool:
        """True where only names, dtypes and shapes are known and there is nothing to load from."""
        return not self.files

    @cached_property
    def total_bytes(self) -> int:
        """The size of all tensors together, in bytes."""
        return sum(header.stop - header.start for header in self.tensors.values())

    @cached_property
    def digest(self) -> str:
        """SHA-256, in hex, of every name with its dtype and shape.

        It does not depend on the order of the tensors, on how they are split into files or on where they lie in them: a
        manifest and the checkpoint it describes have one digest.
        """
        names = sorted(self.tensors)
        headers = [self.tensors[name][:2] for name in names]
        distinct = sorted(set(headers))
        number = {header: str(position) for position, header in enumerate(distinct)}
        # JSON, so that no name can be mistaken for the end of another; headers by number, because few differ.
        parts = (json.dumps(names), json.dumps(distinct), ",".join(map(number.__getitem__, headers)))
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _open_folder(folder: str) -> Checkpoint:
    names = sorted(os.listdir(folder))
    if any(map(is_index_name, names)):
        return _open_index(index_in(folder), path=folder)
    files = [name for name in names if name.endswith(".safetensors") and not os.path.isdir(os.path.join(folder, name))]
    if not files:
        raise MapperError([_nothing_to_read(folder, names)])
    lost = _missing_parts(folder, files)
    return _open_files(
        [os.path.join(folder, name) for name in files], path=folder, folder=folder, findings=lost, ignored=_subfolders(folder)
    )


def index_in(folder: str) -> str:
    """Return the path of a folder's index; raises MapperError where there is none or no telling which."""
    names = sorted(os.listdir(folder))
    indexes = [name for name in names if is_index_name(name)]
    if _MAIN_INDEX in indexes or len(indexes) == 1:
        return os.path.join(folder, _MAIN_INDEX if _MAIN_INDEX in indexes else indexes[0])
    if indexes:
        values: dict[str, Any] = {"count": len(indexes), "names": json_text.shortened(indexes, num_shown=5)}
        raise MapperError([finding("M403", subject=folder, hint="open one of the index files", path=folder, **values)])
    raise MapperError([_nothing_to_read(folder, names)])


def _open_list(paths: list[str]) -> Checkpoint:
    repeated = [path for position, path in enumerate(paths) if path in paths[:position]]
    if not paths or repeated:
        problem = f"names a file twice: {json_text.shortened(repeated)}" if repeated else "is empty"
        raise MapperError([finding("M405", hint="give at least one file, and each file once", problem=problem)])
    folders = {os.path.dirname(path) for path in paths}
    return _open_files(paths, path=os.path.commonpath(folders), folder=folders.pop() if len(folders) == 1 else None)


def _open_json(path: str) -> Checkpoint:
    findings: list[Diagnostic] = []
    what = "index" if path.endswith((".index.json", ".index.json.gz")) else "manifest"
    text = json_text.require_text(path, what=what, findings=findings)
    value = None if text is None else json_text.parse_text(text, path=path, what=what, findings=findings)
    if text is None or findings:
        raise MapperError(findings)
    if what == "index" or (
        isinstance(value, dict) and isinstance(value.get("weight_map"), dict) and "dtype" not in value["weight_map"]
    ):
        return _open_parsed_index(parse_index(text, value, path=path, findings=findings), path=path, findings=findings)
    tensors = parse_manifest(text, value, path=path, findings=findings)
    stem = next(path.removesuffix(ending) for ending in _MANIFEST_ENDINGS if path.endswith(ending))
    config = read_config(f"{stem}.config.json", findings=findings)
    if tensors is None or findings:
        raise MapperError(findings)
    return Checkpoint(path, (), tensors, config, (), ())


def _open_index(index_path: str, *, path: str) -> Checkpoint:
    findings: list[Diagnostic] = []
    return _open_parsed_index(read_index(index_path, findings=findings), path=path, findings=findings)


def _open_parsed_index(index: Index | None, *, path: str, findings: list[Diagnostic]) -> Checkpoint:
    if index is None:
        raise MapperError(findings)
    files = [os.path.join(index.folder, name) for name in index.names]
    headers: dict[str, FileHeader] = {}
    for position, name in enumerate(index.names):
        header = read_file_header(files[position], file=position, findings=findings)
        if header is not None:
            headers[name] = header
    tensors, ignored = select_tensors(index, headers, findings=findings)
    config = read_config(os.path.join(index.folder, "config.json"), findings=findings)
    if findings:
        raise MapperError(findings)
    beside = [
        f"{name}: not named by {os.path.basename(index.path)}"
        for name in sorted(os.listdir(index.folder))
        if (name.endswith(".safetensors") and name not in index.names)
        or (is_index_name(name) and name != os.path.basename(index.path))
    ]
    stamps = tuple(header.stamp for header in headers.values())
    return Checkpoint(path, tuple(files), tensors, config, (*beside, *_subfolders(index.folder), *ignored), stamps)


def _open_files(
    files: list[str],
    *,
    path: str,
    folder: str | None,
    findings: Sequence[Diagnostic] = (),
    ignored: Sequence[str] = (),
) -> Checkpoint:
    found = list(findings)
    tensors: dict[str, TensorHeader] = {}
    stamps: list[FileStamp] = []
    for position, file in enumerate(files):
        header = read_file_header(file, file=position, findings=found)
        if header is None:
            continue
        found += _in_two_files(file, header.tensors, files, tensors)
        tensors |= header.tensors
        stamps.append(header.stamp)
    config = None if folder is None else read_config(os.path.join(folder, "config.json"), findings=found)
    if found:
        raise MapperError(found)
    return Checkpoint(path, tuple(files), tensors, config, tuple(ignored), tuple(stamps))


def _in_two_files(
    file: str, new: dict[str, TensorHeader], files: list[str], before: dict[str, TensorHeader]
) -> list[Diagnostic]:
    by_other: dict[str, list[str]] = {}
    if not before.keys().isdisjoint(new):
        for name in new:
            if name in before:
                by_other.setdefault(files[before[name].file], []).append(name)
    hint = "open the list of files that is meant, or remove the other"
    return [
        finding(
            "M450",
            subject=file,
            hint=hint,
            num_tensors=json_text.plural(len(names), "tensor"),
            file=other,
            other=file,
            tensors=json_text.shortened(names),
        )
        for other, names in by_other.items()
    ]


def _missing_parts(folder: str, files: list[str]) -> list[Diagnostic]:
    parts: dict[tuple[str, str], list[str]] = {}
    for match in filter(None, map(_PART.fullmatch, files)):
        parts.setdefault((match["stem"], match["total"]), []).append(match["number"])
    findings: list[Diagnostic] = []
    for (stem, total), numbers in parts.items():
        present, width = set(map(int, numbers)), len(numbers[0])
        absent = [f"{stem}{each:0{width}}-of-{total}.safetensors" for each in range(1, int(total) + 1) if each not in present]
        if absent:
            pattern = f"{stem}*-of-{total}.safetensors"
            values: dict[str, Any] = {"count": len(absent), "total": int(total), "files": json_text.shortened(absent)}
            hint = "download the missing files, or open the list of files that is meant"
            findings.append(finding("M451", subject=folder, hint=hint, path=folder, pattern=pattern, **values))
    return findings


def _nothing_to_read(folder: str, names: list[str]) -> Diagnostic:
    others = [name for name in names if name.endswith(_OTHER_FORMATS)]
    below = _subfolders(folder)
    if others:
        found, hint = f"found {json_text.shortened(others)}", "convert these files to safetensors first"
    elif below:
        found, hint = f"found {'; '.join(below)}", "open the subfolder"
    else:
        found, hint = (
            f"found {len(names)} other entries" if names else "it is empty",
            "open the folder that holds the .safetensors files",
        )
    return finding("M402", subject=folder, hint=hint, path=folder, found=found)


def _subfolders(folder: str) -> list[str]:
    """Return a note for each subfolder that holds safetensors files."""
    notes: list[str] = []
    with os.scandir(folder) as entries:
        below = sorted(entry.name for entry in entries if entry.is_dir())
    for name in below:
        try:
            count = sum(each.endswith(".safetensors") for each in os.listdir(os.path.join(folder, name)))
        except OSError:  # a subfolder that may not be listed is not part of the checkpoint either
            continue
        if count:
            notes.append(f"{name}/: a subfolder with {json_text.plural(count, '.safetensors file')}")
    return notes


def read_config(path: str, *, findings: list[Diagnostic]) -> dict[str, Any] | None:
    """Return the config at `path`, None where there is none; on failure append to `findings` and return None."""
    if not os.path.lexists(path):
        return None
    text = json_text.require_text(path, what="config", findings=findings)
    if text is None:
        return None
    num_findings = len(findings)
    config = json_text.parse_text(text, path=path, what="config", findings=findings)
    if len(findings) > num_findings:
        return None
    if not isinstance(config, dict):
        findings.append(
            finding("M414", subject=path, what="config", path=path, expected="an object", found=json_text.kind_of(config))
        )
        return None
    return config
