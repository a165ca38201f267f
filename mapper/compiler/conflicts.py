"""Overlap, decided on index ranges: two rules for one source or target, a skip or keep that hides a rule's names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

from mapper.diagnostics import Diagnostic, finding
from mapper.pattern import Template, common_name
from mapper.plan.family import Family, SkipRule


def conflicts(families: Sequence[Family], skips: Sequence[SkipRule], keeps: Sequence[SkipRule]) -> list[Diagnostic]:
    """Return M311 to M314, each with a name that both sides spell as witness; one finding for a pair of rules.

    A keep may match the target of an optional rule: it holds where the checkpoint has nothing for the rule.
    """
    findings = [*_source_overlaps(families), *_target_overlaps(families)]
    findings += skip_conflicts(families, skips)
    findings += keep_conflicts(families, keeps)
    return list(findings)


def keep_conflicts(families: Sequence[Family], keeps: Sequence[SkipRule]) -> list[Diagnostic]:
    """Return M314 for every keep that also matches what a rule fills whatever the checkpoint has."""
    return list(_hidden(keeps, [(family, family.target) for family in families if not family.optional], "M314"))


def skip_conflicts(families: Sequence[Family], skips: Sequence[SkipRule]) -> list[Diagnostic]:
    """Return M313 for every skip that also matches what a rule loads."""
    return list(_hidden(skips, [(family, template) for family in families for template in source_templates(family)], "M313"))


def source_templates(family: Family) -> Iterator[Template]:
    """Yield the templates of all sources of a family, of all ways to spell them."""
    return (source.template for alternative in family.alternatives for source in alternative)


def _source_overlaps(families: Sequence[Family]) -> Iterator[Diagnostic]:
    entries = [(family, template) for family in families for template in source_templates(family)]
    seen: set[tuple[int, int]] = set()
    for (first, one), (second, other) in _pairs(entries):
        pair = (first.rule.number, second.rule.number)
        if one is other or first.number == second.number or pair in seen or _may_share(first, second):
            continue
        name = common_name(one, other)
        if name is not None:
            seen.add(pair)
            yield _overlap("M311", first, second, name)
    for family in families:
        pair = (family.rule.number, family.rule.number)
        name = _name_of_two_parts(family) if pair not in seen else None
        if name is not None:
            seen.add(pair)
            yield _overlap("M311", family, family, name)


def _may_share(first: Family, second: Family) -> bool:
    """A second reader is declared; the targets that one rule splits a source over read it together."""
    is_split = first.rule.number == second.rule.number and first.leaf == second.leaf and first.axes != second.axes
    return first.reuses or second.reuses or (is_split and any(axis.selected is not None for axis in first.axes or ()))


def _name_of_two_parts(family: Family) -> str | None:
    """Two parts of one target must not come from one tensor, or a part would be written with another's values."""
    pairs = (pair for alternative in family.alternatives for pair in combinations(alternative, 2))
    names = (common_name(one.template, other.template) for one, other in pairs)
    return next((name for name in names if name is not None), None)


def _target_overlaps(families: Sequence[Family]) -> Iterator[Diagnostic]:
    seen: set[tuple[int, int]] = set()
    for (first, one), (second, other) in _pairs([(family, family.target) for family in families]):
        pair = (first.rule.number, second.rule.number)
        appends = first.append_axis is not None or second.append_axis is not None
        name = common_name(one, other) if pair not in seen and not appends else None
        if name is not None:
            seen.add(pair)
            yield _overlap("M312", first, second, name)


def _pairs(entries: list[tuple[Family, Template]]) -> Iterator[tuple[tuple[Family, Template], tuple[Family, Template]]]:
    """Yield the pairs of templates that could share a name: equally many segments, and a last segment in common."""
    buckets: dict[tuple[int, str], list[int]] = {}
    for position, (_, template) in enumerate(entries):
        last = template.segments[-1]
        assert not isinstance(last, str), "sources and targets have no wildcards"
        for text in last.texts:
            buckets.setdefault((len(template.segments), text), []).append(position)
    done: set[tuple[int, int]] = set()
    for bucket in buckets.values():
        for pair in combinations(bucket, 2):
            if pair not in done:
                done.add(pair)
                yield entries[pair[0]], entries[pair[1]]


def _hidden(rules: Sequence[SkipRule], entries: list[tuple[Family, Template]], code: str) -> Iterator[Diagnostic]:
    for rule in rules:
        for family, template in entries:
            name = next((name for each in rule.templates if (name := common_name(each, template)) is not None), None)
            if name is not None:
                yield finding(
                    code, place=rule.place, subject=name, name=name, related=[("the rule", family.rule.place)],
                )  # fmt: skip
                break


def _overlap(code: str, first: Family, second: Family, name: str) -> Diagnostic:
    return finding(code, place=second.rule.place, subject=name, name=name, related=[("the other rule", first.rule.place)])
