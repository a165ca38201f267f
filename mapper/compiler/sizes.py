"""What a rule is at one set of index values: dims, cuts, leaves and stage as numbers.

Index values under which all of this is equal form one family; `Sizes` is what they are grouped by.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import TypeVar, cast

from mapper.compiler.expand import FlatRule
from mapper.compiler.names import Names
from mapper.compiler.operations import fill_of, operations_of, require_number, value_ops, viewed
from mapper.diagnostics import MapperError, Place, finding
from mapper.expressions import STAGE_WORDS, Expression, Value
from mapper.layout import Stage
from mapper.ops.dtypes import COMPUTED_DTYPES, can_hold, safetensors_name, torch_name
from mapper.pattern import Bindings
from mapper.plan.family import Axis, Conversion, Cut, ValueOp
from mapper.spec.model import PARTS, Dim, Format, Leaf, PairedLeaf, Shard, SourceAlternative
from mapper.spec.model import Axis as LeafAxis

Given = TypeVar("Given")


@dataclass(frozen=True, slots=True)
class StoredAxis:
    """One axis on disk: the dims that run along it, the outer one first, and logical elements per stored element.

    A fixed `size` belongs to the dim before it, as in `[in / 32, 16]`.
    """

    dims: tuple[str, ...]
    divisor: int
    size: int | None


@dataclass(frozen=True, slots=True)
class ScaleSizes:
    """The scales that a leaf is multiplied by while it is read: their name and axes on disk, and what may lie there."""

    source: str
    stored: tuple[StoredAxis, ...]
    dtypes: frozenset[str]


@dataclass(frozen=True, slots=True)
class LeafSizes:
    """One leaf of one format: its names on both sides, its axes (None: the header decides) and what may lie on disk.

    `values`, `fill`, `do` and `neutral` are those of the family.
    """

    name: str
    source: str
    target: str
    axes: tuple[Axis, ...] | None
    stored: tuple[StoredAxis, ...]
    dtypes: frozenset[str]
    conversion: Conversion | None
    scale: ScaleSizes | None
    optional: bool
    place: Place
    values: tuple[ValueOp, ...] = ()
    fill: float | None = None
    do: tuple[str, ...] = ()
    neutral: float = 0


@dataclass(frozen=True, slots=True)
class Sizes:
    """A rule at one set of index values. `leaves` holds the leaves per alternative and source of the rule."""

    stage: Stage
    leaves: tuple[tuple[tuple[LeafSizes, ...], ...], ...]


@dataclass(frozen=True, slots=True)
class Formats:
    """The formats of a runtime and the names their expressions are read with."""

    formats: Mapping[str, Format]
    names: Names


def expressions(flat: FlatRule, formats: Formats) -> Iterator[tuple[Names, Expression]]:
    """Yield every expression that the rule's sizes and conditions come from."""
    rule = flat.rule
    yield from ((condition.names, condition.expression) for condition in flat.conditions)
    if flat.stage is not None:
        yield flat.stage[1], flat.stage[0]
    given = [size for dim in (rule.dims or {}).values() for size in dim.sizes]
    for shard in rule.shard.values():
        given += [*shard.units, *filter(None, (shard.pad, shard.pad_rank, shard.fill))]
    given += filter(None, (rule.dtype, rule.cast, rule.bitcast))
    for operation in (each for listed in rule.do.values() for each in listed):
        given += [size for sizes in operation.sizes.values() for size in sizes]
        given += filter(None, (operation.value,))
    yield from ((flat.names, each) for each in given)
    for name in _format_names(flat):
        for alternative in formats.formats[name].alternatives:
            if alternative.when is not None:
                yield formats.names, alternative.when
            for leaf in alternative.leaves:
                paired = [axis for half in leaf.dequantize or () for axis in half.dims]
                divisors = (axis.divisor for axis in (*leaf.dims, *(leaf.stored or ()), *paired))
                of_leaf = (*divisors, leaf.dtype, leaf.cast, leaf.bitcast, leaf.neutral)
                yield from ((formats.names, each) for each in of_leaf if each is not None)


def sizes_at(flat: FlatRule, formats: Formats, bindings: Bindings) -> Sizes:
    """Return the rule's sizes at these index values; raises MapperError at the rule's place."""
    reader = _Reader(flat, formats, bindings)
    return Sizes(
        _stage(flat, bindings),
        tuple(
            tuple(reader.leaves(alternative, position) for position in range(len(alternative.sources)))
            for alternative in flat.rule.alternatives
        ),
    )


def _format_names(flat: FlatRule) -> set[str]:
    if not _has_leaf(flat):
        return set()
    names = {_format_of(flat, each, position) for each in flat.rule.alternatives for position in range(len(each.sources))}
    return names or {flat.rule.format or "linear"}


def _format_of(flat: FlatRule, alternative: SourceAlternative, position: int) -> str:
    return alternative.sources[position].format or alternative.format or flat.rule.format or "linear"


def _has_leaf(flat: FlatRule) -> bool:
    return "leaf" in flat.target.names


def _stage(flat: FlatRule, bindings: Bindings) -> Stage:
    if flat.stage is None:
        return "all"
    value = flat.stage[1].evaluate(flat.stage[0], bindings, flat.rule.place)
    if isinstance(value, str) and value in STAGE_WORDS:
        return cast(Stage, value)
    raise MapperError(
        [finding("M304", place=flat.rule.place, what="stage", found=value, expected=f"one of {', '.join(STAGE_WORDS)}")]
    )


def require_size(value: Value, what: str, place: Place | None, *, least: int = 1) -> int:
    """Return the value as a whole number of at least `least`; raises MapperError M304."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise MapperError(
            [finding("M304", place=place, what=what, found=value, expected=f"a whole number of at least {least}")]
        )
    return value


class _Reader:
    """Reads one rule at one set of index values."""

    def __init__(self, flat: FlatRule, formats: Formats, bindings: Bindings) -> None:
        self.flat = flat
        self.rule = flat.rule
        self.formats = formats
        self.bindings = bindings
        self.dims = {name: self._sizes(dim) for name, dim in (flat.rule.dims or {}).items()}

    def leaves(self, alternative: SourceAlternative, position: int) -> tuple[LeafSizes, ...]:
        """Return the leaves that one source of the rule has in its format."""
        rule = self.rule
        if not _has_leaf(self.flat):
            axes = stored = None
            if rule.dims is not None:
                cuts = self._cuts({})
                axes = tuple(self._plain_axis(name, 1, cuts) for name in self.dims)
                stored = self._rule_stored(tuple(StoredAxis((name,), 1, None) for name in self.dims))
            dtypes, conversion = self._dtypes(None), self._conversion(None)
            leaf = LeafSizes("", "", "", axes, stored or (), dtypes, conversion, None, rule.optional, rule.place)
            return (self._operated(leaf),)
        leaves = self.chosen_leaves(_format_of(self.flat, alternative, position))
        known = {axis.dim for leaf in leaves for axis in leaf.dims}
        lead = [name for name in self.dims if name not in known]
        cuts = self._cuts(self._blocks(leaves))
        return tuple(self._leaf(leaf, lead, cuts) for leaf in leaves)

    def chosen_leaves(self, name: str) -> tuple[Leaf, ...]:
        """Return the leaves of the format's first alternative whose `when` holds."""
        for alternative in self.formats.formats[name].alternatives:
            if alternative.when is None or self.formats.names.evaluate(alternative.when, self.bindings, alternative.place):
                return alternative.leaves
        problem = f"no alternative of the format {name!r} holds for this config"
        raise MapperError([finding("M316", place=self.rule.place, problem=problem)])

    def _leaf(self, leaf: Leaf, lead: list[str], cuts: Mapping[str, Cut]) -> LeafSizes:
        neutral = self._neutral(leaf)
        axes: tuple[Axis, ...] | None = None
        stored: tuple[StoredAxis, ...] = ()
        if self.rule.dims is not None:
            leading = (self._plain_axis(name, 1, cuts, neutral) for name in lead)
            axes = (*leading, *(self._axis(axis, cuts, neutral) for axis in leaf.dims))
            stored = self._on_disk(lead, leaf.dims if leaf.stored is None else leaf.stored)
        elif leaf.dequantize is not None:
            raise MapperError([finding("M316", place=self.rule.place, problem="a rule that dequantizes needs `dims`")])
        source, dtypes, scale = leaf.source, self._dtypes(leaf), None
        if leaf.dequantize is not None:
            values, scales = leaf.dequantize
            source, stored, dtypes = values.name, self._on_disk(lead, values.dims), self._dtypes_of(values)
            scale = ScaleSizes(scales.name, self._on_disk(lead, scales.dims), self._dtypes_of(scales))
        found = LeafSizes(
            leaf.name, source, leaf.target, axes, stored, dtypes, self._conversion(leaf), scale,
            leaf.optional or self.rule.optional, leaf.place, neutral=neutral,
        )  # fmt: skip
        return self._operated(found)

    def _operated(self, leaf: LeafSizes) -> LeafSizes:
        """Return the leaf with the operations that the rule does to it."""
        operations = operations_of(self.rule, leaf.name)
        if not operations:
            return leaf
        place = operations[0].place

        def evaluate(expression: Expression) -> Value:
            return self.flat.names.evaluate(expression, self.bindings, place)

        axes = leaf.axes if leaf.axes is None else viewed(leaf.axes, operations, self.rule, evaluate)
        values = value_ops(axes, operations, evaluate)
        do = tuple(each.text for each in operations)
        if values and leaf.conversion is not None and leaf.conversion.dtype not in COMPUTED_DTYPES:
            problem = f"the target is {torch_name(leaf.conversion.dtype)}, expected float16, bfloat16, float32 or float64"
            raise MapperError([finding("M342", place=place, op=", ".join(do), problem=problem)])
        return replace(leaf, axes=axes, values=values, fill=fill_of(operations, evaluate), do=do)

    def _on_disk(self, lead: list[str], axes: Sequence[LeafAxis]) -> tuple[StoredAxis, ...]:
        return self._rule_stored((*(StoredAxis((name,), 1, None) for name in lead), *map(self._stored_axis, axes)))

    def _dtypes_of(self, half: PairedLeaf) -> frozenset[str]:
        if half.dtype is None:
            return frozenset()
        value = self.formats.names.evaluate(half.dtype, self.bindings, half.place)
        return frozenset({self._safetensors(value, half.place)})

    def _sizes(self, dim: Dim) -> tuple[int, ...]:
        evaluate = self.flat.names.evaluate
        return tuple(
            require_size(evaluate(size, self.bindings, dim.place), f"the size of {dim.name!r} ({size.text})", dim.place)
            for size in dim.sizes
        )

    def _blocks(self, leaves: Sequence[Leaf]) -> dict[str, int]:
        """Return per dim the elements that no cut may separate: the common multiple of all leaves' divisors."""
        blocks: dict[str, int] = {}
        for leaf in leaves:
            for axis in (*leaf.dims, *(leaf.stored or ())):
                if axis.dim is not None and axis.dim in self.dims:
                    blocks[axis.dim] = lcm(blocks.get(axis.dim, 1), self._divisor(axis))
        return blocks

    def _cuts(self, blocks: Mapping[str, int]) -> dict[str, Cut]:
        return {name: self._cut(shard, blocks.get(name, 1)) for name, shard in self.rule.shard.items()}

    def _cut(self, shard: Shard, block: int) -> Cut:
        parts = self.dims.get(shard.dim, ())
        sizes = [sum(parts)] * len(parts) if shard.joined else parts
        pad = self._shard_size(shard.pad, "pad", shard)
        pad_rank = self._shard_size(shard.pad_rank, "pad_rank", shard)
        named = [each if isinstance(each, str) else None for each in shard.axis] or [None]
        axes = _per_part(shard, named, len(parts), "axis")
        if shard.units:
            given = [self._shard_size(unit, "units", shard) for unit in shard.units]
            units = _per_part(shard, given, len(parts), "units")
        elif shard.uneven is not None:
            units = [-(-size // block) for size in sizes]
        else:
            units = [-(-size // pad) * pad for size in sizes]
        if pad > 1 and len(parts) > 1:
            problem = f"{shard.dim!r} has parts, and `pad` rounds up a whole dim"
            raise MapperError([finding("M316", place=shard.place, problem=problem)])
        if shard.joined and (len(shard.axis) > 1 or len(shard.units) > 1 or len(self.rule.targets) > 1):
            problem = f"{shard.dim!r} is cut as one, expected one axis, one number of units and one target"
            raise MapperError([finding("M316", place=shard.place, problem=problem)])
        return Cut(tuple(axes), tuple(units), pad, shard.uneven, pad_rank, shard.replicate, shard.joined)

    def _shard_size(self, expression: Expression | None, what: str, shard: Shard) -> int:
        if expression is None:
            return 1
        return require_size(self.flat.names.evaluate(expression, self.bindings, shard.place), what, shard.place)

    def _neutral(self, leaf: Leaf) -> float:
        if leaf.neutral is None:
            return 0
        what = f"the neutral value of {leaf.name!r}"
        value = require_number(self.formats.names.evaluate(leaf.neutral, self.bindings, leaf.place), what, leaf.place)
        conversion = self._conversion(leaf)
        for dtype in self._dtypes(leaf) if conversion is None else (conversion.dtype,):
            if not can_hold(dtype, value):
                expected = f"a number that {torch_name(dtype)} holds"
                raise MapperError([finding("M304", place=leaf.place, what=what, found=value, expected=expected)])
        return value

    def _fill(self, name: str, neutral: float) -> float:
        shard = self.rule.shard.get(name)
        if shard is None or shard.fill is None:
            return neutral
        return require_number(self.flat.names.evaluate(shard.fill, self.bindings, shard.place), "fill", shard.place)

    def _plain_axis(self, name: str, divisor: int, cuts: Mapping[str, Cut], neutral: float = 0) -> Axis:
        return Axis(name, self.dims[name], divisor, cuts.get(name), self._fill(name, neutral))

    def _axis(self, axis: LeafAxis, cuts: Mapping[str, Cut], neutral: float) -> Axis:
        if axis.dim is None:
            assert axis.size is not None
            return Axis("", (axis.size,), 1, None)
        if axis.dim == PARTS:
            return Axis(PARTS, (1,) * max((len(parts) for parts in self.dims.values()), default=1), 1, None, per_part=True)
        if axis.dim not in self.dims:
            problem = f"the format needs the dim {axis.dim!r}, and the rule has {', '.join(map(repr, self.dims))}"
            raise MapperError([finding("M316", place=self.rule.place, problem=problem)])
        return self._plain_axis(axis.dim, self._divisor(axis), cuts, neutral)

    def _divisor(self, axis: LeafAxis) -> int:
        if axis.divisor is None:
            return 1
        value = self.formats.names.evaluate(axis.divisor, self.bindings, axis.place)
        return require_size(value, f"the divisor of {axis.dim!r} ({axis.divisor.text})", axis.place)

    def _stored_axis(self, axis: LeafAxis) -> StoredAxis:
        if axis.dim is None:
            return StoredAxis((), 1, axis.size)
        return StoredAxis((axis.dim,), self._divisor(axis), None)

    def _rule_stored(self, stored: tuple[StoredAxis, ...]) -> tuple[StoredAxis, ...]:
        """Fold dims that the rule says run along another dim's axis on disk: `stored: {out: (expert out)}`."""
        folded = {dim for name, dims in self.rule.stored.items() for dim in dims if dim != name}
        kept = [each for each in stored if not set(each.dims) & folded]
        return tuple(replace(each, dims=self.rule.stored.get(each.dims[0], each.dims)) if each.dims else each for each in kept)

    def _dtypes(self, leaf: Leaf | None) -> frozenset[str]:
        """Return the safetensors dtypes that may lie on disk; empty means any."""
        for expression, names, place in self._given(leaf, "dtype"):
            return frozenset({self._safetensors(names.evaluate(expression, self.bindings, place), place)})
        return frozenset()

    def _conversion(self, leaf: Leaf | None) -> Conversion | None:
        for key in ("cast", "bitcast"):
            for expression, names, place in self._given(leaf, key):
                value = names.evaluate(expression, self.bindings, place)
                if value is None or value == "none":
                    return None
                return Conversion(self._safetensors(value, place), key)
        return None

    def _given(self, leaf: Leaf | None, key: str) -> Iterator[tuple[Expression, Names, Place]]:
        """Yield the rule's own setting of `key` first, then its leaf's."""
        own = getattr(self.rule, key)
        if own is not None:
            yield own, self.flat.names, self.rule.place
        of_leaf = getattr(leaf, key) if leaf is not None else None
        if leaf is not None and of_leaf is not None:
            yield of_leaf, self.formats.names, leaf.place

    def _safetensors(self, value: Value, place: Place) -> str:
        name = safetensors_name(value) if isinstance(value, str) else None
        if name is None:
            raise MapperError([finding("M304", place=place, what="dtype", found=value, expected="a dtype such as bfloat16")])
        return name


def _per_part(shard: Shard, given: Sequence[Given], num_parts: int, what: str) -> list[Given]:
    if len(given) == 1:
        return list(given) * num_parts
    if len(given) != num_parts:
        problem = f"{shard.dim!r} has {num_parts} parts and {len(given)} {what}, expected one for each part"
        raise MapperError([finding("M316", place=shard.place, problem=problem)])
    return list(given)
