"""What can be said about rules and groups before any config is known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from mapper.diagnostics import Diagnostic, Place, finding
from mapper.messages.suggest import did_you_mean
from mapper.pattern import Pattern
from mapper.spec.check_operations import iter_value_operation_findings
from mapper.spec.model import (
    PARTS,
    Format,
    Group,
    Item,
    Rule,
    Runtime,
    Shard,
    Source,
    SourceAlternative,
    Spec,
)
from mapper.spec.scope import (
    BASE_AXES,
    LEAF,
    Scope,
    iter_name_findings,
    iter_pattern_findings,
    names_in,
    place_of,
)

DEFAULT_FORMAT = "linear"


@dataclass(frozen=True, slots=True)
class RuleContext:
    """Where a list of rules stands: what it may name, and which indices the prefixes around it hold.

    `used` collects the names of the blocks that are taken in; `path` are those around the list.
    """

    scope: Scope
    axes: frozenset[str]
    formats: Mapping[str, Format]
    blocks: Mapping[str, tuple[Item, ...]]
    used: set[str]
    path: tuple[str, ...] = ()
    source_indices: frozenset[str] = frozenset()
    target_indices: frozenset[str] = frozenset()

    @staticmethod
    def of_runtime(runtime: Runtime, spec: Spec, scope: Scope, used: set[str]) -> RuleContext:
        axes = frozenset({*BASE_AXES, *runtime.mesh.axes})
        return RuleContext(scope, axes, {**spec.formats, **runtime.formats}, spec.blocks, used)

    @staticmethod
    def of_block(name: str, spec: Spec, scope: Scope, used: set[str]) -> RuleContext:
        formats = {name: format for runtime in spec.runtimes.values() for name, format in runtime.formats.items()}
        axes = frozenset({*BASE_AXES, *(axis for runtime in spec.runtimes.values() for axis in runtime.mesh.axes)})
        return RuleContext(scope, axes, {**formats, **spec.formats}, spec.blocks, used, (name,))


def iter_item_findings(items: tuple[Item, ...], context: RuleContext) -> Iterator[Diagnostic]:
    """Yield what is wrong in a list of rules and groups, and in the blocks they use."""
    for item in items:
        if isinstance(item, Group):
            yield from _iter_group_findings(item, context)
        else:
            yield from _iter_rule_findings(item, context)


def _iter_group_findings(group: Group, context: RuleContext) -> Iterator[Diagnostic]:
    outer = context.scope
    for pattern in dict.fromkeys((group.source, group.target)):
        yield from iter_pattern_findings(pattern, outer, group.place)
    scope = outer.with_lets(group.let)
    for let in group.let.values():
        inside = scope if let.parameter is None else scope.with_names([let.parameter])
        yield from iter_name_findings(let.expression, inside, let.place)
    for expression in (group.when, group.stage):
        yield from iter_name_findings(expression, scope, group.place)
    inner = replace(
        context,
        scope=scope,
        source_indices=context.source_indices | outer.indices_of(names_in(group.source)),
        target_indices=context.target_indices | outer.indices_of(names_in(group.target)),
    )
    if group.use is None:
        yield from iter_item_findings(group.items, inner)
    elif group.use not in context.blocks:
        yield finding("M209", place=group.place, hint=did_you_mean(group.use, context.blocks), name=group.use)
    elif group.use in context.path:
        chain = " -> ".join([*context.path[context.path.index(group.use) :], group.use])
        yield finding("M219", place=group.place, name=group.use, chain=chain)
    else:
        context.used.add(group.use)
        yield from iter_item_findings(context.blocks[group.use], replace(inner, path=(*context.path, group.use)))


def _iter_rule_findings(rule: Rule, context: RuleContext) -> Iterator[Diagnostic]:
    scope = context.scope
    for pattern in (*rule.targets, *(() if rule.tie is None else (rule.tie,))):
        yield from iter_pattern_findings(pattern, scope, rule.place)
    for source in _sources(rule):
        if source.pattern not in rule.targets:
            yield from iter_pattern_findings(source.pattern, scope, source.place)
    for expression in (rule.when, rule.stage, rule.dtype, rule.cast, rule.bitcast):
        yield from iter_name_findings(expression, scope, rule.place)
    for dim in (rule.dims or {}).values():
        for size in dim.sizes:
            yield from iter_name_findings(size, scope, dim.place)
    yield from _iter_shard_findings(rule, context)
    yield from _iter_leaf_findings(rule)
    yield from _iter_index_findings(rule, context)
    yield from _iter_part_findings(rule)
    yield from _iter_format_findings(rule, context)


def _iter_shard_findings(rule: Rule, context: RuleContext) -> Iterator[Diagnostic]:
    for shard in rule.shard.values():
        for axis in shard.axis:
            if axis is not None and axis not in context.axes:
                yield finding("M210", place=shard.place, hint=did_you_mean(axis, context.axes), name=axis)
        for expression in (*shard.units, shard.pad, shard.pad_rank, shard.fill):
            yield from iter_name_findings(expression, context.scope, shard.place)


def _iter_leaf_findings(rule: Rule) -> Iterator[Diagnostic]:
    target_has_leaf = LEAF in rule.targets[0].names
    for pattern in rule.targets[1:]:
        if (LEAF in pattern.names) != target_has_leaf:
            yield _leaf_finding("a target", "another", pattern, rule.place, has_leaf=not target_has_leaf)
    for source in _sources(rule):
        if (LEAF in source.pattern.names) != target_has_leaf:
            yield _leaf_finding("the source", "the target", source.pattern, source.place, has_leaf=not target_has_leaf)


def _leaf_finding(side: str, other: str, pattern: Pattern, default: Place, *, has_leaf: bool) -> Diagnostic:
    first, second = (side, other) if has_leaf else (other, side)
    return finding("M213", place=place_of(pattern, default), side=first, other=second)


# --- indices --------------------------------------------------------------------------------------------------------


def _iter_index_findings(rule: Rule, context: RuleContext) -> Iterator[Diagnostic]:
    scope = context.scope
    in_target = context.target_indices.union(*(scope.indices_of(names_in(pattern)) for pattern in rule.targets))
    stacked = {index for index, _ in rule.stack}
    for index in sorted(stacked):
        if index not in scope.indices:
            yield finding("M207", place=rule.place, hint=did_you_mean(index, scope.indices), name=index)
        elif index in in_target:
            yield finding("M224", place=rule.place, index=index)
        elif not any(_runs_over(index, alternative, context) for alternative in rule.alternatives):
            yield finding("M214", place=rule.place, index=index)
    for source in _sources(rule):
        for index in sorted(_indices(source, context) - in_target - stacked):
            yield finding("M215", place=place_of(source.pattern, source.place), index=index)


def _runs_over(index: str, alternative: SourceAlternative, context: RuleContext) -> bool:
    return all(index in _indices(source, context) for source in alternative.sources)


def _indices(source: Source, context: RuleContext) -> frozenset[str]:
    return context.source_indices | context.scope.indices_of(names_in(source.pattern))


# --- parts ----------------------------------------------------------------------------------------------------------


def _iter_part_findings(rule: Rule) -> Iterator[Diagnostic]:
    with_parts = [dim for dim in (rule.dims or {}).values() if dim.has_parts]
    if len(with_parts) > 1:
        first, second = with_parts[:2]
        yield finding("M216", place=second.place, related=[("the other", first.place)], first=first.name, second=second.name)
        return
    num_parts = len(with_parts[0].sizes) if with_parts else 1
    parts = f"dim {with_parts[0].name!r} has {num_parts} parts" if with_parts else "no dim has parts"
    if len(rule.targets) not in (1, num_parts):
        yield finding("M217", place=rule.place, count=len(rule.targets), what="targets", parts=parts)
    for alternative in rule.alternatives:
        count = len(alternative.sources)
        if count not in (1, num_parts):
            yield finding("M217", place=alternative.place, count=count, what="sources", parts=parts)
    for shard in rule.shard.values():
        own = (rule.dims or {}).get(shard.dim)
        yield from _iter_cut_findings(shard, len(own.sizes) if own is not None else 1)


def _iter_cut_findings(shard: Shard, num_parts: int) -> Iterator[Diagnostic]:
    parts = f"dim {shard.dim!r} has {num_parts} parts" if num_parts > 1 else f"dim {shard.dim!r} has no parts"
    for what, values in (("units", shard.units), ("axes", shard.axis)):
        if len(values) not in (0, 1, num_parts):
            yield finding("M217", place=shard.place, count=len(values), what=what, parts=parts)


# --- formats and dims -----------------------------------------------------------------------------------------------


def _iter_format_findings(rule: Rule, context: RuleContext) -> Iterator[Diagnostic]:
    """Yield unknown formats; where all are known, also unknown dims and formats that end in different leaves."""
    named = [(rule.format, rule.place)]
    named += [(each.format, each.place) for each in rule.alternatives]
    named += [(source.format, source.place) for source in _sources(rule)]
    unknown = [(name, place) for name, place in named if name is not None and name not in context.formats]
    for name, place in unknown:
        yield finding("M208", place=place, hint=did_you_mean(name, context.formats), name=name)
    if unknown:
        return
    has_leaf = LEAF in rule.targets[0].names
    formats = [context.formats[name] for name in _format_names(rule)] if has_leaf else []
    yield from iter_value_operation_findings(rule, context.scope, formats)
    yield from _iter_dim_findings(rule, formats)
    for other in formats[1:]:
        first, second = _target_leaves(formats[0]), _target_leaves(other)
        if first.isdisjoint(second):
            yield finding(
                "M218",
                place=rule.place,
                first=formats[0].name,
                second=other.name,
                first_leaves=_spell(first),
                second_leaves=_spell(second),
            )


def _format_names(rule: Rule) -> list[str]:
    """Return the formats that the sources of a rule are in, each once."""
    default = rule.format or DEFAULT_FORMAT
    names = [
        source.format or alternative.format or default for alternative in rule.alternatives for source in alternative.sources
    ]
    return list(dict.fromkeys(names or [default]))


def _target_leaves(format: Format) -> set[frozenset[str]]:
    """Return the sets of leaves that must be there, one set an alternative."""
    return {frozenset(leaf.target for leaf in each.leaves if not leaf.optional) for each in format.alternatives}


def _spell(leaves: set[frozenset[str]]) -> str:
    return " or ".join(sorted(f"({', '.join(sorted(each))})" for each in leaves))


def _iter_dim_findings(rule: Rule, formats: list[Format]) -> Iterator[Diagnostic]:
    if PARTS in (rule.dims or ()):
        yield finding("M212", place=rule.place, name=PARTS, kind="a dim")
    known = {*(rule.dims or ()), *(index for index, dim in rule.stack if dim is None)}
    for format in formats:
        for leaf in (leaf for alternative in format.alternatives for leaf in alternative.leaves):
            halves = [half.dims for half in leaf.dequantize or ()]
            known |= {axis.dim for axes in (leaf.dims, leaf.stored or (), *halves) for axis in axes if axis.dim is not None}
    known.discard(PARTS)
    used = [("shard", shard.dim, shard.place) for shard in rule.shard.values()]
    used += [("stack", dim, rule.place) for _, dim in rule.stack if dim is not None]
    used += [("append", rule.append, rule.place)] if rule.append is not None else []
    for dim, order in rule.stored.items():
        used += [("stored", each, rule.place) for each in dict.fromkeys((dim, *order))]
    for key, dim, place in used:
        if dim not in known:
            yield finding("M211", place=place, hint=did_you_mean(dim, known), dim=dim, key=key)


def _sources(rule: Rule) -> Iterator[Source]:
    for alternative in rule.alternatives:
        yield from alternative.sources
