"""The index of a checkpoint in several files: which file holds which tensor, and whether the files agree."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any, NamedTuple

from mapper.checkpoint import json_text
from mapper.checkpoint.header import FileHeader, TensorHeader
from mapper.checkpoint.json_text import plural, shortened
from mapper.diagnostics import Diagnostic, finding


class Index(NamedTuple):
    """`names` lists the tensors of each file, by its name relative to `folder`; sorted by file."""

    path: str
    folder: str
    names: dict[str, list[str]]


def read_index(path: str, *, findings: list[Diagnostic]) -> Index | None:
    """Return the index at `path`; on failure append to `findings` and return None."""
    text = json_text.require_text(path, what="index", findings=findings)
    if text is None:
        return None
    num_findings = len(findings)
    value = json_text.parse_text(text, path=path, what="index", findings=findings)
    return parse_index(text, value, path=path, findings=findings) if len(findings) == num_findings else None


def parse_index(text: str, value: Any, *, path: str, findings: list[Diagnostic]) -> Index | None:
    """Return the index in `value`, which is the JSON `text` of the file `path`.

    On failure append to `findings` and return None; where only some files are wrong, return the index without them.
    """
    names = parse_names(text, value, path=path, findings=findings)
    if names is None:
        return None
    folder = os.path.dirname(path)
    missing = [file for file in names if not os.path.exists(os.path.join(folder, file))]
    if missing:
        lost = [name for file in missing for name in names[file]]
        values: dict[str, Any] = {"num_files": plural(len(missing), "file"), "files": shortened(missing, num_shown=5)}
        values |= {"num_tensors": len(lost), "total": len(value["weight_map"]), "tensors": shortened(lost)}
        findings.append(finding("M420", subject=path, hint="download the missing files", **values))
    return Index(path, folder, {file: each for file, each in names.items() if file not in missing})


def parse_names(text: str, value: Any, *, path: str, findings: list[Diagnostic]) -> dict[str, list[str]] | None:
    """Return the tensors of each file that the index in `value` names, sorted by file; whether it is there is not asked.

    On failure append to `findings` and return None; where only some files are wrong, return the others.
    """
    weight_map = value.get("weight_map") if isinstance(value, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        found = "no tensor" if weight_map == {} else f"{json_text.kind_of(value)} without one"
        expected = "an object with a 'weight_map' of {tensor: file}"
        findings.append(finding("M414", subject=path, what="index", path=path, expected=expected, found=found))
        return None
    problem = _map_problem(text, value, weight_map, path=path)
    if problem is not None:
        findings.append(problem)
        return None
    names: dict[str, list[str]] = {file: [] for file in sorted(set(weight_map.values()))}
    for name, file in weight_map.items():
        names[file].append(name)
    outside = [file for file in names if _leaves(os.path.dirname(path), file)]
    if outside:
        hint = "move the files into the folder of the index and name them relative to it"
        values: dict[str, Any] = {"num_files": plural(len(outside), "file"), "files": shortened(outside)}
        findings.append(finding("M421", subject=path, hint=hint, **values))
    return {file: each for file, each in names.items() if file not in outside}


def _map_problem(text: str, value: Any, weight_map: dict[str, Any], *, path: str) -> Diagnostic | None:
    files = Counter(file for file in weight_map.values() if isinstance(file, str))
    num_strings = json_text.count_strings({**value, "weight_map": {}}) + len(weight_map) + files.total()
    num_minus_zeros = "\n".join(weight_map).count("-0") + sum(file.count("-0") * count for file, count in files.items())
    if json_text.is_suspicious(text, num_strings=num_strings, num_minus_zeros=num_minus_zeros):
        try:
            _, repeated = json_text.parse_carefully(text)
        except ValueError as error:
            return json_text.not_json(path, what="index", reason=str(error))
        if repeated:
            return json_text.repeated_keys(repeated, path=path)
    unnamed = [name for name, file in weight_map.items() if not isinstance(file, str) or not file or "\0" in file]
    if not unnamed:
        return None
    values: dict[str, Any] = {"num_tensors": plural(len(unnamed), "tensor"), "tensors": shortened(unnamed)}
    return finding("M422", subject=path, hint="write the index again", found=repr(weight_map[unnamed[0]]), **values)


def select_tensors(
    index: Index, headers: dict[str, FileHeader], *, findings: list[Diagnostic]
) -> tuple[dict[str, TensorHeader], list[str]]:
    """Return the tensors that `index` names, each from its own file, and notes on the tensors left out.

    `headers` are by file name. A tensor that its file does not hold is appended to `findings`.
    """
    tensors: dict[str, TensorHeader] = {}
    ignored: list[str] = []
    for file, names in index.names.items():
        header = headers.get(file)
        if header is None:
            continue
        if header.tensors.keys() == set(names):
            tensors.update(header.tensors)
            continue
        named = set(names)
        tensors.update((name, each) for name, each in header.tensors.items() if name in named)
        findings += _misplaced(file, [name for name in names if name not in header.tensors], headers)
        ignored += _left_out(file, [name for name in header.tensors if name not in named], index)
    return tensors, ignored


def _misplaced(file: str, absent: list[str], headers: dict[str, FileHeader]) -> list[Diagnostic]:
    findings: list[Diagnostic] = []
    elsewhere: dict[str | None, list[str]] = {}
    for name in absent:
        elsewhere.setdefault(next((other for other, header in headers.items() if name in header.tensors), None), []).append(
            name
        )
    for other, names in elsewhere.items():
        values: dict[str, Any] = {"file": file, "num_tensors": plural(len(names), "tensor"), "tensors": shortened(names)}
        if other is None:
            findings.append(finding("M423", subject=file, hint="download the file and the index again", **values))
        else:
            findings.append(finding("M424", subject=file, hint="download the files and the index again", other=other, **values))
    return findings


def _left_out(file: str, extra: list[str], index: Index) -> list[str]:
    owners = {name: owner for owner, names in index.names.items() for name in names}
    by_owner: dict[str | None, list[str]] = {}
    for name in extra:
        by_owner.setdefault(owners.get(name), []).append(name)
    notes: list[str] = []
    for owner, names in by_owner.items():
        reason = f"gives to {owner}" if owner else "does not name"
        notes.append(f"{file}: {plural(len(names), 'tensor')} that the index {reason}: {shortened(names)}")
    return notes


def is_index_name(name: str) -> bool:
    """True where a file called `name` is an index of safetensors files by the convention of its name."""
    return name.endswith(".safetensors.index.json")


def _leaves(folder: str, file: str) -> bool:
    """True where `file` does not lie in `folder` or below.

    The file itself may be a link: a Hugging Face cache links each file of a snapshot to its blob. A linked folder may not
    lead out.
    """
    if not os.path.dirname(file):
        return False
    real = os.path.realpath(folder)
    return os.path.commonpath([real, os.path.realpath(os.path.join(folder, os.path.dirname(file)))]) != real
