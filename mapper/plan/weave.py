"""Views of an axis: a dim whose elements lie in another order in the target than in its sources, in whole factors.

An interval of such a dim is at most 2k - 1 boxes of its k factors. Each box is an interval of the target and a plain box of
the source, once that is split into factors and these are put in the target's order; nothing is gathered in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from mapper.regions import Box, Interval, shape_of, volume, whole


@dataclass(frozen=True, slots=True)
class Weave:
    """How an interval of a source's axis lies in an interval of the target's.

    The source's interval is split into factors of `sizes`, these are put in `order`, the target's, and of them `box` is
    taken. The target's interval is split into factors of `target_sizes`, and of them `target_box` is filled. A factor of
    one element that fills several is repeated.
    """

    sizes: tuple[int, ...]
    order: tuple[int, ...]
    box: Box
    target_sizes: tuple[int, ...]
    target_box: Box

    def read(self) -> list[Interval]:
        """Return what is read of the source's interval, as intervals of it."""
        in_order = dict(zip(self.order, self.box, strict=True))
        return _intervals(self.sizes, [in_order[position] for position in range(len(self.sizes))])

    def written(self) -> list[Interval]:
        """Return what is written of the target's interval, as intervals of it."""
        return _intervals(self.target_sizes, self.target_box)

    @property
    def read_span(self) -> Interval:
        """The interval of the source's interval from the first element that is read to the last."""
        found = self.read()
        return found[0][0], found[-1][1]

    @property
    def written_span(self) -> Interval:
        """The interval of the target's interval from the first element that is written to the last."""
        found = self.written()
        return found[0][0], found[-1][1]

    @property
    def num_read(self) -> int:
        return volume(self.box)

    @property
    def num_written(self) -> int:
        return volume(self.target_box)


@dataclass(frozen=True, slots=True)
class Strand:
    """One region of the sources, laid end to end, and one of the target that hold the same factors in different orders.

    `part` is the part whose own source holds the region, from `own_start` on; None where it takes the source of all parts.
    `sizes` are the factors of the source's region in its order, `order` says which of them is each factor of the target's,
    whose sizes are `target_sizes`. `box` and `target_box`, both in the target's order, are what the strand joins: of either
    region all, or within one factor a range.
    """

    part: int | None
    start: int
    own_start: int
    sizes: tuple[int, ...]
    order: tuple[int, ...]
    box: Box
    target_start: int
    target_sizes: tuple[int, ...]
    target_box: Box

    @property
    def is_scattered(self) -> bool:
        """Whether the target's region is filled by several strands, element between element."""
        return self.target_box != whole(self.target_sizes)

    @property
    def block(self) -> int:
        """The elements of the target that a cut may not separate."""
        return prod(self.target_sizes[1:]) if self.is_scattered else 1

    def threads(self, start: int, stop: int) -> Iterator[tuple[Interval, Interval, Weave | None]]:
        """Yield (interval of the source's region, interval of the target, weave) for what lies in target[start:stop]."""
        low, high = max(start - self.target_start, 0), min(stop - self.target_start, prod(self.target_sizes))
        if low >= high:
            return
        if self.is_scattered:
            yield from self._scattered(low, high)
            return
        at = low + self.target_start
        for box in radix_boxes(low, high, self.target_sizes):
            source, weave = self._gathered(box, shape_of(box), whole(shape_of(box)))
            yield source, (at, at + volume(box)), weave
            at += volume(box)

    def _scattered(self, low: int, high: int) -> Iterator[tuple[Interval, Interval, Weave | None]]:
        assert low % self.block == 0 == high % self.block, "a cut through interleaved parts was let through"
        first, last = low // self.block, high // self.block
        lead = (max(first, self.target_box[0][0]), min(last, self.target_box[0][1]))
        if lead[0] < lead[1]:
            box = (lead, *self.target_box[1:])
            inner = ((lead[0] - first, lead[1] - first), *self.target_box[1:])
            source, weave = self._gathered(box, (last - first, *self.target_sizes[1:]), inner)
            yield source, (low + self.target_start, high + self.target_start), weave

    def _gathered(self, box: Box, target_sizes: tuple[int, ...], target_box: Box) -> tuple[Interval, Weave | None]:
        """Return the interval of the source's region around what fills `box` of the target's factors, and the weave in it."""
        taken: list[Interval] = [(0, 1)] * len(self.sizes)
        for factor, (position, own, target) in enumerate(zip(self.order, self.box, self.target_box, strict=True)):
            if self.sizes[position] > 1 or own != (0, 1):
                shift = own[0] - target[0]
                taken[position] = (box[factor][0] + shift, box[factor][1] + shift)
        start, lead = 0, 0
        while lead < len(self.sizes) - 1 and taken[lead][1] - taken[lead][0] == 1:
            start += taken[lead][0] * prod(self.sizes[lead + 1 :])
            lead += 1
        inner = prod(self.sizes[lead + 1 :])
        low, high = taken[lead]
        sizes = (*([1] * lead), high - low, *self.sizes[lead + 1 :])
        within = [*([(0, 1)] * lead), (0, high - low), *taken[lead + 1 :]]
        interval = (start + low * inner, start + high * inner)
        weave = Weave(sizes, self.order, tuple(within[position] for position in self.order), target_sizes, target_box)
        return interval, None if _is_plain(weave) else weave


@dataclass(frozen=True, slots=True)
class AxisView:
    """The strands of an axis: where one source holds all parts, and where each part has its own (empty: it cannot).

    `source_parts` are the sizes of the parts in the sources, `text` how the rule says it.
    """

    joined: tuple[Strand, ...]
    by_part: tuple[Strand, ...]
    source_parts: tuple[int, ...]
    text: str


def radix_boxes(start: int, stop: int, sizes: Sequence[int]) -> Iterator[Box]:
    """Yield the boxes of factors, outermost first, that elements `start` to `stop` are, in order.

    >>> list(radix_boxes(1, 5, (3, 2)))
    [((0, 1), (1, 2)), ((1, 2), (0, 2)), ((2, 3), (0, 1))]
    """
    if start >= stop:
        return
    if not sizes:
        yield ()
        return
    inner, rest = prod(sizes[1:]), sizes[1:]
    first, head = divmod(start, inner)
    last, tail = divmod(stop, inner)
    if first == last:
        yield from (((first, first + 1), *box) for box in radix_boxes(head, tail, rest))
        return
    if head:
        yield from (((first, first + 1), *box) for box in radix_boxes(head, inner, rest))
        first += 1
    if first < last:
        yield ((first, last), *whole(rest))
    yield from (((last, last + 1), *box) for box in radix_boxes(0, tail, rest))


def _is_plain(weave: Weave) -> bool:
    """Whether the source's whole interval fills the target's as it lies."""
    if weave.target_box != whole(weave.target_sizes) or shape_of(weave.box) != weave.target_sizes:
        return False
    long = [position for position, size in zip(weave.order, weave.target_sizes, strict=True) if size > 1]
    return weave.num_read == prod(weave.sizes) and long == sorted(long)


def _intervals(sizes: Sequence[int], box: Sequence[Interval]) -> list[Interval]:
    full = len(sizes)
    while full and box[full - 1] == (0, sizes[full - 1]):
        full -= 1
    if not full:
        return [(0, prod(sizes))]
    inner = prod(sizes[full:])
    low, high = box[full - 1]
    strides = [prod(sizes[position + 1 :]) for position in range(full - 1)]
    found = []
    for outer in product(*(range(*interval) for interval in box[: full - 1])):
        base = sum(at * stride for at, stride in zip(outer, strides, strict=True))
        found.append((base + low * inner, base + high * inner))
    return found
