"""The inverse of a plan's steps: boxes of parameters back into the tensors they came from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from mapper.checkpoint import TensorHeader
from mapper.diagnostics import Diagnostic, finding
from mapper.ops.dtypes import torch_name
from mapper.plan.plan import Plan, Step
from mapper.regions import Box, spell, uncovered, whole
from mapper.transfer.copy import view_of, viewed

Parameters = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Part:
    """One step of one rank, with the parameter it wrote to."""

    step: Step
    target: torch.Tensor


def parts_by_source(plans: Sequence[tuple[Plan, Parameters]]) -> dict[str, list[Part]]:
    """Return the steps of all ranks by source; tied targets are left to their twins."""
    parts: dict[str, list[Part]] = {}
    for plan, parameters in plans:
        for step in plan.steps():
            if plan.targets[step.target].tied_to is None:
                parts.setdefault(step.source, []).append(Part(step, parameters[step.target]))
    return parts


def rebuilt(name: str, header: TensorHeader, parts: Sequence[Part]) -> tuple[torch.Tensor | None, list[Diagnostic]]:
    """Return the tensor `name` as it was on disk, or what keeps it from being known exactly."""
    dtype = torch_name(header.dtype)
    assert dtype is not None, f"torch has no dtype for {header.dtype}"
    tensor = torch.empty(header.shape, dtype=getattr(torch, dtype))
    reading = parts[0].step.reading
    seen = tensor if reading is None or reading.disk is None else viewed(tensor, reading.disk)
    findings: list[Diagnostic] = []
    done: list[Box] = []
    for part in parts:
        values, fault = _values(name, part, tensor.dtype)
        if fault is not None:
            return None, [fault]
        assert values is not None
        view = view_of(seen, part.step.source_box)
        known = [box for box in done if box == part.step.source_box]
        if known and not _equal(view, values):
            findings.append(finding("M704", subject=name, name=name, box=spell(part.step.source_box)))
        _bits(view).copy_(_bits(values))
        done.append(part.step.source_box)
    findings += _missing(name, tuple(seen.shape), done)
    return (None if findings else tensor), findings


def _values(name: str, part: Part, dtype: torch.dtype) -> tuple[torch.Tensor | None, Diagnostic | None]:
    step = part.step
    if step.scale is not None:
        return None, finding("M701", subject=name, name=name, scale=step.scale)
    values = view_of(part.target.detach(), step.target_box)
    if values.dim() == len(step.source_box) + 1:
        values = values.squeeze(0)
    values, is_equal = _unrepeated(values, [stop - start for start, stop in step.source_box])
    if not is_equal:
        return None, finding("M706", subject=name, name=name, target=step.target)
    conversion = step.reading.conversion if step.reading is not None else None
    if conversion is None or values.dtype == dtype:
        return values, None
    if conversion.by == "bitcast":
        return values.view(dtype), None
    if torch.promote_types(dtype, values.dtype) != values.dtype:
        found, stored = (str(each).removeprefix("torch.") for each in (values.dtype, dtype))
        return None, finding("M707", subject=name, name=name, dtype=stored, target=step.target, found=found)
    back = values.to(dtype)
    if not _equal(back.to(values.dtype), values):
        return None, finding("M702", subject=name, name=name, dtype=str(dtype).removeprefix("torch."), target=step.target)
    return back, None


def _unrepeated(values: torch.Tensor, sizes: Sequence[int]) -> tuple[torch.Tensor, bool]:
    """Return one of each element's copies, and whether all copies are equal."""
    for dim, size in enumerate(sizes):
        if values.shape[dim] != size:
            copies = values.reshape(*values.shape[:dim], size, values.shape[dim] // size, *values.shape[dim + 1 :])
            first = copies.narrow(dim + 1, 0, 1)
            if not _equal(first.expand_as(copies), copies):
                return values, False
            values = first.squeeze(dim + 1)
    return values, True


def _missing(name: str, shape: tuple[int, ...], done: Sequence[Box]) -> Iterator[Diagnostic]:
    for box in uncovered(whole(shape), done):
        yield finding("M703", subject=name, name=name, box=spell(box))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor as whole numbers of the same width, in which equal means equal bit for bit."""
    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(widths[tensor.element_size()])


def _equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.equal(_bits(first.contiguous()), _bits(second.contiguous()))
