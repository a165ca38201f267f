"""The steps of one rank on one model: each runs when its inputs are complete, and again when one of them changes."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator, MutableMapping

import torch
from torch import nn

from mapper.compiler import Program
from mapper.diagnostics import MapperError, finding
from mapper.finalize.functions import Function, require_function
from mapper.finalize.operations import derive
from mapper.finalize.state import TargetState
from mapper.plan.derived import DerivedStep, steps_on
from mapper.plan.family import Family
from mapper.report.load import Finalized
from mapper.transfer.bind import Model, model_tensors


class Graph:
    """Runs the finalize steps of a program's rank, in one order, into the same storage each time.

    A step exists where all of its inputs are targets of the rank. Its output is created by the first run and written in
    place by every later one.
    """

    def __init__(self, program: Program, model: Model, state: TargetState) -> None:
        """Raise MapperError M630 for a function that does not exist, M632 where a mapping cannot take an output."""
        self._model = model
        self._state = state
        self._current: set[str] = set()
        self.steps: tuple[DerivedStep, ...] = ()
        self._functions: dict[str, Function] = {}
        if program.steps:
            self.steps = tuple(steps_on(program.steps, program.share, targets_on(program, set(model_tensors(model)))))
        if self.steps and not isinstance(model, nn.Module | MutableMapping):
            raise MapperError([finding("M632", subject=self.steps[0].output, output=self.steps[0].output)])
        for step in self.steps:
            called = [each.function for each in step.operations if each.function]
            for name in (*called, step.restore) if step.restore else called:
                self._functions[name] = require_function(name, step.id, step.place)

    def run(self, changed: Collection[str]) -> tuple[Finalized, ...]:
        """Run the steps that read from `changed` targets, and those that follow; return them in the order in which they ran."""
        return self._run(self._after(changed))

    def run_missing(self) -> tuple[Finalized, ...]:
        """Run the steps that have not run yet."""
        return self._run([step for step in self.steps if step.output not in self._current])

    def forget(self, changed: Collection[str]) -> None:
        """Take the steps that read from `changed` targets, and those that follow, as ones that have not run."""
        self._current -= {step.output for step in self._after(changed)}

    def require_inputs(self, changed: Collection[str], filled: Collection[str]) -> None:
        """Raise MapperError M633 where a step that reads from `changed` would lack another of its inputs."""
        outputs = {step.output for step in self.steps}
        findings = [
            finding("M633", place=step.place, subject=name, step=step.id, name=name)
            for step in self._after(changed)
            for name in step.inputs
            if name not in filled and name not in outputs
        ]
        if findings:
            raise MapperError(findings)

    def restore(self, names: Collection[str]) -> None:
        """Bring back the inputs among `names` that steps have destroyed."""
        for step in self.steps:
            if (
                step.restore
                and not self._state.consumed.keys().isdisjoint(step.inputs)
                and not set(names).isdisjoint(step.inputs)
            ):
                with torch.no_grad():
                    self._functions[step.restore](self._tensor(step, step.output), *self._inputs(step))
                for name in step.inputs:
                    self._state.consumed.pop(name, None)

    def _after(self, changed: Collection[str]) -> list[DerivedStep]:
        dirty = set(changed)
        found = []
        for step in self.steps:
            if not dirty.isdisjoint(step.inputs):
                found.append(step)
                dirty.add(step.output)
        return found

    def _run(self, steps: list[DerivedStep]) -> tuple[Finalized, ...]:
        self._require_complete(steps)
        self._current -= {step.output for step in steps}  # should one fail, it and those behind it have yet to run
        trace = []
        with torch.no_grad():
            for step in steps:
                self._write(step, derive(step, self._inputs(step), self._functions))
                self._current.add(step.output)
                trace.append(Finalized(step.id, step.output))
                if step.consumes:
                    self._state.consumed.update(dict.fromkeys(step.inputs, (step.id, bool(step.restore))))
        return tuple(trace)

    def _require_complete(self, steps: list[DerivedStep]) -> None:
        known = self._state.filled | self._current | {step.output for step in steps}
        findings = [
            finding("M633", place=step.place, subject=name, step=step.id, name=name)
            for step in steps
            for name in step.inputs
            if name not in known or name in self._state.mixed
        ]
        if findings:
            raise MapperError(findings)

    def _inputs(self, step: DerivedStep) -> list[torch.Tensor]:
        return [self._tensor(step, name) for name in step.inputs]

    def _tensor(self, step: DerivedStep, name: str) -> torch.Tensor:
        found = self._find(name)
        if found is None:
            raise MapperError([finding("M634", place=step.place, subject=name, step=step.id, name=name)])
        return found.detach()

    def _find(self, name: str) -> torch.Tensor | None:
        if not isinstance(self._model, nn.Module):
            return self._model.get(name)
        path, _, attribute = name.rpartition(".")
        try:
            found = getattr(self._model.get_submodule(path), attribute, None)
        except AttributeError:
            return None
        return found if isinstance(found, torch.Tensor) else None

    def _write(self, step: DerivedStep, result: torch.Tensor) -> None:
        held = self._find(step.output)
        if held is None or held.is_meta:
            self._create(step, result)
            return
        if (held.shape, held.dtype) != (result.shape, result.dtype):
            expected, found = (f"{each.dtype} {list(each.shape)}" for each in (held, result))
            raise MapperError(
                [finding("M635", place=step.place, subject=step.output, step=step.id, output=step.output, expected=expected,
                         found=found)]
            )  # fmt: skip
        held.detach().copy_(result)

    def _create(self, step: DerivedStep, result: torch.Tensor) -> None:
        own = result.contiguous()
        storages = {each.untyped_storage().data_ptr() for each in self._inputs(step)}
        if own.untyped_storage().data_ptr() in storages:
            own = own.clone()
        if not isinstance(self._model, nn.Module):
            assert isinstance(self._model, MutableMapping), "checked when the graph was made"
            self._model[step.output] = own
            return
        path, _, attribute = step.output.rpartition(".")
        try:
            module = self._model.get_submodule(path)
        except AttributeError as error:
            raise MapperError([finding("M636", place=step.place, subject=path, step=step.id, module=path)]) from error
        for holder in (vars(module), module._buffers, module._parameters):
            holder.pop(attribute, None)  # None, or a tensor on meta
        if step.kind == "buffer":
            module.register_buffer(attribute, own, persistent=False)
        elif step.kind == "parameter":
            module.register_parameter(attribute, nn.Parameter(own, requires_grad=False))
        else:
            setattr(module, attribute, own)


def targets_on(program: Program, held: Container[str] | None) -> set[str]:
    """Return the names of all targets on the program's rank; optional ones only where they are in `held` (None: all)."""
    return {name for name, _ in iter_targets(program, held)}


def iter_targets(program: Program, held: Container[str] | None) -> Iterator[tuple[str, Family]]:
    """Yield the targets of `targets_on`, each with every family that fills it."""
    share = program.share
    for family in program.families:
        if share.holds(family.stage):
            values = {index: share.owned(index, family.domains[index]) for index in family.target.indices}
            for name in family.target.names(values):
                if held is None or not family.optional or name in held:
                    yield name, family
