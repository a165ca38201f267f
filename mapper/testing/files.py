"""Writes checkpoints as folders of safetensors files, whole or with the faults that files can have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file


def write_checkpoint(
    tensors: Mapping[str, torch.Tensor], folder: Path, *, config: Mapping[str, object] | None = None, num_files: int = 2
) -> Path:
    """Write tensors to a folder in their order, spread over files with an index, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    names = list(tensors)
    share = max(1, -(-len(names) // num_files))
    index: dict[str, str] = {}
    starts = range(0, len(names), share)
    for number, start in enumerate(starts, start=1):
        file = f"model-{number:05d}-of-{len(starts):05d}.safetensors"
        chosen = names[start : start + share]
        save_file({name: tensors[name].contiguous().clone() for name in chosen}, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(chosen, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (folder / "config.json").write_text(json.dumps(dict(config or {})))
    return folder


def duplicate_tensor(folder: Path, tensors: Mapping[str, torch.Tensor], name: str) -> None:
    """Write one tensor of a folder into a second file as well; no index says which of the two is meant."""
    save_file({name: tensors[name].contiguous().clone()}, folder / "again.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").unlink()


def truncate_file(folder: Path, name: str) -> None:
    """Cut the last byte off the file that holds a tensor."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    file = folder / index["weight_map"][name]
    file.write_bytes(file.read_bytes()[:-1])
