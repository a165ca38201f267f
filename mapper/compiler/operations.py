"""The operations of a rule at one set of index values: views of its axes, and what is computed of values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod

from mapper.diagnostics import Diagnostic, MapperError, Place, finding
from mapper.expressions import Expression, Value
from mapper.plan.family import Axis, ValueOp
from mapper.plan.weave import AxisView, Strand
from mapper.regions import Box, whole
from mapper.spec.model import Rule, ValueOperation
from mapper.spec.operations import PART

SLOT = ""
"""The factor beside `part` that is as long as a part says; each part has one where the view names none."""

Evaluate = Callable[[Expression], Value]


def operations_of(rule: Rule, leaf: str) -> tuple[ValueOperation, ...]:
    """Return the operations that a rule does to a leaf, in order."""
    return (*rule.do.get("", ()), *(rule.do.get(leaf, ()) if leaf else ()))


def viewed(axes: tuple[Axis, ...], operations: Sequence[ValueOperation], rule: Rule, evaluate: Evaluate) -> tuple[Axis, ...]:
    """Return the axes of a leaf with the views of its operations; an axis that the leaf lacks is not viewed."""
    for operation in operations:
        if operation.formula is not None:
            for position, dim in enumerate(rule.dims or {}):
                left, right = operation.formula.left[position], operation.formula.right[position]
                if left != right or operation.name == "repeat":
                    axes = tuple(
                        _Viewer(axis, operation, left, right, evaluate).axis() if axis.dim == dim else axis for axis in axes
                    )
    return axes


def value_ops(axes: Sequence[Axis] | None, operations: Sequence[ValueOperation], evaluate: Evaluate) -> tuple[ValueOp, ...]:
    """Return what is computed of a leaf's values, in order."""
    found = []
    for operation in operations:
        if operation.name in ("add", "multiply"):
            found.append(ValueOp(operation.name, _number(operation, evaluate)))
        elif operation.name == "neg_exp":
            found.append(ValueOp("neg_exp"))
        elif operation.name == "subtract_mean":
            axis = next((position for position, each in enumerate(axes or ()) if each.dim == operation.dim), None)
            if axis is None:
                raise MapperError([_refused(operation, f"the leaf has no dim {operation.dim!r}")])
            found.append(ValueOp("subtract_mean", axis=axis))
    return tuple(found)


def fill_of(operations: Sequence[ValueOperation], evaluate: Evaluate) -> float | None:
    """Return the number that the target holds without a source, or None."""
    return next((_number(each, evaluate) for each in operations if each.name == "fill"), None)


def _number(operation: ValueOperation, evaluate: Evaluate) -> float:
    assert operation.value is not None
    return require_number(evaluate(operation.value), f"`{operation.name}`", operation.place)


def require_number(value: Value, what: str, place: Place) -> float:
    """Return the value as a number; raises MapperError M304."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise MapperError([finding("M304", place=place, what=what, found=value, expected="a number")])
    return value


def _refused(operation: ValueOperation, problem: str) -> Diagnostic:
    return finding("M342", place=operation.place, op=operation.text, problem=problem)


@dataclass(frozen=True, slots=True)
class _Side:
    """One side of a strand: where its region starts, the sizes of its factors by name, and the range taken of each."""

    start: int
    sizes: Mapping[str, int]
    box: Mapping[str, tuple[int, int]]


class _Viewer:
    """Works out the view of one axis by one operation."""

    def __init__(
        self, axis: Axis, operation: ValueOperation, left: Sequence[str], right: Sequence[str], evaluate: Evaluate
    ) -> None:
        self.given = axis
        self.operation = operation
        self.left, self.right = list(left), list(right)
        self.evaluate = evaluate

    def axis(self) -> Axis:
        """Return the axis with its view; raises MapperError where the sizes do not fit."""
        axis, operation = self.given, self.operation
        if axis.view is not None and not (operation.parts and axis.view.by_part == axis.view.joined):
            raise self._error("an operation before it views the same dim")
        if any(size % axis.divisor for size in axis.parts) and axis.divisor > 1:
            raise self._error(f"a part ends inside a block of {axis.divisor}")
        repeated = [name for name in self.right if name not in self.left]
        if repeated and len(axis.parts) > 1:
            raise self._error("only a dim without parts is repeated")
        if PART in self.left:
            strands = self._strands_of_parts()
            by_part = strands if self.left[0] == PART else ()
            return self._with(strands, by_part, axis.parts)
        if operation.parts:
            strands = self._strands_within_parts()
            return self._with(strands, strands, axis.parts)
        sizes = self._sizes(sum(axis.parts), 0)
        source = sum(axis.parts) // prod(sizes[name] for name in repeated)
        joined = (self._strand(None, _Side(0, sizes, {}), _Side(0, sizes, {})),)
        if len(axis.parts) == 1:
            return self._with(joined, joined, (source,))
        return self._with(joined, tuple(self._interleaved(sizes)), axis.parts)

    def _with(self, joined: tuple[Strand, ...], by_part: tuple[Strand, ...], source_parts: tuple[int, ...]) -> Axis:
        formula = self.operation.formula
        assert formula is not None
        return replace(self.given, view=AxisView(joined, by_part, source_parts, formula.text))

    def _strands_within_parts(self) -> tuple[Strand, ...]:
        """Return a strand for each part: viewed on its own where it is listed, else as it was."""
        axis = self.given
        known = axis.view.joined if axis.view is not None else [self._same(part) for part in range(len(axis.parts))]
        found = list(known)
        for number in self.operation.parts:
            if number > len(axis.parts):
                raise self._error(f"there is no part {number}")
            part = number - 1
            if not _is_same(found[part]):
                raise self._error("an operation before it views the same part")
            sizes = self._sizes(axis.parts[part], part)
            side = _Side(self._offset(part), sizes, {})
            found[part] = self._strand(part, side, side)
        return tuple(found)

    def _strands_of_parts(self) -> tuple[Strand, ...]:
        """Return a strand for each part, of which at least one side holds them end to end."""
        axis = self.given
        slot = next((name for name, sizes in self.operation.sizes.items() if len(sizes) > 1), SLOT)
        if slot == SLOT:
            self.left.insert(self.left.index(PART) + 1, SLOT)
            self.right.insert(self.right.index(PART) + 1, SLOT)
        for names in (self.left, self.right):
            if slot not in names or (names[0] != PART and names.index(slot) != names.index(PART) + 1):
                raise self._error(f"{PART!r} stands first, or directly before {slot!r}, which is as long as each part says")
        if PART not in (self.left[0], self.right[0]):
            raise self._error(f"{PART!r} is first on one side: there the parts lie end to end")
        listed = [self._sizes(size, part) for part, size in enumerate(axis.parts)]
        slots = [sizes[slot] for sizes in listed]
        starts = [0, *accumulate(slots)]
        strands = []
        for part, sizes in enumerate(listed):
            if any(sizes[name] != listed[0][name] for name in sizes if name != slot):
                raise self._error(f"factors other than {slot or PART!r} are as long in every part")
            merged = {**sizes, slot: sum(slots)}
            box = {slot: (starts[part], starts[part] + sizes[slot])}
            apart, together = _Side(self._offset(part), sizes, {}), _Side(0, merged, box)
            is_own = self.left[0] == PART
            strand = self._strand(
                part if is_own else None, apart if is_own else together, apart if self.right[0] == PART else together
            )
            strands.append(strand)
        return tuple(strands)

    def _interleaved(self, sizes: Mapping[str, int]) -> Iterator[Strand]:
        """Yield a strand for each part with a source of its own, where parts are whole steps of the first factor."""
        first = self.left[0]
        inner = prod(sizes[name] for name in self.left[1:])
        if self.right[0] == first or any(size % inner for size in self.given.parts):
            return
        for part, size in enumerate(self.given.parts):
            before = sum(self.given.parts[:part]) // inner
            box = {first: (before, before + size // inner)}
            yield self._strand(part, _Side(self._offset(part), {**sizes, first: size // inner}, {}), _Side(0, sizes, box))

    def _same(self, part: int) -> Strand:
        size, start = self.given.parts[part] // self.given.divisor, self._offset(part)
        return Strand(part, start, 0, (size,), (0,), ((0, size),), start, (size,), ((0, size),))

    def _strand(self, part: int | None, source: _Side, target: _Side) -> Strand:
        """Return the strand between two sides, in elements of the axis's grid."""
        divisor = self.given.divisor
        left = [name for name in self.left if name != PART]
        right = [name for name in self.right if name != PART]
        if divisor > 1 and (
            left[-1] != right[-1] or source.sizes[left[-1]] % divisor or left[-1] in source.box or left[-1] in target.box
        ):
            raise self._error(f"it moves elements within a block of {divisor}; the last factor has to be whole blocks")
        repeated = [name for name in right if name not in left]
        source_sizes = [source.sizes[name] for name in left] + [1] * len(repeated)
        target_sizes = [target.sizes[name] for name in right]
        if divisor > 1:
            source_sizes[len(left) - 1] //= divisor
            target_sizes[-1] //= divisor
        in_source = [*left, *repeated]
        order = tuple(in_source.index(name) for name in right)
        box: Box = tuple(source.box.get(name, (0, source_sizes[at])) for name, at in zip(right, order, strict=True))
        full = whole(target_sizes)
        target_box: Box = tuple(target.box.get(name, full[at]) for at, name in enumerate(right))
        own = 0 if part is not None else source.start
        return Strand(part, source.start, own, tuple(source_sizes), order, box, target.start, tuple(target_sizes), target_box)

    def _sizes(self, total: int, part: int) -> dict[str, int]:
        """Return the size of each factor but `part` within `total` elements; the one that is not given follows."""
        sizes: dict[str, int] = {}
        open_: list[str] = []
        names = dict.fromkeys(name for name in (*self.left, *self.right) if name != PART)
        for name in names:
            listed = self.operation.sizes.get(name)
            if name == SLOT:
                sizes[name] = 1
            elif name.isdigit():
                sizes[name] = int(name)
            elif listed is None:
                open_.append(name)
            else:
                if len(listed) not in (1, len(self.given.parts)):
                    raise self._error(f"{name!r} has {len(listed)} sizes, and the dim {len(self.given.parts)} parts")
                value = self.evaluate(listed[part] if len(listed) > 1 else listed[0])
                if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                    raise self._error(f"the size of {name!r} is {value!r}, expected a whole number of at least 1")
                sizes[name] = value
        known = prod(sizes.values())
        if len(open_) > 1:
            raise self._error(f"the sizes of {' and '.join(map(repr, open_))} are not given, and only one follows")
        if open_ and total % known == 0:
            sizes[open_[0]] = total // known
        elif open_ or known != total:
            given = " * ".join(f"{name} {size}" for name, size in sizes.items() if name != SLOT)
            of = f"part {part + 1} has" if len(self.given.parts) > 1 else "the dim has"
            raise self._error(f"{of} {total} elements, which {given} {'does not divide' if open_ else 'is not'}")
        return sizes

    def _offset(self, part: int) -> int:
        return sum(self.given.parts[:part]) // self.given.divisor

    def _error(self, problem: str) -> MapperError:
        formula = self.operation.formula
        assert formula is not None
        place = self.operation.place
        return MapperError([finding("M340", place=place, formula=formula.text, dim=self.given.dim, problem=problem)])


def _is_same(strand: Strand) -> bool:
    return len(strand.sizes) == 1
