"""Blocks and groups of a quantised tensor, against the shapes of its scales."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mapper.diagnostics import MapperError
from tests.bugs.harness import Case, case, load, refusal, tensors
from tests.loads import Tensors, all_raw, told

GROUPS = """
config: {required: [group_sizes]}
let: {size(layer): "GROUP"}
index: {layer: {count: len(group_sizes)}}
formats:
  grouped:
    - leaves:
        weight: {dims: [out, in / 2], dtype: uint8}
        scales: {dims: [out, in / size(layer)], dtype: float32}
runtimes:
  own:
    rules:
      - {target: "layers.{layer}.gate.{leaf}", format: grouped, dims: {out: 4, in: 64}}
"""


def fits_one_group_size(sources: Tensors, group_size: int) -> list[bool]:
    """Check as the peer did: one size for the whole model."""
    scales = [each for name, each in sources.items() if name.endswith("scales")]
    return [each.shape[1] == 64 // group_size for each in scales]


@case("qb-08")
def test_group_sizes_may_differ_by_layer_and_are_checked_by_tensor(bug: Case, tmp_path: Path) -> None:
    sources, targets = bug.sources(), bug.targets()
    assert fits_one_group_size(sources, bug["config"]["group_sizes"][0]) == [True, False]

    load(bug.program(tmp_path, GROUPS.replace("GROUP", "group_sizes[layer]")), tmp_path, sources, targets)
    assert all_raw(targets) == all_raw(sources)
    one = bug.program(tmp_path, GROUPS.replace("GROUP", "group_sizes[0]"))
    findings = refusal(one, tmp_path, sources, bug.targets() | tensors({"layers.1.gate.scales": "F32[4,2]"}))
    assert told(findings) == [("M503", "layers.1.gate.scales")]
    assert findings[0].message.endswith("has the shape [4, 1], expected [4, 2] (out = 4, in / 32 = 2)")


def blocks(bug: Case) -> dict[str, object]:
    """Return a config in fp8 by the blocks of the case."""
    return {"quantization_config": {"quant_method": "fp8", "weight_block_size": bug["config"]["block"]}}


RAGGED = "runtimes: {own: {rules: [{target: 'kv_a_proj_with_mqa.{leaf}', dims: {out: 9, in: 8}}]}}\n"


@case("qb-03")
def test_a_last_block_that_is_not_full_has_a_scale(bug: Case, tmp_path: Path) -> None:
    sources, targets = bug.sources(), bug.targets()
    assert len(sources["kv_a_proj_with_mqa.weight"]) % bug["config"]["block"][0]  # what the peer asked for

    program = bug.program(tmp_path, RAGGED, config=blocks(bug))
    load(program, tmp_path, sources, targets)
    assert all_raw(targets) == all_raw(sources)
    lacking = sources | tensors({"kv_a_proj_with_mqa.weight_scale_inv": "F32[2,2]"})
    findings = refusal(program, tmp_path, lacking, bug.targets())
    assert told(findings) == [("M503", "kv_a_proj_with_mqa.weight_scale_inv")]
    assert "expected [3, 2] (out / 4 = 3, in / 4 = 2)" in findings[0].message


GROUPED_ROWS = """
runtimes:
  own:
    mesh: vllm
    rules: [{target: 'qkv_proj.{leaf}', dims: {out: 12, in: 4}, shard: {out: {axis: tp, units: 2}}}]
"""


@case("qb-04")
def test_a_block_that_lies_over_two_ranks_is_refused(bug: Case, tmp_path: Path) -> None:
    scale, groups = bug.sources()["qkv_proj.weight_scale_inv"], bug["config"]["groups"]
    assert len(scale) // groups * groups < len(scale)  # the rows that the peer's even split lost
    assert len(bug.targets()["qkv_proj.weight"]) * groups == len(bug.sources()["qkv_proj.weight"])

    with pytest.raises(MapperError) as caught:
        bug.program(tmp_path, GROUPED_ROWS, config=blocks(bug))
    assert told(caught.value.diagnostics) == [("M330", "qkv_proj.weight_scale_inv")]
    assert "sizes of tp that work: 1" in str(caught.value)
    assert bug["layout"] == {"tp": 2}


PRESHARDED = """
runtimes:
  own:
    rules:
      - target: qkv_proj.{leaf}
        dims: {out: [8, 4, 4], in: 4}
        do: [{view: (rank part slot width) in -> (part rank slot width) in, rank: 2, width: 2, slot: [2, 1, 1]}]
"""


@case("qb-05")
def test_scales_are_regrouped_with_their_rows(bug: Case, tmp_path: Path) -> None:
    sources, targets = bug.sources(), bug.targets()
    load(bug.program(tmp_path, PRESHARDED, config=blocks(bug)), tmp_path, sources, targets)
    order = [0, 1, 4, 5, 2, 6, 3, 7]
    assert targets["qkv_proj.weight_scale_inv"].flatten().tolist() == order != list(range(8))  # the peer read them as they lie
    rows = sources["qkv_proj.weight"].view(torch.uint8)
    expected = torch.cat([rows[2 * block : 2 * block + 2] for block in order])
    assert torch.equal(targets["qkv_proj.weight"].view(torch.uint8), expected)
    assert bug["layout"] == {"tp": 1}


MERGED = """
runtimes:
  own:
    mesh: vllm
    rules: [{target: 'fused_qkv_a_proj.{leaf}', sources: SOURCES, dims: {out: SIZES, in: 4}}]
"""


@case("qb-06")
def test_the_last_part_of_a_merged_matrix_may_end_within_a_block(bug: Case, tmp_path: Path) -> None:
    sources, targets = bug.sources(), bug.targets()
    names = ["q_a_proj.{leaf}", "kv_a_proj_with_mqa.{leaf}"]
    text = MERGED.replace("SOURCES", str(names)).replace("SIZES", "[8, 5]")
    assert any(len(sources[name.format(leaf="weight")]) % bug["config"]["block"][0] for name in names)  # as the peer refused

    load(bug.program(tmp_path, text, config=blocks(bug)), tmp_path, sources, targets)
    for leaf in ("weight", "weight_scale_inv"):
        parts = [sources[name.format(leaf=leaf)].view(torch.uint8) for name in names]
        assert torch.equal(targets[f"fused_qkv_a_proj.{leaf}"].view(torch.uint8), torch.cat(parts)), leaf
    text = MERGED.replace("SOURCES", str(names[::-1])).replace("SIZES", "[5, 8]")
    with pytest.raises(MapperError) as caught:
        bug.program(tmp_path, text, config=blocks(bug))
    assert told(caught.value.diagnostics) == [("M331", "fused_qkv_a_proj.weight_scale_inv")]
    assert bug["layout"] == {"tp": 8}
