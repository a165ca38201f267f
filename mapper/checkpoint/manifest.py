"""A manifest: the names, dtypes and shapes of a checkpoint, `{name: {dtype, shape}}`, without its files."""

from __future__ import annotations

from typing import Any

from mapper.checkpoint import json_text
from mapper.checkpoint.entries import IN_MANIFEST, require_columns
from mapper.checkpoint.header import TensorHeader
from mapper.diagnostics import Diagnostic, finding
from mapper.ops.dtypes import num_bytes


def parse_manifest(text: str, value: Any, *, path: str, findings: list[Diagnostic]) -> dict[str, TensorHeader] | None:
    """Return the headers in `value`, which is the manifest `text`; on failure append to `findings` and return None."""
    if not isinstance(value, dict):
        expected = "an object of {name: {dtype, shape}}"
        findings.append(
            finding("M414", subject=path, what="manifest", path=path, expected=expected, found=json_text.kind_of(value))
        )
        return None
    columns = require_columns(text, value, keys=IN_MANIFEST, num_other_strings=0, path=path, findings=findings)
    if columns is None:
        return None
    pairs = list(zip(columns.dtypes, columns.shapes, strict=True))
    # A model has few distinct headers: 25 among the 91,991 of DeepSeek-V3.
    headers = {pair: TensorHeader(*pair, file=-1, start=0, stop=num_bytes(*pair)) for pair in set(pairs)}
    return dict(zip(value, map(headers.__getitem__, pairs), strict=True))
