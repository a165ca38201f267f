"""Prefixes that a wrapper adds, renames or strips: names that match nothing, levels of a varying count, skips left behind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mapper.compiler import Program, compile
from mapper.diagnostics import MapperError
from mapper.layout import Layout
from mapper.load import Loader
from mapper.spec import load_spec
from tests.bugs.harness import Case, case, load, read_case, refusal, save
from tests.loads import Tensors, all_raw, told

PLAIN = """
index: {layer: {count: 1}}
runtimes: {own: {mesh: vllm, rules: [{copy: ["model.layers.{layer}.w"]}]}}
"""


def load_what_matches(sources: Tensors, targets: Tensors) -> None:
    """Load as the peers did: a name that the model does not have is left out without a word."""
    for name, tensor in sources.items():
        if name in targets:
            targets[name].copy_(tensor)


def program_for(folder: Path, architecture: str, config: Mapping[str, object], layout: Layout, rank: int) -> Program:
    """Compile the spec of plain layers, as one for `architecture`."""
    path = folder / "plain.yaml"
    path.write_text(f"spec: 1\nid: plain\ntitle: own\nversion: 0.1.0\narchitectures: [{architecture}]\n{PLAIN}")
    return compile(load_spec(path), config=config, runtime="own", layout=layout, rank=rank)


@case("pf-03")
def test_overridden_architecture_does_not_load_names_of_the_wrapper(bug: Case, tmp_path: Path) -> None:
    sources, targets, wrong = bug.sources(), bug.targets(), bug.targets()
    load_what_matches(sources, wrong)
    assert all_raw(wrong) == all_raw(targets)  # a healthy server with the values that memory held

    (source,), (target,) = sources, targets
    overrides, layout = bug["config"]["hf_overrides"], Layout(**bug["layout"])
    for rank in range(layout.num_ranks):
        program = program_for(tmp_path, *overrides["architectures"], overrides, layout, rank)
        assert told(refusal(program, tmp_path, sources, targets)) == [("M501", target), ("M502", source)]
    with pytest.raises(MapperError) as caught:
        program_for(tmp_path, "XForConditionalGeneration", overrides, layout, 0)
    assert [each.code for each in caught.value.diagnostics] == ["M307"]


def module_of(tensors: Tensors) -> nn.Module:
    """Return modules nested as the dotted names are, with the tensors as parameters."""
    root = nn.Module()
    for name, tensor in tensors.items():
        *path, last = name.split(".")
        inner = root
        for part in path:
            if not hasattr(inner, part):
                inner.add_module(part, nn.Module())
            inner = getattr(inner, part)
        inner.register_parameter(last, nn.Parameter(tensor, requires_grad=False))
    return root


TWO_FAMILIES = """
index: {layer: {count: 1}}
runtimes:
  own:
    rules:
      - at: {target: backbone}
        rules:
          - target: layers.{layer}.mixer.in_proj.weight
            any_of:
              - source: model.layers.{layer}.mixer.in_proj.weight
              - source: backbone.layers.{layer}.mixer.in_proj.weight
          - target: embeddings.weight
            any_of: [{source: model.embeddings.weight}, {source: backbone.embeddings.weight}]
"""


@case("pf-04")
def test_two_names_of_the_inner_module_fill_the_same_parameters(bug: Case, tmp_path: Path) -> None:
    sources = bug.sources()
    with pytest.raises(AttributeError, match="no attribute `model`"):
        walk_the_modules(sources, module_of(bug.targets()))

    program = bug.program(tmp_path, TWO_FAMILIES)
    expected = {name.replace("model.", "backbone."): raw for name, raw in all_raw(sources).items()}
    for prefix in ("model.", "backbone."):
        model = module_of(bug.targets())
        spelled = {name.replace("model.", prefix): tensor for name, tensor in sources.items()}
        Loader(program, model).load(save(tmp_path, spelled))
        assert all_raw(dict(model.named_parameters())) == expected
        targets = bug.targets()
        load(program, tmp_path, spelled, targets)
        assert all_raw(targets) == expected


def walk_the_modules(sources: Tensors, model: nn.Module) -> None:
    """Load as the peer did: follow the name from module to module."""
    for name, tensor in sources.items():
        path, _, last = name.rpartition(".")
        getattr(model.get_submodule(path), last).copy_(tensor)


LEVELS = """
index: {layer: {count: 1}}
runtimes:
  own:
    rules:
      - target: vision_tower.encoder.layers.{layer}.w
        any_of:
          - source: vision_tower.encoder.layers.{layer}.w
          - source: vision_tower.vision_model.encoder.layers.{layer}.w
          - source: vision_tower.vision_model.vision_model.encoder.layers.{layer}.w
"""


@case("pf-05")
def test_level_that_is_there_once_twice_or_never(bug: Case, tmp_path: Path) -> None:
    sources, targets = bug.sources(), bug.targets()
    (source,), (target,) = sources, targets
    strip_once = {
        name.replace("vision_model.", "", 1) for name in (source, source.replace("vision_model", "vision_model.vision_model"))
    }
    assert strip_once - {target} == {source}  # right for one count of levels, unknown for the other

    program = bug.program(tmp_path, LEVELS)
    spellings = [source.replace("vision_model.", "vision_model." * count) for count in range(3)]
    for spelling in spellings:
        again = bug.targets()
        load(program, tmp_path, {spelling: sources[source]}, again)
        assert all_raw(again) == {target: all_raw(sources)[source]}
    both = {spelling: sources[source].clone() for spelling in spellings[:2]}
    assert told(refusal(program, tmp_path, both, targets)) == [("M502", source)]

    two_rules = LEVELS + f"      - {{target: '{target}', source: '{source}'}}\n".replace(".0.", ".{layer}.")
    with pytest.raises(MapperError) as caught:
        bug.program(tmp_path, two_rules)
    assert told(caught.value.diagnostics) == [("M311", source), ("M312", target)]


DRAFT = """
config: {required: [num_hidden_layers, num_nextn_predict_layers]}
index:
  layer: {count: num_hidden_layers}
  nextn: {first: num_hidden_layers, count: num_nextn_predict_layers}
  expert: {count: 1}
runtimes:
  own:
    mesh: vllm
    skip: [{source: "model.layers.{nextn}.**", why: the draft model's}]
    rules:
      - target: model.layers.{layer}.mlp.experts.w2_weight
        source: model.layers.{layer}.mlp.experts.{expert}.down_proj.weight
        stack: expert
        dims: {out: 4, in: 6}
        shard: {in: tp}
"""


def skips_by_prefix(num_layers: int) -> Callable[[str], bool]:
    """Return the peer's test of a draft layer, which compares with the name's absolute spelling."""
    return lambda name: name.startswith(tuple(f"model.layers.{layer}." for layer in range(num_layers, num_layers + 9)))


@case("pf-07")
def test_skip_follows_a_prefix_that_was_stripped(bug: Case, tmp_path: Path) -> None:
    sources = bug.sources()
    stripped = {name.removeprefix("model."): tensor for name, tensor in sources.items()}
    is_draft = skips_by_prefix(bug["config"]["num_hidden_layers"])
    assert [name for name in sources if not is_draft(name)] == ["model.layers.0.mlp.experts.0.down_proj.weight"]
    assert not any(map(is_draft, stripped))  # and the first draft layer is a KeyError

    for rank in range(2):
        program = bug.program(tmp_path, DRAFT, rank=rank).scoped("model")
        targets = bug.targets()
        report = load(program, tmp_path, stripped, targets)
        expected = sources["model.layers.0.mlp.experts.0.down_proj.weight"][None, :, 3 * rank : 3 * rank + 3]
        assert all_raw(targets) == all_raw({"layers.0.mlp.experts.w2_weight": expected})
        assert (report.loaded, report.skipped_by) == (1, {"model.layers.{nextn}.**": 1})


@given(
    num_layers=st.integers(1, 12),
    num_drafts=st.integers(0, 3),
    prefix=st.sampled_from(["", "model", "+language_model", "+a.b"]),
)
@settings(max_examples=15, deadline=None)
def test_layers_are_told_by_number_under_every_prefix(num_layers: int, num_drafts: int, prefix: str, shared: Path) -> None:
    config = {"num_hidden_layers": num_layers, "num_nextn_predict_layers": num_drafts}
    program = read_case("pf-07").program(shared, DRAFT, rank=1, config=config)
    program = program.mounted(prefix[1:]) if prefix.startswith("+") else program.scoped(prefix)
    root = {"": "model.", "model": ""}.get(prefix, f"{prefix[1:]}.model.")
    sources = {
        f"{root}layers.{layer}.mlp.experts.0.down_proj.weight": torch.full((4, 6), float(layer))
        for layer in range(num_layers + num_drafts)
    }
    targets = {f"{root}layers.{layer}.mlp.experts.w2_weight": torch.full((1, 4, 3), -1.0) for layer in range(num_layers)}
    report = load(program, shared, sources, targets)
    assert [each.unique().tolist() for each in targets.values()] == [[float(layer)] for layer in range(num_layers)]
    assert (report.loaded, sum(report.skipped_by.values())) == (num_layers, num_drafts)
