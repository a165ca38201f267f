"""What is left to vLLM's own loader, that it is told, and that a broken checkpoint is never taken for a layout of its own."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mapper.checkpoint import Checkpoint
from mapper.compiler import compile
from mapper.diagnostics import MapperError
from mapper.integrations.vllm.live import require_updatable
from mapper.integrations.vllm.load import load
from mapper.integrations.vllm.settings import settings_of
from mapper.integrations.vllm.state import remember, remember_served
from mapper.load import Loader, allocate
from mapper.spec import load_spec
from tests.engine.own import DOWN, LLAMA, Own, built, checkpoint_in, engine, packed, parameters
from tests.loads import fill
from tests.modules import module_of
from tests.oracle.families import FAMILIES, family_tensors, write_family
from tests.oracle.goldens import unwritten_mask

STRICT = settings_of({"fallback": False})
LOOSE = settings_of({})


def codes(caught: pytest.ExceptionInfo[MapperError]) -> set[str]:
    return {each.code for each in caught.value.diagnostics}


def test_matrix_in_a_layout_of_its_own_is_left_to_vllm_and_all_else_is_proved(tmp_path: Path) -> None:
    tensors, changes = packed(parameters(tmp_path))
    model, checkpoint = built(tensors), checkpoint_in(tmp_path / "packed", changes)
    own = Own(model)
    report = load(engine(), LOOSE, model, checkpoint, own.fallback)
    delegated = {f"{DOWN}.qweight", f"{DOWN}.scales"}
    assert {name for name, kind in report.parameters.items() if kind == "delegated"} == delegated
    assert set(own.given) == delegated
    assert report.counts == {"proved": len(tensors) - 2, "kept": 0, "delegated": 2}
    assert (report.handed_over, report.unconfirmed, own.num_whole) == (2, (), 0)
    loaded = dict(model.named_parameters())
    assert torch.equal(loaded[f"{DOWN}.qweight"], torch.full((128, 24), 5, dtype=torch.int32))
    assert not any(unwritten_mask(tensor).any() for name, tensor in loaded.items() if name not in delegated)
    plain = parameters(tmp_path)
    program = compile(load_spec("llama"), config=LLAMA.config, runtime="vllm")
    Loader(program, plain).load(checkpoint_in(tmp_path / "again"))
    assert all(torch.equal(plain[name], tensor) for name, tensor in loaded.items() if name not in delegated)
    assert "2 delegated" in report.to_text()
    assert "M5" not in report.to_text()


def test_parameter_of_another_shape_is_left_to_vllm_with_all_of_its_sources(tmp_path: Path) -> None:
    tensors = parameters(tmp_path)
    name = "model.layers.0.self_attn.qkv_proj.weight"
    tensors[name] = torch.zeros(7, 5)
    model = built(tensors)
    own = Own(model)
    report = load(engine(), LOOSE, model, checkpoint_in(tmp_path / "c"), own.fallback)
    assert report.counts["delegated"] == 1
    assert sorted(own.given) == [f"model.layers.0.self_attn.{part}_proj.weight" for part in "kqv"]
    assert report.unconfirmed == (name,)
    assert report.why[name].startswith(f"{name!r} has the shape [7, 5] in the model")
    assert "not among those that vLLM's loader says it loaded" in report.to_text()


def test_parameter_without_a_loader_of_its_own_is_not_left_to_vllm(tmp_path: Path) -> None:
    tensors = parameters(tmp_path)
    tensors["model.norm.weight"] = torch.zeros(7)
    model = module_of(tensors)
    with pytest.raises(MapperError) as caught:
        load(engine(), LOOSE, model, checkpoint_in(tmp_path / "c"), Own(model).fallback)
    assert codes(caught) == {"M532", "M533"}


def test_a_second_tower_is_left_to_vllm_whole(tmp_path: Path) -> None:
    tower = {"vision.blocks.0.weight": torch.full((3, 5), 7.0), "vision.norm.weight": torch.full((3,), 2.0)}
    tensors = parameters(tmp_path)
    model = built({**tensors, **{name: torch.zeros_like(tensor) for name, tensor in tower.items()}})
    own = Own(model)
    report = load(engine(), LOOSE, model, checkpoint_in(tmp_path / "c", tower), own.fallback)
    assert set(own.given) == set(tower)
    assert report.counts == {"proved": len(tensors), "kept": 0, "delegated": 2}
    assert all(torch.equal(tensor, dict(model.named_parameters())[name]) for name, tensor in tower.items())


@pytest.mark.parametrize(
    ("lost", "code"),
    [
        ("model.layers.1.mlp.up_proj.weight", "M501"),
        ("model.layers.2.input_layernorm.weight", "M501"),
        ("lm_head.weight", "M501"),
    ],
)
def test_broken_checkpoint_is_an_error_with_or_without_a_layout_of_its_own(lost: str, code: str, tmp_path: Path) -> None:
    tensors = parameters(tmp_path)
    for number, (own_tensors, changes) in enumerate([(tensors, {}), packed(tensors)]):
        model = built(own_tensors)
        own = Own(model)
        fill(dict(model.named_parameters()))
        with pytest.raises(MapperError) as caught:
            load(engine(), LOOSE, model, checkpoint_in(tmp_path / f"{number}", {**changes, lost: None}), own.fallback)
        assert [(each.code, each.subject) for each in caught.value.diagnostics] == [(code, lost)]
        assert own.given == []
        assert all(unwritten_mask(tensor).all() for tensor in model.parameters()), "nothing is written"


def test_tensor_that_nothing_claims_is_an_error_unless_a_parameter_may_need_it(tmp_path: Path) -> None:
    stray = {"model.layers.1.mlp.down_proj.extra": torch.zeros(3)}
    model = built(parameters(tmp_path))
    with pytest.raises(MapperError) as caught:
        load(engine(), LOOSE, model, checkpoint_in(tmp_path / "a", stray), Own(model).fallback)
    assert codes(caught) == {"M502"}


def test_parameter_whose_optional_source_is_absent_is_an_error(tmp_path: Path) -> None:
    """The bias has a rule, and no tensor: vLLM would serve whatever lies in its memory."""
    tensors = parameters(tmp_path)
    tensors["model.layers.0.self_attn.qkv_proj.bias"] = torch.zeros(192, dtype=torch.bfloat16)
    model = built(tensors)
    with pytest.raises(MapperError) as caught:
        load(engine(), LOOSE, model, checkpoint_in(tmp_path / "a"), Own(model).fallback)
    assert codes(caught) == {"M530"}


def test_rule_for_a_parameter_that_the_model_lacks_is_an_error(tmp_path: Path) -> None:
    tensors = parameters(tmp_path)
    del tensors["model.norm.weight"]
    model = built(tensors)
    with pytest.raises(MapperError) as caught:
        load(engine(), LOOSE, model, checkpoint_in(tmp_path / "a"), Own(model).fallback)
    assert codes(caught) == {"M531"}


def test_fallback_false_makes_any_delegation_an_error(tmp_path: Path) -> None:
    tensors, changes = packed(parameters(tmp_path))
    model, checkpoint = built(tensors), checkpoint_in(tmp_path / "packed", changes)
    own = Own(model)
    with pytest.raises(MapperError) as caught:
        load(engine(), STRICT, model, checkpoint, own.fallback)
    (found,) = caught.value.diagnostics
    assert found.code == "M752"
    assert found.message == (
        f"2 parameters, '{DOWN}.qweight' first, would be left to vLLM's own loader, and `fallback` is false: the model has "
        f"the parameter '{DOWN}.qweight' [128, 24], which no rule fills and no `keep` names"
    )


def test_model_without_a_spec_is_left_to_vllm_whole_or_refused(tmp_path: Path) -> None:
    unknown = engine(architectures=("NoneForCausalLM",), config={**LLAMA.config, "architectures": ["NoneForCausalLM"]})
    model, checkpoint = built(parameters(tmp_path)), checkpoint_in(tmp_path / "c")
    own = Own(model)
    report = load(unknown, LOOSE, model, checkpoint, own.fallback)
    assert (own.num_whole, own.given, report.spec, report.load) == (1, [], None, None)
    assert report.counts == {"proved": 0, "kept": 0, "delegated": len(list(model.parameters()))}
    assert "NoneForCausalLM" in (report.fell_back or "")
    assert "left to vLLM's own loader" in report.to_text()
    with pytest.raises(MapperError) as caught:
        load(unknown, STRICT, model, checkpoint, own.fallback)
    assert codes(caught) == {"M752"}
    assert own.num_whole == 1


def test_draft_that_is_covered_in_part_is_left_to_vllm_whole(tmp_path: Path) -> None:
    """A draft's loader decides by what one call holds whether it shares its target's embedding."""
    checkpoint = Checkpoint.open(write_family("deepseek_v3_mtp", tmp_path / "mtp"))
    config = FAMILIES["deepseek_v3_mtp"].config
    tensors = allocate(compile(load_spec("deepseek_v2"), config=config, runtime="vllm-mtp").plan(checkpoint))
    name = next(name for name in tensors if name.endswith("eh_proj.weight"))
    model = built({**tensors, name: torch.zeros(3, 3)})
    own = Own(model)
    report = load(engine(architectures=("DeepSeekMTPModel",), config=config), LOOSE, model, checkpoint, own.fallback)
    assert (own.num_whole, own.given) == (1, [])
    assert report.counts["proved"] == 0
    assert "a draft of which 'deepseek_v2' covers only a part" in (report.fell_back or "")


def test_wrapped_layers_are_found(tmp_path: Path) -> None:
    tensors = parameters(tmp_path)
    wrapped = {name.replace(".down_proj.", ".down_proj.base_layer."): tensor for name, tensor in tensors.items()}
    model = built(wrapped)
    report = load(engine(), STRICT, model, checkpoint_in(tmp_path / "c"), Own(model).fallback)
    assert report.counts == {"proved": len(tensors), "kept": 0, "delegated": 0}
    assert not any(unwritten_mask(tensor).any() for tensor in model.parameters())


def test_report_is_one_object_per_process(tmp_path: Path) -> None:
    model = built(parameters(tmp_path))
    report = load(engine(), STRICT, model, checkpoint_in(tmp_path / "c"), Own(model).fallback)
    path = report.write(str(tmp_path / "out" / "load.json"))
    written = json.loads(path.read_text())
    assert path.name == "load.json"
    assert (written["proved"], written["delegated"], written["runtime"]) == (len(report.parameters), 0, "vllm")
    assert written["load"]["loaded"] == len(family_tensors("llama"))
    second = replace(report, rank=3, runtime="vllm-mtp")
    assert second.write(str(tmp_path / "load.json")).name == "load.vllm-mtp.rank3.json"
    assert second.write(str(tmp_path / "{runtime}-{rank}.json")).name == "vllm-mtp-3.json"


def test_model_that_is_left_to_vllm_in_part_is_remembered_so(tmp_path: Path) -> None:
    tensors, changes = packed(parameters(tmp_path))
    model = built(tensors)
    report = load(engine(), LOOSE, model, checkpoint_in(tmp_path / "p", changes), Own(model).fallback)
    remember(model, engine(), LOOSE, report)
    remember_served(model)
    with pytest.raises(MapperError) as caught:
        require_updatable(model)
    (found,) = caught.value.diagnostics
    assert (found.code, found.message) == (
        "M755",
        "this model cannot be updated while it runs: 2 of its parameters were left to vLLM's own loader",
    )
