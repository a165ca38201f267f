"""Where configs lie: the config.json files of published checkpoints, shipped in `configs` beside the specs."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from mapper.diagnostics import MapperError, finding
from mapper.messages.suggest import did_you_mean
from mapper.spec.bundled import FOLDERS
from mapper.spec.model import Spec

CONFIGS = "configs"


def bundled_config(name: str) -> dict[str, object]:
    """Return the config.json of a published checkpoint by its name; raises MapperError M803 when there is none.

    >>> bundled_config('DeepSeek-V3')['num_hidden_layers']
    61
    """
    return _require(name, _files_in(_bundled_folder()))


def config_of(spec: Spec, name: str) -> dict[str, object]:
    """Return a config by name: beside the spec's file, or bundled; raises MapperError M803 when there is none."""
    return _require(name, _files_for(spec))


def configs_for(spec: Spec) -> dict[str, dict[str, object]]:
    """Return the configs beside the spec's file and the bundled ones that name one of its architectures, in order of name."""
    configs = {name: _read(path) for name, path in sorted(_files_for(spec).items())}
    return {name: config for name, config in configs.items() if _names_architecture(config, spec)}


def _names_architecture(config: dict[str, object], spec: Spec) -> bool:
    named = config.get("architectures")
    return isinstance(named, list) and not set(spec.architectures).isdisjoint(named)


def _files_for(spec: Spec) -> dict[str, Path]:
    beside = Path(spec.place.file).parent / CONFIGS
    return {**_files_in(_bundled_folder()), **_files_in(beside)}


def _files_in(folder: Path) -> dict[str, Path]:
    return {path.stem: path for path in sorted(folder.glob("*.json"))}


def _bundled_folder() -> Path:
    return next((folder / CONFIGS for folder in FOLDERS if folder.is_dir()), FOLDERS[0] / CONFIGS)


def _require(name: str, files: dict[str, Path]) -> dict[str, object]:
    if name not in files:
        raise MapperError([finding("M803", subject=name, hint=did_you_mean(name, files), name=name)])
    return _read(files[name])


def _read(path: Path) -> dict[str, object]:
    config: dict[str, object] = json.loads(_text(path))
    return config


@cache
def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")
