"""The parameters of a vLLM model under the names that a spec has for them."""

from __future__ import annotations

import torch
from torch import nn

from mapper.compiler import Program

WRAPPED = "base_layer"
"""vLLM puts a layer that LoRA adapters belong to inside another, under this name."""


def targets_of(model: nn.Module, program: Program | None = None) -> dict[str, torch.Tensor]:
    """Return every parameter under all of its names, and those persistent buffers that the program fills.

    Other persistent buffers are vLLM's own (the scales of attention layers); no checkpoint fills them, and nothing says so
    parameter by parameter.
    """
    named = model.named_parameters(remove_duplicate=False)
    targets: dict[str, torch.Tensor] = {without_wrappers(name): each for name, each in named}
    families = () if program is None else program.families
    buffers = persistent_buffers(model) if families else {}
    return targets | {
        name: each for name, each in buffers.items() if any(family.target.match(name) is not None for family in families)
    }


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return every persistent buffer under all of its names."""
    persistent = set(model.state_dict(keep_vars=True))
    named = model.named_buffers(remove_duplicate=False)
    return {without_wrappers(name): buffer for name, buffer in named if name in persistent}


def without_wrappers(name: str) -> str:
    """Return the name as it is without LoRA.

    >>> without_wrappers('model.layers.0.mlp.down_proj.base_layer.weight')
    'model.layers.0.mlp.down_proj.weight'
    """
    return ".".join(segment for segment in name.split(".") if segment != WRAPPED)
