"""Tensors as numpy arrays of their raw bits, so that every dtype is moved alike and compared bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

Bits = np.ndarray[Any, np.dtype[Any]]
UNSIGNED: dict[int, type[np.unsignedinteger[Any]]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def bits_of(tensor: torch.Tensor) -> Bits:
    """Return the bits of every element, in the tensor's shape."""
    if tensor.numel() == 0:
        return np.zeros(tuple(tensor.shape), dtype=UNSIGNED[tensor.dtype.itemsize])
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    raw = flat.view(torch.uint8).numpy()
    return raw.view(UNSIGNED[tensor.dtype.itemsize]).reshape(tuple(tensor.shape)).copy()


def tensor_of(bits: Bits, dtype: torch.dtype) -> torch.Tensor:
    """Return the tensor whose elements have these bits."""
    if bits.size == 0:
        return torch.empty(bits.shape, dtype=dtype)
    raw = np.ascontiguousarray(bits).reshape(-1).view(np.uint8).copy()
    return torch.from_numpy(raw).view(dtype).reshape(bits.shape)


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of a dtype word."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def bits_of_value(value: float, dtype: torch.dtype) -> int:
    """Return the bits of one number in a dtype."""
    return int(bits_of(torch.tensor([value], dtype=torch.float64).to(dtype))[0])


def are_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Say whether two tensors have one shape, one dtype and the same bits."""
    return one.dtype == other.dtype and one.shape == other.shape and bool((bits_of(one) == bits_of(other)).all())
