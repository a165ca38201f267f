"""A checksum that adds up over the parts of a tensor: the sum of every element's bits times a number made of its position."""

from __future__ import annotations

from math import prod

import torch

from mapper.transfer.copy import as_bits

CHUNK = 1 << 18
_MASK = (1 << 64) - 1
# The constants of SplitMix64 (Steele, Lea and Flood 2014), a bijection of 64-bit numbers that leaves no pattern.
_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def digest_tensor(tensor: torch.Tensor) -> int:
    """Return the checksum of a whole tensor, a number of 64 bits."""
    return digest_part(tensor, torch.empty(tensor.shape, device="meta"))


def digest_part(values: torch.Tensor, places: torch.Tensor) -> int:
    """Return the checksum of a part; `places` is the same view of a tensor with the shape of the whole, on meta.

    Modulo 2**64, the checksums of parts that tile a tensor add up to that of the tensor. Two tensors that differ in one
    element always differ in their checksums.
    """
    total = 0
    values = values.detach()
    sizes, strides, offset = list(places.shape), list(places.stride()), int(places.storage_offset())
    if not sizes:
        sizes, strides, values = [1], [1], values.reshape(1)
    inner = torch.zeros([1] * len(sizes), dtype=torch.int64, device=values.device)
    for dim in range(1, len(sizes)):
        steps = torch.arange(sizes[dim], device=values.device) * strides[dim]
        inner = inner + steps.view([-1 if each == dim else 1 for each in range(len(sizes))])
    rows = max(1, CHUNK // max(1, prod(sizes[1:])))
    for start in range(0, sizes[0], rows):
        count = min(rows, sizes[0] - start)
        outer = (torch.arange(start, start + count, device=values.device) * strides[0] + offset).view(
            -1, *[1] * (len(sizes) - 1)
        )
        total += int(((_whole_numbers(values.narrow(0, start, count)) + 1) * _mixed(outer + inner)).sum())
    return total & _MASK


def _whole_numbers(values: torch.Tensor) -> torch.Tensor:
    bits = as_bits(values)
    width = 8 * bits.element_size()
    return bits if width == 64 else bits.long() & ((1 << width) - 1)


def _mixed(positions: torch.Tensor) -> torch.Tensor:
    """Return an odd number for each position; products of 64-bit numbers wrap."""
    mixed = (positions + 1) * _signed(_STEP)
    mixed = (mixed ^ _shifted(mixed, 30)) * _signed(_FIRST)
    mixed = (mixed ^ _shifted(mixed, 27)) * _signed(_SECOND)
    return (mixed ^ _shifted(mixed, 31)) | 1


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def _shifted(numbers: torch.Tensor, by: int) -> torch.Tensor:
    return (numbers >> by) & ((1 << (64 - by)) - 1)
