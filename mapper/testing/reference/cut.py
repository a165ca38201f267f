"""One rank's share of a whole tensor, dim by dim, by plain slicing; padding last."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from mapper.spec.model import Shard
from mapper.testing.reference.arrays import Bits
from mapper.testing.reference.evaluate import Scope, integer
from mapper.testing.reference.ranks import IllegalLayout
from mapper.testing.reference.world import World


@dataclass(frozen=True, slots=True)
class Share:
    """Elements `start` to `stop` of one part, and the number of elements that they are padded to."""

    start: int
    stop: int
    padded: int


def shares(shard: Shard, sizes: Sequence[int], block: int, world: World, scope: Scope) -> list[Share]:
    """Return what the rank holds of every part of a dim; raises IllegalLayout where a unit would be cut."""
    found = []
    for part, size in enumerate(sizes):
        axis = shard.axis[part] if len(shard.axis) > 1 else shard.axis[0] if shard.axis else None
        units: int | None = None
        if shard.units:
            units = integer((shard.units[part] if len(shard.units) > 1 else shard.units[0]).text, scope)
        share = Share(0, size, size)
        if axis is not None:
            ranks = world.axes[axis]
            listed = [integer(each.text, scope) for each in shard.units] if len(shard.units) > 1 else []
            repeats = shard.replicate or any(each % ranks == 0 for each in listed)
            share = _share(size, units, repeats, shard.uneven, block, ranks, world.coordinate(axis))
        if shard.pad_rank is not None:
            multiple = integer(shard.pad_rank.text, scope)
            share = Share(share.start, share.stop, math.ceil(share.padded / multiple) * multiple)
        found.append(share)
    return found


def _share(size: int, units: int | None, repeats: bool, uneven: str | None, block: int, num_ranks: int, place: int) -> Share:
    """Return a rank's share of a part. `repeats`: few units may be held by several ranks each."""
    if uneven is not None:
        rows = block if units is None else size // units
        whole = math.ceil(math.ceil(size / rows) / num_ranks) * rows
        start, stop = min(place * whole, size), min((place + 1) * whole, size)
        return Share(start, stop, whole if uneven == "pad" else stop - start)
    units = size if units is None else units
    if units == 0 or size % units:
        raise IllegalLayout(f"{size} elements are not {units} equal units")
    rows = size // units
    if repeats and units < num_ranks and num_ranks % units == 0:
        unit = place // (num_ranks // units)  # a unit lives on several ranks in a row
        return Share(unit * rows, (unit + 1) * rows, rows)
    if units % num_ranks:
        raise IllegalLayout(f"{units} units do not divide over {num_ranks} ranks")
    mine = units // num_ranks * rows
    return Share(place * mine, (place + 1) * mine, mine)


def padded_sizes(shard: Shard, sizes: Sequence[int], scope: Scope) -> list[int]:
    """Return the sizes after `pad`, which rounds a whole dim up before it is cut."""
    if shard.pad is None:
        return list(sizes)
    (size,) = sizes
    multiple = integer(shard.pad.text, scope)
    return [math.ceil(size / multiple) * multiple]


def cut_dim(array: Bits, number: int, step: Fraction, sizes: Sequence[int], held: Sequence[Share], fill: int) -> Bits:
    """Return the array with one axis cut: of every part its share, each padded with `fill`, end to end.

    `sizes` are those after `pad`; what the array lacks at its end is padding too.
    """
    array = _padded(array, number, sum(math.ceil(size / step) for size in sizes), fill)
    pieces = []
    offset = 0
    for part, (size, share) in enumerate(zip(sizes, held, strict=True)):
        start, stop = share.start / step, share.stop / step
        is_ragged = part == len(sizes) - 1 and share.stop == size
        if share.start == share.stop:
            start = stop = Fraction(0)
        if start.denominator > 1 or (stop.denominator > 1 and not is_ragged):
            raise IllegalLayout(f"a cut at {share.start} or {share.stop} lies inside a block of {step}")
        piece = np.take(array, np.arange(offset + int(start), offset + math.ceil(stop)), axis=number)
        pieces.append(_padded(piece, number, math.ceil(share.padded / step), fill))
        offset += math.ceil(size / step)
    return np.concatenate(pieces, axis=number)


def require_whole_blocks(sizes: Sequence[int], step: Fraction) -> None:
    """Raise IllegalLayout where a part ends inside a block, unless it is the last."""
    for size in sizes[:-1]:
        if (size / step).denominator > 1:
            raise IllegalLayout(f"a part of {size} ends inside a block of {step}")


def _padded(array: Bits, number: int, length: int, fill: int) -> Bits:
    missing = length - array.shape[number]
    assert missing >= 0, f"an axis of {array.shape[number]} is longer than {length}"
    widths: list[Any] = [(0, 0)] * array.ndim
    widths[number] = (0, missing)
    return np.pad(array, widths, constant_values=fill)
