"""How a leaf lies on disk and in the module: whole tensors from one grid to the other, one axis per dim in between."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from mapper.spec.model import Axis, FormatAlternative, Leaf
from mapper.testing.reference.arrays import Bits
from mapper.testing.reference.evaluate import Scope, evaluate
from mapper.testing.reference.ranks import IllegalLayout

# The sizes of a dim's parts, in order.
Sizes = Mapping[str, tuple[int, ...]]


class WrongShape(ValueError):
    """A source whose shape is not what the rule's dims say."""


@dataclass(frozen=True, slots=True)
class Line:
    """The axes of one dim in a tensor: `num_ones` axes of one, then `divisor` elements of the dim in a row of `inner` axes."""

    dim: str
    divisor: int
    inner: tuple[int, ...]
    num_ones: int = 0

    @property
    def step(self) -> Fraction:
        """How many elements of the dim one element of the tensor stands for."""
        return Fraction(self.divisor, math.prod(self.inner))

    def shape(self, sizes: Sequence[int]) -> tuple[int, ...]:
        return (*[1] * self.num_ones, sum(math.ceil(size / self.divisor) for size in sizes), *self.inner)

    def length(self, size: int) -> int:
        return math.ceil(size / self.divisor) * math.prod(self.inner)


def lines_of(axes: Sequence[Axis], scope: Scope) -> list[Line]:
    """Return one line per dim; axes of fixed size belong to the dim before them, those before all dims to the first."""
    lines: list[Line] = []
    num_ones = 0
    for axis in axes:
        if axis.dim is None and not lines:
            assert axis.size == 1, "an axis before all dims has one element"
            num_ones += 1
            continue
        if axis.dim is None:
            assert axis.size is not None
            before = lines.pop()
            lines.append(Line(before.dim, before.divisor, (*before.inner, axis.size), before.num_ones))
            continue
        divisor = 1 if axis.divisor is None else evaluate(axis.divisor.text, scope)
        assert isinstance(divisor, int), f"the divisor of {axis.dim} is {divisor!r}"
        lines.append(Line(axis.dim, divisor, (), 0 if lines else num_ones))
    return lines


def known_dims(alternative: FormatAlternative) -> set[str]:
    """Return the dims that some leaf of a format has."""
    found: set[str] = set()
    for leaf in alternative.leaves:
        pairs = () if leaf.dequantize is None else leaf.dequantize
        for axes in (leaf.dims, leaf.stored or (), *(pair.dims for pair in pairs)):
            found |= {axis.dim for axis in axes if axis.dim is not None}
    return found


def target_lines(leaf: Leaf | None, leading: Sequence[str], scope: Scope) -> list[Line]:
    """Return the lines of a tensor in the module; a bare tensor has its dims in order."""
    first = [Line(dim, 1, ()) for dim in leading]
    return first if leaf is None else [*first, *lines_of(leaf.dims, scope)]


def packed(leaf: Leaf | None, scope: Scope) -> int:
    """Return how many elements on disk a bitcast makes one of: those in the last step of the target."""
    if leaf is None or leaf.stored is None or leaf.bitcast is None:
        return 1
    stored, target = lines_of(leaf.stored, scope)[-1], lines_of(leaf.dims, scope)[-1]
    ratio = target.step / stored.step
    return int(ratio) if stored.dim == target.dim and ratio.denominator == 1 else 1


def stored_shape(lines: Sequence[Line], sizes: Sizes, joined: Mapping[str, tuple[str, ...]]) -> tuple[int, ...]:
    """Return the shape on disk; a dim that is `joined` from (outer, inner) runs over outer, then inner."""
    outer = {names[0] for names in joined.values()}
    shape: list[int] = []
    for line in lines:
        if line.dim in outer and line.dim not in joined:
            continue
        own = line.shape(sizes[line.dim])
        if line.dim in joined:
            (rows,) = sizes[joined[line.dim][0]]
            own = (rows * own[0], *own[1:])
        shape += own
    return tuple(shape)


def one_axis_per_dim(
    array: Bits, lines: Sequence[Line], sizes: Sizes, joined: Mapping[str, tuple[str, ...]]
) -> tuple[Bits, list[Line]]:
    """Return a stored tensor with exactly one axis per dim, in the order of the lines that are returned with it."""
    expected = stored_shape(lines, sizes, joined)
    if {array.shape, expected} == {(), (1,)}:  # one element is a scalar, or a vector of one
        array = array.reshape(expected)
    if array.shape != expected:
        raise WrongShape(f"the shape is {array.shape}, expected {expected}")
    outer = {names[0] for names in joined.values()}
    present = [line for line in lines if line.dim not in outer or line.dim in joined]
    shape: list[int] = []
    order: list[Line] = []
    for line in present:
        if line.dim in joined:
            name = joined[line.dim][0]
            shape.append(sizes[name][0])
            order.append(Line(name, 1, ()))
        shape.append(sum(line.length(size) for size in sizes[line.dim]))
        order.append(line)
    return array.reshape(shape), order


def require_finer(stored: Sequence[Line], target: Sequence[Line]) -> None:
    """Raise IllegalLayout where an element of the target lies over two stored ones."""
    steps = {line.dim: line.step for line in stored}
    for line in target:
        if line.dim in steps and (steps[line.dim] / line.step).denominator > 1:
            raise IllegalLayout(f"{line.dim} is stored in steps of {steps[line.dim]}, which steps of {line.step} do not fill")


def to_target_grid(array: Bits, stored: Sequence[Line], target: Sequence[Line], sizes: Sizes) -> Bits:
    """Return the array with its dims in the target's order and on the target's grid, part by part."""
    places = [[line.dim for line in stored].index(line.dim) for line in target]
    assert len(stored) == len(target), f"stored dims {stored} and target dims {target} differ"
    array = array.transpose(places)
    for number, line in enumerate(target):
        before = stored[places[number]]
        if before.step == line.step:
            continue
        chosen: list[int] = []
        start = 0
        for size in sizes[line.dim]:
            chosen += [start + math.floor(element * line.step / before.step) for element in range(line.length(size))]
            start += before.length(size)
        array = np.take(array, np.array(chosen, dtype=np.int64), axis=number)
    return array
