"""The families as Transformers reads them: parameters and logits of a load equal `from_pretrained`, bit for bit."""

import pytest
import torch
import transformers
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import mapper
from mapper.integrations.transformers import build
from mapper.load import Loader
from tests.oracle.families import family_tensors, write_family

# The number of sources loaded, and of parameters and buffers compared. Transformers cannot load the other families on a CPU
# without further packages (mxfp4), or only dequantised.
FAMILIES = {
    "deepseek_v2": (89, 45),
    "llama": (30, 30),
    "mixtral": (41, 21),
    "qwen2_moe": (99, 51),
    "qwen3_moe": (80, 36),
    "glm4_moe": (97, 53),
    "gpt_oss_bf16": (37, 37),
    "deepseek_v32": (106, 62),
    "deepseek_v4_bf16": (210, 122),
}


def load(folder):
    checkpoint = mapper.Checkpoint.open(folder)
    (architecture,) = checkpoint.config["architectures"]
    model = build(folder)
    program = mapper.compile(mapper.load_spec(architecture), config=checkpoint.config, runtime="transformers")
    return model, Loader(program, model).load(checkpoint)


def logits_of(model):
    with torch.inference_mode():
        return model(input_ids=torch.arange(24).unsqueeze(0), use_cache=False).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_equals_from_pretrained(family, tmp_path):
    folder = write_family(family, tmp_path)
    model, report = load(folder)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    found, expected = model.state_dict(), reference.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name
    assert torch.equal(logits_of(model), logits_of(reference.eval()))
    assert (report.loaded, len(expected)) == FAMILIES[family]


def test_mxfp4_experts_are_dequantized_as_transformers_does_it(tmp_path):
    model, _ = load(write_family("gpt_oss_mxfp4", tmp_path))
    sources, found = family_tensors("gpt_oss_mxfp4"), model.state_dict()
    for name in ("gate_up_proj", "down_proj"):
        for layer in range(2):
            prefix = f"model.layers.{layer}.mlp.experts.{name}"
            expected = convert_moe_packed_tensors(sources[f"{prefix}_blocks"], sources[f"{prefix}_scales"])
            assert found[prefix].shape == expected.shape
            assert torch.equal(found[prefix], expected)
