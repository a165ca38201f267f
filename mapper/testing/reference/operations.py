"""The `do` of a rule on whole arrays: every element looked up by its coordinates, every number computed on its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from mapper.spec.model import Leaf, Rule, ValueOperation
from mapper.testing.reference.arrays import Bits, bits_of, tensor_of
from mapper.testing.reference.evaluate import Misfit, Scope, evaluate, integer
from mapper.testing.reference.grids import Line, Sizes

PART = "part"
Coordinates = frozenset[tuple[str, int]]


def operations_of(rule: Rule, leaf: Leaf | None) -> list[ValueOperation]:
    """Return what is done to a leaf, in order."""
    return [*rule.do.get("", ()), *(rule.do.get(leaf.name, ()) if leaf is not None else ())]


def fill_of(rule: Rule, leaf: Leaf | None, scope: Scope) -> float | None:
    """Return the number that a target holds which has no source, or None."""
    for operation in operations_of(rule, leaf):
        if operation.name == "fill":
            assert operation.value is not None
            return float(str(evaluate(operation.value.text, scope)))
    return None


def source_sizes(rule: Rule, operations: Sequence[ValueOperation], sizes: Sizes, scope: Scope) -> dict[str, tuple[int, ...]]:
    """Return the sizes of the dims in the sources: less than in the target where elements are repeated."""
    found = dict(sizes)
    for operation in operations:
        if operation.name == "repeat" and operation.formula is not None:
            for number, dim in enumerate(rule.dims or {}):
                (size,) = found[dim] if len(found[dim]) == 1 else (sum(found[dim]),)
                factors = _sizes(operation, number, (size,), scope)[0]
                for name in set(operation.formula.right[number]) - set(operation.formula.left[number]):
                    found[dim] = (found[dim][0] // factors[name],)
    return found


def rearranged(array: Bits, operation: ValueOperation, rule: Rule, lines: Sequence[Line], sizes: Sizes, scope: Scope) -> Bits:
    """Return the array with the elements of every dim where the operation's formula puts them."""
    assert operation.formula is not None
    for number, dim in enumerate(rule.dims or {}):
        axes = [axis for axis, line in enumerate(lines) if line.dim == dim]
        left, right = operation.formula.left[number], operation.formula.right[number]
        if not axes or left == right:
            continue
        (axis,) = axes
        step = lines[axis].step
        assert step.denominator == 1, "a view of an axis with several elements to each of the dim's"
        places = _places(operation, number, sizes[dim], scope)
        chosen = places[:: int(step)] // int(step)
        array = np.take(array, chosen, axis=axis)
    return array


def computed(array: Bits, operation: ValueOperation, lines: Sequence[Line], scope: Scope, dtype: torch.dtype) -> Bits:
    """Return the bits of the array's numbers after one operation on their values."""
    numbers = tensor_of(array, dtype).to(torch.float64 if dtype == torch.float64 else torch.float32)
    value = 0.0 if operation.value is None else float(str(evaluate(operation.value.text, scope)))
    match operation.name:
        case "neg_exp":
            numbers = numbers.exp().neg()
        case "add":
            numbers = numbers.add(value)
        case "multiply":
            numbers = numbers.mul(value)
        case "subtract_mean":
            axis = [line.dim for line in lines].index(operation.dim)
            numbers = numbers.sub(numbers.mean(axis, keepdim=True))
        case other:
            raise NotImplementedError(f"the operation {other!r}")
    return bits_of(numbers.to(dtype))


def _places(operation: ValueOperation, number: int, parts: Sequence[int], scope: Scope) -> Bits:
    """Return, for every element of the target's dim, which element of the sources' it is."""
    assert operation.formula is not None
    left, right = operation.formula.left[number], operation.formula.right[number]
    if PART in left:
        sizes = _sizes(operation, number, parts, scope)
        where = {at: place for place, at in enumerate(_coordinates(left, sizes))}
        return np.array([where[at] for at in _coordinates(right, sizes)])
    found: list[int] = []
    start = 0
    for part, size in enumerate(parts if operation.parts else [sum(parts)]):
        if operation.parts and part + 1 not in operation.parts:
            found += range(start, start + size)
        else:
            sizes = _sizes(operation, number, (size,), scope, part=part)
            where = {at: start + place for place, at in enumerate(_coordinates(left, sizes))}
            known = set(left)
            found += [where[frozenset(each for each in at if each[0] in known)] for at in _coordinates(right, sizes)]
        start += size
    return np.array(found)


def _coordinates(
    names: Sequence[str], sizes: Sequence[Mapping[str, int]], at: Coordinates = frozenset()
) -> Iterator[Coordinates]:
    """Yield the coordinates of every element in order, outermost factor first."""
    if not names:
        yield at
        return
    name = names[0]
    part = dict(at).get(PART, 0)
    for place in range(len(sizes) if name == PART else sizes[part][name]):
        yield from _coordinates(names[1:], sizes, at | {(name, place)})


def _sizes(
    operation: ValueOperation, number: int, parts: Sequence[int], scope: Scope, *, part: int = 0
) -> list[dict[str, int]]:
    """Return the sizes of the factors of one dim within each of `parts`; the one that is not given follows."""
    assert operation.formula is not None
    names = {*operation.formula.left[number], *operation.formula.right[number]} - {PART}
    found = []
    for at, total in enumerate(parts, start=part):
        sizes: dict[str, int] = {}
        known = 1
        for name in names:
            given = operation.sizes.get(name)
            if name.isdigit():
                sizes[name] = int(name)
            elif given is not None:
                sizes[name] = integer((given[at] if len(given) > 1 else given[0]).text, scope)
            known *= sizes.get(name, 1)
        for name in names - sizes.keys():
            sizes[name] = total // known
            known *= sizes[name]
        if known != total:
            raise Misfit(f"{total} elements are not {sizes}")
        found.append(sizes)
    return found
