"""Draft models: what they share with their target, which layers are theirs, and rules that one of two copies lacked."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mapper.layout import Layout
from tests.bugs.harness import Case, case, load, refusal, save, tensors
from tests.loads import Tensors, all_raw, raw, told

V4_DRAFT = """
config: {required: [num_hidden_layers, num_nextn_predict_layers]}
index: {layer: {first: num_hidden_layers, count: num_nextn_predict_layers}}
runtimes:
  own:
    rules:
      - target: model.embed_tokens.weight
        any_of: [{source: mtp.0.emb.tok_emb.weight}, {source: embed.weight}]
        others: skip
      - target: model.layers.{layer}.shared_head.head.weight
        any_of: [{source: "mtp.{layer - num_hidden_layers}.head.weight"}, {source: head.weight}]
        others: skip
      - target: model.layers.{layer}.e_proj.weight
        source: mtp.{layer - num_hidden_layers}.e_proj.weight
"""
V4_MAIN = """
runtimes:
  own:
    skip: [{source: mtp.**, why: draft layers are loaded by the draft model}]
    rules:
      - {target: model.embed_tokens.weight, source: embed.weight}
      - {target: lm_head.weight, source: head.weight}
"""


def load_mtp_names_only(sources: Tensors, targets: Tensors) -> list[str]:
    """Load as the peer did: names that do not start with mtp are skipped. Return the targets that nothing filled."""
    filled = {f"model.layers.2.{name.removeprefix('mtp.0.')}" for name in sources if name.startswith("mtp.")}
    return sorted(targets.keys() - filled)


@case("sd-01")
def test_a_draft_without_a_head_takes_the_one_of_the_model(bug: Case, tmp_path: Path) -> None:
    sources, targets = bug.sources(), bug.targets("draft")
    head = "model.layers.2.shared_head.head.weight"
    assert load_mtp_names_only(sources, targets) == ["model.embed_tokens.weight", head]

    draft, main = (bug.program(tmp_path, text) for text in (V4_DRAFT, V4_MAIN))
    load(draft, tmp_path, sources, targets)
    expected = {
        "model.embed_tokens.weight": sources["embed.weight"],
        head: sources["head.weight"],
        "model.layers.2.e_proj.weight": sources["mtp.0.e_proj.weight"],
    }
    assert all_raw(targets) == all_raw(expected)
    of_main = bug.targets("main")
    load(main, tmp_path, sources, of_main)
    assert raw(of_main["lm_head.weight"]) == raw(sources["head.weight"])  # one source, two models

    own = tensors({"mtp.0.head.weight": "BF16[8,4] all 7"})
    again = bug.targets("draft")
    load(draft, tmp_path, sources | own, again)
    assert all_raw(again) == all_raw({**expected, head: own["mtp.0.head.weight"]})
    without = {name: each for name, each in sources.items() if name != "head.weight"}
    assert told(refusal(draft, tmp_path, without, bug.targets("draft"))) == [("M501", "mtp.0.head.weight")]


MAIN_OF_TWO = """
config: {required: [num_hidden_layers, num_nextn_predict_layers]}
options: {draft_layers: {default: null}}
let: {num_drafts: num_nextn_predict_layers if draft_layers is null else draft_layers}
index:
  layer: {count: num_hidden_layers, axis: pp}
  nextn: {first: num_hidden_layers, count: num_drafts}
runtimes:
  own:
    counts:
      - index: nextn
        source: layers.{nextn}.**
        config: num_nextn_predict_layers
        option: draft_layers
        why: draft layers follow
    skip: [{source: "layers.{nextn}.**", why: draft layers are loaded by the draft model}]
    rules: [{copy: ["layers.{layer}.input_layernorm.weight"]}]
"""


def load_known_layers(sources: Tensors, targets: Tensors, num_layers: int, num_drafts: int) -> None:
    """Load as the peer did: layers of the draft are skipped by their number, the others are looked up."""
    for name, tensor in sources.items():
        if not num_layers <= int(name.split(".")[1]) < num_layers + num_drafts:
            targets[name].copy_(tensor)


@case("sd-02")
def test_layers_behind_the_model_are_counted_and_those_behind_the_drafts_are_an_error(bug: Case, tmp_path: Path) -> None:
    sources, config = bug.sources(), bug["config"]
    stray = "layers.5.input_layernorm.weight"
    for num_drafts, lost in zip(config["num_nextn_predict_layers"], ("layers.2.eh_proj.weight", stray), strict=True):
        with pytest.raises(KeyError, match=lost):
            load_known_layers(sources, bug.targets(), config["num_hidden_layers"], num_drafts)

    off, three = (
        bug.program(tmp_path, MAIN_OF_TWO, config={**config, "num_nextn_predict_layers": each})
        for each in config["num_nextn_predict_layers"]
    )
    without_stray = {name: each for name, each in sources.items() if name != stray}
    (finding,) = off.match(save(tmp_path, without_stray)).findings
    assert finding.message == "num_nextn_predict_layers of the config is 0, and the checkpoint has 1: layers.2.**"
    assert told(refusal(three, tmp_path, sources, bug.targets())) == [("M502", stray)]

    # The count stands in the report, once it is said how many layers the drafts are.
    said = bug.program(tmp_path, MAIN_OF_TWO, config={**config, "num_nextn_predict_layers": 0}, options={"draft_layers": 1})
    targets = bug.targets()
    report = load(said, tmp_path, without_stray, targets)
    assert report.skipped_by == {"layers.{nextn}.**": 1}
    assert all_raw(targets) == all_raw({name: sources[name] for name in targets})


EAGLE = """
config: {required: [method]}
runtimes:
  own:
    mesh: vllm
KEEP    rules:
      - {target: layers.0.weight}
      - {target: d2t, when: method == 'eagle3', dtype: int64, optional: true}
      - {target: lm_head.weight, dims: {vocab: 8, hidden: 4}, shard: {vocab: tp}, optional: true}
"""


def load_and_share(draft: Tensors, target: Tensors) -> Tensors:
    """Load as the peer did: whatever the draft has, its head becomes the target's."""
    return {**draft, "lm_head.weight": target["lm_head.weight"]}


@case("sd-04")
def test_a_head_of_the_drafts_own_is_loaded_and_one_it_lacks_is_kept_for_an_alias(bug: Case, tmp_path: Path) -> None:
    draft, target = bug.sources("draft"), bug.sources("target")
    assert load_and_share(draft, target)["lm_head.weight"].unique().tolist() == [1.0]
    layout = Layout(**bug["layout"])
    for rank in range(2):
        program = bug.program(tmp_path, EAGLE.replace("KEEP", ""), layout=layout, rank=rank)
        targets = bug.targets()
        load(program, tmp_path, draft, targets)
        assert targets["lm_head.weight"].unique().tolist() == [5.0]
        assert torch.equal(targets["d2t"], draft["d2t"])  # the map of a smaller vocabulary stays whole numbers, on all ranks
        assert targets["d2t"].dtype == torch.int64

    without = {name: each for name, each in draft.items() if name != "lm_head.weight"}
    program = bug.program(tmp_path, EAGLE.replace("KEEP", ""), layout=layout)
    assert told(refusal(program, tmp_path, without, bug.targets())) == [("M530", "lm_head.weight")]
    kept = "    keep: [{target: lm_head.weight, why: becomes an alias of the target model's}]\n"
    shared = EAGLE.replace("KEEP", kept).replace(
        "      - {target: lm_head.weight, dims: {vocab: 8, hidden: 4}, shard: {vocab: tp}, optional: true}\n", ""
    )
    report = load(bug.program(tmp_path, shared, layout=layout), tmp_path, without, bug.targets())
    assert set(report.kept) == {"lm_head.weight"}


SHARED = """
runtimes:
  own:
    mesh: vllm
    rules:
      - target: draft.embed_tokens.weight
        any_of: [{source: draft.embed.weight}, {source: embed.weight}]
        others: skip
        dims: {vocab: 8, hidden: 4}
        shard: {vocab: tp}
"""


def shares_on(rank: int, sources: Tensors) -> bool:
    """Decide as the peer did: each rank compares its own slices."""
    rows = slice(4 * rank, 4 * rank + 4)
    return torch.equal(sources["draft.embed.weight"][rows], sources["embed.weight"][rows])


@case("sd-05")
def test_what_a_draft_shares_does_not_depend_on_the_rank(bug: Case, tmp_path: Path) -> None:
    sources = bug.sources()
    assert bug["config"] == {}
    sources["embed.weight"][4:] = sources["draft.embed.weight"][4:]
    assert [shares_on(rank, sources) for rank in range(2)] == [False, True]

    checkpoint = save(tmp_path, sources)
    program = bug.program(tmp_path, SHARED)
    steps = [list(program.at_rank(rank).plan(checkpoint).steps()) for rank in range(2)]
    assert [[(step.source, step.source_box) for step in each] for each in steps] == [
        [("draft.embed.weight", ((4 * rank, 4 * rank + 4), (0, 4)))] for rank in range(2)
    ]
    assert program.at_rank(0).digests == program.at_rank(1).digests
    for rank in range(2):
        targets = bug.targets()
        load(program.at_rank(rank), tmp_path, sources, targets)
        assert raw(targets["draft.embed_tokens.weight"]) == raw(sources["draft.embed.weight"][4 * rank :][:4])


LAYER = """
config: {required: [num_hidden_layers, first_draft]}
index: {layer: {FIRSTcount: 1}}
blocks:
  layer:
    - target: attn.k_scale
      any_of: [{source: k_proj.k_scale}, {source: k_scale}]
      dims: {}
runtimes:
  own:
    skip: [{source: SKIPPED, why: layers of the other model}]
    rules:
      - {at: {source: "model.layers.{layer}.self_attn", target: "model.layers.{layer}BLOCK.self_attn"}, use: layer}
"""


def spelled_by_the_draft(name: str) -> str:
    """Rename as the peer's draft did: the copy of the loader lacks the line that moves the scale of k."""
    return name.replace("layers.2.", "layers.2.mtp_block.")


@case("sd-07")
def test_a_draft_has_the_rules_of_the_model_by_reference(bug: Case, tmp_path: Path) -> None:
    sources, draft = bug.sources(), "model.layers.2.self_attn.k_proj.k_scale"
    assert spelled_by_the_draft(draft) not in bug.targets("draft")

    texts = {
        "main": LAYER.replace("FIRST", "").replace("SKIPPED", "model.layers.2.**").replace("BLOCK", ""),
        "draft": LAYER.replace("FIRST", "first: first_draft, ")
        .replace("SKIPPED", "model.layers.0.**")
        .replace("BLOCK", ".mtp_block"),
    }
    for form, value in {"main": 0.25, "draft": 0.5}.items():
        targets = bug.targets(form)
        load(bug.program(tmp_path, texts[form]), tmp_path, sources, targets)
        assert [each.item() for each in targets.values()] == [value]
    assert bug["config"]["num_hidden_layers"] == 1
    # The other spelling that the block knows is known for the draft as well.
    renamed = {name.replace("k_proj.", ""): each for name, each in sources.items()}
    targets = bug.targets("draft")
    load(bug.program(tmp_path, texts["draft"]), tmp_path, renamed, targets)
    assert [each.item() for each in targets.values()] == [0.5]
