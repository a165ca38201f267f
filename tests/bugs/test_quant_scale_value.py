"""Scales that arrived as other numbers, or not at all: exponents as values, names that a rename missed, names by backend."""

from __future__ import annotations

from pathlib import Path

import torch

from mapper.layout import Layout
from tests.bugs.harness import Case, case, load, refusal
from tests.loads import Tensors, all_raw, raw, told


def exponents(values: list[int], shape: tuple[int, ...] = (-1,)) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.uint8).reshape(shape).view(torch.float8_e8m0fnu)


E8M0_SCALES = """
options: {expert_dtype: {default: fp4}}
formats:
  experts:
    - when: expert_dtype == 'fp4'
      leaves: {weight_scale: {source: scale, dims: [out], dtype: float8_e8m0fnu, bitcast: uint8}}
    - when: expert_dtype == 'as it is'
      leaves: {weight_scale: {source: scale, dims: [out], dtype: float8_e8m0fnu}}
    - leaves: {weight_scale_inv: {source: scale, dims: [out], dtype: float8_e8m0fnu, cast: float32}}
runtimes:
  own:
    rules:
      - target: w13_{leaf}
        sources: ["layers.0.ffn.experts.{expert}.w1.{leaf}", "layers.0.ffn.experts.{expert}.w3.{leaf}"]
        stack: expert
        dims: {out: [1, 1], in: 1}
        format: experts
index: {expert: {count: 1}}
"""


@case("qs-01")
def test_an_exponent_becomes_its_value_or_keeps_its_bits_as_the_rule_says(bug: Case, tmp_path: Path) -> None:
    numbers = bug["config"]["bytes"]
    sources = {name: exponents([byte], (1, 1)) for name, byte in zip(bug.sources(), numbers, strict=True)}
    wrong = [each.view(torch.uint8).to(torch.float32).item() for each in sources.values()]
    assert wrong == [120.0, 125.0]  # as the peer did for both targets

    text = E8M0_SCALES.replace("[out]", "[out, in]")
    fp4, fp8 = (bug.program(tmp_path, text, options={"expert_dtype": each}) for each in ("fp4", "fp8"))
    bits, values = bug.targets("fp4"), bug.targets("fp8")
    load(fp4, tmp_path, sources, bits)
    load(fp8, tmp_path, sources, values)
    assert bits["w13_weight_scale"].flatten().tolist() == numbers
    assert values["w13_weight_scale_inv"].flatten().tolist() == [2.0**-7, 2.0**-2]
    undeclared = bug.program(tmp_path, text, options={"expert_dtype": "as it is"})
    assert told(refusal(undeclared, tmp_path, sources, bug.targets("fp4"))) == [("M533", "w13_weight_scale")]
    # Bytes that are stored as plain numbers are no exponents.
    bytes_ = {name: each.view(torch.uint8) for name, each in sources.items()}
    assert {code for code, _ in told(refusal(fp8, tmp_path, bytes_, bug.targets("fp8")))} == {"M504"}
    assert bug["layout"] == {"tp": 1}


PLAIN_SCALE = "runtimes: {own: {rules: [{target: scale, dims: {n: 5}, dtype: float8_e8m0fnu, bitcast: uint8}]}}\n"


@case("qs-02")
def test_bits_are_copied_where_a_value_copy_would_destroy_them(bug: Case, tmp_path: Path) -> None:
    numbers = bug["config"]["bytes"]
    sources = {name: exponents(numbers) for name in bug.sources()}
    assert sources["scale"].float().to(torch.uint8).tolist() == [0, 0, 1, 8, 0]  # as the peer's copy did

    targets = bug.targets()
    load(bug.program(tmp_path, PLAIN_SCALE), tmp_path, sources, targets)
    assert targets["scale"].tolist() == numbers
    undeclared = bug.program(tmp_path, PLAIN_SCALE.replace(", bitcast: uint8", ""))
    assert told(refusal(undeclared, tmp_path, sources, bug.targets())) == [("M533", "scale")]


MXFP4 = """
config: {required: [quant]}
index: {expert: {count: 1, axis: ep}}
formats:
  experts:
    - when: quant == 'mxfp4'
      leaves:
        weight: {dims: [out, in / 2], dtype: int8, bitcast: uint8}
        weight_scale: {source: scale, dims: [out, in / 32], dtype: float8_e8m0fnu, bitcast: uint8}
runtimes:
  own:
    rules:
      - target: experts.w13_{leaf}
        any_of:
          - sources: ["layers.0.ffn.experts.{expert}.w1.{leaf}", "layers.0.ffn.experts.{expert}.w3.{leaf}"]
          - {source: "layers.0.ffn.experts.w13.{leaf}"}
        stack: expert
        dims: {out: [2, 2], in: 4}
        format: experts
"""


def load_packed_scales_only(sources: Tensors, targets: Tensors) -> list[str]:
    """Load as the peer did: a scale has its new name only where all experts lie in one tensor. Return what stays zero."""
    renamed = {name.replace("w13.scale", "w13_weight_scale") for name in sources}
    return [name for name in targets if "scale" in name and f"layers.0.ffn.{name}" not in renamed]


@case("qs-03")
def test_packed_experts_and_experts_one_by_one_give_equal_parameters(bug: Case, tmp_path: Path) -> None:
    split, packed = bug.sources("per expert"), bug.sources("packed")
    assert load_packed_scales_only(split, bug.targets()) == ["experts.w13_weight_scale"]
    assert load_packed_scales_only(packed, bug.targets()) == []

    prefix = "layers.0.ffn.experts"
    for leaf in ("weight", "scale"):
        parts = [split[f"{prefix}.0.{part}.{leaf}"].view(torch.uint8) for part in ("w1", "w3")]
        packed[f"{prefix}.w13.{leaf}"] = torch.cat(parts)[None].view(packed[f"{prefix}.w13.{leaf}"].dtype)
    program = bug.program(tmp_path, MXFP4)
    loaded = [bug.targets(), bug.targets()]
    for sources, targets in zip((split, packed), loaded, strict=True):
        load(program, tmp_path, sources, targets)
    assert all_raw(loaded[0]) == all_raw(loaded[1])
    assert raw(loaded[0]["experts.w13_weight_scale"]) == raw(packed[f"{prefix}.w13.scale"])

    lacking = {name: each for name, each in split.items() if name != f"{prefix}.0.w3.scale"}
    assert told(refusal(program, tmp_path, lacking, bug.targets())) == [("M501", f"{prefix}.0.w3.scale")]


BY_DTYPE = """
config: {required: [n_experts]}
options: {expert_dtype: {default: fp4}}
index: {expert: {count: n_experts, axis: ep}}
formats:
  experts:
    - when: expert_dtype == 'fp4'
      leaves:
        weight: {dims: [out, in / 2], dtype: int8, bitcast: uint8}
        weight_scale: {source: scale, dims: [out, in / 32], dtype: float8_e8m0fnu, bitcast: uint8}
    - leaves:
        weight: {dims: [out, in], dtype: float8_e4m3fn}
        weight_scale_inv: {source: scale, dims: [out / 128, in / 128], dtype: float32}
runtimes:
  own:
    mesh: vllm
    rules:
      - target: w1_{leaf}
        source: "layers.0.ffn.experts.{expert}.w1.{leaf}"
        stack: expert
        dims: {out: 2, in: 4}
        format: experts
"""


def scale_name(backend: str) -> str:
    """Name the target as the peer did: by the backend, whatever the experts are stored as."""
    return "w1_weight_scale" if backend == "mega" else "w1_weight_scale_inv"


@case("qs-19")
def test_the_name_of_a_scale_follows_from_how_experts_are_stored(bug: Case, tmp_path: Path) -> None:
    assert scale_name("other") not in bug.targets("fp4")
    layout = Layout(**bug["layout"])
    for rank in range(layout.num_ranks):
        for form in ("fp4", "fp8"):
            sources, targets = bug.sources(form), bug.targets(form)
            program = bug.program(tmp_path, BY_DTYPE, layout=layout, rank=rank, options={"expert_dtype": form})
            load(program, tmp_path, sources, targets)
            own = [sources[f"layers.0.ffn.experts.{rank}.w1.{leaf}"] for leaf in ("weight", "scale")]
            assert list(all_raw(targets).values()) == [raw(each) for each in own]
    # A model of the other kind is refused, with what it has and what the rule gives.
    fp8 = bug.program(tmp_path, BY_DTYPE, layout=layout, options={"expert_dtype": "fp8"})
    findings = refusal(fp8, tmp_path, bug.sources("fp8"), bug.targets("fp4"))
    assert {("M531", "w1_weight_scale_inv"), ("M530", "w1_weight_scale")} <= set(told(findings))
    assert bug["config"]["n_experts"] == 2
