"""The reference loader against examples worked out by hand, and against what vLLM itself loads."""

import pytest
import torch

import mapper
from mapper import Layout
from mapper.testing.reference import IllegalLayout, WrongShape, layout_fault, reference_load
from mapper.testing.specs import spec_from
from mapper.testing.strategies import chosen_profile
from tests.oracle.families import FAMILIES, PLAIN_V3, family_tensors
from tests.oracle.goldens import compare, iter_ranks, layout_text


def numbered(*shape, start=0, dtype=torch.float32):
    count = torch.Size(shape).numel()
    return torch.arange(start, start + count).reshape(shape).to(dtype)


def load(spec, tensors, layout="", rank=0, config=None, runtime="engine", **options):
    chosen = Layout.parse(layout) if layout else Layout()
    return reference_load(
        spec, config=config or {}, runtime=runtime, layout=chosen, rank=rank, tensors=tensors, options=options
    )


def engine(rules, **sections):
    lines = [f"{name}: {text}" for name, text in sections.items()]
    lines += ["runtimes:", "  engine:", "    mesh: vllm", "    rules:", *(f"      - {each}" for each in rules)]
    return spec_from("\n".join(lines))


def test_a_cut_takes_consecutive_rows_in_rank_order():
    spec = engine(["{target: w, dims: {a: 6, b: 2}, shard: {a: tp}}"])
    assert load(spec, {"w": numbered(6, 2)}, "tp=3", 1).targets["w"].tolist() == [[4, 5], [6, 7]]


def test_ranks_count_tp_then_pp_then_dp():
    spec = engine(["{target: w, dims: {a: 4}, shard: {a: tp}, stage: last}", "{target: v, dims: {a: 6}, shard: {a: dp}}"])
    tensors = {"w": numbered(4), "v": numbered(6)}
    held = [load(spec, tensors, "tp=2,pp=2,dp=3", rank).targets for rank in range(12)]
    assert [each["v"].tolist() for each in held] == [[0, 1]] * 4 + [[2, 3]] * 4 + [[4, 5]] * 4
    assert [each["w"].tolist() if "w" in each else None for each in held] == [None, None, [0, 1], [2, 3]] * 3


def test_parts_are_cut_one_by_one_and_laid_end_to_end():
    spec = engine(["{target: w, sources: [up, gate], dims: {a: [4, 2]}, shard: {a: tp}}"])
    tensors = {"up": numbered(4), "gate": numbered(2, start=10)}
    assert [load(spec, tensors, "tp=2", rank).targets["w"].tolist() for rank in (0, 1)] == [[0, 1, 10], [2, 3, 11]]


def test_one_source_that_holds_all_parts_is_cut_like_several():
    spec = engine(["{target: w, source: both, dims: {a: [4, 2]}, shard: {a: tp}}"])
    assert load(spec, {"both": numbered(6)}, "tp=2", 1).targets["w"].tolist() == [2, 3, 5]


def test_few_key_heads_are_held_by_several_ranks():
    spec = engine(["{target: w, sources: [q, k], dims: {a: [8, 4]}, shard: {a: {axis: tp, units: [4, 2]}}}"])
    tensors = {"q": numbered(8), "k": numbered(4, start=100)}
    held = [load(spec, tensors, "tp=4", rank).targets["w"].tolist() for rank in range(4)]
    assert held == [[0, 1, 100, 101], [2, 3, 100, 101], [4, 5, 102, 103], [6, 7, 102, 103]]


def test_few_units_of_a_lone_dim_are_held_by_several_ranks_where_the_rule_says_so():
    spec = engine(["{target: w, dims: {a: 4}, shard: {a: {axis: tp, units: 2, replicate: true}}}"])
    held = [load(spec, {"w": numbered(4)}, "tp=4", rank).targets["w"].tolist() for rank in range(4)]
    assert held == [[0, 1], [0, 1], [2, 3], [2, 3]]
    with pytest.raises(IllegalLayout, match="2 units do not divide over 3 ranks"):
        load(spec, {"w": numbered(4)}, "tp=3")


def test_joined_parts_are_cut_as_one():
    spec = engine(["{target: w, sources: [q, k], dims: {a: [4, 2]}, shard: {a: {axis: tp, joined: true}}}"])
    tensors = {"q": numbered(4), "k": numbered(2, start=100)}
    assert [load(spec, tensors, "tp=2", rank).targets["w"].tolist() for rank in (0, 1)] == [[0, 1, 2], [3, 100, 101]]


def test_units_are_not_cut():
    spec = engine(["{target: w, dims: {a: 6}, shard: {a: {axis: tp, units: 3}}}"])
    assert "3 units" in layout_fault(spec, config={}, runtime="engine", layout=Layout(tp=2))
    assert load(spec, {"w": numbered(6)}, "tp=3", 2).targets["w"].tolist() == [4, 5]
    with pytest.raises(IllegalLayout, match="3 units do not divide over 2 ranks"):
        load(spec, {"w": numbered(6)}, "tp=2")


def test_pad_rounds_the_whole_dim_up_before_the_cut():
    spec = engine(["{target: w, dims: {a: 5}, shard: {a: {axis: tp, pad: 4}}}"])
    result = load(spec, {"w": numbered(5, start=1)}, "tp=2", 1)
    assert result.targets["w"].tolist() == [5, 0, 0, 0]
    assert result.padding("w").tolist() == [False, True, True, True]
    alone = load(spec, {"w": numbered(5, start=1)}, "tp=4", 3)
    assert (alone.targets["w"].tolist(), alone.elsewhere) == ([0, 0], {"w"})


def test_pad_rank_rounds_a_share_up_after_the_cut_and_fills_it():
    spec = engine(["{target: w, dims: {a: 6}, shard: {a: {axis: tp, pad_rank: 4, fill: -inf}}}"])
    assert load(spec, {"w": numbered(6)}, "tp=2", 1).targets["w"].tolist() == [3, 4, 5, float("-inf")]


@pytest.mark.parametrize(("kind", "shares"), [("pad", [[0, 1, 2], [3, 4, 0]]), ("short", [[0, 1, 2], [3, 4]])])
def test_uneven_shares_are_padded_or_short(kind, shares):
    spec = engine([f"{{target: w, dims: {{a: 5}}, shard: {{a: {{axis: tp, uneven: {kind}, fill: 0}}}}}}"])
    assert [load(spec, {"w": numbered(5)}, "tp=2", rank).targets["w"].tolist() for rank in (0, 1)] == shares


STACK = "{target: w, source: 'e.{expert}', stack: expert, dims: {a: 2}}"
EXPERTS = "{expert: {count: 5, axis: ep}}"


def experts(count=5):
    return {f"e.{number}": numbered(2, start=10 * number) for number in range(count)}


def test_experts_are_dealt_in_order_and_the_remainder_to_the_first_ranks():
    spec = engine([STACK], index=EXPERTS)
    held = [load(spec, experts(), "tp=2,ep=2", rank) for rank in (0, 1)]
    assert [each.targets["w"][:, 0].tolist() for each in held] == [[0, 10, 20], [30, 40]]
    assert (held[1].loaded, held[1].elsewhere) == ({"e.3", "e.4"}, {"e.0", "e.1", "e.2"})


def test_redundant_experts_fill_the_last_slots_from_the_first_expert_on():
    spec = engine([STACK], index=EXPERTS)
    held = [load(spec, experts(), "tp=2,ep=2,redundant_experts=3", rank).targets["w"][:, 0].tolist() for rank in (0, 1)]
    assert held == [[0, 10, 20, 30], [40, 0, 10, 20]]


def test_round_robin_deals_experts_one_by_one_where_the_runtime_has_it():
    spec = engine([STACK], index=EXPERTS)
    asked = Layout(tp=2, ep=2, placement="round_robin")
    assert layout_fault(spec, config={}, runtime="engine", layout=asked) is not None
    mesh = "mesh: {like: vllm, round_robin: tp == 2}"
    spec = spec_from(f"index: {EXPERTS}\nruntimes: {{engine: {{{mesh}, rules: [{STACK}]}}}}")
    held = [load(spec, experts(), "tp=2,ep=2,placement=round_robin", rank).targets["w"][:, 0].tolist() for rank in (0, 1)]
    assert held == [[0, 20, 40], [10, 30]]


def test_the_remainder_of_the_layers_goes_to_the_stages_before_the_last():
    spec = engine(["{copy: ['l.{layer}']}"], index="{layer: {count: 6, axis: pp}}")
    tensors = {f"l.{layer}": numbered(1, start=layer) for layer in range(6)}
    held = [sorted(load(spec, tensors, "pp=4", rank).targets) for rank in range(4)]
    assert held == [["l.0"], ["l.1", "l.2"], ["l.3", "l.4"], ["l.5"]]
    held = [sorted(load(spec, tensors, "pp=2,pp_layers=1+5", rank).targets) for rank in range(2)]
    assert held == [["l.0"], ["l.1", "l.2", "l.3", "l.4", "l.5"]]


def test_layers_of_one_kind_are_split_where_all_layers_are():
    index = "{layer: {count: 4, axis: pp, where: layer % 2 == 1 or layer == 0}}"
    spec = engine(["{copy: ['l.{layer}']}"], index=index)
    tensors = {f"l.{layer}": numbered(1) for layer in (0, 1, 3)}
    assert [sorted(load(spec, tensors, "pp=2", rank).targets) for rank in range(2)] == [["l.0", "l.1"], ["l.3"]]


BLOCKS = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [4, 2]}}


def test_a_scale_is_cut_by_its_blocks_and_a_short_last_block_counts_whole():
    spec = engine(["{target: 'w.{leaf}', dims: {out: 8, in: 3}, shard: {out: tp}}"])
    tensors = {"w.weight": numbered(8, 3, dtype=torch.float8_e4m3fn), "w.weight_scale_inv": numbered(2, 2)}
    result = load(spec, tensors, "tp=2", 1, BLOCKS)
    assert result.targets["w.weight_scale_inv"].tolist() == [[2, 3]]
    assert "inside a block" in layout_fault(spec, config=BLOCKS, runtime="engine", layout=Layout(tp=4))


def test_a_finer_grid_repeats_scales_and_a_coarser_one_is_refused():
    formats = "{experts: [{leaves: {s: {stored: [a / 4], dims: [a / STEP]}}}]}"
    rule = "{target: 'w.{leaf}', dims: {a: 8}, format: experts, shard: {a: tp}}"
    spec = engine([rule], formats=formats.replace("STEP", "2"))
    assert load(spec, {"w.s": numbered(2)}, "tp=4", 1).targets["w.s"].tolist() == [0]
    assert load(spec, {"w.s": numbered(2)}).targets["w.s"].tolist() == [0, 0, 1, 1]
    coarse = engine([rule], formats=formats.replace("STEP", "8"))
    assert layout_fault(coarse, config={}, runtime="engine", layout=Layout()) is not None


def test_a_stored_transposition_and_integer_axes_are_undone():
    formats = "{odd: [{leaves: {w: {stored: [b / 2, 2, a], dims: [a, b]}}}]}"
    spec = engine(["{target: 'x.{leaf}', dims: {a: 3, b: 4}, format: odd, shard: {b: tp}}"], formats=formats)
    stored = numbered(2, 2, 3)
    expected = stored.reshape(4, 3).T[:, 2:]
    assert torch.equal(load(spec, {"x.w": stored}, "tp=2", 1).targets["x.w"], expected)


def test_dequantised_values_are_weight_times_scale():
    spec = engine(["{target: 'w.{leaf}', dims: {out: 4, in: 3}, format: dequantized}"])
    tensors = {"w.weight": numbered(4, 3, dtype=torch.float8_e4m3fn), "w.weight_scale_inv": torch.tensor([[2.0, 10.0]])}
    result = load(spec, tensors, config=BLOCKS)
    assert result.targets["w.weight"].tolist() == [[0, 2, 20], [6, 8, 50], [12, 14, 80], [18, 20, 110]]
    assert (result.targets["w.weight"].dtype, result.loaded) == (torch.bfloat16, set(tensors))


def test_appended_slots_follow_on_every_rank():
    shared = "{target: w, source: shared, append: expert, dims: {expert: 2, a: 2}, stored: {a: (expert a)}, shard: {a: tp}}"
    stacked = "{target: w, source: 'e.{expert}', stack: expert, dims: {a: 2}, shard: {a: tp}}"
    spec = engine([stacked, shared], index=EXPERTS)
    tensors = {**experts(), "shared": numbered(4, start=100)}
    assert load(spec, tensors, "tp=2", 1).targets["w"][:, 0].tolist() == [1, 11, 21, 31, 41, 101, 103]


def test_one_source_is_split_over_several_targets():
    spec = engine(["{targets: [q, k], source: qk, dims: {a: [4, 2]}, shard: {a: tp}}"])
    result = load(spec, {"qk": numbered(6)}, "tp=2", 1)
    assert {name: each.tolist() for name, each in result.targets.items()} == {"q": [2, 3], "k": [5]}


def test_values_laid_along_a_dim_by_an_index():
    joined = "{target: all, source: 'l.{layer}', stack: {layer: a}, dims: {a: 2}, reuse: true}"
    spec = engine(["{copy: ['l.{layer}'], dims: {a: 2}}", joined], index="{layer: {count: 3}}")
    tensors = {f"l.{layer}": numbered(2, start=layer * 10) for layer in range(3)}
    result = load(spec, tensors)
    assert result.targets["all"].tolist() == [0, 1, 10, 11, 20, 21]
    assert result.loaded == set(tensors)


def test_casts_change_values_and_bitcasts_do_not():
    spec = engine(["{target: a, dims: {x: 2}, cast: int32}", "{target: b, dims: {x: 2}, bitcast: uint8}"])
    tensors = {"a": torch.tensor([3, 4]), "b": torch.tensor([-1, 1], dtype=torch.int8)}
    targets = load(spec, tensors).targets
    assert (targets["a"].dtype, targets["a"].tolist()) == (torch.int32, [3, 4])
    assert (targets["b"].dtype, targets["b"].tolist()) == (torch.uint8, [255, 1])


def test_a_leaf_without_the_cut_dim_is_on_all_ranks_or_on_the_first():
    for word, values in (("all", [[1, 2], [1, 2]]), ("first", [[1, 2], [0, 0]])):
        rule = f"{{target: 'w.{{leaf}}', dims: {{out: 2, in: 4}}, shard: {{in: {{axis: tp, bias: {word}}}}}}}"
        tensors = {"w.weight": numbered(2, 4), "w.bias": numbered(2, start=1)}
        assert [load(engine([rule]), tensors, "tp=2", rank).targets["w.bias"].tolist() for rank in (0, 1)] == values


def test_the_first_spelling_with_a_tensor_is_taken_and_others_are_unknown_or_skipped():
    rule = "{target: w, any_of: [{source: new}, {source: old}], dims: {a: 1}OTHERS}"
    tensors = {"new": numbered(1, start=1), "old": numbered(1, start=2)}
    strict = load(engine([rule.replace("OTHERS", "")]), tensors)
    assert (strict.targets["w"].item(), strict.loaded, strict.unknown) == (1, {"new"}, {"old"})
    lenient = load(engine([rule.replace("OTHERS", ", others: skip")]), tensors)
    assert (lenient.skipped, lenient.unknown) == ({"old"}, set())
    assert load(engine([rule.replace("OTHERS", "")]), {"old": tensors["old"]}).targets["w"].item() == 2


def test_missing_sources_are_named_and_optional_ones_are_not():
    spec = engine(["{target: a, dims: {x: 1}}", "{target: b, dims: {x: 1}, optional: true}"])
    result = load(spec, {})
    assert (result.missing, dict(result.targets)) == (("a",), {})


def test_skips_with_wildcards_and_indices_apply_when_they_hold():
    text = """
        config: {required: [drafts]}
        index: {draft: {first: 2, count: drafts}}
        runtimes:
          engine:
            skip:
              - {source: '**.freq', why: computed}
              - {source: 'l.{draft}.*', why: of the draft}
              - {source: extra, why: not for now, when: drafts > 1}
            rules:
              - copy: [w]
    """
    names = ["w", "freq", "a.b.freq", "l.2.x", "l.3.x", "l.2.x.y", "extra"]
    result = load(spec_from(text), {name: numbered(1) for name in names}, config={"drafts": 1})
    assert result.skipped == {"freq", "a.b.freq", "l.2.x"}
    assert result.unknown == {"l.3.x", "l.2.x.y", "extra"}


def test_a_tied_target_is_its_twin_and_a_kept_one_is_listed():
    text = """
        runtimes:
          engine:
            keep: [{target: scale, why: measured}]
            rules:
              - copy: [embed]
              - {target: head, tie: embed}
    """
    result = load(spec_from(text), {"embed": numbered(2)})
    assert (result.tied, result.kept) == ({"head": "embed"}, {"scale": "measured"})
    assert result.targets["head"] is result.targets["embed"]


def test_an_index_that_only_the_target_has_copies_to_every_value():
    spec = engine(["{target: '{kv}_scale', source: kv_scale, dims: {}}"], index="{kv: {values: [k, v]}}")
    assert {name: each.item() for name, each in load(spec, {"kv_scale": torch.tensor(7.0)}).targets.items()} == {
        "k_scale": 7,
        "v_scale": 7,
    }


def test_sources_of_another_shape_are_refused():
    with pytest.raises(WrongShape, match=r"\(2, 3\), expected \(3, 2\)"):
        load(engine(["{target: w, dims: {a: 3, b: 2}}"]), {"w": numbered(2, 3)})


def test_requirements_make_layouts_illegal():
    text = "runtimes: {engine: {mesh: vllm, requires: [{that: tp == 1, why: only one}], rules: [{copy: [w]}]}}"
    assert layout_fault(spec_from(text), config={}, runtime="engine", layout=Layout(tp=2)) == "only one"


def test_values_are_rearranged_and_computed_on_whole_arrays():
    spec = engine(["{target: w, dims: {a: 4, b: 2}, do: [{view: '(h r) b -> (r h) b', h: 2}, {add: 1}]}"])
    assert load(spec, {"w": numbered(4, 2)}).targets["w"].tolist() == [[1, 2], [5, 6], [3, 4], [7, 8]]


def golden_ranks(family):
    """All ranks of all layouts; in the quick profile those of one family that deal no expert twice, and some of the others."""
    ranks = list(iter_ranks(family))
    if chosen_profile() != "dev":
        return ranks
    if family == "deepseek_v3":
        return [rank for rank in ranks if not rank.redundant and rank.placement == "linear"]
    return ranks[5::24]


@pytest.mark.parametrize("family", PLAIN_V3)
def test_the_reference_equals_what_vllm_loads(family):
    spec, tensors = mapper.load_spec("deepseek_v2"), family_tensors(family)
    for rank in golden_ranks(family):
        result = load(spec, tensors, layout_text(rank), rank.rank, FAMILIES[family].config, rank.runtime)
        assert compare(rank, result.targets, untouched="any") == [], str(rank)
        assert (result.unknown, result.missing, result.missing_elsewhere) == (set(), (), ()), str(rank)
