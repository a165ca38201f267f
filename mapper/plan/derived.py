"""Finalize steps as data: what is derived from which targets, with which operations, in which order."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from mapper.diagnostics import Place
from mapper.expressions import Value
from mapper.pattern import IndexValue, literal_template
from mapper.plan.family import SkipRule
from mapper.plan.share import Share
from mapper.spec.model import StepFormula


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation at the sizes of its step. What it does not use is empty.

    `ranges` are (axis, start, stop) of a take, `blocks` the elements per scale of a dequantisation, `dtype` the torch name of
    a cast's, `sizes` the known factors of a formula or the named arguments of a call.
    """

    name: Literal["view", "sum", "take", "cast", "dequantize", "call"]
    formula: StepFormula | None = None
    ranges: tuple[tuple[int, int, int], ...] = ()
    blocks: tuple[int, ...] = ()
    dtype: str = ""
    function: str = ""
    sizes: tuple[tuple[str, Value], ...] = ()


@dataclass(frozen=True, slots=True)
class DerivedStep:
    """A finalize step at one value of each of its indices: the targets it reads, the name it writes.

    `number` counts the steps of the runtime in reading order. `consumes` marks one that destroys its inputs, `restore` is
    the function that brings them back.
    """

    number: int
    id: str
    kind: Literal["attribute", "buffer", "parameter"]
    inputs: tuple[str, ...]
    output: str
    bindings: Mapping[str, IndexValue]
    operations: tuple[Operation, ...]
    consumes: bool
    restore: str
    place: Place


def in_order(steps: Iterable[DerivedStep]) -> tuple[list[DerivedStep], list[DerivedStep]]:
    """Return the steps so that each follows those it reads from, and those that wait for each other in a circle.

    `steps` are in the order of the spec, then of the indices, and of those that could be next the first one is.
    """
    waiting = list(steps)
    pending = {step.output for step in waiting}
    ordered: list[DerivedStep] = []
    while waiting:
        left: list[DerivedStep] = []
        for step in waiting:
            if pending.isdisjoint(step.inputs):
                ordered.append(step)
                pending.discard(step.output)
            else:
                left.append(step)
        if len(left) == len(waiting):
            return ordered, left
        waiting = left
    return ordered, []


def steps_on(steps: Iterable[DerivedStep], share: Share, targets: Collection[str]) -> list[DerivedStep]:
    """Return the steps of one rank in their order: those whose inputs are all targets here, or derived here."""
    known = set(targets)
    held = []
    for step in in_order(steps)[0]:
        is_here = all(value in share.slots(index) for index, value in step.bindings.items())
        if is_here and known.issuperset(step.inputs):
            held.append(step)
            known.add(step.output)
    return held


def as_keeps(steps: Iterable[DerivedStep]) -> tuple[SkipRule, ...]:
    """Return the rules by which what steps write is not missed among the targets."""
    return tuple(
        SkipRule(step.number, f"step {step.id}", "derived after the load", (literal_template(step.output),), step.place)
        for step in steps
    )


def renamed(step: DerivedStep, inputs: Iterable[str], output: str) -> DerivedStep:
    """Return the same step of a program under another root."""
    return replace(step, inputs=tuple(inputs), output=output)
