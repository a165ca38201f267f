"""A name as a source, as a target, or as both: the same text can stand on either side."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mapper.checkpoint import Checkpoint
from mapper.compiler import Program
from mapper.explain.source import SourceExplanation, explain_source
from mapper.explain.target import TargetExplanation, explain_target


@dataclass(frozen=True, slots=True)
class NameExplanation:
    """What a name is. `source` is None for a name that only a target has; one of the two is there."""

    name: str
    spec: str
    runtime: str
    layout: str
    source: SourceExplanation | None
    target: TargetExplanation | None

    @property
    def is_known(self) -> bool:
        """Whether a rule, a skip or a keep names it, on either side."""
        return self.target is not None or (self.source is not None and self.source.outcome != "unknown")

    def to_json(self) -> dict[str, object]:
        """Return the explanation as an object for JSON."""
        return {
            "ok": self.is_known,
            "name": self.name,
            "spec": self.spec,
            "runtime": self.runtime,
            "layout": self.layout,
            "source": self.source.to_json() if self.source else None,
            "target": self.target.to_json() if self.target else None,
        }

    def to_text(self) -> str:
        """Return the explanation for a person."""
        return "\n".join(
            [
                f"{self.spec} {self.runtime} on {self.layout}",
                *(each.to_text() for each in (self.source, self.target) if each is not None),
            ]
        )


def explain_name(
    program: Program, name: str, *, ranks: Iterable[int] | None = None, checkpoint: Checkpoint | None = None
) -> NameExplanation:
    """Return what `name` is on `ranks` (None: all of the layout), as a source and as a target.

    With a checkpoint the answer is about it: its headers, the spelling it has, and its findings about the name.
    """
    chosen = tuple(range(program.layout.num_ranks) if ranks is None else ranks)
    matching = program.match(checkpoint) if checkpoint is not None else None
    target = explain_target(program, name, ranks=chosen, checkpoint=checkpoint, matching=matching)
    source = explain_source(program, name, ranks=chosen, checkpoint=checkpoint, matching=matching)
    only_target = target is not None and source.outcome == "unknown" and not source.is_present
    return NameExplanation(name, program.spec.id, program.runtime, str(program.layout), None if only_target else source, target)
