"""Transformers models: built without weights, ready for a `Loader`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers
from torch import nn


@contextlib.contextmanager
def on_meta() -> Iterator[None]:
    """Build the parameters of modules made inside on the meta device; buffers, which modules compute, stay real."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param)
        if param is not None:
            known = module._parameters[name]
            assert known is not None
            module._parameters[name] = nn.Parameter(known.to("meta"), requires_grad=known.requires_grad)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def build(folder: str | Path, *, architecture: str | None = None, dtype: torch.dtype | None = None) -> nn.Module:
    """Return the Transformers model that the folder's config.json names, in eval mode, its parameters on meta.

    `architecture` is a class name of Transformers where the config's own is not wanted; `dtype` is the config's by default.
    """
    config = transformers.AutoConfig.from_pretrained(folder)
    name = architecture or (config.architectures or [""])[0]
    model_class = getattr(transformers, name, None)
    if model_class is None:
        raise ValueError(f"Transformers {transformers.__version__} has no class {name!r}")
    dtype = dtype or config.dtype or torch.float32
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with on_meta():
            model: nn.Module = model_class(config)
    finally:
        torch.set_default_dtype(before)
    return model.eval()
