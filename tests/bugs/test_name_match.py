"""Names matched by substring elsewhere: renames that eat their own output, single letters, suffixes kept."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.bugs.harness import Case, case, load, read_case, refusal
from tests.loads import Tensors, all_raw, told

Stack = Mapping[str, list[str]]


def stacked(prefix: str, fused: str, parts: list[str]) -> str:
    """Return a spec that lays square parts of 4 end to end, read split or as they are fused."""
    return f"""
runtimes:
  own:
    rules:
      - target: {prefix}.{fused}.{{leaf}}
        any_of:
          - sources: [{", ".join(f"'{prefix}.{part}.{{leaf}}'" for part in parts)}]
          - source: {prefix}.{fused}.{{leaf}}
        dims: {{out: {[4] * len(parts)}, in: 4}}
"""


def rename_while_any_matches(name: str, stack: Stack) -> str:
    """Rename as the peer did: a part anywhere in the name, and the next part in what the last one made of it."""
    for fused, parts in stack.items():
        for part in parts:
            if part in name:
                name = name.replace(part, fused)
    return name


def stack_by_letter(sources: Tensors, targets: Tensors, stack: Stack) -> list[str]:
    """Load as the peer did: look for the part between dots, replace it anywhere, skip what is not there; return that."""
    lost = []
    for name, tensor in sources.items():
        for fused, parts in stack.items():
            shard, part = next((shard, part) for shard, part in enumerate(parts) if f".{part}." in name)
            target = targets.get(name.replace(part, fused))
            if target is None:
                lost.append(name)
            else:
                target[4 * shard : 4 * shard + 4] = tensor
    return lost


@case("nm-02")
def test_rename_does_not_match_in_its_own_output(bug: Case, tmp_path: Path) -> None:
    stack, sources, targets = bug["config"]["stack"], bug.sources(), bug.targets()
    lost = {rename_while_any_matches(name, stack) for name in sources} - targets.keys()
    assert lost == {"blk.0.self_attn.qkqkv_proj.weight"}
    assert "qkqkv_proj" in bug.what_went_wrong

    program = bug.program(tmp_path, stacked("blk.0.self_attn", "qkv_proj", stack["qkv_proj"]))
    load(program, tmp_path, sources, targets)
    (fused,) = targets
    assert targets[fused].tolist() == [[1.0] * 4] * 4 + [[2.0] * 4] * 4 + [[3.0] * 4] * 4
    already, again = {fused: targets[fused].clone()}, bug.targets()
    load(program, tmp_path, already, again)
    assert all_raw(again) == all_raw(already)


@case("nm-04")
def test_single_letter_is_a_whole_segment(bug: Case, tmp_path: Path) -> None:
    stack, sources, targets, wrong = bug["config"]["stack"], bug.sources(), bug.targets(), bug.targets()
    (fused,) = targets
    lost = stack_by_letter(sources, wrong, stack)
    assert lost == ["encoder.block.0.layer.0.SelfAttention.k.weight"]

    program = bug.program(tmp_path, stacked("encoder.block.0.layer.0.SelfAttention", "qkv_proj", stack["qkv_proj"]))
    load(program, tmp_path, sources, targets)
    assert targets[fused].tolist() == [[1.0] * 4] * 4 + [[2.0] * 4] * 4 + [[3.0] * 4] * 4
    differs = (wrong[fused].view(torch.int32) != targets[fused].view(torch.int32)).all(dim=1)
    assert differs.nonzero().flatten().tolist() == [4, 5, 6, 7]

    without = {name: tensor for name, tensor in sources.items() if name not in lost}
    assert told(refusal(program, tmp_path, without, bug.targets())) == [("M501", lost[0])]


WORDS = ["q", "k", "v", "qk", "kv", "qkv", "q_proj", "v_proj", "qkv_proj", "block"]


@given(parts=st.lists(st.sampled_from(WORDS), unique=True, min_size=2, max_size=5), data=st.data())
@settings(max_examples=20, deadline=None)
def test_parts_whose_names_contain_each_other_are_told_apart(parts: list[str], data: st.DataObject, shared: Path) -> None:
    prefix, fused = f"k.{parts[0]}block", f"{parts[-1]}_{parts[0]}"
    sources = {f"{prefix}.{part}.weight": torch.full((4, 4), float(number)) for number, part in enumerate(parts)}
    stream = dict(data.draw(st.permutations(list(sources.items()))))
    targets = {f"{prefix}.{fused}.weight": torch.full((4 * len(parts), 4), -1.0)}
    load(read_case("nm-02").program(shared, stacked(prefix, fused, parts)), shared, stream, targets)
    assert all_raw(targets) == all_raw({f"{prefix}.{fused}.weight": torch.cat(list(sources.values()))})


@case("nm-05")
def test_only_the_last_segment_equal_to_scale_is_renamed(bug: Case, tmp_path: Path) -> None:
    sources, targets = bug.sources(), bug.targets()
    found, put = bug["config"]["rename"].split(" -> ")
    wrong = {name.replace(found, put) for name in sources}
    assert wrong - targets.keys() == {"layers.0.foo.weight_scale_bar"}

    text = """
index: {branch: {values: [attn, ffn, head]}}
formats:
  scaled: [{leaves: {weight_scale: {dims: [out / 4, in / 4], source: scale}}}]
runtimes:
  own:
    rules:
      - {target: "layers.0.attn.wq.{leaf}", dims: {out: 4, in: 4}, format: scaled}
      - copy: [layers.0.foo.scale_bar]
      - {target: "layers.0.hc_{branch}_scale", optional: true}
"""
    program = bug.program(tmp_path, text)
    load(program, tmp_path, sources, targets)
    renamed = {"layers.0.attn.wq.scale": "layers.0.attn.wq.weight_scale"}
    assert all_raw(targets) == {renamed.get(name, name): raw for name, raw in all_raw(sources).items()}
    # The same text inside of other names of the same model.
    inside = {f"layers.0.hc_{branch}_scale": torch.full((2,), float(len(branch))) for branch in ("attn", "ffn", "head")}
    targets |= {name: torch.zeros(2) for name in inside}
    load(program, tmp_path, sources | inside, targets)
    assert all_raw({name: targets[name] for name in inside}) == all_raw(inside)


def rename_by_one_regex(name: str, renames: list[tuple[str, str]]) -> str:
    """Rename as a peer does: all patterns in one regex, whose groups are numbered on from one pattern to the next."""
    read = re.match("|".join(f"(?:{source})" for source, _ in renames), name)
    if read is None:
        return name
    target = next(target for source, target in renames if re.match(source, name))
    return read.expand(target.replace(r"\1", r"\g<1>")) + name[read.end() :]


@case("nm-07")
def test_numbers_of_several_patterns_do_not_mix(bug: Case, tmp_path: Path) -> None:
    sources, targets = bug.sources(), bug.targets()
    source, target = (side.strip() for side in bug["config"]["rename"].split("->"))
    rename = (source.replace("{i}", r"(\d+)"), target.replace("{i}", r"\1"))
    assert {rename_by_one_regex(name, [rename]) for name in sources} == targets.keys()
    wrong = {rename_by_one_regex(name, [(r"blocks\.(\d+)\.lin", r"blocks.\1.linear"), rename]) for name in sources}
    assert wrong == {"layers..linear.weight"}

    text = f"""
index: {{i: {{count: 11, where: i < 2 or i == 10}}}}
runtimes:
  own:
    rules:
      - {{target: "blocks.{{i}}.linear.weight", source: "blocks.{{i}}.lin.weight", optional: true}}
      - {{target: "{target}.weight", source: "{source}.weight"}}
"""
    report = load(bug.program(tmp_path, text), tmp_path, sources, targets)
    assert all_raw(targets) == {name.replace("lin", "linear"): raw for name, raw in all_raw(sources).items()}
    assert (report.loaded, report.sources, report.targets) == (3, 3, 3)


NUMBERS = st.sets(st.integers(0, 12), min_size=1, max_size=4)


@given(layers=NUMBERS, experts=NUMBERS)
@settings(max_examples=15, deadline=None)
def test_several_numbers_in_one_name_are_told_apart(layers: set[int], experts: set[int], shared: Path) -> None:
    text = f"""
index: {{i: {{count: 13, where: 'i in {sorted(layers)}'}}, j: {{count: 13, where: 'j in {sorted(experts)}'}}}}
runtimes: {{own: {{rules: [{{target: "b.{{j}}.linear.{{i}}", source: "a.{{i}}.lin.{{j}}"}}]}}}}
"""
    sources = {f"a.{i}.lin.{j}": torch.tensor([100.0 * i + j]) for i in layers for j in experts}
    targets = {f"b.{j}.linear.{i}": torch.zeros(1) for i in layers for j in experts}
    load(read_case("nm-02").program(shared, text), shared, sources, targets)
    assert {name: each.item() for name, each in targets.items()} == {
        f"b.{j}.linear.{i}": 100.0 * i + j for i in layers for j in experts
    }


PACKED = """
config: {required: [n_experts]}
runtimes:
  own:
    rules:
      - target: experts.w13_weight
        any_of: [{source: experts.gate_up_proj}, {source: experts.fc1.weight}]
        dims: {expert: n_experts, out: 6, in: 4}
      - target: experts.w2_weight
        any_of: [{source: experts.down_proj}, {source: experts.fc2.weight}]
        dims: {expert: n_experts, out: 4, in: 3}
"""


@case("nm-08")
def test_both_spellings_of_packed_experts_end_at_the_parameter(bug: Case, tmp_path: Path) -> None:
    sources, targets = bug.sources(), bug.targets()
    module_names = {"experts.fc1": "experts.w13_weight", "experts.fc2": "experts.w2_weight"}
    wrong = {name.replace(old, new) for name in sources for old, new in module_names.items() if old in name}
    assert wrong == {"experts.w13_weight.weight", "experts.w2_weight.weight"}
    assert "w13_weight.weight" in bug.what_went_wrong

    program = bug.program(tmp_path, PACKED)
    load(program, tmp_path, sources, targets)
    expected = dict(zip(targets, all_raw(sources).values(), strict=True))
    assert all_raw(targets) == expected
    spelled = {"experts.fc1.weight": "experts.gate_up_proj", "experts.fc2.weight": "experts.down_proj"}
    again = bug.targets()
    load(program, tmp_path, {spelled[name]: tensor for name, tensor in sources.items()}, again)
    assert all_raw(again) == expected

    mistaken = bug.program(tmp_path, PACKED.replace("target: experts.w13_weight", "target: experts.w13_weight.weight"))
    findings = refusal(mistaken, tmp_path, sources, bug.targets())
    assert told(findings) == [("M531", "experts.w13_weight.weight"), ("M530", "experts.w13_weight")]
    assert findings[0].hint == "the model has 'experts.w13_weight'"


@case("nm-11")
def test_checkpoint_saved_fused_is_not_renamed_again(bug: Case, tmp_path: Path) -> None:
    stack, fused, targets = bug["config"]["stack"], bug.sources(), bug.targets()
    wrong = stack_once_by_substring("indexer.wk_weights_proj.weight", stack)
    assert "wk_weights_proj_weights_proj" in wrong
    assert "wk_weights_proj_weights_proj" in bug.what_went_wrong

    text = """
runtimes:
  own:
    rules:
      - target: indexer.wk_weights_proj.weight
        any_of:
          - sources: [indexer.wk.weight, indexer.weights_proj.weight]
          - source: indexer.wk_weights_proj.weight
        dims: {out: [4, 2], in: 4}
"""
    program = bug.program(tmp_path, text)
    load(program, tmp_path, fused, targets)
    assert all_raw(targets) == all_raw(fused)
    whole = fused["indexer.wk_weights_proj.weight"]
    split = {"indexer.wk.weight": whole[:4].clone(), "indexer.weights_proj.weight": whole[4:].clone()}
    again = bug.targets()
    load(program, tmp_path, split, again)
    assert all_raw(again) == all_raw(fused)

    for part, other in (
        ("indexer.wk.weight", "indexer.weights_proj.weight"),
        ("indexer.weights_proj.weight", "indexer.wk.weight"),
    ):
        findings = refusal(program, tmp_path, fused | {part: split[part]}, bug.targets())
        assert told(findings) == [("M501", other), ("M502", "indexer.wk_weights_proj.weight")]
    assert told(refusal(program, tmp_path, fused | split, bug.targets())) == [("M502", "indexer.wk_weights_proj.weight")]


def stack_once_by_substring(name: str, stack: Stack) -> str:
    """Rename as the peer did: the first part that is anywhere in the name."""
    fused, part = next((fused, part) for fused, parts in stack.items() for part in parts if part in name)
    return name.replace(part, fused)


@case("nm-12")
def test_names_that_match_nothing_are_an_error_and_are_paired(bug: Case, tmp_path: Path) -> None:
    sources, targets, wrong = bug.sources(), bug.targets(), bug.targets()
    (source,), (target,) = sources, targets
    assert load_leniently(sources, wrong) == ([target], [source])
    assert all_raw(wrong) == all_raw(targets)  # "loaded", and every value is what the memory held

    text = """
index: {layer: {count: 1}}
runtimes:
  own:
    rules:
      - copy: ["text_encoder.text_model.encoder.layers.{layer}.self_attn.k_proj.weight"]
"""
    findings = refusal(bug.program(tmp_path, text), tmp_path, sources, targets)
    assert told(findings) == [("M501", target), ("M502", source)]
    assert [each.hint for each in findings] == [
        f"the checkpoint has {source!r}, which no rule names",
        f"a rule expects {target!r}",
    ]


def load_leniently(sources: Tensors, targets: Tensors) -> tuple[list[str], list[str]]:
    """Load what has the same name on both sides, and only return what is (missing, unexpected)."""
    for name in sources.keys() & targets.keys():
        targets[name].copy_(sources[name])
    return sorted(targets.keys() - sources.keys()), sorted(sources.keys() - targets.keys())
