"""The entries `name: {dtype, shape, data_offsets}` of a header or a manifest: whether each is right on its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from math import prod
from operator import itemgetter, sub
from typing import Any, NamedTuple

from mapper.checkpoint import json_text
from mapper.diagnostics import Diagnostic, finding
from mapper.ops.dtypes import BITS

IN_FILE = ("data_offsets", "dtype", "shape")
IN_MANIFEST = ("dtype", "shape")

AGAIN = "download or write the file again"
REWRITE = "write the file again with the safetensors library"

_MAX_NUM_BITS = 2**63 - 1


class Columns(NamedTuple):
    """The entries of one file, a column each; offsets count from the end of the header, and a manifest has none."""

    dtypes: list[str]
    shapes: list[tuple[int, ...]]
    begins: list[int]
    ends: list[int]


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with one tensor of a file; `fold` makes one finding of all that have one code."""

    code: str
    name: str
    values: dict[str, Any]


def require_columns(
    text: str, entries: dict[str, Any], *, keys: tuple[str, ...], num_other_strings: int, path: str, findings: list[Diagnostic]
) -> Columns | None:
    """Return the columns of `entries`, each an object of exactly `keys`; on failure append to `findings` and return None.

    `text` is the JSON that holds them, with `num_other_strings` strings beside them.
    """
    columns = _columns(entries, keys=keys)
    # An entry has its name, its keys and the value of `dtype`: a key beside those adds a string.
    num_strings = (2 + len(keys)) * len(entries) + num_other_strings
    if columns is not None and not json_text.is_suspicious(text, num_strings=num_strings):
        return columns
    try:
        exact, repeated = json_text.parse_carefully(text)
    except ValueError as error:
        code, what = ("M433", "header") if keys is IN_FILE else ("M412", "manifest")
        findings.append(finding(code, subject=path, hint=AGAIN, path=path, what=what, reason=str(error)))
        return None
    num_findings = len(findings)
    if repeated:
        findings.append(json_text.repeated_keys(repeated, path=path))
    findings += fold(_problems({name: exact[name] for name in entries}, keys=keys), path=path)
    if len(findings) > num_findings:
        return None
    assert columns is not None, f"{path}: entries without a problem have columns"
    return columns


def fold(problems: Iterable[Problem], *, path: str) -> list[Diagnostic]:
    """Return one finding for each code, with the values of the first problem and the names of the others."""
    by_code: dict[str, list[Problem]] = {}
    for problem in problems:
        by_code.setdefault(problem.code, []).append(problem)
    findings: list[Diagnostic] = []
    for code, (first, *others) in by_code.items():
        more = f"; likewise {json_text.shortened([each.name for each in others])}" if others else ""
        findings.append(finding(code, subject=first.name, hint=REWRITE, path=path, name=first.name, more=more, **first.values))
    return findings


def _columns(entries: dict[str, Any], *, keys: tuple[str, ...]) -> Columns | None:
    """Return the columns where every entry is right on its own, but for keys beside `keys`, else None.

    `_problem` says what is wrong. This looks at a column at a time, in C: 92,000 entries take 0.07 s, half of what a loop
    over them takes.
    """
    if not entries:
        return Columns([], [], [], [])
    has_offsets = keys is IN_FILE
    try:
        dtypes = list(map(itemgetter("dtype"), entries.values()))
        sizes = list(map(itemgetter("shape"), entries.values()))
        offsets = list(map(itemgetter("data_offsets"), entries.values())) if has_offsets else []
        if not BITS.keys() >= set(dtypes):
            return None
    except (KeyError, TypeError):
        return None
    if set(map(type, chain(sizes, offsets))) != {list}:
        return None
    bounds = list(chain.from_iterable(offsets))
    # Types first: `True` and `1.0` equal 1, so that no later step would tell them apart.
    if not {int} >= set(map(type, chain(chain.from_iterable(sizes), bounds))) or not {2} >= set(map(len, offsets)):
        return None
    begins, ends = bounds[::2], bounds[1::2]
    shapes = list(map(tuple, sizes))
    pairs = list(zip(dtypes, shapes, strict=True))
    num_bits = {(dtype, shape): BITS[dtype] * prod(shape) for dtype, shape in set(pairs)}
    if any(each % 8 for each in num_bits.values()):
        return None
    if any(min(shape, default=0) < 0 or _overflows(shape) for _, shape in num_bits):
        return None
    if has_offsets and (min(begins) < 0 or list(map(sub, ends, begins)) != [num_bits[pair] // 8 for pair in pairs]):
        return None
    return Columns(dtypes, shapes, begins, ends)


def _problems(entries: dict[str, Any], *, keys: tuple[str, ...]) -> Iterator[Problem]:
    for name, entry in entries.items():
        problem = _problem(name, entry, keys=keys)
        if problem is not None:
            yield problem


def _problem(name: str, entry: Any, *, keys: tuple[str, ...]) -> Problem | None:
    if not isinstance(entry, dict) or sorted(entry) != list(keys):
        found = f"an object with the keys {sorted(entry)}" if isinstance(entry, dict) else json_text.kind_of(entry)
        return Problem("M435", name, {"found": found, "expected": list(keys)})
    dtype, shape = entry["dtype"], entry["shape"]
    if not isinstance(dtype, str) or dtype not in BITS:
        return Problem("M436", name, {"found": dtype, "known": ", ".join(BITS)})
    if not _are_sizes(shape) or _overflows(shape):
        return Problem("M437", name, {"found": shape})
    num_bits = BITS[dtype] * prod(shape)
    if num_bits % 8:
        return Problem("M438", name, {"dtype": dtype, "shape": shape, "found": num_bits})
    if keys is not IN_FILE:
        return None
    offsets = entry["data_offsets"]
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        return Problem("M439", name, {"found": offsets})
    expected, found = num_bits // 8, offsets[1] - offsets[0]
    if expected != found:
        return Problem("M440", name, {"dtype": dtype, "shape": shape, "expected": expected, "found": found})
    return None


def _are_sizes(value: Any) -> bool:
    return type(value) is list and all(type(each) is int and each >= 0 for each in value)


def _overflows(shape: Iterable[int]) -> bool:
    # Strides are products of sizes: a size of 0 makes the tensor empty, but not those products small.
    return 64 * prod(max(size, 1) for size in shape) > _MAX_NUM_BITS
