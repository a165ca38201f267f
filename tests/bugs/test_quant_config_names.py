"""What a quantisation config decides about a module, against what the file has for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.bugs.harness import Case, case, load, refusal, tensors
from tests.loads import Tensors, all_raw, told

INDEXER = """
config: {required: [compress_ratios], optional: {compressed: {default: null, path: quantization_config.quant_method}}}
index: {layer: {count: len(compress_ratios)}}
formats:
  linear:
    - when: compressed == 'w8a8'
      leaves:
        weight: {dims: [out, in], dtype: int8}
        weight_scale: {source: scale, dims: [out, 1], dtype: float32}
    - leaves: {weight: [out, in]}
runtimes:
  own:
    rules:
      - at: {source: "layers.{layer}.attn", target: "model.layers.{layer}.self_attn"}
        when: compress_ratios[layer] == 4
        rules: [{target: "indexer.wq_b.{leaf}", dims: {out: 4, in: 4}}]
"""


def load_by_name(sources: Tensors, targets: Tensors) -> None:
    """Load as the peer did: the file's names are looked up in the module that was built without quantisation."""
    for name, tensor in sources.items():
        renamed = name.replace("layers.", "model.layers.", 1).replace(".attn.", ".self_attn.")
        targets[renamed.replace(".scale", ".weight_scale")].copy_(tensor)


@case("qc-08")
def test_a_module_without_a_leaf_that_the_file_has_is_refused_with_both_sides(bug: Case, tmp_path: Path) -> None:
    sources, targets = bug.sources(), bug.targets()
    indexer = "model.layers.0.self_attn.indexer.wq_b"
    with pytest.raises(KeyError, match=r"indexer\.wq_b\.weight_scale"):
        load_by_name(sources, targets)

    program = bug.program(tmp_path, INDEXER)
    targets = bug.targets()
    findings = refusal(program, tmp_path, sources, targets)
    assert told(findings) == [("M533", f"{indexer}.weight"), ("M531", f"{indexer}.weight_scale")]
    assert "has the dtype bfloat16 in the model, and its source gives int8" in findings[0].message
    assert "which the model does not have" in findings[1].message
    quantised = tensors({f"{indexer}.weight": "I8[4,4]", f"{indexer}.weight_scale": "F32[4,1]"})
    load(program, tmp_path, sources, quantised)
    assert list(all_raw(quantised).values()) == list(all_raw(sources).values())
    # The config decides: without its entry the scale is unknown.
    config = {name: each for name, each in bug["config"].items() if name != "quantization_config"}
    plain = bug.program(tmp_path, INDEXER, config=config)
    halves = {name: torch.empty(4, 4, dtype=torch.int8) for name in targets}
    assert told(refusal(plain, tmp_path, sources, halves)) == [("M502", "layers.0.attn.indexer.wq_b.scale")]
    # An indexer in a layer that has none is unknown too.
    more = {**sources, **{name.replace("layers.0", "layers.1"): each.clone() for name, each in sources.items()}}
    assert set(told(refusal(program, tmp_path, more, quantised))) == {("M502", name) for name in more if "layers.1." in name}
