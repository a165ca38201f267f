"""Parts of equal size in another order, interleaved or transposed: what no name and no shape shows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mapper.diagnostics import MapperError
from tests.bugs.harness import Case, case, load, refusal
from tests.loads import Tensors, told


def halves(sources: str) -> str:
    return f"""
config: {{required: [w13_order]}}
index: {{expert: {{count: 1}}}}
formats:
  scaled: [{{leaves: {{weight: [out, in], weight_scale: [out, 1]}}}}]
runtimes:
  own:
    rules:
      - target: w13_{{leaf}}
        sources: [{sources}]
        stack: expert
        format: scaled
        dims: {{out: [3, 3], in: 4}}
"""


@case("fo-01")
def test_the_order_of_halves_holds_for_every_leaf(bug: Case, tmp_path: Path) -> None:
    up, gate = (f"'experts.{{expert}}.{part}_proj.{{leaf}}'" for part in ("up", "gate"))
    assert bug["config"]["w13_order"] == "up_first"
    found, fault = bug.targets(), bug.targets()
    load(bug.program(tmp_path, halves(f"{up}, {gate}")), tmp_path, bug.sources(), found)
    load(bug.program(tmp_path, halves(f"{gate}, {up}")), tmp_path, bug.sources(), fault)
    rows = {name: each[0, :, 0].tolist() for name, each in found.items()}
    assert rows == {"w13_weight": [2, 2, 2, 1, 1, 1], "w13_weight_scale": [20, 20, 20, 10, 10, 10]}
    assert {name: each[0, :, 0].tolist() for name, each in fault.items()} == {
        "w13_weight": [1, 1, 1, 2, 2, 2], "w13_weight_scale": [10, 10, 10, 20, 20, 20],
    }  # fmt: skip


def columns(do: str) -> str:
    return f"""
runtimes:
  own:
    rules:
      - target: experts.gate_up_proj
        sources: [experts.gate_proj, experts.up_proj]
        dims: {{expert: 1, in: 4, out: [3, 3]}}
        {do}
"""


@case("fo-03")
def test_each_half_goes_to_its_own_columns(bug: Case, tmp_path: Path) -> None:
    view = "do: [{view: expert in (part column) -> expert in (column part)}]"
    for name, do in (("interleaved", view), ("concatenated", "")):
        targets = bug.targets()
        load(bug.program(tmp_path, columns(do), config={}), tmp_path, bug.sources(), targets)
        expected = [{"g": 1.0, "u": 2.0}[column[0]] for column in bug["config"]["columns"][name].split()]
        assert targets["experts.gate_up_proj"][0].tolist() == [expected] * 4
        only_gate = [2.0, 2.0, 2.0, 0.0, 0.0, 0.0]
        assert expected != only_gate


ROWS = """
options: {qkv_order: {default: unknown, note: the order of the fused rows; nothing in a config says it}}
runtimes:
  own:
    mesh: vllm
    requires:
      - {that: "qkv_order in ['plain', 'grouped']", why: shape and config are the same for both orders of the fused rows}
    rules:
      - target: qkv_proj.weight
        dims: {out: [4, 2, 2], in: 3}
        shard: {out: {axis: tp, units: [4, 2, 2]}}
        when: qkv_order == 'plain'
      - target: qkv_proj.weight
        dims: {out: [4, 2, 2], in: 3}
        do: [{view: (group part head) in -> (part group head) in, head: [2, 1, 1]}]
        shard: {out: {axis: tp, units: [4, 2, 2]}}
        when: qkv_order == 'grouped'
"""


@case("fo-05")
def test_fused_rows_are_read_in_the_order_that_is_said(bug: Case, tmp_path: Path) -> None:
    (source,) = bug.sources().values()
    config, names = bug["config"], sorted(bug["config"]["plain"].split())
    rows = dict(zip(names, source, strict=True))
    wanted = ["q0 q1 k0 v0", "q2 q3 k1 v1"]
    for order in ("plain", "grouped"):
        stored = {"qkv_proj.weight": torch.stack([rows[name] for name in config[order].split()])}
        for rank in range(bug["layout"]["tp"]):
            targets = bug.targets()
            options = {"qkv_order": order}
            load(bug.program(tmp_path, ROWS, rank=rank, config={}, options=options), tmp_path, stored, targets)
            expected = torch.stack([rows[name] for name in wanted[rank].split()])
            assert torch.equal(targets["qkv_proj.weight"], expected), (order, rank)
            chunks = stored["qkv_proj.weight"].chunk(2)[rank]
            assert torch.equal(chunks, expected) == (order == "grouped"), "halves of the file are one rank's by chance"
    with pytest.raises(MapperError) as caught:
        bug.program(tmp_path, ROWS, config={})
    assert [each.code for each in caught.value.diagnostics] == ["M302"]


def square(stored: str) -> str:
    return f"""
config: {{required: [hidden_size, intermediate_size]}}
formats:
  experts: [{{leaves: {{weight: {{source: '', target: w2_weight, dims: [expert, out, in]{stored}}}}}}}]
runtimes:
  own:
    rules:
      - target: '{{leaf}}'
        source: experts.down_proj{{leaf}}
        format: experts
        dims: {{expert: 2, out: hidden_size, in: intermediate_size}}
"""


@case("fo-07")
def test_a_square_matrix_is_transposed_because_the_format_says_so(bug: Case, tmp_path: Path) -> None:
    (source,) = bug.sources().values()
    for stored, expected in ((", stored: [expert, in, out]", source.transpose(1, 2)), ("", source)):
        targets = bug.targets()
        load(bug.program(tmp_path, square(stored)), tmp_path, bug.sources(), targets)
        assert torch.equal(targets["w2_weight"], expected)
    assert not torch.equal(source.transpose(1, 2), source)


EXPERTS = """
index: {expert: {count: 2}}
formats:
  transposed: [{leaves: {weight: {source: '', target: '', stored: [out, in], dims: [in, out]}}}]
runtimes:
  own:
    rules:
      - target: gate_up_proj{leaf}
        source: experts.{expert}.fc1{leaf}
        stack: expert
        format: transposed
        dims: {in: 4, out: [3, 3]}
        do: [{view: in (part row) -> in (row part)}]
      - target: down_proj{leaf}
        source: experts.{expert}.fc2{leaf}
        stack: expert
        format: transposed
        dims: {in: 3, out: 4}
"""


@case("fo-08")
def test_rows_become_interleaved_columns_and_matrices_are_transposed(bug: Case, tmp_path: Path) -> None:
    sources, targets = bug.sources(), bug.targets()
    load(bug.program(tmp_path, EXPERTS, config=bug["config"]), tmp_path, sources, targets)
    for expert in range(2):
        gate, up = sources[f"experts.{expert}.fc1"].split(3)
        assert torch.equal(targets["gate_up_proj"][expert, :, 0::2], gate.T)
        assert torch.equal(targets["gate_up_proj"][expert, :, 1::2], up.T)
        assert torch.equal(targets["down_proj"][expert], sources[f"experts.{expert}.fc2"].T)
        assert not torch.equal(targets["gate_up_proj"][expert], sources[f"experts.{expert}.fc1"].T)


def seven(parts: dict[str, int]) -> str:
    return f"""
config: {{required: [parts]}}
runtimes:
  own:
    rules:
      - target: in_proj.weight
        sources: [{", ".join(parts)}]
        dims: {{out: {list(parts.values())}, in: 2}}
"""


@case("fo-09")
def test_seven_parts_follow_each_other_by_their_sizes(bug: Case, tmp_path: Path) -> None:
    parts: dict[str, int] = bug["config"]["parts"]
    sources, targets = bug.sources(), bug.targets()
    load(bug.program(tmp_path, seven(parts)), tmp_path, sources, targets)
    assert torch.equal(targets["in_proj.weight"], torch.cat([sources[name] for name in parts]))
    by_name = torch.cat([sources[name] for name in sorted(parts)])
    assert not torch.equal(targets["in_proj.weight"], by_name)
    longer = {**parts, "f": 2}
    sources["f"] = torch.zeros(2, 2)
    assert told(refusal(bug.program(tmp_path, seven(longer)), tmp_path, sources, bug.targets())) == [("M532", "in_proj.weight")]


def grouped(groups: int, rows: int) -> str:
    sources = ", ".join(f"layers.0.attn.wo_a.{group}.weight" for group in range(groups))
    return f"""
config: {{required: [o_groups]}}
runtimes:
  own:
    mesh: vllm
    rules:
      - target: layers.0.attn.wo_a.weight
        sources: [{sources}]
        dims: {{out: {[rows] * groups}, in: 4}}
        shard: {{out: {{axis: tp, units: {groups}, joined: true}}}}
      - target: experts.w1_weight
        source: layers.0.ffn.experts.w1.weight
        dims: {{expert: 2, out: 3, in: 4}}
        optional: true
"""


@case("fo-11")
def test_numbered_parts_are_laid_in_the_order_of_their_numbers(bug: Case, tmp_path: Path) -> None:
    sources, groups = bug.sources(), bug["config"]["o_groups"]
    for rank in range(bug["layout"]["tp"]):
        targets = bug.targets()
        load(bug.program(tmp_path, grouped(groups, 2), rank=rank), tmp_path, sources, targets)
        assert targets["layers.0.attn.wo_a.weight"].unique().tolist() == [float(rank)]
        assert torch.equal(targets["experts.w1_weight"], sources["layers.0.ffn.experts.w1.weight"])
    many: Tensors = {f"layers.0.attn.wo_a.{group}.weight": torch.full((1, 4), float(group)) for group in range(12)}
    target = {"layers.0.attn.wo_a.weight": torch.empty(6, 4)}
    load(bug.program(tmp_path, grouped(12, 1), rank=1), tmp_path, many, target)
    assert target["layers.0.attn.wo_a.weight"][:, 0].tolist() == [6, 7, 8, 9, 10, 11]
    by_text = [float(name.split(".")[4]) for name in sorted(many)][6:]
    assert by_text == [4, 5, 6, 7, 8, 9]
    lost = "layers.0.attn.wo_a.11.weight"
    del many[lost]
    assert told(refusal(bug.program(tmp_path, grouped(12, 1), rank=1), tmp_path, many, target)) == [("M501", lost)]
