"""What a program does with one source name on its rank, to the box, without a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from mapper.checkpoint import TensorHeader
from mapper.compiler import Program
from mapper.compiler.resolve import Claim, is_here
from mapper.ops.dtypes import safetensors_name
from mapper.plan.family import SourceFamily
from mapper.plan.local import Move
from mapper.plan.matching import match, source_names
from mapper.plan.plan import assemble
from mapper.regions import Box, spell, whole


@dataclass(frozen=True, slots=True)
class Side:
    """One end of a copy: a tensor's name, and the box read or written; `shape` is None where only a header knows it."""

    name: str
    box: Box
    shape: tuple[int, ...] | None

    def is_written_as(self, box: Box | None) -> bool:
        """Return whether a case that writes `box` (None: the whole tensor) means this one.

        Full axes at the end of a box may be left out.
        """
        if self.shape is None or box is None:
            return box is None and (self.shape is None or self.box == whole(self.shape))
        return len(box) <= len(self.shape) and (*box, *whole(self.shape[len(box) :])) == self.box

    def __str__(self) -> str:
        """Return the side as a case writes it: `a.b[9, 0:2048]`, without the full axes at its end."""
        if self.shape is None:
            return self.name
        full = whole(self.shape)
        cut = max((axis + 1 for axis, interval in enumerate(self.box) if interval != full[axis]), default=0)
        return self.name + (spell(self.box[:cut]) if cut else "")


@dataclass(frozen=True, slots=True)
class Effect:
    """One copy of this rank, and the claim it comes from."""

    claim: Claim
    source: Side
    target: Side


def effects(program: Program, name: str) -> tuple[Effect, ...]:
    """Return every copy that the program makes from the source `name` on its rank, as its plan would.

    Each rule that reads the name is planned as if the checkpoint had all sources of the rule, spelled as this one is.
    A tied target is no copy: it is the storage of its twin.
    """
    claims = (claim for claim in program.resolve(name).claims if is_here(claim, program.share))
    found = (effect for claim in claims for effect in _effects_of(program, name, claim))
    # A name may be a source in several spellings of one rule; the copy is the same.
    distinct: dict[tuple[Side, Side], Effect] = {}
    for effect in found:
        distinct.setdefault((effect.source, effect.target), effect)
    return tuple(distinct.values())


def _effects_of(program: Program, name: str, claim: Claim) -> Iterator[Effect]:
    family = claim.family
    fixed = {index: (value,) for index, value in claim.bindings.items() if index != family.stack}
    domains = {**family.domains, **fixed}
    sources = tuple(
        replace(source, domains={index: domains[index] for index in source.domains})
        for source in family.alternatives[claim.alternative]
    )
    narrowed = replace(family, domains=domains, alternatives=(sources,))
    shapes = [source.disk.shape if source.disk is not None else None for source in sources]
    headers = {
        each: TensorHeader(_dtype(source), shape or (), -1, 0, 0)
        for source, shape in zip(sources, shapes, strict=True)
        for each in source_names(source)
    }
    plan = assemble(match([narrowed], (), headers), program.share, (), headers)
    disk = sources[claim.position].disk
    source_shape = disk.seen if disk is not None else None
    for step in plan.steps():
        if name in (step.source, step.scale):  # the plan holds the rule's other sources too
            target_shape = plan.targets[step.target].shape if source_shape is not None else None
            box, target_box = Move(step.source_box, step.target_box, step.weaves).spans
            if name == step.scale:
                assert step.reading is not None
                assert step.reading.scaling is not None
                box = step.reading.scaling.box(step.source_box)
            yield Effect(claim, Side(name, box, source_shape), Side(step.target, target_box, target_shape))


def _dtype(source: SourceFamily) -> str:
    any_dtype = safetensors_name("bfloat16")
    assert any_dtype is not None
    return min(source.dtypes, default=any_dtype)
