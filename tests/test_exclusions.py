"""The modules that a quantisation config leaves out, and the formats of their rules."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from mapper.compiler import Program, compile
from mapper.compiler.exclusions import KEYS, exclusions_of
from mapper.diagnostics import MapperError
from tests.loads import spec_of, write

LIST = "modules_to_not_convert"


@pytest.mark.parametrize(
    ("entry", "module", "is_left_out"),
    [
        ("lm_head", "lm_head", True),
        ("lm_head", "model.lm_head", True),
        ("lm_head", "lm_head2", False),
        ("mlp.gate", "model.layers.0.mlp.gate", True),
        ("mlp.gate", "model.layers.0.mlp.gate_proj", False),
        ("mlp.gate", "mlp.experts.gate", False),
        ("model.layers.1", "model.layers.1.self_attn.q_proj", True),
        ("model.layers.1", "model.layers.11.self_attn.q_proj", False),
        ("model.layers.*.self_attn", "model.layers.7.self_attn.q_proj", True),
        ("model.layers.*.self_attn", "model.layers.7.cross_attn.q_proj", False),
        ("*self_attn*", "layers.0.self_attn.q_proj", True),
        ("lm_head*", "lm_head", True),
        ("re:.*self_attn.*", "model.layers.7.self_attn.q_proj", True),
        ("re:self_attn", "model.layers.7.self_attn.q_proj", False),
        ("re:model|vision", "vision.merger", True),
        ("re:a|b", "xb", False),
        ("a.b", "a", False),
    ],
)
def test_an_entry_leaves_out_whole_segments(entry: str, module: str, is_left_out: bool) -> None:
    for key in KEYS:
        assert exclusions_of({key: [entry, "zzz"]}).leave_out(module) == is_left_out


def test_without_a_list_nothing_is_left_out() -> None:
    for quantization in ({}, {LIST: None}, {LIST: []}):
        assert not exclusions_of(quantization)
    assert exclusions_of({LIST: ["a"]})
    assert exclusions_of({LIST: ["re:a"]})


@pytest.mark.parametrize("entry", ["re:(", "", 3])
def test_an_entry_that_cannot_be_read_is_reported(entry: object) -> None:
    with pytest.raises(MapperError) as raised:
        exclusions_of({"ignore": ["lm_head", entry]})
    (found,) = raised.value.diagnostics
    assert (found.code, found.subject) == ("M338", str(entry))
    assert found.message.startswith(f"`ignore` of the quantisation config has the entry {entry!r}: ")


# --- rules ------------------------------------------------------------------------------------------------------------

TEXT = """
index: {layer: {count: 3}, expert: {count: 2, axis: ep}}
runtimes:
  own:
    mesh: vllm
    rules:
      - target: model.{layer}.qkv.{leaf}
        sources: ["layers.{layer}.q.{leaf}", "layers.{layer}.k.{leaf}"]
        dims: {out: [4, 4], in: 8}
      - target: model.{layer}.w{leaf}
        source: layers.{layer}.experts.{expert}.{leaf}
        stack: expert
        dims: {out: 4, in: 8}
        format: experts
formats:
  experts:
    - when: quant_method == 'fp8'
      leaves: {weight: [out, in], scale: ["out / block_out", "in / block_in"]}
    - leaves: {weight: [out, in]}
"""


def compiled(folder: Path, entries: list[str], text: str = TEXT) -> Program:
    quantization: Mapping[str, object] = {"quant_method": "fp8", "weight_block_size": [2, 4], LIST: entries}
    return compile(spec_of(folder, text), config={"quantization_config": quantization}, runtime="own")


def leaves_of(program: Program) -> dict[str, set[str]]:
    """Return the leaves of each target's module."""
    found: dict[str, set[str]] = {}
    for family in program.families:
        for name in family.target.names(family.domains):
            found.setdefault(name.removesuffix(family.leaf).removesuffix("."), set()).add(family.leaf)
    return found


FP8 = {"weight", "weight_scale_inv", "bias"}
PLAIN = {"weight", "bias"}


@pytest.mark.parametrize(
    "entries",
    [["layers.1.q", "layers.1.k"], ["model.1.qkv"], ["re:.*1.qkv"], ["layers.1.q", "layers.1.k", "model.1.qkv"]],
    ids=["sources", "target", "pattern", "both"],
)
def test_a_module_is_left_out_by_the_name_that_either_side_gives_it(entries: list[str], tmp_path: Path) -> None:
    found = leaves_of(compiled(tmp_path, entries))
    assert {name: leaves for name, leaves in found.items() if "qkv" in name} == {
        "model.0.qkv": FP8,
        "model.1.qkv": PLAIN,
        "model.2.qkv": FP8,
    }
    assert found["model.0.w"] == {"weight", "scale"}


def test_a_rule_that_is_left_out_at_every_index_stays_one_family_a_leaf(tmp_path: Path) -> None:
    program = compiled(tmp_path, ["re:layers.*[qk]$"])
    assert [len(family.domains["layer"]) for family in program.families if "qkv" in str(family.target)] == [3, 3]


def test_stacked_experts_are_left_out_together(tmp_path: Path) -> None:
    found = leaves_of(compiled(tmp_path, ["layers.0.experts.0", "layers.0.experts.1"]))
    assert (found["model.0.w"], found["model.1.w"]) == ({"weight"}, {"weight", "scale"})


@pytest.mark.parametrize(
    ("entry", "excluded", "kept"),
    [
        ("layers.1.q", "layers.1.q", "layers.1.k"),
        ("layers.2.experts.1", "layers.2.experts.1", "layers.2.experts.0"),
    ],
)
def test_parts_of_one_parameter_that_disagree_are_reported(entry: str, excluded: str, kept: str, tmp_path: Path) -> None:
    with pytest.raises(MapperError) as raised:
        compiled(tmp_path, [entry])
    (found,) = raised.value.diagnostics
    assert found.code == "M337"
    assert found.message == (f"the quantisation config leaves out {excluded!r} and not {kept!r}, which one parameter holds")


def test_a_source_with_a_format_of_its_own_is_not_asked(tmp_path: Path) -> None:
    text = TEXT.replace('"layers.{layer}.k.{leaf}"', '{source: "layers.{layer}.k.{leaf}", format: plain}')
    text = text.replace(
        'sources: ["layers.{layer}.q.{leaf}"', 'sources: [{source: "layers.{layer}.q.{leaf}", format: dequantized}'
    )
    assert leaves_of(compiled(tmp_path, ["layers.1.k"], text))["model.1.qkv"] == {"weight"}


def test_an_unknown_tensor_of_a_module_that_is_left_out_names_the_entry(tmp_path: Path) -> None:
    checkpoint = write(tmp_path / "files", {f"layers.{layer}.q.weight_scale_inv": torch.zeros(2, 2) for layer in (0, 1)}, {})
    findings = compiled(tmp_path, ["layers.1.q", "layers.1.k"]).match(checkpoint).findings
    hints = {each.subject: each.hint for each in findings if each.code == "M502"}
    assert hints == {"layers.1.q.weight_scale_inv": "the quantisation config leaves its module out: 'layers.1.q'"}
