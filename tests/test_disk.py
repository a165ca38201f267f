"""How a source lies on disk, from `stored` axes to the boxes that are read, against numpy views of numbered elements."""

from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mapper.compiler.disk import below_stack, disk_layout
from mapper.compiler.sizes import StoredAxis
from mapper.diagnostics import Place
from mapper.plan.family import Axis, DiskLayout
from tests.small import headers, lines_of, plan_of, program_of, rules

PLACE = Place("spec.yaml", 7, 3)
OUT, IN, THREE = Axis("out", (4, 6), 1, None), Axis("in", (8,), 1, None), Axis("", (3,), 1, None)


def dim(name, divisor=1):
    return StoredAxis((name,), divisor, None)


def fixed(size):
    return StoredAxis((), 1, size)


@given(st.permutations(["a", "b", "c", "d"]), st.lists(st.integers(1, 3), min_size=1, max_size=4), st.integers(0, 2))
def test_view_in_the_order_of_the_target_equals_numpy(names, runs, part):
    """Any order of the dims, any neighbours of them on one axis of the disk."""
    sizes = {"a": (2,), "b": (3,), "c": (2, 1, 3), "d": (5,)}
    axes = tuple(Axis(name, parts, 1, None) for name, parts in sizes.items())
    stored, rest = [], list(names)
    for run in [*runs, 1, 1, 1]:
        if rest:
            stored.append(StoredAxis(tuple(rest[:run]), 1, None))
            rest = rest[run:]
    disk = disk_layout(axes, tuple(stored), part, PLACE)
    one_part = {name: parts[part] if len(parts) > 1 else parts[0] for name, parts in sizes.items()}
    assert disk.shape == tuple(prod(one_part[name] for name in each.dims) for each in stored)
    assert disk.seen == tuple(one_part.values())
    numbered = np.arange(prod(disk.shape)).reshape(disk.shape)
    expected = numbered.reshape([one_part[name] for name in names]).transpose([names.index(name) for name in sizes])
    assert (numbered.reshape(disk.viewed).transpose(disk.order) == expected).all()
    assert disk.is_plain == (stored == [dim(name) for name in sizes])


@pytest.mark.parametrize(
    ("axes", "stored", "part", "expected"),
    [
        ((OUT, IN), (dim("out"), dim("in")), None, DiskLayout((10, 8), (10, 8), (0, 1), (1, 1))),
        ((OUT, IN), (dim("out"), dim("in")), 1, DiskLayout((6, 8), (6, 8), (0, 1), (1, 1))),
        ((OUT, IN), (dim("in"), dim("out")), 0, DiskLayout((8, 4), (8, 4), (1, 0), (1, 1))),
        # A dim of several axes on disk: 8 = 2 blocks of 4.
        (
            (OUT, Axis("in", (8,), 2, None)), (dim("out"), dim("in", 8), fixed(4)), 0,
            DiskLayout((4, 1, 4), (4, 4), (0, 1), (1, 2)),
        ),
        # A coarser grid, its last element not full.
        ((Axis("out", (10,), 2, None),), (dim("out", 4),), None, DiskLayout((3,), (3,), (0,), (4,))),
        ((Axis("out", (10, 5), 1, None),), (dim("out", 4),), None, DiskLayout((5,), (5,), (0,), (4,))),
        # Axes of a fixed size that the target has too: each stands for one of them.
        (
            (IN, THREE, THREE), (fixed(3), dim("in"), fixed(3)), None,
            DiskLayout((3, 8, 3), (3, 8, 3), (1, 0, 2), (1, 1, 1)),
        ),
        # The divisor of an axis with several dims counts for the inner one.
        ((OUT, IN), (StoredAxis(("out", "in"), 4, None),), 0, DiskLayout((8,), (4, 2), (0, 1), (1, 4))),
        # An axis more on disk, of one element.
        ((OUT, IN), (fixed(1), dim("in"), dim("out")), 0, DiskLayout((1, 8, 4), (8, 4), (1, 0), (1, 1))),
        ((), (), None, DiskLayout((), (), (), (), single=())),
    ],
)  # fmt: skip
def test_layout(axes, stored, part, expected):
    assert disk_layout(axes, stored, part, PLACE) == expected


REFUSED = [
    ((OUT, IN), (dim("out"),), "the axes on disk lack the dim 'in'"),
    ((OUT,), (dim("out"), dim("in")), "the axes on disk name the dim 'in', which the target does not have"),
    ((IN,), (dim("in"), dim("in")), "the axes on disk name the dim 'in', which the target does not have"),
    ((IN,), (fixed(2), dim("in", 2)), "the axis of 2 on disk has no dim before it that it divides"),
    ((IN,), (dim("in", 4), fixed(3)), "the axis of 3 on disk has no dim before it that it divides"),
    ((IN, THREE), (dim("in"), fixed(3), fixed(3)), "the axis of 3 on disk has no dim before it that it divides"),
    (
        (Axis("in", (12,), 4, None),), (dim("in", 6),),
        "'in' has one element per 6 on disk and one per 4 in the target: too coarse",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("axes", "stored", "message"), REFUSED)
def test_what_does_not_fit_the_target_is_told(axes, stored, message):
    with pytest.raises(Exception, match="M316") as caught:
        disk_layout(axes, stored, None, PLACE)
    (found,) = caught.value.diagnostics
    assert (found.message, found.place) == (message, PLACE)


def test_below_a_stack_everything_moves_by_one_axis():
    disk = DiskLayout((8, 4), (8, 2, 2), (1, 0, 2), (1, 1, 3))
    assert below_stack(disk, 5) == DiskLayout((5, 8, 4), (5, 8, 2, 2), (0, 2, 1, 3), (1, 1, 1, 3))
    packed = DiskLayout((8, 4), (8, 1), (0, 1), (1, 8), 4)
    assert below_stack(packed, 5) == DiskLayout((5, 8, 4), (5, 8, 1), (0, 1, 2), (1, 1, 8), 4)


@pytest.mark.parametrize(
    ("axes", "stored", "expected"),
    [
        ((OUT, Axis("in", (8,), 8, None)), (dim("out"), dim("in", 2)), DiskLayout((10, 4), (10, 1), (0, 1), (1, 8), 4)),
        # Another order of the other axes; the last is the last on both sides.
        (
            (OUT, THREE, Axis("in", (8,), 4, None)), (fixed(3), dim("out"), dim("in")),
            DiskLayout((3, 10, 8), (3, 10, 2), (1, 0, 2), (1, 1, 4), 4),
        ),
        ((OUT, IN), (dim("out"), dim("in")), DiskLayout((10, 8), (10, 8), (0, 1), (1, 1), 1)),
    ],
)  # fmt: skip
def test_a_bitcast_makes_one_element_of_several_along_the_last_axis(axes, stored, expected):
    assert disk_layout(axes, stored, None, PLACE, is_bitcast=True) == expected


@pytest.mark.parametrize(
    ("axes", "stored", "message"),
    [
        (
            (OUT, Axis("in", (12,), 8, None)), (dim("out"), dim("in", 2)),
            "'in' has 12 elements, and one element of the target holds the bytes of 8",
        ),
        (
            (OUT, Axis("in", (8,), 8, None)), (dim("in", 2), dim("out")),
            "'in' has one element per 2 on disk and one per 8 in the target: too coarse",
        ),
    ],
)  # fmt: skip
def test_a_bitcast_of_elements_that_are_apart_or_too_few_is_refused(axes, stored, message):
    with pytest.raises(Exception, match="M316") as caught:
        disk_layout(axes, stored, None, PLACE, is_bitcast=True)
    (found,) = caught.value.diagnostics
    assert found.message == message


def test_transposed_source_is_read_in_the_order_of_the_target():
    before = "formats: {own: [{leaves: {weight: {dims: [out, in], stored: [in, out]}}}]}"
    text = rules("{target: 'a.{leaf}', format: own, dims: {out: 4, in: 6}, shard: {out: tp}}", before=before)
    plan = plan_of(program_of(text, layout="tp=2", rank=1), headers(a__weight=(6, 4)))
    assert lines_of(plan) == ["a.weight[2:4, 0:6] ([6, 4] as [6, 4] in order [1, 0]) -> a.weight[0:2, 0:6]"]
    assert plan.findings == ()


def test_stacked_source_in_blocks_is_read_as_one_axis():
    before = (
        "index: {expert: {count: 3}}\nformats: {own: [{leaves: {weight: {dims: [out, in / 2], stored: [out, in / 8, 4]}}}]}"
    )
    text = rules(
        "{target: 'a.{leaf}', any_of: [{source: 'c.{expert}.{leaf}'}, {source: 'b.{leaf}'}], format: own, stack: expert, "
        "dims: {out: 2, in: 16}, shard: {in: tp}}",
        before=before,
    )
    plan = plan_of(program_of(text, layout="tp=2", rank=1), headers(b__weight=(3, 2, 2, 4)))
    assert plan.findings == ()
    assert lines_of(plan) == [
        f"b.weight[{expert}, 0:2, 4:8] ([3, 2, 2, 4] as [3, 2, 8] in order [0, 1, 2]) -> a.weight[{expert}, 0:2, 0:4]"
        for expert in range(3)
    ]


def test_scales_on_a_coarser_grid_are_repeated():
    before = "formats: {own: [{leaves: {weight: [out], scale: {dims: [out / 2], stored: [out / 4]}}}]}"
    text = rules("{target: 'a.{leaf}', format: own, dims: {out: 12}, shard: {out: tp}}", before=before)
    plan = plan_of(program_of(text, layout="tp=2", rank=1), headers(a__weight=(12,), a__scale=(3,)))
    assert lines_of(plan) == [
        "a.weight[6:12] -> a.weight[0:6]",
        "a.scale[1] -> a.scale[0]",
        "a.scale[2] -> a.scale[1:3]",
    ]
    assert plan.findings == ()


def test_dequantized_weight_is_read_with_the_scales_of_its_box():
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [2, 4]}}
    text = rules(
        "{target: 'a.{leaf}', sources: ['b.{leaf}', 'c.{leaf}'], format: dequantized, "
        "dims: {out: [4, 4], in: 8}, shard: {out: tp}}"
    )
    program = program_of(text, layout="tp=2", rank=1, config=config)
    tensors = headers(b__weight=(4, 8), b__weight_scale_inv=(2, 2), c__weight=(4, 8), c__weight_scale_inv=(2, 2))
    tensors = {name: each._replace(dtype="F32" if "scale" in name else "F8_E4M3") for name, each in tensors.items()}
    plan = plan_of(program, tensors)
    assert plan.findings == ()
    assert lines_of(plan) == [
        f"{name}.weight[2:4, 0:8] (times {name}.weight_scale_inv[1, 0:2], cast to BF16) -> a.weight[{to}, 0:8]"
        for name, to in (("b", "0:2"), ("c", "2:4"))
    ]
    assert plan.targets["a.weight"].dtype == "BF16"
    assert plan.num_loaded == 4


PARTS = Axis("parts", (1, 1, 1), 1, None, per_part=True)


@pytest.mark.parametrize("part", [0, 2, None])
def test_what_each_part_has_one_of_is_one_element_in_every_source(part):
    layout = disk_layout((PARTS,), (dim("parts"),), part, PLACE)
    assert layout == DiskLayout((1,), (1,), (0,), (1,), single=())
    assert not layout.is_plain


@pytest.mark.parametrize(
    ("layout", "accepted", "refused"),
    [
        (DiskLayout((1,), (1,), (0,), (1,), single=()), [(1,), ()], [(2,), (1, 1)]),
        (DiskLayout((), (), (), (), single=()), [(), (1,)], [(1, 1), (2,)]),
        (DiskLayout((1,), (1,), (0,), (1,)), [(1,)], [()]),
        (DiskLayout((5, 1), (5, 1), (0, 1), (1, 1), single=(5,)), [(5, 1), (5,)], [(5, 1, 1), (5, 2), (1, 5)]),
    ],
)
def test_one_element_lies_as_a_scalar_or_a_vector(layout, accepted, refused):
    assert all(map(layout.accepts, accepted))
    assert not any(map(layout.accepts, refused))


def test_one_element_of_a_stack_lies_along_the_stack():
    single = below_stack(disk_layout((PARTS,), (dim("parts"),), 0, PLACE), 5)
    assert single == DiskLayout((5, 1), (5, 1), (0, 1), (1, 1), single=(5,))
    assert below_stack(DiskLayout((3,), (3,), (0,), (1,)), 5).single is None
