"""Boxes and their algebra: what a plan writes is a set of boxes, and coverage is decided on them, never by counting.

A box is one (start, stop) pair per axis, half open; a tensor without axes has the box `()`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

Interval = tuple[int, int]
Box = tuple[Interval, ...]


@dataclass(frozen=True, slots=True)
class TilingFaults:
    """Why boxes do not tile a shape: pairs that overlap (by position, with the shared box), gaps, and boxes outside."""

    overlaps: tuple[tuple[int, int, Box], ...]
    gaps: tuple[Box, ...]
    outside: tuple[int, ...]

    def __bool__(self) -> bool:
        return bool(self.overlaps or self.gaps or self.outside)


def whole(shape: Iterable[int]) -> Box:
    """Return the box of a whole tensor."""
    return tuple((0, size) for size in shape)


def volume(box: Box) -> int:
    """Return the number of elements in the box."""
    return prod(stop - start for start, stop in box)


def shape_of(box: Box) -> tuple[int, ...]:
    """Return the size of the box along each axis."""
    return tuple(stop - start for start, stop in box)


def intersection(first: Box, second: Box) -> Box | None:
    """Return what both boxes share, or None when that is nothing."""
    shared = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(first, second, strict=True))
    return None if any(start >= stop for start, stop in shared) else shared


def contains(outer: Box, inner: Box) -> bool:
    """Return whether every element of `inner` lies in `outer`; an empty box lies anywhere."""
    return not volume(inner) or all(a <= c and d <= b for (a, b), (c, d) in zip(outer, inner, strict=True))


def difference(box: Box, hole: Box) -> list[Box]:
    """Return disjoint boxes that hold what is in `box` and not in `hole`."""
    shared = intersection(box, hole)
    if shared is None:
        return [box] if volume(box) else []
    rest: list[Box] = []
    left = list(box)
    for axis, (start, stop) in enumerate(shared):
        low, high = left[axis]
        if low < start:
            rest.append((*left[:axis], (low, start), *left[axis + 1 :]))
        if stop < high:
            rest.append((*left[:axis], (stop, high), *left[axis + 1 :]))
        left[axis] = (start, stop)
    return rest


def uncovered(box: Box, covers: Iterable[Box]) -> list[Box]:
    """Return disjoint boxes that hold what is in `box` and in none of `covers`."""
    rest = [box] if volume(box) else []
    for cover in covers:
        rest = [piece for each in rest for piece in difference(each, cover)]
        if not rest:
            break
    return rest


def tiling_faults(shape: Sequence[int], boxes: Sequence[Box]) -> TilingFaults:
    """Return what keeps `boxes` from covering every element of `shape` exactly once; falsy when nothing does.

    >>> bool(tiling_faults((4, 3), [((0, 1), (0, 3)), ((1, 4), (0, 3))]))
    False
    >>> tiling_faults((4,), [((0, 3),), ((2, 3),)])
    TilingFaults(overlaps=((0, 1, ((2, 3),)),), gaps=(((3, 4),),), outside=())
    """
    full = whole(shape)
    outside = tuple(position for position, box in enumerate(boxes) if not contains(full, box))
    overlaps = tuple(_overlaps(boxes))
    if not outside and not overlaps and sum(map(volume, boxes)) == volume(full):
        return TilingFaults((), (), ())
    return TilingFaults(overlaps, tuple(uncovered(full, boxes)), outside)


def _overlaps(boxes: Sequence[Box]) -> Iterable[tuple[int, int, Box]]:
    """Yield the overlapping pairs; boxes are swept along their first axis, so disjoint runs cost no pair tests."""
    order = sorted((position for position, box in enumerate(boxes) if volume(box)), key=lambda position: boxes[position][:1])
    active: list[int] = []
    for position in order:
        box = boxes[position]
        if box:
            active = [other for other in active if boxes[other][0][1] > box[0][0]]
        for other in active:
            shared = intersection(boxes[other], box)
            if shared is not None or not box:
                yield min(other, position), max(other, position), shared or ()
        active.append(position)


def spell(box: Box) -> str:
    """Return the box as a case writes it: `[9, 0:2048]`; one-element intervals lose their stop.

    >>> spell(((9, 10), (0, 2048)))
    '[9, 0:2048]'
    """
    return "[" + ", ".join(str(start) if stop == start + 1 else f"{start}:{stop}" for start, stop in box) + "]"
