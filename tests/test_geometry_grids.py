"""Uneven and padded shares, dealt experts and coarser grids against the same slow model as `test_geometry`."""

from dataclasses import dataclass, replace

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from mapper.layout import expert_slots
from mapper.plan.family import Axis, Cut
from mapper.plan.geometry import LocalAxis, local_axis
from tests.test_geometry import QUICK, Elements, Here, Ranks, blocks, faults_of, padded_part

THOROUGH = settings(QUICK, max_examples=5 * settings().max_examples)


def grids(draw: st.DrawFn, axis: Axis) -> int:
    """A grid on disk that is as fine as the target's or coarser."""
    return axis.divisor * draw(st.sampled_from([1, 1, 2, 3]))


@st.composite
def uneven_axes(draw: st.DrawFn) -> tuple[Axis, int, int]:
    """(axis, number of ranks, logical elements per element on disk)."""
    divisor = draw(st.sampled_from([1, 1, 2, 4]))
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    parts = [divisor * size for size in sizes]
    parts[-1] += draw(st.integers(0, divisor - 1))
    units = tuple(draw(st.sampled_from([1, 2, 3, 4, 6, -(-size // divisor), size])) for size in parts)
    cut = Cut(
        tuple(draw(st.sampled_from(["tp", "tp", None])) for _ in parts),
        units,
        draw(st.sampled_from([1, 1, 8])) if len(parts) == 1 else 1,
        draw(st.sampled_from(["pad", "short"])),
        draw(st.sampled_from([1, 1, 4, 6])),
    )
    axis = Axis("out", tuple(parts), divisor, cut, selected=draw(st.sampled_from([None, None, len(parts) - 1])))
    return axis, draw(st.integers(1, 5)), grids(draw, axis)


def held(axis: Axis, part: int, num_ranks: int, rank: int) -> tuple[Elements, int]:
    """The rank's elements of one part, and how many it has room for, by dealing out whole units."""
    cut, size = axis.cut, axis.parts[part]
    assert cut is not None
    padded, real = len(padded_part(axis, part)), [(part, position) for position in range(size)]
    room = padded
    if cut.axes[part] is not None:
        unit = -(-padded // cut.units[part])
        own = -(-cut.units[part] // num_ranks)
        dealt = [real[start : start + unit] for start in range(0, size, unit)][rank * own : (rank + 1) * own]
        real = [element for each in dealt for element in each]
        room = own * unit if cut.uneven == "pad" else len(real)
    while room % cut.pad_rank:
        room += 1
    return real, room


def expected(axis: Axis, num_ranks: int, rank: int, on_disk: int) -> list[tuple[int, int] | None]:
    """The (part, element on disk) behind each element of the target; None for padding."""
    local: list[tuple[int, int] | None] = []
    for part in range(len(axis.parts)):
        if axis.selected in (None, part):
            elements, room = held(axis, part, num_ranks, rank)
            filled = [(part, block[0][1] // on_disk) for block in blocks(elements, axis.divisor)]
            local += [*filled, *[None] * (-(-room // axis.divisor) - len(filled))]
    return local


def read(axis: LocalAxis) -> list[tuple[int, int] | str | None]:
    elements: list[tuple[int, int] | str | None] = ["nothing"] * axis.size
    for segment in axis.segments:
        (low, high), (start, stop) = segment.source, segment.target
        repeats, rest = divmod(stop - start, high - low)
        assert not rest
        for offset in range(stop - start):
            assert elements[start + offset] == "nothing"
            elements[start + offset] = (segment.part, low + offset // repeats)
    for start, stop in axis.padding:
        assert elements[start:stop] == ["nothing"] * (stop - start)
        elements[start:stop] = [None] * (stop - start)
    return elements


@THOROUGH
@given(uneven_axes())
@example((Axis("out", (5,), 4, Cut(("tp",), (2,), 8, "pad")), 2, 8))
def test_uneven_shares_equal_dealing_out_units(case: tuple[Axis, int, int]) -> None:
    axis, num_ranks, on_disk = case
    ranks = Ranks({"tp": num_ranks})
    assume(not faults_of(axis, ranks))
    for rank in range(num_ranks):
        local = local_axis(axis, Here(ranks, {"tp": rank}), stored=on_disk)
        assert read(local) == expected(axis, num_ranks, rank, on_disk)
        for segment in local.segments:
            before = sum(-(-size // on_disk) for size in axis.parts[: segment.part])
            assert segment.joined == (before + segment.source[0], before + segment.source[1])


@QUICK
@given(uneven_axes())
def test_uneven_cut_is_let_through_exactly_where_no_share_ends_inside_a_block(case: tuple[Axis, int, int]) -> None:
    axis, num_ranks, _ = case
    assert axis.cut is not None
    is_legal = all(size % axis.divisor == 0 for size in axis.parts[:-1])
    for part, name in enumerate(axis.cut.axes):
        if name is not None:
            size, unit = len(padded_part(axis, part)), -(-len(padded_part(axis, part)) // axis.cut.units[part])
            share = -(-axis.cut.units[part] // num_ranks) * unit
            is_legal &= share % axis.divisor == 0 or (share >= size and part == len(axis.parts) - 1)
    assert (not faults_of(axis, Ranks({"tp": num_ranks}))) == is_legal


@dataclass(frozen=True)
class Dealt:
    """A rank that experts are dealt to."""

    size: int
    position: int

    def coordinate(self, axis: str) -> tuple[int, int]:
        return self.size, self.position

    def held_slots(self, count: int) -> tuple[int, ...]:
        return tuple(expert_slots(count, self.size, self.position))


@given(st.integers(1, 12), st.integers(1, 6), st.sampled_from([1, 4]))
@example(6, 3, 4)
def test_experts_of_a_dim_are_dealt_or_refused(num_experts: int, num_ranks: int, pad: int) -> None:
    padded = -(-num_experts // pad) * pad
    axis = Axis("expert", (num_experts,), 1, Cut(("ep",), (padded,), pad))
    assume(not faults_of(axis, Ranks({"ep": num_ranks})))
    found = [read(local_axis(axis, Dealt(num_ranks, rank))) for rank in range(num_ranks)]
    assert [each for rank in found for each in rank if each] == [(0, expert) for expert in range(num_experts)]


@pytest.mark.parametrize(("num_ranks", "is_legal"), [(1, True), (2, True), (4, True), (6, False), (8, True)])
def test_replicated_units_are_held_by_ranks_in_a_row(num_ranks: int, is_legal: bool) -> None:
    axis = Axis("kv", (6,), 1, Cut(("tp",), (2,), replicate=True))
    ranks = Ranks({"tp": num_ranks})
    assert (not faults_of(axis, ranks)) == (is_legal or num_ranks % 2 == 0)
    for rank in range(num_ranks if is_legal else 0):
        start = 0 if num_ranks == 1 else rank * 2 // num_ranks * 3
        stop = 6 if num_ranks == 1 else start + 3
        local = local_axis(axis, Here(ranks, {"tp": rank}))
        assert read(local) == [(0, position) for position in range(start, stop)]
    bare = replace(axis, cut=Cut(("tp",), (2,)))
    assert (not faults_of(bare, ranks)) == (num_ranks <= 2)
