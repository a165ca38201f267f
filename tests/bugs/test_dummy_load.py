"""Dummy loads: parameters filled by someone else, and everything that follows a load done all the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mapper.export import export
from mapper.load import Loader
from tests.bugs.harness import Case, case, load, save
from tests.loads import Tensors, all_raw

SCALAR = """
runtimes:
  own:
    mesh: vllm
    rules: [{target: attn.k_scale, dims: {}}]
    finalize: [{id: wider, inputs: [attn.k_scale], output: attn.k_scale_2, do: [{cast: float64}]}]
"""


def dummy_fill(tensors: Tensors) -> None:
    """Fill as the peer did: by rows and columns."""
    for tensor in tensors.values():
        _, _ = tensor.shape
        tensor.zero_()


@case("du-02")
def test_scalar_is_loaded_filled_as_a_dummy_and_exported(bug: Case, tmp_path: Path) -> None:
    assert bug["config"]["load_format"] == "dummy"
    with pytest.raises(ValueError, match="not enough values"):
        dummy_fill(bug.targets())

    sources, targets = bug.sources(), bug.targets()
    program = bug.program(tmp_path, SCALAR)
    load(program, tmp_path, sources, targets)
    assert targets["attn.k_scale"].item() == sources["attn.k_scale"].item() == targets["attn.k_scale_2"].item()

    dummy = bug.targets()
    dummy["attn.k_scale"].fill_(3)
    Loader(program, dummy).finalize()
    assert (dummy["attn.k_scale_2"].item(), dummy["attn.k_scale_2"].shape) == (3, ())

    checkpoint = save(tmp_path, sources)
    export([(program.plan(checkpoint), targets)], tmp_path / "back", config={})
    assert all_raw(load_file(tmp_path / "back" / "model.safetensors")) == all_raw(sources)


QUANTISED = """
runtimes:
  own:
    mesh: vllm
    rules:
      - {target: proj.weight, dims: {out: 4, in: 6}, dtype: float8_e4m3fn}
      - {target: proj.weight_scale_inv, dims: {out: 2, in: 2}}
    finalize:
      - id: dense
        inputs: [proj.weight, proj.weight_scale_inv]
        output: proj.dense
        do: [{dequantize: [2, 3]}, {cast: bfloat16}]
"""


@case("du-03")
def test_dummy_load_runs_the_steps_of_a_load(bug: Case, tmp_path: Path) -> None:
    assert bug["config"]["load_format"] == "dummy"
    sources, loaded = bug.sources(), bug.targets()
    program = bug.program(tmp_path, QUANTISED)
    report = Loader(program, loaded).load(save(tmp_path, sources))
    grid = sources["proj.weight_scale_inv"].repeat_interleave(2, 0).repeat_interleave(3, 1)
    assert torch.equal(loaded["proj.dense"], (sources["proj.weight"].float() * grid).bfloat16())

    dummy = {name: tensor.clone() for name, tensor in sources.items()}
    loader = Loader(program, dummy)
    with pytest.raises(KeyError, match="dense"):  # what the peer's forward met
        dummy["proj.dense"]
    assert loader.finalize().finalized == report.finalized
    assert all_raw(dummy) == all_raw(loaded)
    assert loader.finalize().finalized == ()
    assert bug.targets().keys() == sources.keys()
