"""The modules that a quantisation config leaves out: their tensors are read as in a checkpoint without quantisation."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn

from mapper.diagnostics import MapperError, Place, finding
from mapper.pattern import Bindings, IndexValue, Template
from mapper.plan.family import Domains
from mapper.plan.matching import Matching

KEYS = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")
"""What fp8, AWQ and MXFP4; vLLM's fp8; compressed-tensors; and ModelOpt call the list."""

LEAF_TEXT = "weight"


@dataclass(frozen=True, slots=True)
class Exclusions:
    """The entries of such a list, by how they are spelled.

    A name is a run of whole segments of a module's name: `lm_head` and `mlp.gate` leave out what they name and all below,
    and `mlp.gate` does not leave out `mlp.gate_proj`. With `*` it is such a run too, and after `re:` stands a regular
    expression that matches from the start of the name.
    """

    runs: Mapping[int, frozenset[str]] = field(default_factory=dict)
    expressions: tuple[tuple[str, re.Pattern[str]], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.runs or self.expressions)

    def entry_for(self, module: str) -> str | None:
        """Return the entry that names this module, or one that it is part of."""
        segments = module.split(".")
        for length, runs in self.runs.items():
            for start in range(len(segments) - length + 1):
                run = ".".join(segments[start : start + length])
                if run in runs:
                    return run
        return next((entry for entry, each in self.expressions if each.search(module)), None)

    def leave_out(self, module: str) -> bool:
        return self.entry_for(module) is not None


def exclusions_of(quantization: Mapping[str, object]) -> Exclusions:
    """Return what a `quantization_config` leaves out; raises MapperError M338 for an entry that cannot be read."""
    runs: dict[int, set[str]] = {}
    expressions: list[tuple[str, re.Pattern[str]]] = []
    for key in KEYS:
        entries = quantization.get(key)
        for entry in entries if isinstance(entries, list) else ():
            if not isinstance(entry, str) or not entry:
                _refuse(key, entry, "expected a name")
            if not entry.startswith("re:") and "*" not in entry:
                runs.setdefault(entry.count(".") + 1, set()).add(entry)
                continue
            try:
                expressions.append((entry, re.compile(_expression(entry))))
            except re.error as error:
                _refuse(key, entry, str(error))
    return Exclusions({length: frozenset(found) for length, found in sorted(runs.items())}, tuple(expressions))


def _expression(entry: str) -> str:
    if entry.startswith("re:"):
        return f"^(?:{entry.removeprefix('re:')})"
    return r"(?:^|\.)" + ".*".join(map(re.escape, entry.split("*"))) + r"(?:\.|$)"


def _refuse(key: str, entry: object, problem: str) -> NoReturn:
    raise MapperError([finding("M338", subject=str(entry), key=key, entry=entry, problem=problem)])


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Where a rule's module is left out: at these values of `indices`."""

    indices: tuple[str, ...] = ()
    values: frozenset[tuple[IndexValue, ...]] = frozenset()

    def holds(self, bindings: Bindings) -> bool:
        return tuple(bindings[index] for index in self.indices) in self.values


def left_out(
    exclusions: Exclusions, spellings: Sequence[Sequence[Template]], stack: str | None, domains: Domains, place: Place | None
) -> LeftOut:
    """Return where a rule's module is left out, by any of its spellings.

    A spelling is the templates that one parameter comes from, with `LEAF_TEXT` for the leaf. Raises MapperError M337 where
    the list has some of them and others not.
    """
    found = [_of_spelling(exclusions, templates, stack, domains, place) for templates in spellings]
    indices = tuple(dict.fromkeys(index for each in found for index in each.indices))
    if not any(each.values for each in found):
        return LeftOut()
    values = frozenset(
        combination
        for combination in _product(indices, domains)
        if any(each.holds(dict(zip(indices, combination, strict=True))) for each in found)
    )
    return LeftOut(indices, values)


def with_entries(matching: Matching, exclusions: Exclusions) -> Matching:
    """Return the matching, each unknown tensor of a module that is left out with the entry that does so."""
    entries = {name: exclusions.entry_for(name.rpartition(".")[0]) for name in matching.unknown}
    findings = tuple(
        replace(each, hint=f"the quantisation config leaves its module out: {entry!r}")
        if each.code == "M502" and (entry := entries.get(each.subject)) is not None
        else each
        for each in matching.findings
    )
    return replace(matching, findings=findings)


def _of_spelling(
    exclusions: Exclusions, templates: Sequence[Template], stack: str | None, domains: Domains, place: Place | None
) -> LeftOut:
    named: dict[tuple[IndexValue, ...], dict[bool, str]] = {}
    indices = tuple(index for index in templates[0].indices if index != stack)
    for template in templates:
        positions = [template.indices.index(index) for index in indices]
        for values, name in zip(_product(template.indices, domains), template.names(domains), strict=True):
            module = name.removesuffix(LEAF_TEXT).removesuffix(".")
            is_left_out = exclusions.leave_out(module)
            named.setdefault(tuple(values[position] for position in positions), {}).setdefault(is_left_out, module)
    for modules in named.values():
        if len(modules) > 1:
            raise MapperError(
                [finding("M337", place=place, subject=modules[True], excluded=modules[True], kept=modules[False])]
            )
    at = frozenset(combination for combination, modules in named.items() if True in modules)
    return LeftOut((), frozenset({()})) if len(at) == len(named) else LeftOut(indices, at)


def _product(indices: Sequence[str], domains: Domains) -> list[tuple[IndexValue, ...]]:
    combinations: list[tuple[IndexValue, ...]] = [()]
    for index in indices:
        combinations = [(*each, value) for each in combinations for value in domains[index]]
    return combinations
