"""From what an engine says of itself to spec, runtime, layout, rank and options, and what is refused on the way."""

from dataclasses import replace
from pathlib import Path

import pytest

from mapper.diagnostics import MapperError
from mapper.integrations.vllm.engine import (
    layout_of,
    options_of,
    program_of,
    rank_of,
    require_known,
    runtime_of,
    spec_of,
)
from mapper.integrations.vllm.settings import settings_of
from mapper.layout import Layout, positions, rank_at
from mapper.spec import load_spec
from mapper.spec.configs import bundled_config
from tests.engine.own import LLAMA, engine

NONE = settings_of({})


def message(caught: pytest.ExceptionInfo[MapperError]) -> str:
    (found,) = caught.value.diagnostics
    return f"{found.code} {found.message}"


@pytest.mark.parametrize("version", ["0.31.1", "0.34.0", "1.0", "dev", ""])
def test_unknown_version_is_refused(version: str) -> None:
    found = spec_of(engine(version=version), NONE)
    assert not isinstance(found, str)
    with pytest.raises(MapperError) as caught:
        program_of(engine(version=version), NONE, *found, {})
    assert message(caught) == (
        f"M604 the runtime 'vllm' of the spec 'llama' is for vllm >=0.32,<0.34, and the model is of vllm {version}"
    )
    assert caught.value.diagnostics[0].hint == "vLLM's own loader works as ever: leave out `--load-format mapper`"


def test_parallelism_that_no_layout_describes_is_refused() -> None:
    with pytest.raises(MapperError) as caught:
        require_known(engine(unsupported=("prefill context parallelism",)))
    assert message(caught) == "M753 mapper does not know how vLLM lays a model out with prefill context parallelism"


def test_rank_counts_tp_fastest_then_pp_then_dp() -> None:
    layout = Layout(tp=2, pp=3, dp=2, ep=4)
    for rank in range(layout.num_ranks):
        tp, pp, dp = positions(layout, rank)
        own = engine(tp=2, pp=3, dp=2, has_expert_parallelism=True, tp_rank=tp, pp_rank=pp, dp_rank=dp)
        assert (layout_of(own), rank_of(own), rank_at(layout, tp=tp, pp=pp, dp=dp)) == (layout, rank, rank)


def test_layout_has_what_the_layers_have() -> None:
    own = engine(tp=4, redundant_experts=4, placement="round_robin", pp=2, pp_layers=(31, 30), has_expert_parallelism=True)
    assert str(layout_of(own)) == "tp=4,pp=2,dp=1,ep=4,redundant_experts=4,placement=round_robin,pp_layers=31+30"


@pytest.mark.parametrize(
    ("spec", "architectures", "runtime"),
    [
        ("deepseek_v2", ["DeepseekV3ForCausalLM"], "vllm"),
        ("deepseek_v2", ["DeepSeekMTPModel"], "vllm-mtp"),
        ("deepseek_v4", ["DeepSeekV4MTPModel"], "vllm-mtp"),
        ("deepseek_v4", ["DSparkDraftModel"], "vllm-dspark"),
        ("deepseek_v2", ["DSparkDraftModel"], None),
        ("llama", ["EagleLlamaForCausalLM"], None),
    ],
)
def test_runtime_is_that_of_the_model_that_was_built(spec: str, architectures: list[str], runtime: str | None) -> None:
    own = load_spec(spec)
    config = {**LLAMA.config, "architectures": [own.architectures[-1]]}
    assert runtime_of(engine(architectures=tuple(architectures), config=config), own) == runtime


def test_spec_is_found_by_architecture_or_named() -> None:
    found = spec_of(engine(), NONE)
    assert not isinstance(found, str)
    assert (found[0].id, found[1]) == ("llama", "vllm")
    named = spec_of(engine(), settings_of({"spec": "deepseek_v2"}))
    assert not isinstance(named, str)
    assert named[0].id == "deepseek_v2"


def test_wrong_architecture_is_refused_with_the_specs_own() -> None:
    settings = settings_of({"spec": "deepseek_v2"})
    found = spec_of(engine(), settings)
    assert not isinstance(found, str)
    with pytest.raises(MapperError) as caught:
        program_of(engine(), settings, *found, {})
    assert message(caught) == (
        "M307 this config names the architecture LlamaForCausalLM, and the spec 'deepseek_v2' is for "
        "DeepseekV2ForCausalLM, DeepseekV3ForCausalLM"
    )


def test_spec_that_is_named_and_does_not_exist_is_an_error() -> None:
    with pytest.raises(MapperError) as caught:
        spec_of(engine(), settings_of({"spec": "lama"}))
    assert message(caught).startswith("M140 ")


def test_no_spec_is_a_reason_and_no_error() -> None:
    assert "NoneForCausalLM" in str(spec_of(engine(config={"architectures": ["NoneForCausalLM"]}), NONE))
    assert spec_of(engine(config={}), NONE) == "the checkpoint's config.json names no architecture"
    eagle = engine(architectures=("EagleLlamaForCausalLM",))
    assert spec_of(eagle, NONE) == "the spec 'llama' has no runtime for EagleLlamaForCausalLM"


def test_broken_spec_is_an_error_and_no_reason_to_fall_back(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("spec: 1\nid: own\n")
    with pytest.raises(MapperError):
        spec_of(engine(), settings_of({"spec": str(path)}))


def test_layout_that_the_spec_refuses_is_an_error() -> None:
    own = engine(tp=3)
    found = spec_of(own, NONE)
    assert not isinstance(found, str)
    with pytest.raises(MapperError) as caught:
        program_of(own, NONE, *found, {})
    assert {each.code for each in caught.value.diagnostics} == {"M329"}


def test_options_are_seen_in_the_engine_and_may_be_overruled() -> None:
    spec = load_spec("deepseek_v4")
    shapes = {
        "model.layers.0.attn.attn_sink": (64,),
        "model.layers.0.ffn.experts.routed_experts.w13_weight": (4, 768, 64),
    }
    own = engine(mega_moe=True)
    assert options_of(own, spec, shapes) == {"mega_moe": True, "sink_slots": 64, "fp4_width": 384}
    assert options_of(engine(), spec, {}) == {"mega_moe": False}
    v3 = load_spec("deepseek_v2")
    assert options_of(engine(fuses_shared_experts=True), v3, shapes) == {"fuse_shared_experts": True}
    config = bundled_config("DeepSeek-V3")
    settings = settings_of({"options": {"fuse_shared_experts": False}})
    program = program_of(replace(own, config=config, fuses_shared_experts=True), settings, v3, "vllm", {})
    assert program.options["fuse_shared_experts"] is False


def test_overlay_skips_and_keeps() -> None:
    settings = settings_of({"overlay": {"skip": {"extra.**": "a probe"}, "keep": {"probe.weight": "set by hand"}}})
    found = spec_of(engine(), settings)
    assert not isinstance(found, str)
    program = program_of(engine(), settings, *found, {})
    assert (program.skips[-1].text, program.keeps[-1].text) == ("extra.** (overlay)", "probe.weight (overlay)")
    hides = settings_of({"overlay": {"keep": {"model.norm.weight": "no"}}})
    with pytest.raises(MapperError) as caught:
        program_of(engine(), hides, *found, {})
    (finding,) = caught.value.diagnostics
    assert (finding.code, finding.hint) == ("M314", "the keep is model.norm.weight (overlay)")


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"specs": "llama"}, "unknown setting 'specs'"),
        ({"spec": 3}, "'spec' is 3, expected an id, an architecture or a path"),
        ({"fallback": "no"}, "'fallback' is 'no', expected true or false"),
        ({"options": []}, "'options' is [], expected an object of options of the spec"),
        (
            {"overlay": {"skip": {"a.b": ""}}},
            "overlay has 'skip': {'a.b': ''}, expected an object such as "
            '{"skip": {PATTERN: WHY}, "keep": {PATTERN: WHY}}',
        ),
        (
            {"overlay": {"drop": {}}},
            "overlay has 'drop': {}, expected an object such as " '{"skip": {PATTERN: WHY}, "keep": {PATTERN: WHY}}',
        ),
    ],
)  # fmt: skip
def test_settings_are_checked(given: dict[str, object], problem: str) -> None:
    with pytest.raises(MapperError) as caught:
        settings_of(given)
    assert message(caught) == f"M751 model_loader_extra_config: {problem}"


def test_settings_have_defaults() -> None:
    assert (NONE.spec, NONE.fallback, NONE.report, NONE.skips, NONE.keeps, dict(NONE.options)) == (None, True, None, (), (), {})
