"""What a family copies at given index values, over many ranks: equal copies of several ranks are one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from mapper.folding import fold, runs, split
from mapper.pattern import IndexValue
from mapper.plan.family import Family, SourceFamily
from mapper.plan.local import LocalShape, Move, local_shape, padding_of, placed, scale_pieces, source_pieces
from mapper.plan.share import Share
from mapper.regions import Box, spell, whole

Bindings = Mapping[str, IndexValue]
ShapeOf = Callable[[str], "tuple[int, ...] | None"]
"""The shape of a source by name, where its header is known."""


@dataclass(frozen=True, slots=True)
class Copy:
    """One source box to one target box; None stands for a whole tensor whose shape only its header knows.

    `num_runs` is more than 1 where what is read of the box, or written, are that many pieces with others in between;
    `is_scale` marks scales that the values going to the target box are multiplied by.
    """

    source: str
    source_box: Box | None
    target: str
    target_box: Box | None
    num_runs: int = 1
    is_scale: bool = False


@dataclass(frozen=True, slots=True)
class Held:
    """What one rank holds of a target: its local shape (None: the header decides), its copies and its padding."""

    shape: tuple[int, ...] | None
    copies: tuple[Copy, ...]
    padding: tuple[Box, ...]


def copies_on(
    share: Share,
    family: Family,
    sources: tuple[SourceFamily, ...],
    at: Bindings,
    *,
    shape_of: ShapeOf,
    position: int | None = None,
) -> Held | None:
    """Return what the rank of `share` copies at the index values `at`, or None where it holds nothing.

    `sources` are those of one alternative; with a `position` only that one's copies are returned.
    """
    if not share.holds(family.stage):
        return None
    values = {
        index: [value for value in share.owned(index, domain) if at.get(index, value) == value]
        for index, domain in family.domains.items()
    }
    if any(not values[index] for index in (*family.target.indices, *([family.stack] if family.stack else []))):
        return None
    if family.axes is None:
        asked = sources if position is None else sources[position : position + 1]
        found = tuple(_whole_copies(family, asked, values, shape_of))
        return Held(next((_sizes(each.target_box) for each in found), None), found, ())
    shape = local_shape(family, share)
    copies = []
    for number, source in enumerate(sources):
        if position not in (None, number):
            continue
        is_scale = source.scale_of is not None
        boxes = scale_pieces(family, sources, number, share) if is_scale else source_pieces(family, source, share)
        for fixed in _combinations(family, values):
            for stacked, slots in _slots(family, source, shape, values):
                name, target = source.template.name({**fixed, **stacked}), family.target.name(fixed)
                for move in placed(family, source, shape, boxes, slots):
                    box, into = move.spans
                    copies.append(Copy(name, box, target, into, _num_runs(move), is_scale))
    return Held(shape.full, tuple(copies), tuple(box for box, _ in padding_of(family, shape)))


def _num_runs(move: Move) -> int:
    weaves = [weave for weave in move.weaves if weave is not None]
    return max(prod(len(weave.read()) for weave in weaves), prod(len(weave.written()) for weave in weaves))


def _slots(
    family: Family, source: SourceFamily, shape: LocalShape, values: Mapping[str, Sequence[IndexValue]]
) -> Iterator[tuple[dict[str, IndexValue], dict[int, int] | None]]:
    """Yield the stacked values to name a source by, each with the slots it fills: slot -> its position in the source."""
    if family.stack is None:
        yield {}, None
        return
    assert shape.slots is not None
    assert shape.positions is not None
    wanted = set(values[family.stack])
    filled = {slot: position for slot, position in enumerate(shape.positions) if shape.slots[slot] in wanted}
    if source.holds_stack:
        yield {}, filled
    else:
        yield from (({family.stack: shape.slots[slot]}, {slot: 0}) for slot in filled)


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


def spell_copy(copy: Copy) -> str:
    """Return a copy as `name[box] -> name[box]`."""
    return f"{copy.source}{spell_box(copy.source_box)} -> {copy.target}{spell_box(copy.target_box)}{_remark(copy)}"


def _remark(copy: Copy) -> str:
    remarks = [f"in {copy.num_runs:,} runs"] if copy.num_runs > 1 else []
    remarks += ["scales"] if copy.is_scale else []
    return f" ({', '.join(remarks)})" if remarks else ""


def copy_object(copy: Copy) -> dict[str, object]:
    """Return a copy for JSON."""
    return {
        "source": copy.source,
        "source_box": as_pairs(copy.source_box),
        "target": copy.target,
        "target_box": as_pairs(copy.target_box),
        **({"runs": copy.num_runs} if copy.num_runs > 1 else {}),
        **({"scales": True} if copy.is_scale else {}),
    }


def as_pairs(box: Box | None) -> list[list[int]] | None:
    """Return a box for JSON."""
    return None if box is None else [list(interval) for interval in box]


def spell_copies(copies: Sequence[Copy]) -> list[str]:
    """Return copies into one target as lines; those that differ only in a number of the source and the slot are one.

    `experts.{16...31}.up.weight[0:4] -> [{0...15}, 4:8]` pairs sources and slots in order.
    """
    groups: dict[tuple[object, ...], list[Copy]] = {}
    for copy in copies:
        is_slot = bool(copy.target_box) and len(copy.target_box or ()) == len(copy.source_box or ()) + 1
        box = (copy.target_box or ())[1:] if is_slot else copy.target_box
        key = (split(copy.source)[0], copy.source_box, box, copy.num_runs, copy.is_scale, is_slot)
        groups.setdefault(key, []).append(copy)
    return [line for (*_, is_slot), group in groups.items() for line in _lines(group, is_slot=bool(is_slot))]


def _lines(group: Sequence[Copy], *, is_slot: bool) -> list[str]:
    names = fold(each.source for each in group)
    if len(group) == 1 or len(names) > 1 or not is_slot:
        return [
            f"{each.source}{spell_box(each.source_box)} -> {spell_box(each.target_box) or 'all of it'}{_remark(each)}"
            for each in group
        ]
    boxes = [each.target_box or () for each in group]
    slots = [box[0][0] for box in boxes]
    spelled = runs(slots) if slots == sorted(slots) else ", ".join(map(str, slots))
    rest = "".join(f", {each}" for each in filter(None, [spell_box(boxes[0][1:])[1:-1]]))
    return [f"{names[0]}{spell_box(group[0].source_box)} -> [{{{spelled}}}{rest}]{_remark(group[0])}"]
