"""A model without a checkpoint: every target holds what stands for nothing in its leaf, and steps run on it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mapper.compiler import Program
from mapper.diagnostics import MapperError
from mapper.load import Loader
from tests.loads import Tensors, all_raw, fill, told
from tests.small import program_of, rules

SPEC = """
index: {expert: {count: 3, axis: ep}}
formats:
  own:
    - leaves:
        weight: {dims: [out, in], dtype: int8}
        scale: {dims: [out / 2], dtype: float8_e8m0fnu, bitcast: uint8, neutral: 127}
        global: {dims: [], neutral: 0.5}
        bias: {dims: [out], optional: true}
runtimes:
  own:
    mesh: vllm
    keep: [{target: cache, why: counted at run time}, {target: late, why: may be absent}]
    rules:
      - {target: 'a.{leaf}', format: own, dims: {out: 4, in: 3}, shard: {out: {axis: tp, pad: 8}}}
      - {target: 'b.{leaf}', format: own, dims: {out: 4, in: 3}, shard: {out: {axis: tp, pad: 8, fill: 9}}}
      - {target: 'experts.{leaf}', source: 'experts.{expert}.{leaf}', stack: expert, format: own, dims: {out: 2, in: 3}}
      - {target: norm, cast: bfloat16}
      - {target: ones, dims: {n: 3}, cast: float32, do: [{fill: 1}]}
      - {target: late, optional: true}
      - {target: head, tie: norm}
    finalize: [{id: wider, inputs: [a.global], output: derived, do: [{cast: float64}]}]
"""


def program(layout: str = "tp=2", rank: int = 0) -> Program:
    return program_of(SPEC, layout=layout, rank=rank)


def model(num_experts: int = 3) -> Tensors:
    """Return parameters of one of two ranks, every byte the sentinel."""
    tensors = {}
    for name in ("a", "b", "experts"):
        lead = (num_experts,) if name == "experts" else ()
        out = 2 if lead else 4
        tensors |= {
            f"{name}.weight": torch.zeros(*lead, out, 3, dtype=torch.int8),
            f"{name}.scale": torch.zeros(*lead, out // 2, dtype=torch.uint8),
            f"{name}.global": torch.zeros(lead),
        }
    tensors |= {"b.bias": torch.zeros(4), "norm": torch.zeros(5, dtype=torch.bfloat16), "ones": torch.zeros(3)}
    tensors |= {"cache": torch.zeros(2), "late": torch.zeros(2)}
    fill(tensors)
    tensors["head"] = tensors["norm"].clone()
    return tensors


@pytest.mark.parametrize("rank", [0, 1])
def test_every_target_holds_the_neutral_value_of_its_leaf_and_padding_what_a_load_leaves(rank: int) -> None:
    tensors = model()
    before = all_raw(tensors)
    num_bytes = Loader(program(rank=rank), tensors).placeholders()
    for name in ("a", "b", "experts"):
        padded = (name, rank) == ("b", 1)
        assert set(tensors[f"{name}.weight"].flatten().tolist()) == {9 if padded else 0}
        assert set(tensors[f"{name}.scale"].flatten().tolist()) == {9 if padded else 127}
        assert set(tensors[f"{name}.global"].flatten().tolist()) == {0.5}
    assert tensors["b.bias"].tolist() == [9 if rank else 0] * 4
    assert not tensors["norm"].any()
    assert not tensors["head"].any()
    assert tensors["ones"].tolist() == [1, 1, 1]

    kept = {"cache", "late"}
    after = all_raw(tensors)
    assert {name: after[name] for name in kept} == {name: before[name] for name in kept}
    assert num_bytes == sum(len(bits) for name, bits in after.items() if name not in kept)


def test_experts_of_this_rank_alone_are_written() -> None:
    tensors = model(num_experts=2)
    tensors["norm"] = tensors["head"]  # one storage under two names counts once
    num_bytes = Loader(program("tp=2,ep=2"), tensors).placeholders()
    assert tensors["experts.scale"].tolist() == [[127], [127]]
    assert num_bytes == sum(len(bits) for name, bits in all_raw(tensors).items() if name not in ("cache", "late", "head"))


def test_steps_run_on_placeholders_and_again_after_a_load() -> None:
    tensors = model()
    loader = Loader(program(), tensors)
    loader.placeholders()
    assert "derived" not in tensors
    assert [each.output for each in loader.finalize().finalized] == ["derived"]
    assert (tensors["derived"].item(), tensors["derived"].dtype) == (0.5, torch.float64)
    tensors["a.global"].fill_(3)
    loader.finalize(changed=["a.global"])
    assert tensors["derived"].item() == 3
    loader.placeholders()
    assert [each.output for each in loader.finalize().finalized] == ["derived"]
    assert tensors["derived"].item() == 0.5


def test_module_on_meta_gets_storage_and_its_parameters_stay_parameters() -> None:
    with torch.device("meta"):
        linear = nn.Linear(3, 4)
    formats = "formats: {own: [{leaves: {weight: [out, in], bias: {dims: [out], neutral: -2}}}]}"
    text = rules("{target: '{leaf}', format: own, dims: {out: 4, in: 3}}", before=formats)
    assert Loader(program_of(text), linear).placeholders() == 64
    assert (linear.bias.tolist(), linear.bias.requires_grad) == ([-2] * 4, True)
    assert not linear.weight.any()


def test_slots_that_several_rules_append_hold_the_values_of_each() -> None:
    text = rules(
        "{target: 'w.{leaf}', source: 'routed.{leaf}', format: zero, dims: {e: 2, n: 3}}",
        "{target: 'w.{leaf}', source: 'shared.{leaf}', format: one, dims: {e: 1, n: 3}, append: e}",
        before="formats: {zero: [{leaves: {x: [e, n]}}], one: [{leaves: {x: {dims: [e, n], neutral: 1}}}]}",
    )
    tensors = {"w.x": torch.full((3, 3), 7.0)}
    assert Loader(program_of(text), tensors).placeholders() == 36
    assert tensors["w.x"].tolist() == [[0] * 3, [0] * 3, [1] * 3]


MISFITS = {
    "no target": ("norm", None, ("M531", "the rule for 'norm' fills 'norm', which the model does not have")),
    "a shape": ("a.weight", torch.zeros(4, 2, dtype=torch.int8), ("M532", "")),
    "a dtype": (
        "a.scale", torch.zeros(2),
        ("M533", "'a.scale' has the dtype float32 in the model, and its source gives uint8"),
    ),
    "a value": (
        "a.global", torch.zeros((), dtype=torch.int32),
        ("M304", "the neutral value of 'a.global' is 0.5, expected a number that int32 holds"),
    ),
    "meta": ("ones", torch.zeros(3, device="meta"), ("M602", "'ones' is on the meta device and has no storage to write to")),
}  # fmt: skip


@pytest.mark.parametrize("case", MISFITS)
def test_model_that_does_not_fit_is_told_before_anything_is_written(case: str) -> None:
    name, tensor, (code, message) = MISFITS[case]
    tensors = model()
    del tensors[name]
    if tensor is not None:
        tensors[name] = tensor
    before = all_raw({each: held for each, held in tensors.items() if not held.is_meta})
    with pytest.raises(MapperError) as caught:
        Loader(program(), tensors).placeholders()
    assert told(caught.value.diagnostics) == [(code, name)]
    assert message in str(caught.value)
    assert all_raw({each: held for each, held in tensors.items() if not held.is_meta}) == before


def test_twin_that_is_not_here_is_told() -> None:
    with pytest.raises(MapperError) as caught:
        Loader(program_of(rules("{target: head, tie: norm}")), {"head": torch.zeros(2)}).placeholders()
    assert told(caught.value.diagnostics) == [("M508", "head")]
