"""Axes and their cuts against a slow model, in which a dim is a list of labelled elements that is sliced and joined."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from mapper.compiler.cuts import cut_faults
from mapper.diagnostics import Diagnostic, Place
from mapper.layout import Layout, Mesh
from mapper.pattern import literal_template
from mapper.plan.family import Axis, Cut, Family, RuleInfo
from mapper.plan.geometry import LocalAxis, local_axis, padding_boxes, pieces
from mapper.regions import Box, tiling_faults

QUICK = settings(deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
THOROUGH = settings(QUICK, max_examples=5 * settings().max_examples)

Element = tuple[int, int]
"""(part, position in it); padding has the positions behind the part's size."""
Elements = list[Element]


# --- the slow model -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ranks:
    """Sizes of the mesh axes; a rank has one position on each."""

    sizes: dict[str, int]

    def positions(self) -> Iterator[dict[str, int]]:
        for each in product(*(range(size) for size in self.sizes.values())):
            yield dict(zip(self.sizes, each, strict=True))


def padded_part(axis: Axis, part: int) -> Elements:
    elements: Elements = [(part, position) for position in range(axis.parts[part])]
    while axis.cut is not None and len(elements) % axis.cut.pad:
        elements.append((part, len(elements)))
    return elements


def units_of(axis: Axis, part: int) -> list[Elements] | None:
    """The part in its units, or None where the units do not divide it."""
    assert axis.cut is not None
    elements, count = padded_part(axis, part), axis.cut.units[part]
    if len(elements) % count:
        return None
    size = len(elements) // count
    return [elements[unit * size : (unit + 1) * size] for unit in range(count)]


def as_cut(axis: Axis) -> Axis:
    """An axis whose parts are cut as one is an axis with one part."""
    if axis.cut is None or not axis.cut.joined:
        return axis
    cut = Cut(axis.cut.axes[:1], axis.cut.units[:1], axis.cut.pad, replicate=axis.cut.replicate)
    return Axis(axis.dim, (sum(axis.parts),), axis.divisor, cut)


def held(axis: Axis, part: int, ranks: Ranks, position: dict[str, int]) -> Elements | None:
    """The rank's logical elements of one part in order, or None where a unit would be cut."""
    name = axis.cut.axes[part] if axis.cut is not None else None
    if axis.cut is None or name is None:
        return padded_part(axis, part)
    units, size, rank = units_of(axis, part), ranks.sizes[name], position[name]
    if units is None:
        return None
    if len(units) % size == 0:
        dealt = [units[first : first + len(units) // size] for first in range(0, len(units), len(units) // size)]
    else:
        # Fewer units than ranks: each is held several times, but only on demand or beside a part with units for every rank.
        beside = [axis.cut.units[other] for other, each in enumerate(axis.cut.axes) if each == name]
        if size % len(units) or not (axis.cut.replicate or any(count % size == 0 for count in beside)):
            return None
        dealt = [[unit] for unit in units for _ in range(size // len(units))]
    return [element for unit in dealt[rank] for element in unit]


def blocks(elements: Elements, divisor: int) -> list[tuple[Element, ...]]:
    return [tuple(elements[start : start + divisor]) for start in range(0, len(elements), divisor)]


def local_blocks(axis: Axis, ranks: Ranks, position: dict[str, int]) -> list[Element | None] | None:
    """The rank's stored elements, each as (part, stored position) or None; None where the mesh cannot cut the axis."""
    if axis.cut is not None and axis.cut.joined:
        local = local_blocks(as_cut(axis), ranks, position)
        elements = [(part, number) for part, size in enumerate(axis.stored_parts) for number in range(size)]
        return None if local is None else [None if each is None else elements[each[1]] for each in local]
    grid = {
        block: (part, number) if block[0][1] < axis.parts[part] else None
        for part in range(len(axis.parts))
        for number, block in enumerate(blocks(padded_part(axis, part), axis.divisor))
    }
    shares = [held(axis, part, ranks, position) for part in range(len(axis.parts))]
    found = blocks([element for share in shares for element in share or ()], axis.divisor)
    return None if None in shares or any(block not in grid for block in found) else [grid[block] for block in found]


def is_legal(axis: Axis, ranks: Ranks) -> bool:
    """No unit and no block is cut, on any rank; and the parts lie on one grid of blocks."""
    whole = [element for part in range(len(axis.parts)) for element in padded_part(axis, part)]
    own = [block for part in range(len(axis.parts)) for block in blocks(padded_part(axis, part), axis.divisor)]
    on_one_grid = blocks(whole, axis.divisor) == own
    return on_one_grid and all(local_blocks(axis, ranks, position) is not None for position in ranks.positions())


# --- strategies ---------------------------------------------------------------------------------------------------------

RANKS = st.builds(lambda tp, moe: Ranks({"tp": tp, "moe": moe}), st.integers(1, 6), st.sampled_from([1, 2, 3]))


@st.composite
def axes_of(draw: st.DrawFn) -> Axis:
    """Axes with sizes, units and divisors that share factors, so that legal ones are common and illegal ones too."""
    num_parts = draw(st.integers(1, 3))
    divisor = draw(st.sampled_from([1, 1, 2, 3, 4]))
    units = [draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12])) for _ in range(num_parts)]
    parts = tuple(count * draw(st.sampled_from([1, 2, 3, 4, 6])) for count in units)
    pad = draw(st.sampled_from([1, 2, 6, 8, 16])) if num_parts == 1 else 1
    if pad > 1:
        parts = (parts[0] + draw(st.integers(0, 7)),)
        units = [draw(st.sampled_from([units[0], -(-parts[0] // pad) * pad]))]
    elif draw(st.booleans()):
        units = list(parts)
    axes = tuple(draw(st.sampled_from(["tp", "tp", "moe", None])) for _ in parts)
    cut = Cut(axes, tuple(units), pad, replicate=draw(st.booleans()))
    if num_parts > 1 and draw(st.booleans()):
        count = draw(st.sampled_from([sum(parts), *(each for each in (1, 2, 3, 4, 6, 8, 12) if sum(parts) % each == 0)]))
        cut = Cut(axes[:1] * num_parts, (count,) * num_parts, replicate=cut.replicate, joined=True)
    return Axis("out", parts, divisor, draw(st.sampled_from([cut, cut, cut, None])))


def family_of(*axes: Axis) -> Family:
    rule = RuleInfo(0, "a.weight", Place("spec.yaml", 3, 5), "")
    return Family(0, rule, "", literal_template("a.weight"), {}, {}, None, axes, (), "all", False, False, None)


def faults_of(axis: Axis, ranks: Ranks) -> list[Diagnostic]:
    return cut_faults(family_of(axis), Mesh(Layout(), ranks.sizes))


@dataclass(frozen=True)
class Here:
    """One position on the axes of `ranks`; experts are not placed here."""

    ranks: Ranks
    position: dict[str, int]

    def coordinate(self, axis: str) -> tuple[int, int]:
        return self.ranks.sizes[axis], self.position[axis]

    def held_slots(self, count: int) -> range:
        raise AssertionError(f"no axis here deals {count} experts")


def local_of(axis: Axis, ranks: Ranks, position: dict[str, int]) -> LocalAxis:
    return local_axis(axis, Here(ranks, position))


def stored(axis: LocalAxis) -> list[Element | None]:
    """What the segments and the padding say of each stored element."""
    elements: list[Element | str | None] = ["nothing"] * axis.size
    for segment in axis.segments:
        for source, target in zip(range(*segment.source), range(*segment.target), strict=True):
            assert elements[target] == "nothing", "two segments meet"
            elements[target] = (segment.part, source)
    for start, stop in axis.padding:
        assert elements[start:stop] == ["nothing"] * (stop - start), "padding lies on a segment"
        elements[start:stop] = [None] * (stop - start)
    return [each if each is None or isinstance(each, tuple) else (-1, -1) for each in elements]


# --- properties ---------------------------------------------------------------------------------------------------------


@THOROUGH
@given(axes_of(), RANKS)
@example(Axis("out", (12, 4), 1, Cut((None, "tp"), (12, 2), 1)), Ranks({"tp": 4, "moe": 1}))
@example(Axis("out", (12, 4), 1, Cut(("moe", "tp"), (12, 2), 1)), Ranks({"tp": 4, "moe": 1}))
@example(Axis("out", (1,), 2, Cut(("tp",), (6,), 6)), Ranks({"tp": 2, "moe": 1}))
@example(Axis("out", (8,), 4, Cut(("tp",), (2,), replicate=True)), Ranks({"tp": 4, "moe": 1}))
@example(Axis("out", (8,), 1, Cut(("tp",), (2,), replicate=True)), Ranks({"tp": 3, "moe": 1}))
def test_cuts_are_refused_exactly_where_a_unit_or_a_block_would_be_cut(axis: Axis, ranks: Ranks) -> None:
    faults = faults_of(axis, ranks)
    assert (not faults) == is_legal(axis, ranks)
    assert {each.code for each in faults} <= {"M316", "M329", "M330", "M331"}


@settings(QUICK, max_examples=settings().max_examples // 4)
@given(axes_of(), RANKS)
@example(Axis("out", (6, 4), 1, Cut(("tp", "tp"), (6, 4), 1)), Ranks({"tp": 4, "moe": 1}))
@example(Axis("out", (48,), 4, Cut(("tp",), (6,), 1)), Ranks({"tp": 5, "moe": 1}))
def test_sizes_said_to_work_are_those_that_work(axis: Axis, ranks: Ranks) -> None:
    assume(sum(axis.parts) <= 36)  # all ranks of 256 sizes are tried
    faults = faults_of(axis, ranks)
    assume(faults and faults[0].code in {"M329", "M330"})
    name = next(name for name in ranks.sizes if f" {name}=" in faults[0].message)
    works = [str(size) for size in range(1, 257) if is_legal(axis, Ranks({**ranks.sizes, name: size}))]
    shown = ", ".join([*works[:12], "..."] if len(works) > 12 else works) or "none"
    assert faults[0].hint == f"sizes of {name} that work: {shown}"


@THOROUGH
@given(axes_of(), RANKS)
@example(Axis("out", (10,), 4, Cut(("tp",), (16,), 16)), Ranks({"tp": 4, "moe": 1}))
def test_local_axis_equals_slicing_and_joining_labelled_elements(axis: Axis, ranks: Ranks) -> None:
    assume(not faults_of(axis, ranks))
    for position in ranks.positions():
        local = local_of(axis, ranks, position)
        assert stored(local) == local_blocks(axis, ranks, position)
        assert all(start < stop for start, stop in local.padding)
        joined = np.cumsum([0, *axis.stored_parts])
        for segment in local.segments:
            assert segment.source[0] < segment.source[1]
            assert segment.joined == tuple(joined[segment.part] + end for end in segment.source)


@THOROUGH
@given(axes_of(), RANKS)
@example(Axis("out", (10,), 4, Cut(("tp",), (16,), 16)), Ranks({"tp": 4, "moe": 1}))
def test_all_ranks_together_hold_every_element_equally_often(axis: Axis, ranks: Ranks) -> None:
    assume(not faults_of(axis, ranks))
    counts = Counter(each for position in ranks.positions() for each in stored(local_of(axis, ranks, position)) if each)
    num_ranks = len(list(ranks.positions()))
    for part, size in enumerate(axis.stored_parts):
        name = axis.cut.axes[part] if axis.cut is not None else None
        copies = num_ranks
        if axis.cut is not None and name is not None:
            copies //= min(ranks.sizes[name], axis.cut.units[part])
        assert [counts.pop((part, element)) for element in range(size)] == [copies] * size
    assert not counts


@st.composite
def tensors(draw: st.DrawFn) -> tuple[tuple[Axis, ...], Ranks]:
    """Up to three axes, of which one may have parts."""
    axes = draw(st.lists(axes_of().filter(lambda axis: sum(axis.stored_parts) <= 40), max_size=3))
    first = next((position for position, axis in enumerate(axes) if len(axis.parts) > 1), None)
    return tuple(axis for position, axis in enumerate(axes) if position == first or len(axis.parts) == 1), draw(RANKS)


@QUICK
@given(st.data(), tensors())
def test_copying_boxes_equals_picking_elements_with_numpy(data: st.DataObject, case: tuple[tuple[Axis, ...], Ranks]) -> None:
    axes, ranks = case
    assume(all(not faults_of(axis, ranks) for axis in axes))
    parts_axis = next((number for number, axis in enumerate(axes) if len(axis.parts) > 1), None)
    joined_shape = tuple(sum(axis.stored_parts) for axis in axes)
    joined = np.arange(1, int(np.prod(joined_shape)) + 1).reshape(joined_shape)
    position = data.draw(st.sampled_from(list(ranks.positions())))
    local = [local_of(axis, ranks, position) for axis in axes]
    shape = tuple(axis.size for axis in local)

    expected = joined
    for number, axis in enumerate(axes):
        offsets = [0, *np.cumsum(axis.stored_parts)]
        picked = [-1 if each is None else offsets[each[0]] + each[1] for each in local_blocks(axis, ranks, position) or []]
        extended = np.concatenate([expected, np.zeros_like(expected.take([0], axis=number))], axis=number)
        expected = extended.take(picked, axis=number)

    padding = [box for box, _ in padding_boxes(local)]
    by_part = [(None, joined)]
    if parts_axis is None:
        by_part = [(0, joined)]
    elif data.draw(st.booleans()):
        ends = np.cumsum(axes[parts_axis].stored_parts)[:-1]
        by_part = list(enumerate(np.split(joined, ends, axis=parts_axis)))
    found, boxes = np.full(shape, -7), list(padding)
    for part, source in by_part:
        for piece in pieces(local, part, parts_axis):
            found[slices(piece.target)] = source[slices(piece.source)]
            boxes.append(piece.target)
    for box in padding:
        found[slices(box)] = 0
    assert found.shape == expected.shape
    assert (found == expected).all()
    assert not tiling_faults(shape, boxes)


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


# --- corners ------------------------------------------------------------------------------------------------------------

QKV = Axis("out", (24, 6, 6), 1, Cut(("tp", "tp", "tp"), (8, 2, 2), 1))


def test_key_and_value_heads_are_held_twice_beside_query_heads() -> None:
    local = [local_of(QKV, Ranks({"tp": 4}), {"tp": rank}) for rank in range(4)]
    assert [[segment.source for segment in axis.segments] for axis in local] == [
        [(0, 6), (0, 3), (0, 3)],
        [(6, 12), (0, 3), (0, 3)],
        [(12, 18), (3, 6), (3, 6)],
        [(18, 24), (3, 6), (3, 6)],
    ]
    assert [segment.joined for segment in local[3].segments] == [(18, 24), (27, 30), (33, 36)]


def test_parts_that_are_cut_as_one_go_to_the_ranks_that_hold_them() -> None:
    axis = Axis("out", (4, 6, 2), 1, Cut(("tp",) * 3, (12,) * 3, joined=True))
    local = [local_of(axis, Ranks({"tp": 3}), {"tp": rank}) for rank in range(3)]
    assert [[(segment.part, segment.source, segment.target) for segment in each.segments] for each in local] == [
        [(0, (0, 4), (0, 4))],
        [(1, (0, 4), (0, 4))],
        [(1, (4, 6), (0, 2)), (2, (0, 2), (2, 4))],
    ]


def test_rank_beyond_a_padded_dim_holds_padding_only() -> None:
    axis = Axis("vocab", (10,), 4, Cut(("tp",), (16,), 16))
    local = [local_of(axis, Ranks({"tp": 4}), {"tp": rank}) for rank in range(4)]
    assert [[segment.source for segment in each.segments] for each in local] == [[(0, 1)], [(1, 2)], [(2, 3)], []]
    assert [(each.size, each.padding) for each in local] == [(1, ()), (1, ()), (1, ()), (1, ((0, 1),))]


def test_tensor_without_axes_is_one_piece() -> None:
    assert [(each.source, each.target) for each in pieces([], 0, None)] == [((), ())]
    assert padding_boxes([]) == ()


@pytest.mark.parametrize(
    ("axis", "tp", "code", "message", "hint"),
    [
        (
            QKV, 3, "M329",
            "the dim 'out' of a.weight has 8 units, which tp=3 does not divide",
            "sizes of tp that work: 1, 2, 4, 8",
        ),
        (
            Axis("out", (24, 6), 1, Cut(("tp", "tp"), (8, 3), 1)), 8, "M329",
            "the dim 'out' of a.weight has 3 units, which tp=8 does not divide",
            "sizes of tp that work: 1",
        ),
        (
            Axis("out", (8,), 1, Cut(("tp",), (2,), replicate=True)), 3, "M329",
            "the dim 'out' of a.weight has 2 units, which tp=3 does not divide",
            "sizes of tp that work: 1, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, ...",
        ),
        (
            Axis("out", (4, 5), 1, Cut(("tp", "tp"), (9, 9), joined=True)), 2, "M329",
            "the dim 'out' of a.weight has 9 units, which tp=2 does not divide",
            "sizes of tp that work: 1, 3, 9",
        ),
        (
            Axis("out", (192,), 128, Cut(("tp",), (2,), 1)), 2, "M330",
            "the dim 'out' of a.weight is cut by tp=2 into 96 elements, which is not a whole number of blocks of 128",
            "sizes of tp that work: 1",
        ),
        (
            Axis("out", (192, 64), 128, None), 1, "M331",
            "the dim 'out' of a.weight has an inner part of 192 elements, which ends inside a block of 128",
            "",
        ),
        (
            Axis("out", (24,), 1, Cut(("tp",), (5,), 1)), 1, "M316",
            "'out' of a.weight has 24 elements, which 5 units do not divide",
            "",
        ),
        (
            Axis("vocab", (5040,), 1, Cut(("tp",), (5040,), 1)), 11, "M329",
            "the dim 'vocab' of a.weight has 5040 units, which tp=11 does not divide",
            "sizes of tp that work: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, ...",
        ),
        (
            Axis("vocab", (3,), 2, Cut(("moe",), (3,), 1)), 1, "M330",
            "the dim 'vocab' of a.weight is cut by moe=3 into 1 elements, which is not a whole number of blocks of 2",
            "sizes of moe that work: 1",
        ),
    ],
)  # fmt: skip
def test_illegal_cut_is_refused_with_the_sizes_that_work(axis: Axis, tp: int, code: str, message: str, hint: str) -> None:
    (fault,) = faults_of(axis, Ranks({"tp": tp, "moe": 3}))
    assert (fault.code, fault.message, fault.hint) == (code, message, hint)
    assert str(fault.place) == "spec.yaml:3:5"


def test_every_axis_of_a_family_is_reported() -> None:
    axis = Axis("out", (24,), 1, Cut(("tp",), (24,), 1))
    faults = cut_faults(family_of(axis, replace(axis, dim="in")), Mesh(Layout(), {"tp": 5}))
    assert [each.message.split("'")[1] for each in faults] == ["out", "in"]
    assert cut_faults(replace(family_of(), axes=None), Mesh(Layout(), {"tp": 5})) == []
