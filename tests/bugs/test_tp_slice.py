"""Slices of tensor and expert parallel ranks: fused parts, few heads, biases, padding, experts, checkpoints cut for others."""

from __future__ import annotations

from collections.abc import Mapping
from math import lcm
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from mapper.checkpoint import Checkpoint
from mapper.compiler import Program, compile
from mapper.diagnostics import MapperError
from mapper.export import export
from mapper.layout import Layout
from mapper.load import Loader, allocate
from mapper.transfer.files import CheckpointFiles
from tests.bugs.harness import Case, case, counted, load, read_case, refusal, save, tensors
from tests.loads import Tensors, all_raw, spec_of, told

FEW = settings(deadline=None, max_examples=20)
SIZES = st.integers(1, 3)


def ranks_of(bug: Case, folder: Path, text: str, sources: Tensors) -> list[Tensors]:
    """Return what every rank of the scenario's layout holds after a load, from files and from a stream alike."""
    found = []
    for rank in range(Layout(**bug["layout"]).num_ranks):
        targets = bug.targets()
        load(bug.program(folder, text, rank=rank), folder, sources, targets)
        found.append(targets)
    return found


def loaded(folder: Path, text: str, config: Mapping[str, object], layout: Layout, sources: Tensors) -> list[Tensors]:
    """Return what every rank of a layout holds of a checkpoint; raises MapperError where it is refused."""
    checkpoint, program = save(folder, sources), compiled(folder, text, config, layout)
    found = []
    for rank in range(layout.num_ranks):
        own = program.at_rank(rank)
        targets = allocate(own.plan(checkpoint))
        Loader(own, targets).load(checkpoint)
        found.append(targets)
    return found


def compiled(folder: Path, text: str, config: Mapping[str, object], layout: Layout, runtime: str = "own") -> Program:
    return compile(spec_of(Path(mkdtemp(dir=folder)), text), config=config, runtime=runtime, layout=layout)


def refused(folder: Path, text: str, config: Mapping[str, object], layout: Layout) -> MapperError:
    with pytest.raises(MapperError) as caught:
        compiled(folder, text, config, layout)
    return caught.value


def numbered(**shapes: tuple[int, ...]) -> Tensors:
    """Return tensors of these shapes, every element different from all others; `__` in a name stands for a dot."""
    return {
        name.replace("__", "."): counted(1 + 1000 * number, shape, torch.float32)
        for number, (name, shape) in enumerate(shapes.items())
    }


def equal(found: list[Tensors], expected: list[Tensors]) -> bool:
    return [all_raw(each) for each in found] == [all_raw(each) for each in expected]


# --- tp-02: interleaved groups ------------------------------------------------------------------------------------------

GROUPS = """
config: {required: [num_k_heads, num_v_heads]}
runtimes:
  own:
    mesh: vllm
    rules:
      - target: in_proj_ba.weight
        dims: {out: num_v_heads * 2, hidden: 3}
        shard: {out: {axis: tp, units: num_k_heads}}
"""


@case("tp-02")
def test_groups_of_interleaved_rows_are_cut_whole(bug: Case, tmp_path: Path) -> None:
    sources, labels = bug.sources(), bug["config"]["rows"].split()
    (source,) = sources.values()
    row = dict(zip(labels, source, strict=True))
    halves = source.chunk(2)  # the peer: all b, then all a, each cut for itself
    wrong = [torch.cat([half.chunk(2)[rank] for half in halves]) for rank in range(2)]
    assert [[labels[int(number)] for number in (each[:, 0] - 1) // 3] for each in wrong] == [
        ["b0", "b1", "b2", "b3"],
        ["a0", "a1", "a2", "a3"],
    ]

    expected = [
        {"in_proj_ba.weight": torch.stack([row[label] for label in text.split()])} for text in ("b0 b1 a0 a1", "b2 b3 a2 a3")
    ]
    assert equal(ranks_of(bug, tmp_path, GROUPS, sources), expected)


@FEW
@given(SIZES, SIZES, st.integers(1, 6))
def test_group_is_cut_by_no_size(shared: Path, shares: int, per_group: int, tp: int) -> None:
    num_groups = shares * 2
    sources = numbered(in_proj_ba__weight=(2 * num_groups * per_group, 3))
    config, layout = {"num_k_heads": num_groups, "num_v_heads": num_groups * per_group}, Layout(tp=tp)
    if num_groups % tp:
        assert told(refused(shared, GROUPS, config, layout).diagnostics) == [("M329", "in_proj_ba.weight")]
        return
    parts = sources["in_proj_ba.weight"].unflatten(0, (tp, -1))
    assert equal(loaded(shared, GROUPS, config, layout, sources), [{"in_proj_ba.weight": part} for part in parts])


# --- tp-04, tp-20: fused columns ----------------------------------------------------------------------------------------

FUSED = """
config: {required: [num_heads, num_kv_heads], optional: {head_dim: {default: 1}, inner: {default: 4}}}
runtimes:
  own:
    mesh: vllm
    rules:
      - target: qkv
        sources: [q, k, v]
        dims: {out: [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim], hidden: 3}
        shard: {out: {axis: tp, units: [num_heads, num_kv_heads, num_kv_heads]}}
      - {target: gate_up, sources: [gate, up], dims: {out: [inner, inner], hidden: 3}, shard: {out: tp}}
  trainer:
    rules: [{copy: [q, k, v, gate, up]}]
"""


def plainly_cut(parts: list[torch.Tensor], tp: int) -> tuple[torch.Tensor, ...]:
    """Cut as the peer did: the fused matrix in equal slices, whatever its parts are."""
    return torch.cat(parts).chunk(tp)


def fused(sources: Tensors, tp: int, rank: int) -> Tensors:
    """Return what one rank holds, each part cut for itself; tp divides them all."""
    mine = {name: tensor.unflatten(0, (tp, -1))[rank] for name, tensor in sources.items()}
    return {"qkv": torch.cat([mine["q"], mine["k"], mine["v"]]), "gate_up": torch.cat([mine["gate"], mine["up"]])}


@case("tp-04")
def test_each_part_of_a_fused_matrix_is_cut_for_itself(bug: Case, tmp_path: Path) -> None:
    sources = bug.sources()
    q, k, v, gate, up = sources.values()
    wrong = plainly_cut([q, k, v], 2)
    assert wrong[0].tolist() == q.tolist()  # rank 0 has all queries, rank 1 all keys and values
    expected = [
        {"qkv": torch.cat([q[:2], k[:1], v[:1]]), "gate_up": torch.cat([gate[:2], up[:2]])},
        {"qkv": torch.cat([q[2:], k[1:], v[1:]]), "gate_up": torch.cat([gate[2:], up[2:]])},
    ]
    found = ranks_of(bug, tmp_path, FUSED, sources)
    assert equal(found, expected)
    assert not torch.equal(found[0]["qkv"], wrong[0])


@FEW
@given(SIZES, SIZES, SIZES, st.sampled_from([1, 2, 3, 5]))
@example(1, 2, 2, 2)
def test_parts_are_cut_for_themselves_at_every_size(shared: Path, kv: int, ratio: int, head_dim: int, tp: int) -> None:
    heads, kv_heads = kv * ratio * tp, kv * tp
    sources = numbered(
        q=(heads * head_dim, 3), k=(kv_heads * head_dim, 3), v=(kv_heads * head_dim, 3), gate=(7 * tp, 3), up=(7 * tp, 3)
    )
    config = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim, "inner": 7 * tp}
    found = loaded(shared, FUSED, config, Layout(tp=tp), sources)
    assert equal(found, [fused(sources, tp, rank) for rank in range(tp)])


@case("tp-20")
def test_weights_go_from_trainer_to_engine_and_back_unchanged(bug: Case, tmp_path: Path) -> None:
    base, config, layout = save(tmp_path, bug.sources()), bug["config"], Layout(**bug["layout"])
    trainer = compiled(tmp_path, FUSED, config, Layout(), "trainer")
    weights = {name: -tensor for name, tensor in bug.sources().items()}  # after a step of training
    wrong = plainly_cut([weights["q"], weights["k"], weights["v"]], layout.tp)

    sent = tmp_path / "sent"
    export([(trainer.plan(base), weights)], sent)
    received = Checkpoint.open(sent)
    engine = compiled(tmp_path, FUSED, config, layout)
    plans = []
    for rank in range(layout.num_ranks):
        own, targets, streamed = engine.at_rank(rank), bug.targets(), bug.targets()
        Loader(own, targets).load(received)
        with Loader(own, streamed).update() as session:
            session.feed_all(weights.items())
        assert all_raw(targets) == all_raw(streamed) == all_raw(fused(weights, layout.tp, rank))
        assert not torch.equal(targets["qkv"], wrong[rank])
        plans.append((own.plan(received), targets))
    export(plans, tmp_path / "back")
    back = Checkpoint.open(tmp_path / "back")
    with CheckpointFiles(back) as files:
        assert all_raw({name: files.tensor(header) for name, header in back.tensors.items()}) == all_raw(weights)


# --- tp-06, tp-19: fewer key and value heads than ranks ------------------------------------------------------------------

LONE = """
config: {required: [num_key_value_heads], optional: {head_dim: {default: 4}}}
runtimes:
  own:
    mesh: vllm
    rules:
      - target: k_proj.weight
        dims: {out: num_key_value_heads * head_dim, hidden: 4}
        shard: {out: {axis: tp, units: num_key_value_heads, replicate: true}}
"""


@case("tp-06")
def test_lone_key_heads_are_replicated_whole_where_the_rule_says_so(bug: Case, tmp_path: Path) -> None:
    sources, layout, config = bug.sources(), Layout(**bug["layout"]), bug["config"]
    k = sources["k_proj.weight"]
    wrong = k.chunk(layout.tp)  # the peer: half a head on each rank
    assert [len(each) for each in wrong] == [2] * layout.tp
    found = ranks_of(bug, tmp_path, LONE, sources)
    assert equal(found, [{"k_proj.weight": head} for head in (k[:4], k[:4], k[4:], k[4:])])

    error = refused(tmp_path, LONE, config, Layout(tp=3))
    assert told(error.diagnostics) == [("M329", "k_proj.weight")]
    assert "the dim 'out' of k_proj.weight has 2 units, which tp=3 does not divide" in str(error)
    assert "sizes of tp that work: 1, 2, 4, 6, " in str(error)
    unsaid = refused(tmp_path, LONE.replace(", replicate: true", ""), config, layout)
    assert told(unsaid.diagnostics) == [("M329", "k_proj.weight")]


@FEW
@given(st.integers(1, 4), SIZES, st.integers(1, 12))
@example(2, 3, 4)
@example(4, 1, 2)
def test_lone_heads_are_on_every_rank_whole_or_refused(shared: Path, heads: int, head_dim: int, tp: int) -> None:
    config, layout = {"num_key_value_heads": heads, "head_dim": head_dim}, Layout(tp=tp)
    sources = numbered(k_proj__weight=(heads * head_dim, 4))
    if tp % heads and heads % tp:
        assert told(refused(shared, LONE, config, layout).diagnostics) == [("M329", "k_proj.weight")]
        return
    k = sources["k_proj.weight"]
    share = max(heads // tp, 1) * head_dim
    first = [rank * heads // tp * head_dim for rank in range(tp)]
    assert equal(loaded(shared, LONE, config, layout, sources), [{"k_proj.weight": k[at : at + share]} for at in first])


BESIDE = """
config: {required: [num_attention_heads, num_key_value_heads], optional: {head_dim: {default: 2}}}
let: {q_size: num_attention_heads * head_dim, kv_size: num_key_value_heads * head_dim}
runtimes:
  own:
    mesh: vllm
    rules:
      - target: qkv_proj.{leaf}
        sources: ['q_proj.{leaf}', 'k_proj.{leaf}', 'v_proj.{leaf}']
        dims: {out: [q_size, kv_size, kv_size], in: 2}
        shard: {out: {axis: tp, units: [num_attention_heads, num_key_value_heads, num_key_value_heads]}}
"""


@case("tp-19")
def test_value_heads_beside_query_heads_are_replicated_in_order(bug: Case, tmp_path: Path) -> None:
    sources, tp = bug.sources(), bug["layout"]["tp"]
    v = sources["v_proj.weight"]
    wrong = [v[2 * rank : 2 * rank + 2] for rank in range(tp)]  # the peer: by rank, as if there were a head for each
    assert [each.tolist() for each in wrong] == [v[:2].tolist(), v[2:].tolist(), [], []]
    found = [each["qkv_proj.weight"] for each in ranks_of(bug, tmp_path, BESIDE, sources)]
    assert [each[4:].tolist() for each in found] == [v[:2].tolist(), v[:2].tolist(), v[2:].tolist(), v[2:].tolist()]
    q, k = sources["q_proj.weight"], sources["k_proj.weight"]
    assert [each[:2].tolist() for each in found] == [each.tolist() for each in q.chunk(tp)]
    assert [each[2:4].tolist() for each in found] == [k[:2].tolist(), k[:2].tolist(), k[2:].tolist(), k[2:].tolist()]


# --- tp-07, tp-08: the bias of a layer that is cut by its input ----------------------------------------------------------


def row_parallel(name: str, bias: str) -> str:
    return f"""
runtimes:
  own:
    mesh: vllm
    rules:
      - {{target: '{name}.{{leaf}}', dims: {{out: 4, in: 8}}, shard: {{in: {{axis: tp{bias}}}}}}}
"""


def summed(ranks: list[Tensors], given_input: torch.Tensor, name: str) -> torch.Tensor:
    """Return the sum over ranks of what each computes from its slice of the input, its bias included."""
    parts = given_input.chunk(len(ranks))
    return sum(
        (each[f"{name}.weight"] @ part + each[f"{name}.bias"] for each, part in zip(ranks, parts, strict=True)), torch.zeros(4)
    )


@case("tp-07")
def test_bias_before_a_sum_is_on_the_first_rank_alone(bug: Case, tmp_path: Path) -> None:
    sources = bug.sources()
    weight, bias = sources.values()
    given_input = torch.arange(8.0)
    whole = weight @ given_input + bias
    halves = weight.chunk(2, dim=1)
    peer = [{"o_proj.weight": half, "o_proj.bias": bias} for half in halves]
    assert torch.equal(summed(peer, given_input, "o_proj"), whole + bias)  # one bias too many

    found = ranks_of(bug, tmp_path, row_parallel("o_proj", ", bias: first"), sources)
    zeros = torch.zeros(4)
    assert equal(found, [{"o_proj.weight": halves[0], "o_proj.bias": bias}, {"o_proj.weight": halves[1], "o_proj.bias": zeros}])
    assert torch.equal(summed(found, given_input, "o_proj"), whole)
    assert equal(ranks_of(bug, tmp_path, row_parallel("o_proj", ", bias: all"), sources), peer)  # added after the sum
    unsaid = bug.program(tmp_path, row_parallel("o_proj", ""))
    assert told(refusal(unsaid, tmp_path, sources, bug.targets())) == [("M506", "o_proj.bias")]


@FEW
@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from(["first", "all"]))
def test_biases_of_all_ranks_add_up_as_the_rule_says(shared: Path, tp: int, bias: str) -> None:
    sources = numbered(o_proj__weight=(4, 8), o_proj__bias=(4,))
    found = loaded(shared, row_parallel("o_proj", f", bias: {bias}"), {}, Layout(tp=tp), sources)
    total = torch.stack([each["o_proj.bias"] for each in found]).sum(0)
    assert torch.equal(total, sources["o_proj.bias"] * (tp if bias == "all" else 1))


@case("tp-08")
def test_bias_of_one_dim_is_not_cut_with_its_weight(bug: Case, tmp_path: Path) -> None:
    sources = bug.sources()
    weight, bias = sources.values()
    first_inputs = slice(0, weight.size(1) // 2)
    with pytest.raises(IndexError, match="too many indices"):
        [tensor[:, first_inputs] for tensor in sources.values()]  # the peer: one slice for all leaves
    found = ranks_of(bug, tmp_path, row_parallel("down_proj", ", bias: all"), sources)
    assert equal(found, [{"down_proj.weight": half, "down_proj.bias": bias} for half in weight.chunk(2, dim=1)])


# --- tp-10: a checkpoint that was cut for other ranks --------------------------------------------------------------------

PRESHARDED = """
runtimes:
  own:
    mesh: vllm
    rules:
      - target: experts.{expert}.w1
        sources:
          - TP-000.experts.{expert}.w1
          - TP-001.experts.{expert}.w1
          - TP-002.experts.{expert}.w1
          - TP-003.experts.{expert}.w1
        dims: {out: [2, 2, 2, 2], hidden: 3}
        shard: {out: {axis: tp, joined: true}}
      - {target: norm, source: TP-common.norm}
index: {expert: {count: 1}}
"""


@case("tp-10")
def test_slices_for_other_ranks_are_joined_before_they_are_cut(bug: Case, tmp_path: Path) -> None:
    # In the files all slices of a tensor have one name: a stream tells them apart by the file.
    files = bug["checkpoint"]
    sources = tensors({f"{file}.{name}": text for file, texts in files.items() for name, text in texts.items()})
    name, slices = "experts.0.w1", [f"TP-{rank:03}" for rank in range(bug["config"]["ckpt_tp"])]
    whole = torch.cat([sources[f"{file}.{name}"] for file in slices])
    wrong = bug.targets()
    wrong[name][:2] = sources[f"TP-000.{name}"]  # the peer: the file of its own number, and the name counts as loaded
    assert all_raw({"w": wrong[name][2:]}) == all_raw({"w": bug.targets()[name][2:]})

    found = ranks_of(bug, tmp_path, PRESHARDED, sources)
    assert equal(found, [{name: half, "norm": sources["TP-common.norm"]} for half in whole.chunk(2)])
    for rank, needed in ((0, [0, 1]), (1, [2, 3])):
        targets = bug.targets()
        report = load(bug.program(tmp_path, PRESHARDED, rank=rank), tmp_path, sources, targets)
        assert (report.loaded, report.elsewhere) == (3, 2), needed
    for lost in slices:  # names are not enough: each slice counts
        less = {each: tensor for each, tensor in sources.items() if each != f"{lost}.{name}"}
        program = bug.program(tmp_path, PRESHARDED, rank=0)
        assert told(refusal(program, tmp_path, less, bug.targets())) == [("M501", f"{lost}.{name}")]

    folder = tmp_path / "as it lies"
    folder.mkdir()
    for file, texts in files.items():
        save_file({each: sources[f"{file}.{each}"] for each in texts}, folder / f"{file}.safetensors")
    with pytest.raises(MapperError) as caught:
        Checkpoint.open(folder)
    assert told(caught.value.diagnostics) == [("M450", str(folder / f"{file}.safetensors")) for file in slices[1:]]


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_slices_of_four_ranks_go_to_any_number_of_ranks(tp: int, tmp_path: Path) -> None:
    names = [f"TP-{rank:03}.experts.0.w1" for rank in range(4)]
    sources = {name: counted(1 + 10 * number, (2, 3), torch.float32) for number, name in enumerate(names)}
    whole = torch.cat([sources[name] for name in names])
    sources["TP-common.norm"] = torch.arange(4.0)
    found = loaded(tmp_path, PRESHARDED, {}, Layout(tp=tp), sources)
    assert equal([{"w": each["experts.0.w1"]} for each in found], [{"w": part} for part in whole.chunk(tp)])


def test_size_that_cuts_a_row_of_joined_slices_is_refused(tmp_path: Path) -> None:
    error = refused(tmp_path, PRESHARDED, {}, Layout(tp=3))
    assert told(error.diagnostics) == [("M329", "experts.0.w1")]
    assert "has 8 units, which tp=3 does not divide" in str(error)


@pytest.mark.parametrize("cut", ["{axis: [tp, tp, tp, tp], joined: true}", "{axis: tp, units: [2, 2, 2, 2], joined: true}"])
def test_joined_slices_have_one_axis_and_one_number_of_units(cut: str, tmp_path: Path) -> None:
    error = refused(tmp_path, PRESHARDED.replace("{axis: tp, joined: true}", cut), {}, Layout(tp=2))
    assert [each.code for each in error.diagnostics] == ["M316"]
    assert "'out' is cut as one, expected one axis, one number of units and one target" in str(error)


def test_units_that_are_replicated_are_not_uneven(tmp_path: Path) -> None:
    error = refused(tmp_path, LONE.replace("replicate: true", "replicate: true, uneven: pad"), {}, Layout())
    assert [each.code for each in error.diagnostics] == ["M127"]
    assert "'uneven' and 'replicate' exclude each other in a cut of a dim" in str(error)


# --- tp-13, tp-14: experts ----------------------------------------------------------------------------------------------

EXPERTS = """
config: {required: [n_experts]}
runtimes:
  own:
    mesh: vllm
    rules:
      - {target: w2_weight, source: experts.down_proj, dims: {expert: n_experts, out: 4, in: 3}, shard: {expert: ep}}
"""


@case("tp-13")
def test_experts_lie_on_expert_ranks_in_order(bug: Case, tmp_path: Path) -> None:
    sources, num_experts = bug.sources(), bug["config"]["n_experts"]
    (experts,) = sources.values()
    ends = [(rank * num_experts // 2, (rank + 1) * num_experts // 2) for rank in range(2)]
    assert [len(experts[stop:start]) for start, stop in ends] == [0, 0]  # the peer: the bounds swapped

    assert equal(ranks_of(bug, tmp_path, EXPERTS, sources), [{"w2_weight": experts[start:stop]} for start, stop in ends])
    five = numbered(experts__down_proj=(5, 4, 3))
    found = loaded(tmp_path, EXPERTS, {"n_experts": 5}, Layout(**bug["layout"]), five)
    assert equal(found, [{"w2_weight": part} for part in (five["experts.down_proj"][:3], five["experts.down_proj"][3:])])
    found = loaded(tmp_path, EXPERTS, bug["config"], Layout(dp=2), sources)
    assert equal(found, [{"w2_weight": experts}] * 2)
    program = bug.program(tmp_path, EXPERTS, layout=Layout())  # all experts, for a model with two of them
    assert told(refusal(program, tmp_path, sources, bug.targets())) == [("M532", "w2_weight")]


@FEW
@given(st.integers(1, 9), st.integers(1, 4))
@example(5, 2)
@example(2, 4)
def test_every_expert_lies_on_one_rank_and_none_is_lost(shared: Path, num_experts: int, ep: int) -> None:
    sources = numbered(experts__down_proj=(num_experts, 4, 3))
    found = loaded(shared, EXPERTS, {"n_experts": num_experts}, Layout(tp=ep, ep=ep), sources)
    counts = [len(each["w2_weight"]) for each in found]
    assert counts == [num_experts // ep + (rank < num_experts % ep) for rank in range(ep)]
    assert torch.equal(torch.cat([each["w2_weight"] for each in found]), sources["experts.down_proj"])


EXPERTS_WITH_BIAS = """
config: {required: [n_experts]}
formats:
  moe: [{leaves: {weight: {dims: [out, in], source: proj}, bias: [out]}}]
runtimes:
  own:
    mesh: vllm
    rules:
      - target: w2_{leaf}
        source: experts.down_{leaf}
        format: moe
        dims: {expert: n_experts, out: 6, in: 8}
        shard: {expert: ep, in: {axis: moe_tp, bias: first}}
"""


@case("tp-14")
def test_inner_dim_of_experts_is_whole_with_expert_parallelism(bug: Case, tmp_path: Path) -> None:
    sources, tp = bug.sources(), bug["layout"]["tp"]
    weight, bias = sources.values()
    wrong = bug.targets()
    with pytest.raises(RuntimeError, match="size of tensor"):
        wrong["w2_weight"].copy_(weight.chunk(2)[0].chunk(tp, dim=2)[0])  # the peer: both cuts

    found = ranks_of(bug, tmp_path, EXPERTS_WITH_BIAS, sources)
    assert equal(found, [{"w2_weight": weight[at : at + 2], "w2_bias": bias[at : at + 2]} for at in (0, 2)])
    found = loaded(tmp_path, EXPERTS_WITH_BIAS, bug["config"], Layout(tp=tp), sources)
    expected = zip(weight.chunk(tp, dim=2), (bias, torch.zeros_like(bias)), strict=True)
    assert equal(found, [{"w2_weight": part, "w2_bias": own} for part, own in expected])


@pytest.mark.parametrize("layout", ["tp=2,ep=2", "tp=4,ep=4", "tp=2,dp=2,ep=4", "tp=4", "tp=2,dp=2", "dp=2"])
def test_experts_are_cut_by_expert_or_inside_and_never_both(layout: str, tmp_path: Path) -> None:
    sources, chosen = read_case("tp-14").sources(), Layout.parse(layout)
    for each in loaded(tmp_path, EXPERTS_WITH_BIAS, {"n_experts": 4}, chosen, sources):
        inner = 8 if chosen.ep > 1 else 8 // (chosen.tp * chosen.dp)
        assert each["w2_weight"].shape == (4 // chosen.ep, 6, inner)
        assert each["w2_bias"].shape == (4 // chosen.ep, 6)


# --- tp-17: a tower whose heads the ranks do not divide ------------------------------------------------------------------

TOWER = """
config: {required: [vision_heads]}
runtimes:
  own:
    mesh: {like: vllm, vision_tp: tp if vision_heads % tp == 0 else 1}
    rules:
      - at: visual.blocks.0.attn
        rules:
          - target: qkv.{leaf}
            dims: {out: [vision_heads, vision_heads, vision_heads], in: 16}
            shard: {out: vision_tp}
          - {target: 'proj.{leaf}', dims: {out: 16, in: vision_heads}, shard: {in: {axis: vision_tp, bias: first}}}
"""


@case("tp-17")
def test_tower_is_replicated_where_its_heads_do_not_divide(bug: Case, tmp_path: Path) -> None:
    sources, tp, heads = bug.sources(), bug["layout"]["tp"], bug["config"]["vision_heads"]
    with pytest.raises(AssertionError, match="16 is not divisible by 3"):
        require_divides(heads, tp)
    assert equal(ranks_of(bug, tmp_path, TOWER, sources), [sources] * tp)


def require_divides(heads: int, tp: int) -> None:
    """Fail as the peer did, whatever else fits the ranks."""
    assert heads % tp == 0, f"{heads} is not divisible by {tp}"


@pytest.mark.parametrize("tp", [1, 2, 4, 5])
def test_all_leaves_of_a_tower_are_cut_or_none(tp: int, tmp_path: Path) -> None:
    config, sources = read_case("tp-17")["config"], read_case("tp-17").sources()
    size = tp if 16 % tp == 0 else 1
    at = "visual.blocks.0.attn"
    for rank, found in enumerate(loaded(tmp_path, TOWER, config, Layout(tp=tp), sources)):
        mine = rank if size > 1 else 0
        expected = {
            f"{at}.{leaf}": torch.cat([part.chunk(size)[mine] for part in sources[f"{at}.{leaf}"].chunk(3)])
            for leaf in ("qkv.weight", "qkv.bias")
        }
        expected[f"{at}.proj.weight"] = sources[f"{at}.proj.weight"].chunk(size, dim=1)[mine]
        expected[f"{at}.proj.bias"] = sources[f"{at}.proj.bias"] * (mine == 0)
        assert all_raw(found) == all_raw(expected)


# --- tp-18: padded heads in blocks --------------------------------------------------------------------------------------

BLOCKS = """
config: {required: [heads, head_dim, width]}
let:
  rows: heads * head_dim
  whole: head_dim * block_out // gcd(head_dim, block_out)
  padded: ceil_div(rows, whole * tp) * whole * tp
formats:
  blocks:
    - leaves:
        weight: {dims: [out, in], dtype: float8_e4m3fn}
        weight_scale_inv: {dims: [out / block_out, in / block_in], dtype: float32, neutral: 1}
runtimes:
  own:
    mesh: vllm
    rules:
      - target: q_b_proj.{leaf}
        format: blocks
        dims: {out: rows, in: width}
        shard: {out: {axis: tp, pad: whole * tp, units: padded // head_dim}}
"""
HEADS = BLOCKS.replace("whole * tp", "head_dim * tp")


@case("tp-18")
def test_padded_heads_fill_whole_blocks_on_every_rank(bug: Case, tmp_path: Path) -> None:
    sources, config, tp = bug.sources(), bug["config"], bug["layout"]["tp"]
    weight, scale = sources.values()
    with pytest.raises(AssertionError, match="4 is not divisible by 3"):
        require_divides(config["heads"], tp)
    expected = [
        {"q_b_proj.weight": weight[:12], "q_b_proj.weight_scale_inv": scale[:3]},
        {"q_b_proj.weight": weight[12:], "q_b_proj.weight_scale_inv": scale[3:]},
        {"q_b_proj.weight": torch.zeros(12, 8).to(weight.dtype), "q_b_proj.weight_scale_inv": torch.ones(3, 2)},
    ]
    assert equal(ranks_of(bug, tmp_path, BLOCKS, sources), expected)
    expected[2]["q_b_proj.weight_scale_inv"] = torch.zeros(3, 2)
    assert equal(ranks_of(bug, tmp_path, BLOCKS.replace("neutral: 1", "neutral: 0"), sources), expected)

    # Heads padded to the ranks alone give 6 rows a rank: a block and a half.
    error = refused(tmp_path, HEADS, config, Layout(tp=4))
    assert {each.code for each in error.diagnostics} == {"M330"}
    assert "is cut by tp=4 into 6 elements, which is not a whole number of blocks of 4" in str(error)
    found = loaded(tmp_path, BLOCKS, config, Layout(tp=4), sources)
    assert [len(each["q_b_proj.weight"]) for each in found] == [12] * 4


@FEW
@given(st.integers(1, 7), st.sampled_from([2, 3, 5, 6]), st.sampled_from([2, 3, 4]), st.integers(1, 5))
@example(4, 6, 4, 3)
def test_ranks_hold_whole_heads_and_whole_blocks_at_every_size(
    shared: Path, heads: int, head_dim: int, block: int, tp: int
) -> None:
    size = heads * head_dim
    config = {
        "heads": heads, "head_dim": head_dim, "width": 8,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [block, block]},
    }  # fmt: skip
    sources = {
        "q_b_proj.weight": counted(1, (size, 8), torch.float8_e4m3fn),
        "q_b_proj.weight_scale_inv": counted(1, (-(-size // block), -(-8 // block)), torch.float32),
    }
    found = loaded(shared, BLOCKS, config, Layout(tp=tp), sources)
    for name, unit in (("q_b_proj.weight", lcm(head_dim, block)), ("q_b_proj.weight_scale_inv", lcm(head_dim, block) // block)):
        assert {len(each[name]) % unit for each in found} == {0}
        joined = torch.cat([each[name] for each in found]).view(torch.uint8)
        given_rows = len(sources[name])
        assert torch.equal(joined[:given_rows], sources[name].view(torch.uint8))
        padding = torch.full_like(torch.cat([each[name].float() for each in found])[given_rows:], float("scale" in name))
        assert torch.equal(torch.cat([each[name] for each in found])[given_rows:].float(), padding)
