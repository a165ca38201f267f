"""Boxes of tensors: narrowed views, copies between them, zeros in padding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from mapper.regions import Box


def view_of(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """Return the view of `tensor` that `box` describes; it shares the storage."""
    for dim, (start, stop) in enumerate(box):
        if stop - start != tensor.shape[dim]:
            tensor = tensor.narrow(dim, start, stop - start)
    return tensor


def copy_box(target: torch.Tensor, target_box: Box, source: torch.Tensor) -> None:
    """Copy `source` to a box of `target`; the box of a stacked target has one leading slot that the source does not have.

    Shapes and dtypes are equal; the binding has checked it.
    """
    view = view_of(target, target_box)
    if view.dim() == source.dim() + 1:
        view = view.squeeze(0)
    assert (view.shape, view.dtype) == (source.shape, source.dtype), (
        f"{view.shape} {view.dtype} from {source.shape} {source.dtype}"
    )
    view.copy_(source)


def copy_twins(tensors: Mapping[str, torch.Tensor], twins: Mapping[str, str]) -> int:
    """Copy to each tied target with storage of its own what it is tied to, padding included; return the bytes written."""
    written = 0
    for name, twin in twins.items():
        tensors[name].copy_(tensors[twin])
        written += tensors[name].numel() * tensors[name].element_size()
    return written


def fill_padding(tensors: Mapping[str, torch.Tensor], padding: Iterable[tuple[str, Box]]) -> int:
    """Write zeros to every padding box; return the number of bytes written."""
    written = 0
    for name, box in padding:
        view = view_of(tensors[name], box)
        view.zero_()
        written += view.numel() * view.element_size()
    return written
