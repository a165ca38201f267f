"""Checkpoints as manifests: tiny families of the oracle, and changed copies of published ones."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.oracle.families import FAMILIES
from tests.oracle.goldens import GoldenRank

CHECKPOINTS = Path(__file__).with_name("data") / "checkpoints"
V3 = CHECKPOINTS / "DeepSeek-V3.header.json.gz"
V2_LITE = CHECKPOINTS / "DeepSeek-V2-Lite-Chat.header.json.gz"

DTYPES = {"bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float32": "F32"}
Tensors = dict[str, dict[str, Any]]
Change = Callable[[Tensors], None]


def write_family(name: str, folder: Path, *, change: Change | None = None) -> Path:
    """Write the manifest and the config of a tiny family, its tensors changed by `change`; return the manifest's path."""
    family = FAMILIES[name]
    tensors = {
        header.name: {"dtype": DTYPES[str(header.dtype).removeprefix("torch.")], "shape": list(header.shape)}
        for header in family.headers(family.config)
    }
    return _write(tensors, dict(family.config), folder / f"{name}.header.json.gz", change)


def write_changed(manifest: Path, folder: Path, change: Change) -> Path:
    """Write a changed copy of a manifest, its config beside it; return its path."""
    config = json.loads((manifest.parent / f"{manifest.name.removesuffix('.header.json.gz')}.config.json").read_text())
    return _write(json.loads(gzip.decompress(manifest.read_bytes())), config, folder / manifest.name, change)


def _write(tensors: Tensors, config: dict[str, Any], path: Path, change: Change | None) -> Path:
    if change is not None:
        change(tensors)
    path.write_bytes(gzip.compress(json.dumps(tensors).encode(), compresslevel=1))
    path.with_name(f"{path.name.removesuffix('.header.json.gz')}.config.json").write_text(json.dumps(config))
    return path


def targets_of(rank: GoldenRank) -> dict[str, Any]:
    """Return the parameters of a golden's rank as `--targets` reads them."""
    parameters = {each.name: {"shape": list(each.shape), "dtype": str(each.dtype)} for each in rank.params}
    return {**parameters, "aliases": dict(rank.aliases)}


def copy_spec_folder(source: Path, folder: Path) -> Path:
    """Copy the configs beside a spec, so that a changed copy of it finds them; return the folder."""
    shutil.copytree(source.parent / "configs", folder / "configs")
    return folder
