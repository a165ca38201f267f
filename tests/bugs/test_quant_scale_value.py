"""Scales that arrived as other numbers, or not at all: exponents as values, names that a rename missed, names by backend."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mapper.diagnostics import MapperError
from mapper.finalize import register
from mapper.layout import Layout
from mapper.load import Loader
from tests.bugs.harness import Case, case, load, refusal, tensors
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


STACKED = """
config: {required: [n_experts]}
index: {expert: {count: n_experts, axis: ep}}
runtimes: {own: {rules: [{target: w1_weight, source: 'experts.{expert}.w1.weight', stack: expert, dims: {out: 3, in: 2}}]}}
"""


def load_by_truth(sources: Tensors, target: torch.Tensor) -> list[str]:
    """Load as the peer did: an id that is not true is none. Return what did not find its slot."""
    lost = []
    for name, tensor in sources.items():
        expert = int(name.split(".")[1])
        if expert:
            target[expert] = tensor
        else:
            lost.append(name)
    return lost


@case("qs-04")
def test_expert_0_has_a_slot(bug: Case, tmp_path: Path) -> None:
    sources, targets = bug.sources(), bug.targets()
    assert load_by_truth(sources, bug.targets()["w1_weight"]) == ["experts.0.w1.weight"]
    load(bug.program(tmp_path, STACKED), tmp_path, sources, targets)
    assert raw(targets["w1_weight"]) == b"".join(raw(each) for each in sources.values())


CACHE_SCALES = """
index: {kv: {values: [k, v]}}
runtimes:
  own:
    mesh: vllm
    keep: [{target: self_attn.attn.*, why: the checkpoint has no scale of the cache}]
    rules:
      - target: self_attn.attn.{kv}_scale
        any_of:
          - source: self_attn.{kv}_proj.{kv}_scale
          - source: self_attn.qkv_proj.{kv}_scale
          - source: self_attn.kv_scale
        dims: {}
        optional: true
"""


@case("qs-08")
def test_scales_of_the_cache_are_found_under_each_of_their_names(bug: Case, tmp_path: Path) -> None:
    k, v = bug.targets()
    expected = {"A": {k: 0.5}, "B": {k: 0.5, v: 0.25}, "C": {k: 0.5, v: 0.5}}
    assert expected.keys() == bug["checkpoint"].keys()
    for rank in range(bug["layout"]["tp"]):
        program = bug.program(tmp_path, CACHE_SCALES, rank=rank)
        for form, scales in expected.items():
            sources, targets = bug.sources(form), bug.targets()
            assert sources.keys().isdisjoint(targets)  # the names that the peer looked for
            report = load(program, tmp_path, sources, targets)
            assert {name: targets[name].item() for name in scales} == scales
            assert set(report.kept) == {k, v} - scales.keys()
        untouched = bug.targets()
        assert set(load(program, tmp_path, {}, untouched).kept) == {k, v}
        assert all_raw(untouched) == all_raw(bug.targets())
    assert bug["config"] == {"kv_cache_dtype": "fp8"}


STACKED_QKV = """
index: {layer: {count: 1}, kv: {values: [k, v]}}
formats: {linear: [{leaves: {weight: [out, in]}}]}
runtimes:
  own:
    mesh: vllm
    keep: [{target: 'layers.{layer}.self_attn.attn.*', why: measured}]
    rules:
      - at: layers.{layer}.self_attn
        rules:
          - target: qkv_proj.{leaf}
            sources: ['q_proj.{leaf}', 'k_proj.{leaf}', 'v_proj.{leaf}']
            dims: {out: [4, 2, 2], in: 3}
            shard: {out: tp}
          - {target: 'attn.{kv}_scale', source: '{kv}_proj.{kv}_scale', dims: {}, optional: true}
"""


@case("qs-10")
def test_a_scale_of_the_cache_is_not_stacked_with_the_projection_that_it_stands_under(bug: Case, tmp_path: Path) -> None:
    sources, targets = bug.sources(), bug.targets()
    assert [name.replace("k_proj", "qkv_proj") in targets for name in sources] == [False]  # the peer's KeyError

    prefix = "layers.0.self_attn"
    rows = {"q": 4, "k": 2, "v": 2}
    sources |= tensors({f"{prefix}.{part}_proj.weight": f"F32[{size},3]" for part, size in rows.items()})
    targets |= tensors({f"{prefix}.qkv_proj.weight": "F32[4,3]"})
    load(bug.program(tmp_path, STACKED_QKV), tmp_path, sources, targets)
    assert targets[f"{prefix}.attn.k_scale"].item() == 0.5
    assert bug["config"] == {"quant": "nvfp4"}


ONE_SCALE = "runtimes: {own: {mesh: vllm, rules: [{target: attn.k_scale, dims: {one: 1}}]}}\n"


@case("qs-12")
def test_scales_of_heads_do_not_fill_one_of_a_tensor(bug: Case, tmp_path: Path) -> None:
    sources, targets = bug.sources(), bug.targets()
    tp = bug["layout"]["tp"]
    assert {len(each) // tp for each in sources.values()} == {1}  # the slice of one head that the peer would have taken
    program = bug.program(tmp_path, ONE_SCALE, config={})
    assert told(refusal(program, tmp_path, sources, targets)) == [("M503", "attn.k_scale")]
    load(program, tmp_path, {"attn.k_scale": torch.tensor(0.5)}, targets)
    assert targets["attn.k_scale"].tolist() == [0.5]
    assert not bug["config"]


QKV = """
runtimes:
  own:
    mesh: vllm
    rules:
      - target: qkv_proj.{leaf}
        sources: ['q_proj.{leaf}', 'k_proj.{leaf}', 'v_proj.{leaf}']
        dims: {out: [128, 128, 128], in: 128}
        shard: {out: tp}
"""
WEIGHTS = {f"{part}_proj.weight": "F8_E4M3[128,128]" for part in "qkv"}


@case("qs-13")
def test_a_scale_is_named_after_blocks_only_where_there_are_blocks(bug: Case, tmp_path: Path) -> None:
    scales, targets = bug.sources(), bug.targets()
    renamed = {name.replace("weight_scale_inv", "weight_scale") for name in scales}
    assert not renamed & scales.keys()  # the names that the peer looked for

    blocks = bug["config"]["weight_block_size"]
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": blocks}}
    targets |= tensors({"qkv_proj.weight": "F8_E4M3[384,128]"})
    load(bug.program(tmp_path, QKV, config=config), tmp_path, scales | tensors(WEIGHTS), targets)
    assert raw(targets["qkv_proj.weight_scale_inv"]) == b"".join(raw(each) for each in scales.values())

    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": None}}
    program = bug.program(tmp_path, QKV, config=config)
    plain = {name.replace("_inv", ""): each.reshape(1) for name, each in scales.items()}
    whole = tensors({"qkv_proj.weight": "F8_E4M3[384,128]", "qkv_proj.weight_scale": "F32[3]"})
    load(program, tmp_path, plain | tensors(WEIGHTS), whole)
    assert raw(whole["qkv_proj.weight_scale"]) == b"".join(raw(each) for each in scales.values())
    assert bug["layout"] == {"tp": 1}


ROTARY = """
config: {required: [heads, head_dim]}
formats: {linear: [{leaves: {weight: [out, in], weight_scale: SCALE}}]}
runtimes:
  own:
    rules:
      - target: q_proj.{leaf}
        dims: {out: heads * head_dim, in: 2}
        do: [{view: (head half two) in -> (head two half) in, head: heads, two: 2}]
"""


@case("qs-17")
def test_rows_and_their_scales_are_put_in_one_order(bug: Case, tmp_path: Path) -> None:
    sources, targets = bug.sources(), bug.targets()
    load(bug.program(tmp_path, ROTARY.replace("SCALE", "[out, 1]")), tmp_path, sources, targets)
    order = [0, 2, 1, 3]
    assert targets["q_proj.weight"][:, 0].tolist() == order
    assert targets["q_proj.weight_scale"].flatten().tolist() == order
    assert sources["q_proj.weight_scale"].flatten().tolist() != order  # the peer left the scales as they lay

    with pytest.raises(MapperError) as caught:
        bug.program(tmp_path, ROTARY.replace("SCALE", "[out / 2, in]"))
    assert {each.code for each in caught.value.diagnostics} == {"M340"}
    assert bug["layout"] == {"tp": 1}


PER_PART = """
formats: {linear: [{leaves: {weight: [out, in], weight_scale_2: [parts]}}]}
runtimes:
  own:
    mesh: vllm
    rules:
      - target: qkv_proj.{leaf}
        sources: ['q_proj.{leaf}', 'k_proj.{leaf}', 'v_proj.{leaf}']
        dims: {out: [8, 4, 4], in: 3}
        shard: {out: {axis: tp, units: [4, 2, 2]}}
"""


@case("qs-18")
def test_a_scale_for_each_part_is_placed_by_part_and_not_cut_by_rows(bug: Case, tmp_path: Path) -> None:
    rows = {"q": 8, "k": 4, "v": 4}
    weights = tensors({f"{part}_proj.weight": f"F32[{size},3]" for part, size in rows.items()})
    sources, tp = bug.sources() | weights, bug["layout"]["tp"]
    assert 8 // tp > len(bug.targets()["qkv_proj.weight_scale_2"])  # the rows of q, where the peer narrowed

    for rank in range(tp):
        targets = bug.targets() | tensors({"qkv_proj.weight": f"F32[{16 // tp},3]"})
        load(bug.program(tmp_path, PER_PART, rank=rank, config={}), tmp_path, sources, targets)
        assert targets["qkv_proj.weight_scale_2"].tolist() == [1, 2, 3]
    assert bug["config"] == {"quant": "nvfp4"}


PLACEHOLDERS = """
index: {expert: {count: 1, axis: ep}}
formats:
  experts:
    - leaves:
        weight: {dims: [out, in / 2], dtype: int8, bitcast: uint8}
        weight_scale: {dims: [out, in / 32], dtype: float8_e8m0fnu, bitcast: uint8, neutral: 127}
        input_scale: {dims: [], dtype: float32, neutral: 1}
runtimes:
  own:
    rules:
      - {target: 'w13_{leaf}', source: 'w13.{expert}.{leaf}', stack: expert, dims: {out: 2, in: 4}, format: experts}
    finalize:
      - {id: layout, inputs: [w13_weight_scale, w13_input_scale], output: w13_scales, do: [{call: bugs.scales}]}
"""


@register("bugs.scales")
def scales(exponents: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Stand for a step of a kernel, which needs scales that are numbers near 1."""
    return exponents.view(torch.float8_e8m0fnu).float() * factor


@case("qs-20")
def test_placeholder_of_a_scale_is_one_in_the_dtype_that_holds_it(bug: Case, tmp_path: Path) -> None:
    assert bug["config"]["load_format"] == "dummy"
    zeros = torch.zeros(1, dtype=torch.uint8)
    assert zeros.view(torch.float8_e8m0fnu).float().item() == 2.0**-127  # what the peer's fresh scales stood for

    targets = bug.targets()
    loader = Loader(bug.program(tmp_path, PLACEHOLDERS), targets)
    with pytest.raises(MapperError) as caught:
        loader.finalize(changed=["w13_weight_scale"])
    assert told(caught.value.diagnostics) == [("M633", "w13_input_scale")]
    assert "w13_scales" not in targets

    assert loader.placeholders() == sum(each.nbytes for each in targets.values())
    assert {name: set(each.flatten().tolist()) for name, each in targets.items()} == {
        "w13_weight": {0}, "w13_weight_scale": {127}, "w13_input_scale": {1.0},
    }  # fmt: skip
    loader.finalize()
    assert targets["w13_scales"].tolist() == [[[1.0], [1.0]]]
    with pytest.raises(MapperError) as caught:
        bug.program(tmp_path, PLACEHOLDERS.replace(", bitcast: uint8, neutral: 127", ", neutral: 0"))
    assert [each.code for each in caught.value.diagnostics] == ["M304"]
