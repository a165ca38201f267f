"""What a rule is at one set of index values: dims, cuts, leaves and stage as numbers.

Index values under which all of this is equal form one family; `Sizes` is what they are grouped by.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

from mapper.compile.expand import FlatRule
from mapper.compile.names import Names
from mapper.diagnostics import MapperError, Place, finding
from mapper.expressions import STAGE_WORDS, Expression, Value
from mapper.layout import Stage
from mapper.ops.dtypes import safetensors_name
from mapper.pattern import Bindings
from mapper.plan.family import Axis, Cut
from mapper.spec.model import Axis as LeafAxis
from mapper.spec.model import Format, Leaf, Shard, SourceAlternative

Given = TypeVar("Given")


@dataclass(frozen=True, slots=True)
class LeafSizes:
    """One leaf of one format: its names on both sides, its axes (None: the header decides) and what may lie on disk."""

    name: str
    source: str
    target: str
    axes: tuple[Axis, ...] | None
    dtypes: frozenset[str]
    optional: bool
    place: Place


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
    yield from ((flat.names, size) for dim in (rule.dims or {}).values() for size in dim.sizes)
    for shard in rule.shard.values():
        yield from ((flat.names, unit) for unit in shard.units)
        if shard.pad is not None:
            yield flat.names, shard.pad
    if rule.dtype is not None:
        yield flat.names, rule.dtype
    for name in _format_names(flat):
        for alternative in formats.formats[name].alternatives:
            if alternative.when is not None:
                yield formats.names, alternative.when
            for leaf in alternative.leaves:
                axes = (*leaf.dims, *(leaf.stored or ()))
                yield from ((formats.names, axis.divisor) for axis in axes if axis.divisor is not None)
                if leaf.dtype is not None:
                    yield formats.names, leaf.dtype


def sizes_at(flat: FlatRule, formats: Formats, bindings: Bindings) -> Sizes:
    """Return the rule's sizes at these index values; raises MapperError at the rule's place."""
    dims = _dims(flat, bindings)
    cuts = {name: _cut(flat, shard, dims, bindings) for name, shard in flat.rule.shard.items()}
    return Sizes(
        _stage(flat, bindings),
        tuple(
            tuple(
                _leaves(flat, formats, alternative, position, dims, cuts, bindings)
                for position in range(len(alternative.sources))
            )
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


def _dims(flat: FlatRule, bindings: Bindings) -> dict[str, tuple[int, ...]]:
    return {
        name: tuple(
            require_size(flat.names.evaluate(size, bindings, dim.place), f"the size of {name!r} ({size.text})", dim.place)
            for size in dim.sizes
        )
        for name, dim in (flat.rule.dims or {}).items()
    }


def require_size(value: Value, what: str, place: Place | None, *, least: int = 1) -> int:
    """Return the value as a whole number of at least `least`; raises MapperError M304."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise MapperError(
            [finding("M304", place=place, what=what, found=value, expected=f"a whole number of at least {least}")]
        )
    return value


def _cut(flat: FlatRule, shard: Shard, dims: Mapping[str, tuple[int, ...]], bindings: Bindings) -> Cut:
    parts = dims.get(shard.dim, ())
    pad = 1
    if shard.pad is not None:
        pad = require_size(flat.names.evaluate(shard.pad, bindings, shard.place), "pad", shard.place)
    axes = _per_part(shard, [each if isinstance(each, str) else None for each in shard.axis] or [None], len(parts), "axis")
    if shard.units:
        given = [require_size(flat.names.evaluate(unit, bindings, shard.place), "units", shard.place) for unit in shard.units]
        units = _per_part(shard, given, len(parts), "units")
    else:
        units = [-(-size // pad) * pad for size in parts]
    if pad > 1 and len(parts) > 1:
        raise MapperError(
            [finding("M316", place=shard.place, problem=f"{shard.dim!r} has parts, and `pad` rounds up a whole dim")]
        )
    return Cut(tuple(axes), tuple(units), pad)


def _per_part(shard: Shard, given: Sequence[Given], num_parts: int, what: str) -> list[Given]:
    if len(given) == 1:
        return list(given) * num_parts
    if len(given) != num_parts:
        problem = f"{shard.dim!r} has {num_parts} parts and {len(given)} {what}, expected one for each part"
        raise MapperError([finding("M316", place=shard.place, problem=problem)])
    return list(given)


def _leaves(
    flat: FlatRule,
    formats: Formats,
    alternative: SourceAlternative,
    position: int,
    dims: Mapping[str, tuple[int, ...]],
    cuts: Mapping[str, Cut],
    bindings: Bindings,
) -> tuple[LeafSizes, ...]:
    rule = flat.rule
    if not _has_leaf(flat):
        axes = (
            tuple(Axis(name, parts, 1, cuts.get(name)) for name, parts in dims.items()) if flat.rule.dims is not None else None
        )
        return (LeafSizes("", "", "", axes, _dtypes(flat, None, formats, bindings), rule.optional, rule.place),)
    leaves = chosen_leaves(formats, _format_of(flat, alternative, position), bindings, rule.place)
    known = {axis.dim for leaf in leaves for axis in leaf.dims}
    lead = [name for name in dims if name not in known]
    return tuple(
        LeafSizes(
            leaf.name,
            leaf.source,
            leaf.target,
            _leaf_axes(flat, leaf, lead, dims, cuts, formats, bindings),
            _dtypes(flat, leaf, formats, bindings),
            leaf.optional or rule.optional,
            leaf.place,
        )
        for leaf in leaves
    )


def chosen_leaves(formats: Formats, name: str, bindings: Bindings, place: Place) -> tuple[Leaf, ...]:
    """Return the leaves of the format's first alternative whose `when` holds."""
    for alternative in formats.formats[name].alternatives:
        if alternative.when is None or formats.names.evaluate(alternative.when, bindings, alternative.place):
            return alternative.leaves
    raise MapperError([finding("M316", place=place, problem=f"no alternative of the format {name!r} holds for this config")])


def _leaf_axes(
    flat: FlatRule,
    leaf: Leaf,
    lead: list[str],
    dims: Mapping[str, tuple[int, ...]],
    cuts: Mapping[str, Cut],
    formats: Formats,
    bindings: Bindings,
) -> tuple[Axis, ...] | None:
    if flat.rule.dims is None:
        return None
    axes = [Axis(name, dims[name], 1, cuts.get(name)) for name in lead]
    axes += [_axis(flat, axis, dims, cuts, formats, bindings) for axis in leaf.dims]
    if leaf.stored is not None:
        stored = [_axis(flat, axis, dims, cuts, formats, bindings) for axis in leaf.stored]
        if stored != axes[len(lead) :]:
            raise MapperError([finding("M310", place=leaf.place, feature="stored")])
    return tuple(axes)


def _axis(
    flat: FlatRule,
    axis: LeafAxis,
    dims: Mapping[str, tuple[int, ...]],
    cuts: Mapping[str, Cut],
    formats: Formats,
    bindings: Bindings,
) -> Axis:
    if axis.dim is None:
        assert axis.size is not None
        return Axis("", (axis.size,), 1, None)
    if axis.dim not in dims:
        problem = f"the format needs the dim {axis.dim!r}, and the rule has {', '.join(map(repr, dims))}"
        raise MapperError([finding("M316", place=flat.rule.place, problem=problem)])
    divisor = 1
    if axis.divisor is not None:
        value = formats.names.evaluate(axis.divisor, bindings, axis.place)
        divisor = require_size(value, f"the divisor of {axis.dim!r} ({axis.divisor.text})", axis.place)
    return Axis(axis.dim, dims[axis.dim], divisor, cuts.get(axis.dim))


def _dtypes(flat: FlatRule, leaf: Leaf | None, formats: Formats, bindings: Bindings) -> frozenset[str]:
    """Return the safetensors dtypes that may lie on disk; empty means any."""
    for expression, names, place in (
        (flat.rule.dtype, flat.names, flat.rule.place),
        *(((leaf.dtype, formats.names, leaf.place),) if leaf else ()),
    ):
        if expression is not None:
            value = names.evaluate(expression, bindings, place)
            name = safetensors_name(value) if isinstance(value, str) else None
            if name is None:
                raise MapperError(
                    [finding("M304", place=place, what="dtype", found=value, expected="a dtype such as bfloat16")]
                )
            return frozenset({name})
    return frozenset()
