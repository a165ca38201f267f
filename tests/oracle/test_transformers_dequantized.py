"""Quantised checkpoints as Transformers dequantises them on a CPU: parameters and logits, bit for bit."""

import pytest
import torch
from safetensors.torch import load_file, save_file

import mapper
from mapper.integrations.transformers import build
from mapper.load import Loader
from tests.oracle.families import FAMILIES, Family, write_checkpoint
from tests.oracle.transformers_models import load_model, loaded_tensors

pytest.importorskip("accelerate", reason="Transformers reads quantised checkpoints with accelerate only")

# Transformers takes the size of a block from the shapes, so that a ragged last block is none: kv_a has two whole ones here.
WHOLE_BLOCKS = {"qk_rope_head_dim": 128}
MODELS = {
    "deepseek_v3_fp8": WHOLE_BLOCKS,
    "deepseek_v32_fp8": WHOLE_BLOCKS,
    "deepseek_v4_fp8": {},
    "deepseek_v4_fp4": {},
}


def write(name, folder):
    """Write the family with scales near 1 / 128, so that no value and no logit overflows."""
    family = FAMILIES[name]
    write_checkpoint(Family({**family.config, **MODELS[name]}, family.headers), folder)
    for file in folder.glob("*.safetensors"):
        save_file({key: calm(key, each) for key, each in load_file(file).items()}, file, metadata={"format": "pt"})
    return folder


def calm(name, tensor):
    if not name.endswith(("scale_inv", ".scale")):
        return tensor
    if tensor.dtype == torch.float8_e8m0fnu:
        return (118 + tensor.view(torch.uint8) % 5).view(tensor.dtype)
    return (1 + tensor.abs() % 5) / 512


def logits_of(model):
    with torch.inference_mode():
        return model(input_ids=torch.arange(24).unsqueeze(0), use_cache=False).logits


@pytest.mark.parametrize("name", MODELS)
def test_parameters_and_logits_equal_from_pretrained(name, tmp_path):
    folder = write(name, tmp_path)
    reference = load_model(folder)
    model = build(folder)
    checkpoint = mapper.Checkpoint.open(folder)
    spec = mapper.load_spec(checkpoint.config["architectures"][0])
    program = mapper.compile(spec, config=checkpoint.config, runtime="transformers", options={"dequantize": True})
    Loader(program, model).load(checkpoint)
    found, expected = model.state_dict(), loaded_tensors(reference)
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype, key
        assert torch.equal(found[key], tensor), key
    ours, theirs = logits_of(model), logits_of(reference.reference)
    assert torch.equal(ours, theirs)
    assert ours.isfinite().all()
    assert ours.float().std(dim=-1).min() > 0


def test_a_ragged_last_block_is_dequantised_by_its_own_scale(tmp_path):
    """kv_a of V3 ends in half a block; Transformers stretches the scales of such a matrix over equal parts instead."""
    name, config = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight", FAMILIES["deepseek_v3_fp8"].config
    folder = write_checkpoint(FAMILIES["deepseek_v3_fp8"], tmp_path)
    program = mapper.compile(
        mapper.load_spec("deepseek_v2"), config=config, runtime="transformers", options={"dequantize": True}
    )
    model = build(folder)
    Loader(program, model).load(mapper.Checkpoint.open(folder))
    sources = {key: each for file in folder.glob("*.safetensors") for key, each in load_file(file).items()}
    values, scales = sources[name].float(), sources[f"{name}_scale_inv"]
    assert (values.shape, scales.shape) == ((192, 256), (2, 2))
    whole = scales.repeat_interleave(128, 0)[:192].repeat_interleave(128, 1)
    assert torch.equal(model.state_dict()[name], (values * whole).bfloat16())
    theirs = loaded_tensors(load_model(folder))[name]
    equal_parts = scales.repeat_interleave(96, 0).repeat_interleave(128, 1)
    assert torch.equal(theirs, (values * equal_parts).bfloat16())
