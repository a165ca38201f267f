"""Real Transformers models: what `Loader` fills equals what `from_pretrained` reads, parameters and logits, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import mapper
from mapper.integrations.transformers import build, on_meta
from mapper.load import Loader
from tests.oracle.transformers_models import MODELS, load_model, loaded_tensors, make_model, save_model


def load(folder: Path) -> nn.Module:
    checkpoint = mapper.Checkpoint.open(folder)
    assert checkpoint.config is not None
    model = build(folder)
    program = mapper.compile(mapper.load_spec("deepseek_v2"), config=checkpoint.config, runtime="transformers")
    report = Loader(program, model).load(checkpoint)
    assert report.loaded + report.skipped == report.sources
    return model


def assert_equal(ours: nn.Module, expected: dict[str, torch.Tensor], reference: nn.Module) -> None:
    found = dict(ours.state_dict())
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name
    prompt = torch.arange(24).view(1, 24)
    with torch.no_grad():
        logits = reference(prompt).logits
        assert torch.equal(ours(prompt).logits, logits)
    assert logits.isfinite().all()
    assert logits.std() > 0


@pytest.mark.parametrize("name", sorted(MODELS))
def test_parameters_and_logits_equal_from_pretrained(name: str, tmp_path: Path) -> None:
    reference = make_model(name, tmp_path)
    assert_equal(load(tmp_path), loaded_tensors(reference), reference.reference)


def test_checkpoint_written_by_save_pretrained_loads_too(tmp_path: Path) -> None:
    saved = save_model(make_model("deepseek_v2", tmp_path / "made"), tmp_path / "saved")
    reference = load_model(saved)
    assert_equal(load(saved), loaded_tensors(reference), reference.reference)


def test_parameters_are_on_meta_and_buffers_are_real(tmp_path: Path) -> None:
    make_model("deepseek_v3", tmp_path)
    model = build(tmp_path)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert list(model.buffers())
    assert not any(buffer.is_meta for buffer in model.buffers())
    assert not model.training


def test_registering_parameters_is_as_before_once_the_model_is_built() -> None:
    before = nn.Module.register_parameter
    with pytest.raises(RuntimeError, match="broken"), on_meta():
        raise RuntimeError("broken")
    assert nn.Module.register_parameter is before
    assert not nn.Linear(2, 3).weight.is_meta


def test_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    make_model("deepseek_v3", tmp_path)
    with pytest.raises(ValueError, match="has no class 'NoSuchModel'"):
        build(tmp_path, architecture="NoSuchModel")
