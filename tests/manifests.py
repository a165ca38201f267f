"""Checkpoints as manifests: tiny families of the oracle, and changed copies of published ones."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.oracle.families import FAMILIES
from tests.oracle.goldens import GoldenRank

CHECKPOINTS = Path(__file__).with_name("data") / "checkpoints"
V3 = CHECKPOINTS / "DeepSeek-V3.header.json.gz"
V2_LITE = CHECKPOINTS / "DeepSeek-V2-Lite-Chat.header.json.gz"

DTYPES = {"bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float32": "F32", "int32": "I32", "int64": "I64"}
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


def write_v4_flash_0731(folder: Path) -> Path:
    """Write the headers of DeepSeek-V4-Flash-0731, which follow from those of V4-Flash; return the manifest's path.

    Its draft is a DSpark drafter of three blocks. The number of tensors and of bytes is that of the published checkpoint.
    """
    path = write_changed(CHECKPOINTS / "DeepSeek-V4-Flash.header.json.gz", folder, _draft_of_three_blocks)
    file = folder / "DeepSeek-V4-Flash.config.json"
    config = json.loads(file.read_text())
    config |= {"dspark_target_layer_ids": DSPARK_LAYERS, "dspark_markov_rank": DSPARK_RANK}
    config["compress_ratios"] += [0, 0]
    file.write_text(json.dumps(config))  # it still says num_nextn_predict_layers: 1
    return path


DSPARK_LAYERS = [40, 41, 42]
DSPARK_RANK = 256
_MTP_ONLY = ("e_proj.", "h_proj.", "enorm.", "hnorm.")
_HEAD = ("norm.", "hc_head_")


def _draft_of_three_blocks(tensors: Tensors) -> None:
    draft = {name.removeprefix("mtp.0."): tensors.pop(name) for name in list(tensors) if name.startswith("mtp.0.")}
    hidden, vocab = draft["norm.weight"]["shape"][0], tensors["head.weight"]["shape"][0]
    for block in range(3):
        for name, header in draft.items():
            if not name.startswith(_MTP_ONLY) and (block == 2 or not name.startswith(_HEAD)):
                tensors[f"mtp.{block}.{name}"] = header
    width = hidden * len(DSPARK_LAYERS)
    added = {
        "mtp.0.main_proj.weight": ("F8_E4M3", [hidden, width]),
        "mtp.0.main_proj.scale": ("F8_E8M0", [hidden // 128, width // 128]),
        "mtp.0.main_norm.weight": ("BF16", [hidden]),
        "mtp.2.confidence_head.proj.weight": ("BF16", [1, hidden + DSPARK_RANK]),
        "mtp.2.markov_head.markov_w1.weight": ("BF16", [vocab, DSPARK_RANK]),
        "mtp.2.markov_head.markov_w2.weight": ("BF16", [vocab, DSPARK_RANK]),
    }
    tensors |= {name: {"dtype": dtype, "shape": shape} for name, (dtype, shape) in added.items()}
