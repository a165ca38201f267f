"""Tensors for vLLM's own reload of a model, refused before the reload begins where they would not fill it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from mapper.checkpoint import Checkpoint
from mapper.diagnostics import MapperError
from mapper.integrations.vllm.engine import program_of, spec_of
from mapper.integrations.vllm.live import allocated
from mapper.integrations.vllm.state import loaded_of
from mapper.plan.targets import fit
from mapper.transfer.bind import declare
from mapper.transfer.files import CheckpointFiles


def proved_tensors(model: nn.Module, checkpoint: Checkpoint) -> Iterator[tuple[str, torch.Tensor]]:
    """Return the checkpoint's tensors, without those that the spec skips; raises MapperError before the first.

    What is proved is that they fill the parameters as these were before post-processing. How vLLM's own `load_weights`
    then writes them is not. A model that mapper has not loaded, or not whole, gets all tensors, unproved.
    """
    loaded = loaded_of(model)
    skipped: frozenset[str] = frozenset()
    if loaded is not None and not loaded.report.counts["delegated"]:
        found = spec_of(loaded.engine, loaded.settings)
        assert not isinstance(found, str), "a model without a spec is delegated"
        shapes = {name: trace.shape for name, trace in loaded.filled.items()}
        plan = program_of(loaded.engine, loaded.settings, *found, shapes).plan(checkpoint)
        findings = fit(plan, declare(allocated(loaded.filled, device="meta"))).findings
        if findings:
            raise MapperError(findings)
        skipped = frozenset(plan.matching.skipped)
    return _tensors(checkpoint, skipped)


def _tensors(checkpoint: Checkpoint, skipped: frozenset[str]) -> Iterator[tuple[str, torch.Tensor]]:
    with CheckpointFiles(checkpoint) as files:
        for name, header in checkpoint.tensors.items():
            if name not in skipped:
                yield name, files.tensor(header)
