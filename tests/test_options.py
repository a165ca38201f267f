"""A model built with another choice of kernel than the plan: the finding names the option that decides it."""

from pathlib import Path

import pytest

from mapper.checkpoint import Checkpoint, TensorHeader
from mapper.compiler import Program, compile
from mapper.compiler.options import with_options
from mapper.layout import Layout
from mapper.ops.dtypes import safetensors_name, torch_name
from mapper.plan.matching import match
from mapper.plan.plan import Plan
from mapper.plan.targets import DeclaredTarget, fit
from mapper.report import check
from mapper.spec import load_spec
from tests.manifests import write_family
from tests.oracle.families import FAMILIES
from tests.small import Headers


def headers_of(family: str) -> Headers:
    found = FAMILIES[family]
    return {
        each.name: TensorHeader(str(safetensors_name(str(each.dtype))), each.shape, -1, 0, 0)
        for each in found.headers(found.config)
    }


def program_of(spec: str, family: str, layout: str, **options: object) -> Program:
    config = FAMILIES[family].config
    return compile(load_spec(spec), config=config, runtime="vllm", layout=Layout.parse(layout), options=options)


def plan_of(program: Program, tensors: Headers) -> Plan:
    return program.assemble(match(program.families, program.skips, tensors), tensors)


def built_by(program: Program, tensors: Headers) -> dict[str, DeclaredTarget]:
    """Return the parameters of a model that fits the program."""
    targets = plan_of(program, tensors).targets.values()
    return {each.name: DeclaredTarget(each.shape, str(torch_name(each.dtype)), each.name) for each in targets}


@pytest.mark.parametrize(
    ("spec", "family", "layout", "option", "here", "there"),
    [
        ("deepseek_v2", "deepseek_v3_fp8", "tp=2", "fuse_shared_experts", False, True),
        ("deepseek_v2", "deepseek_v3_fp8", "tp=2", "fuse_shared_experts", True, False),
        ("deepseek_v4", "deepseek_v4_fp4", "tp=4,ep=4", "mega_moe", False, True),
        ("deepseek_v4", "deepseek_v4_fp4", "tp=4,ep=4", "mega_moe", True, False),
        ("deepseek_v4", "deepseek_v4_fp4", "tp=4", "sink_slots", 64, 1),
        ("deepseek_v4", "deepseek_v4_fp4", "tp=4", "sink_slots", 1, 64),
        ("deepseek_v4", "deepseek_v4_fp4", "tp=4,dp=2", "fp4_width", 128, 1),
    ],
)
def test_option_that_settles_a_mismatch_is_named(spec, family, layout, option, here, there):
    tensors = headers_of(family)
    model = built_by(program_of(spec, family, layout, **{option: there}), tensors)
    program = program_of(spec, family, layout, **{option: here})
    findings = with_options(program, tensors, model, fit(plan_of(program, tensors), model).findings)
    words = [str(each).lower() for each in (here, there)]
    expected = f"the option {option} is {words[0]} here; with {option}={words[1]} the rules give what the model has"
    assert {each.hint.partition(" (")[0] for each in findings} == {expected}
    shapes = [each for each in findings if each.code == "M532"]
    assert all(" in the model, and the rule gives " in each.message for each in shapes)


def test_check_names_it_and_says_nothing_where_no_option_helps(tmp_path: Path):
    family = "deepseek_v3_fp8"
    checkpoint = Checkpoint.open(write_family(family, tmp_path))
    model = built_by(program_of("deepseek_v2", family, "tp=2", fuse_shared_experts=True), headers_of(family))
    program = program_of("deepseek_v2", family, "tp=2")
    report = check(program, checkpoint, targets=[model])
    (hint,) = {each.hint for each in report.findings}
    assert hint == (
        "the option fuse_shared_experts is false here; with fuse_shared_experts=true the rules give what the model has "
        "(The shared experts become extra slots behind the routed ones, on every rank)"
    )
    # The option settles its own findings, and leaves the one that it has nothing to do with as it was.
    model["model.norm.weight"] = DeclaredTarget((3,), "bfloat16", "model.norm.weight")
    hints = {each.subject: each.hint for each in check(program, checkpoint, targets=[model]).findings}
    assert hints.pop("model.norm.weight") == ""
    assert set(hints.values()) == {hint}
