import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from mapper.expressions import Expression, ExpressionError
from mapper.pattern import (
    Bindings,
    IndexValue,
    Pattern,
    PatternError,
    Template,
    below,
    bind,
    common_name,
    instantiate,
    join,
    parse,
    under,
)

QUICK = settings(deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
THOROUGH = settings(QUICK, max_examples=5 * settings().max_examples)

SMALL: dict[str, tuple[IndexValue, ...]] = {"i": (0, 1), "j": (1, 0), "w": ("a", "b"), "none": ()}
LARGE: dict[str, tuple[IndexValue, ...]] = {"i": tuple(range(9, 13)), "j": (2, 0, 1), "w": ("a", "b", "ab", "a1")}


@dataclass(frozen=True)
class Bound:
    """Index values as an expression sees them."""

    bindings: Bindings

    def value(self, name: str) -> object:
        if name not in self.bindings:
            raise ExpressionError(f"{name!r} is not known")
        return self.bindings[name]

    def call(self, name: str, argument: object) -> object:
        raise ExpressionError(f"{name!r} is not known")


def value_of(expression: Expression, bindings: Bindings) -> object:
    return expression.evaluate(Bound(bindings))


def bound(text: str, domains: dict[str, tuple[IndexValue, ...]] = SMALL) -> Template:
    return bind(parse(text), value_of, domains)


# --- the slow model: every assignment of index values, one after the other ------------------------------------------------


def indices_in(text: str) -> list[str]:
    return list(dict.fromkeys(re.findall(r"\b(?:i|j|w|none)\b", " ".join(re.findall(r"\{[^}]*\}", text)))))


def assignments(text: str, domains: dict[str, tuple[IndexValue, ...]]) -> Iterator[Bindings]:
    """Every assignment, the last index running fastest."""
    indices = indices_in(text)
    for values in product(*(domains[index] for index in indices)):
        yield dict(zip(indices, values, strict=True))


def spelled(text: str, values: Bindings) -> str:
    """The pattern as an f-string reads it; wildcards stay."""
    return str(eval(f"f{text!r}", {}, dict(values)))


def regex_of(fixed: str) -> str:
    """The names, each with a dot behind it, that a pattern without placeholders spells."""
    wild = {"*": r"[^.]+\.", "**": r"(?:[^.]+\.)*"}
    return "".join(wild.get(part, re.escape(part) + r"\.") for part in fixed.split("."))


@cache
def regexes(text: str) -> tuple[tuple[Bindings, re.Pattern[str]], ...]:
    return tuple((values, re.compile(regex_of(spelled(text, values)))) for values in assignments(text, SMALL))


def readings(text: str, name: str) -> list[Bindings]:
    """The assignments under which the pattern spells the name."""
    return [values for values, regex in regexes(text) if regex.fullmatch(name + ".")]


def is_ambiguous(text: str, domains: dict[str, tuple[IndexValue, ...]]) -> bool:
    """Whether two assignments of one segment's indices spell one text."""
    for segment in text.split("."):
        texts = [spelled(segment, values) for values in assignments(segment, domains)]
        if len(set(texts)) < len(texts):
            return True
    return False


def names_over(*texts: str, limit: int = 3000) -> list[str]:
    """All names over the words of the patterns and `x`, as deep as the limit lets them be, 6 segments at most."""
    parts = [part for text in texts for part in text.split(".") if "*" not in part]
    alphabet = sorted({spelled(part, values) for part in parts for values in assignments(part, SMALL)} | {"x"})
    names: list[str] = []
    for depth in range(1, 7):
        if len(names) + len(alphabet) ** depth > limit:
            break
        names += [".".join(each) for each in product(alphabet, repeat=depth)]
    return names


FIXED = st.sampled_from(["a", "b", "0", "1", "a_x", "w_1", "01", "x"])
PLACED = st.sampled_from(
    ["{i}", "{j}", "{w}", "{i + 1}", "{w}_x", "w_{j}", "{i}{j}", "{w}_{i}", "{13 - i}", "{i}_{i}", "l{j}{w}"]
)


def patterns(*, wildcards: bool, max_size: int = 4) -> st.SearchStrategy[str]:
    segments = st.one_of(FIXED, PLACED, st.sampled_from(["*", "**"])) if wildcards else st.one_of(FIXED, PLACED)
    return st.lists(segments, min_size=1, max_size=max_size).map(".".join)


# --- names --------------------------------------------------------------------------------------------------------------


@THOROUGH
@given(patterns(wildcards=False))
@example("{i}{i + 1}.{w}{j}")
@example("l{w}{j}.{i + 3}")
def test_names_and_match_are_inverse(text: str) -> None:
    assume(not is_ambiguous(text, LARGE))
    template = bound(text, LARGE)
    expected = list(assignments(text, LARGE))
    names = template.names(LARGE)
    assert names == [spelled(text, values) for values in expected]
    assert [template.match(name) for name in names] == expected
    assert [template.name(values) for values in expected] == names
    for name in (f"{names[0]}.x", f"x.{names[0]}", names[0].rpartition(".")[0], names[0] + "0", ""):
        assert (template.match(name) is not None) == (name in names)


@QUICK
@given(patterns(wildcards=False), st.data())
def test_names_of_chosen_values_come_with_the_last_index_fastest(text: str, data: st.DataObject) -> None:
    assume(not is_ambiguous(text, LARGE))
    template = bound(text, LARGE)
    chosen = {index: data.draw(st.lists(st.sampled_from(LARGE[index]), max_size=3)) for index in template.indices}
    combinations = product(*(chosen[index] for index in template.indices))
    expected = [spelled(text, dict(zip(template.indices, values, strict=True))) for values in combinations]
    assert instantiate(template, [chosen[index] for index in template.indices]) == expected
    assert list(template.indices) == indices_in(text)


@THOROUGH
@given(patterns(wildcards=True), st.data())
def test_match_gives_index_values_under_which_the_name_is_spelled(text: str, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(names_over(text)))
    if data.draw(st.booleans()):
        fixed = spelled(text, data.draw(st.sampled_from(list(assignments(text, SMALL)))))
        name = ".".join(each for part in fixed.split(".") for each in data.draw(filling(part)))
        assume(name)
    found, expected = bound(text).match(name), readings(text, name)
    assert (found is None) == (not expected)
    assert found is None or found in expected


def filling(part: str) -> st.SearchStrategy[list[str]]:
    """What a segment may spell."""
    texts = st.sampled_from(["a", "0", "x"])
    return st.lists(texts, max_size=2) if part == "**" else texts.map(lambda text: [text]) if part == "*" else st.just([part])


@given(st.lists(st.sampled_from(["{i}", "{w}", "{j}", "a", "1", "{i // 2}", "{i * 0}"]), min_size=1, max_size=3).map("".join))
def test_segment_is_refused_exactly_when_two_values_spell_one_text(text: str) -> None:
    if is_ambiguous(text, LARGE):
        with pytest.raises(PatternError, match=r" both spell '\w+'$"):
            bound(text, LARGE)
    else:
        assert bound(text, LARGE).segments


# --- relations ----------------------------------------------------------------------------------------------------------


@settings(QUICK, max_examples=2 * settings().max_examples)
@given(patterns(wildcards=True, max_size=3), patterns(wildcards=True, max_size=3))
@example("{i}.{i}", "{j}.{1 - j}")
@example("{i}.{i}", "{j}.1")
@example("{i}.{i}", "{j}.0")
@example("{i}.{i}", "1.{j}")
@example("{i}.{i}", "{j}.**.1")
@example("**.{i}.**.{i}", "0.**.1")
@example("**.{w}_x", "**.{w}.*")
@example("**", "**")
def test_common_name_is_spelled_by_both_and_is_found_where_there_is_one(first: str, second: str) -> None:
    one, other = bound(first), bound(second)
    for name in (common_name(one, other), common_name(other, one)):
        if name is None:
            assert not [each for each in names_over(first, second) if readings(first, each) and readings(second, each)]
        else:
            assert readings(first, name)
            assert readings(second, name)


@QUICK
@given(patterns(wildcards=False), patterns(wildcards=False))
def test_templates_without_wildcards_have_a_common_name_exactly_when_their_lists_meet(first: str, second: str) -> None:
    one, other = bound(first), bound(second)
    shared = set(one.names(SMALL)) & set(other.names(SMALL))
    name = common_name(one, other)
    assert (name in shared) if shared else (name is None)


@QUICK
@given(patterns(wildcards=True), st.data())
@example("{i}.{i}.{j}", None)
@example("**.{w}.**.{w}", None)
def test_below_spells_what_follows_the_prefix(text: str, data: st.DataObject | None) -> None:
    template, names = bound(text), names_over(text, limit=400)
    choices = [name for name in names_over(text, limit=60) if name]
    for prefix in choices if data is None else [data.draw(st.sampled_from(choices))]:
        inner = below(template, prefix)
        for name in names:
            found = [values for each in inner if (values := each.match(name)) is not None]
            assert bool(found) == bool(readings(text, f"{prefix}.{name}")), (prefix, name)
            for values in found:
                assert any(values.items() <= reading.items() for reading in readings(text, f"{prefix}.{name}"))


@QUICK
@given(patterns(wildcards=False), st.data())
def test_names_below_are_the_names_without_the_prefix(text: str, data: st.DataObject) -> None:
    template = bound(text)
    names = template.names(SMALL)
    prefix = data.draw(st.sampled_from(names)).rpartition(".")[0]
    assume(prefix)
    (inner,) = below(template, prefix)
    assert inner.names(SMALL) == [name.removeprefix(f"{prefix}.") for name in names if name.startswith(f"{prefix}.")]


@QUICK
@given(patterns(wildcards=True), patterns(wildcards=False).filter(lambda text: "{" not in text))
def test_below_undoes_under(text: str, prefix: str) -> None:
    template = bound(text)
    mounted = under(template, prefix)
    assert below(mounted, prefix) == (template,)
    for name in names_over(text, limit=60):
        assert mounted.match(f"{prefix}.{name}") == template.match(name)
        assert mounted.match(name) is None or readings(f"{prefix}.{text}", name)


# --- corners ------------------------------------------------------------------------------------------------------------


def test_scope_inside_an_index_keeps_only_its_value() -> None:
    (inner,) = below(bound("layers.{i}.{w}.layer_{i}"), "layers.1")
    assert (inner.names(SMALL), inner.indices) == (["a.layer_1", "b.layer_1"], ("w",))
    assert below(bound("layers.{i}.weight"), "layers.7") == ()
    assert below(bound("{i}.{i}.weight"), "0.1") == ()
    assert below(bound("model.norm"), "model.norm") == ()


def test_empty_domain_spells_nothing() -> None:
    template = bound("layers.{none}.weight")
    assert template.names(SMALL) == []
    assert common_name(template, bound("**")) is None


def test_template_prints_as_a_range() -> None:
    assert str(bound("layers.{i}.{w}_x.*.**", LARGE)) == "layers.{i: 9...12}.{w: a_x...a1_x}.*.**"


def test_indices_of_one_placeholder_come_in_order_of_their_names() -> None:
    template = bound("{j + 2 * i}")
    assert (template.indices, template.names(SMALL)) == (("i", "j"), ["1", "0", "3", "2"])


def test_join_lays_segments_end_to_end() -> None:
    whole = join(parse("model.{i}"), parse("{w}.weight"))
    assert whole.segments == parse("model.{i}").segments + parse("{w}.weight").segments
    assert str(whole) == "model.{i}.{w}.weight"
    assert join(parse(""), parse("a")) == parse("a") == join(parse("a"), parse(""))


def test_pattern_knows_its_names() -> None:
    pattern = parse("a.{i + offset}.{f(j)}_{leaf}.**")
    assert pattern.names == {"i", "offset", "j", "leaf"}
    assert [each.column for each in pattern.placeholders] == [2, 15, 22]
    assert pattern.has_wildcards
    assert not Pattern("", ()).has_wildcards


@pytest.mark.parametrize(
    ("text", "column", "message"),
    [
        ("a..b", 2, "a segment between two dots is empty"),
        (".a", 0, "a segment between two dots is empty"),
        ("a.", 2, "a segment between two dots is empty"),
        ("a.{i", 2, "'{' is never closed"),
        ("a.{i.b", 2, "'{' is never closed"),
        ("{i}.b*", 5, "'*' stands for a whole segment, not for a part of one"),
        ("a.***", 2, "'*' stands for a whole segment, not for a part of one"),
        ("*{i}", 0, "'*' stands for a whole segment, not for a part of one"),
        ("a.b}", 3, "'}' cannot stand in a name"),
        ("a}.b.{i}", 1, "'}' cannot stand in a name"),
        ("{i}.a b", 5, "' ' cannot stand in a name"),
        ("a.{}", 3, "in '{}': expected an expression, found nothing"),
        ("a.{i / 2}.b", 3, "in '{i / 2}': '/' stands in dims only; use '//' or ceil_div"),
        ("a.{  i / 2}.b", 5, "in '{  i / 2}': '/' stands in dims only; use '//' or ceil_div"),
        ("a.{1 + i.j}", 7, "in '{1 + i.j}': attributes such as '.j' are not part of the language"),
        ("{i}.{i}.{a b}", 11, "in '{a b}': 'a b' is not an expression"),
    ],
)
def test_text_that_is_no_pattern_is_refused_with_its_column(text: str, column: int, message: str) -> None:
    with pytest.raises(PatternError) as caught:
        parse(text)
    assert (caught.value.message, caught.value.column) == (message, column)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("text", "domains", "column", "message"),
    [
        ("a.{i}{j}", {"i": (1, 11), "j": (1, 11)}, 0, "(1, 11) and (11, 1) of i, j both spell '111'"),
        ("a.{i // 2}", {"i": (0, 1)}, 0, "(0,) and (1,) of i both spell '0'"),
        ("a.x{w}", {"w": (1, "1")}, 0, "(1,) and ('1',) of w both spell 'x1'"),
        ("a.{i - 1}", {"i": (0, 1)}, 2, "'{i - 1}' is -1, expected 0 or more"),
        ("a.b_{null}", {}, 4, "'{null}' is None, expected an integer or a word"),
        ("a.{i == 1}", {"i": (0,)}, 2, "'{i == 1}' is False, expected an integer or a word"),
        ("a.{1.5}", {}, 2, "'{1.5}' is 1.5, expected an integer or a word"),
        ("a.{w}", {"w": ("b.c",)}, 2, "'{w}' is 'b.c', expected a word without dots"),
        ("a.x{w}", {"w": ("b.",)}, 3, "'{w}' is 'b.', expected a word without dots"),
        ("a.{w}.b", {"w": ("",)}, 2, "'{w}' leaves the segment empty"),
    ],
)
def test_placeholder_that_spells_no_name_is_refused(
    text: str, domains: dict[str, tuple[IndexValue, ...]], column: int, message: str
) -> None:
    with pytest.raises(PatternError) as caught:
        bound(text, domains)
    assert (caught.value.message, caught.value.column) == (message, column)


def test_empty_word_may_end_a_segment() -> None:
    assert bound("gate_up_proj{w}", {"w": ("", "_scale")}).names({"w": ["", "_scale"]}) == [
        "gate_up_proj",
        "gate_up_proj_scale",
    ]
