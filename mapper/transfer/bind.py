"""Plan + model -> the tensor behind every target, everything checked before anything is written."""

from __future__ import annotations

from collections.abc import Container, Hashable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from mapper.compiler import Program
from mapper.compiler.options import with_options
from mapper.diagnostics import Diagnostic, MapperError, finding
from mapper.ops.dtypes import torch_name
from mapper.plan.plan import Plan
from mapper.plan.targets import DeclaredTarget, fit

Model = nn.Module | Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Binding:
    """The tensor behind each target of a plan, and what is kept by which rule.

    `copied_twins` are the tied targets that have storage of their own, each with the target it is a copy of.
    """

    tensors: Mapping[str, torch.Tensor]
    copied_twins: Mapping[str, str]
    kept: Mapping[str, str]


def model_tensors(model: Model) -> dict[str, torch.Tensor]:
    """Return every tensor a checkpoint may fill, under all of its names: parameters and persistent buffers."""
    if not isinstance(model, nn.Module):
        return dict(model)
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    persistent = set(model.state_dict(keep_vars=True))
    tensors.update((name, buffer) for name, buffer in model.named_buffers(remove_duplicate=False) if name in persistent)
    return tensors


def declare(tensors: Mapping[str, torch.Tensor]) -> dict[str, DeclaredTarget]:
    """Return shapes, dtypes and storages of `tensors`; names of one tensor, or of views of the same memory, share a storage."""
    first: dict[Hashable, str] = {}
    return {
        name: DeclaredTarget(
            tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), first.setdefault(_storage(tensor), name)
        )
        for name, tensor in tensors.items()
    }


def _storage(tensor: torch.Tensor) -> Hashable:
    """Return what is equal for two views of the same elements: `state_dict` gives each name a tensor object of its own."""
    if tensor.is_meta or tensor.numel() == 0:
        return id(tensor)
    return tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride()


def bind(program: Program, plan: Plan, model: Model, *, only: Container[str] | None = None) -> Binding:
    """Return the binding of the program's plan to the model; raises MapperError with everything that does not fit.

    `only` are the targets that the plan is about, where it is not about all of the model: others may be unfilled.
    """
    tensors = model_tensors(model)
    declared = declare(tensors)
    fitted = fit(plan, declared)
    concerned = [each for each in fitted.findings if each.code != "M530" or only is None or each.subject in only]
    findings = with_options(program, plan.tensors, declared, concerned)
    owners: dict[str, str] = {}
    copied = {}
    for target in plan.targets.values():
        model_side = declared.get(target.name)
        if model_side is None:
            continue
        if target.tied_to is not None and target.tied_to in declared:
            if declared[target.tied_to].storage != model_side.storage:
                copied[target.name] = target.tied_to
            continue
        other = owners.setdefault(model_side.storage, target.name)
        if other != target.name:
            findings.append(finding("M601", subject=target.name, name=target.name, other=other))
    findings += _meta_findings(plan, tensors, model)
    if findings:
        raise MapperError(findings)
    return Binding({name: tensors[name] for name in plan.targets if name in tensors}, copied, fitted.kept)


def _meta_findings(plan: Plan, tensors: Mapping[str, torch.Tensor], model: Model) -> list[Diagnostic]:
    findings = [
        finding("M602", subject=name, name=name) for name, tensor in tensors.items() if tensor.is_meta and name in plan.targets
    ]
    if isinstance(model, nn.Module):
        findings += [
            finding("M603", subject=name, name=name)
            for name, buffer in model.named_buffers()
            if buffer.is_meta and name not in tensors and not any(rule.matches(name) for rule in plan.derived)
        ]
    return findings


def allocate(plan: Plan, *, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
    """Return unwritten tensors with the names, local shapes and dtypes of the plan's targets; a tied target is its twin."""
    tensors: dict[str, torch.Tensor] = {}
    for target in plan.targets.values():
        if target.tied_to is None:
            dtype = torch_name(target.dtype)
            assert dtype is not None, f"{target.name!r} has the dtype {target.dtype}, which torch does not have"
            tensors[target.name] = torch.empty(target.shape, dtype=getattr(torch, dtype), device=device)
    tied = {target.name: tensors[target.tied_to] for target in plan.targets.values() if target.tied_to is not None}
    return tensors | tied


def materialize(model: nn.Module, *, device: torch.device | str = "cpu") -> None:
    """Give every parameter and persistent buffer on meta real, unwritten storage; tensors under several names stay one.

    A load fills them; a buffer that no checkpoint holds is left alone, so that `bind` can name it.
    """
    persistent = set(model.state_dict(keep_vars=True))
    real: dict[int, torch.Tensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                module._parameters[name] = _real(parameter, real, device)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta and f"{prefix}.{name}".lstrip(".") in persistent:
                module._buffers[name] = _real(buffer, real, device)


def _real(tensor: torch.Tensor, real: dict[int, torch.Tensor], device: torch.device | str) -> torch.Tensor:
    known = real.get(id(tensor))
    if known is None:
        known = torch.empty_like(tensor, device=device)
        if isinstance(tensor, nn.Parameter):
            known = nn.Parameter(known, requires_grad=tensor.requires_grad)
            known.__dict__.update(tensor.__dict__)
        real[id(tensor)] = known
    return known
