"""The entrance for a model's own `load_weights`: `return mapper.integrations.vllm.load_weights(self, weights)`."""

from __future__ import annotations

from collections.abc import Iterable
from weakref import WeakKeyDictionary

import torch
from torch import nn

from mapper.diagnostics import MapperError, finding
from mapper.integrations.vllm.engine import Engine, program_of, require_known, spec_of
from mapper.integrations.vllm.load import shapes_of
from mapper.integrations.vllm.settings import Settings, settings_of
from mapper.integrations.vllm.stream import WeightStream
from mapper.integrations.vllm.targets import targets_of

_OPEN: WeakKeyDictionary[nn.Module, WeightStream] = WeakKeyDictionary()


def load_weights(model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]], *, prefix: str = "") -> set[str]:
    """Write tensors of a checkpoint to the model, and return the names of its parameters once all of them are there.

    Both sides' names lack `prefix.`, for a module inside the model. Tensors may come over several calls, and until the one
    that completes the model nothing counts as loaded. Raises MapperError where the model has no spec, or for a tensor that
    does not belong; call `require_complete` where the stream ends.
    """
    from mapper.integrations.vllm.loader import engine_here

    return take(model, weights, engine=engine_here(model), prefix=prefix)


def take(
    model: nn.Module,
    weights: Iterable[tuple[str, torch.Tensor]],
    *,
    engine: Engine,
    settings: Settings | None = None,
    prefix: str = "",
) -> set[str]:
    """Do what `load_weights` does, for an engine that is described."""
    stream = _OPEN.get(model)
    if stream is None:
        stream = _OPEN[model] = _opened(model, engine, settings or settings_of({}), prefix)
    if not stream.take(weights):
        return set()
    del _OPEN[model]
    return {name for name, _ in model.named_parameters()}


def require_complete(model: nn.Module) -> None:
    """Raise MapperError M756 where the model has been given tensors, and not all of them."""
    stream = _OPEN.get(model)
    if stream is not None:
        stream.require_complete()


def _opened(model: nn.Module, engine: Engine, settings: Settings, prefix: str) -> WeightStream:
    require_known(engine)
    found = spec_of(engine, settings)
    if isinstance(found, str):
        raise MapperError([finding("M752", what="the whole model", reason=found)])
    program = program_of(engine, settings, *found, shapes_of(model)).scoped(prefix)
    return WeightStream(program, targets_of(model, program))
