"""Dense decoders of Transformers: what `Loader` fills equals what `from_pretrained` reads, parameters and logits."""

import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

import mapper
from mapper.integrations.transformers import build
from mapper.load import Loader
from tests.oracle.families import write_checkpoint
from tests.oracle.test_transformers_architectures import MODELS as WITH_EXPERTS
from tests.oracle.transformers_dense import DENSE
from tests.oracle.transformers_models import LoadedModel, load_model, loaded_tensors, save_model
from tests.test_vllm_architectures import COMPARED

PAGE = Path(__file__).parents[2] / "docs" / "specs.md"


def load(folder: Path) -> nn.Module:
    checkpoint = mapper.Checkpoint.open(folder)
    assert checkpoint.config is not None
    (architecture,) = checkpoint.config["architectures"]
    model = build(folder)
    program = mapper.compile(mapper.load_spec(architecture), config=checkpoint.config, runtime="transformers")
    report = Loader(program, model).load(checkpoint)
    assert report.loaded == report.sources
    return model


def assert_equal(ours: nn.Module, reference: LoadedModel) -> None:
    assert not reference.unread
    found, expected = ours.state_dict(), loaded_tensors(reference)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name
    prompt = torch.arange(5, 29).view(1, 24)
    with torch.no_grad():
        logits = reference.reference(prompt).logits
        assert torch.equal(ours(prompt).logits, logits)
    assert logits.isfinite().all()
    assert logits.std() > 0


@pytest.mark.parametrize("entry", DENSE)
def test_parameters_and_logits_equal_from_pretrained(entry: str, tmp_path: Path) -> None:
    reference = load_model(write_checkpoint(DENSE[entry], tmp_path / "published"))
    assert_equal(load(tmp_path / "published"), reference)
    saved = save_model(reference, tmp_path / "saved")
    assert_equal(load(saved), load_model(saved))


def test_the_page_of_specs_has_the_figures_that_are_compared() -> None:
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\|[^|]*\| ([\d,]+), ([\d,]+) \| (\d+|-) \|$", PAGE.read_text(), re.MULTILINE)
    stated = {spec: tuple(int(each.replace(",", "").replace("-", "0")) for each in counts) for spec, *counts in rows}
    models = Counter(mapper.load_spec(entry.partition("@")[0]).id for entry in (*DENSE, *WITH_EXPERTS))
    found = {spec: (0, 0, models[spec]) for spec in stated}
    for spec, num_ranks, num_parameters, _ in COMPARED.values():
        ranks, parameters, num_models = found[spec]
        found[spec] = (ranks + num_ranks, parameters + num_parameters, num_models)
    assert stated == found
    assert models.keys() <= stated.keys()
