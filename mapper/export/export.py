"""Parameters of all ranks -> a safetensors folder with the names, dtypes and shapes of the checkpoint they came from."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from mapper.checkpoint import Checkpoint, TensorHeader
from mapper.diagnostics import Diagnostic, MapperError, finding
from mapper.export.invert import Parameters, Part, parts_by_source, rebuilt
from mapper.plan.plan import Plan
from mapper.regions import spell, whole
from mapper.transfer.files import CheckpointFiles

MAX_SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True, slots=True)
class ExportReport:
    """`written` tensors came from parameters, `copied` from the base checkpoint; `left_out` are skipped ones without a base."""

    path: str
    written: int
    copied: int
    left_out: tuple[str, ...]
    num_bytes: int
    files: int


def export(
    plans: Sequence[tuple[Plan, Parameters]],
    path: str | Path,
    *,
    base: Checkpoint | None = None,
    config: object = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> ExportReport:
    """Write the checkpoint that the plans' parameters stand for to the new folder `path`; raises MapperError before it exists.

    `plans` are those of all ranks, each with its parameters. Tensors that a skip left out are copied from `base`. Only what
    is known exactly is written: values multiplied by scales, casts that lose digits and ranks that differ are refused. The
    folder appears when it is complete.
    """
    folder = Path(path)
    if folder.exists() and any(folder.iterdir()):
        raise MapperError([finding("M705", subject=str(folder), path=str(folder))])
    headers = plans[0][0].tensors
    parts = parts_by_source(plans)
    skipped = plans[0][0].matching.skipped
    faults = findings_of(parts, headers, skipped)
    if faults:
        raise MapperError(faults)
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        names = list(headers) if base is not None else [name for name in headers if name in parts]
        files, num_bytes = _write(scratch, _tensors(names, parts, plans[0][0], base), max_shard_bytes)
        if config is not None:
            (scratch / "config.json").write_text(json.dumps(config, indent=2))
        if folder.exists():
            folder.rmdir()
        os.replace(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    copied = len(names) - len(parts)
    return ExportReport(str(folder), len(parts), copied, () if base is not None else tuple(skipped), num_bytes, files)


def _tensors(
    names: Sequence[str], parts: dict[str, list[Part]], plan: Plan, base: Checkpoint | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of the new checkpoint, one in memory at a time."""
    with CheckpointFiles(base) if base is not None else _Nothing() as files:
        for name in names:
            if name in parts:
                tensor, _ = rebuilt(name, plan.tensors[name], parts[name])
                assert tensor is not None, f"{name!r} was found to be known"
                yield name, tensor
            else:
                assert base is not None
                assert isinstance(files, CheckpointFiles)
                yield name, files.tensor(base.tensors[name]).clone()


class _Nothing:
    def __enter__(self) -> None:
        return None

    def __exit__(self, *error: object) -> None:
        return None


def _write(folder: Path, tensors: Iterator[tuple[str, torch.Tensor]], max_shard_bytes: int) -> tuple[int, int]:
    """Write shards and, where there are several, an index; return the number of files and of tensor bytes."""
    shards: list[tuple[Path, list[str]]] = []
    shard: dict[str, torch.Tensor] = {}
    size = total = 0

    def flush() -> None:
        if shard:
            file = folder / f"part-{len(shards):05d}"
            save_file(shard, file, metadata={"format": "pt"})
            shards.append((file, list(shard)))
            shard.clear()

    for name, tensor in tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        if shard and size + num_bytes > max_shard_bytes:
            flush()
            size = 0
        shard[name] = tensor
        size += num_bytes
        total += num_bytes
    flush()
    if len(shards) == 1:
        shards[0][0].rename(folder / "model.safetensors")
        return 1, total
    weight_map: dict[str, str] = {}
    for number, (file, names) in enumerate(shards):
        final = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        file.rename(folder / final)
        weight_map.update(dict.fromkeys(names, final))
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return len(shards), total


def findings_of(
    parts: Mapping[str, list[Part]], headers: Mapping[str, TensorHeader], skipped: Container[str]
) -> list[Diagnostic]:
    """Return what is not known exactly, tensor by tensor, without writing anything."""
    faults = [fault for name, found in parts.items() for fault in rebuilt(name, headers[name], found)[1]]
    scales = {part.step.scale for found in parts.values() for part in found}
    lost = [name for name in headers if name not in parts and name not in skipped and name not in scales]
    return faults + [finding("M703", subject=name, name=name, box=spell(whole(headers[name].shape))) for name in lost]
