"""What tests of whole loads share: a checkpoint written from tensors, parameters filled with the sentinel, bytes compared."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from mapper.checkpoint import Checkpoint
from mapper.diagnostics import Diagnostic
from mapper.load import allocate
from mapper.plan import Plan
from mapper.spec import load_spec
from mapper.spec.model import Spec
from tests.oracle.families import SENTINEL_BYTE

Tensors = dict[str, torch.Tensor]


def write(folder: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> Checkpoint:
    """Write one safetensors file and config.json into `folder`, and open them."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return Checkpoint.open(folder)


def spec_of(folder: Path, text: str, *, id: str = "own") -> Spec:
    """Write a spec of its own to a file of the same name and load it; `text` is what follows the first keys."""
    path = folder / f"{id}.yaml"
    path.write_text(f"spec: 1\nid: {id}\ntitle: own\nversion: 0.1.0\narchitectures: [Own]\n{text}")
    return load_spec(path)


def fill(tensors: Mapping[str, torch.Tensor]) -> None:
    """Set every byte of the tensors to the sentinel, which no tensor of a family holds."""
    for tensor in tensors.values():
        with torch.no_grad():
            tensor.copy_(torch.full((tensor.itemsize,), SENTINEL_BYTE, dtype=torch.uint8).view(tensor.dtype).reshape(()))


def prefilled(plan: Plan) -> Tensors:
    """Return parameters for the plan's targets, every byte the sentinel."""
    tensors = allocate(plan)
    fill(tensors)
    return tensors


def raw(tensor: torch.Tensor) -> bytes:
    """Return the bytes of the tensor's elements, in order."""
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


def all_raw(tensors: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: raw(tensor) for name, tensor in tensors.items()}


def told(findings: Iterable[Diagnostic]) -> list[tuple[str, str]]:
    """Return (code, subject) of each finding."""
    return [(each.code, each.subject) for each in findings]
