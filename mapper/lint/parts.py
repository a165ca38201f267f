"""Parts of equal size: their order is pinned by a case, or by nothing that mapper can see."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping

from mapper.cases.effect import effects
from mapper.cases.run import CaseResult
from mapper.compiler import Program
from mapper.diagnostics import Diagnostic, finding
from mapper.lint.programs import Attempt, Attempts
from mapper.pattern import IndexValue
from mapper.plan.family import Family, SourceFamily


def unpinned_parts(attempts: Attempts, results: list[CaseResult]) -> Iterator[Diagnostic]:
    """Yield M810 for each rule and runtime with parts of equal size that no case pins, with the case to add."""
    pinned: dict[str, set[tuple[int, int]]] = {}
    for result in results:
        pinned.setdefault(result.case.runtime, set()).update(result.pinned)
    for (runtime, number), (attempt, program) in _richest(attempts).items():
        families = [family for family in program.families if family.rule.number == number]
        equal = sorted({part for family in families for part in equal_parts(family)})
        parts = [each for each in equal if (number, each) not in pinned.get(runtime, ())]
        if parts:
            rule = families[0].rule
            hint = "\n".join(["add under `cases`:", *case_lines(attempt, program, number, parts)])
            listed = f"part{'s' if len(parts) > 1 else ''} {' and '.join(map(str, parts))}"
            yield finding(
                "M810", place=rule.place, subject=rule.text, hint=hint, severity="warning",
                parts=listed, rule=rule.text, runtime=runtime,
            )  # fmt: skip


def _richest(attempts: Attempts) -> dict[tuple[str, int], tuple[Attempt, Program]]:
    """Return, for each runtime and rule with equal parts, the program in which most leaves of the rule have them."""
    found: dict[tuple[str, int], tuple[Attempt, Program]] = {}
    leaves: dict[tuple[str, int], int] = {}
    for attempt, program in attempts.programs:
        with_equal = [family for family in program.families if equal_parts(family)] if attempt.is_plain else []
        for number, count in Counter(family.rule.number for family in with_equal).items():
            key = (attempt.runtime, number)
            if count > leaves.get(key, 0):
                leaves[key], found[key] = count, (attempt, program)
    return found


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
    lines = [f"  - config: {attempt.config}", f"    runtime: {attempt.runtime}", "    maps:"]
    seen: set[str] = set()
    for family in program.families:
        if family.rule.number != rule or family.optional or family.leaf in seen:
            continue
        seen.add(family.leaf)
        for source in family.alternatives[0]:
            if source.part in parts:
                found = effects(program, _witness(family, source))
                targets = [str(each.target) for each in found]
                value = _scalar(targets[0]) if len(targets) == 1 else json.dumps(targets)
                lines.append(f"      {_scalar(str(found[0].source))}: {value}")
    return lines


def _witness(family: Family, source: SourceFamily) -> str:
    """Return one name of the source: the first value of each index, the last of a stacked one, so that its slot shows."""
    values: Mapping[str, IndexValue] = {
        index: source.domains[index][-1 if index == family.stack else 0] for index in source.template.indices
    }
    return source.template.name(values)


def _scalar(text: str) -> str:
    return json.dumps(text) if text.startswith(("{", "*", "[")) else text
