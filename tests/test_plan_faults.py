"""One fault in one tensor's header: exactly that is reported, by name, on every rank of every layout, before any write."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mapper.checkpoint import Checkpoint, TensorHeader
from mapper.compiler import Program, compile
from mapper.diagnostics import MapperError
from mapper.layout import Layout
from mapper.load import Loader
from mapper.plan import Plan
from mapper.report import check
from mapper.spec import load_spec
from tests.loads import Tensors, all_raw, prefilled, told, write
from tests.oracle.families import FAMILIES, SENTINEL_BYTE, family_tensors, write_family

RUNTIMES = [
    ("deepseek_v2_lite", "vllm"),
    ("deepseek_v3_fp8", "vllm"),
    ("deepseek_v3_mtp", "vllm"),
    ("deepseek_v3_fp8_mtp", "vllm"),
    ("deepseek_v3_mtp", "vllm-mtp"),
    ("deepseek_v3_fp8_mtp", "vllm-mtp"),
]
LAYOUTS = [Layout(), Layout(tp=2), Layout(tp=2, ep=2), Layout(pp=2), Layout(tp=4, pp=2, ep=4), Layout(tp=2, dp=2, ep=4)]


@dataclass(frozen=True)
class Setting:
    """One family in one runtime and layout. `targets` are every rank's parameters, filled with the sentinel."""

    family: str
    runtime: str
    program: Program
    checkpoint: Checkpoint
    targets: tuple[Tensors, ...]

    @property
    def names(self) -> list[str]:
        return list(self.checkpoint.tensors)

    def is_skipped(self, name: str) -> bool:
        """Whether the runtime has no use for a name, told from the name alone."""
        num_layers = FAMILIES[self.family].config["num_hidden_layers"]
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        if self.runtime == "vllm":
            return layer is not None and int(layer[1]) >= num_layers and self.family.endswith("mtp")
        if layer is not None:
            return int(layer[1]) < num_layers
        return name in ("model.norm.weight", "lm_head.weight", "model.embed_tokens.weight")

    def has_substitute(self, name: str) -> bool:
        """Whether the draft would read the main model's embedding instead."""
        return self.runtime == "vllm-mtp" and name.endswith(".embed_tokens.weight")

    @property
    def num_ranks(self) -> int:
        return self.program.layout.num_ranks


@cache
def folder_of(family: str) -> Path:
    return write_family(family, Path(mkdtemp(prefix="faults-")) / family)


@pytest.fixture(scope="module", autouse=True)
def _clean() -> object:
    yield
    for family, _ in RUNTIMES:
        shutil.rmtree(folder_of(family).parent, ignore_errors=True)
    folder_of.cache_clear()


@cache
def setting_of(family: str, runtime: str, layout: Layout) -> Setting:
    checkpoint = Checkpoint.open(folder_of(family))
    config = checkpoint.config or {}
    program = compile(load_spec("deepseek_v2"), config=config, runtime=runtime, layout=layout)
    targets = tuple(prefilled(program.at_rank(rank).plan(checkpoint)) for rank in range(layout.num_ranks))
    return Setting(family, runtime, program, checkpoint, targets)


SETTINGS = st.builds(lambda pair, layout: setting_of(*pair, layout), st.sampled_from(RUNTIMES), st.sampled_from(LAYOUTS))
Headers = dict[str, TensorHeader]


def require_reported(setting: Setting, tensors: Headers, expected: list[tuple[str, str]]) -> None:
    """Assert that every rank's plan finds exactly `expected`, and that loading raises it and leaves every byte alone."""
    faulty = replace(setting.checkpoint, tensors=tensors)
    assert sorted(told(check(setting.program, faulty).findings)) == sorted(expected)
    matching = setting.program.match(faulty)
    for rank in range(setting.num_ranks):
        program = setting.program.at_rank(rank)
        assert sorted(told(program.assemble(matching, tensors).findings)) == sorted(expected)
        if expected:
            assert sorted(refusal(setting, rank, faulty)) == sorted(expected)
        else:
            program.plan(faulty)


def refusal(setting: Setting, rank: int, faulty: Checkpoint) -> list[tuple[str, str]]:
    with pytest.raises(MapperError) as caught:
        Loader(setting.program.at_rank(rank), setting.targets[rank]).load(faulty)
    for name, tensor in setting.targets[rank].items():
        assert bool((tensor.reshape(-1).view(torch.uint8) == SENTINEL_BYTE).all()), f"{name} was written"
    return told(caught.value.diagnostics)


@given(SETTINGS, st.data())
@settings(max_examples=30, deadline=None)
def test_dropped_tensor_is_missing(setting: Setting, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(setting.names))
    tensors = {each: header for each, header in setting.checkpoint.tensors.items() if each != name}
    is_needed = not setting.is_skipped(name) and not setting.has_substitute(name)
    require_reported(setting, tensors, [("M501", name)] if is_needed else [])


@given(SETTINGS, st.data())
@settings(max_examples=30, deadline=None)
def test_added_tensor_is_unknown(setting: Setting, data: st.DataObject) -> None:
    model = data.draw(st.sampled_from(setting.names))
    added = data.draw(st.sampled_from([f"{model}_x", f"{model}.x", f"x.{model}", f"{model}.weight"]))
    tensors = {**setting.checkpoint.tensors, added: setting.checkpoint.tensors[model]}
    require_reported(setting, tensors, [] if setting.is_skipped(added) else [("M502", added)])


@given(SETTINGS, st.data())
@settings(max_examples=30, deadline=None)
def test_renamed_tensor_is_missing_and_unknown_and_each_names_the_other(setting: Setting, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(setting.names))
    new = f"{name}_x"
    tensors = {new if each == name else each: header for each, header in setting.checkpoint.tensors.items()}
    is_needed = not setting.is_skipped(name) and not setting.has_substitute(name)
    expected = [("M501", name)] if is_needed else []
    expected += [] if setting.is_skipped(new) else [("M502", new)]
    require_reported(setting, tensors, expected)
    if len(expected) == 2:
        with pytest.raises(MapperError) as caught:
            setting.program.plan(replace(setting.checkpoint, tensors=tensors))
        hints = {each.code: each.hint for each in caught.value.diagnostics}
        assert hints == {"M501": f"the checkpoint has {new!r}, which no rule names", "M502": f"a rule expects {name!r}"}


def reshaped(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return every shape that differs by one along one axis, the transposed one, and one with an axis more and less."""
    others = [(*shape[:axis], size + by, *shape[axis + 1 :]) for axis, size in enumerate(shape) for by in (-1, 1)]
    return [each for each in [*others, shape[::-1], (1, *shape), shape[1:]] if each != shape]


@given(SETTINGS, st.data())
@settings(max_examples=50, deadline=None)
def test_reshaped_tensor_is_reported(setting: Setting, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(setting.names))
    header = setting.checkpoint.tensors[name]
    shape = data.draw(st.sampled_from(reshaped(header.shape)))
    tensors = {**setting.checkpoint.tensors, name: header._replace(shape=shape)}
    require_reported(setting, tensors, [] if setting.is_skipped(name) else [("M503", name)])
    if not setting.is_skipped(name):
        text = str(setting.program.match(replace(setting.checkpoint, tensors=tensors)).findings[0])
        assert f"{name!r} has the shape {list(shape)}, expected {list(header.shape)} (" in text


DECLARED = re.compile(r"_proj(_with_mqa)?\.weight$|\.experts\.\d+\.\w+\.weight_scale_inv$")
FUSED = re.compile(r"\.experts\.\d+\.|\.(gate|up)_proj\.|\.(q_a_proj|kv_a_proj_with_mqa)\.")


def reported_as(setting: Setting, name: str) -> str | None:
    """Return the code by which a plan reports a wrong dtype: None where only the model knows the right one."""
    if setting.is_skipped(name):
        return None
    if "fp8" in setting.family and DECLARED.search(name) and not name.endswith("eh_proj.weight"):
        return "M504"
    is_fused = FUSED.search(name) and not (name.endswith("kv_a_proj_with_mqa.weight") and "lite" in setting.family)
    return "M507" if is_fused else None


@given(SETTINGS, st.data())
@settings(max_examples=50, deadline=None)
def test_retyped_tensor_is_reported(setting: Setting, data: st.DataObject) -> None:
    # A router's bias is cast to float32, whatever it is stored as.
    name = data.draw(st.sampled_from([each for each in setting.names if not each.endswith("e_score_correction_bias")]))
    header = setting.checkpoint.tensors[name]
    dtype = data.draw(st.sampled_from([each for each in ("BF16", "F16", "F32", "F8_E4M3", "I8") if each != header.dtype]))
    faulty = replace(setting.checkpoint, tensors={**setting.checkpoint.tensors, name: header._replace(dtype=dtype)})
    code = reported_as(setting, name)
    matching = setting.program.match(faulty)
    for rank in range(setting.num_ranks):
        if code is not None:
            (found,) = refusal(setting, rank, faulty)
            assert found[0] == code
            (finding,) = matching.findings
            # Of two sources that differ either may be the wrong one; the finding names both.
            assert name == finding.subject or f"the other is {name!r}" == finding.hint
            is_first_of_two = ".experts." not in name and (".gate_proj." in name or ".q_a_proj." in name)
            assert name == finding.subject or is_first_of_two
            continue
        assert matching.findings == ()
        plan = setting.program.at_rank(rank).plan(faulty)
        written = {step.target for step in plan.steps() if step.source == name}
        if written and not name.endswith("e_score_correction_bias"):  # its rule says `cast`: any dtype becomes float32
            assert refusal(setting, rank, faulty) == [("M533", target) for target in sorted(written)]


@given(SETTINGS, st.randoms(use_true_random=False))
@settings(max_examples=15, deadline=None)
def test_order_of_headers_does_not_matter(setting: Setting, shuffler: random.Random) -> None:
    names = setting.names
    shuffler.shuffle(names)
    shuffled = replace(setting.checkpoint, tensors={name: setting.checkpoint.tensors[name] for name in names})
    for rank in range(setting.num_ranks):
        program = setting.program.at_rank(rank)
        assert program.plan(shuffled) == program.plan(setting.checkpoint)


@pytest.mark.parametrize(("family", "runtime"), RUNTIMES)
def test_plan_of_the_same_inputs_is_equal_and_of_others_is_not(family: str, runtime: str) -> None:
    def planned(layout: Layout, rank: int) -> Plan:
        checkpoint = Checkpoint.open(folder_of(family))
        program = compile(load_spec("deepseek_v2"), config=checkpoint.config or {}, runtime=runtime, layout=layout)
        return program.at_rank(rank).plan(checkpoint)

    plan = planned(Layout(tp=2, ep=2), 1)
    assert plan == planned(Layout(tp=2, ep=2), 1)
    assert list(plan.steps()) == list(planned(Layout(tp=2, ep=2), 1).steps())
    assert plan != planned(Layout(tp=2, ep=2), 0)
    assert plan != planned(Layout(tp=2), 1)


CHANGES: dict[str, Callable[[Headers, str, str], Headers]] = {
    "drop": lambda tensors, one, other: {name: each for name, each in tensors.items() if name not in (one, other)},
    "reshape": lambda tensors, one, other: (
        tensors | {name: tensors[name]._replace(shape=(*tensors[name].shape, 1)) for name in (one, other)}
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_two_faults_are_both_reported_at_once(change: str) -> None:
    setting = setting_of("deepseek_v2_lite", "vllm", Layout(tp=2, ep=2))
    one, other = "model.layers.1.mlp.experts.5.up_proj.weight", "model.norm.weight"
    code = {"drop": "M501", "reshape": "M503"}[change]
    require_reported(setting, CHANGES[change](setting.checkpoint.tensors, one, other), [(code, one), (code, other)])


@given(st.sampled_from(sorted(family_tensors("deepseek_v2_lite"))))
@settings(max_examples=10, deadline=None)
def test_tensor_in_a_second_file_is_reported_without_an_index_and_left_out_with_one(name: str) -> None:
    setting = setting_of("deepseek_v2_lite", "vllm", Layout(tp=2))
    source = folder_of("deepseek_v2_lite")
    folder = Path(mkdtemp(prefix="twice-"))
    try:
        for file in source.iterdir():
            shutil.copy(file, folder)
        write(folder / "extra", {name: family_tensors("deepseek_v2_lite")[name] + 1}, {})
        shutil.move(folder / "extra" / "model.safetensors", folder / "extra.safetensors")
        indexed = Checkpoint.open(folder)
        assert any("extra.safetensors" in note for note in indexed.ignored)
        expected, found = (prefilled(setting.program.plan(each)) for each in (setting.checkpoint, indexed))
        Loader(setting.program, expected).load(setting.checkpoint)
        Loader(setting.program, found).load(indexed)
        assert all_raw(found) == all_raw(expected)
        (folder / "model.safetensors.index.json").unlink()
        with pytest.raises(MapperError) as caught:
            Checkpoint.open(folder)
        (finding,) = caught.value.diagnostics
        assert finding.code == "M450"
        assert repr(name) in finding.message
        assert "extra.safetensors" in finding.message
    finally:
        shutil.rmtree(folder)
