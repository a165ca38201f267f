"""What one rank holds: its position on every mesh axis, and the index values that are its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import get_args

from mapper.layout import Mesh, Stage, expert_slots, on_stage, stage_layers
from mapper.pattern import IndexValue
from mapper.plan.family import Domains


@dataclass(frozen=True)
class Share:
    """One rank of a mesh. `domains` are the ranges of all indices, `placed` the mesh axis that owns an index.

    `whole` are the ranges before a `where` took values out: layers are dealt to stages by number, whichever of them count.
    """

    mesh: Mesh
    rank: int
    domains: Domains
    placed: Mapping[str, str]
    whole: Domains = field(default_factory=dict)

    def coordinate(self, axis: str) -> tuple[int, int]:
        """Return (size, position) of this rank along a mesh axis."""
        return self._coordinates[axis]

    @cached_property
    def _coordinates(self) -> dict[str, tuple[int, int]]:
        return {axis: (size, self.mesh.coordinate(axis, self.rank)) for axis, size in self.mesh.sizes.items()}

    @property
    def position(self) -> tuple[tuple[int, int], ...]:
        """The rank's place on all axes; ranks with equal positions cut alike."""
        return tuple(self._coordinates.values())

    def holds(self, stage: Stage) -> bool:
        """Return whether what is marked `stage` lives on this rank."""
        return self._stages[stage]

    @cached_property
    def _stages(self) -> dict[Stage, bool]:
        return {stage: on_stage(stage, self.mesh.layout, self.rank) for stage in get_args(Stage)}

    def slots(self, index: str) -> tuple[IndexValue, ...]:
        """Return the values of an index that live here, in slot order; all of them where no axis owns the index."""
        return self._slots[index]

    @cached_property
    def _slots(self) -> dict[str, tuple[IndexValue, ...]]:
        return {index: self._slots_of(index, values) for index, values in self.domains.items()}

    def _slots_of(self, index: str, values: tuple[IndexValue, ...]) -> tuple[IndexValue, ...]:
        axis = self.placed.get(index)
        if axis is None:
            return values
        if axis == "pp":
            layers = self.whole.get(index, values)
            owned = stage_layers(len(layers), self.mesh.layout, self._coordinates[axis][1])
            return tuple(value for value in layers[owned.start : owned.stop] if value in values)
        return tuple(values[expert] for expert in self.held_slots(len(values)))

    def held_slots(self, count: int) -> tuple[int, ...]:
        """Return which of `count` experts are in this rank's slots, in slot order."""
        known = self._held.get(count)
        if known is None:
            (size, position), mesh = self._coordinates["ep"], self.mesh
            known = expert_slots(count, size, position, redundant=mesh.redundant_experts, placement=mesh.placement)
            self._held[count] = known
        return known

    @cached_property
    def _held(self) -> dict[int, tuple[int, ...]]:
        return {}

    def owned(self, index: str, values: tuple[IndexValue, ...]) -> tuple[IndexValue, ...]:
        """Return those of `values` that live here, each once, in slot order."""
        if index not in self.placed:
            return values
        here = tuple(dict.fromkeys(self._slots[index]))
        if len(values) == len(self.domains[index]):
            return here
        wanted = set(values)
        return tuple(value for value in here if value in wanted)
