"""Rule families: one rule and one leaf over all index values with equal sizes, as a single object.

A family says how many names it stands for without spelling them; names and boxes are instantiated from its index sets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mapper.diagnostics import Place
from mapper.layout import Stage
from mapper.pattern import IndexValue, Template

Domains = Mapping[str, tuple[IndexValue, ...]]


@dataclass(frozen=True, slots=True)
class RuleInfo:
    """What a report says of a rule: its number in the program, its target pattern, its place and its note."""

    number: int
    text: str
    place: Place
    note: str


@dataclass(frozen=True, slots=True)
class Cut:
    """How a dim is cut: per part the mesh axis (None: whole) and the units; the whole dim is rounded up to `pad` first."""

    axes: tuple[str | None, ...]
    units: tuple[int, ...]
    pad: int


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a stored tensor: logical sizes of the parts laid along it, and logical elements per stored element."""

    dim: str
    parts: tuple[int, ...]
    divisor: int
    cut: Cut | None

    @property
    def stored_parts(self) -> tuple[int, ...]:
        """The stored size of each part; a last block that is not full counts as one."""
        return tuple(-(-size // self.divisor) for size in self.parts)


@dataclass(frozen=True, slots=True)
class SourceFamily:
    """The source tensors of one part (None: of all parts at once) of a family's targets.

    `domains` are the values of the indices in `template`; `dtypes` the safetensors dtypes allowed on disk (empty: any).
    """

    template: Template
    domains: Domains
    part: int | None
    dtypes: frozenset[str]

    @property
    def num_sources(self) -> int:
        count = 1
        for index in self.template.indices:
            count *= len(self.domains[index])
        return count


@dataclass(frozen=True, slots=True)
class Family:
    """All targets of one rule, leaf and set of sizes.

    `domains` holds the values of every index of the rule here; `placed` says which mesh axis owns an index; `stack` is
    the index that becomes the leading axis. `axes` is None where the checkpoint's header decides the shape.
    `alternatives` are ways to spell the sources, decided per rule; a tied family has none and names its twin in `tie`.
    `refusal` says why its sources may not be there, where the rule leaves open what they would mean.
    """

    number: int
    rule: RuleInfo
    leaf: str
    target: Template
    domains: Domains
    placed: Mapping[str, str]
    stack: str | None
    axes: tuple[Axis, ...] | None
    alternatives: tuple[tuple[SourceFamily, ...], ...]
    stage: Stage
    optional: bool
    skips_others: bool
    tie: Template | None
    refusal: str = ""

    @property
    def target_domains(self) -> Domains:
        """The values of the indices in the target's name."""
        return {index: self.domains[index] for index in self.target.indices}

    @property
    def parts_axis(self) -> int | None:
        """The position of the axis along which parts are laid, or None."""
        return next((position for position, axis in enumerate(self.axes or ()) if len(axis.parts) > 1), None)

    def source_shape(self, source: SourceFamily) -> tuple[int, ...] | None:
        """Return the shape of one source tensor on disk, or None where only its header knows."""
        if self.axes is None:
            return None
        parts_axis = self.parts_axis
        return tuple(
            axis.stored_parts[source.part] if source.part is not None and position == parts_axis else sum(axis.stored_parts)
            for position, axis in enumerate(self.axes)
        )


@dataclass(frozen=True, slots=True)
class SkipRule:
    """A named rule by which sources are left out, or targets kept."""

    number: int
    text: str
    why: str
    templates: tuple[Template, ...]
    place: Place | None

    def matches(self, name: str) -> bool:
        return any(template.match(name) is not None for template in self.templates)
