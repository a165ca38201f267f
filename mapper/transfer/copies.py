"""Tensors that are skipped as copies of others: whether they are, before anything is written."""

from __future__ import annotations

import torch

from mapper.diagnostics import Diagnostic, MapperError, finding
from mapper.plan.plan import Plan, iter_steps
from mapper.transfer.files import CheckpointFiles


def require_copies(plan: Plan, files: CheckpointFiles) -> None:
    """Raise MapperError M511 where a tensor is skipped as a copy of one that this rank reads, and holds other values.

    A copy without elements says nothing.
    """
    pairs = [(name, rule, original) for name, rule in plan.matching.skipped.items() if (original := rule.original(name))]
    if not pairs:
        return
    read = {step.source for local in plan.families for step in iter_steps(local)}
    findings: list[Diagnostic] = []
    for name, rule, original in pairs:
        header = plan.tensors[name]
        if original in read and header.stop > header.start:
            ours, other = (files.tensor(plan.tensors[each]) for each in (name, original))
            if not torch.equal(_bytes_of(ours), _bytes_of(other)):
                count = int((_bytes_of(ours) != _bytes_of(other)).view(ours.numel(), -1).any(dim=1).sum())
                problem = f"{count:,} of {ours.numel():,} elements differ"
                findings.append(finding("M511", place=rule.place, subject=name, name=name, original=original, problem=problem))
    if findings:
        raise MapperError(findings)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
