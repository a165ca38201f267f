from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mapper.compiler.conflicts import conflicts, skip_conflicts
from mapper.diagnostics import Diagnostic, Place
from mapper.plan.family import Family, RuleInfo, SkipRule, SourceFamily
from tests.test_pattern import SMALL, bound, patterns, readings, spelled

THOROUGH = settings(max_examples=3 * settings().max_examples, deadline=None)

Sources = tuple[tuple[str, ...], ...]
"""The patterns of a family's sources, per alternative."""


def family_of(number: int, rule: int, target: str, sources: Sources) -> Family:
    info = RuleInfo(rule, target, Place("spec.yaml", rule + 1, 1), "")
    alternatives = tuple(
        tuple(SourceFamily(bound(text), SMALL, part, frozenset()) for part, text in enumerate(alternative))
        for alternative in sources
    )
    return Family(number, info, "", bound(target), SMALL, {}, None, None, alternatives, "all", False, False, None)


def rules_of(texts: list[str], first_line: int) -> list[SkipRule]:
    return [
        SkipRule(number, text, "", (bound(text),), Place("spec.yaml", first_line + number, 1))
        for number, text in enumerate(texts)
    ]


def names_of(text: str) -> set[str]:
    return set(bound(text).names(SMALL))


def source_names(sources: Sources) -> set[str]:
    return {name for alternative in sources for text in alternative for name in names_of(text)}


def pair_of(finding: Diagnostic) -> tuple[int, int]:
    """The numbers of the two rules that a finding is about, the earlier one first."""
    ((_, other),) = finding.related
    assert finding.place is not None
    return other.line - 1, finding.place.line - 1


@st.composite
def programs(draw: st.DrawFn) -> list[tuple[int, str, Sources]]:
    """Families as (rule, target, sources); a rule may have several."""
    texts = patterns(wildcards=False, max_size=3)
    alternatives = st.lists(st.lists(texts, min_size=1, max_size=2).map(tuple), min_size=1, max_size=2).map(tuple)
    families = []
    for rule in range(draw(st.integers(1, 3))):
        families += [(rule, draw(texts), draw(alternatives)) for _ in range(draw(st.integers(1, 2)))]
    return families


def built(families: list[tuple[int, str, Sources]]) -> list[Family]:
    return [family_of(number, *each) for number, each in enumerate(families)]


SPLIT_BY_ALTERNATIVE = [(0, "a", (("{i}.a",), ("{i}.b",))), (1, "b", (("x",), ("1.b",)))]


@THOROUGH
@given(programs())
@example(SPLIT_BY_ALTERNATIVE)
def test_sources_of_two_rules_are_reported_exactly_where_their_names_meet(families: list[tuple[int, str, Sources]]) -> None:
    expected = set()
    for (first, _, one), (second, _, other) in combinations(families, 2):
        if source_names(one) & source_names(other):
            expected.add((first, second))
    for rule, _, sources in families:
        if any(names_of(a) & names_of(b) for alternative in sources for a, b in combinations(alternative, 2)):
            expected.add((rule, rule))
    found = [each for each in conflicts(built(families), (), ()) if each.code == "M311"]
    assert sorted(map(pair_of, found)) == sorted(expected)
    for each in found:
        for rule in pair_of(each):
            assert any(each.subject in source_names(sources) for number, _, sources in families if number == rule)
        assert each.message == f"two rules map the source {each.subject!r}"


@THOROUGH
@given(programs())
def test_targets_of_two_rules_are_reported_exactly_where_their_names_meet(families: list[tuple[int, str, Sources]]) -> None:
    expected = {(a, b) for (a, one, _), (b, other, _) in combinations(families, 2) if names_of(one) & names_of(other)}
    found = [each for each in conflicts(built(families), (), ()) if each.code == "M312"]
    assert sorted(map(pair_of, found)) == sorted(expected)
    for each in found:
        for rule in pair_of(each):
            assert any(each.subject in names_of(target) for number, target, _ in families if number == rule)
        assert each.message == f"two rules write the target {each.subject!r}"


@THOROUGH
@given(programs(), st.lists(patterns(wildcards=True), max_size=3))
def test_skips_and_keeps_are_reported_exactly_where_they_hide_a_name_of_a_rule(
    families: list[tuple[int, str, Sources]], texts: list[str]
) -> None:
    rules = rules_of(texts, 100)
    sources = {rule: {n for r, _, each in families if r == rule for n in source_names(each)} for rule, *_ in families}
    targets = {rule: {n for r, each, _ in families if r == rule for n in names_of(each)} for rule, *_ in families}
    kinds = [
        ("M313", sources, [each for each in conflicts(built(families), rules, ()) if each.code == "M313"]),
        ("M313", sources, skip_conflicts(built(families), rules)),
        ("M314", targets, [each for each in conflicts(built(families), (), rules) if each.code == "M314"]),
    ]
    for code, names, found in kinds:
        hidden = [p for p, text in enumerate(texts) if any(readings(text, name) for each in names.values() for name in each)]
        assert [each.place.line - 100 for each in found if each.place] == hidden
        for each in found:
            assert each.code == code
            assert each.place is not None
            ((_, place),) = each.related
            assert readings(texts[each.place.line - 100], each.subject)
            assert each.subject in names[place.line - 1]


def test_names_that_look_alike_and_never_meet_are_no_conflict() -> None:
    # i and j are 0 or 1: the same text, other ranges.
    families = [(0, "layers.{i}.a", (("layers.{i}.a",),)), (1, "layers.{i + 2}.a", (("layers.{i + 2}.a",),))]
    assert conflicts(built(families), rules_of(["layers.{i + 4}.**"], 9), rules_of(["layers.{i}.b"], 9)) == []


def test_every_template_of_a_skip_counts() -> None:
    skip = SkipRule(0, "**", "", (bound("b.**"), bound("**.0.a")), Place("spec.yaml", 9, 1))
    (found,) = skip_conflicts(built([(0, "a", (("layers.{i}.a",),))]), [skip])
    assert (found.code, found.subject) == ("M313", "layers.0.a")


def test_alternatives_of_one_rule_may_share_a_source() -> None:
    assert conflicts(built([(0, "a", (("x", "y"), ("x",)))]), (), ()) == []


def test_parts_from_one_source_are_reported_once_for_a_rule_with_several_leaves() -> None:
    families = [(0, "a", (("x", "x"),)), (0, "b", (("y", "y"),))]
    (found,) = conflicts(built(families), (), ())
    assert (found.code, found.subject, pair_of(found)) == ("M311", "x", (0, 0))


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("M311", "two rules map the source '1.a'"),
        ("M312", "two rules write the target 'b.0'"),
        ("M313", "a skip also matches '0.a', which a rule loads"),
        ("M314", "a keep also matches the target 'b.0', which a rule writes"),
    ],
)
def test_conflict_is_told_with_a_witness_and_both_places(code: str, message: str) -> None:
    families = [(0, "b.{i}", (("{i}.a",),)), (4, "{w}.0", (("1.a", "c"),))]
    found = conflicts(built(families), rules_of(["**.a"], 9), rules_of(["b.*"], 9))
    (text,) = [str(each) for each in found if each.code == code]
    line, label, other = (5, "the other rule", 1) if code in ("M311", "M312") else (9, "the rule", 1)
    assert text == f"spec.yaml:{line}:1: {code} {message}\n  {label}: spec.yaml:{other}:1"


def test_a_keep_may_name_the_target_of_a_rule_whose_sources_may_be_absent() -> None:
    families = [replace(each, optional=True) for each in built([(0, "b.{i}", (("{i}.a",),))])]
    assert conflicts(families, (), rules_of(["b.*"], 9)) == []


def test_spelled_names_are_those_of_the_templates() -> None:
    # The brute force above leans on `names`; this is its own check.
    assert names_of("{i}.{w}_x") == {spelled("{i}.{w}_x", {"i": i, "w": w}) for i in (0, 1) for w in ("a", "b")}
