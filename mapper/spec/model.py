"""A spec as frozen data: what the YAML says, every part with its place, nothing evaluated.

Sections mirror the language reference. Texts that hold expressions or patterns are parsed; dims are names with divisors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mapper.diagnostics import Place
from mapper.expressions import Expression
from mapper.expressions import parse as parse_expression
from mapper.pattern import Pattern

Literals = int | float | str | bool | list[object] | dict[str, object] | None
Status = Literal["draft", "checked", "verified"]

PARTS = "parts"


@dataclass(frozen=True, slots=True, eq=False)
class PlacedExpression(Expression):
    """An expression as a spec spells it. Every expression of a spec that is written as text is one of these."""

    place: Place

    def __reduce__(self) -> tuple[Any, ...]:
        return placed_expression, (self.text, self.place)


@dataclass(frozen=True, slots=True, eq=False)
class PlacedPattern(Pattern):
    """A pattern as a spec spells it; `place` is where its text starts."""

    place: Place


@dataclass(frozen=True, slots=True)
class ConfigKey:
    """A key of config.json. `path` is where it lies there; `default` is None for a required key."""

    name: str
    path: str
    default: Expression | None
    place: Place


@dataclass(frozen=True, slots=True)
class Option:
    name: str
    default: Literals
    note: str
    place: Place


@dataclass(frozen=True, slots=True)
class Let:
    """`name: expression`, or `name(parameter): expression`."""

    name: str
    parameter: str | None
    expression: Expression
    place: Place


@dataclass(frozen=True, slots=True)
class Index:
    """Either a range (`first`, `count`, filtered by `where`) or literal `values`; `axis` is the mesh axis that owns it."""

    name: str
    first: Expression | None
    count: Expression | None
    axis: str | None
    where: Expression | None
    values: tuple[str | int, ...] | None
    place: Place


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a leaf: a dim divided by `divisor` (None: 1), or with `dim` None a fixed number of elements.

    The dim `PARTS` is one element for each part of the rule.
    """

    dim: str | None
    divisor: Expression | None
    size: int | None
    place: Place


@dataclass(frozen=True, slots=True)
class PairedLeaf:
    """One half of a dequantised pair, as stored."""

    name: str
    dims: tuple[Axis, ...]
    dtype: Expression | None
    place: Place


@dataclass(frozen=True, slots=True)
class Leaf:
    """One tensor of a logical tensor. `dims` in the target, `stored` on disk (None: the same); names on both sides.

    `neutral` is the number that stands for nothing in the target (None: 0).
    """

    name: str
    source: str
    target: str
    dims: tuple[Axis, ...]
    stored: tuple[Axis, ...] | None
    dtype: Expression | None
    cast: Expression | None
    bitcast: Expression | None
    neutral: Expression | None
    dequantize: tuple[PairedLeaf, PairedLeaf] | None
    optional: bool
    place: Place


@dataclass(frozen=True, slots=True)
class FormatAlternative:
    when: Expression | None
    leaves: tuple[Leaf, ...]
    place: Place


@dataclass(frozen=True, slots=True)
class Format:
    """A logical tensor's leaves; the first alternative whose `when` holds counts."""

    name: str
    alternatives: tuple[FormatAlternative, ...]
    place: Place


@dataclass(frozen=True, slots=True)
class Source:
    pattern: Pattern
    format: str | None
    place: Place


@dataclass(frozen=True, slots=True)
class SourceAlternative:
    """One way a checkpoint may spell a rule's sources: one per part, or one that holds all parts."""

    sources: tuple[Source, ...]
    format: str | None
    place: Place


@dataclass(frozen=True, slots=True)
class Dim:
    """The size of a dim; more than one size means parts, laid end to end."""

    name: str
    sizes: tuple[Expression, ...]
    has_parts: bool
    place: Place


@dataclass(frozen=True, slots=True)
class Shard:
    """How a dim is cut. `axis` and `units` hold one entry, or one per part."""

    dim: str
    axis: tuple[str | None, ...]
    units: tuple[Expression, ...]
    pad: Expression | None
    uneven: Literal["pad", "short"] | None
    pad_rank: Expression | None
    fill: Expression | None
    bias: Literal["first", "all"] | None
    replicate: bool
    joined: bool
    place: Place


@dataclass(frozen=True, slots=True)
class Formula:
    """`(head part width) in -> (part head width) in`: the factors of each axis on both sides; a bare dim is one factor.

    `bare` says of each axis of the left side whether it is a dim by its name.
    """

    text: str
    left: tuple[tuple[str, ...], ...]
    right: tuple[tuple[str, ...], ...]
    bare: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class ValueOperation:
    """One step of a rule's `do`. What it takes depends on its name.

    A `formula` has the sizes of its factors in `sizes`, more than one for a factor that has one in each part; `parts` are
    the parts it is for, counted from 1 (none: the dim as a whole). `value` is a number, `dim` the name of a dim.
    """

    name: Literal["view", "repeat", "neg_exp", "add", "multiply", "fill", "subtract_mean"]
    formula: Formula | None
    sizes: Mapping[str, tuple[Expression, ...]]
    parts: tuple[int, ...]
    value: Expression | None
    dim: str
    place: Place

    @property
    def text(self) -> str:
        """The operation as a report names it."""
        given = self.formula.text if self.formula else self.value.text if self.value else self.dim
        return f"{self.name} {given}".strip()


# The operations of each leaf by name; those under the empty name are for every leaf.
ValueOperations = Mapping[str, tuple[ValueOperation, ...]]


@dataclass(frozen=True, slots=True)
class Rule:
    """One mapping from sources to a target. Patterns are relative to the groups around the rule.

    `dims` is None where the rule states none (the header's shape counts); empty is a scalar.
    """

    targets: tuple[Pattern, ...]
    alternatives: tuple[SourceAlternative, ...]
    others: Literal["error", "skip"]
    stack: tuple[tuple[str, str | None], ...]
    dims: Mapping[str, Dim] | None
    stored: Mapping[str, tuple[str, ...]]
    append: str | None
    shard: Mapping[str, Shard]
    format: str | None
    dtype: Expression | None
    cast: Expression | None
    bitcast: Expression | None
    optional: bool
    stage: Expression | None
    do: ValueOperations
    tie: Pattern | None
    reuse: bool
    when: Expression | None
    id: str
    note: str
    place: Place


@dataclass(frozen=True, slots=True)
class Group:
    """Rules under a common prefix and condition; `use` names a block in place of `rules`."""

    source: Pattern
    target: Pattern
    when: Expression | None
    stage: Expression | None
    let: Mapping[str, Let]
    items: tuple[Rule | Group, ...]
    use: str | None
    place: Place


Item = Rule | Group


@dataclass(frozen=True, slots=True)
class Skip:
    """Sources that are not loaded on purpose; `copy_of` names the source that holds the same."""

    pattern: Pattern
    copy_of: Pattern | None
    why: str
    when: Expression | None
    id: str
    place: Place


@dataclass(frozen=True, slots=True)
class Keep:
    """Targets that keep their value on purpose."""

    pattern: Pattern
    why: str
    when: Expression | None
    id: str
    place: Place


@dataclass(frozen=True, slots=True)
class Requirement:
    that: Expression
    why: str
    place: Place


@dataclass(frozen=True, slots=True)
class Count:
    """Sources for each value of the index: as many values as the config key says, unless the option overrules it."""

    index: str
    source: Pattern
    config: str
    option: str
    why: str
    place: Place


@dataclass(frozen=True, slots=True)
class Mesh:
    """A preset, with axes added to it: each a size that is 1 or a product of base axes."""

    like: str
    axes: Mapping[str, Expression]
    redundant_experts: Expression | None
    round_robin: Expression | None
    place: Place


@dataclass(frozen=True, slots=True)
class StepFormula:
    """The factors of each axis before, and the names of the axes after: `mix (stream hidden) -> mix hidden`.

    A factor that the right side lacks is summed over. Whole numbers are factors of that size.
    """

    left: tuple[tuple[str, ...], ...]
    right: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class StepOperation:
    """One operation of a finalize step. What it does not use is empty.

    `formula` is that of a view or a sum, `ranges` are those of a take by axis, `arguments` the dtype of a cast or the blocks
    of a dequantisation, `function` is what is called, and `sizes` are the further keys.
    """

    name: Literal["view", "sum", "take", "cast", "dequantize", "call"]
    formula: StepFormula | None
    ranges: Mapping[str, tuple[Expression, ...]]
    arguments: tuple[Expression, ...]
    function: str
    sizes: Mapping[str, Expression]
    place: Place


@dataclass(frozen=True, slots=True)
class Finalize:
    """A step that derives `output` from loaded targets; `consumes` marks one that destroys its inputs."""

    id: str
    inputs: tuple[Pattern, ...]
    output: Pattern
    kind: Literal["attribute", "buffer", "parameter"]
    do: tuple[StepOperation, ...]
    consumes: bool
    restore: str
    when: Expression | None
    place: Place


@dataclass(frozen=True, slots=True)
class Versions:
    """The versions of one package that a runtime is for, as a PEP 440 specifier such as `>=0.32,<0.34`."""

    specifier: str
    place: Place


@dataclass(frozen=True, slots=True)
class Runtime:
    """How one engine lays a checkpoint out. `versions` are those of the engine's packages, by package."""

    name: str
    versions: Mapping[str, Versions]
    mesh: Mesh
    requires: tuple[Requirement, ...]
    counts: tuple[Count, ...]
    let: Mapping[str, Let]
    index: Mapping[str, Index]
    formats: Mapping[str, Format]
    skip: tuple[Skip, ...]
    keep: tuple[Keep, ...]
    rules: tuple[Item, ...]
    finalize: tuple[Finalize, ...]
    place: Place


@dataclass(frozen=True, slots=True)
class Located:
    """A text with an optional box, as a case pins it: `name[0:4, 2]`; `box` holds (start, stop) pairs."""

    name: str
    box: tuple[tuple[int, int], ...] | None
    place: Place


@dataclass(frozen=True, slots=True)
class Case:
    """A pinned fact: at this config, layout and rank these sources go to these boxes, are skipped, or are unknown."""

    config: str | Mapping[str, object]
    runtime: str
    layout: str
    rank: int
    options: Mapping[str, Literals]
    maps: tuple[tuple[Located, Located], ...]
    skips: tuple[Located, ...]
    unknown: tuple[Located, ...]
    place: Place


@dataclass(frozen=True, slots=True)
class Spec:
    """A whole spec, its parents merged in. `digest` is a hash of every text it was read from."""

    id: str
    title: str
    version: str
    status: Status
    architectures: tuple[str, ...]
    extends: str | None
    config: Mapping[str, ConfigKey]
    options: Mapping[str, Option]
    let: Mapping[str, Let]
    index: Mapping[str, Index]
    formats: Mapping[str, Format]
    blocks: Mapping[str, tuple[Item, ...]]
    runtimes: Mapping[str, Runtime]
    cases: tuple[Case, ...]
    place: Place
    digest: str = field(default="")


def placed_expression(text: str, place: Place) -> PlacedExpression:
    """Return the expression that `text` spells, standing at `place`; raises `ExpressionError`."""
    parsed = parse_expression(text)
    return PlacedExpression(parsed.text, parsed.names, parsed.calls, parsed._run, place)
