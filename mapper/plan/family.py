"""Rule families: one rule and one leaf over all index values with equal sizes, as a single object.

A family says how many names it stands for without spelling them; names and boxes are instantiated from its index sets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from mapper.diagnostics import Place
from mapper.layout import Stage
from mapper.pattern import IndexValue, Template
from mapper.plan.weave import AxisView

Domains = Mapping[str, tuple[IndexValue, ...]]


@dataclass(frozen=True, slots=True)
class RuleInfo:
    """What a report says of a rule: its number in the program, its target pattern, its place and its note.

    `because` is the condition under which the rule is in force, with the values of the config that it depends on; empty where
    there is none, or where it depends on an index.
    """

    number: int
    text: str
    place: Place
    note: str
    because: str = ""


@dataclass(frozen=True, slots=True)
class Cut:
    """How a dim is cut: per part the mesh axis (None: whole) and the units of `unit` elements that stay together.

    The whole dim is rounded up to `pad` before the cut, each rank's share of a part to `pad_rank` after it. `uneven` gives
    every rank ceil(units / ranks) units: 'pad' fills up what the last ranks lack, 'short' leaves it out. With `replicate`
    several ranks in a row hold one unit where there are fewer units than ranks. With `joined` the parts are cut as one, laid
    end to end: each entry of `axes` and `units` is then that of the whole dim.
    """

    axes: tuple[str | None, ...]
    units: tuple[int, ...]
    pad: int = 1
    uneven: Literal["pad", "short"] | None = None
    pad_rank: int = 1
    replicate: bool = False
    joined: bool = False


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a target: logical sizes of the parts laid along it, and logical elements per element of the target.

    `fill` is what padding holds. `selected` is the only part that the target holds, where parts go to several targets.
    `view` says how the elements of the sources, laid end to end, are rearranged (None: not at all). With `per_part` each
    part has one element, and a source has one in all, whether it holds one part or several.
    """

    dim: str
    parts: tuple[int, ...]
    divisor: int
    cut: Cut | None
    fill: float = 0
    selected: int | None = None
    view: AxisView | None = None
    per_part: bool = False

    @property
    def source_parts(self) -> tuple[int, ...]:
        """The logical size of each part in the sources: less than in the target where elements are repeated."""
        return self.parts if self.view is None else self.view.source_parts

    @property
    def stored_parts(self) -> tuple[int, ...]:
        """The size of each part in elements of the target's grid; a last block that is not full counts as one."""
        return tuple(-(-size // self.divisor) for size in self.parts)

    @property
    def as_cut(self) -> Axis:
        """The axis with the parts that are cut each on its own: one, where the cut takes them joined."""
        if self.cut is None or not self.cut.joined:
            return self
        cut = replace(self.cut, axes=self.cut.axes[:1], units=self.cut.units[:1], joined=False)
        return replace(self, parts=(sum(self.parts),), cut=cut)


@dataclass(frozen=True, slots=True)
class DiskLayout:
    """How a source lies on disk: its shape there, the shape it is viewed as, and where each axis of the target is in that.

    `divisors` are the logical elements per stored element along each axis of the target; where the target's grid is
    finer, each stored element is repeated. `packed` stored elements, one after the other along the last axis, are the bytes
    of one of the target: shapes in the target's order count them as one. `single` is set where there is one element, and is
    the shape on disk without an axis for it: that element is stored as a scalar, or as a vector of one.
    """

    shape: tuple[int, ...]
    viewed: tuple[int, ...]
    order: tuple[int, ...]
    divisors: tuple[int, ...]
    packed: int = 1
    single: tuple[int, ...] | None = None

    def accepts(self, shape: tuple[int, ...]) -> bool:
        """Whether a source of this shape is one that lies so."""
        return shape == self.shape or (self.single is not None and shape in (self.single, (*self.single, 1)))

    @property
    def seen(self) -> tuple[int, ...]:
        """The shape in the order of the target's axes."""
        return tuple(self.viewed[position] for position in self.order)

    @property
    def is_plain(self) -> bool:
        """Whether the axes on disk are those of the target, in its order."""
        return self.single is None and self.shape == self.viewed and self.order == tuple(range(len(self.order)))


@dataclass(frozen=True, slots=True)
class SourceFamily:
    """The source tensors of one part (None: of all parts at once) of a family's targets.

    `domains` are the values of the indices in `template`; `dtypes` the safetensors dtypes allowed on disk (empty: any);
    `disk` is None where only the header knows the shape. `holds_stack` marks a tensor that has all values of the stacked
    index along its first axis. `scale_of` marks the scales of another source of the same alternative, by its position:
    they are read together with it and fill nothing themselves.
    """

    template: Template
    domains: Domains
    part: int | None
    dtypes: frozenset[str]
    disk: DiskLayout | None = None
    holds_stack: bool = False
    scale_of: int | None = None

    @property
    def num_sources(self) -> int:
        return prod(len(self.domains[index]) for index in self.template.indices)

    @property
    def strides(self) -> dict[str, dict[IndexValue, int]]:
        """Per index, how far each of its values lies along the list of all names; the last index runs fastest."""
        strides: dict[str, dict[IndexValue, int]] = {}
        stride = 1
        for index in reversed(self.template.indices):
            strides[index] = {value: number * stride for number, value in enumerate(self.domains[index])}
            stride *= len(self.domains[index])
        return strides


@dataclass(frozen=True, slots=True)
class Conversion:
    """The dtype of the target where it is not the source's: by value (`cast`) or by bit pattern (`bitcast`)."""

    dtype: str
    by: Literal["cast", "bitcast"]


@dataclass(frozen=True, slots=True)
class ValueOp:
    """What is computed of a source's values: with `value`, or over the whole of the target's axis `axis`."""

    name: Literal["neg_exp", "add", "multiply", "subtract_mean"]
    value: float = 0
    axis: int = 0

    @property
    def reads_whole(self) -> bool:
        """Whether a slice of the result needs the whole source."""
        return self.name == "subtract_mean"


@dataclass(frozen=True, slots=True)
class Family:
    """All targets of one rule, leaf and set of sizes.

    `domains` holds the values of every index of the rule here; `placed` says which mesh axis owns an index. `stack` is the
    index that becomes the leading axis or, with `stack_axis`, lies along that axis. `axes` is None where the checkpoint's
    header decides the shape. `alternatives` are ways to spell the sources, decided per rule; a tied family has none and
    names its twin in `tie`. `after` are the families behind whose slots this one's follow, along axis `append_axis`.
    `only_first` are mesh axes off whose first rank the target holds zeros. `refusal` says why the sources may not be
    there, where the rule leaves open what they would mean. `reuses` marks a second reader of sources. `values` is what is
    computed of the sources, in order; a target with `fill` holds that number and has no sources. `do` spells all operations.
    `neutral` is the number that stands for nothing in the target.
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
    stack_axis: int | None = None
    conversion: Conversion | None = None
    reuses: bool = False
    after: tuple[Family, ...] = ()
    append_axis: int | None = None
    only_first: tuple[str, ...] = ()
    refusal: str = ""
    values: tuple[ValueOp, ...] = ()
    fill: float | None = None
    do: tuple[str, ...] = ()
    neutral: float = 0

    @property
    def parts_axis(self) -> int | None:
        """The position of the axis along which parts are laid, or None."""
        return next((position for position, axis in enumerate(self.axes or ()) if len(axis.parts) > 1), None)


@dataclass(frozen=True, slots=True)
class SkipRule:
    """A named rule by which sources are left out, or targets kept. `copy_of` spells the source of which one is a copy."""

    number: int
    text: str
    why: str
    templates: tuple[Template, ...]
    place: Place | None
    copy_of: Template | None = None

    def matches(self, name: str) -> bool:
        return any(template.match(name) is not None for template in self.templates)

    def original(self, name: str) -> str | None:
        """Return the source of which a name that matches is a copy, or None where the rule does not say."""
        if self.copy_of is None:
            return None
        values = next((found for template in self.templates if (found := template.match(name)) is not None), None)
        assert values is not None, f"{name!r} is skipped by {self.text!r}"
        return self.copy_of.name(values)
