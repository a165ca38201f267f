"""Rules that append slots: each learns behind which families of earlier rules its own slots follow."""

from __future__ import annotations

from dataclasses import replace

from mapper.diagnostics import MapperError, finding
from mapper.pattern import common_name
from mapper.plan.family import Family


def appended(families: list[Family]) -> tuple[Family, ...]:
    """Return the families with `after` filled in; raises MapperError where there is nothing to append to."""
    finished: list[Family] = []
    for family in families:
        if family.append_axis is None:
            finished.append(family)
            continue
        before: dict[int, Family] = {}
        for other in finished:
            if other.rule.number < family.rule.number and common_name(other.target, family.target) is not None:
                before.setdefault(other.rule.number, other)
        if not before:
            problem = f"the rule appends to {family.target}, which no rule before it writes"
            raise MapperError([finding("M316", place=family.rule.place, problem=problem)])
        finished.append(replace(family, after=tuple(before.values())))
    return tuple(finished)
