"""Boxes of tensors: narrowed views, copies between them, declared values in padding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from mapper.ops.dtypes import torch_name
from mapper.plan.family import DiskLayout
from mapper.plan.local import Reading
from mapper.plan.weave import Weave
from mapper.regions import Box, whole
from mapper.transfer.compute import computed, dtype_after
from mapper.transfer.dequantize import dequantize


def view_of(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """Return the view of `tensor` that `box` describes; it shares the storage."""
    for dim, (start, stop) in enumerate(box):
        if stop - start != tensor.shape[dim]:
            tensor = tensor.narrow(dim, start, stop - start)
    return tensor


def read_as(source: torch.Tensor, reading: Reading | None) -> torch.Tensor:
    """Return the source with its axes and its bit pattern as the target has them; a view, whatever lies on disk.

    Elements that are packed keep their dtype, and have an axis of their own, the last: it is the target that is seen as they
    are, for its storage is aligned and has any strides.
    """
    if reading is None:
        return source
    if reading.disk is not None:
        source = viewed(source, reading.disk)
    if reading.packed == 1 and reading.conversion is not None and reading.conversion.by == "bitcast":
        source = source.view(_dtype(reading.conversion.dtype))
    return source


def viewed(source: torch.Tensor, disk: DiskLayout) -> torch.Tensor:
    """Return the source with its axes in the order of the target's; a view, whatever lies on disk."""
    if disk.is_plain:
        return source
    if disk.packed == 1:
        return source.reshape(disk.viewed).permute(disk.order)
    return source.reshape(*disk.viewed, disk.packed).permute(*disk.order, len(disk.order))


def unpacked(target: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a view of the target with an axis more, the last: the elements of the narrower `dtype` that each of its is."""
    return target.unsqueeze(-1).view(dtype)


def values_of(source: torch.Tensor, box: Box, reading: Reading | None, scales: torch.Tensor | None = None) -> torch.Tensor:
    """Return the values for `box` of a source that is in the order of the target's axes, times their scales where it has any.

    Operations that need the whole source are done to it here; a slice is enough for the others, which `copy_box` does.
    """
    if reading is None or (reading.scaling is None and reading.whole is None):
        return view_of(source, box)
    taken = box if reading.whole is None else whole(reading.whole)
    values = view_of(source, taken)
    if reading.scaling is not None:
        assert scales is not None, "values with scales come with them"
        factors = view_of(viewed(scales, reading.scaling.disk), reading.scaling.box(taken))
        values = dequantize(values, taken, factors, reading.scaling)
    if reading.whole is not None:
        dtype = values.dtype if reading.conversion is None else _dtype(reading.conversion.dtype)
        values = view_of(computed(values, reading.values, dtype), box)
    return values


def beside_packed(weaves: Sequence[Weave | None]) -> Sequence[Weave | None]:
    """Return the weaves with an entry for the last axis, that of packed elements."""
    return (*weaves, None) if weaves else ()


def copy_box(
    target: torch.Tensor,
    target_box: Box,
    source: torch.Tensor,
    reading: Reading | None = None,
    weaves: Sequence[Weave | None] = (),
) -> None:
    """Copy `source` to a box of `target`.

    The box of a stacked target has one leading slot that the source does not have. Where the box is k times as long as the
    source, each element is repeated k times. Dtypes are equal, unless the reading says that values are cast. `weaves` has
    an entry for each axis of the source, where what is copied lies between other elements or in another order.
    """
    view = view_of(target, target_box)
    if reading is not None and reading.packed > 1:
        view, weaves = unpacked(view, source.dtype), beside_packed(weaves)
    if view.dim() == source.dim() + 1:
        view = view.squeeze(0)
    if weaves:
        source, view = woven_source(source, weaves), woven_target(view, weaves)
    is_cast = reading is not None and reading.conversion is not None and reading.conversion.by == "cast"
    if reading is not None and reading.values and reading.whole is None:
        source = computed(source, reading.values, dtype_after(source.dtype, reading, view.dtype))
    assert is_cast or view.dtype == source.dtype, f"{view.dtype} from {source.dtype}"
    _copy(view, source)


def woven_source(source: torch.Tensor, weaves: Sequence[Weave | None]) -> torch.Tensor:
    """Return a view of the box of a source with its woven axes as factors, in the target's order, of what is taken.

    To take an axis apart is a view whatever its stride.
    """
    order: list[int] = []
    box: list[tuple[int, int]] = []
    split: list[int] = []
    for size, weave in zip(source.shape, weaves, strict=True):
        order += [len(split) + position for position in (weave.order if weave is not None else (0,))]
        split += weave.sizes if weave is not None else (size,)
        box += weave.box if weave is not None else ((0, size),)
    return view_of(source.view(split).permute(order), tuple(box))


def woven_target(target: torch.Tensor, weaves: Sequence[Weave | None]) -> torch.Tensor:
    """Return a view of the box of a target with its woven axes as factors, of what is filled."""
    box: list[tuple[int, int]] = []
    split: list[int] = []
    for size, weave in zip(target.shape, weaves, strict=True):
        split += weave.target_sizes if weave is not None else (size,)
        box += weave.target_box if weave is not None else ((0, size),)
    return view_of(target.view(split), tuple(box))


def _copy(view: torch.Tensor, source: torch.Tensor) -> None:
    view, axes = aligned(view, tuple(source.shape))
    for axis in axes:
        source = source.unsqueeze(axis)
    view.copy_(source)


def aligned(view: torch.Tensor, sizes: tuple[int, ...]) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Return the view that a source of these sizes is copied to, and the axes that the source gets in turn before.

    A longer axis of the view is split in (elements, repeats), so that a repetition needs no buffer.
    """
    axes = []
    for dim in reversed(range(view.dim())):
        size, given = view.shape[dim], sizes[dim]
        if size != given:
            assert given, f"nothing of {sizes} fills {tuple(view.shape)}"
            assert size % given == 0, f"{tuple(view.shape)} from {sizes}"
            view = view.view(*view.shape[:dim], given, size // given, *view.shape[dim + 1 :])
            axes.append(dim + 1)
    return view, tuple(axes)


def _dtype(name: str) -> torch.dtype:
    spelled = torch_name(name)
    assert spelled is not None, f"torch has no dtype for {name}"
    dtype: torch.dtype = getattr(torch, spelled)
    return dtype


def copy_twins(tensors: Mapping[str, torch.Tensor], twins: Mapping[str, str]) -> int:
    """Copy to each tied target with storage of its own what it is tied to, padding included; return the bytes written."""
    written = 0
    for name, twin in twins.items():
        tensors[name].copy_(tensors[twin])
        written += tensors[name].numel() * tensors[name].element_size()
    return written


def fill_padding(tensors: Mapping[str, torch.Tensor], padding: Iterable[tuple[str, Box, float]]) -> int:
    """Write to every padding box the value it holds; return the number of bytes written."""
    written = 0
    for name, box, value in padding:
        view = view_of(tensors[name], box)
        if value:
            view.fill_(value)
        else:
            as_bits(view).zero_()
        written += view.numel() * view.element_size()
    return written


def as_bits(view: torch.Tensor) -> torch.Tensor:
    """Return the view as whole numbers of the same width: zero is all bits zero in every dtype, also where torch fills none."""
    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return view.view(widths[view.element_size()])
