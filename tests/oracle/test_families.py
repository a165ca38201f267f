import json

import pytest
import torch
from safetensors import safe_open

from tests.oracle.families import DRAWS, FAMILIES, Header, family_tensors, tensor_values, write_family
from tests.oracle.goldens import unwritten_mask


@pytest.mark.parametrize("family", FAMILIES)
def test_a_written_folder_holds_exactly_the_tensors_of_the_family(family, tmp_path):
    folder = write_family(family, tmp_path / family)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    read = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (no mapping)
                assert index["weight_map"][name] == file.name
                read[name] = opened.get_tensor(name)
    expected = family_tensors(family)
    assert set(read) == set(expected) == set(index["weight_map"])
    for name, tensor in expected.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
    assert len(set(index["weight_map"].values())) == 3
    assert json.loads((folder / "config.json").read_text()) == FAMILIES[family].config


def test_writing_twice_gives_the_same_bytes(tmp_path):
    first, second = (write_family("deepseek_v2", tmp_path / name) for name in ("first", "second"))
    assert [(each.name, each.read_bytes()) for each in sorted(first.iterdir())] == [
        (each.name, each.read_bytes()) for each in sorted(second.iterdir())
    ]


@pytest.mark.parametrize("dtype", DRAWS)
def test_values_depend_on_the_name_and_are_never_the_sentinel(dtype):
    tensor = tensor_values(Header("a", (101, 103), dtype))
    assert torch.equal(tensor.view(torch.uint8), tensor_values(Header("a", (101, 103), dtype)).view(torch.uint8))
    assert not torch.equal(tensor.view(torch.uint8), tensor_values(Header("b", (101, 103), dtype)).view(torch.uint8))
    assert not unwritten_mask(tensor).any()
    assert tensor.float().isfinite().all()


def test_bfloat16_values_are_a_sign_times_an_integer_below_256_over_a_power_of_two():
    values = tensor_values(Header("a", (65536,), torch.bfloat16)).float()
    scaled = values.abs() * 2**7
    assert torch.equal(scaled, scaled.round())
    assert values.abs().min() == 1
    assert values.abs().max() == 255
    assert values.unique().numel() == 2 * 128 * 8
