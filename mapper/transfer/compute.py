"""Values as a rule's `do` makes them from stored ones, and whether a cast can hold them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mapper.diagnostics import Diagnostic, finding
from mapper.plan.family import ValueOp
from mapper.plan.local import Reading


def computed(values: torch.Tensor, ops: Sequence[ValueOp], dtype: torch.dtype) -> torch.Tensor:
    """Return the values after all operations, each computed in float32 (or a wider `dtype`) and rounded to `dtype`.

    Rounding after each is what an engine does that works on its parameters; for one operation on float32 it is none.
    """
    result = values.to(dtype)
    for op in ops:
        wide = result.double() if dtype == torch.float64 else result.float()
        result = _applied(wide, op).to(dtype)
    return result


def _applied(wide: torch.Tensor, op: ValueOp) -> torch.Tensor:
    match op.name:
        case "neg_exp":
            return -torch.exp(wide)
        case "add":
            return wide + op.value
        case "multiply":
            return wide * op.value
        case "subtract_mean":
            return wide - wide.contiguous().mean(dim=op.axis, keepdim=True)  # the sum depends on the order in memory


def undone(
    values: torch.Tensor, ops: Sequence[ValueOp], stored: torch.dtype
) -> tuple[torch.Tensor, tuple[tuple[int, ...], float] | None]:
    """Return the values of `stored` that the operations make `values` of, and where that is not known: (place, value).

    Every operation rises or falls all the way, so that a value is the only one where both of its neighbours give another.
    """
    wide = values.double()
    for op in reversed(ops):
        wide = _inverse(wide, op)
    found = wide.to(stored)
    is_one = _gives(found, values, ops)
    for step in (-1, 1):
        near = _neighbour(found, step)
        # The inverse is rounded: where it is off by one, its neighbour is the value.
        better = ~is_one & _gives(near, values, ops)
        found, is_one = torch.where(better, near, found), is_one | better
    for step in (-1, 1):
        is_one = is_one & ~_gives(_neighbour(found, step), values, ops)
    if bool(is_one.all()):
        return found, None
    where = tuple(int(each) for each in (~is_one).nonzero()[0])
    return found, (where, float(values[where]))


def _inverse(wide: torch.Tensor, op: ValueOp) -> torch.Tensor:
    match op.name:
        case "neg_exp":
            return torch.log(-wide)
        case "add":
            return wide - op.value
        case "multiply":
            return wide / op.value
        case "subtract_mean":
            raise AssertionError("a mean has no inverse")


def _gives(stored: torch.Tensor, values: torch.Tensor, ops: Sequence[ValueOp]) -> torch.Tensor:
    """Return where the operations make exactly `values`, bit for bit, of `stored`."""
    return _as_numbers(computed(stored, ops, values.dtype)) == _as_numbers(values.contiguous())


def _neighbour(values: torch.Tensor, step: int) -> torch.Tensor:
    """Return the next larger or smaller values of the dtype; zero and minus zero are two, one below the other."""
    bits = _as_numbers(values.contiguous())
    lowest = torch.iinfo(bits.dtype).min
    rank = torch.where(bits >= 0, bits, lowest - bits - 1)
    rank = rank + step
    return torch.where(rank >= 0, rank, lowest - rank - 1).view(values.dtype)


def _as_numbers(values: torch.Tensor) -> torch.Tensor:
    return values.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()])


def dtype_after(stored: torch.dtype, reading: Reading, cast_to: torch.dtype) -> torch.dtype:
    """Return the dtype that values are computed in: that of the cast, where there is one."""
    return cast_to if reading.conversion is not None and reading.conversion.by == "cast" else stored


def cast_fault(name: str, values: torch.Tensor, dtype: torch.dtype) -> Diagnostic | None:
    """Return M613 where a whole number among `values` does not fit `dtype`."""
    if not values.numel():
        return None
    limits = torch.iinfo(dtype)
    for value in (int(values.min()), int(values.max())):
        if not limits.min <= value <= limits.max:
            to = str(dtype).removeprefix("torch.")
            return finding("M613", subject=name, name=name, value=value, dtype=to, least=limits.min, most=limits.max)
    return None
