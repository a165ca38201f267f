"""Tiny models of many architectures, written by `save_pretrained`: `Loader` fills what `from_pretrained` fills.

The configs are those of `architectures/`, with sizes of which no two are alike. Values and logits are compared bit for bit.
"""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import mapper
from demo.reference import quiet_transformers
from mapper.integrations.transformers import build
from mapper.load import Loader
from tests.oracle.architectures import entry_family
from tests.oracle.tensors import Config

SIZES: Config = {
    "vocab_size": 149,
    "hidden_size": 120,
    "intermediate_size": 136,
    "moe_intermediate_size": 56,
    "head_dim": 24,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_experts": 5,
    "num_local_experts": 5,
    "n_routed_experts": 5,
    "shared_expert_intermediate_size": 72,
    "shared_intermediate_size": 88,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 14,
}
LATENT: Config = {  # heads of multi-head latent attention have keys of their own
    **SIZES,
    "num_key_value_heads": 6,
    "q_lora_rank": 45,
    "kv_lora_rank": 27,
    "qk_nope_head_dim": 11,
    "qk_rope_head_dim": 6,
    "qk_head_dim": 17,
    "v_head_dim": 13,
    "head_dim": 6,
    "n_group": 1,
}
SLIDING: Config = {  # heads of sliding attention, beside the others
    "num_attention_heads": 8,
    "swa_num_attention_heads": 8,
    "swa_head_dim": 24,
    "v_head_dim": 34,
    "swa_v_head_dim": 34,
}
# The config of an entry of `architectures/` with these sizes: how many sources are loaded, how many tensors the model has.
MODELS: dict[str, tuple[Config, int, int]] = {
    "AXK1ForCausalLM": (LATENT, 105, 66),
    "AfmoeForCausalLM": (SIZES, 110, 71),
    "Cohere2MoeForCausalLM": (SIZES, 86, 35),
    "Ernie4_5_MoeForCausalLM@untied": (SIZES | {"moe_num_experts": 5}, 90, 51),
    "ExaoneMoeForCausalLM": (SIZES, 98, 59),
    "Glm4MoeForCausalLM": (SIZES, 98, 59),
    "Glm4MoeLiteForCausalLM": (LATENT, 102, 63),
    "GlmMoeDsaForCausalLM": (LATENT | {"index_n_heads": 3, "index_head_dim": 26}, 122, 83),
    "GraniteMoeSharedForCausalLM": (SIZES, 47, 47),
    "MiMoV2FlashForCausalLM": (SIZES | SLIDING, 83, 44),
    "MiniMaxM2ForCausalLM": (SIZES, 103, 51),
    "MixtralForCausalLM": (SIZES, 91, 39),
    "OlmoeForCausalLM": (SIZES, 99, 47),
    "Qwen2MoeForCausalLM": (SIZES, 119, 67),
    "Qwen3MoeForCausalLM@dense1": (SIZES, 86, 47),
    "Qwen3NextForCausalLM": (SIZES, 118, 66),
}


def write_model(entry: str, sizes: Config, folder: Path) -> None:
    """Write a model of random values as `save_pretrained` writes it."""
    config = entry_family(entry).config
    changed = {**config, **{key: value for key, value in sizes.items() if config.get(key) is not None}}
    torch.manual_seed(0)
    with quiet_transformers():
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**changed), dtype=torch.bfloat16)
        for tensor in model.state_dict().values():  # also what a constructor leaves at 0 or 1, such as norms and biases
            tensor.normal_()
        model.save_pretrained(folder)


@pytest.mark.parametrize("entry", MODELS)
def test_values_and_logits_equal_from_pretrained(entry: str, tmp_path: Path) -> None:
    sizes, *counts = MODELS[entry]
    write_model(entry, sizes, tmp_path)
    with quiet_transformers():
        reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").eval()
    checkpoint = mapper.Checkpoint.open(tmp_path)
    model = build(tmp_path).eval()
    (architecture,) = checkpoint.config["architectures"]
    program = mapper.compile(mapper.load_spec(architecture), config=checkpoint.config, runtime="transformers")
    report = Loader(program, model).load(checkpoint)
    found, expected = model.state_dict(), reference.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name
    tokens = torch.arange(24).unsqueeze(0)
    with torch.inference_mode():
        logits, expected_logits = (each(input_ids=tokens, use_cache=False).logits for each in (model, reference))
    assert expected_logits.isfinite().all()
    assert torch.equal(logits, expected_logits)
    assert [report.loaded, len(expected)] == counts
