"""The inverse of a plan's steps: boxes of parameters back into the tensors they came from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from mapper.checkpoint import TensorHeader
from mapper.diagnostics import Diagnostic, finding
from mapper.ops.dtypes import torch_name
from mapper.plan.plan import Plan, Step
from mapper.plan.weave import Weave
from mapper.regions import Box, spell, uncovered, whole
from mapper.transfer.compute import undone
from mapper.transfer.copy import beside_packed, unpacked, view_of, viewed, woven_source, woven_target

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
    shape = tuple(seen.shape)[: len(parts[0].step.source_box)]
    findings: list[Diagnostic] = []
    done: list[Box] = []
    written = torch.zeros(seen.shape, dtype=torch.bool) if any(part.step.weaves for part in parts) else None
    for part in parts:
        step = part.step
        view = view_of(seen, step.source_box)
        before = None if written is None else view_of(written, step.source_box)
        if step.weaves:
            assert before is not None
            weaves = beside_packed(step.weaves) if is_packed(step) else step.weaves
            view, before = woven_source(view, weaves), woven_source(before, weaves)
        values, fault = stored_values(name, part, tensor.dtype, tuple(view.shape))
        if fault is not None:
            return None, [fault]
        assert values is not None
        is_known = bool(before.any()) if before is not None else step.source_box in done
        if is_known and not _agree(view, values, before):
            findings.append(finding("M704", subject=name, name=name, box=spell(step.source_box)))
        _bits(view).copy_(_bits(values))
        done.append(step.source_box)
        if before is not None:
            before.fill_(True)
    if written is not None:
        done = [] if not written.all() else [whole(shape)]
    findings += _missing(name, shape, done)
    return (None if findings else tensor), findings


def is_packed(step: Step) -> bool:
    """Whether the source as the step sees it has an axis more, of elements that are one of the target's."""
    return step.reading is not None and step.reading.packed > 1


def _agree(view: torch.Tensor, values: torch.Tensor, before: torch.Tensor | None) -> bool:
    """Whether the values are those that are there, as far as some were written before (None: all of them)."""
    if before is None:
        return _equal(view, values)
    return torch.equal(_bits(view.contiguous())[before], _bits(values.contiguous())[before])


def stored_values(
    name: str, part: Part, dtype: torch.dtype, sizes: tuple[int, ...]
) -> tuple[torch.Tensor | None, Diagnostic | None]:
    """Return what the source's box of these sizes held, in its dtype, or why that is not known."""
    step = part.step
    if step.scale is not None:
        return None, finding("M701", subject=name, name=name, scale=step.scale)
    values = view_of(part.target.detach(), step.target_box)
    if values.dim() == len(step.source_box) + 1:
        values = values.squeeze(0)
    weaves: Sequence[Weave | None] = step.weaves
    if is_packed(step):
        values, weaves = unpacked(values, dtype), beside_packed(weaves)
    if weaves:
        values = woven_target(values, weaves)
    values, is_equal = _unrepeated(values, sizes)
    if not is_equal:
        return None, finding("M706", subject=name, name=name, target=step.target)
    conversion = step.reading.conversion if step.reading is not None else None
    if step.reading is not None and step.reading.values:
        return _undone(name, step, values, dtype)
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


def _undone(name: str, step: Step, values: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor | None, Diagnostic | None]:
    """Return the one stored value that gives each of `values`, or where there is none or several."""
    assert step.reading is not None
    ops = step.reading.values
    opaque = next((op for op in ops if op.reads_whole), None)
    if opaque is not None:
        return None, finding("M708", subject=name, name=name, op=opaque.name, target=step.target)
    conversion = step.reading.conversion
    is_bitcast = conversion is not None and conversion.by == "bitcast"
    stored = values.dtype if is_bitcast else dtype
    found, unknown = undone(values, ops, stored)
    if unknown is not None:
        where, value = unknown
        return None, finding(
            "M709", subject=name, name=name, target=step.target, found=value, box=list(where),
            op=", ".join(op.name for op in ops), dtype=str(stored).removeprefix("torch."),
        )  # fmt: skip
    return (found.view(dtype) if is_bitcast else found), None


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
