"""An explanation says what the plan does, for every name on every rank, and why a name that none reads is not read."""

from __future__ import annotations

import json

import pytest

from mapper import Checkpoint, Layout, MapperError, compile, load_spec
from mapper.explain import explain_code, explain_name
from mapper.explain.copies import Copy, spell_copies, spell_ranks
from mapper.messages import CATALOGUE
from mapper.plan.plan import Step
from tests.manifests import V3, write_family

EXPERTS = "model.layers.3.mlp.experts"


@pytest.fixture(scope="module")
def spec():
    return load_spec("deepseek_v2")


@pytest.fixture(scope="module")
def v3():
    return Checkpoint.open(V3)


@pytest.fixture(scope="module")
def program(spec, v3):
    return compile(spec, config=v3.config, runtime="vllm", layout=Layout.parse("tp=8,pp=2,dp=2,ep=16"))


def explained(program, name, **arguments):
    explanation = explain_name(program, name, **arguments)
    json.dumps(explanation.to_json())
    assert explanation.to_text()
    return explanation


# --- agreement with the plan ----------------------------------------------------------------------------------------

LAYOUTS = ["tp=1", "tp=2,pp=2", "tp=4,ep=4", "tp=2,pp=3,dp=2,ep=4"]


@pytest.mark.parametrize("text", LAYOUTS)
@pytest.mark.parametrize(
    ("family", "runtime"), [("deepseek_v3_fp8_mtp", "vllm"), ("deepseek_v3_fp8_mtp", "vllm-mtp"), ("deepseek_v2_lite", "vllm")]
)
def test_all_explanations_together_are_the_plans_of_all_ranks(spec, tmp_path, family, runtime, text):
    checkpoint = Checkpoint.open(write_family(family, tmp_path))
    layout = Layout.parse(text)
    if runtime == "vllm-mtp" and layout.pp > 1:
        pytest.skip("a draft is not split into stages")
    program = compile(spec, config=checkpoint.config, runtime=runtime, layout=layout)
    plans = [program.at_rank(rank).plan(checkpoint) for rank in range(layout.num_ranks)]
    planned = {(rank, step._replace(reading=None)) for rank, plan in enumerate(plans) for step in plan.steps()}
    by_source, by_target, padding = set(), set(), set()
    for name in {*checkpoint.tensors, *(target for plan in plans for target in plan.targets)}:
        explanation = explain_name(program, name, checkpoint=checkpoint)
        if explanation.source is not None:
            readings = explanation.source.readings if not explanation.source.remark else ()
            by_source |= {(rank, step_of(copy)) for each in readings for ranks, copy in each.copies for rank in ranks}
            skipped = explanation.source.outcome == "skipped"
            assert skipped == (name in plans[0].matching.skipped)
        if explanation.target is not None:
            for holding in explanation.target.holdings:
                by_target |= {(rank, step_of(copy)) for copy in holding.held.copies for rank in holding.ranks}
                padding |= {(rank, name, box) for box in holding.held.padding for rank in holding.ranks}
                for rank in holding.ranks:
                    assert plans[rank].targets[name].shape == holding.held.shape
    assert by_source == planned
    assert by_target == planned
    assert padding == {(rank, name, box) for rank, plan in enumerate(plans) for name, box, _ in plan.padding()}


def step_of(copy):
    return Step(copy.source, copy.source_box, copy.target, copy.target_box)


# --- sources --------------------------------------------------------------------------------------------------------


def test_an_expert_is_explained_with_rule_rank_slot_and_part(program, v3):
    source = explained(program, f"{EXPERTS}.7.up_proj.weight", checkpoint=v3).source
    assert source.outcome == "loaded"
    (reading,) = source.readings
    assert reading.place.text.strip() == "- target: experts.routed_experts.w13_{leaf}"
    assert (reading.at, reading.leaf, reading.part) == ({"layer": 3, "expert": 7}, "weight", (2, 2, "out"))
    ((ranks, copy),) = reading.copies
    assert ranks == (0,)
    assert copy.target_box == ((7, 8), (2048, 4096), (0, 7168))
    assert (
        f"    rank 0: {EXPERTS}.7.up_proj.weight[0:2048, 0:7168] -> {EXPERTS}.routed_experts.w13_weight[7, 2048:4096, 0:7168]"
        in source.to_text().splitlines()
    )


def test_equal_ranks_are_folded(program, v3):
    text = explained(program, "model.norm.weight", checkpoint=v3).source.to_text()
    assert "    ranks 8-15, 24-31: model.norm.weight[0:7168] -> model.norm.weight[0:7168]" in text.splitlines()


def test_a_name_of_another_rank_is_elsewhere(program, v3):
    source = explained(program, f"{EXPERTS}.7.up_proj.weight", checkpoint=v3, ranks=[1]).source
    assert source.outcome == "elsewhere"
    assert source.to_text().splitlines()[-1] == "    not on rank 1"


def test_a_skipped_name_says_by_which_rule_and_why(program, v3):
    source = explained(program, "model.layers.61.enorm.weight", checkpoint=v3).source
    assert source.outcome == "skipped"
    assert source.skip.text == "model.layers.{nextn}.**"
    assert source.skip.why == "multi-token-prediction layers are loaded by the draft model"


def test_a_skip_of_the_command_line_is_named_as_such(spec, v3):
    program = compile(spec, config=v3.config, runtime="vllm").with_skips([("extra.**", "a probe")], origin="command line")
    assert explained(program, "extra.a.b").source.skip.text == "extra.** (command line)"


def test_a_config_alone_is_enough(program):
    source = explained(program, "lm_head.weight", ranks=[9]).source
    assert (source.outcome, source.is_present, source.header) == ("loaded", None, None)
    ((ranks, copy),) = source.readings[0].copies
    assert (ranks, copy.source_box, copy.target_box) == ((9,), ((16160, 32320), (0, 7168)), ((0, 16160), (0, 7168)))


def test_a_name_that_a_rule_reads_and_the_checkpoint_lacks_says_so(program, v3):
    source = explained(program, "model.layers.4.self_attn.k_scale", checkpoint=v3).source
    assert source.is_present is False
    assert source.readings[0].spelling == (1, 3)
    assert "  the checkpoint has no tensor of this name" in source.to_text().splitlines()


def test_findings_about_the_name_are_part_of_its_explanation(spec, tmp_path):
    def change(tensors):
        tensors["model.norm.weight"]["shape"] = [7]

    checkpoint = Checkpoint.open(write_family("deepseek_v2_lite", tmp_path, change=change))
    source = explained(
        compile(spec, config=checkpoint.config, runtime="vllm"), "model.norm.weight", checkpoint=checkpoint
    ).source
    assert [each.code for each in source.findings] == ["M503"]


def test_the_spelling_that_was_not_taken_is_told(spec, tmp_path):
    checkpoint = Checkpoint.open(write_family("deepseek_v3_mtp", tmp_path))
    program = compile(spec, config=checkpoint.config, runtime="vllm-mtp")
    source = explained(program, "model.embed_tokens.weight", checkpoint=checkpoint).source
    assert source.outcome == "skipped"
    assert source.readings[0].spelling == (2, 2)
    assert "another spelling of the same tensors" in source.to_text()


def test_a_tensor_whose_shape_only_its_header_knows_is_whole(spec, v3):
    program = compile(spec, config=v3.config, runtime="transformers")
    ((_, copy),) = explained(program, "model.norm.weight").source.readings[0].copies
    assert (copy.source_box, copy.target_box) == (None, None)
    ((_, copy),) = explained(program, "model.norm.weight", checkpoint=v3).source.readings[0].copies
    assert (copy.source_box, copy.target_box) == (((0, 7168),), ((0, 7168),))


# --- what is near ---------------------------------------------------------------------------------------------------


def why_not(program, name):
    source = explained(program, name).source
    assert source.outcome == "unknown"
    return [(each.side, each.pattern, [one.why for one in each.differences]) for each in source.near]


def test_an_index_outside_its_range_is_told_with_the_range(program):
    side, pattern, whys = why_not(program, f"{EXPERTS}.256.gate_proj.weight")[0]
    assert (side, pattern) == ("source", "model.layers.{layer: 3...60}.mlp.experts.{expert: 0...255}.gate_proj.weight")
    assert whys == ["expert 256 is outside 0...255"]


def test_a_skip_is_near_too(program):
    near = why_not(program, "model.layers.62.mlp.gate.weight")
    assert near[0][2] == ["layer 62 is outside 3...60"]
    assert ("skip", "model.layers.61.**", ["nextn 62 is outside 61"]) in near


def test_an_index_value_that_a_condition_leaves_out_names_the_condition(program, spec):
    ((_, _, whys), *_) = why_not(program, "model.layers.1.mlp.gate.weight")
    (line,) = [n for n, text in enumerate(read_lines(spec), start=1) if text == "      when: is_moe(layer)"]
    assert whys == [f"layer 1 is outside 3...60, where `is_moe(layer)` holds ({spec.place.file}:{line}:13)"]


def test_a_rule_that_does_not_hold_for_the_config_is_named_with_its_condition(program):
    ((_, pattern, (why,)), *_) = why_not(program, "model.layers.3.self_attn.q_proj.weight")
    assert pattern == "model.layers.{layer: 0...60}.self_attn.q_proj.weight"
    assert why.startswith("the rule does not hold here: `when: q_lora_rank is null` (")


def test_a_misspelt_segment_is_set_beside_the_right_one(program):
    assert why_not(program, f"{EXPERTS}.7.gate_prj.weight")[0][2] == ["'gate_prj' is not 'gate_proj'"]


def test_missing_and_surplus_segments_are_told(program):
    assert why_not(program, "layers.3.mlp.gate.weight")[0][2] == ["the name lacks 'model'"]
    assert why_not(program, "model.language.layers.3.mlp.gate.weight")[0][2] == ["the rule has nothing for 'language'"]


def test_a_word_where_a_number_belongs_is_told(program):
    assert why_not(program, "model.layers.first.mlp.gate.weight")[0][2] == ["'first' is no layer; expected 3...60"]


def test_nothing_is_near_a_stranger(program):
    assert why_not(program, "vision.patch") == []


def test_a_stripped_prefix_is_part_of_what_is_near(program):
    assert why_not(program.scoped("model"), "layers.3.mlp.experts.300.up_proj.weight")[0][2] == [
        "expert 300 is outside 0...255"
    ]
    assert explained(program.scoped("model"), "layers.3.mlp.gate.weight").source.outcome == "loaded"
    assert explained(program.mounted("lm"), "lm.model.layers.61.enorm.weight").source.outcome == "skipped"


def read_lines(spec):
    with open(spec.place.file, encoding="utf-8") as stream:
        return stream.read().splitlines()


# --- targets --------------------------------------------------------------------------------------------------------


def test_a_stacked_target_lists_its_sources_folded(program, v3):
    target = explained(program, f"{EXPERTS}.routed_experts.w13_weight", checkpoint=v3, ranks=[17]).target
    assert (target.outcome, target.dtype) == ("filled", "F8_E4M3")
    assert target.to_text().splitlines()[-3:] == [
        "    rank 17: [16, 4096, 7168]",
        f"      {EXPERTS}.{{144...159}}.gate_proj.weight[0:2048, 0:7168] -> [{{0...15}}, 0:2048, 0:7168]",
        f"      {EXPERTS}.{{144...159}}.up_proj.weight[0:2048, 0:7168] -> [{{0...15}}, 2048:4096, 0:7168]",
    ]


def test_a_name_that_only_a_target_has_is_explained_as_one(program, v3):
    explanation = explained(program, f"{EXPERTS}.routed_experts.w13_weight", checkpoint=v3)
    assert explanation.source is None
    assert explanation.is_known


def test_an_optional_target_without_a_source_is_left_out(program, v3):
    target = explained(program, "model.layers.4.self_attn.mla_attn.mla_attn.k_scale", checkpoint=v3).target
    assert (target.outcome, target.holdings) == ("absent", ())


def test_padding_is_part_of_a_target(spec, tmp_path):
    checkpoint = Checkpoint.open(write_family("deepseek_v2_lite", tmp_path))
    program = compile(spec, config=checkpoint.config, runtime="vllm", layout=Layout(tp=2))
    lines = explained(program, "lm_head.weight", checkpoint=checkpoint, ranks=[1]).target.to_text().splitlines()
    assert lines[-3:] == [
        "    rank 1: [160, 128]",
        "      lm_head.weight[160:300, 0:128] -> [0:140, 0:128]",
        "      padding [140:160, 0:128]",
    ]


SMALL = """
spec: 1
id: small
title: Small
version: 0.1.0
architectures: [Small]
config: {required: [size]}
runtimes:
  plain:
    keep:
      - {target: '**.scratch', why: the module fills it}
    rules:
      - target: embed.weight
        dims: {out: size, in: size}
      - target: head.weight
        tie: embed.weight
        note: one matrix
"""


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return compile(load_spec(path), config={"size": 5}, runtime="plain")


def test_a_kept_target_says_why(small):
    target = explained(small, "a.scratch").target
    assert (target.outcome, target.rule, target.keep.why) == ("kept", "**.scratch", "the module fills it")


def test_a_tied_target_names_its_twin(small):
    target = explained(small, "head.weight").target
    assert (target.outcome, target.tied_to, target.note) == ("tied", "embed.weight", "one matrix")
    assert "    shares the storage of embed.weight" in target.to_text().splitlines()


# --- words ----------------------------------------------------------------------------------------------------------


def test_slots_out_of_order_are_listed_as_they_are():
    copies = [Copy(f"e.{expert}", ((0, 4),), "w", ((slot, slot + 1), (0, 4))) for expert, slot in [(0, 2), (1, 0), (2, 1)]]
    assert spell_copies(copies) == ["e.{0...2}[0:4] -> [{2, 0, 1}, 0:4]"]


def test_one_rank_is_no_plural():
    assert (spell_ranks([3]), spell_ranks([0, 1, 2, 5])) == ("rank 3", "ranks 0-2, 5")


@pytest.mark.parametrize("code", CATALOGUE)
def test_every_code_is_explained(code):
    explanation = explain_code(code)
    assert explanation.why
    assert explanation.fix
    assert "!r" not in explanation.to_text()


def test_a_code_that_does_not_exist_is_an_error():
    with pytest.raises(MapperError) as caught:
        explain_code("M299")
    (finding,) = caught.value.diagnostics
    assert finding.code == "M915"
    assert finding.message == "there is no message 'M299'; codes run from M101 to M990"
