"""Heads tied to the embedding, or not: where file and config disagree, nothing is guessed and nothing is overwritten."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mapper.diagnostics import MapperError
from mapper.load import Loader
from tests.bugs.harness import Case, case, load, refusal, save
from tests.loads import Tensors, all_raw, told

HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"
TIED = """
config: {{optional: {{tie_word_embeddings: false}}}}
runtimes:
  own:
    skip:
      - {{source: lm_head.weight, copy_of: {embed}, why: a stored copy of the tied embedding, when: tie_word_embeddings}}
    rules:
      - {{target: {embed}, dims: {{vocab: 8, hidden: 4}}}}
      - {{target: {head}, source: lm_head.weight, dims: {{vocab: 8, hidden: 4}}, when: not tie_word_embeddings}}
      - {{target: {head}, tie: {embed}, when: tie_word_embeddings}}
"""


def spec(embed: str = EMBED, head: str = HEAD) -> str:
    return TIED.format(embed=embed, head=head)


def load_by_name(sources: Tensors, targets: Tensors) -> None:
    """Write each tensor to the parameter of its name, as the peer did."""
    for name, source in sources.items():
        targets[name].copy_(source)


def mirror_the_embedding(sources: Tensors, targets: Tensors) -> None:
    """Write each tensor to the parameter of its name, and the embedding to the head as well, as the peer did."""
    for name, source in sources.items():
        targets[name].copy_(source)
        if name == EMBED:
            targets[HEAD].copy_(source)


@case("ti-01")
def test_stored_copy_of_a_tied_head_is_accepted_and_another_head_refused(bug: Case, tmp_path: Path) -> None:
    sources, targets = bug.sources(), bug.targets()
    with pytest.raises(KeyError, match=HEAD):
        load_by_name(sources, bug.targets())

    program = bug.program(tmp_path, spec())
    equal = {**sources, HEAD: sources[EMBED].clone()}
    report = load(program, tmp_path, equal, targets)
    assert report.skipped_by == {HEAD: 1}
    assert all_raw(targets) == {EMBED: all_raw(sources)[EMBED]}

    untouched = bug.targets()
    before = all_raw(untouched)
    with pytest.raises(MapperError) as caught:
        Loader(program, untouched).load(save(tmp_path, sources))
    assert [(each.code, each.message) for each in caught.value.diagnostics] == [
        ("M511", f"'{HEAD}' is skipped as a copy of '{EMBED}', and 32 of 32 elements differ")
    ]
    assert all_raw(untouched) == before


@case("ti-02")
def test_head_of_its_own_is_never_overwritten_by_the_embedding(bug: Case, tmp_path: Path) -> None:
    sources, wrong = bug.sources(), bug.targets()
    mirror_the_embedding(dict(reversed(sources.items())), wrong)
    assert torch.equal(wrong[HEAD], sources[EMBED])

    for ordered in (sources, dict(reversed(sources.items()))):
        targets = bug.targets()
        load(bug.program(tmp_path, spec()), tmp_path, ordered, targets)
        assert all_raw(targets) == all_raw(sources)
    mirrored = (
        spec()
        + "      - {target: lm_head.weight, source: model.embed_tokens.weight, dims: {vocab: 8, hidden: 4}, reuse: true}\n"
    )
    with pytest.raises(MapperError) as caught:
        bug.program(tmp_path, mirrored)
    assert told(caught.value.diagnostics) == [("M312", HEAD)]


OF_A_COMPOSITE = "model.language_model.embed_tokens.weight"


@case("ti-03")
def test_head_that_the_config_wants_and_no_file_has_is_named_with_the_reason(bug: Case, tmp_path: Path) -> None:
    sources, with_head, without = bug.sources(), bug.targets("with a head"), bug.targets("without")
    program = bug.program(tmp_path, spec(OF_A_COMPOSITE))
    (found,) = refusal(program, tmp_path, sources, with_head)
    assert (found.code, found.subject) == ("M501", HEAD)
    assert found.hint == "the rule is in force because `not tie_word_embeddings` (tie_word_embeddings is false)"

    headless = spec(OF_A_COMPOSITE).partition("      - {target: lm_head.weight")[0]
    load(bug.program(tmp_path, headless), tmp_path, sources, without)
    assert all_raw(without) == all_raw(sources)


@case("ti-07")
def test_key_that_says_whether_a_head_is_tied_is_found_at_both_levels_and_a_conflict_told(bug: Case, tmp_path: Path) -> None:
    sources, text = bug.sources(), spec("embed_tokens.weight", "head")
    for form in ("inner", "root"):
        targets = bug.targets()
        load(bug.program(tmp_path, text, config=bug["config"][form]), tmp_path, sources, targets)
        assert all_raw(targets) == {
            "embed_tokens.weight": all_raw(sources)["embed_tokens.weight"],
            "head": all_raw(sources)[HEAD],
        }
    with pytest.raises(MapperError) as caught:
        bug.program(tmp_path, text, config=bug["config"]["conflict"])
    assert [(each.code, each.message) for each in caught.value.diagnostics] == [
        ("M308", "the config says tie_word_embeddings: True at the root, and False in text_config")
    ]


@case("ti-08")
def test_head_without_elements_is_absent_for_a_tie_and_wrong_otherwise(bug: Case, tmp_path: Path) -> None:
    sources, targets = bug.sources(), bug.targets()
    with pytest.raises(RuntimeError, match="must match the size"):
        load_by_name(sources, bug.targets())

    text = spec("embed_tokens.weight")
    report = load(bug.program(tmp_path, text), tmp_path, sources, targets)
    assert report.skipped_by == {HEAD: 1}
    assert torch.equal(targets[HEAD], sources["embed_tokens.weight"])
    untied = bug.program(tmp_path, text, config={"tie_word_embeddings": False})
    assert told(refusal(untied, tmp_path, sources, bug.targets())) == [("M503", HEAD)]
