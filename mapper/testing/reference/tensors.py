"""What is read: the bits of a source as its target holds them, or, with the same steps, numbers that say where bits come from.

A load is run over values and over labels alike. In a run over labels every element of a source is the source's number,
so that what arrives in a target tells which sources it was made of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mapper.spec.model import Leaf
from mapper.testing.reference.arrays import UNSIGNED, Bits, bits_of, bits_of_value, dtype_of, tensor_of
from mapper.testing.reference.evaluate import Scope, evaluate
from mapper.testing.reference.grids import Line, Sizes, lines_of, one_axis_per_dim, packed, to_target_grid
from mapper.testing.reference.rules import FlatRule

PADDING = -1
# The sixteen values of a 4-bit float with two exponent bits and one of mantissa (OCP MX, E2M1).
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True, slots=True)
class Values:
    """Reads the bits of sources."""

    tensors: Mapping[str, torch.Tensor]

    def read(self, name: str, flat: FlatRule, leaf: Leaf | None, scope: Scope) -> Bits:
        return bits_of(converted(self.tensors[name], flat, leaf, scope))

    def dequantized(
        self, names: Sequence[str], leaf: Leaf, leading: Sequence[Line], scope: Scope, sizes: Sizes
    ) -> tuple[Bits, list[Line]]:
        assert leaf.dequantize is not None
        assert leaf.cast is not None
        logical: list[torch.Tensor] = []
        lines: list[Line] = []
        for name, half in zip(names, leaf.dequantize, strict=True):
            tensor = self.tensors[name]
            bits, lines = one_axis_per_dim(bits_of(tensor), [*leading, *lines_of(half.dims, scope)], sizes, {})
            whole = [Line(line.dim, 1, ()) for line in lines]
            is_packed = tensor.dtype == torch.int8 and any(line.step == 2 for line in lines)
            if not logical and (tensor.dtype == torch.uint8 or is_packed):
                numbers = _unpacked(bits)
            else:
                bits = to_target_grid(bits, lines, whole, sizes)
                numbers = tensor_of(bits, tensor.dtype).float()
                if tensor.dtype == torch.uint8:  # the exponent alone
                    numbers = torch.exp2(numbers - 127)
            logical.append(numbers)
            lines = whole
        dtype = dtype_of(str(evaluate(leaf.cast.text, scope)))
        return bits_of((logical[0] * logical[1]).to(dtype)), lines

    def fill(self, value: float, dtype: torch.dtype) -> int:
        return 0 if value == 0 else bits_of_value(value, dtype)


@dataclass(frozen=True, slots=True)
class Labels:
    """Reads the same sources as numbers: of every element, the place of its sources' names in `names`."""

    tensors: Mapping[str, torch.Tensor]
    names: list[tuple[str, ...]]

    def read(self, name: str, flat: FlatRule, leaf: Leaf | None, scope: Scope) -> Bits:
        shape = tuple(self.tensors[name].shape)
        num_packed = packed(leaf, scope)
        shape = shape if num_packed == 1 else (*shape[:-1], shape[-1] // num_packed)
        return np.full(shape, self._number((name,)), dtype=np.int64)

    def dequantized(
        self, names: Sequence[str], leaf: Leaf, leading: Sequence[Line], scope: Scope, sizes: Sizes
    ) -> tuple[Bits, list[Line]]:
        assert leaf.dequantize is not None
        whole = [*leading, *(Line(line.dim, 1, ()) for line in lines_of(leaf.dequantize[0].dims, scope))]
        shape = tuple(sum(sizes[line.dim]) for line in whole)
        return np.full(shape, self._number(tuple(names)), dtype=np.int64), whole

    def fill(self, value: float, dtype: torch.dtype) -> int:
        return PADDING

    def _number(self, names: tuple[str, ...]) -> int:
        self.names.append(names)
        return len(self.names) - 1


Reader = Values | Labels


def converted(tensor: torch.Tensor, flat: FlatRule, leaf: Leaf | None, scope: Scope) -> torch.Tensor:
    """Return a source in the dtype of its target; what the rule says goes before its leaf, and null means no change."""
    cast = flat.rule.cast or (None if leaf is None else leaf.cast)
    bitcast = flat.rule.bitcast or (None if leaf is None else leaf.bitcast)
    cast_to = None if cast is None else evaluate(cast.text, scope)
    if cast_to is not None:
        return tensor.to(dtype_of(str(cast_to)))
    bitcast_to = None if bitcast is None else evaluate(bitcast.text, scope)
    if bitcast_to is not None:
        dtype, num_packed = dtype_of(str(bitcast_to)), packed(leaf, scope)
        assert dtype.itemsize == tensor.dtype.itemsize * num_packed, "a bitcast to another width"
        rows = bits_of(tensor)
        if num_packed > 1:
            rows = np.ascontiguousarray(rows).view(UNSIGNED[dtype.itemsize])
        tensor = tensor_of(rows, dtype)
    return tensor


def _unpacked(packed: Bits) -> torch.Tensor:
    """Return the numbers of two 4-bit floats per byte, the low half first."""
    halves = np.stack([packed & 15, packed >> 4], axis=-1).astype(np.int64)
    return torch.tensor(FP4_VALUES)[torch.from_numpy(halves)].reshape(*packed.shape[:-1], -1)
