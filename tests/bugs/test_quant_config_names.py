"""Lists of unquantised modules whose names were not renamed with the weights, or renamed twice, or forgotten on the way out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mapper.compiler import Program
from mapper.load import Loader
from tests.bugs.harness import Case, case, load, refusal, save, tensors
from tests.loads import Tensors, all_raw, told

RULE = """
index: {{layer: {{count: 1}}}}
runtimes:
  own:
    rules:
      - target: {target}.{{leaf}}
        source: {source}.{{leaf}}
        dims: {{out: {rows}, in: 4}}
"""
SCALE = "weight_scale_inv"


def program_of(bug: Case, folder: Path, text: str, entries: list[str]) -> Program:
    """Compile for a checkpoint in block fp8 that leaves `entries` as they are."""
    quantization: Mapping[str, object] = {"quant_method": "fp8", "weight_block_size": [2, 2], "ignore": entries}
    return bug.program(folder, text, config={"quantization_config": quantization})


def loads_as_it_is(bug: Case, folder: Path, text: str, entries: list[str]) -> None:
    """Hold a load with the list against the bytes of the sources, and against the refusal without the list."""
    sources, targets = bug.sources(), bug.targets()
    without = told(refusal(program_of(bug, folder, text, []), folder, sources, targets))
    assert ("M501", f"{next(iter(sources)).removesuffix('weight')}{SCALE}") in without
    load(program_of(bug, folder, text, entries), folder, sources, targets)
    assert list(all_raw(targets).values()) == list(all_raw(sources).values())


@case("qc-01")
def test_list_spells_names_of_the_checkpoint(bug: Case, tmp_path: Path) -> None:
    entries = bug["config"]["ignore"]
    (target,) = bug["model"]
    assert target.removesuffix(".weight") not in entries  # what the peer looked for
    loads_as_it_is(bug, tmp_path, RULE.format(target="visual.merger", source="model.visual.merger", rows=4), entries)
    loads_as_it_is(bug, tmp_path, RULE.format(target="visual.merger", source="model.visual.merger", rows=4), ["visual.merger"])


@case("qc-02")
def test_list_names_a_module_where_a_rename_spells_a_parameter(bug: Case, tmp_path: Path) -> None:
    entries = bug["config"]["ignore"]
    old, new = bug["config"]["rename"].split(" -> ")
    assert [entry.replace(old, new) for entry in entries] == entries  # the dot behind fc1 is not there

    text = RULE.format(target="vision.layers.{layer}.fc1", source="vision.layers.{layer}.mlp.fc1", rows=4)
    loads_as_it_is(bug, tmp_path, text, entries)


@case("qc-04")
def test_list_is_read_once_on_the_names_that_it_spells(bug: Case, tmp_path: Path) -> None:
    entries = bug["config"]["ignore"]

    def renamed(name: str) -> str:
        return name.replace("model.", "language_model.model.", 1)

    (target,) = bug["model"]
    assert renamed(entries[0]) == target.removesuffix(".weight") != renamed(renamed(entries[0]))

    text = RULE.format(
        target="thinker.language_model.model.layers.{layer}.mlp.gate", source="thinker.model.layers.{layer}.mlp.gate", rows=2
    )
    loads_as_it_is(bug, tmp_path, text, entries)
    program = program_of(bug, tmp_path, text, entries)
    for rerooted, prefix in ((program.scoped("thinker"), "thinker."), (program.mounted("omni"), "")):
        sources, targets = (
            {f"{'' if prefix else 'omni.'}{name.removeprefix(prefix)}": tensor for name, tensor in tensors.items()}
            for tensors in (bug.sources(), bug.targets())
        )
        load(rerooted, tmp_path, sources, targets)
        assert list(all_raw(targets).values()) == list(all_raw(sources).values())


@case("qc-07")
def test_module_that_is_left_out_is_exported_as_it_was(bug: Case, tmp_path: Path) -> None:
    sources, targets = bug.sources(), bug.targets()
    packed = torch.float8_e4m3fn
    assert {tensor.to(packed).to(tensor.dtype).equal(tensor) for tensor in sources.values()} == {False}

    text = RULE.format(target="mtp.{layer}.e_proj", source="mtp.{layer}.e_proj", rows=4)
    program = program_of(bug, tmp_path, text, bug["config"]["ignore"])
    checkpoint = save(tmp_path, sources)
    loader = Loader(program, targets)
    loader.load(checkpoint)
    loader.export(tmp_path / "exported", base=checkpoint)
    exported = {name: each for file in (tmp_path / "exported").glob("*.safetensors") for name, each in load_file(file).items()}
    assert all_raw(exported) == all_raw(sources)


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
