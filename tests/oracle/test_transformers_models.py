import pytest
import torch
from safetensors.torch import load_file

from tests.oracle.families import PLAIN_V3, tensors_of, write_family
from tests.oracle.transformers_models import MODELS, load_model, loaded_tensors, make_model, save_model

HIDDEN, WIDTH, NUM_EXPERTS = 104, 56, 6


@pytest.fixture(scope="module", params=MODELS)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def model(name, tmp_path_factory):
    return make_model(name, tmp_path_factory.mktemp(name))


def read(folder):
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def fuse(tensors):
    """The checkpoint's tensors under the model's names: experts stacked, gate above up, routers in float32."""
    fused = {name: tensor for name, tensor in tensors.items() if ".mlp.experts." not in name}
    for prefix in {name.partition(".experts.")[0] for name in tensors if ".mlp.experts." in name}:
        gate, up, down = (
            torch.stack([tensors[f"{prefix}.experts.{expert}.{part}.weight"] for expert in range(NUM_EXPERTS)])
            for part in ("gate_proj", "up_proj", "down_proj")
        )
        fused |= {f"{prefix}.experts.gate_up_proj": torch.cat([gate, up], dim=1), f"{prefix}.experts.down_proj": down}
    return {name: tensor.float() if name.endswith("mlp.gate.weight") else tensor for name, tensor in fused.items()}


def test_the_reference_holds_the_checkpoint_and_nothing_else(name, model):
    expected = fuse(tensors_of(MODELS[name]))
    held = loaded_tensors(model)
    assert set(expected) - model.unread == set(held)
    for key, tensor in held.items():
        assert (tensor.shape, tensor.dtype) == (expected[key].shape, expected[key].dtype), key
        assert torch.equal(tensor, expected[key]), key


def test_only_draft_layers_are_unread(name, model):
    assert {key.partition(".layers.")[2].partition(".")[0] for key in model.unread} == (
        {"4"} if name.endswith("mtp") else set()
    )
    assert bool(model.unread) == name.endswith("mtp")


def test_routers_are_float32_and_the_rest_is_bfloat16(model):
    dtypes = {name: parameter.dtype for name, parameter in model.reference.named_parameters()}
    routers = {name for name, dtype in dtypes.items() if dtype == torch.float32}
    assert routers == {f"model.layers.{layer}.mlp.gate.weight" for layer in (1, 2, 3)}
    assert {dtypes[name] for name in dtypes if name not in routers} == {torch.bfloat16}
    assert dtypes["model.norm.weight"] == torch.bfloat16


def test_the_bias_of_the_router_is_a_persistent_buffer_and_the_frequencies_are_not(name, model):
    buffers = {key: (buffer.dtype, key in loaded_tensors(model)) for key, buffer in model.reference.named_buffers()}
    biases = (1, 2, 3) if "v3" in name else ()
    assert buffers == {
        **{f"model.layers.{layer}.mlp.gate.e_score_correction_bias": (torch.float32, True) for layer in biases},
        "model.rotary_emb.inv_freq": (torch.float32, False),
        "model.rotary_emb.original_inv_freq": (torch.float32, False),
    }


def test_experts_are_two_parameters_a_layer(model):
    shapes = {key: tuple(p.shape) for key, p in model.reference.named_parameters() if ".mlp.experts." in key}
    assert shapes == {
        f"model.layers.{layer}.mlp.experts.{part}": shape
        for layer in (1, 2, 3)
        for part, shape in (("gate_up_proj", (NUM_EXPERTS, 2 * WIDTH, HIDDEN)), ("down_proj", (NUM_EXPERTS, HIDDEN, WIDTH)))
    }


def test_save_pretrained_writes_a_tensor_per_expert_and_routers_in_float32(name, model, tmp_path):
    original, saved = read(model.folder), read(save_model(model, tmp_path))
    draft = {key for key in original if key.startswith("model.layers.4.")}
    assert set(saved) == set(original) - draft
    changed = {key for key, tensor in saved.items() if tensor.dtype != original[key].dtype}
    assert changed == {f"model.layers.{layer}.mlp.gate.weight" for layer in (1, 2, 3)}
    assert all(torch.equal(tensor, original[key].to(tensor.dtype)) for key, tensor in saved.items())
    again = loaded_tensors(load_model(tmp_path))
    assert all(torch.equal(tensor, again[key]) for key, tensor in loaded_tensors(model).items())


def test_save_pretrained_claims_a_draft_layer_that_it_did_not_write(name, model, tmp_path):
    save_model(model, tmp_path)
    assert load_model(tmp_path).reference.config.to_dict().get("num_nextn_predict_layers") == (1 if "v3" in name else None)
    assert not [key for key in read(tmp_path) if key.startswith("model.layers.4.")]


def test_the_logits_are_finite_and_vary(model):
    with torch.inference_mode():
        logits = model.reference(input_ids=torch.arange(32).unsqueeze(0), use_cache=False).logits.float()
    assert logits.isfinite().all()
    assert (logits.std(dim=-1) > 0).all()


@pytest.mark.parametrize("family", [name for name in PLAIN_V3 if "fp8" not in name])
def test_the_recorded_families_load_as_well(family, tmp_path):
    held = loaded_tensors(load_model(write_family(family, tmp_path)))
    assert held["model.layers.1.mlp.experts.gate_up_proj"].shape == (8, 128, 128)
