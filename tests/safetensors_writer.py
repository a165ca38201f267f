"""Writes safetensors files byte by byte, so that a test can make each part of one wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mapper.ops.dtypes import num_bytes


def entries(tensors: dict[str, tuple[str, list[int]]]) -> dict[str, Any]:
    """Return a right header for tensors of these dtypes and shapes, laid end to end in their order."""
    header: dict[str, Any] = {}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        end = offset + num_bytes(dtype, shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    return header


def file_bytes(header: Any, data: bytes) -> bytes:
    """Return the file with this header, a value or the JSON text of one."""
    text = (header if isinstance(header, str) else json.dumps(header)).encode("utf-8")
    return len(text).to_bytes(8, "little") + text + data


def write(path: Path, tensors: dict[str, tuple[str, list[int]]]) -> Path:
    """Write a right file; its data counts 0, 1, 2, ... modulo 251."""
    header = entries(tensors)
    size = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    path.write_bytes(file_bytes(header, counted(size)))
    return path


def counted(size: int) -> bytes:
    return bytes(position % 251 for position in range(size))


def write_index(path: Path, weight_map: Any) -> Path:
    path.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return path
