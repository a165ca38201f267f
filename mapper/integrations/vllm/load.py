"""One load inside an engine, from files: proved parameters are written here, the others by the engine's own loader."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from mapper.checkpoint import Checkpoint
from mapper.compiler import Program
from mapper.diagnostics import MapperError, finding
from mapper.integrations.vllm.division import Division, divide
from mapper.integrations.vllm.engine import Engine, layout_of, program_of, rank_of, require_known, spec_of
from mapper.integrations.vllm.report import EngineReport
from mapper.integrations.vllm.settings import Settings
from mapper.integrations.vllm.targets import targets_of
from mapper.load import Loader
from mapper.plan.plan import Plan
from mapper.transfer.bind import Binding, Model
from mapper.transfer.files import CheckpointFiles


@dataclass(frozen=True, slots=True)
class Fallback:
    """The engine's own means: `whole` loads the model from its checkpoint, `part` a stream; both return the names loaded."""

    whole: Callable[[], set[str] | None]
    part: Callable[[Iterator[tuple[str, torch.Tensor]]], set[str] | None]


def load(engine: Engine, settings: Settings, model: nn.Module, checkpoint: Checkpoint, fallback: Fallback) -> EngineReport:
    """Fill the model and return the account; raises MapperError before the first write.

    A model without a spec is left to the engine whole. So is a draft of which the spec covers only a part: what a draft
    shares with its target is decided by what one call of its loader sees.
    """
    require_known(engine)
    found = spec_of(engine, settings)
    if isinstance(found, str):
        return _whole(engine, settings, model, fallback, found)
    program = program_of(engine, settings, *found, shapes_of(model))
    targets = targets_of(model, program)
    division = divide(program, checkpoint, targets)
    if division.delegated:
        name, why = next(iter(division.delegated.items()))
        _require_allowed(settings, f"{len(division.delegated)} parameters, {name!r} first,", why)
        if program.runtime != "vllm":
            return _whole(engine, settings, model, fallback, f"a draft of which {program.spec.id!r} covers only a part: {why}")
    return _divided(engine, program, division, targets, checkpoint, fallback)


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the local shapes of the model's parameters."""
    return {name: tuple(tensor.shape) for name, tensor in targets_of(model).items()}


def _divided(
    engine: Engine,
    program: Program,
    division: Division,
    targets: dict[str, torch.Tensor],
    checkpoint: Checkpoint,
    fallback: Fallback,
) -> EngineReport:
    report = _Proved(program, division.plan, division.binding).load(checkpoint)
    loaded: set[str] | None = None
    if division.delegated:
        # After the proved ones: what a model's loader derives at its end is derived from all of them.
        loaded = fallback.part(_tensors(checkpoint, division.handed_over))
    kinds = {name: "delegated" if name in division.delegated else "proved" for name in targets}
    kept = {id(targets[name]) for name in report.kept}
    kinds |= {name: "kept" for name, tensor in targets.items() if id(tensor) in kept}
    return EngineReport(
        vllm=engine.version,
        architectures=engine.architectures,
        spec=program.spec.id,
        runtime=program.runtime,
        layout=str(program.layout),
        rank=program.rank,
        options=program.options,
        parameters=kinds,
        why=division.delegated,
        handed_over=len(division.handed_over),
        unconfirmed=() if loaded is None else tuple(name for name in division.delegated if name not in loaded),
        load=report,
    )


def _whole(engine: Engine, settings: Settings, model: nn.Module, fallback: Fallback, why: str) -> EngineReport:
    _require_allowed(settings, "the whole model", why)
    names = targets_of(model)
    loaded = fallback.whole()
    return EngineReport(
        vllm=engine.version,
        architectures=engine.architectures,
        layout=str(layout_of(engine)),
        rank=rank_of(engine),
        parameters=dict.fromkeys(names, "delegated"),
        fell_back=why,
        handed_over=None,
        unconfirmed=() if loaded is None else tuple(name for name in names if name not in loaded),
    )


def _require_allowed(settings: Settings, what: str, reason: str) -> None:
    if not settings.fallback:
        raise MapperError([finding("M752", what=what, reason=reason)])


def _tensors(checkpoint: Checkpoint, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield whole tensors as views of the mapped files: only what the engine's loader touches is read."""
    with CheckpointFiles(checkpoint) as files:
        for name in names:
            yield name, files.tensor(checkpoint.tensors[name])


class _Proved(Loader):
    """A loader for a plan that is proved and bound already."""

    def __init__(self, program: Program, plan: Plan, binding: Binding) -> None:
        model: Model = binding.tensors
        super().__init__(program, model)
        self._proved = plan, binding

    def prove(self, checkpoint: Checkpoint) -> tuple[Plan, Binding]:
        return self._proved
