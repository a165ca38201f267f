"""Tiny checkpoints of single architectures: names, dtypes and shapes as Transformers writes them, values as in `tensors`.

An entry is named by its architecture, or `ARCHITECTURE@variant` where the config differs from the plain one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tests.oracle.families import Family
from tests.oracle.tensors import Config, Header

FOLDER = Path(__file__).with_name("architectures")


def entry_family(entry: str) -> Family:
    """Return the entry's checkpoint."""
    record: dict[str, Any] = json.loads((FOLDER / f"{entry}.json").read_text())

    def headers(_: Config) -> Iterator[Header]:
        for name, tensor in record["tensors"].items():
            yield Header(name, tuple(tensor["shape"]), getattr(torch, tensor["dtype"]))

    return Family(record["config"], headers, num_shards=2)
