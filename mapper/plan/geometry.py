"""From a family's axes and a rank's position to boxes: which slice of a source lands in which slice of a target.

Everything here is affine in the parts; the names and index values do not matter, so one result serves a whole family.
Source boxes are in the order of the target's axes: a source that lies transposed or folded on disk is viewed so first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Protocol

from mapper.plan.family import Axis, Cut
from mapper.plan.weave import Strand, Weave
from mapper.regions import Box, Interval, difference, volume, whole


class Position(Protocol):
    """Where a rank is on the mesh."""

    def coordinate(self, axis: str) -> tuple[int, int]:
        """Return (size, position) along a mesh axis."""
        ...

    def held_slots(self, count: int) -> Sequence[int]:
        """Return which of `count` experts are in this rank's slots, in slot order."""
        ...


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive logical elements of one part that a rank holds, and where they start among its own."""

    start: int
    stop: int
    at: int


@dataclass(frozen=True, slots=True)
class Segment:
    """A run along one axis in elements: of a part's own source, of a source that holds all parts, of the target.

    Where the target's interval is k times as long, each element of the source is repeated k times. With a `weave`, only
    what it takes of the source's interval is read, and only what it fills of the target's written.
    """

    part: int
    source: Interval
    joined: Interval
    target: Interval
    weave: Weave | None = None


@dataclass(frozen=True, slots=True)
class LocalAxis:
    """One axis of the target on this rank: its size, the runs that sources fill, and the runs that are padding."""

    size: int
    segments: tuple[Segment, ...]
    padding: tuple[Interval, ...]
    fill: float


@dataclass(frozen=True, slots=True)
class Piece:
    """What one source tensor gives to one target tensor on this rank; boxes leave out a stacked leading axis.

    `weaves` has an entry for each axis where one of them is woven, else it is empty.
    """

    source: Box
    target: Box
    weaves: tuple[Weave | None, ...] = ()


def local_axis(axis: Axis, position: Position, *, stored: int | None = None, by_part: bool = False) -> LocalAxis:
    """Return the rank's share of one axis whose sources hold one element per `stored` logical ones (None: as the target).

    `by_part` says that each part has a source of its own. The program has checked that no unit or block is cut.
    """
    segments: list[Segment] = []
    padding: list[Interval] = []
    stored = stored or axis.divisor
    at = joined = 0
    if axis.view is not None:
        return _viewed_axis(axis, position, axis.view.by_part if by_part else axis.view.joined)
    if axis.cut is not None and axis.cut.joined:
        return _joined_axis(axis, position, stored)
    for part, size in enumerate(axis.parts):
        if axis.selected in (None, part):
            runs, share = _shares(axis.cut, part, size, position)
            width = -(-share // axis.divisor)
            filled = at
            for run in runs:
                for segment in _segments(axis.divisor, stored, part, run, joined, at):
                    segments.append(segment)
                    filled = segment.target[1]
            if filled < at + width:
                padding.append((filled, at + width))
            at += width
        joined += 0 if axis.per_part else -(-size // stored)
    return LocalAxis(at, tuple(segments), tuple(padding), axis.fill)


def _joined_axis(axis: Axis, position: Position, stored: int) -> LocalAxis:
    """Return the share of an axis whose parts are cut as one: of each part, what lies in the rank's runs of the whole."""
    runs, share = _shares(axis.cut, 0, sum(axis.parts), position)
    segments: list[Segment] = []
    before = joined = 0
    for part, size in enumerate(axis.parts):
        for run in runs:
            start, stop = max(run.start, before), min(run.stop, before + size)
            inner = Run(start - before, stop - before, run.at + start - run.start)
            segments += _segments(axis.divisor, stored, part, inner, joined, 0)
        before += size
        joined += -(-size // stored)
    width = -(-share // axis.divisor)
    filled = max((segment.target[1] for segment in segments), default=0)
    return LocalAxis(width, tuple(segments), ((filled, width),) if filled < width else (), axis.fill)


def _viewed_axis(axis: Axis, position: Position, strands: Sequence[Strand]) -> LocalAxis:
    """Return the share of an axis whose elements are rearranged: of each strand, what lies in the rank's runs."""
    cut = axis.as_cut
    taken: list[Run] = []
    padding: list[Interval] = []
    at = before = 0
    for part, size in enumerate(cut.parts):
        if axis.selected in (None, part):
            runs, share = _shares(cut.cut, part, size, position)
            width, filled = -(-share // axis.divisor), at
            for run in runs:
                start, stop = before + run.start // axis.divisor, before + -(-run.stop // axis.divisor)
                taken.append(Run(start, stop, at + run.at // axis.divisor))
                filled = max(filled, taken[-1].at + stop - start)
            if filled < at + width:
                padding.append((filled, at + width))
            at += width
        before += -(-size // axis.divisor)
    segments = [each for run in _end_to_end(taken) for strand in strands for each in _woven(strand, run)]
    return LocalAxis(at, tuple(segments), tuple(padding), axis.fill)


def _end_to_end(runs: Sequence[Run]) -> Iterator[Run]:
    """Yield the runs, those as one that follow each other both in the whole dim and on the rank."""
    last: Run | None = None
    for run in runs:
        if last is not None and (last.stop, last.at + last.stop - last.start) == (run.start, run.at):
            last = Run(last.start, run.stop, last.at)
            continue
        if last is not None:
            yield last
        last = run
    if last is not None:
        yield last


def _woven(strand: Strand, run: Run) -> Iterator[Segment]:
    shift = run.at - run.start
    for (low, high), (begin, end), weave in strand.threads(run.start, run.stop):
        own = (strand.own_start + low, strand.own_start + high)
        joined = (strand.start + low, strand.start + high)
        yield Segment(-1 if strand.part is None else strand.part, own, joined, (begin + shift, end + shift), weave)


def _segments(divisor: int, stored: int, part: int, run: Run, joined: int, at: int) -> Iterator[Segment]:
    """Yield the segments of one run; a run that starts or ends inside a coarser stored element has a head and a tail."""
    if run.start >= run.stop:
        return
    if stored == divisor:
        low, high = run.start // divisor, -(-run.stop // divisor)
        begin = at + run.at // divisor
        yield Segment(part, (low, high), (joined + low, joined + high), (begin, begin + high - low))
        return
    assert stored % divisor == 0, f"a grid of {stored} cannot be made coarser, to {divisor}"
    head = min(-(-run.start // stored) * stored, run.stop)
    tail = max(run.stop // stored * stored, head)
    for start, stop in ((run.start, head), (head, tail), (tail, run.stop)):
        if start < stop:
            low, high = start // stored, -(-stop // stored)
            begin, end = start // divisor, -(-stop // divisor)
            offset = at + run.at // divisor - run.start // divisor
            yield Segment(part, (low, high), (joined + low, joined + high), (offset + begin, offset + end))


def _shares(cut: Cut | None, part: int, size: int, position: Position) -> tuple[list[Run], int]:
    """Return the logical runs of one part that the rank holds, and how many elements it has room for."""
    if cut is None:
        return [Run(0, size, 0)], size
    padded = -(-size // cut.pad) * cut.pad
    axis = cut.axes[part]
    if axis is None:
        return [Run(0, size, 0)], _rounded(padded, cut.pad_rank)
    if axis == "ep" and cut.units[part] == size and cut.uneven is None:
        slots = position.held_slots(size)
        return _merged(slots), _rounded(len(slots), cut.pad_rank)
    num_ranks, rank = position.coordinate(axis)
    units = cut.units[part]
    if cut.uneven is not None:
        unit = -(-padded // units)
        room = -(-units // num_ranks) * unit
        start = min(rank * room, size)
        stop = min(start + room, size)
        share = room if cut.uneven == "pad" else stop - start
    elif units % num_ranks == 0:
        share = padded // num_ranks
        start, stop = min(rank * share, size), min((rank + 1) * share, size)
    else:
        assert num_ranks % units == 0, f"{units} units over {num_ranks} ranks were let through"
        share = padded // units
        unit = rank // (num_ranks // units)
        start, stop = min(unit * share, size), min((unit + 1) * share, size)
    return [Run(start, stop, 0)], _rounded(share, cut.pad_rank)


def _rounded(share: int, unit: int) -> int:
    return -(-share // unit) * unit


def _merged(slots: Sequence[int]) -> list[Run]:
    """Return the slots as runs of consecutive values."""
    runs: list[Run] = []
    for at, value in enumerate(slots):
        if runs and runs[-1].stop == value:
            runs[-1] = Run(runs[-1].start, value + 1, runs[-1].at)
        else:
            runs.append(Run(value, value + 1, at))
    return runs


def pieces(axes: Sequence[LocalAxis], part: int | None, parts_axis: int | None) -> tuple[Piece, ...]:
    """Return the boxes that the source of `part` fills; None stands for a source that holds all parts."""
    choices = [
        [segment for segment in axis.segments if part is None or position != parts_axis or segment.part == part]
        for position, axis in enumerate(axes)
    ]
    return tuple(_piece(combination, part, parts_axis) for combination in product(*choices))


def _piece(segments: tuple[Segment, ...], part: int | None, parts_axis: int | None) -> Piece:
    source = tuple(
        segment.joined if part is None and position == parts_axis else segment.source
        for position, segment in enumerate(segments)
    )
    weaves = tuple(segment.weave for segment in segments)
    return Piece(source, tuple(segment.target for segment in segments), weaves if any(weaves) else ())


def padding_boxes(axes: Sequence[LocalAxis]) -> tuple[tuple[Box, float], ...]:
    """Return disjoint boxes that hold the declared padding of a target, each with the value it is filled with."""
    shape = tuple(axis.size for axis in axes)
    boxes: list[tuple[Box, float]] = []
    for position, axis in enumerate(axes):
        for interval in axis.padding:
            fresh: list[Box] = [(*whole(shape[:position]), interval, *whole(shape[position + 1 :]))]
            for known, _ in boxes:
                fresh = [rest for each in fresh for rest in difference(each, known)]
            boxes += [(each, axis.fill) for each in fresh if volume(each)]
    return tuple(boxes)
