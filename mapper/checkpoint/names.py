"""A checkpoint of which only the index is there: the names of its tensors, without shapes and dtypes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from mapper.checkpoint import json_text
from mapper.checkpoint.checkpoint import index_in, read_config
from mapper.checkpoint.index import parse_names
from mapper.diagnostics import Diagnostic, MapperError

_ENDINGS = (".index.json.gz", ".index.json")


@dataclass(frozen=True, eq=False)
class CheckpointNames:
    """The tensors that an index names. `config` is the config.json beside it, None where there is none."""

    path: str
    names: tuple[str, ...]
    config: dict[str, Any] | None


def read_names(path: str | os.PathLike[str]) -> CheckpointNames:
    """Return the names in an index, packed or not, or in the index of a folder; the files it names need not be there.

    The config is NAME.config.json beside NAME.index.json, or else config.json. Raises MapperError with every finding.
    """
    absolute = os.path.abspath(path)
    if not os.path.exists(absolute):
        raise MapperError([json_text.absent(absolute)])
    index = index_in(absolute) if os.path.isdir(absolute) else absolute
    findings: list[Diagnostic] = []
    text = json_text.require_text(index, what="index", findings=findings)
    value = None if text is None else json_text.parse_text(text, path=index, what="index", findings=findings)
    files = None if text is None or findings else parse_names(text, value, path=index, findings=findings)
    config = read_config(_config_path(index), findings=findings)
    if files is None or findings:
        raise MapperError(findings)
    return CheckpointNames(absolute, tuple(name for names in files.values() for name in names), config)


def _config_path(index: str) -> str:
    stem = next((index.removesuffix(ending) for ending in _ENDINGS if index.endswith(ending)), index)
    own = f"{stem}.config.json"
    return own if os.path.lexists(own) else os.path.join(os.path.dirname(index), "config.json")
