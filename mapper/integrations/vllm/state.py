"""What became of the parameters of a loaded model: as they were filled, and as the engine serves from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn

from mapper.diagnostics import Diagnostic, finding
from mapper.integrations.vllm.engine import Engine
from mapper.integrations.vllm.report import EngineReport
from mapper.integrations.vllm.settings import Settings
from mapper.integrations.vllm.targets import persistent_buffers, targets_of


@dataclass(frozen=True, slots=True)
class Trace:
    """What a parameter was at one moment. `tensor` keeps nothing alive; `number` tells which names were one tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    address: int
    number: int
    tensor: ref[torch.Tensor]

    def difference(self, now: torch.Tensor | None) -> str | None:
        """Return in which way the parameter is another now, or None."""
        if now is None:
            return "it is gone"
        pairs = [
            ("shape", list(self.shape), list(now.shape)),
            ("dtype", self.dtype, now.dtype),
            ("stride", list(self.stride), list(now.stride())),
        ]
        for what, before, after in pairs:
            if before != after:
                return f"its {what} was {before} and is {after}"
        if 0 in self.shape:
            return None  # nothing is served from it: its values have been packed elsewhere
        if self.address != now.data_ptr():
            return "its values lie at another address"
        return None if self.tensor() is now else "it is another tensor at the same address"


@dataclass(slots=True)
class Loaded:
    """A model that mapper has loaded: `filled` before the engine's post-processing, `served` after it."""

    engine: Engine
    settings: Settings
    report: EngineReport
    filled: Mapping[str, Trace]
    served: Mapping[str, Trace] | None = None


_LOADED: WeakKeyDictionary[nn.Module, Loaded] = WeakKeyDictionary()


def remember(model: nn.Module, engine: Engine, settings: Settings, report: EngineReport) -> None:
    """Note how the model was loaded, and what its parameters are before the engine's post-processing."""
    _LOADED[model] = Loaded(engine, settings, report, traces_of(model, report.parameters))


def remember_served(model: nn.Module) -> None:
    """Note what the parameters are after the engine's post-processing."""
    loaded = _LOADED.get(model)
    if loaded is not None:
        loaded.served = traces_of(model, loaded.filled)


def forget(model: nn.Module) -> None:
    """Note that nothing is known about the model any more."""
    _LOADED.pop(model, None)


def loaded_of(model: nn.Module) -> Loaded | None:
    """Return what is known about a model, or None where mapper has not loaded it."""
    return _LOADED.get(model)


def traces_of(model: nn.Module, names: Iterable[str]) -> dict[str, Trace]:
    """Return a trace of each of these parameters and buffers that the model has, by its name without LoRA."""
    numbers: dict[int, int] = {}
    tensors = {**persistent_buffers(model), **targets_of(model)}
    return {
        name: Trace(
            tuple(tensor.shape),
            tuple(tensor.stride()),
            tensor.dtype,
            tensor.data_ptr(),
            numbers.setdefault(id(tensor), len(numbers)),
            ref(tensor),
        )
        for name in names
        if (tensor := tensors.get(name)) is not None
    }


def changes(before: Mapping[str, Trace], model: nn.Module) -> list[Diagnostic]:
    """Return M754 for every parameter that is not what it was."""
    now = {**persistent_buffers(model), **targets_of(model)}
    found = ((name, trace.difference(now.get(name))) for name, trace in before.items())
    return [finding("M754", subject=name, name=name, what=what) for name, what in found if what is not None]
