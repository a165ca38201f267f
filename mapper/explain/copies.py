"""What a family copies at given index values, over many ranks: equal copies of several ranks are one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from mapper.folding import runs
from mapper.pattern import IndexValue
from mapper.plan.family import Family, SourceFamily
from mapper.plan.geometry import local_axis, padding_boxes, pieces
from mapper.plan.share import Share
from mapper.regions import Box, spell, whole

Bindings = Mapping[str, IndexValue]
ShapeOf = Callable[[str], "tuple[int, ...] | None"]
"""The shape of a source by name, where its header is known."""


@dataclass(frozen=True, slots=True)
class Copy:
    """One source box to one target box; None stands for a whole tensor whose shape only its header knows."""

    source: str
    source_box: Box | None
    target: str
    target_box: Box | None


@dataclass(frozen=True, slots=True)
class Held:
    """What one rank holds of a target: its local shape (None: the header decides), its copies and its padding."""

    shape: tuple[int, ...] | None
    copies: tuple[Copy, ...]
    padding: tuple[Box, ...]


def copies_on(
    share: Share, family: Family, sources: Sequence[SourceFamily], at: Bindings, *, shape_of: ShapeOf
) -> Held | None:
    """Return what the rank of `share` copies from `sources` at the index values `at`, or None where it holds nothing."""
    if not share.holds(family.stage):
        return None
    values = {
        index: [value for value in share.owned(index, domain) if at.get(index, value) == value]
        for index, domain in family.domains.items()
    }
    if any(not values[index] for index in (*family.target.indices, *([family.stack] if family.stack else []))):
        return None
    if family.axes is None:
        found = tuple(_whole_copies(family, sources, values, shape_of))
        return Held(next((_sizes(each.target_box) for each in found), None), found, ())
    axes = [local_axis(axis, share.coordinate) for axis in family.axes]
    shape: tuple[int, ...] = tuple(axis.size for axis in axes)
    padding = padding_boxes(axes)
    slots: list[tuple[Box, dict[str, IndexValue]]] = [((), {})]
    if family.stack is not None:
        here = share.slots(family.stack)
        wanted = set(values[family.stack])
        slots = [(((slot, slot + 1),), {family.stack: value}) for slot, value in enumerate(here) if value in wanted]
        shape = (len(here), *shape)
        padding = tuple(((0, len(here)), *box) for box in padding)
    boxes = [pieces(axes, source.part, family.parts_axis) for source in sources]
    copies = tuple(
        Copy(source.template.name({**fixed, **stacked}), piece.source, family.target.name(fixed), (*slot, *piece.target))
        for fixed in _combinations(family, values)
        for source, own in zip(sources, boxes, strict=True)
        for slot, stacked in slots
        for piece in own
    )
    return Held(shape, copies, padding)


def _whole_copies(
    family: Family, sources: Sequence[SourceFamily], values: Mapping[str, Sequence[IndexValue]], shape_of: ShapeOf
) -> Iterator[Copy]:
    for fixed in _combinations(family, values):
        for source in sources:
            name = source.template.name(fixed)
            shape = shape_of(name)
            box = None if shape is None else whole(shape)
            yield Copy(name, box, family.target.name(fixed), box)


def _combinations(family: Family, values: Mapping[str, Sequence[IndexValue]]) -> Iterator[dict[str, IndexValue]]:
    indices = family.target.indices
    for combination in product(*(values[index] for index in indices)):
        yield dict(zip(indices, combination, strict=True))


def _sizes(box: Box | None) -> tuple[int, ...] | None:
    return None if box is None else tuple(stop for _, stop in box)


def spell_ranks(ranks: Iterable[int]) -> str:
    """Return ranks as a person writes them.

    >>> spell_ranks(range(16)), spell_ranks([3])
    ('ranks 0-15', 'rank 3')
    """
    numbers = list(ranks)
    return f"rank{'s' if len(numbers) != 1 else ''} {runs(numbers, through='-')}"


def spell_box(box: Box | None) -> str:
    """Return a box as a case writes it; a whole tensor has none, and neither has a scalar."""
    return spell(box) if box else ""


def as_pairs(box: Box | None) -> list[list[int]] | None:
    """Return a box for JSON."""
    return None if box is None else [list(interval) for interval in box]
