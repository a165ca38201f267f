"""Texts that differ only in numbers are told as one, and nothing is lost by it."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mapper.diagnostics import Diagnostic, Place, fold_findings, render_text
from mapper.folding import fold, runs, split, unfold

words = st.sampled_from(["model", "layers", "w", "experts", "a", "", "-", "_", "é", "0", "00", "{1...2}", "٣"])
numbers = st.integers(min_value=0, max_value=13).map(str)
names = st.lists(st.one_of(words, numbers), min_size=1, max_size=6).map(".".join)
glued = st.lists(st.one_of(words, numbers), min_size=1, max_size=6).map("".join)
texts = st.lists(st.one_of(names, glued, st.text(max_size=8)), unique=True, max_size=30)


@given(texts)
@example(["9" * 19, "9" * 18, "1" + "0" * 5000])
@example(["a.1.b.1", "a.2.b.2", "a.1.b.2"])
@example(["a.01", "a.1", "a.0", "a.00"])
def test_unfolding_gives_exactly_the_texts_each_once(given_texts):
    unfolded = list(unfold(fold(given_texts)))
    assert sorted(unfolded) == sorted(given_texts)


@given(texts)
def test_folds_count_what_they_stand_for(given_texts):
    assert sum(each.num_texts for each in fold(given_texts)) == len(given_texts)


@given(st.lists(st.one_of(names, glued), max_size=20))
def test_repeated_texts_are_folded_once(given_texts):
    assert fold([*given_texts, *given_texts]) == fold(given_texts)


@given(texts)
def test_splitting_is_undone_by_laying_words_and_numbers_end_to_end(given_texts):
    for text in given_texts:
        parts, found = split(text)
        assert len(parts) == len(found) + 1
        assert "".join(part + number for part, number in zip(parts, [*map(str, found), ""], strict=True)) == text


@given(st.lists(st.sampled_from(range(4)), min_size=1), st.lists(st.sampled_from(range(5)), min_size=1))
def test_a_full_product_is_one_fold(first, second):
    product = {f"layers.{one}.experts.{other}.w" for one in first for other in second}
    assert len(fold(sorted(product))) == 1


def test_a_whole_model_is_one_line_per_kind_of_name():
    experts = [f"model.layers.{layer}.mlp.experts.{expert}.up.w" for layer in range(3, 61) for expert in range(256)]
    assert [str(each) for each in fold([*experts, "lm_head.weight"])] == [
        "model.layers.{3...60}.mlp.experts.{0...255}.up.w",
        "lm_head.weight",
    ]


def test_what_is_no_product_stays_exact():
    assert [str(each) for each in fold(["a.1.b.1", "a.2.b.2", "a.1.b.2"])] == ["a.1.b.{1, 2}", "a.2.b.2"]


def test_leading_zeros_are_kept():
    folded = fold(["model-00001-of-00003", "model-00002-of-00003"])
    assert [str(each) for each in folded] == ["model-00001-of-00003", "model-00002-of-00003"]


@pytest.mark.parametrize(
    ("given_numbers", "spelled"),
    [([], ""), ([7], "7"), ([3, 4], "3, 4"), ([5, 4, 3, 4], "3...5"), ([0, 1, 2, 9, 11, 12, 13], "0...2, 9, 11...13")],
)
def test_runs_of_three_or_more_are_shortened(given_numbers, spelled):
    assert runs(given_numbers) == spelled


# --- findings -------------------------------------------------------------------------------------------------------

HERE = Place("a.yaml", 3, 5, "  - x: y")


def missing(layer: int, **given_fields) -> Diagnostic:
    name = f"layers.{layer}.w"
    return Diagnostic("M501", f"no tensor {name!r}", **{"place": HERE, "subject": name, **given_fields})


def test_findings_that_differ_in_numbers_are_one_with_their_count():
    (one,) = fold_findings([missing(layer) for layer in range(1200)])
    assert one.message == "no tensor 'layers.{0...1199}.w' (1,200 findings)"
    assert one.subject == "layers.{0...1199}.w"
    assert render_text(one).splitlines()[0] == "a.yaml:3:5: M501 no tensor 'layers.{0...1199}.w' (1,200 findings)"


def test_a_finding_that_stays_alone_is_unchanged():
    alone = missing(4, hint="did you mean 'layers.5.w'?")
    assert fold_findings([alone]) == [alone]


def test_findings_of_other_codes_places_and_words_stay_apart():
    other_place = Place("a.yaml", 9, 5)
    given_findings = [
        missing(0),
        missing(1, place=other_place),
        Diagnostic("M502", "no tensor 'layers.2.w'", HERE, "layers.2.w"),
        Diagnostic("M501", "no tensor 'layers.3.v'", HERE, "layers.3.v"),
        missing(2, related=(("the rule", other_place),)),
    ]
    assert fold_findings(given_findings) == given_findings


def test_hints_are_folded_with_their_findings():
    (one,) = fold_findings([missing(layer, hint=f"the checkpoint has 'layers.{layer}.W'") for layer in range(3)])
    assert one.hint == "the checkpoint has 'layers.{0...2}.W'"
    (one,) = fold_findings([missing(0), missing(1, hint="this"), missing(2, hint="that")])
    assert one.hint == "for one of them: this"


@given(st.lists(st.integers(0, 9), min_size=1), st.sampled_from([HERE, None]))
def test_folded_findings_count_all_of_them(layers, place):
    folded = fold_findings([missing(layer, place=place) for layer in layers])
    counts = [int(each.message.rpartition("(")[2].split()[0]) if "findings)" in each.message else 1 for each in folded]
    assert sum(counts) == len(layers)
