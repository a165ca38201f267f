"""Finalize steps: what they compute, where they exist, in which order they run, and what is refused before any load."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn

from mapper.checkpoint import Checkpoint
from mapper.compiler import Program
from mapper.diagnostics import MapperError
from mapper.finalize import register
from mapper.load import Loader
from mapper.report.load import Finalized
from tests.loads import Tensors, all_raw, told, write
from tests.oracle.families import FAMILIES, write_family
from tests.oracle.goldens import GoldenParam, GoldenRank, iter_ranks, sentinel_tensors, sha256
from tests.small import program_of, refused
from tests.test_vllm_goldens import program_of as golden_program

V4 = {"deepseek_v4_bf16": 40, "deepseek_v4_dspark": 40, "deepseek_v4_fp4": 55, "deepseek_v4_fp4_odd": 27, "deepseek_v4_fp8": 40}


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def stepped(
    *steps: str, rules: str = "{copy: [a, b, c]}", layout: str = "", rank: int = 0, before: str = "", **config: Any
) -> Program:
    """Return the program of these rules and steps, each on one line in flow style."""
    listed = "".join(f"      - {step}\n" for step in steps)
    text = f"{before}\nruntimes:\n  own:\n    mesh: vllm\n    rules:\n      - {rules}\n    finalize:\n{listed}"
    return program_of(text, layout=layout, rank=rank, config=config)


def derived(operations: str, **tensors: torch.Tensor) -> torch.Tensor:
    """Return what a step with these operations derives from the tensors, in their order."""
    names = ", ".join(tensors)
    program = stepped(f"{{id: s, inputs: [{names}], output: out, do: [{operations}]}}", rules=f"{{copy: [{names}]}}")
    model: Tensors = dict(tensors)
    Loader(program, model).finalize()
    return model["out"]


# --- mHC of DeepSeek V4, against vLLM's own values ----------------------------------------------------------------------


def outputs(rank: GoldenRank, tensors: Tensors) -> dict[str, str]:
    return {param.name: sha256(tensors[param.name]) for param in rank.extra}


def expected(rank: GoldenRank) -> dict[str, str]:
    return {param.name: param.sha256 for param in rank.extra}


@pytest.mark.parametrize("family", V4)
def test_all_ranks_hold_what_vllm_derives_after_a_load_a_dummy_load_and_a_reload(family: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_family(family, tmp_path / family))
    programs: dict[str, Program] = {}
    num_derived = 0
    for rank in iter_ranks(family):
        if rank.setting not in programs:
            programs[rank.setting] = golden_program(rank)
        program = programs[rank.setting].at_rank(rank.rank)
        if rank.tp != 2 and not rank.extra:
            assert not Loader(program, sentinel_tensors(rank)).finalize().finalized
            continue
        tensors = model_of(rank)
        loader = Loader(program, tensors)
        first = loader.load(checkpoint)
        held = {param.name: tensors[param.name].data_ptr() for param in rank.extra}
        assert outputs(rank, tensors) == expected(rank), str(rank)
        for param in rank.extra:
            tensors[param.name].fill_(7)
        assert loader.load(checkpoint).finalized == first.finalized
        assert outputs(rank, tensors) == expected(rank), str(rank)
        assert {name: tensors[name].data_ptr() for name in held} == held

        filled = {name: each for name, each in tensors.items() if name not in held}
        dummy = Loader(program, filled)
        assert dummy.finalize().finalized == first.finalized
        assert outputs(rank, filled) == expected(rank), str(rank)
        assert dummy.finalize().finalized == ()
        assert [each.output for each in first.finalized] == list(held)
        num_derived += len(held)
    assert num_derived == V4[family] == sum(len(rank.extra) for rank in iter_ranks(family))


def model_of(rank: GoldenRank) -> Tensors:
    tensors = sentinel_tensors(rank)
    return tensors | {alias: tensors[name] for alias, name in rank.aliases}


def test_every_derived_tensor_of_the_goldens_is_the_broadcast_of_the_first_layer() -> None:
    named: dict[str, set[str]] = {}
    for family in FAMILIES:
        for rank in iter_ranks(family):
            each: GoldenParam
            for each in rank.extra:
                named.setdefault(each.name, set()).add(family)
    assert named == {"model.layers.0.hc_attn_fn_broadcast": set(V4)}


# --- operations ---------------------------------------------------------------------------------------------------------


def test_sum_adds_up_the_factors_that_vanish() -> None:
    a = numbers(6, 4 * 5)
    assert torch.equal(derived("{sum: mix (stream hidden) -> mix hidden, stream: 4}", a=a), a.view(6, 4, 5).sum(1))
    assert torch.equal(derived("{sum: (p q) (r s) -> s p, p: 2, s: 10}", a=a), a.view(2, 3, 2, 10).sum((1, 2)).T)
    whole = torch.arange(12, dtype=torch.int8).view(3, 4)
    summed = derived("{sum: x y -> y}", a=whole)
    assert (summed.dtype, summed.tolist()) == (torch.int8, [12, 15, 18, 21])


def test_view_reorders_and_take_cuts_by_name() -> None:
    a = numbers(4 * 5, 3)
    split = a.view(4, 5, 3)
    assert torch.equal(derived("{view: (h w) c -> c (w h), w: 5}", a=a), split.permute(2, 1, 0).reshape(3, 20))
    assert torch.equal(
        derived("{view: (h w) c -> h w c, w: 5}, {take: {w: [1, 3], c: [2, 3]}}, {cast: bfloat16}", a=a),
        split[:, 1:3, 2:].bfloat16(),
    )
    assert torch.equal(
        derived("{view: (2 h w) c -> h (2 w) c, w: 5}", a=a), a.view(2, 2, 5, 3).transpose(0, 1).reshape(2, 10, 3)
    )


def test_result_that_is_a_view_of_its_input_gets_storage_of_its_own() -> None:
    a = numbers(5, 3)
    out = derived("{view: x y -> x y}, {take: {x: [1, 2]}}", a=a)
    a.zero_()
    assert out.abs().min() > 0


def test_values_are_multiplied_by_the_scales_of_their_blocks() -> None:
    values = numbers(5, 7).to(torch.float8_e4m3fn)
    scales = numbers(3, 3, seed=1)
    grid = scales.repeat_interleave(2, 0)[:5].repeat_interleave(3, 1)[:, :7]
    assert torch.equal(
        derived("{dequantize: [2, 3]}, {cast: bfloat16}", a=values, b=scales), (values.float() * grid).bfloat16()
    )
    exponents = torch.tensor([[127], [130]], dtype=torch.uint8)
    out = derived("{dequantize: [4, 7]}", a=values, b=exponents)
    assert torch.equal(out, values.float() * torch.tensor([1.0] * 4 + [8.0])[:, None])


def test_call_takes_all_tensors_and_the_further_keys() -> None:
    @register("tests.weighted")
    def weighted(first: torch.Tensor, second: torch.Tensor, *, factor: int) -> torch.Tensor:
        return first + factor * second

    a, b = numbers(3), numbers(3, seed=1)
    assert torch.equal(derived("{call: tests.weighted, factor: 2 + 1}", a=a, b=b), a + 3 * b)
    assert torch.equal(derived("{call: 'torch:add', alpha: 2}", a=a, b=b), torch.add(a, b, alpha=2))


UNFIT = {
    "axes": ("{sum: x y -> x}", (6,), "the formula has 2 axes, and the tensor the shape [6]"),
    "factor": ("{view: (p q) -> p q, p: 4}", (6,), "the axis (p q) has 6 elements, expected a multiple of 4"),
    "open": ("{view: (p q) -> p q}", (6,), "the sizes of 'p' and 'q' are both open"),
    "range": ("{view: x -> x}, {take: {x: [2, 9]}}", (6,), "the range 2:9 is not in an axis of 6 elements"),
    "result": ("{call: 'builtins:len'}", (6,), "'builtins:len' returned int, expected a tensor"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_tensor_that_does_not_fit_is_told_with_the_step(case: str) -> None:
    operations, shape, problem = UNFIT[case]
    with pytest.raises(MapperError) as caught:
        derived(operations, a=numbers(*shape))
    (found,) = caught.value.diagnostics
    assert (found.code, found.message) == ("M631", f"the step 's' cannot derive 'out': {problem}")
    with pytest.raises(MapperError, match=r"values \[6\], scales \[2\] and blocks \[2\] do not belong together"):
        derived("{dequantize: [2]}", a=numbers(6), b=numbers(2))


# --- MLA absorption ------------------------------------------------------------------------------------------------------

MLA = """
config: {required: [heads, nope, value, lora]}
index: {layer: {count: 3, axis: pp}}
formats:
  linear:
    - when: quant_method == 'fp8'
      leaves: {weight: {dims: [out, in], dtype: float8_e4m3fn}, weight_scale_inv: [out / block_out, in / block_in]}
    - leaves: {weight: [out, in]}
runtimes:
  own:
    mesh: vllm
    rules:
      - target: layers.{layer}.kv_b_proj.{leaf}
        dims: {out: heads * (nope + value), in: lora}
        shard: {out: {axis: tp, units: heads}}
    finalize:
      - id: w_kc
        inputs: [INPUTS]
        output: layers.{layer}.w_kc
        do: [DEQUANTIZE{view: (head width) lora -> head width lora, width: nope + value}, {take: {width: [0, nope]}}]
      - id: w_vc
        inputs: [INPUTS]
        output: layers.{layer}.w_vc
        do:
          - {view: (head width) lora -> head lora width, width: nope + value}
          - {take: {width: [nope, nope + value]}}
"""
SIZES = {"heads": 4, "nope": 3, "value": 5, "lora": 6}
WEIGHT, SCALE = "'layers.{layer}.kv_b_proj.weight'", "'layers.{layer}.kv_b_proj.weight_scale_inv'"


def mla_text(*, is_fp8: bool) -> str:
    dequantize = "{dequantize: [block_out, block_in]}, {cast: bfloat16}, " if is_fp8 else ""
    text = MLA.replace("INPUTS", f"{WEIGHT}, {SCALE}" if is_fp8 else WEIGHT).replace("DEQUANTIZE", dequantize)
    lines = f"          - {dequantize[:-2].replace('}, {', chr(125) + chr(10) + '          - {')}\n" if is_fp8 else ""
    return text.replace("        do:\n", f"        do:\n{lines}")


@pytest.mark.parametrize("layout", ["", "tp=2", "tp=2,pp=2"])
@pytest.mark.parametrize("is_fp8", [False, True])
def test_absorbed_matrices_are_those_of_each_ranks_heads(layout: str, is_fp8: bool, tmp_path: Path) -> None:
    config: dict[str, Any] = dict(SIZES)
    tensors: Tensors = {}
    dense = {}
    for layer in range(3):
        name = f"layers.{layer}.kv_b_proj.weight"
        tensors[name] = numbers(32, 6, seed=layer).to(torch.float8_e4m3fn if is_fp8 else torch.bfloat16)
        dense[layer] = tensors[name]
        if is_fp8:
            config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [4, 3]}
            scales = tensors[f"{name}_scale_inv"] = numbers(8, 2, seed=10 + layer)
            dense[layer] = (tensors[name].float() * scales.repeat_interleave(4, 0).repeat_interleave(3, 1)).bfloat16()
    checkpoint = write(tmp_path / "mla", tensors, config)
    whole = program_of(mla_text(is_fp8=is_fp8), layout=layout, config=config)
    layers: list[int] = []
    for rank in range(whole.layout.num_ranks):
        program = whole.at_rank(rank)
        model: Tensors = {
            target.name: torch.zeros(target.shape, dtype=tensors["layers.0.kv_b_proj." + target.name.rpartition(".")[2]].dtype)
            for target in program.plan(checkpoint).targets.values()
        }
        report = Loader(program, model).load(checkpoint)
        tp, pp = rank % whole.layout.tp, rank // whole.layout.tp
        held = [layer for layer in range(3) if f"layers.{layer}.w_kc" in model]
        assert report.finalized == tuple(
            Finalized(step, f"layers.{layer}.{step}") for step in ("w_kc", "w_vc") for layer in held
        )
        layers += held if tp == 0 else []
        assert pp < whole.layout.pp
        for layer in held:
            heads = dense[layer].view(4, 8, 6)[tp * 4 // whole.layout.tp :][: 4 // whole.layout.tp]
            assert torch.equal(model[f"layers.{layer}.w_kc"], heads[:, :3])
            assert torch.equal(model[f"layers.{layer}.w_vc"], heads[:, 3:].transpose(1, 2))
            assert model[f"layers.{layer}.w_vc"].is_contiguous()
    assert layers == [0, 1, 2]


# --- where the output lies -----------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(numbers(4, 3), requires_grad=False)
        self.twice: torch.Tensor | None = None
        self.register_buffer("never_filled", torch.ones(2), persistent=False)


DOUBLE = "{id: s, inputs: [attn.weight], output: attn.twice, kind: KIND, do: [{call: 'tests.test_finalize:double'}]}"


def double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2


@pytest.mark.parametrize("kind", ["attribute", "buffer", "parameter"])
def test_output_is_created_once_and_written_in_place_afterwards(kind: str, tmp_path: Path) -> None:
    model = nn.ModuleDict({"attn": Attention()})
    program = stepped(DOUBLE.replace("KIND", kind), rules="{copy: [attn.weight]}")
    loader = Loader(program, model)
    results = []
    for seed in range(3):
        weight = numbers(4, 3, seed=seed)
        report = loader.load(write(tmp_path / f"{seed}", {"attn.weight": weight}, {}))
        attention: Any = model["attn"]
        assert torch.equal(attention.twice, weight * 2)
        assert report.finalized == (Finalized("s", "attn.twice"),)
        results.append((id(attention.twice), attention.twice.data_ptr()))
    assert len(set(results)) == 1
    assert ("attn.twice" in dict(model.named_parameters())) == (kind == "parameter")
    assert ("attn.twice" in dict(model.named_buffers())) == (kind == "buffer")
    assert ("attn.twice" in model.state_dict()) == (kind == "parameter")
    assert "derived  1 by s" in report.to_text()


def test_buffer_on_meta_that_a_step_writes_needs_no_value() -> None:
    with torch.device("meta"):
        attention = nn.Module()
        attention.register_parameter("weight", nn.Parameter(torch.empty(4, 3)))
        attention.register_buffer("twice", torch.empty(4, 3), persistent=False)
    model = nn.ModuleDict({"attn": attention})
    program = stepped(DOUBLE.replace("KIND", "buffer"), rules="{copy: [attn.weight]}")
    with Loader(program, model).update() as session:
        session.feed("attn.weight", numbers(4, 3))
    assert torch.equal(attention.get_buffer("twice"), numbers(4, 3) * 2)


def test_output_of_another_shape_or_dtype_is_refused() -> None:
    program = stepped(DOUBLE.replace("KIND", "attribute"), rules="{copy: [attn.weight]}")
    for held in (torch.zeros(3, 4), torch.zeros(4, 3, dtype=torch.bfloat16)):
        model = {"attn.weight": numbers(4, 3), "attn.twice": held}
        with pytest.raises(MapperError) as caught:
            Loader(program, model).finalize()
        (found,) = caught.value.diagnostics
        change = f"expected {held.dtype} {list(held.shape)}, found torch.float32 [4, 3]"
        assert (found.code, found.message) == ("M635", f"the step 's' would change 'attn.twice': {change}")
        assert not held.any()


def test_module_or_mapping_that_cannot_take_the_output_is_told() -> None:
    program = stepped(DOUBLE.replace("KIND", "attribute").replace("attn.twice", "other.twice"), rules="{copy: [attn.weight]}")
    with pytest.raises(MapperError, match="M636 the step 's' writes into the module 'other', which the model does not have"):
        Loader(program, nn.ModuleDict({"attn": Attention()})).finalize()
    with pytest.raises(MapperError, match=r"M632 'other.twice' is derived after the load, and the mapping"):
        Loader(program, MappingProxyType({"attn.weight": numbers(4, 3)}))
    with pytest.raises(MapperError, match=r"M634 the step 's' needs 'attn.weight', which the model does not have"):
        Loader(program, {"else": numbers(2)}).finalize()


# --- the graph -----------------------------------------------------------------------------------------------------------

COPY = "{id: ID, inputs: [FROM], output: TO, do: [{call: 'tests.test_finalize:double'}]}"


def copying(id: str, source: str, output: str) -> str:
    return COPY.replace("ID", id).replace("FROM", source).replace("TO", output)


LAYERED = "{target: 'w.{layer}'}"
INDEX = "index: {layer: {count: 61}}"


def test_steps_run_in_the_order_of_the_spec_then_of_the_index_after_what_they_read() -> None:
    last = copying("last", "'d.{layer}'", "'e.{layer}'")
    first = copying("first", "'w.{layer}'", "'d.{layer}'")
    program = stepped(last, first, rules=LAYERED, before="index: {layer: {count: 3}}")
    model = {f"w.{layer}": numbers(2, seed=layer) for layer in range(3)}
    ran = Loader(program, model).finalize().finalized
    assert [each.output for each in ran] == ["d.0", "d.1", "d.2", "e.0", "e.1", "e.2"]
    assert all(torch.equal(model[f"e.{layer}"], model[f"w.{layer}"] * 4) for layer in range(3))


def test_after_a_change_of_one_input_among_61_layers_exactly_what_follows_it_runs() -> None:
    steps = (copying("one", "'w.{layer}'", "'d.{layer}'"), copying("two", "'d.{layer}'", "'e.{layer}'"))
    program = stepped(*steps, rules=LAYERED, before=INDEX)
    model = {f"w.{layer}": numbers(2, seed=layer) for layer in range(61)}
    loader = Loader(program, model)
    assert len(loader.finalize().finalized) == 122
    before = all_raw(model)
    model["w.37"].fill_(3)
    assert loader.finalize(changed=["w.37"]).finalized == (Finalized("one", "d.37"), Finalized("two", "e.37"))
    changed = {name for name, raw in all_raw(model).items() if raw != before[name]}
    assert changed == {"w.37", "d.37", "e.37"}
    assert model["e.37"].tolist() == [12, 12]
    assert len(loader.finalize(changed="all").finalized) == 122
    assert all(torch.equal(model[f"e.{layer}"], model[f"w.{layer}"] * 4) for layer in range(61))
    with pytest.raises(MapperError, match=r"M637 'w.61' is no target of this rank\n  hint: did you mean 'w.6'"):
        loader.finalize(changed=["w.61"])


def test_step_whose_other_input_was_never_filled_is_refused() -> None:
    program = stepped("{id: s, inputs: [a, b], output: d, do: [{call: 'torch:add'}]}")
    model = {name: numbers(2) for name in "abc"}
    loader = Loader(program, model)
    with pytest.raises(MapperError) as caught:
        loader.finalize(changed=["a"])
    (found,) = caught.value.diagnostics
    assert (found.code, found.message) == ("M633", "the step 's' needs 'b', which is not complete")
    assert "d" not in model
    assert loader.finalize(changed=["a", "b"]).finalized == (Finalized("s", "d"),)


def test_step_that_failed_and_those_behind_it_run_when_asked_again() -> None:
    is_broken = [False]

    @register("tests.fragile")
    def fragile(tensor: torch.Tensor) -> torch.Tensor:
        if is_broken[0]:
            raise KeyError("fragile")
        return tensor + 1

    steps = (
        copying("first", "a", "d"),
        "{id: second, inputs: [d], output: e, do: [{call: tests.fragile}]}",
        copying("third", "e", "f"),
    )
    model = {name: numbers(2) for name in "abc"}
    loader = Loader(stepped(*steps), model)
    assert len(loader.finalize().finalized) == 3
    model["a"].fill_(3)
    is_broken[0] = True
    with pytest.raises(KeyError, match="fragile"):
        loader.finalize(changed=["a"])
    is_broken[0] = False
    assert [each.output for each in loader.finalize().finalized] == ["e", "f"]
    assert model["f"].tolist() == [14, 14]


def test_step_exists_where_when_holds_and_all_inputs_are_held() -> None:
    step = "{id: s, inputs: ['w.{layer}', 'v.{layer}'], output: 'd.{layer}', when: layer > 0, do: [{call: 'torch:add'}]}"
    rules = "{target: 'w.{layer}'}\n      - {target: 'v.{layer}', when: layer < 3}"
    whole = stepped(step, rules=rules, before="index: {layer: {count: 4, axis: pp}}", layout="pp=2")
    assert [each.output for each in whole.steps] == ["d.1", "d.2", "d.3"]
    for rank, layers in ((0, [0, 1]), (1, [2, 3])):
        model = {f"{kind}.{layer}": numbers(2) for kind in "wv" for layer in layers if (kind, layer) != ("v", 3)}
        ran = Loader(whole.at_rank(rank), model).finalize().finalized
        assert [each.output for each in ran] == [f"d.{rank + 1}"]


def test_steps_follow_a_program_to_another_root() -> None:
    program = stepped(copying("s", "m.a", "m.d"), rules="{copy: [m.a]}")
    for rooted, prefix in ((program, "m."), (program.scoped("m"), ""), (program.mounted("x"), "x.m.")):
        model = {f"{prefix}a": numbers(2)}
        assert [each.output for each in Loader(rooted, model).finalize().finalized] == [f"{prefix}d"]
    mixed = stepped(copying("s", "m.a", "n.d"), rules="{copy: [m.a, n.b]}")
    with pytest.raises(MapperError) as caught:
        mixed.scoped("m")
    (found,) = caught.value.diagnostics
    assert (found.code, found.message) == (
        "M354", "the step 's' reads from m.a and writes n.d, and the program is cut to 'm'",
    )  # fmt: skip
    assert not stepped(copying("s", "m.a", "m.d"), rules="{copy: [m.a, n.b]}").scoped("n").steps


REFUSED: dict[str, tuple[tuple[str, ...], str, str, str]] = {
    "unknown input": (
        (copying("s", "x", "d"),), "", "M350", "the step 's' reads 'x', which no rule and no step of this runtime writes",
    ),
    "one output for two": ((copying("s", "a", "d"), copying("t", "b", "d")), "", "M351", "two steps write 'd'"),
    "one output for all layers": ((copying("s", "'w.{layer}'", "d"),), LAYERED, "M351", "two steps write 'd'"),
    "output of a rule": ((copying("s", "a", "b"),), "", "M352", "the step 's' writes 'b', which a rule loads"),
    "circle": (
        (copying("s", "e", "d"), copying("t", "d", "e")), "", "M353", "steps wait for each other in a circle: d <- e <- d",
    ),
    "dtype": (
        ("{id: s, inputs: [a], output: d, do: [{cast: 16}]}",), "", "M304",
        "dtype is 16, expected a dtype such as bfloat16",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_graph_that_cannot_run_is_refused_when_it_is_compiled(case: str) -> None:
    steps, rule, code, message = REFUSED[case]
    listed = "".join(f"      - {step}\n" for step in steps)
    rules = f"mesh: vllm\n    rules:\n      - {rule or '{copy: [a, b, c]}'}"
    text = f"index: {{layer: {{count: 2}}}}\nruntimes:\n  own:\n    {rules}\n    finalize:\n{listed}"
    found = refused(text)
    assert (found.code, found.message) == (code, message)
    assert found.place is not None


@pytest.mark.parametrize(
    ("do", "problem"),
    [
        ("{sum: a b}", "'a b' has not one '->' between the axes before and after"),
        ("{sum: a (b -> a}", "'a (b' is no list of axes such as `mix (stream hidden)`"),
        ("{sum: a a -> a}", "'a' stands twice on one side of 'a a -> a'"),
        ("{view: a b -> a c}", "'c' stands right of the arrow of 'a b -> a c' and not left of it"),
        ("{view: a b -> a}", "a view loses nothing, and 'b' is not right of the arrow"),
        ("{sum: a b -> a, c: 2}", "'c' is no factor of the formula"),
        ("{take: {a: [0, 1]}}", "no view or sum before it names an axis 'a'"),
        ("{view: a -> a}, {take: {a: [0, 1, 2]}}", "the range of 'a' has 3 bounds, expected start and stop"),
        ("{cast: bfloat16, by: 2}", "'cast' takes no further key, found 'by'"),
        ("{dequantize: [2, 2]}", "'dequantize' takes two tensors, values and scales"),
    ],
)
def test_operation_that_no_tensor_could_fit_is_told_by_the_spec(do: str, problem: str) -> None:
    with pytest.raises(MapperError) as caught:
        stepped(f"{{id: s, inputs: [a], output: d, do: [{do}]}}")
    found = caught.value.diagnostics[0]
    assert (found.code, found.message) == ("M138", f"in the operation of 's': {problem}")


def test_step_that_leaves_several_tensors_is_told_by_the_spec() -> None:
    with pytest.raises(MapperError) as caught:
        stepped("{id: s, inputs: [a, b], output: d, do: [{cast: bfloat16}]}")
    assert told(caught.value.diagnostics) == [("M138", "")]
    assert "M138 in the operation of 's': 2 tensors are left at the end, expected one" in str(caught.value)


def test_function_that_does_not_exist_is_told_before_any_load() -> None:
    for name, problem in (
        ("nowhere", "no function is registered under that name"),
        ("no_such_package:f", "No module named 'no_such_package'"),
        ("torch:no_such_function", "'torch' has no function 'no_such_function'"),
    ):
        program = stepped(f"{{id: s, inputs: [a], output: d, do: [{{call: '{name}'}}]}}")
        with pytest.raises(MapperError) as caught:
            Loader(program, {each: numbers(2) for each in "abc"})
        (found,) = caught.value.diagnostics
        assert (found.code, found.message) == ("M630", f"the step 's' calls {name!r}: {problem}")
