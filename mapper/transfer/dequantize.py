"""Values times scales: what a quantised tensor stands for, computed in float32 for the box that is read."""

from __future__ import annotations

import torch

from mapper.plan.local import Scaling
from mapper.regions import Box

# The FP4 values by code (E2M1): sign, two exponent bits, one mantissa bit.
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
E8M0_BIAS = 127


def dequantize(values: torch.Tensor, box: Box, scales: torch.Tensor, scaling: Scaling) -> torch.Tensor:
    """Return float32 values for `box` of the stored ones, in the order of the target's axes.

    `values` is that box, `scales` the box that `scaling` gives for it. Bytes (uint8 or int8) hold two FP4 codes each along the
    axis with two logical elements per value, the even one in the low bits; other values are taken as they are. A scale in
    uint8 is a power of two with E8M0's bias.
    """
    divisors = scaling.value_divisors
    packed = next((axis for axis, divisor in enumerate(divisors) if divisor == 2), None)
    starts = [start for start, _ in box]
    if values.dtype == torch.uint8 or (values.dtype == torch.int8 and packed is not None):
        assert packed is not None, "FP4 codes are packed two to a byte"
        values = _unpacked(values.view(torch.uint8), packed)
        starts[packed] *= 2
        divisors = (*divisors[:packed], 1, *divisors[packed + 1 :])
    result = values.float()
    factors = torch.exp2(scales.float() - E8M0_BIAS) if scales.dtype == torch.uint8 else scales.float()
    first = [start for start, _ in scaling.box(box)]
    for axis, size in enumerate(result.shape):
        logical = (torch.arange(starts[axis], starts[axis] + size) * divisors[axis]) // scaling.scale_divisors[axis]
        factors = factors.index_select(axis, (logical - first[axis]).to(factors.device))
    return result * factors


def _unpacked(codes: torch.Tensor, axis: int) -> torch.Tensor:
    """Return the FP4 values of packed codes; the axis becomes twice as long."""
    table = torch.tensor(FP4_VALUES, device=codes.device)
    pairs = torch.stack([table[(codes & 15).long()], table[(codes >> 4).long()]], dim=axis + 1)
    return pairs.flatten(axis, axis + 1)
