"""Deltas: the elements of a source that changed, and no others."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from mapper.regions import whole
from mapper.session.intake import Part
from mapper.transfer.copy import as_bits, beside_packed, copy_box, read_as, unpacked, values_of, view_of, viewed


def copy_changed(part: Part, tensor: torch.Tensor, mask: torch.Tensor | None, targets: Mapping[str, torch.Tensor]) -> None:
    """Write what the part takes of the tensor where `mask` is true, or where it is not NaN, to `targets`; leave the rest.

    Values and mask go the same way into a copy of the region that the tensor fills.
    """
    changed = ~_is_nan(tensor) if mask is None else mask
    if part.reading is not None and part.reading.disk is not None:
        changed = viewed(changed, part.reading.disk)
    read = read_as(tensor, part.reading)
    for write in part.writes:
        move = write.move
        region, reading, weaves = view_of(targets[write.target], move.target), part.reading, move.weaves
        if reading is not None and reading.packed > 1:
            region, reading, weaves = unpacked(region, read.dtype), None, tuple(beside_packed(weaves))
        values, where = region.clone(), torch.zeros(region.shape, dtype=torch.bool, device=region.device)
        copy_box(values, whole(region.shape), values_of(read, move.source, part.reading), reading, weaves)
        copy_box(where, whole(region.shape), view_of(changed, move.source), None, weaves)
        bits = as_bits(region)
        bits.copy_(torch.where(where, as_bits(values), bits))


def _is_nan(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float().isnan() if tensor.is_floating_point() else torch.zeros_like(tensor, dtype=torch.bool)
