import json
import math

import pytest
import torch
from hypothesis import given, strategies
from safetensors.torch import load_file

from demo.checkpoint import (
    CONFIG,
    MASK,
    NUM_SHARDS,
    element_number,
    element_spans,
    element_values,
    locate,
    num_elements,
    read_spans,
    write_tiny_deepseek_v3,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_deepseek_v3(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def tensors(folder):
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@given(strategies.integers(0, MASK))
def test_a_value_gives_its_element_number_back(number):
    value = element_values(torch.tensor([number]))
    assert -0.5 <= value.item() < 0.5
    assert element_number(value.item()) == number


def test_element_number_0_is_the_value_0():
    assert element_values(torch.tensor([0])).item() == 0.0
    assert element_number(0.0) == 0


@pytest.mark.parametrize("value", [0.5, -0.51, 2.0**-25, float("nan"), float("inf")])
def test_other_values_are_of_no_element(value):
    with pytest.raises(ValueError, match="is the value of no element"):
        element_number(value)


def test_all_elements_have_different_values_and_none_is_zero(tensors):
    values = torch.cat([tensor.flatten() for tensor in tensors.values()])
    assert values.dtype == torch.float32
    assert values.unique().numel() == values.numel() == num_elements(element_spans()) < 2**24
    assert values.all()


def test_elements_json_says_which_element_a_value_is(folder, tensors):
    spans = read_spans(folder)
    assert spans == element_spans()
    assert set(spans) == set(tensors)
    for name, tensor in tensors.items():
        index = tuple(size * 2 // 3 for size in tensor.shape)
        assert locate(element_number(tensor[index].item()), spans) == (name, index)
    assert locate(0, spans) is None
    assert locate(num_elements(spans) + 1, spans) is None


def test_the_index_lists_every_tensor_in_its_shard(folder):
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    held = {name: file.name for file in folder.glob("*.safetensors") for name in load_file(file)}
    assert index["weight_map"] == held
    assert len(set(held.values())) == NUM_SHARDS
    assert index["metadata"]["total_size"] == sum(file.stat().st_size for file in folder.glob("*.safetensors")) - sum(
        8 + int.from_bytes(file.read_bytes()[:8], "little") for file in folder.glob("*.safetensors")
    )


def test_the_sizes_can_be_cut_and_are_all_different():
    heads = CONFIG["num_attention_heads"]
    cut = [CONFIG["intermediate_size"], CONFIG["moe_intermediate_size"], heads]
    assert all(size % 4 == 0 for size in cut)
    sizes = {size for span in element_spans().values() for size in span.shape}
    names = ("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "q_lora_rank", "n_routed_experts")
    rows = [heads * (CONFIG["qk_nope_head_dim"] + CONFIG[name]) for name in ("qk_rope_head_dim", "v_head_dim")]
    kv_rank = CONFIG["kv_lora_rank"]
    known = [*(CONFIG[name] for name in names), *rows, kv_rank, kv_rank + CONFIG["qk_rope_head_dim"]]
    known += [heads * CONFIG["v_head_dim"], 2 * CONFIG["hidden_size"]]
    assert sizes == set(known)
    assert len(known) == len(sizes)
    assert all(math.prod(span.shape) > 1 for span in element_spans().values())
