"""The model's own parameters, as `--targets` gives them: one JSON object for every rank, or one for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mapper.checkpoint import json_text
from mapper.cli.arguments import read_json
from mapper.diagnostics import Diagnostic, MapperError, finding
from mapper.messages.suggest import did_you_mean
from mapper.ops.dtypes import DTYPES, safetensors_name, torch_name
from mapper.plan.targets import DeclaredTarget

Targets = dict[str, DeclaredTarget]
EXPECTED = "an object of {name: {shape, dtype}}"


def read_targets(paths: Sequence[str]) -> list[Targets]:
    """Return the parameters of each rank that the files give; one entry stands for every rank. Raises MapperError.

    A file holds one rank's object, a list of such objects, or `{"ranks": [...]}`. Beside the parameters an object may have
    `"aliases": {ALIAS: NAME}`: further names of a parameter.
    """
    findings: list[Diagnostic] = []
    ranks = [targets for path in paths for targets in _read(path, findings)]
    if findings:
        raise MapperError(findings)
    return ranks


def _read(path: str, findings: list[Diagnostic]) -> list[Targets]:
    value = read_json(path, what="targets")
    if isinstance(value, dict) and isinstance(value.get("ranks"), list):
        value = value["ranks"]
    entries = value if isinstance(value, list) else [value]
    if not entries:
        findings.append(finding("M910", subject=path, path=path, expected="one object for each rank", found="an empty array"))
    return [_targets(each, path, findings) for each in entries]


def _targets(value: Any, path: str, findings: list[Diagnostic]) -> Targets:
    if not isinstance(value, dict):
        findings.append(finding("M910", subject=path, path=path, expected=EXPECTED, found=json_text.kind_of(value)))
        return {}
    entries = dict(value)
    aliases = entries.pop("aliases", {}) if not _is_parameter(value.get("aliases")) else {}
    targets: Targets = {}
    for name, entry in entries.items():
        target = _target(name, entry, path, findings)
        if target is not None:
            targets[name] = target
    for alias, name in aliases.items() if isinstance(aliases, dict) else ():
        if name not in targets or alias in targets:
            problem = f"the alias of {name!r}, which is " + ("no parameter" if name not in targets else "a parameter itself")
            findings.append(finding("M911", subject=alias, path=path, name=alias, problem=problem))
        else:
            targets[alias] = targets[name]
    if not isinstance(aliases, dict):
        found = json_text.kind_of(aliases)
        findings.append(
            finding("M910", subject=path, path=path, expected="`aliases` as an object of {alias: name}", found=found)
        )
    return targets


def _is_parameter(value: Any) -> bool:
    return isinstance(value, Mapping) and "shape" in value


def _target(name: str, entry: Any, path: str, findings: list[Diagnostic]) -> DeclaredTarget | None:
    problem = None
    dtype: str | None = None
    if not isinstance(entry, dict) or not {"shape", "dtype"} <= entry.keys():
        problem = f"no shape and dtype: found {json_text.kind_of(entry)}"
    elif not isinstance(entry["shape"], list) or not all(type(size) is int and size >= 0 for size in entry["shape"]):
        problem = f"the shape {entry['shape']!r}, expected a list of sizes"
    else:
        dtype = _dtype(entry["dtype"])
        if dtype is None:
            problem = f"the unknown dtype {entry['dtype']!r}"
    if problem is not None:
        hint = did_you_mean(str(entry["dtype"]), _SPELLINGS) if dtype is None and "unknown dtype" in problem else ""
        findings.append(finding("M911", subject=name, hint=hint, path=path, name=name, problem=problem))
        return None
    assert dtype is not None, "an entry without a problem has a dtype"
    return DeclaredTarget(tuple(entry["shape"]), dtype, name)


_SPELLINGS = [*DTYPES, *(each.torch_name for each in DTYPES.values() if each.torch_name is not None)]


def _dtype(text: Any) -> str | None:
    """Return the torch name of a dtype in either spelling, or None."""
    if not isinstance(text, str):
        return None
    name = text.removeprefix("torch.")
    return name if safetensors_name(name) is not None else torch_name(text) if text in DTYPES else None
