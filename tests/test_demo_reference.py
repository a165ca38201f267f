import copy
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from demo.checkpoint import CONFIG, write_tiny_deepseek_v3
from demo.reference import PROMPT_LENGTH, compare_models, load_reference, logits_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_deepseek_v3(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def reference(folder):
    return load_reference(folder, dtype=torch.float32)


@pytest.fixture
def ours(reference):
    return copy.deepcopy(reference)


def test_loading_the_reference_prints_nothing(folder, capfd):
    load_reference(folder, dtype=torch.float32)
    assert capfd.readouterr() == ("", "")


def test_the_reference_holds_every_tensor_of_the_checkpoint_but_the_draft_layer(folder, reference):
    tensors = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    expected = {name: tensor for name, tensor in tensors.items() if not name.startswith("model.layers.5.")}
    held = torch.cat([tensor.flatten() for tensor in reference.state_dict().values()])
    assert torch.equal(held.sort().values, torch.cat([tensor.flatten() for tensor in expected.values()]).sort().values)
    assert len(tensors) - len(expected) == 38


def test_a_reference_that_lacks_a_tensor_is_refused(folder, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    (file,) = [each for each in broken.glob("*.safetensors") if "model.norm.weight" in load_file(each)]
    tensors = load_file(file)
    tensors["model.final_norm.weight"] = tensors.pop("model.norm.weight")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(AssertionError, match=r"no tensor for \['model.norm.weight'\]"):
        load_reference(broken, dtype=torch.float32)


def test_an_equal_model_is_equal(ours, reference):
    comparison = compare_models(ours, reference)
    assert comparison.is_equal
    assert comparison.num_parameters == len(list(reference.parameters()))
    assert comparison.num_buffers == 3 + 2  # a bias per expert layer; two of the rotary embedding
    assert comparison.num_logits == PROMPT_LENGTH * CONFIG["vocab_size"]


def test_the_logits_are_finite_and_vary(reference):
    logits = logits_of(reference)
    assert logits.isfinite().all()
    assert (logits.std(dim=-1) > 0.1).all()
    assert (logits.std(dim=1) > 0.1).all()
    assert torch.equal(logits, logits_of(reference))


def test_the_prompt_reaches_every_expert(reference):
    chosen = {}
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _module, _inputs, output, number=number: chosen.update({number: output[2]}))
        for number, layer in enumerate(reference.model.layers)
        if number >= CONFIG["first_k_dense_replace"]
    ]
    logits_of(reference)
    for hook in hooks:
        hook.remove()
    assert [set(experts.flatten().tolist()) for experts in chosen.values()] == [set(range(CONFIG["n_routed_experts"]))] * 3


def test_a_change_of_any_parameter_shows_in_its_name_and_in_the_logits(ours, reference):
    for name, parameter in ours.named_parameters():
        kept = parameter.detach().clone()
        with torch.no_grad():
            parameter.copy_(parameter.roll(1, dims=-1))
        comparison = compare_models(ours, reference)
        assert comparison.different_parameters == (name,)
        assert not comparison.logits_are_equal, name
        assert not comparison.is_equal
        with torch.no_grad():
            parameter.copy_(kept)
    assert compare_models(ours, reference).is_equal


def test_minus_zero_is_not_zero_and_nan_is_nan(ours, reference):
    for model, value in ((ours, -0.0), (reference, 0.0)):
        model.model.norm.weight.data[3] = value
    assert compare_models(ours, reference).different_parameters == ("model.norm.weight",)
    ours.model.norm.weight.data[3] = reference.model.norm.weight.data[3] = float("nan")
    assert compare_models(ours, reference).different_parameters == ()


def test_a_changed_buffer_and_an_extra_parameter_are_named(ours, reference):
    ours.model.layers[3].mlp.gate.e_score_correction_bias[2] = 7
    ours.model.extra = torch.nn.Parameter(torch.zeros(3))
    comparison = compare_models(ours, reference)
    assert comparison.different_buffers == ("model.layers.3.mlp.gate.e_score_correction_bias",)
    assert comparison.different_parameters == ("model.extra",)
