"""The operations of finalize steps on whole tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch

from mapper.diagnostics import MapperError, finding
from mapper.finalize.functions import Function
from mapper.plan.derived import DerivedStep, Operation
from mapper.plan.family import DiskLayout
from mapper.plan.local import Scaling
from mapper.regions import whole
from mapper.transfer.dequantize import dequantize


def derive(step: DerivedStep, inputs: Sequence[torch.Tensor], functions: dict[str, Function]) -> torch.Tensor:
    """Return what the step's operations make of its inputs; raises MapperError M631 where a size does not fit."""
    tensors = list(inputs)
    for operation in step.operations:
        if operation.name == "call":
            tensors = [functions[operation.function](*tensors, **dict(operation.sizes))]
            if not isinstance(tensors[0], torch.Tensor):
                raise _unfit(step, f"{operation.function!r} returned {type(tensors[0]).__name__}, expected a tensor")
        elif operation.name == "dequantize":
            tensors[:2] = [_dequantized(step, tensors[0], tensors[1], operation.blocks)]
        else:
            tensors[0] = _ONE[operation.name](step, tensors[0], operation)
    (result,) = tensors
    return result


def _reshaped(step: DerivedStep, tensor: torch.Tensor, operation: Operation) -> torch.Tensor:
    """Split the axes into factors, sum over those that the right side lacks, reorder and merge the rest."""
    formula = operation.formula
    assert formula is not None
    factors = [factor for axis in formula.left for factor in axis]
    sizes = _factor_sizes(step, tensor, operation)
    split = tensor.reshape([sizes[factor] for factor in factors])
    kept = [factor for axis in formula.right for factor in axis]
    lost = [position for position, factor in enumerate(factors) if factor not in kept]
    if lost:
        split = split.sum(dim=lost, dtype=tensor.dtype)
    left = [factor for factor in factors if factor in kept]
    ordered = split.permute([left.index(factor) for factor in kept])
    return ordered.reshape([prod(sizes[factor] for factor in axis) for axis in formula.right])


def _factor_sizes(step: DerivedStep, tensor: torch.Tensor, operation: Operation) -> dict[str, int]:
    formula = operation.formula
    assert formula is not None
    sizes = {name: size for name, size in operation.sizes if isinstance(size, int)}
    if len(formula.left) != tensor.dim():
        raise _unfit(step, f"the formula has {len(formula.left)} axes, and the tensor the shape {list(tensor.shape)}")
    for axis, size in zip(formula.left, tensor.shape, strict=True):
        sizes |= {factor: int(factor) for factor in axis if factor.isdigit()}
        known = prod(sizes[factor] for factor in axis if factor in sizes)
        free = [factor for factor in axis if factor not in sizes]
        if len(free) > 1:
            raise _unfit(step, f"the sizes of {' and '.join(map(repr, free))} are both open")
        if size % known or (not free and size != known):
            raise _unfit(step, f"the axis ({' '.join(axis)}) has {size} elements, expected a multiple of {known}")
        sizes |= dict.fromkeys(free, size // known)
    return sizes


def _taken(step: DerivedStep, tensor: torch.Tensor, operation: Operation) -> torch.Tensor:
    for axis, start, stop in operation.ranges:
        if not start < stop <= tensor.shape[axis]:
            raise _unfit(step, f"the range {start}:{stop} is not in an axis of {tensor.shape[axis]} elements")
        tensor = tensor.narrow(axis, start, stop - start)
    return tensor


def _cast(step: DerivedStep, tensor: torch.Tensor, operation: Operation) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, operation.dtype)
    return tensor.to(dtype)


_ONE: dict[str, Callable[[DerivedStep, torch.Tensor, Operation], torch.Tensor]] = {
    "view": _reshaped,
    "sum": _reshaped,
    "take": _taken,
    "cast": _cast,
}


def _dequantized(step: DerivedStep, values: torch.Tensor, scales: torch.Tensor, blocks: tuple[int, ...]) -> torch.Tensor:
    grid = [-(-size // block) for size, block in zip(values.shape, blocks, strict=False)]
    if len(blocks) != values.dim() or list(scales.shape) != grid:
        found = f"values {list(values.shape)}, scales {list(scales.shape)}"
        raise _unfit(step, f"{found} and blocks {list(blocks)} do not belong together")
    order = tuple(range(values.dim()))
    disk = DiskLayout(tuple(scales.shape), tuple(scales.shape), order, blocks)
    scaling = Scaling(disk, (1,) * values.dim(), blocks)
    return dequantize(values, whole(values.shape), scales, scaling)


def _unfit(step: DerivedStep, problem: str) -> MapperError:
    return MapperError(
        [finding("M631", place=step.place, subject=step.output, step=step.id, output=step.output, problem=problem)]
    )
