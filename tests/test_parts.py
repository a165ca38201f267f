"""Leaves with one element for each part: scales of matrices that lie in one parameter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mapper.compiler import Program, compile
from mapper.diagnostics import MapperError
from mapper.layout import Layout
from mapper.load import Loader
from tests.loads import spec_of, told, write

QKV = """
formats:
  scaled:
    - leaves:
        weight: [out, in]
        weight_scale: [parts]
runtimes:
  own:
    mesh: vllm
    rules:
      - target: qkv.{leaf}
        RULE
        dims: {out: [8, 4, 4], in: 3}
        shard: {out: {axis: tp, units: [4, 2, 2]}}
        format: scaled
"""
APART = "sources: ['q.{leaf}', 'k.{leaf}', 'v.{leaf}']"
TOGETHER = "source: qkv.{leaf}"
SPLIT = """
formats: {scaled: [{leaves: {weight: [out, in], weight_scale: [parts]}}]}
runtimes:
  own:
    rules:
      - targets: ['gate.{leaf}', 'up.{leaf}']
        source: both.{leaf}
        dims: {out: [2, 3], in: 3}
        format: scaled
"""
ROW = """
formats: {scaled: [{leaves: {weight: [out, in], weight_scale: [parts], bias: {dims: [out], optional: true}}}]}
runtimes:
  own:
    mesh: vllm
    rules: [{target: 'o.{leaf}', dims: {out: 2, in: 4}, shard: {in: {axis: tp, bias: first}}, format: scaled}]
"""
EXPERTS = """
index: {expert: {count: 3, axis: ep}}
formats: {scaled: [{leaves: {weight: [out, in], weight_scale: [parts]}}]}
runtimes:
  own:
    mesh: vllm
    rules:
      - target: w13_{leaf}
        any_of:
          - sources: ['{expert}.gate.{leaf}', '{expert}.up.{leaf}']
          - sources: ['gate.{leaf}', 'up.{leaf}']
        stack: expert
        dims: {out: [2, 2], in: 3}
        format: scaled
"""


def numbered(start: int, *shape: int) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return torch.arange(start, start + count, dtype=torch.float32).reshape(shape)


def program_of(folder: Path, text: str, layout: Layout | None = None, rank: int = 0) -> Program:
    return compile(spec_of(folder, text), config={}, runtime="own", layout=layout, rank=rank)


def apart(*shape: int) -> dict[str, torch.Tensor]:
    rows = {"q": 8, "k": 4, "v": 4}
    weights = {f"{part}.weight": numbered(100 * number, size, 3) for number, (part, size) in enumerate(rows.items())}
    return weights | {f"{part}.weight_scale": numbered(number, *shape) for number, part in enumerate(rows, start=1)}


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize(("tp", "rows"), [(1, 16), (2, 8), (4, 6)])
def test_each_part_has_its_scale_on_every_rank(shape: tuple[int, ...], tp: int, rows: int, tmp_path: Path) -> None:
    checkpoint = write(tmp_path / "sources", apart(*shape), {})
    for rank in range(tp):
        program = program_of(tmp_path, QKV.replace("RULE", APART), Layout(tp=tp), rank)
        targets = {"qkv.weight": torch.zeros(rows, 3), "qkv.weight_scale": torch.zeros(3)}
        Loader(program, targets).load(checkpoint)
        assert targets["qkv.weight_scale"].tolist() == [1, 2, 3]
        streamed = {name: torch.zeros_like(each) for name, each in targets.items()}
        with Loader(program, streamed).update() as session:
            session.feed_all(reversed(apart(*shape).items()))
        assert all(torch.equal(streamed[name], targets[name]) for name in targets)


def test_a_source_of_all_parts_has_one_scale_for_them_which_each_takes(tmp_path: Path) -> None:
    program = program_of(tmp_path, QKV.replace("RULE", TOGETHER))
    sources = {"qkv.weight": numbered(1, 16, 3), "qkv.weight_scale": numbered(7)}
    targets = {"qkv.weight": torch.zeros(16, 3), "qkv.weight_scale": torch.zeros(3)}
    checkpoint = write(tmp_path / "sources", sources, {})
    steps = program.plan(checkpoint).steps_to("qkv.weight_scale")
    assert [(step.source_box, step.target_box) for step in steps] == [(((0, 1),), ((at, at + 1),)) for at in range(3)]
    Loader(program, targets).load(checkpoint)
    assert targets["qkv.weight_scale"].tolist() == [7, 7, 7]


def test_a_scale_of_several_targets_is_in_each(tmp_path: Path) -> None:
    program = program_of(tmp_path, SPLIT)
    sources = {"both.weight": numbered(1, 5, 3), "both.weight_scale": numbered(7, 1)}
    targets = {"gate.weight": torch.zeros(2, 3), "up.weight": torch.zeros(3, 3)}
    targets |= {f"{part}.weight_scale": torch.zeros(1) for part in ("gate", "up")}
    Loader(program, targets).load(write(tmp_path / "sources", sources, {}))
    assert [targets[f"{part}.weight_scale"].tolist() for part in ("gate", "up")] == [[7], [7]]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_scale_is_no_bias_and_stands_on_all_ranks_of_a_cut_inner_dim(rank: int, tmp_path: Path) -> None:
    program = program_of(tmp_path, ROW, Layout(tp=2), rank)
    sources = {"o.weight": numbered(1, 2, 4), "o.weight_scale": numbered(9), "o.bias": numbered(5, 2)}
    targets = {"o.weight": torch.zeros(2, 2), "o.weight_scale": torch.zeros(1), "o.bias": torch.ones(2)}
    Loader(program, targets).load(write(tmp_path / "sources", sources, {}))
    assert targets["o.weight_scale"].tolist() == [9]
    assert targets["o.bias"].tolist() == ([5, 6] if rank == 0 else [0, 0])


@pytest.mark.parametrize("shape", [(3,), (3, 1)])
def test_scales_of_stacked_experts_apart_and_in_one_tensor(shape: tuple[int, ...], tmp_path: Path) -> None:
    program = program_of(tmp_path, EXPERTS)
    sources = {f"{expert}.{part}.weight": numbered(10 * expert, 2, 3) for expert in range(3) for part in ("gate", "up")}
    for expert in range(3):
        sources |= {f"{expert}.gate.weight_scale": numbered(expert), f"{expert}.up.weight_scale": numbered(10 + expert, 1)}
    targets = {"w13_weight": torch.zeros(3, 4, 3), "w13_weight_scale": torch.zeros(3, 2)}
    Loader(program, targets).load(write(tmp_path / "apart", sources, {}))
    assert targets["w13_weight_scale"].tolist() == [[0, 10], [1, 11], [2, 12]]

    sources = {"gate.weight": numbered(1, 3, 2, 3), "up.weight": numbered(50, 3, 2, 3)}
    sources |= {"gate.weight_scale": numbered(0, *shape), "up.weight_scale": numbered(10, *shape)}
    targets = {"w13_weight": torch.zeros(3, 4, 3), "w13_weight_scale": torch.zeros(3, 2)}
    Loader(program, targets).load(write(tmp_path / "stacked", sources, {}))
    assert targets["w13_weight_scale"].tolist() == [[0, 10], [1, 11], [2, 12]]


@pytest.mark.parametrize("shape", [(3,), (1, 1), (2,)])
def test_a_scale_that_is_not_one_element_is_refused(shape: tuple[int, ...], tmp_path: Path) -> None:
    program = program_of(tmp_path, QKV.replace("RULE", APART))
    sources = {**apart(), "k.weight_scale": numbered(1, *shape)}
    with pytest.raises(MapperError) as caught:
        program.plan(write(tmp_path / "sources", sources, {}))
    assert told(caught.value.diagnostics) == [("M503", "k.weight_scale")]
    assert f"has the shape {list(shape)}, expected [1] (one element, as a scalar or a vector)" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (SPLIT.replace("weight_scale: [parts]", "weight_scale: [parts / 2]"), "M133"),
        (SPLIT.replace("{out: [2, 3], in: 3}", "{parts: [2, 3], in: 3}"), "M212"),
        (SPLIT.replace("format: scaled", "format: scaled\n        shard: {parts: tp}"), "M211"),
    ],
)
def test_parts_is_a_word_and_no_dim_of_a_rule(text: str, code: str, tmp_path: Path) -> None:
    with pytest.raises(MapperError) as caught:
        program_of(tmp_path, text)
    assert code in {each.code for each in caught.value.diagnostics}


def test_an_export_gives_back_what_was_loaded(tmp_path: Path) -> None:
    checkpoint = write(tmp_path / "sources", apart(1), {})
    program = program_of(tmp_path, QKV.replace("RULE", APART))
    targets = {"qkv.weight": torch.zeros(16, 3), "qkv.weight_scale": torch.zeros(3)}
    loader = Loader(program, targets)
    loader.load(checkpoint)
    loader.export(tmp_path / "back", base=checkpoint)
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert {name: each.tolist() for name, each in back.items()} == {name: each.tolist() for name, each in apart(1).items()}
