"""Blocks and groups of a quantised tensor, against the shapes of its scales."""

from __future__ import annotations

from pathlib import Path

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
