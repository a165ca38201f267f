"""What a config counts against what the headers hold: one finding, not one for every tensor that follows from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from mapper.compiler.families import bound
from mapper.compiler.names import Names
from mapper.compiler.ranges import range_of
from mapper.diagnostics import Diagnostic, Place, finding
from mapper.expressions import Value
from mapper.folding import fold
from mapper.pattern import IndexValue, Template, segment_indices
from mapper.plan.matching import Matching
from mapper.spec.model import Count, Index, Spec

MAX_BEYOND = 64
"""Names are looked for at the values that the index has, and at this many behind them."""

FOLLOW = frozenset({"M501", "M502"})
"""A name that is missing, and one that is unknown."""


@dataclass(frozen=True, slots=True)
class CountRule:
    """Names for each value of an index, and who says how many values there are.

    `template` runs over the index's `expected` values and over some behind them; `option` may overrule `said`.
    """

    expected: int
    said: str
    option: str
    why: str
    template: Template
    values: tuple[IndexValue, ...]
    place: Place


def count_rules(
    counts: Sequence[Count], spec: Spec, options: Mapping[str, Value], indices: Mapping[str, Index], names: Names
) -> tuple[CountRule, ...]:
    """Return the counts of a runtime with their names."""
    rules = []
    for each in counts:
        index = indices[each.index]
        values = range_of(index, names, beyond=MAX_BEYOND)
        template = bound(each.source, names, {each.index: values}, each.place)
        is_overruled = bool(each.option) and options[each.option] != spec.options[each.option].default
        said = f"the option {each.option}" if is_overruled else f"{spec.config[each.config].path} of the config"
        option = "" if is_overruled else each.option
        rules.append(CountRule(len(values) - MAX_BEYOND, said, option, each.why, template, values, each.place))
    return tuple(rules)


def rerooted_counts(rules: Sequence[CountRule], reroot: Callable[[Template], Iterable[Template]]) -> tuple[CountRule, ...]:
    """Return the rules for names under another prefix; what lies outside of it is not counted."""
    return tuple(replace(rule, template=each) for rule in rules for each in reroot(rule.template) if each.indices)


def with_counts(matching: Matching, rules: Sequence[CountRule], tensors: Iterable[str]) -> Matching:
    """Return the matching with a finding for each count that is wrong, in place of the findings that follow from it.

    A count is wrong where the checkpoint has names for the index's first values, without a gap, but for more or fewer than
    expected. It is looked for only where names are missing or unknown: what is skipped need not be there.
    """
    findings = matching.findings
    for rule in rules:
        follow = [each for each in findings if each.code in FOLLOW and rule.template.match(each.subject) is not None]
        if not follow:
            continue
        (index,) = rule.template.indices
        depth = next(number for number, segment in enumerate(rule.template.segments, 1) if index in segment_indices(segment))
        held: dict[IndexValue, str] = {}
        for name in tensors:
            read = rule.template.match(name)
            if read is not None:
                held.setdefault(read[index], ".".join(name.split(".")[:depth]))
        if len(held) != rule.expected and held.keys() == set(rule.values[: len(held)]):
            spelled = [f"{held[value]}.**" for value in sorted(held)]
            findings = (_finding(rule, spelled), *(each for each in findings if each not in follow))
    return replace(matching, findings=findings)


def _finding(rule: CountRule, held: Sequence[str]) -> Diagnostic:
    found = f"{len(held)}: {', '.join(map(str, fold(held)))}" if held else f"none like {rule.template}"
    believed = f"; with the option {rule.option}={len(held)} the checkpoint is believed" if rule.option else ""
    return finding(
        "M510",
        place=rule.place,
        subject=rule.said,
        hint=rule.why + believed,
        said=rule.said,
        expected=rule.expected,
        found=found,
    )
