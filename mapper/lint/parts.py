"""Parts of equal size: their order is pinned by a case, or by nothing that mapper can see."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import chain

from mapper.cases.effect import effects
from mapper.cases.run import CaseResult
from mapper.compile import Program
from mapper.diagnostics import Diagnostic, finding
from mapper.lint.programs import Attempt, Attempts
from mapper.pattern import IndexValue
from mapper.plan.family import Family, SourceFamily


def unpinned_parts(attempts: Attempts, results: list[CaseResult]) -> Iterator[Diagnostic]:
    """Yield M810 for each rule and runtime with parts of equal size that no case pins, with the case to add."""
    pinned: dict[str, set[tuple[int, int]]] = {}
    for result in results:
        pinned.setdefault(result.case.runtime, set()).update(result.pinned)
    reported: set[tuple[str, int]] = set()
    for attempt, program in attempts.programs:
        for family in program.families if attempt.is_plain else ():
            rule = family.rule
            parts = [each for each in equal_parts(family) if (rule.number, each) not in pinned.get(attempt.runtime, ())]
            if parts and (attempt.runtime, rule.number) not in reported:
                reported.add((attempt.runtime, rule.number))
                hint = "\n".join(["add under `cases`:", *case_lines(attempt, program, rule.number, parts)])
                listed = " and ".join(map(str, parts))
                yield finding(
                    "M810", place=rule.place, subject=rule.text, hint=hint, severity="warning",
                    parts=listed, rule=rule.text, runtime=attempt.runtime,
                )  # fmt: skip


def equal_parts(family: Family) -> tuple[int, ...]:
    """Return the parts that have a source of their own and the size of another part."""
    axis = family.parts_axis
    if axis is None or not family.alternatives:
        return ()
    assert family.axes is not None
    sizes = family.axes[axis].parts
    return tuple(
        source.part
        for source in family.alternatives[0]
        if source.part is not None and sizes.count(sizes[source.part]) > 1
    )  # fmt: skip


def case_lines(attempt: Attempt, program: Program, rule: int, parts: list[int]) -> list[str]:
    """Return the YAML lines of a case that pins these parts of a rule, every required leaf of them, as the program has them."""
    families = [family for family in program.families if family.rule.number == rule and not family.optional]
    leaves = {family.leaf: family for family in reversed(families)}
    sources = chain.from_iterable(
        [(family, source) for source in family.alternatives[0] if source.part in parts]
        for family in reversed(leaves.values())
    )
    lines = [f"  - config: {attempt.config}", f"    runtime: {attempt.runtime}", "    maps:"]
    for family, source in sources:
        name = _witness(family, source)
        targets = [f"{each.target}" for each in effects(program, name)]
        key = str(effects(program, name)[0].source)
        lines.append(f"      {_scalar(key)}: {_scalar(targets[0]) if len(targets) == 1 else json.dumps(targets)}")
    return lines


def _witness(family: Family, source: SourceFamily) -> str:
    """Return one name of the source: the first value of each index, the last of a stacked one, so that its slot shows."""
    values: Mapping[str, IndexValue] = {
        index: source.domains[index][-1 if index == family.stack else 0] for index in source.template.indices
    }
    return source.template.name(values)


def _scalar(text: str) -> str:
    return json.dumps(text) if text.startswith(("{", "*", "[")) else text
