"""Modules with given parameters, as an engine builds them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn


def module_of(
    tensors: Mapping[str, torch.Tensor],
    *,
    aliases: Iterable[tuple[str, str]] = (),
    buffers: Mapping[str, torch.Tensor] | None = None,
) -> nn.Module:
    """Return a tree of modules with these parameters, those that are other names of one, and these persistent buffers."""
    root = nn.Module()
    parameters = {name: nn.Parameter(tensor, requires_grad=False) for name, tensor in tensors.items()}
    for name, parameter in parameters.items():
        module, leaf = _place(root, name)
        module.register_parameter(leaf, parameter)
    for alias, name in aliases:
        module, leaf = _place(root, alias)
        module.register_parameter(leaf, parameters[name])
    for name, buffer in (buffers or {}).items():
        module, leaf = _place(root, name)
        module.register_buffer(leaf, buffer)
    return root


def _place(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    *path, leaf = name.split(".")
    module = root
    for segment in path:
        if segment not in dict(module.named_children()):
            module.add_module(segment, nn.Module())
        module = module.get_submodule(segment)
    return module, leaf
