"""Bugs that loaders have had, planted in the engine one at a time: the comparison with the reference finds each."""

import math
import sys
from dataclasses import replace

import pytest
import torch

import mapper
from mapper import Layout, MapperError
from mapper.regions import whole
from mapper.testing.example import Example
from mapper.testing.guarantees import check_coverage, check_rerooting, check_round_trip
from mapper.testing.reference import declared_sources
from mapper.testing.reference.arrays import dtype_of
from mapper.testing.specs import spec_from
from mapper.testing.strategies import unique_values
from mapper.testing.tensors import Tensors

SPEC = """
    index:
      layer: {count: 6, axis: pp}
      expert: {count: 5, axis: ep}
    runtimes:
      engine:
        mesh: vllm
        skip:
          - {source: model.layers.*.freq, why: computed}
        rules:
          - {target: model.embed, dims: {v: 61, h: 7}, shard: {v: {axis: tp, pad: 64}}, stage: first}
          - at: model.layers.{layer}
            rules:
              - target: experts.{leaf}
                source: experts.{expert}.{leaf}
                stack: expert
                dims: {out: 8, in: 7}
                format: plain
              - {target: 'mlp.{leaf}', sources: ['up.{leaf}', 'gate.{leaf}'], dims: {out: [8, 8], in: 7}, shard: {out: tp}}
              - target: qkv.{leaf}
                sources: ['q.{leaf}', 'k.{leaf}', 'v.{leaf}']
                dims: {out: [16, 8, 8], in: 7}
                shard: {out: {axis: tp, units: [4, 2, 2]}}
              - {target: both, source: fused, dims: {out: [4, 8], in: 7}, shard: {out: tp}}
              - {target: router, dims: {out: 12}, shard: {out: moe_tp}}
          - target: model.woven.{leaf}
            dims: {out: [16, 8, 8], in: 7}
            do: [{view: (group part slot width) in -> (part group slot width) in, group: 4, slot: [2, 1, 1]}]
            shard: {out: {axis: tp, units: 4}}
            format: plain
            stage: last
          - {target: model.turned, dims: {h: 12, w: 3}, do: [{view: (a b c) w -> (a c b) w, a: 2, b: 3}], stage: last}
          - {target: model.computed, dims: {h: 7, w: 3}, do: [neg_exp, {multiply: 3}], stage: last}
          - {target: model.centred, dims: {h: 8, w: 3}, do: [{subtract_mean: h}], shard: {h: tp}, stage: last}
          - {target: model.norm, dims: {h: 7}, stage: last}
          - {target: 'model.scaled.{leaf}', dims: {out: 8, in: 9}, stage: last, shard: {out: tp}}
"""
BLOCKS = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [2, 4]}}
LAYOUT = Layout(tp=4, pp=2, dp=1, ep=4)


@pytest.fixture(scope="module")
def spec():
    return spec_from(SPEC)


def example_of(spec, layout=LAYOUT):
    tensors, start = Tensors(), 0
    for each in declared_sources(spec, config=BLOCKS, runtime="engine"):
        if not each.is_optional:
            dtype = dtype_of(each.dtype or ("float32" if "scale" in each.name else "bfloat16"))
            tensors[each.name] = unique_values(each.shape, dtype, start)
            start += tensors[each.name].numel()
    tensors["model.layers.0.freq"] = unique_values((3,), dtype_of("float32"), start)
    return Example(spec, "engine", BLOCKS, layout, tuple(range(layout.num_ranks)), tensors)


def plant(monkeypatch, module, name, bug):
    """Put `bug` in place of a function of the engine, under every name by which one of its modules knows it."""
    if "." in name:
        owner, method = name.split(".")
        found = getattr(sys.modules[module], owner)
        monkeypatch.setattr(found, method, bug(getattr(found, method)))
        return
    original = getattr(sys.modules[module], name)
    for each in list(sys.modules.values()):
        is_ours = each.__name__.startswith("mapper.") and not each.__name__.startswith("mapper.testing")
        if is_ours and vars(each).get(name) is original:
            monkeypatch.setattr(each, name, bug(original))


def swapped_halves(original):
    def pieces(axes, part, parts_axis):
        sizes = [] if parts_axis is None else [each.source for each in axes[parts_axis].segments]
        if part in (0, 1) and len(sizes) == 2 and sizes[0] == sizes[1]:
            part = 1 - part
        return original(axes, part, parts_axis)

    return pieces


def one_row_off(original):
    def shares(cut, part, size, position):
        runs, share = original(cut, part, size, position)
        return [replace_run(run, start=run.start - 1, stop=run.stop - 1) if run.start else run for run in runs], share

    return shares


def replace_run(run, **values):
    return run._replace(**values) if hasattr(run, "_replace") else replace(run, **values)


def floor_of_blocks(original):
    def local_axis(axis, position, **options):
        axis_of_whole_blocks = replace(axis, parts=tuple(size // axis.divisor * axis.divisor for size in axis.parts))
        return original(axis_of_whole_blocks, position, **options)

    return local_axis


def dp_before_pp(original):
    def positions(layout, rank):
        rest, tp = divmod(rank, layout.tp)
        pp, dp = divmod(rest, layout.dp)
        return tp, pp, dp

    return positions


def first_part_only(original):
    def pieces(axes, part, parts_axis):
        found = original(axes, part, parts_axis)
        return found[:1] if part is None else found

    return pieces


def last_stage_is_the_first(original):
    def on_stage(stage, layout, rank):
        return original("first" if stage == "last" else stage, layout, rank)

    return on_stage


def remainder_of_layers_to_the_first_stages(original):
    def stage_sizes(num_layers, layout):
        share, rest = divmod(num_layers, layout.pp)
        return tuple(share + (stage < rest) for stage in range(layout.pp))

    return stage_sizes


def remainder_of_experts_to_the_last_rank(original):
    def expert_slots(num_experts, num_ranks, position, **options):
        share = num_experts // num_ranks
        stop = num_experts if position == num_ranks - 1 else (position + 1) * share
        return type(original(num_experts, num_ranks, position, **options))(range(position * share, stop))

    return expert_slots


def units_ignored(original):
    def shares(cut, part, size, position):
        if cut is not None and cut.units[part] < size:
            num_ranks = position.coordinate(cut.axes[part])[0]
            units = size if size % num_ranks == 0 else cut.units[part]
            cut = replace(cut, units=tuple(units if number == part else each for number, each in enumerate(cut.units)))
        return original(cut, part, size, position)

    return shares


def padding_left_alone(original):
    return lambda tensors, padding: 0


def repeated_heads_dealt_in_turn(original):
    def shares(cut, part, size, position):
        runs, share = original(cut, part, size, position)
        if cut is not None and cut.axes[part] is not None and cut.units[part] < position.coordinate(cut.axes[part])[0]:
            unit = position.coordinate(cut.axes[part])[1] % cut.units[part]
            runs = [replace_run(runs[0], start=unit * share, stop=(unit + 1) * share)]
        return runs, share

    return shares


def slots_all_of_the_first_part(original):
    def threads(self, start, stop):
        box = tuple((0, high - low) for low, high in self.box)
        return original(replace(self, box=box), start, stop)

    return threads


def mean_of_the_slice(original):
    def values_of(source, box, reading, scales=None):
        if reading is None or reading.whole is None:
            return original(source, box, reading, scales)
        part = source[tuple(slice(*interval) for interval in box)]
        return original(part, whole(part.shape), replace(reading, whole=tuple(part.shape)), scales)

    return values_of


def computed_only_once(original):
    return lambda values, ops, dtype: original(values, ops[:1], dtype)


BUGS = {
    "swapped halves": ("mapper.plan.geometry", "pieces", swapped_halves, {}),
    "one row off": ("mapper.plan.geometry", "_shares", one_row_off, {}),
    "floor instead of ceil of blocks": ("mapper.plan.geometry", "local_axis", floor_of_blocks, {}),
    "dp counted before pp": ("mapper.layout", "positions", dp_before_pp, {"layout": Layout(tp=2, pp=2, dp=3, ep=1)}),
    "only the first part of a fused source": ("mapper.plan.geometry", "pieces", first_part_only, {}),
    "the last stage taken for the first": ("mapper.layout", "on_stage", last_stage_is_the_first, {}),
    "remainder of layers to the first stages": (
        "mapper.layout",
        "stage_sizes",
        remainder_of_layers_to_the_first_stages,
        {"layout": Layout(pp=4)},
    ),
    "remainder of experts to the last rank": ("mapper.layout", "expert_slots", remainder_of_experts_to_the_last_rank, {}),
    "units ignored": ("mapper.plan.geometry", "_shares", units_ignored, {}),
    "padding not zeroed": ("mapper.transfer.copy", "fill_padding", padding_left_alone, {}),
    "repeated heads dealt in turn": ("mapper.plan.geometry", "_shares", repeated_heads_dealt_in_turn, {}),
    "all slots those of the first part": ("mapper.plan.weave", "Strand.threads", slots_all_of_the_first_part, {}),
    "only the first operation done": ("mapper.transfer.compute", "computed", computed_only_once, {}),
    "the mean of a slice": ("mapper.transfer.copy", "values_of", mean_of_the_slice, {}),
}


def test_without_a_bug_nothing_is_found(spec):
    for layout in {LAYOUT, *(settings["layout"] for *_, settings in BUGS.values() if "layout" in settings)}:
        check_coverage(example_of(spec, layout))
    check_rerooting(example_of(spec))


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug, spec, monkeypatch):
    module, name, planted, settings = BUGS[bug]
    example = example_of(spec, settings.get("layout", LAYOUT))
    plant(monkeypatch, module, name, planted)
    with pytest.raises((AssertionError, MapperError)) as found:
        check_coverage(example)
    assert "element" in str(found.value) or "expected" in str(found.value) or isinstance(found.value, MapperError)


def test_two_swapped_factors_are_found(spec, monkeypatch):
    def swapped(original):
        def viewed(axes, operations, rule, evaluate):
            turned = [
                replace(each, formula=replace(each.formula, left=each.formula.right, right=each.formula.left))
                if each.formula is not None and "part" not in each.formula.left[0]
                else each
                for each in operations
            ]
            return original(axes, turned, rule, evaluate)

        return viewed

    plant(monkeypatch, "mapper.compiler.operations", "viewed", swapped)
    with pytest.raises(AssertionError, match=r"model\.turned"):
        check_coverage(example_of(spec))


COMPUTED = """
    runtimes:
      engine:
        mesh: vllm
        rules:
          - {target: state, dims: {h: 7, w: 3}, shard: {w: tp}, do: [neg_exp]}
"""


def test_an_inverse_that_guesses_is_found(monkeypatch):
    """Of numbers near zero, many have one exponential."""
    tensors = Tensors({"state": torch.arange(1, 22).reshape(7, 3) * 1e-9})
    example = Example(spec_from(COMPUTED), "engine", {}, Layout(tp=3), (0, 1, 2), tensors)
    check_round_trip(example)
    plant(monkeypatch, "mapper.transfer.compute", "undone", lambda original: lambda *given: (original(*given)[0], None))
    with pytest.raises(AssertionError, match="state comes back changed"):
        check_round_trip(example)


def test_a_skip_that_does_not_follow_its_prefix_is_found(spec, monkeypatch):
    plant(monkeypatch, mapper.Program.__module__, "_scoped_rules", lambda original: lambda rules, prefix: rules)
    with pytest.raises(MapperError, match=r"layers\.0\.freq"):
        check_rerooting(example_of(spec))


def test_the_examples_are_large_enough_to_show_a_bug(spec):
    example = example_of(spec)
    assert min(math.prod(tensor.shape) for tensor in example.tensors.values()) > 1
    assert math.prod((LAYOUT.tp, LAYOUT.pp)) == example.layout.num_ranks
