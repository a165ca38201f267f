"""Values for tensors: every element its own, as far as the dtype has enough of them, and never a number that is none."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from mapper.testing.reference.arrays import Bits, bits_of, tensor_of

SENTINEL_BYTE = 0x7F


def sentinel(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor in which every byte is `SENTINEL_BYTE`; no element that `unique_values` gives is like that."""
    raw = torch.full((math.prod(shape) * dtype.itemsize,), SENTINEL_BYTE, dtype=torch.uint8)
    return raw.view(dtype).reshape(tuple(shape))


def unique_values(shape: Sequence[int], dtype: torch.dtype, start: int) -> torch.Tensor:
    """Return a tensor whose elements differ from each other, and from those of tensors with another `start`.

    Element i is number `start` + i of the dtype's values. Where there are fewer values than elements, the numbers go round
    by a prime, in a stride of the tensor's own, so that neither rows nor tensors repeat each other.
    """
    count = math.prod(shape)
    places = np.arange(count, dtype=np.int64)
    if dtype.itemsize >= 4:
        numbers = torch.from_numpy(places + start + 1)
        return numbers.to(dtype).reshape(tuple(shape))
    table = _TABLES[dtype]
    stride = 1 + start % 89
    return tensor_of(table[(start + places * stride) % len(table)].reshape(tuple(shape)), dtype)


def _finite_bits(dtype: torch.dtype) -> Bits:
    """Return the bits of a prime number of values of a small dtype, without the sentinel, infinities and NaN."""
    unsigned = np.uint8 if dtype.itemsize == 1 else np.uint16
    every = tensor_of(np.arange(1 << 8 * dtype.itemsize).astype(unsigned), dtype)
    floats = every.float()
    sentinel_bits = int(bits_of(sentinel((1,), dtype))[0])
    bits = bits_of(every)[(torch.isfinite(floats)).numpy()]
    bits = bits[bits != sentinel_bits]
    size = len(bits)
    while any(size % divisor == 0 for divisor in range(2, math.isqrt(size) + 1)):
        size -= 1
    chosen: Bits = bits[:size]
    return chosen


_TABLES = {
    dtype: _finite_bits(dtype)
    for dtype in (
        torch.bfloat16,
        torch.float16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float8_e8m0fnu,
        torch.uint8,
        torch.int8,
    )
}
