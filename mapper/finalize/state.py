"""What a loader knows of its targets between loads and updates."""

from __future__ import annotations

from collections.abc import Container, Set
from dataclasses import dataclass, field

from mapper.diagnostics import MapperError, finding


@dataclass(slots=True)
class TargetState:
    """`filled` targets hold what was loaded; `mixed` ones were touched by an update that did not end well, or has not ended.

    `consumed` names, for each target that a step has destroyed, the step's id and whether it can be restored.
    """

    filled: set[str] = field(default_factory=set)
    mixed: set[str] = field(default_factory=set)
    consumed: dict[str, tuple[str, bool]] = field(default_factory=dict)

    def fill(self, names: Set[str]) -> None:
        """Take `names` as complete."""
        self.filled |= names
        self.mixed -= names

    def require_unmixed(self, *, but: Set[str] = frozenset()) -> None:
        """Raise MapperError M614 for every mixed target but these."""
        left = sorted(self.mixed - but)
        if left:
            raise MapperError([finding("M614", subject=name, name=name) for name in left])

    def require_loadable(self, names: Container[str], *, can_restore: bool = False) -> None:
        """Raise MapperError M624 for every target among `names` that a step has destroyed, unless it can be restored."""
        lost = [
            (name, step) for name, (step, has_way_back) in self.consumed.items()
            if name in names and not (can_restore and has_way_back)
        ]  # fmt: skip
        if lost:
            raise MapperError([finding("M624", subject=name, name=name, step=step) for name, step in lost])
