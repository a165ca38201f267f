"""A small Llama as an engine builds it, with parts in layouts of the engine's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mapper.checkpoint import Checkpoint
from mapper.compiler import compile
from mapper.integrations.vllm.engine import Engine
from mapper.integrations.vllm.load import Fallback
from mapper.layout import Layout
from mapper.load import allocate
from mapper.spec import load_spec
from tests.loads import fill
from tests.modules import module_of
from tests.oracle.families import FAMILIES, family_tensors, write_family, write_tensors

LLAMA = FAMILIES["llama"]
DOWN = "model.layers.1.mlp.down_proj"
Tensors = dict[str, torch.Tensor]


def engine(**differences: Any) -> Engine:
    return Engine(**{"version": "0.32.0", "architectures": ("LlamaForCausalLM",), "config": LLAMA.config, **differences})


def checkpoint_in(folder: Path, changes: Mapping[str, torch.Tensor | None] | None = None) -> Checkpoint:
    """Return the family's checkpoint with some tensors added, replaced or (None) left out."""
    if not changes:
        return Checkpoint.open(write_family("llama", folder))
    tensors = {**family_tensors("llama"), **changes}
    return Checkpoint.open(write_tensors(LLAMA, {name: each for name, each in tensors.items() if each is not None}, folder))


def parameters(folder: Path, *, layout: str = "") -> Tensors:
    """Return the engine's parameters, every byte the sentinel."""
    program = compile(load_spec("llama"), config=LLAMA.config, runtime="vllm", layout=Layout.parse(layout))
    tensors = allocate(program.plan(checkpoint_in(folder / "plain")))
    fill(tensors)
    return tensors


def packed(tensors: Tensors, *, name: str = DOWN) -> tuple[Tensors, dict[str, torch.Tensor | None]]:
    """Return the parameters with one matrix in another layout, and what the checkpoint has of it instead."""
    rows = tensors[f"{name}.weight"].shape[0]
    own = {f"{name}.qweight": torch.zeros(rows, 24, dtype=torch.int32), f"{name}.scales": torch.zeros(rows, 3)}
    disk = {f"{name}.qweight": torch.full((rows, 24), 5, dtype=torch.int32), f"{name}.scales": torch.full((rows, 3), 2.0)}
    rest = {key: tensor for key, tensor in tensors.items() if key != f"{name}.weight"}
    return {**rest, **own}, {f"{name}.weight": None, **disk}


def built(tensors: Mapping[str, torch.Tensor]) -> nn.Module:
    """Return the model; each of its parameters has a loader of its own, as vLLM's have."""
    model = module_of(tensors)
    for parameter in model.parameters():
        parameter.weight_loader = lambda parameter, loaded: parameter.data.copy_(loaded)
    return model


class Own:
    """vLLM's own means, which note what they are given and write it to the parameter of the same name."""

    def __init__(self, model: nn.Module) -> None:
        self.given: list[str] = []
        self.num_whole = 0
        self._parameters = dict(model.named_parameters())

    @property
    def fallback(self) -> Fallback:
        return Fallback(self._whole, self._part)

    def _whole(self) -> set[str] | None:
        self.num_whole += 1
        return set(self._parameters)

    def _part(self, weights: Iterator[tuple[str, torch.Tensor]]) -> set[str] | None:
        loaded = set()
        for name, tensor in weights:
            self.given.append(name)
            if name in self._parameters:
                self._parameters[name].data.copy_(tensor)
                loaded.add(name)
        return loaded
