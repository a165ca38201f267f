"""Parameters of one rank -> checksums of the tensors they came from."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from mapper.diagnostics import MapperError, finding
from mapper.export.invert import Parameters, Part, is_packed, parts_by_source, stored_values
from mapper.ops.dtypes import torch_name
from mapper.plan.digest import Digest, Region, Strided, tell
from mapper.plan.plan import Plan
from mapper.regions import whole
from mapper.transfer.copy import beside_packed, view_of, viewed, woven_source
from mapper.transfer.digest import digest_part, digest_tensor


def digest_rank(plan: Plan, parameters: Parameters) -> Digest:
    """Return the checksums of all sources that this rank reads, from its parameters; raises MapperError M712.

    The plan's steps are undone as in an export, one view at a time.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    parts: dict[str, dict[Region, int]] = {}
    unknown: dict[str, str] = {}
    for name, found in parts_by_source([(plan, parameters)]).items():
        dtype: torch.dtype = getattr(torch, str(torch_name(plan.tensors[name].dtype)))
        regions: dict[Region, int] = {}
        for part in found:
            seen = _places(plan, name, part)
            region, places = _region(part, seen)
            values, fault = stored_values(name, part, dtype, tuple(places.shape))
            if values is None:
                assert fault is not None
                unknown[name] = fault.message
                break
            checksum = digest_part(values, places)
            if regions.setdefault(region, checksum) != checksum:
                raise MapperError([finding("M712", subject=name, name=name, box=tell(region))])
            shapes[name] = tuple(seen.shape)
        else:
            parts[name] = regions
    return Digest(shapes, parts, unknown)


def digest_tensors(tensors: Mapping[str, torch.Tensor]) -> Digest:
    """Return the checksums of whole source tensors, such as a trainer has them."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return Digest(shapes, {name: {whole(shapes[name]): digest_tensor(tensor)} for name, tensor in tensors.items()})


def _places(plan: Plan, name: str, part: Part) -> torch.Tensor:
    """Return the whole source as its steps see it, without memory: its strides say where each element lies on disk."""
    places = torch.empty(plan.tensors[name].shape, device="meta")
    reading = part.step.reading
    return places if reading is None or reading.disk is None else viewed(places, reading.disk)


def _region(part: Part, seen: torch.Tensor) -> tuple[Region, torch.Tensor]:
    """Return what the part's step takes of the source, and a view of that."""
    step = part.step
    places = view_of(seen, step.source_box)
    if not step.weaves:
        return (*step.source_box, *whole(tuple(seen.shape[len(step.source_box) :]))), places
    places = woven_source(places, beside_packed(step.weaves) if is_packed(step) else step.weaves)
    axes = sorted((stride, size) for stride, size in zip(places.stride(), places.shape, strict=True) if size > 1)
    sizes, strides = tuple(size for _, size in axes), tuple(stride for stride, _ in axes)
    return Strided(int(places.storage_offset()), sizes, strides), places
