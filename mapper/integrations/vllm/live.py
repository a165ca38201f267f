"""An update of a running engine: proved complete in memory of its own before any parameter that serves is touched."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from io import BytesIO
from typing import ParamSpec

import torch
from torch import nn

from mapper.checkpoint import Checkpoint
from mapper.diagnostics import MapperError, as_objects, finding
from mapper.integrations.vllm.engine import program_of, spec_of
from mapper.integrations.vllm.state import Loaded, Trace, changes, loaded_of
from mapper.load import Loader
from mapper.report.load import LoadReport
from mapper.transfer.files import CheckpointFiles

Arguments = ParamSpec("Arguments")
Answer = dict[str, object]


class LiveUpdate:
    """Collects a whole new set of weights, as the parameters were before post-processing, outside of the engine.

    The memory is host memory as large as this rank's parameters. Nothing here writes to the model.
    """

    def __init__(self, model: nn.Module) -> None:
        """Raise MapperError where the model cannot be updated, or is not what it was after its load."""
        loaded = require_updatable(model)
        found = spec_of(loaded.engine, loaded.settings)
        assert not isinstance(found, str), "a model without a spec is delegated"
        shapes = {name: trace.shape for name, trace in loaded.filled.items()}
        program = program_of(loaded.engine, loaded.settings, *found, shapes)
        kept = {name for name, kind in loaded.report.parameters.items() if kind == "kept"}
        self.kept = frozenset(kept)
        self.tensors = allocated(loaded.filled)
        self._session = Loader(program, self.tensors).update()

    def feed(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take tensors of the new checkpoint, in any order and any number of calls; raises MapperError for a wrong one."""
        for name, tensor in tensors:
            self._session.feed(name, tensor)

    def feed_files(self, checkpoint: Checkpoint) -> None:
        """Take every tensor of a checkpoint's files."""
        with CheckpointFiles(checkpoint) as files:
            self.feed((name, files.tensor(header)) for name, header in checkpoint.tensors.items())

    def finish(self) -> LoadReport:
        """Return the account; raises MapperError naming what is missing, and more may be fed then."""
        return self._session.finish()

    @property
    def filled(self) -> dict[str, torch.Tensor]:
        """The new values by parameter, without those that no checkpoint fills."""
        return {name: tensor for name, tensor in self.tensors.items() if name not in self.kept}


def require_updatable(model: nn.Module) -> Loaded:
    """Return what is known about the model; raises MapperError M755 or M754."""
    loaded = loaded_of(model)
    reason = _reason(model, loaded)
    if reason is not None:
        raise MapperError([finding("M755", reason=reason)])
    assert loaded is not None
    assert loaded.served is not None
    moved = changes(loaded.served, model)
    if moved:
        raise MapperError(moved)
    return loaded


def _reason(model: nn.Module, loaded: Loaded | None) -> str | None:
    if loaded is None or loaded.served is None:
        return "mapper has not loaded it (`--load-format mapper`)"
    delegated = loaded.report.counts["delegated"]
    if delegated:
        return f"{delegated:,} of its parameters were left to vLLM's own loader"
    if loaded.engine.redundant_experts:
        return "vLLM moves redundant experts about as it runs"
    if hasattr(model, "process_weights_after_loading"):
        return f"{type(model).__name__} derives tensors after a load that vLLM does not derive again"
    return None


def allocated(filled: Mapping[str, Trace], *, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Return unwritten tensors of these shapes and dtypes; names that were one tensor are one again."""
    tensors: dict[int, torch.Tensor] = {}
    for trace in filled.values():
        if trace.number not in tensors:
            tensors[trace.number] = torch.empty(trace.shape, dtype=trace.dtype, device=device)
    return {name: tensors[trace.number] for name, trace in filled.items()}


def answered(method: Callable[Arguments, object]) -> Callable[Arguments, Answer]:
    """Return a method that tells what it refuses instead of raising it."""

    @wraps(method)
    def answering(*arguments: Arguments.args, **named: Arguments.kwargs) -> Answer:
        try:
            return {"gave": method(*arguments, **named), "findings": []}
        except MapperError as error:
            return {"gave": None, "findings": as_objects(error.diagnostics)}

    return answering


def packed(tensors: Iterable[tuple[str, torch.Tensor]]) -> bytes:
    """Return the tensors as bytes, which vLLM carries between its processes where it carries no tensors."""
    data = BytesIO()
    torch.save(dict(tensors), data)
    return data.getvalue()


def unpacked(data: bytes) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors that `packed` has packed."""
    return list(torch.load(BytesIO(data), map_location="cpu", weights_only=True).items())
