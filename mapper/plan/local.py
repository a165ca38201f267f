"""A family on one rank: the local shape of its targets, and the boxes that each of its sources fills there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple, TypeVar

from mapper.diagnostics import Diagnostic, finding
from mapper.pattern import IndexValue
from mapper.plan.family import Conversion, DiskLayout, Family, SourceFamily, ValueOp
from mapper.plan.geometry import LocalAxis, Piece, local_axis, padding_boxes, pieces
from mapper.plan.share import Share
from mapper.plan.weave import Weave
from mapper.regions import Box, Interval, TilingFaults, spell, tiling_faults, whole

Item = TypeVar("Item")


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
    """What lies between a source and its box: a view of the stored axes, scales, a change of dtype, computed values.

    `whole` is the shape of the source in the order of the target's axes, where any slice needs all of it (else None).
    """

    disk: DiskLayout | None
    conversion: Conversion | None
    scaling: Scaling | None = None
    values: tuple[ValueOp, ...] = ()
    whole: tuple[int, ...] | None = None

    @property
    def packed(self) -> int:
        """How many stored elements are the bytes of one of the target."""
        return 1 if self.disk is None else self.disk.packed


class Move(NamedTuple):
    """A box of a source, the box of a target that it fills, and the weaves between their axes (empty: none)."""

    source: Box
    target: Box
    weaves: tuple[Weave | None, ...] = ()

    @property
    def spans(self) -> tuple[Box, Box]:
        """The boxes from the first element read to the last, and from the first written to the last."""
        if not self.weaves:
            return self.source, self.target
        lead = len(self.target) - len(self.source)
        read = [None if weave is None else weave.read_span for weave in self.weaves]
        written = [*[None] * lead, *(None if weave is None else weave.written_span for weave in self.weaves)]
        return _within(self.source, read), _within(self.target, written)


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
    padding = padding_boxes(axes)
    if family.fill is not None or _holds_zeros(family, share):
        padding = ((whole(inner), family.fill or 0.0),)
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
    axes: list[LocalAxis] = [
        local_axis(axis, share, stored=stored, by_part=source.part is not None and len(axis.parts) > 1)
        for axis, stored in zip(family.axes, divisors, strict=True)
    ]
    return pieces(axes, source.part, family.parts_axis)


def scale_pieces(family: Family, sources: tuple[SourceFamily, ...], position: int, share: Share) -> tuple[Piece, ...]:
    """Return the boxes that the scales at `position` are read for: those of the values that they belong to."""
    values = sources[position].scale_of
    assert values is not None, "the source holds values"
    reading = reading_of(family, sources, values)
    assert reading is not None
    assert reading.scaling is not None
    scaling, lead = reading.scaling, 1 if sources[values].holds_stack else 0
    found = []
    for piece in source_pieces(family, sources[values], share):
        box = scaling.box((*[(0, 1)] * lead, *piece.source))[lead:]
        found.append(Piece(box, piece.target))
    return tuple(dict.fromkeys(found))


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
    if disk is None and scaling is None and family.conversion is None and not family.values:
        return None
    values = family.values
    if values and source.holds_stack:
        values = tuple(replace(each, axis=each.axis + 1) for each in values)
    seen = source.disk.seen if source.disk is not None and any(each.reads_whole for each in values) else None
    return Reading(disk, family.conversion, scaling, values, seen)


def placed(
    family: Family,
    source: SourceFamily,
    shape: LocalShape,
    boxes: tuple[Piece, ...],
    slots: Mapping[int, int] | None,
) -> Iterator[Move]:
    """Yield what a source gives to one target, in full coordinates.

    `slots` maps the slots that this source fills to its own positions along a stacked first axis (None: no stack).
    """
    if slots is None:
        for piece in boxes:
            yield Move(piece.source, _shifted(family, shape, piece.target), piece.weaves)
        return
    for slot, position in slots.items():
        for piece in boxes:
            source_box, weaves = piece.source, piece.weaves
            if source.holds_stack:
                source_box, weaves = ((position, position + 1), *source_box), (None, *weaves) if weaves else ()
            yield Move(source_box, _in_slot(family, shape, piece.target, slot), weaves)


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
    boxes = [
        *(box for source in filled for piece in source for box in written_boxes(piece)),
        *(box for box, _ in shape.padding),
    ]
    faults = _tiling_faults(shape.inner, boxes, filled)
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


def _tiling_faults(shape: tuple[int, ...], boxes: Sequence[Box], filled: Sequence[Sequence[Piece]]) -> TilingFaults:
    """Return the faults of a tiling; a dim whose parts lie interleaved goes first, where many boxes cost least."""
    woven = {axis for source in filled for piece in source for axis, weave in enumerate(piece.weaves) if weave is not None}
    lead = min(woven, default=0)
    if not lead:
        return tiling_faults(shape, boxes)
    turned = tiling_faults(_first(shape, lead), [_first(box, lead) for box in boxes])

    def back(box: Box) -> Box:
        return (*box[1 : lead + 1], box[0], *box[lead + 1 :])

    overlaps = tuple((one, other, back(box)) for one, other, box in turned.overlaps)
    return TilingFaults(overlaps, tuple(map(back, turned.gaps)), turned.outside)


def _first(items: tuple[Item, ...], position: int) -> tuple[Item, ...]:
    return (items[position], *items[:position], *items[position + 1 :])


def written_boxes(piece: Piece) -> list[Box]:
    """Return the boxes of the target that a piece writes: one, unless it lies between the elements of others."""
    if not piece.weaves:
        return [piece.target]
    return _spread(piece.target, [None if weave is None else weave.written() for weave in piece.weaves])


def read_boxes(piece: Piece) -> list[Box]:
    """Return the boxes of the source that a piece reads: one, unless it leaves out what lies in between."""
    if not piece.weaves:
        return [piece.source]
    return _spread(piece.source, [None if weave is None else weave.read() for weave in piece.weaves])


def _within(box: Box, parts: Sequence[Interval | None]) -> Box:
    return tuple(
        interval if part is None else (interval[0] + part[0], interval[0] + part[1])
        for interval, part in zip(box, parts, strict=True)
    )


def _spread(box: Box, within: list[list[Interval] | None]) -> list[Box]:
    choices = [
        [interval] if parts is None else [(interval[0] + start, interval[0] + stop) for start, stop in parts]
        for interval, parts in zip(box, within, strict=True)
    ]
    return list(product(*choices))


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
