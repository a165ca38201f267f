"""Bundled specs against the headers, or the names alone, of published checkpoints: exact numbers of what becomes of them."""

from functools import cache
from pathlib import Path

import pytest

from mapper.checkpoint import Checkpoint, read_names
from mapper.compiler import compile
from mapper.diagnostics import MapperError
from mapper.layout import Layout
from mapper.report import check, check_names
from mapper.spec import load_spec
from mapper.spec.bundled import bundled_ids
from tests.test_vllm_architectures import COMPARED

CHECKPOINTS = Path(__file__).with_name("data") / "checkpoints"
# 256 ranks, on which 64 experts are held twice.
WIDE = "tp=8,pp=4,dp=8,ep=64,redundant_experts=64"
INDEXES = Path(__file__).with_name("data") / "indexes"
NEXTN = "model.layers.{nextn}.**"
V3_DRAFT = {"model.norm.weight": 1, "lm_head.weight": 1, "others of model.embed_tokens.weight": 1}
KIMI = {"**.mlp.experts.*.up_proj.weight_shape": 23040, "vision_tower.**": 329, "mm_projector.**": 6}
V4_DRAFT = {"hc_head_{term}": 3, "norm.weight": 1}

# (checkpoint, runtime, layout): sources, skipped by rule, targets of all ranks.
EXPECTED: dict[tuple[str, str, str], tuple[int, dict[str, int], int]] = {
    ("DeepSeek-V2-Lite-Chat", "vllm", "tp=1"): (5291, {}, 324),
    ("DeepSeek-V2-Lite-Chat", "vllm", "tp=4,pp=2,dp=2,ep=8"): (5291, {}, 2592),
    ("DeepSeek-V2-Lite-Chat", "vllm", WIDE): (5291, {}, 20736),
    ("DeepSeek-V2-Lite-Chat", "transformers", "tp=1"): (5291, {}, 351),
    ("DeepSeek-V3", "vllm", "tp=1"): (91991, {NEXTN: 1564}, 1327),
    ("DeepSeek-V3", "vllm", "tp=8,pp=2,dp=2,ep=16"): (91991, {NEXTN: 1564}, 21232),
    ("DeepSeek-V3", "vllm-mtp", "tp=8,pp=2,dp=2,ep=16"): (91991, {"model.layers.{base}.**": 90424, **V3_DRAFT}, 448),
    ("DeepSeek-V3", "vllm", WIDE): (91991, {NEXTN: 1564}, 84928),
    ("DeepSeek-V3", "vllm-mtp", WIDE): (91991, {"model.layers.{base}.**": 90424, **V3_DRAFT}, 1792),
    ("DeepSeek-V3", "transformers", "tp=1"): (91991, {NEXTN: 1564}, 1571),
    ("DeepSeek-V3.2", "vllm", "tp=1"): (92425, {NEXTN: 1571}, 1632),
    ("DeepSeek-V3.2", "vllm", "tp=8,pp=2,dp=2,ep=16"): (92425, {NEXTN: 1571}, 26112),
    ("DeepSeek-V3.2", "vllm-mtp", "tp=8,pp=2,dp=2,ep=16"): (92425, {"model.layers.{base}.**": 90851, **V3_DRAFT}, 528),
    ("DeepSeek-V3.2", "vllm", WIDE): (92425, {NEXTN: 1571}, 104448),
    ("DeepSeek-V3.2", "vllm-mtp", WIDE): (92425, {"model.layers.{base}.**": 90851, **V3_DRAFT}, 2112),
    ("DeepSeek-V3.2", "transformers", "tp=1"): (92425, {NEXTN: 1571}, 1998),
    ("DeepSeek-V4-Flash", "vllm", "tp=1"): (69187, {"mtp.**": 1575}, 1502),
    ("DeepSeek-V4-Flash", "vllm", "tp=8,pp=2,ep=8"): (69187, {"mtp.**": 1575}, 12040),
    ("DeepSeek-V4-Flash", "vllm-mtp", "tp=8,pp=2,ep=8"): (69187, {"layers.{base}.**": 67606, **V4_DRAFT}, 328),
    ("DeepSeek-V4-Flash", "vllm", WIDE): (69187, {"mtp.**": 1575}, 96704),
    ("DeepSeek-V4-Flash", "vllm-mtp", WIDE): (69187, {"layers.{base}.**": 67606, **V4_DRAFT}, 2624),
    ("DeepSeek-V4-Flash", "transformers", "tp=1"): (69187, {"mtp.**": 1575}, 1736),
    ("DeepSeek-V4-Pro", "vllm", "tp=1"): (145116, {"mtp.**": 2343}, 2138),
    ("DeepSeek-V4-Pro", "vllm", "tp=8,pp=2,ep=8"): (145116, {"mtp.**": 2343}, 17128),
    ("DeepSeek-V4-Pro", "vllm-mtp", "tp=8,pp=2,ep=8"): (145116, {"layers.{base}.**": 142767, **V4_DRAFT}, 328),
    ("DeepSeek-V4-Pro", "vllm", WIDE): (145116, {"mtp.**": 2343}, 137408),
    ("DeepSeek-V4-Pro", "vllm-mtp", WIDE): (145116, {"layers.{base}.**": 142767, **V4_DRAFT}, 2624),
    ("DeepSeek-V4-Pro", "transformers", "tp=1"): (145116, {"mtp.**": 2343}, 2473),
    ("Kimi-K2.6", "vllm", "tp=1"): (208550, KIMI, 1093),
    ("Kimi-K2.6", "vllm", "tp=8,pp=2,dp=2,ep=16"): (208550, KIMI, 17488),
    ("Llama-3.1-8B-Instruct", "vllm", "tp=1"): (291, {}, 195),
    ("Llama-3.1-8B-Instruct", "vllm", "tp=16,pp=2"): (291, {}, 3120),
    ("Llama-3.1-8B-Instruct", "transformers", "tp=1"): (291, {}, 291),
    ("Qwen3-30B-A3B-Instruct-2507", "vllm", "tp=1"): (18867, {}, 435),
    ("Qwen3-30B-A3B-Instruct-2507", "vllm", "tp=8,pp=2,ep=8"): (18867, {}, 3504),
    ("Qwen3-30B-A3B-Instruct-2507", "transformers", "tp=1"): (18867, {}, 531),
    ("Qwen3-Next-80B-A3B-Instruct", "vllm", "tp=1"): (75944, {"mtp.**": 1553}, 687),
    ("Qwen3-Next-80B-A3B-Instruct", "vllm", "tp=8,pp=2,dp=2,ep=16"): (75944, {"mtp.**": 1553}, 11024),
    ("Qwen3-Next-80B-A3B-Instruct", "transformers", "tp=1"): (75944, {"mtp.**": 1553}, 759),
    ("gpt-oss-20b", "vllm", "tp=1"): (459, {}, 363),
    ("gpt-oss-20b", "vllm", "tp=4,pp=2"): (459, {}, 1464),
    ("gpt-oss-20b", "vllm", "tp=8,pp=2,ep=8"): (459, {}, 2928),
    ("gpt-oss-20b", "transformers", "tp=1"): (459, {}, 411),
}
# Of these only the index is there. (index, runtime): names, skipped by rule.
EXPECTED_NAMES: dict[tuple[str, str], tuple[str, int, dict[str, int]]] = {
    ("devstral", "vllm"): ("mistral", 363, {}),
    ("devstral", "transformers"): ("mistral", 363, {}),
    ("gemma-2b", "vllm"): ("gemma", 164, {}),
    ("gemma-2b", "transformers"): ("gemma", 164, {}),
    # The names depend on GLM's numbers of layers, dense layers, experts and drafts and on `use_qk_norm`, which the index shows
    # too, and not on its widths. With these its tensors have 0.0005 % more bytes than `total_size` of the index.
    ("glm-4.6", "vllm"): ("glm4_moe", 44689, {NEXTN: 500}),
    ("glm-4.6", "vllm-mtp"): ("glm4_moe", 44689, {"model.layers.{base}.**": 44186, "model.norm.weight": 1}),
    ("glm-4.6", "transformers"): ("glm4_moe", 44689, {NEXTN: 500}),
    ("mimo-7b", "vllm"): ("mimo", 451, {"model.mtp_layers.**": 16}),
    # They depend on the numbers of layers and experts alone; the widths give `total_size` of the index to the byte.
    ("mixtral-8x22b", "vllm"): ("mixtral", 1739, {}),
    ("mixtral-8x22b", "transformers"): ("mixtral", 1739, {}),
}
# Runtimes of a spec that a checkpoint is not for: it has no draft of that kind.
NOT_FOR = {
    ("DeepSeek-V2-Lite-Chat", "vllm-mtp"),
    ("DeepSeek-V4-Flash", "vllm-dspark"),
    ("DeepSeek-V4-Pro", "vllm-dspark"),
}


@cache
def manifest(name: str) -> Checkpoint:
    return Checkpoint.open(CHECKPOINTS / f"{name}.header.json.gz")


def architecture_of(name: str) -> str:
    config = manifest(name).config
    assert config is not None
    (architecture,) = config["architectures"]
    return str(architecture)


@pytest.mark.parametrize(("name", "runtime", "layout"), EXPECTED)
def test_a_published_checkpoint_is_accounted_for_to_the_last_tensor(name: str, runtime: str, layout: str) -> None:
    checkpoint = manifest(name)
    spec = load_spec(architecture_of(name))
    program = compile(spec, config=checkpoint.config or {}, runtime=runtime, layout=Layout.parse(layout))
    report = check(program, checkpoint)
    num_sources, skipped, num_targets = EXPECTED[name, runtime, layout]
    assert report.findings == ()
    assert {rule: count for rule, count in report.skipped_by.items() if count} == skipped
    sources, targets = report.sources, report.targets
    num_skipped = sum(skipped.values())
    assert (sources.total, sources.loaded, sources.skipped) == (num_sources, num_sources - num_skipped, num_skipped)
    assert (sources.elsewhere, sources.unknown) == (0, 0)
    assert (targets.total, targets.complete, targets.kept, targets.incomplete) == (num_targets, num_targets, 0, 0)


@pytest.mark.parametrize(("name", "runtime"), sorted(NOT_FOR))
def test_a_draft_that_the_checkpoint_does_not_have_is_refused(name: str, runtime: str) -> None:
    with pytest.raises(MapperError) as raised:
        compile(load_spec(architecture_of(name)), config=manifest(name).config or {}, runtime=runtime)
    assert [each.code for each in raised.value.diagnostics] == ["M302"]


def test_every_manifest_is_checked_with_every_runtime_of_its_spec() -> None:
    names = {path.name.removesuffix(".header.json.gz") for path in CHECKPOINTS.glob("*.header.json.gz")}
    pairs = {(name, runtime) for name in names for runtime in load_spec(architecture_of(name)).runtimes}
    assert pairs == {(name, runtime) for name, runtime, _ in EXPECTED} | NOT_FOR


def test_every_spec_is_held_against_a_published_checkpoint_or_what_vllm_loads() -> None:
    named = {load_spec(architecture_of(name)).id for name, _, _ in EXPECTED}
    named |= {spec for spec, _, _ in EXPECTED_NAMES.values()} | {spec for spec, *_ in COMPARED.values()}
    assert named == set(bundled_ids())


@pytest.mark.parametrize(("index", "runtime"), EXPECTED_NAMES)
def test_every_name_of_a_published_index_is_accounted_for(index: str, runtime: str) -> None:
    spec_id, num_names, skipped = EXPECTED_NAMES[index, runtime]
    names = read_names(INDEXES / f"{index}.index.json.gz")
    assert names.config is not None
    spec = load_spec(str(names.config["architectures"][0]))
    assert spec.id == spec_id
    report = check_names(compile(spec, config=names.config, runtime=runtime), names)
    assert report.findings == ()
    assert {rule: count for rule, count in report.skipped_by.items() if count} == skipped
    sources, num_skipped = report.sources, sum(skipped.values())
    assert (sources.total, sources.loaded, sources.skipped) == (num_names, num_names - num_skipped, num_skipped)


def test_an_index_with_a_conflict_marker_is_one_error() -> None:
    for opened in (read_names, Checkpoint.open):
        with pytest.raises(MapperError) as raised:
            opened(CHECKPOINTS / "bloom-invalid.index.json.gz")
        (found,) = raised.value.diagnostics
        assert (found.code, found.message) == ("M411", "the index holds a git conflict marker '======='")
        assert found.place is not None
        assert found.place.line == 2
