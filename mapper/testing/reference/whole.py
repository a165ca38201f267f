"""A unit's whole target from whole sources, and the rank's share of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate
from typing import TypeVar

import numpy as np
import torch

from mapper.spec.model import PARTS, Shard
from mapper.testing.reference.arrays import UNSIGNED, Bits, dtype_of
from mapper.testing.reference.cut import cut_dim, padded_sizes, require_whole_blocks, shares
from mapper.testing.reference.evaluate import Misfit, Scope, evaluate, integer
from mapper.testing.reference.grids import (
    Line,
    known_dims,
    lines_of,
    one_axis_per_dim,
    packed,
    require_finer,
    target_lines,
    to_target_grid,
)
from mapper.testing.reference.names import has_leaf
from mapper.testing.reference.operations import computed, fill_of, operations_of, rearranged, source_sizes
from mapper.testing.reference.ranks import IllegalLayout
from mapper.testing.reference.tensors import Labels, Reader, Values, converted
from mapper.testing.reference.units import Piece, Unit
from mapper.testing.reference.world import World

Entry = TypeVar("Entry")


@dataclass(frozen=True, slots=True)
class Plan:
    """The numbers of a unit: the size of every dim (per part) in the target and the sources, and how the dims lie."""

    sizes: dict[str, tuple[int, ...]]
    source_sizes: dict[str, tuple[int, ...]]
    leading: tuple[str, ...]
    lines: tuple[Line, ...]
    joined: dict[str, tuple[str, ...]]
    parts: str | None


def plan_of(unit: Unit, world: World) -> Plan | None:
    """Return the numbers of a unit, or None where the header's shape counts."""
    rule, scope = unit.flat.rule, unit.scope(world)
    if rule.dims is None:
        assert not rule.shard, "a cut needs dims"
        assert len(unit.pieces) == 1, "joined sources need dims"
        return None
    sizes = {name: tuple(integer(size.text, scope) for size in dim.sizes) for name, dim in rule.dims.items()}
    if any(size < 1 for each in sizes.values() for size in each):
        raise Misfit(f"a dim of {unit.targets[0]} has no elements: {sizes}")
    with_parts = [name for name, dim in rule.dims.items() if dim.has_parts]
    assert len(with_parts) <= 1, "parts along two dims"
    leading = tuple(sizes)
    if unit.leaf is not None:
        known = known_dims(world.format(unit.pieces[0].reading.format))
        leading = tuple(name for name in sizes if name not in known)
    lines = tuple(target_lines(unit.leaf, leading, scope))
    stored = {**source_sizes(rule, operations_of(rule, unit.leaf), sizes, scope), PARTS: (1,)}
    sizes[PARTS] = (1,) * max((len(each) for each in sizes.values()), default=1)
    return Plan(sizes, stored, leading, lines, dict(rule.stored), with_parts[0] if with_parts else None)


def whole(unit: Unit, world: World, reader: Reader) -> Bits:
    """Return the whole target: stacked indices lead, then one axis per dim, parts laid end to end; nothing cut."""
    plan = plan_of(unit, world)
    fill = fill_of(unit.flat.rule, unit.leaf, unit.scope(world))
    if fill is not None:
        return _filled(fill, unit, plan, world, reader)
    columns = [_readings(unit, number, plan, world, reader) for number in range(len(unit.pieces))]
    if plan is None:
        (column,) = columns
        (only,) = column
        return _operated(only, unit, plan, world, reader)
    rows = list(zip(*columns, strict=True))
    if len(columns) > 1:
        axis = _axis_of(plan.parts, plan)
        joined = [np.concatenate(row, axis=axis) for row in rows]
    else:
        joined = [row[0] for row in rows]
    joined = [_operated(each, unit, plan, world, reader) for each in joined]
    stack = unit.flat.rule.stack
    if not stack:
        (only,) = joined
        return only
    if stack[0][1] is not None:
        return np.concatenate(joined, axis=_axis_of(stack[0][1], plan))
    counts = [len(world.values(index)) for index, _ in stack]
    return np.stack(joined).reshape(*counts, *joined[0].shape)


def _operated(array: Bits, unit: Unit, plan: Plan | None, world: World, reader: Reader) -> Bits:
    """Return the array after the operations of the rule; labels are moved, not computed with."""
    scope, lines = unit.scope(world), () if plan is None else plan.lines
    for operation in operations_of(unit.flat.rule, unit.leaf):
        if operation.formula is not None:
            assert plan is not None, "a view needs dims"
            array = rearranged(array, operation, unit.flat.rule, lines, plan.sizes, scope)
        elif isinstance(reader, Values):
            array = computed(array, operation, lines, scope, target_dtype(unit, world, reader))
    return array


def _filled(fill: float, unit: Unit, plan: Plan | None, world: World, reader: Reader) -> Bits:
    """Return a target that no source fills."""
    assert plan is not None, "a fill needs dims"
    dtype = target_dtype(unit, world, Values({}))
    shape = [sum(line.length(size) for size in plan.sizes[line.dim]) for line in plan.lines]
    for index, dim in unit.flat.rule.stack:
        count = len(world.values(index))
        if dim is None:
            shape.insert(0, count)
        else:
            shape[_axis_of(dim, plan)] *= count
    return np.full(shape, reader.fill(fill, dtype), dtype=np.int64 if isinstance(reader, Labels) else UNSIGNED[dtype.itemsize])


def split_targets(array: Bits, unit: Unit, plan: Plan | None) -> list[Bits]:
    """Return the whole target, or where a rule has one target per part, each of them."""
    if len(unit.targets) == 1:
        return [array]
    assert plan is not None
    assert plan.parts is not None
    axis = _axis_of(plan.parts, plan)
    line = plan.lines[axis]
    ends = list(accumulate(line.length(size) for size in plan.sizes[line.dim]))
    return np.split(array, ends[:-1], axis=axis + len(unit.flat.rule.stack))


def local(array: Bits, part: int, unit: Unit, world: World, reader: Reader, dtype: torch.dtype) -> Bits:
    """Return this rank's share of a whole target; padding holds the rule's `fill`, or what its leaf says."""
    plan = plan_of(unit, world)
    if plan is None:
        return array
    rule = unit.flat.rule
    axis = 0
    for index, dim in rule.stack:
        if dim is None:
            every = world.values(index)
            array = np.take(array, np.array([every.index(value) for value in world.held(index)], dtype=np.int64), axis=axis)
            axis += 1
        elif index in world.indices() and world.indices()[index].axis is not None:
            raise NotImplementedError("an index with an axis that is stacked along a dim")
    for line in plan.lines:
        shard = rule.shard.get(line.dim)
        if shard is not None:
            array = _cut_line(array, axis, line, part, shard, plan, unit, world, reader, dtype)
        axis += 1
    for dim, shard in rule.shard.items():
        if is_bias(unit) and dim not in {line.dim for line in plan.lines} and any(shard.axis):
            array = _without_dim(array, shard, world, reader, dtype)
    return _with_inner_axes(array, plan)


def is_bias(unit: Unit) -> bool:
    """Say whether the unit is added to a product, once or once for each rank."""
    return unit.leaf is not None and unit.leaf.name == "bias"


def _with_inner_axes(array: Bits, plan: Plan) -> Bits:
    """Split the one axis of a dim into those that the leaf has."""
    num_stacked = array.ndim - len(plan.lines)
    shape = list(array.shape[:num_stacked])
    for length, line in zip(array.shape[num_stacked:], plan.lines, strict=True):
        shape += [length // math.prod(line.inner), *line.inner]
    return array.reshape(shape)


def check_cuts(unit: Unit, world: World) -> None:
    """Raise IllegalLayout where the rank's share of the unit cannot be cut, without a tensor."""
    plan = plan_of(unit, world)
    if plan is None:
        return
    nothing = Values({})
    for part in range(len(unit.targets)):
        for line in plan.lines:
            sizes = _target_sizes(line, part, plan, unit)
            require_whole_blocks(plan.sizes[line.dim], line.step)
            shard = unit.flat.rule.shard.get(line.dim)
            if shard is not None:
                array = np.zeros(sum(line.length(size) for size in sizes), dtype=np.uint8)
                _cut_line(array, 0, line, part, shard, plan, unit, world, nothing, torch.float32)
    for piece in unit.pieces:
        require_finer(read_lines(piece, plan, unit.scope(world)), plan.lines)
        if len(unit.pieces) == 1 and piece.leaf is not None and piece.leaf.stored is not None:
            for line in lines_of(piece.leaf.stored, unit.scope(world)):
                require_whole_blocks(plan.sizes[line.dim], line.step)


def target_dtype(unit: Unit, world: World, tensors: Values) -> torch.dtype:
    """Return the dtype of a unit's target; raises AssertionError where its sources do not agree."""
    found = set()
    scope = unit.scope(world)
    if fill_of(unit.flat.rule, unit.leaf, scope) is not None:
        assert unit.flat.rule.cast is not None, "a fill needs cast"
        return dtype_of(str(evaluate(unit.flat.rule.cast.text, scope)))
    for piece in unit.pieces:
        for names in piece.names:
            if piece.leaf is not None and piece.leaf.dequantize is not None:
                assert piece.leaf.cast is not None
                found.add(dtype_of(str(evaluate(piece.leaf.cast.text, scope))))
            else:
                found.add(converted(tensors.tensors[names[0]], unit.flat, piece.leaf, scope).dtype)
    (dtype,) = found
    return dtype


def _readings(unit: Unit, number: int, plan: Plan | None, world: World, reader: Reader) -> list[Bits]:
    """Return what one source gives for each stacked value, on the target's grid."""
    piece, scope = unit.pieces[number], unit.scope(world)
    if plan is None:
        if piece.leaf is not None and (piece.leaf.stored is not None or piece.leaf.dequantize is not None):
            raise NotImplementedError("a stored layout without dims")
        return [reader.read(names[0], unit.flat, piece.leaf, scope) for names in piece.names]
    num_parts = len(plan.sizes[PARTS])
    plan = replace(plan, sizes=plan.source_sizes)
    if len(unit.pieces) > 1:
        assert plan.parts is not None
        plan = replace(plan, sizes={**plan.sizes, plan.parts: (plan.sizes[plan.parts][number],)})
    lines = _piece_lines(piece, plan, scope)
    found: list[Bits] = []
    for names in piece.names:
        if piece.leaf is not None and piece.leaf.dequantize is not None:
            leading = [Line(dim, 1, ()) for dim in plan.leading]
            array, stored = reader.dequantized(names, piece.leaf, leading, scope, plan.sizes)
            found.append(to_target_grid(array, stored, lines, plan.sizes))
            continue
        array = reader.read(names[0], unit.flat, piece.leaf, scope)
        for each in _unstacked(array, unit, piece):
            one, stored = one_axis_per_dim(each, read_lines(piece, plan, scope), plan.sizes, plan.joined)
            found.append(to_target_grid(one, stored, lines, plan.sizes))
    dims = [line.dim for line in lines]
    if PARTS in dims and len(unit.pieces) == 1:  # what is stored once for all parts is each part's
        found = [np.repeat(each, num_parts, axis=dims.index(PARTS)) for each in found]
    return found


def _unstacked(array: Bits, unit: Unit, piece: Piece) -> Sequence[Bits]:
    if not piece.holds_stack:
        return [array]
    stack = unit.flat.rule.stack
    assert all(dim is None for _, dim in stack), "a source that holds values stacked along a dim"
    return list(array.reshape(-1, *array.shape[len(stack) :]))


def _piece_lines(piece: Piece, plan: Plan, scope: Scope) -> list[Line]:
    return target_lines(piece.leaf, plan.leading, scope)


def read_lines(piece: Piece, plan: Plan, scope: Scope) -> list[Line]:
    """Return the lines of a source as it is read: those on disk, but for the last where several elements are read as one."""
    lines = stored_lines(piece, plan, scope)
    return lines if packed(piece.leaf, scope) == 1 else [*lines[:-1], plan.lines[-1]]


def stored_lines(piece: Piece, plan: Plan, scope: Scope) -> list[Line]:
    """Return the lines of a source on disk."""
    first = [Line(dim, 1, ()) for dim in plan.leading]
    if piece.leaf is None:
        return first
    return [*first, *lines_of(piece.leaf.dims if piece.leaf.stored is None else piece.leaf.stored, scope)]


def _axis_of(dim: str | None, plan: Plan) -> int:
    dims = [line.dim for line in plan.lines]
    return dims.index(str(dim) if dim in dims else PARTS)


def _target_sizes(line: Line, part: int, plan: Plan, unit: Unit) -> list[int]:
    """Return the sizes of a dim's parts in one target."""
    sizes = plan.sizes[line.dim]
    if len(unit.targets) > 1 and line.dim == plan.parts:
        return [sizes[part]]
    return list(sizes)


def _cut_line(
    array: Bits, axis: int, line: Line, part: int, shard: Shard, plan: Plan, unit: Unit, world: World, reader: Reader,
    dtype: torch.dtype,
) -> Bits:  # fmt: skip
    scope = unit.scope(world)
    sizes = _target_sizes(line, part, plan, unit)
    if len(unit.targets) > 1 and line.dim == plan.parts:
        shard = replace(shard, axis=_of_part(shard.axis, part), units=_of_part(shard.units, part))
    if shard.axis == ("ep",):
        (size,) = sizes
        if size % world.layout.ep:
            raise IllegalLayout(f"{size} experts do not divide over {world.layout.ep} ranks")
        return np.take(array, np.array(world.expert_slots(size), dtype=np.int64), axis=axis)
    padding = shard.fill
    if padding is None and unit.leaf is not None:
        padding = unit.leaf.neutral
    fill = 0.0 if padding is None else float(str(evaluate(padding.text, scope)))
    sizes = padded_sizes(shard, [sum(sizes)] if shard.joined else sizes, scope)
    held = shares(shard, sizes, _block(line.dim, unit, world), world, scope)
    return cut_dim(array, axis, line.step, sizes, held, reader.fill(fill, dtype))


def _of_part(entries: tuple[Entry, ...], part: int) -> tuple[Entry, ...]:
    return (entries[part],) if len(entries) > 1 else entries


def _block(dim: str, unit: Unit, world: World) -> int:
    """Return the most elements of a dim that one element of any leaf of the format stands for."""
    if not has_leaf(unit.pieces[0].reading.pattern):
        return 1
    steps = [Fraction(1)]
    for leaf in world.format(unit.pieces[0].reading.format).leaves:
        steps += [line.step for line in lines_of(leaf.dims, unit.scope(world)) if line.dim == dim]
    return math.ceil(max(steps))


def _without_dim(array: Bits, shard: Shard, world: World, reader: Reader, dtype: torch.dtype) -> Bits:
    """What a leaf without a cut dim holds: the same on all ranks, or zeros on all but the first."""
    assert shard.bias is not None, f"a leaf has no dim {shard.dim!r}, and the rule does not say which ranks hold it"
    (axis,) = shard.axis
    assert axis is not None
    if shard.bias == "all" or world.coordinate(axis) == 0:
        return array
    return np.full(array.shape, reader.fill(0, dtype), dtype=array.dtype)
