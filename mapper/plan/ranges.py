"""The copies of a family that are plain runs of bytes, in a file and in a parameter: no box, no view, no conversion.

What a rank reads whole (experts, stacked and concatenated tensors, cuts of the outermost dim) is of this kind. Offsets are
worked out once per family and slot, not per tensor, and no name is spelled.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

from mapper.ops.dtypes import BITS, num_bytes
from mapper.plan.family import SourceFamily
from mapper.plan.local import Reading, placed, reading_of
from mapper.plan.plan import LocalFamily, target_names
from mapper.regions import Box, shape_of

ByteRange = tuple[int, int, int, str, int]
"""(file, start, size, target, offset): `size` bytes from `start` of the file go to the parameter, from byte `offset` on."""


class _Run(NamedTuple):
    """One run of one slot, in bytes from the start of the source tensor and of the parameter."""

    slot: int
    first: int
    size: int
    offset: int


def byte_ranges(local: LocalFamily) -> list[ByteRange] | None:
    """Return the copies of a family on one rank, or None where one of them is more than a run of bytes."""
    if local.shape is None:
        family = local.matched.family
        return None if family.values or family.conversion is not None else list(_whole_tensors(local))
    ranges: list[ByteRange] = []
    for position, source in enumerate(local.matched.sources):
        if not local.pieces[position]:
            if source.scale_of is not None:
                return None
            continue
        runs = _runs(local, position)
        if runs is None:
            return None
        ranges += _of_source(local, position, source, runs)
    return ranges


def contiguous(shape: tuple[int, ...], box: Box) -> tuple[int, int] | None:
    """Return (first element, number of elements) of a box that is one run in a tensor of `shape`, else None.

    >>> contiguous((4, 6), ((1, 3), (0, 6))), contiguous((4, 6), ((1, 2), (2, 4))), contiguous((4, 6), ((0, 2), (0, 3)))
    ((6, 12), (8, 2), None)
    """
    first, is_partial = 0, False
    for size, (start, stop) in zip(shape, box, strict=True):
        first = first * size + start
        if is_partial and stop - start != size:
            return None
        is_partial = is_partial or stop - start != 1
    return first, prod(shape_of(box))


def _whole_tensors(local: LocalFamily) -> Iterator[ByteRange]:
    without = local.matched.incomplete | local.matched.absent
    for combination, target in zip(local.combinations, target_names(local), strict=True):
        if combination not in without:
            header = local.matched.header(combination)
            assert header is not None, f"{target!r} is held without a header"
            yield header.file, header.start, header.stop - header.start, target, 0


def _runs(local: LocalFamily, position: int) -> list[_Run] | None:
    """Return the runs that one source fills, slot by slot; -1 is the slot where nothing is stacked."""
    family, source, shape = local.matched.family, local.matched.sources[position], local.shape
    assert shape is not None
    assert source.disk is not None
    first = next((header for header in local.matched.found[position] if header is not None), None)
    reading = reading_of(family, local.matched.sources, position)
    if first is None or BITS[first.dtype] % 8 or not _keeps_bits(reading, first.dtype):
        return None
    width = BITS[first.dtype] // 8
    slots = [-1] if shape.slots is None else list(range(len(shape.slots)))
    runs: list[_Run] = []
    for slot in slots:
        of_slot = None if slot < 0 else {slot: shape.positions[slot] if source.holds_stack and shape.positions else 0}
        for move in placed(family, source, shape, local.pieces[position], of_slot):
            read, written = contiguous(source.disk.shape, move.source), contiguous(shape.full, move.target)
            if move.weaves or read is None or written is None or read[1] != written[1]:
                return None
            runs.append(_Run(slot, read[0] * width, read[1] * width, written[0] * width))
    return runs


def _keeps_bits(reading: Reading | None, dtype: str) -> bool:
    """Return whether the target's bytes are those on disk: read in that order, of a dtype of the same width."""
    if reading is None:
        return True
    if reading.disk is not None or reading.scaling is not None or reading.values:
        return False
    conversion = reading.conversion
    assert conversion is not None
    return conversion.dtype == dtype or (
        conversion.by == "bitcast" and num_bytes(conversion.dtype, (8,)) == num_bytes(dtype, (8,))
    )


def _of_source(local: LocalFamily, position: int, source: SourceFamily, runs: list[_Run]) -> Iterator[ByteRange]:
    matched, shape = local.matched, local.shape
    assert shape is not None
    family, found = matched.family, matched.found[position]
    without = matched.incomplete | matched.absent
    strides = source.strides
    stack = family.stack if shape.slots is not None and not source.holds_stack else None
    steps = [0] * len(runs) if stack is None else [strides[stack][shape.slots[run.slot]] for run in runs]  # type: ignore[index]
    fixed_indices = [index for index in source.template.indices if index != stack]
    rows = list(zip(steps, runs, strict=True))
    for combination, target in zip(local.combinations, target_names(local), strict=True):
        if without and combination in without:
            continue
        fixed = dict(zip(family.target.indices, combination, strict=True))
        base = sum(strides[index][fixed[index]] for index in fixed_indices)
        for step, (_, first, size, offset) in rows:
            header = found[base + step]
            assert header is not None, f"{target!r} is held without a header"
            yield header[2], header[3] + first, size, target, offset
