"""Updates of a running engine, up to the point where vLLM puts them in place; and what forbids one."""

from pathlib import Path

import pytest
import torch
from torch import nn

from mapper.diagnostics import MapperError
from mapper.integrations.vllm.live import LiveUpdate, require_updatable
from mapper.integrations.vllm.load import load
from mapper.integrations.vllm.reload import proved_tensors
from mapper.integrations.vllm.settings import settings_of
from mapper.integrations.vllm.state import changes, loaded_of, remember, remember_served
from tests.engine.own import Own, built, checkpoint_in, engine, parameters
from tests.modules import module_of
from tests.oracle.families import family_tensors

STRICT = settings_of({"fallback": False})
DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture
def model(tmp_path: Path) -> nn.Module:
    """Return a loaded model of which post-processing has packed one matrix away, as vLLM's CPU kernels do."""
    model = built(parameters(tmp_path))
    report = load(engine(), STRICT, model, checkpoint_in(tmp_path / "c"), Own(model).fallback)
    remember(model, engine(), STRICT, report)
    model.get_submodule("model.layers.1.mlp.down_proj").weight = nn.Parameter(torch.empty(0), requires_grad=False)
    remember_served(model)
    return model


def doubled() -> dict[str, torch.Tensor]:
    return {name: tensor * 2 for name, tensor in family_tensors("llama").items()}


def reason(model: nn.Module) -> str:
    with pytest.raises(MapperError) as caught:
        LiveUpdate(model)
    (found,) = caught.value.diagnostics
    return f"{found.code} {found.message}"


def test_update_is_collected_beside_the_model(model: nn.Module) -> None:
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    update = LiveUpdate(model)
    given = list(doubled().items())
    update.feed(given[:7])
    with pytest.raises(MapperError) as caught:
        update.finish()
    assert {each.code for each in caught.value.diagnostics} == {"M501"}
    update.feed(given[7:])
    assert update.finish().loaded == len(given)
    assert torch.equal(update.filled[DOWN], doubled()[DOWN]), "as it was before post-processing"
    assert all(torch.equal(before[name], tensor) for name, tensor in model.named_parameters())


def test_update_from_files(model: nn.Module, tmp_path: Path) -> None:
    update = LiveUpdate(model)
    update.feed_files(checkpoint_in(tmp_path / "b", doubled()))
    update.finish()
    assert torch.equal(update.filled["model.norm.weight"], doubled()["model.norm.weight"])


def test_names_of_one_parameter_are_one_in_an_update(tmp_path: Path) -> None:
    tensors = parameters(tmp_path)
    model = module_of(tensors, aliases=[("alias.weight", "model.norm.weight")])
    remember(model, engine(), STRICT, load(engine(), STRICT, model, checkpoint_in(tmp_path / "c"), Own(model).fallback))
    remember_served(model)
    update = LiveUpdate(model)
    assert update.tensors["alias.weight"] is update.tensors["model.norm.weight"]


@pytest.mark.parametrize("name", ["model.norm.weight", "lm_head.weight"])
def test_parameter_that_has_moved_forbids_an_update(name: str, model: nn.Module) -> None:
    parameter = model.get_parameter(name)
    parameter.data = parameter.data.clone()
    assert reason(model) == f"M754 {name!r} is not as it was after the load: its values lie at another address"


def test_every_way_to_be_another_parameter_is_told(model: nn.Module) -> None:
    loaded = loaded_of(model)
    assert loaded is not None
    assert loaded.served is not None
    assert changes(loaded.served, model) == []
    model.get_submodule("model.norm").weight = nn.Parameter(torch.zeros(5, dtype=torch.bfloat16))
    q = model.get_parameter("model.layers.0.self_attn.qkv_proj.weight")
    q.data = q.data.t().contiguous().t()
    o = model.get_submodule("model.layers.0.self_attn.o_proj")
    o.weight = nn.Parameter(o.weight.data, requires_grad=False)
    head = model.get_submodule("lm_head")
    head.weight = nn.Parameter(head.weight.data.float(), requires_grad=False)
    del model.get_submodule("model.embed_tokens").weight
    found = {each.subject: each.message.partition(": ")[2] for each in changes(loaded.served, model)}
    assert found == {
        "model.norm.weight": "its shape was [128] and is [5]",
        "model.layers.0.self_attn.qkv_proj.weight": "its stride was [128, 1] and is [1, 192]",
        "model.layers.0.self_attn.o_proj.weight": "it is another tensor at the same address",
        "lm_head.weight": "its dtype was torch.bfloat16 and is torch.float32",
        "model.embed_tokens.weight": "it is gone",
    }


def test_model_that_mapper_has_not_loaded_is_not_updated(tmp_path: Path) -> None:
    expected = "M755 this model cannot be updated while it runs: mapper has not loaded it (`--load-format mapper`)"
    assert reason(built(parameters(tmp_path))) == expected


def test_model_that_derives_tensors_itself_is_not_updated(model: nn.Module) -> None:
    model.process_weights_after_loading = lambda: None
    assert "Module derives tensors after a load that vLLM does not derive again" in reason(model)


def test_moving_experts_forbid_an_update(model: nn.Module) -> None:
    loaded = loaded_of(model)
    assert loaded is not None
    loaded.engine = engine(redundant_experts=2)
    with pytest.raises(MapperError, match="vLLM moves redundant experts about as it runs"):
        require_updatable(model)


def test_reload_is_proved_before_its_first_tensor(model: nn.Module, tmp_path: Path) -> None:
    given = dict(proved_tensors(model, checkpoint_in(tmp_path / "b", doubled())))
    assert given.keys() == doubled().keys()
    with pytest.raises(MapperError) as caught:
        proved_tensors(model, checkpoint_in(tmp_path / "d", {"model.norm.weight": None}))
    assert [each.code for each in caught.value.diagnostics] == ["M501"]
    wide = checkpoint_in(tmp_path / "e", {"model.norm.weight": torch.zeros(128)})
    with pytest.raises(MapperError) as caught:
        proved_tensors(model, wide)
    assert [each.code for each in caught.value.diagnostics] == ["M533"]


def test_reload_of_a_model_that_mapper_has_not_loaded_gives_everything(tmp_path: Path) -> None:
    checkpoint = checkpoint_in(tmp_path / "c", {"stray": torch.zeros(1)})
    assert "stray" in dict(proved_tensors(built(parameters(tmp_path)), checkpoint))
