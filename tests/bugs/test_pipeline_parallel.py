"""Pipeline stages: tensors of other stages, heads tied to an embedding that lives elsewhere, and what a skip must not hide."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mapper.diagnostics import MapperError
from mapper.load import Loader
from tests.bugs.harness import Case, case, load, refusal
from tests.loads import Tensors, all_raw, told

EXPERTS = """
index: {layer: {count: 2, axis: pp}, expert: {count: 1, axis: ep}}
runtimes:
  own:
    mesh: vllm
    rules:
      - at: model.layers.{layer}.mlp.experts
        rules:
          - target: w13_weight
            any_of:
              - sources: ["{expert}.gate_proj.weight", "{expert}.up_proj.weight"]
              - source: gate_up_proj
            stack: expert
            dims: {out: [3, 3], in: 4}
            shard: {out: moe_tp}
"""


def load_experts(sources: Tensors, targets: Tensors) -> None:
    """Load as the peer did: the fused path asks whether the parameter lives on this stage, the path by expert does not."""
    for name, tensor in sources.items():
        layer, _, rest = name.partition(".experts.")
        target = f"{layer}.experts.w13_weight"
        if rest == "gate_up_proj":
            if target in targets:
                targets[target].copy_(tensor)
        else:
            half = 3 * rest.endswith("up_proj.weight")
            targets[target][0, half : half + 3] = tensor


@case("pp-02")
def test_both_forms_of_experts_know_the_stage(bug: Case, tmp_path: Path) -> None:
    with pytest.raises(KeyError, match=r"model\.layers\.0\.mlp\.experts\.w13_weight"):
        load_experts(bug.sources("per expert"), bug.targets("stage 1"))
    load_experts(bug.sources("fused"), bug.targets("stage 1"))

    split = bug.sources("per expert")
    fused = {
        f"model.layers.{layer}.mlp.experts.gate_up_proj": torch.cat(
            [split[f"model.layers.{layer}.mlp.experts.0.{part}_proj.weight"] for part in ("gate", "up")]
        )[None]
        for layer in range(2)
    }
    assert fused.keys() == bug.sources("fused").keys()
    for stage in range(2):
        program = bug.program(tmp_path, EXPERTS, rank=stage)
        for sources in (split, fused):
            targets = bug.targets(f"stage {stage}")
            report = load(program, tmp_path, sources, targets)
            assert all_raw(targets) == all_raw(
                {f"model.layers.{stage}.mlp.experts.w13_weight": fused[f"model.layers.{stage}.mlp.experts.gate_up_proj"]}
            )
            assert report.loaded == report.elsewhere == len(sources) // 2


TIED = """
config: {optional: {tie_word_embeddings: false}}
runtimes:
  own:
    mesh: vllm
    skip: [{source: lm_head.weight, why: a copy of the embedding, when: tie_word_embeddings}]
    rules:
      - {target: model.embed_tokens.weight, stage: first, dims: {vocab: 8, hidden: 4}, shard: {vocab: tp}}
      - {target: lm_head.weight, stage: last, when: not tie_word_embeddings, dims: {vocab: 8, hidden: 4}, shard: {vocab: tp}}
      - target: lm_head.weight
        source: model.embed_tokens.weight
        reuse: true
        stage: last
        when: tie_word_embeddings
        dims: {vocab: 8, hidden: 4}
        shard: {vocab: tp}
"""


def load_stage(sources: Tensors, targets: Tensors, *, is_first: bool, is_tied: bool) -> None:
    """Load as the peers did: the embedding belongs to layer 0, so that other stages skip it; a head is filled by its name."""
    for name, tensor in sources.items():
        if name in targets and (is_first or "embed_tokens" not in name):
            targets[name].copy_(tensor[: len(targets[name])])
    if is_tied and is_first and "lm_head.weight" in targets:
        targets["lm_head.weight"].copy_(targets["model.embed_tokens.weight"])


@case("pp-03")
def test_tied_head_of_the_last_stage_is_read_there(bug: Case, tmp_path: Path) -> None:
    sources, wrong = bug.sources(), bug.targets("stage 1")
    load_stage(sources, wrong, is_first=False, is_tied=bug["config"]["tie_word_embeddings"])
    assert all_raw(wrong) == all_raw(bug.targets("stage 1"))

    (embedding,) = sources.values()
    with_head = sources | {"lm_head.weight": embedding.clone()}
    for rank in range(4):
        for checkpoint in (sources, with_head):
            targets = bug.targets(f"stage {rank // 2}")
            program = bug.program(tmp_path, TIED, rank=rank)
            report = load(program, tmp_path, checkpoint, targets)
            (found,) = targets.values()
            assert found.tolist() == [[float(row)] * 4 for row in range(rank % 2 * 4, rank % 2 * 4 + 4)]
            assert (report.loaded, sum(report.skipped_by.values())) == (1, len(checkpoint) - 1)


@case("pp-05")
def test_head_without_a_source_is_an_error_where_nothing_is_tied(bug: Case, tmp_path: Path) -> None:
    sources, targets, wrong = bug.sources(), bug.targets(), bug.targets()
    wrong["lm_head.weight"].zero_()
    load_stage(sources, wrong, is_first=True, is_tied=bug["config"]["tie_word_embeddings"])
    assert not wrong["lm_head.weight"].any()

    findings = refusal(bug.program(tmp_path, TIED), tmp_path, sources, targets)
    assert told(findings) == [("M501", "lm_head.weight")]
    load(bug.program(tmp_path, TIED, config={"tie_word_embeddings": True}), tmp_path, sources, targets)
    assert all_raw(targets) == dict.fromkeys(targets, all_raw(sources)["model.embed_tokens.weight"])


MLP = """
index: {layer: {count: 2, axis: pp}}
runtimes:
  own:
    mesh: vllm
    rules:
      - target: model.layers.{layer}.mlp.gate_up_proj.{leaf}
        sources: ["model.layers.{layer}.mlp.gate_proj.{leaf}", "model.layers.{layer}.mlp.up_proj.{leaf}"]
        dims: {out: [3, 3], in: 4}
        shard: {out: tp}
"""


def load_what_is_in_the_table(sources: Tensors, targets: Tensors) -> None:
    """Load as the peer did: any name that does not end at a parameter of this stage is taken to be another stage's."""
    for name, tensor in sources.items():
        for half, part in enumerate(("gate_proj.", "up_proj.")):
            target = name.replace(part, "gate_up_proj.")
            if part in name and target in targets:
                targets[target][3 * half : 3 * half + 3] = tensor


@case("pp-06")
def test_mistyped_name_is_found_on_every_stage(bug: Case, tmp_path: Path) -> None:
    sources, wrong = bug.sources(), bug.targets("stage 1")
    load_what_is_in_the_table(sources, wrong)
    (unset,) = wrong.values()
    assert all_raw({"": unset[:3]}) == all_raw({"": bug.targets("stage 1").popitem()[1][:3]})

    mistyped, right = "model.layers.1.mlp.gate_projj.weight", "model.layers.1.mlp.gate_proj.weight"
    for stage in range(2):
        program, targets = bug.program(tmp_path, MLP, rank=stage), bug.targets(f"stage {stage}")
        findings = refusal(program, tmp_path, sources, targets)
        assert told(findings) == [("M501", right), ("M502", mistyped)]
        assert [each.hint for each in findings] == [
            f"the checkpoint has {mistyped!r}, which no rule names",
            f"a rule expects {right!r}",
        ]
        with pytest.raises(MapperError) as caught:  # a stream has no manifest, and knows the name's stage all the same
            Loader(program, targets).update().feed(mistyped, sources[mistyped])
        assert told(caught.value.diagnostics) == [("M502", mistyped)]
        corrected = {name if name != mistyped else right: tensor for name, tensor in sources.items()}
        report = load(program, tmp_path, corrected, targets)
        assert (report.loaded, report.elsewhere) == (2, 2)
        parts = [corrected[f"model.layers.{stage}.mlp.{part}_proj.weight"] for part in ("gate", "up")]
        assert all_raw(targets) == all_raw({f"model.layers.{stage}.mlp.gate_up_proj.weight": torch.cat(parts)})
