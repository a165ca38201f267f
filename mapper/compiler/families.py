"""Rules -> families: index values are grouped by what a rule is at them, and each group becomes one family per leaf."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

from mapper.compiler.append import appended
from mapper.compiler.cuts import cut_faults
from mapper.compiler.disk import below_stack, disk_layout
from mapper.compiler.exclusions import LEAF_TEXT, Exclusions, LeftOut, left_out
from mapper.compiler.expand import FlatRule
from mapper.compiler.names import Names
from mapper.compiler.sizes import Formats, LeafSizes, Sizes, StoredAxis, expressions, sizes_at
from mapper.compiler.unsupported import require_supported
from mapper.diagnostics import Diagnostic, MapperError, Place, finding
from mapper.expressions import Expression
from mapper.layout import Mesh
from mapper.pattern import Bindings, IndexValue, Pattern, PatternError, Template, bind, join
from mapper.plan.family import Axis, Conversion, Domains, Family, RuleInfo, SourceFamily
from mapper.spec.model import Source

LEAF = "leaf"
BIAS = "bias"


@dataclass(frozen=True, slots=True)
class Context:
    """What all rules of a program share. `placed` says which mesh axis owns an index.

    `unquantized` are the formats of the modules in `exclusions`.
    """

    formats: Formats
    unquantized: Formats
    exclusions: Exclusions
    domains: Domains
    placed: Mapping[str, str]
    mesh: Mesh


def families_of(rules: list[FlatRule], context: Context) -> tuple[Family, ...]:
    """Return the families of all rules; raises MapperError with the findings of every rule."""
    families: list[Family] = []
    findings: list[Diagnostic] = []
    for flat in rules:
        try:
            for family in _families(flat, context):
                faults = cut_faults(family, context.mesh)
                findings += faults
                families.append(family)
        except MapperError as error:
            findings += error.diagnostics
    if findings:
        raise MapperError(list(dict.fromkeys(findings)))
    return appended([replace(family, number=number) for number, family in enumerate(families)])


def bound(
    pattern: Pattern, names: Names, domains: Domains, place: Place | None, extra: Mapping[str, str] | None = None
) -> Template:
    """Return the template of a pattern, its placeholders evaluated with `names`; `extra` gives texts such as the leaf's."""
    constants: Bindings = dict(extra or {})

    def value_of(expression: Expression, bindings: Bindings) -> object:
        if expression.text in constants:
            return constants[expression.text]
        return names.evaluate(expression, {**bindings, **constants}, place)

    try:
        return bind(pattern, value_of, domains, names.dependence)
    except PatternError as error:
        raise MapperError(
            [finding("M315", place=place, subject=pattern.text, problem=f"in {pattern.text!r}: {error.message}")]
        ) from error


def _families(flat: FlatRule, context: Context) -> Iterator[Family]:
    used = _indices(flat, context)
    excluded = _left_out(flat, context)
    needed = {*_dependent(flat, context, used), *excluded.indices}
    dependent = [index for index in used if index in needed]
    groups: dict[Sizes, list[tuple[IndexValue, ...]]] = {}
    for values in product(*(context.domains[index] for index in dependent)):
        bindings: Bindings = dict(zip(dependent, values, strict=True))
        if all(condition.names.evaluate(condition.expression, bindings, condition.place) for condition in flat.conditions):
            formats = context.unquantized if excluded.holds(bindings) else context.formats
            groups.setdefault(sizes_at(flat, formats, bindings), []).append(values)
    if groups:
        require_supported(flat)
    for sizes, members in groups.items():
        for restricted in as_products(dependent, members):
            domains = {index: restricted.get(index, context.domains[index]) for index in used}
            if all(domains.values()):
                yield from _of_sizes(flat, context, sizes, domains)


def _left_out(flat: FlatRule, context: Context) -> LeftOut:
    """Return where the quantisation config leaves the rule's module out, by the name that either side gives it.

    A source with a format of its own says for itself how it is stored.
    """
    if not context.exclusions or LEAF not in flat.target.names:
        return LeftOut()
    extra = {LEAF: LEAF_TEXT}
    spellings = [[bound(flat.target, flat.names, context.domains, flat.rule.place, extra)]]
    for each in flat.rule.alternatives:
        patterns = [(flat.source(source.pattern), source.place) for source in each.sources if source.format is None]
        spellings.append([bound(pattern, flat.names, context.domains, place, extra) for pattern, place in patterns])
    stack = flat.rule.stack[0][0] if flat.rule.stack else None
    return left_out(context.exclusions, [each for each in spellings if each], stack, context.domains, flat.rule.place)


def _indices(flat: FlatRule, context: Context) -> list[str]:
    """Return the indices in the rule's patterns, target first."""
    patterns = [flat.target, *(flat.source(source.pattern) for each in flat.rule.alternatives for source in each.sources)]
    if flat.rule.tie is not None:
        patterns.append(flat.rule.tie)
    names = (name for pattern in patterns for each in pattern.placeholders for name in flat.names.dependence(each.expression))
    return list(dict.fromkeys(name for name in names if name in context.domains))


def _dependent(flat: FlatRule, context: Context, used: list[str]) -> list[str]:
    """Return the indices that the rule's conditions and sizes depend on."""
    needed = {index for names, expression in expressions(flat, context.formats) for index in names.dependence(expression)}
    missing = sorted(needed - set(used))
    if missing:
        problem = f"the rule depends on {', '.join(map(repr, missing))}, which is in none of its patterns"
        raise MapperError([finding("M316", place=flat.rule.place, problem=problem)])
    return [index for index in used if index in needed]


def as_products(indices: list[str], members: list[tuple[IndexValue, ...]]) -> Iterator[dict[str, tuple[IndexValue, ...]]]:
    """Yield index sets whose products hold exactly `members`."""
    columns = [tuple(dict.fromkeys(column)) for column in zip(*members, strict=True)]
    count = 1
    for column in columns:
        count *= len(column)
    if count == len(members):
        yield dict(zip(indices, columns, strict=True))
        return
    for value in columns[0]:
        rest = [member[1:] for member in members if member[0] == value]
        for narrower in as_products(indices[1:], rest):
            yield {indices[0]: (value,), **narrower}


def _because(flat: FlatRule) -> str:
    """Say what switches the rule on: conditions that no index changes, and the values that decide them."""
    found: dict[str, None] = {}
    for condition in flat.conditions:
        values = condition.names.reasons(condition.expression)
        if values and not condition.names.dependence(condition.expression):
            said = ", ".join(f"{name} is {json.dumps(value)}" for name, value in values)
            found[f"`{condition.expression.text}` ({said})"] = None
    return " and ".join(found)


def _of_sizes(flat: FlatRule, context: Context, sizes: Sizes, domains: Domains) -> Iterator[Family]:
    rule = flat.rule
    info = RuleInfo(flat.number, rule.id or flat.target.text, rule.place, rule.note, _because(flat))
    if rule.tie is not None:
        target = bound(flat.target, flat.names, domains, rule.place)
        tie = bound(rule.tie, flat.names, domains, rule.place)
        yield Family(
            0, info, "", target, domains, context.placed, None, None, (), sizes.stage, rule.optional, False, tie
        )  # fmt: skip
        return
    stack, stack_dim = rule.stack[0] if rule.stack else (None, None)
    for leaf in sizes.leaves[0][0]:
        for selected, pattern in enumerate(rule.targets):
            axes = _selected(leaf.axes, selected if len(rule.targets) > 1 else None, flat)
            alternatives = (
                ((),)
                if leaf.fill is not None
                else tuple(
                    _sources(flat, context, alternative, replace(leaf, axes=axes), sizes, domains, selected)
                    for alternative in range(len(rule.alternatives))
                )
            )
            full = join(flat.target_prefix, pattern)
            family = Family(
                number=0,
                rule=replace(info, text=rule.id or full.text),
                leaf=leaf.name,
                target=bound(full, flat.names, domains, rule.place, {LEAF: leaf.target}),
                domains=domains,
                placed=context.placed,
                stack=stack,
                axes=axes,
                alternatives=alternatives,
                stage=sizes.stage,
                optional=leaf.optional,
                skips_others=rule.others == "skip",
                tie=None,
                stack_axis=_axis_of(axes, stack_dim, flat) if stack_dim is not None else None,
                conversion=_conversion(sizes, leaf),
                reuses=rule.reuse,
                append_axis=_axis_of(axes, rule.append, flat) if rule.append is not None else None,
                only_first=_only_first(flat, leaf),
                refusal=_refusal(flat, leaf, context.mesh),
                values=leaf.values,
                fill=leaf.fill,
                do=leaf.do,
                neutral=leaf.neutral,
            )
            _check_indices(flat, family)
            yield family


def _selected(axes: tuple[Axis, ...] | None, part: int | None, flat: FlatRule) -> tuple[Axis, ...] | None:
    if part is None:
        return axes
    if axes is None or sum(len(axis.parts) == len(flat.rule.targets) for axis in axes) != 1:
        problem = f"the rule has {len(flat.rule.targets)} targets, expected one dim with as many parts"
        raise MapperError([finding("M316", place=flat.rule.place, problem=problem)])
    return tuple(replace(axis, selected=part) if len(axis.parts) > 1 else axis for axis in axes)


def _axis_of(axes: tuple[Axis, ...] | None, dim: str, flat: FlatRule) -> int:
    for position, axis in enumerate(axes or ()):
        if axis.dim == dim:
            return position
    raise MapperError([finding("M316", place=flat.rule.place, problem=f"the rule's dims have no {dim!r}")])


def _sources(
    flat: FlatRule, context: Context, alternative: int, leaf: LeafSizes, sizes: Sizes, domains: Domains, selected: int
) -> tuple[SourceFamily, ...]:
    """Return the sources of one alternative, then the scales that some of them are read with."""
    given = flat.rule.alternatives[alternative].sources
    is_split = len(flat.rule.targets) > 1 and len(given) > 1
    taken = [position for position in range(len(given)) if not is_split or position == selected]
    pairs = [_source(flat, context, alternative, position, leaf, sizes, domains) for position in taken]
    values = [source for source, _ in pairs]
    scales = [replace(scale, scale_of=at) for at, (_, scale) in enumerate(pairs) if scale is not None]
    return (*values, *scales)


def _conversion(sizes: Sizes, leaf: LeafSizes) -> Conversion | None:
    """Return the conversion of the leaf: that of the first source that has one."""
    same = (each for alternative in sizes.leaves for source in alternative for each in source if each.name == leaf.name)
    return next((each.conversion for each in same if each.conversion is not None), None)


def _source(
    flat: FlatRule, context: Context, alternative: int, position: int, leaf: LeafSizes, sizes: Sizes, domains: Domains
) -> tuple[SourceFamily, SourceFamily | None]:
    rule = flat.rule
    sources = rule.alternatives[alternative].sources
    own = next((each for each in sizes.leaves[alternative][position] if each.name == leaf.name), None)
    source = sources[position]
    if own is None:
        problem = f"the format of {source.pattern.text!r} has no leaf {leaf.name!r}, which the rule's first source has"
        raise MapperError([finding("M316", place=source.place, problem=problem)])
    if [axis.dim for axis in own.axes or ()] != [axis.dim for axis in leaf.axes or ()]:
        problem = (
            f"the format of {source.pattern.text!r} has other axes for the leaf {leaf.name!r} than the rule's first source"
        )
        raise MapperError([finding("M316", place=source.place, problem=problem)])
    conversion = _conversion(sizes, leaf)
    if own.conversion not in (None, conversion):
        problem = (
            f"the format of {source.pattern.text!r} gives the leaf {leaf.name!r} another dtype than the rule's first source"
        )
        raise MapperError([finding("M316", place=source.place, problem=problem)])
    if own.neutral != leaf.neutral:
        problem = (
            f"the format of {source.pattern.text!r} gives the leaf {leaf.name!r} another neutral value than the rule's "
            "first source"
        )
        raise MapperError([finding("M316", place=source.place, problem=problem)])
    num_parts = max((len(axis.parts) for axis in leaf.axes or ()), default=1)
    if len(sources) not in (1, num_parts):
        problem = f"the rule has {len(sources)} sources and {num_parts} parts, expected one source for each part, or one in all"
        raise MapperError([finding("M316", place=rule.place, problem=problem)])
    if leaf.axes is None and len(sources) > 1:
        problem = "a rule with several sources needs `dims` with a size for each"
        raise MapperError([finding("M316", place=rule.place, problem=problem)])
    part = position if len(sources) > 1 or num_parts == 1 else None
    dtypes = own.dtypes
    if conversion is not None and own.conversion is None and not dtypes:
        dtypes = frozenset({conversion.dtype})
    found = _stored_source(flat, context, source, own.source, own.stored, leaf, part, domains)
    scale = None
    if own.scale is not None:
        stored = _stored_source(flat, context, source, own.scale.source, own.scale.stored, leaf, part, domains)
        scale = replace(stored, dtypes=own.scale.dtypes)
    return replace(found, dtypes=dtypes), scale


def _stored_source(
    flat: FlatRule,
    context: Context,
    source: Source,
    leaf_name: str,
    stored: tuple[StoredAxis, ...],
    leaf: LeafSizes,
    part: int | None,
    domains: Domains,
) -> SourceFamily:
    place = flat.rule.place
    template = bound(flat.source(source.pattern), flat.names, domains, source.place, {LEAF: leaf_name})
    stack = flat.rule.stack[0][0] if flat.rule.stack else None
    holds_stack = stack is not None and stack not in template.indices
    is_bitcast = leaf.conversion is not None and leaf.conversion.by == "bitcast"
    disk = disk_layout(leaf.axes, stored, part, place, is_bitcast=is_bitcast) if leaf.axes is not None else None
    if disk is not None and holds_stack:
        assert stack is not None
        disk = below_stack(disk, len(context.domains[stack]))
    own_domains = {index: domains[index] for index in template.indices}
    return SourceFamily(template, own_domains, part, frozenset(), disk, holds_stack)


def _only_first(flat: FlatRule, leaf: LeafSizes) -> tuple[str, ...]:
    """Return the mesh axes off whose first rank the leaf holds zeros: a bias that is added before a sum over ranks."""
    if leaf.name != BIAS or leaf.axes is None:
        return ()
    own = {axis.dim for axis in leaf.axes}
    cuts = (shard for dim, shard in flat.rule.shard.items() if dim not in own and shard.bias == "first")
    return tuple(axis for shard in cuts for axis in shard.axis if isinstance(axis, str))


def _check_indices(flat: FlatRule, family: Family) -> None:
    for source in (each for alternative in family.alternatives for each in alternative):
        lost = [index for index in source.template.indices if index not in family.target.indices and index != family.stack]
        if lost:
            problem = f"{lost[0]!r} is in the source {source.template} and neither in the target nor stacked"
            raise MapperError([finding("M316", place=flat.rule.place, problem=problem)])
    _check_operations(flat, family)
    if family.stack is not None and family.axes is None:
        raise MapperError([finding("M316", place=flat.rule.place, problem="a rule that stacks needs `dims`")])
    if sum(len(axis.parts) > 1 for axis in family.axes or ()) > 1:
        raise MapperError(
            [finding("M316", place=flat.rule.place, problem="two dims of the rule have parts, expected one at most")]
        )


def _check_operations(flat: FlatRule, family: Family) -> None:
    """Raise MapperError where an operation cannot be done to the sources that the family has."""
    own = [source for alternative in family.alternatives for source in alternative if source.part is not None]
    parts_axis = family.parts_axis
    view = family.axes[parts_axis].view if family.axes is not None and parts_axis is not None else None
    problem = ""
    if own and view is not None and not view.by_part:
        problem = "it needs one source that holds all parts, and each part has its own"
    elif view is not None and _is_shifted(family) and any(strand.is_scattered for strand in (*view.joined, *view.by_part)):
        problem = "interleaved parts can be neither stacked nor appended along their dim"
    if view is not None and problem:
        dim = family.axes[parts_axis].dim if family.axes is not None and parts_axis is not None else ""
        raise MapperError([finding("M340", place=flat.rule.place, formula=view.text, dim=dim, problem=problem)])
    whole = [each for each in family.values if each.reads_whole]
    if whole and family.axes is not None and len(family.axes[whole[0].axis].parts) > 1 and own:
        problem = "the mean runs over parts that have sources of their own"
        raise MapperError([finding("M342", place=flat.rule.place, op=", ".join(family.do), problem=problem)])


def _is_shifted(family: Family) -> bool:
    return family.parts_axis in (family.stack_axis, family.append_axis)


def _refusal(flat: FlatRule, leaf: LeafSizes, mesh: Mesh) -> str:
    """A bias beside a weight whose inner dim is cut is added once per rank, unless the rule says who holds it."""
    if leaf.name != BIAS or leaf.axes is None:
        return ""
    own = {axis.dim for axis in leaf.axes}
    for dim, shard in flat.rule.shard.items():
        is_cut = any(axis is not None and mesh.sizes[str(axis)] > 1 for axis in shard.axis)
        if dim not in own and is_cut and shard.bias is None:
            return f"the rule cuts {dim!r} and does not say which ranks hold the bias (`bias: all` or `bias: first`)"
    return ""
