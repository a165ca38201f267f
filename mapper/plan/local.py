"""A family on one rank: the local shape of its targets, and the boxes that each of its sources fills there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mapper.diagnostics import Diagnostic, finding
from mapper.pattern import IndexValue
from mapper.plan.family import Conversion, DiskLayout, Family, SourceFamily
from mapper.plan.geometry import LocalAxis, Piece, local_axis, padding_boxes, pieces
from mapper.plan.share import Share
from mapper.regions import Box, spell, tiling_faults, whole


@dataclass(frozen=True, slots=True)
class Scaling:
    """The scales that values are multiplied by: how they lie on disk, and logical elements per value and per scale."""

    disk: DiskLayout
    value_divisors: tuple[int, ...]
    scale_divisors: tuple[int, ...]

    def box(self, values: Box) -> Box:
        """Return the box of the scales that a box of values needs."""
        return tuple(
            (start * own // scale, -(-stop * own // scale))
            for (start, stop), own, scale in zip(values, self.value_divisors, self.scale_divisors, strict=True)
        )


@dataclass(frozen=True, slots=True)
class Reading:
    """What lies between a source and its box: a view of the stored axes, scales, a change of dtype."""

    disk: DiskLayout | None
    conversion: Conversion | None
    scaling: Scaling | None = None


@dataclass(frozen=True, slots=True)
class LocalShape:
    """What one target of a family is on this rank.

    `inner` is the shape without a stacked leading axis, `own` the shape that this family accounts for, `full` the whole
    local shape: `offset` more along the family's `append_axis`. `slots` are the values of a stacked index in slot order,
    `positions` where each lies in the index's full range.
    `padding` are boxes of `inner` with the value that each holds.
    """

    inner: tuple[int, ...]
    own: tuple[int, ...]
    full: tuple[int, ...]
    offset: int
    slots: tuple[IndexValue, ...] | None
    positions: tuple[int, ...] | None
    padding: tuple[tuple[Box, float], ...]


def local_shape(family: Family, share: Share) -> LocalShape:
    """Return the local shape of a family whose dims are stated."""
    assert family.axes is not None, "the header decides the shape"
    axes = [local_axis(axis, share) for axis in family.axes]
    inner = tuple(axis.size for axis in axes)
    slots = positions = None
    if family.stack is not None:
        slots = share.slots(family.stack)
        at_value = {value: at for at, value in enumerate(share.domains[family.stack])}
        positions = tuple(at_value[value] for value in slots)
    padding = ((whole(inner), 0.0),) if _holds_zeros(family, share) else padding_boxes(axes)
    own = _stacked(family, inner, slots)
    offset = sum(local_shape(other, share).own[family.append_axis or 0] for other in family.after)
    full = own
    if family.append_axis is not None:
        at = family.append_axis
        full = (*own[:at], own[at] + offset, *own[at + 1 :])
    return LocalShape(inner, own, full, offset, slots, positions, padding)


def source_pieces(family: Family, source: SourceFamily, share: Share) -> tuple[Piece, ...]:
    """Return the boxes that one source fills, in coordinates of `LocalShape.inner`; none where this rank holds zeros."""
    assert family.axes is not None
    assert source.disk is not None
    if _holds_zeros(family, share) or source.scale_of is not None:
        return ()
    divisors = source.disk.divisors[1:] if source.holds_stack else source.disk.divisors
    axes: list[LocalAxis] = [local_axis(axis, share, stored=stored) for axis, stored in zip(family.axes, divisors, strict=True)]
    return pieces(axes, source.part, family.parts_axis)


def reading_of(family: Family, sources: tuple[SourceFamily, ...], position: int) -> Reading | None:
    """Return how one source of an alternative is read, or None where it is read as it lies."""
    source = sources[position]
    scale = next((each for each in sources if each.scale_of == position), None)
    scaling = None
    if scale is not None:
        assert source.disk is not None
        assert scale.disk is not None
        scaling = Scaling(scale.disk, source.disk.divisors, scale.disk.divisors)
    disk = source.disk if source.disk is not None and not source.disk.is_plain else None
    if disk is None and scaling is None and family.conversion is None:
        return None
    return Reading(disk, family.conversion, scaling)


def placed(
    family: Family,
    source: SourceFamily,
    shape: LocalShape,
    boxes: tuple[Piece, ...],
    slots: Mapping[int, int] | None,
) -> Iterator[tuple[Box, Box]]:
    """Yield (source box, target box) in full coordinates.

    `slots` maps the slots that this source fills to its own positions along a stacked first axis (None: no stack).
    """
    if slots is None:
        for piece in boxes:
            yield piece.source, _shifted(family, shape, piece.target)
        return
    for slot, position in slots.items():
        for piece in boxes:
            source_box = ((position, position + 1), *piece.source) if source.holds_stack else piece.source
            yield source_box, _in_slot(family, shape, piece.target, slot)


def padding_of(family: Family, shape: LocalShape) -> Iterator[tuple[Box, float]]:
    """Yield the padding of one target in full coordinates."""
    for box, value in shape.padding:
        if shape.slots is None:
            yield _shifted(family, shape, box), value
        elif family.stack_axis is None:
            if shape.slots:
                yield ((0, len(shape.slots)), *box), value
        else:
            yield from ((_in_slot(family, shape, box, slot), value) for slot in range(len(shape.slots)))


def coverage_findings(family: Family, shape: LocalShape, filled: list[tuple[Piece, ...]], rank: int) -> Iterator[Diagnostic]:
    """Yield what keeps the boxes of all sources and the padding from tiling the inner shape exactly once."""
    place, target = family.rule.place, str(family.target)
    boxes = [*(piece.target for source in filled for piece in source), *(box for box, _ in shape.padding)]
    faults = tiling_faults(shape.inner, boxes)
    faulty = [("M520", box) for box in faults.gaps]
    faulty += [("M521", box) for _, _, box in faults.overlaps]
    faulty += [("M522", boxes[position]) for position in faults.outside]
    for code, box in faulty:
        yield finding(code, place=place, subject=target, target=target, box=spell(box), rank=rank, shape=list(shape.inner))
    if shape.slots is not None:
        assert family.stack is not None
        known = set(family.domains[family.stack])
        for slot, value in enumerate(shape.slots):
            if value not in known:
                yield finding(
                    "M523", place=place, subject=target, target=target, rank=rank, slot=slot, index=family.stack, value=value
                )


def _holds_zeros(family: Family, share: Share) -> bool:
    return any(share.coordinate(axis)[1] for axis in family.only_first)


def _stacked(family: Family, inner: tuple[int, ...], slots: tuple[IndexValue, ...] | None) -> tuple[int, ...]:
    if slots is None:
        return inner
    at = family.stack_axis
    return (len(slots), *inner) if at is None else (*inner[:at], inner[at] * len(slots), *inner[at + 1 :])


def _in_slot(family: Family, shape: LocalShape, box: Box, slot: int) -> Box:
    at = family.stack_axis
    if at is None:
        return ((slot, slot + 1), *box)
    start, stop = box[at]
    return (*box[:at], (start + slot * shape.inner[at], stop + slot * shape.inner[at]), *box[at + 1 :])


def _shifted(family: Family, shape: LocalShape, box: Box) -> Box:
    if not shape.offset:
        return box
    at = family.append_axis
    assert at is not None
    start, stop = box[at]
    return (*box[:at], (start + shape.offset, stop + shape.offset), *box[at + 1 :])
