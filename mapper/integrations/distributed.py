"""Many ranks of torch.distributed: they agree on their inputs and on their findings before any of them writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from mapper.checkpoint import Checkpoint
from mapper.compiler import Program
from mapper.diagnostics import Diagnostic, MapperError, finding
from mapper.load import Loader, LoadReport
from mapper.transfer.bind import Model
from mapper.transfer.versions import versions_of


def load(program: Program, model: Model, checkpoint: Checkpoint, *, group: Any = None) -> LoadReport:
    """Fill the model on every rank of the process group; raises the same MapperError on all ranks before any write.

    `program` may be of any rank of its layout: the rank of the process in `group` is taken.
    """
    program = program.at_rank(dist.get_rank(group))
    require_agreement(program, checkpoint, versions=versions_of(program, model), group=group)
    findings: tuple[Diagnostic, ...] = ()
    try:
        loader = Loader(program, model)
        loader.prove(checkpoint)
    except MapperError as error:
        findings = error.diagnostics
    raise_together(findings, group)
    return loader.load(checkpoint)


def require_agreement(
    program: Program, checkpoint: Checkpoint, *, versions: Mapping[str, str] | None = None, group: Any = None
) -> None:
    """Exchange digests of all inputs; raises MapperError M710 on every rank where any differs from rank 0.

    `versions` are those of the engine's packages.
    """
    engine = ", ".join(f"{package} {version}" for package, version in sorted((versions or {}).items()))
    own = {**program.digests, "checkpoint": checkpoint.digest, "version of the engine": engine}
    gathered = _gather(own, group)
    findings = [
        finding("M710", rank=rank, what=what, found=each[what], expected=gathered[0][what])
        for rank, each in enumerate(gathered)
        for what in each
        if each[what] != gathered[0][what]
    ]
    if findings:
        raise MapperError(findings)


def raise_together(findings: tuple[Diagnostic, ...], group: Any = None) -> None:
    """Raise this rank's own findings, or say which rank has some, so that no rank waits for one that has stopped."""
    gathered = _gather(findings, group)
    if findings:
        raise MapperError(findings)
    others = [(rank, each[0]) for rank, each in enumerate(gathered) if each]
    if others:
        raise MapperError([finding("M711", rank=rank, message=f"{first.code} {first.message}") for rank, first in others])


def _gather(value: Any, group: Any) -> list[Any]:
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    dist.barrier(group)  # a rank that raises next may exit, and take with it what another is still receiving
    return gathered
