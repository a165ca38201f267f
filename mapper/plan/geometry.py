"""From a family's axes and a rank's position to boxes: which slice of a source lands in which slice of a target.

Everything here is affine in the parts; the names and index values do not matter, so one result serves a whole family.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

from mapper.plan.family import Axis, Cut
from mapper.regions import Box, Interval, difference, volume, whole

Coordinate = Callable[[str], tuple[int, int]]
"""(size, position) of this rank along a mesh axis."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A run along one axis, in stored elements: of a part's own source, of a source that holds all parts, of the target."""

    part: int
    source: Interval
    joined: Interval
    target: Interval


@dataclass(frozen=True, slots=True)
class LocalAxis:
    """One axis of the target on this rank: its size, the runs that sources fill, and the runs that are padding."""

    size: int
    segments: tuple[Segment, ...]
    padding: tuple[Interval, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """What one source tensor gives to one target tensor on this rank; boxes leave out a stacked axis."""

    source: Box
    target: Box


def local_axis(axis: Axis, coordinate: Coordinate) -> LocalAxis:
    """Return the rank's share of one axis; the program has checked that no unit or block is cut."""
    segments: list[Segment] = []
    padding: list[Interval] = []
    position = joined = 0
    for part, size in enumerate(axis.parts):
        start, stop, share = _share(axis.cut, part, size, coordinate)
        low, high, width = start // axis.divisor, -(-stop // axis.divisor), -(-share // axis.divisor)
        filled = high - low if start < stop else 0
        if filled:
            segments.append(Segment(part, (low, high), (joined + low, joined + high), (position, position + filled)))
        if filled < width:
            padding.append((position + filled, position + width))
        position += width
        joined += -(-size // axis.divisor)
    return LocalAxis(position, tuple(segments), tuple(padding))


def _share(cut: Cut | None, part: int, size: int, coordinate: Coordinate) -> tuple[int, int, int]:
    """Return (start, stop) of the rank's logical elements of one part, and how many it holds with padding."""
    if cut is None:
        return 0, size, size
    padded = -(-size // cut.pad) * cut.pad
    axis = cut.axes[part]
    if axis is None:
        return 0, size, padded
    num_ranks, position = coordinate(axis)
    units = cut.units[part]
    if units % num_ranks == 0:
        share = padded // num_ranks
        start = position * share
    else:
        assert num_ranks % units == 0, f"{units} units over {num_ranks} ranks were let through"
        share = padded // units
        start = position // (num_ranks // units) * share
    return min(start, size), min(start + share, size), share


def pieces(axes: Sequence[LocalAxis], part: int | None, parts_axis: int | None) -> tuple[Piece, ...]:
    """Return the boxes that the source of `part` fills; None stands for a source that holds all parts."""
    choices = [
        [segment for segment in axis.segments if part is None or position != parts_axis or segment.part == part]
        for position, axis in enumerate(axes)
    ]
    return tuple(
        Piece(
            tuple(
                segment.joined if part is None and position == parts_axis else segment.source
                for position, segment in enumerate(combination)
            ),
            tuple(segment.target for segment in combination),
        )
        for combination in product(*choices)
    )


def padding_boxes(axes: Sequence[LocalAxis]) -> tuple[Box, ...]:
    """Return disjoint boxes that hold the declared padding of a target."""
    shape = tuple(axis.size for axis in axes)
    boxes: list[Box] = []
    for position, axis in enumerate(axes):
        for interval in axis.padding:
            box: Box = (*whole(shape[:position]), interval, *whole(shape[position + 1 :]))
            fresh = [box]
            for known in boxes:
                fresh = [rest for each in fresh for rest in difference(each, known)]
            boxes += [each for each in fresh if volume(each)]
    return tuple(boxes)
