"""The entrance for a model's own `load_weights`: over several calls, without a prefix, judged when all has come."""

from pathlib import Path

import pytest
import torch
from torch import nn

from mapper.diagnostics import MapperError
from mapper.integrations.vllm.entrance import require_complete, take
from mapper.report.load import LoadReport
from mapper.session import UpdateSession
from tests.engine.own import LLAMA, built, engine, parameters
from tests.oracle.families import family_tensors
from tests.oracle.goldens import unwritten_mask


@pytest.fixture
def model(tmp_path: Path) -> nn.Module:
    return built(parameters(tmp_path))


def weights() -> list[tuple[str, torch.Tensor]]:
    return list(family_tensors("llama").items())


def is_whole(model: nn.Module) -> bool:
    return not any(unwritten_mask(tensor).any() for tensor in model.parameters())


def test_one_call(model: nn.Module) -> None:
    assert take(model, iter(weights()), engine=engine()) == {name for name, _ in model.named_parameters()}
    assert is_whole(model)
    require_complete(model)


def test_one_tensor_a_call_is_judged_seldom(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[UpdateSession] = []
    finish = UpdateSession.finish

    def counted(session: UpdateSession) -> LoadReport:
        judged.append(session)
        return finish(session)

    monkeypatch.setattr(UpdateSession, "finish", counted)
    given = weights()[::-1]
    for each in given[:-1]:
        assert take(model, [each], engine=engine()) == set()
    with pytest.raises(MapperError) as caught:
        require_complete(model)
    (found,) = caught.value.diagnostics
    assert found.code == "M756"
    assert take(model, given[-1:], engine=engine()) == {name for name, _ in model.named_parameters()}
    assert is_whole(model)
    require_complete(model)
    assert len(judged) == 2, "after the first tensor, and after the last one that was missing then"


def test_what_is_missing_is_named(model: nn.Module) -> None:
    given = dict(weights())
    last = given.pop("model.norm.weight")
    assert take(model, given.items(), engine=engine()) == set()
    with pytest.raises(MapperError) as caught:
        require_complete(model)
    (found,) = caught.value.diagnostics
    assert found.message == (
        "the weights of this model are incomplete: 1 sources are missing, the first is 'model.norm.weight'"
    )
    assert take(model, [("model.norm.weight", last)], engine=engine())


def test_names_without_a_prefix_are_of_a_module_inside(tmp_path: Path) -> None:
    inner = {name.removeprefix("model."): each for name, each in parameters(tmp_path).items() if name.startswith("model.")}
    module = built(inner)
    stripped = [(name.removeprefix("model."), each) for name, each in weights() if name.startswith("model.")]
    assert take(module, stripped[:5], engine=engine(), prefix="model") == set()
    assert take(module, stripped[5:], engine=engine(), prefix="model") == set(inner)
    assert is_whole(module)


def test_a_second_stream_is_a_new_update(model: nn.Module) -> None:
    take(model, weights(), engine=engine())
    doubled = [(name, tensor * 2) for name, tensor in weights()]
    assert take(model, doubled, engine=engine())
    norm = dict(doubled)["model.norm.weight"]
    assert torch.equal(dict(model.named_parameters())["model.norm.weight"], norm)


def test_wrong_tensor_is_refused_before_it_is_written(model: nn.Module) -> None:
    with pytest.raises(MapperError) as caught:
        take(model, [("model.norm.weight", torch.zeros(3, dtype=torch.bfloat16))], engine=engine())
    assert "M503" in {each.code for each in caught.value.diagnostics}
    assert all(unwritten_mask(tensor).all() for tensor in model.parameters())


def test_model_without_a_spec_is_refused(model: nn.Module) -> None:
    config = {**LLAMA.config, "architectures": ["NoneForCausalLM"]}
    with pytest.raises(MapperError) as caught:
        take(model, weights(), engine=engine(config=config, architectures=("NoneForCausalLM",)))
    assert caught.value.diagnostics[0].code == "M752"
