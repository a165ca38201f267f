"""What can be said about a spec before any config is known: names, references, counts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mapper.diagnostics import Diagnostic, Place, finding
from mapper.expressions import Expression
from mapper.messages.suggest import did_you_mean
from mapper.spec.check_rules import RuleContext, iter_item_findings
from mapper.spec.finalize import step_expressions
from mapper.spec.model import (
    ConfigKey,
    Count,
    Format,
    Group,
    Index,
    Item,
    Keep,
    Leaf,
    Let,
    Option,
    Runtime,
    Skip,
    Spec,
    Versions,
)
from mapper.spec.scope import BASE_AXES, QUANTISATION, RESERVED, Scope, iter_name_findings, iter_pattern_findings, names_in

Definition = ConfigKey | Option | Let | Index


def check_spec(spec: Spec) -> tuple[Diagnostic, ...]:
    """Return every finding about a spec that needs no config, each once, in file order."""
    distinct = dict.fromkeys(_iter_findings(spec))
    return tuple(sorted(distinct, key=lambda each: (each.place.file, each.place.line, each.place.column) if each.place else ()))


def _iter_findings(spec: Spec) -> Iterator[Diagnostic]:
    yield from _iter_clashes(spec)
    everywhere = _scope(spec, *spec.runtimes.values())
    for key in spec.config.values():
        yield from iter_name_findings(key.default, Scope(frozenset(spec.config), {}, {}), key.place)
    yield from _iter_let_findings(spec.let, everywhere)
    yield from _iter_index_findings(spec.index, everywhere)
    yield from _iter_format_findings(spec.formats, everywhere)
    yield from _iter_circles(spec)
    used: set[str] = set()
    for runtime in spec.runtimes.values():
        yield from _iter_runtime_findings(runtime, spec, used)
    yield from _iter_unused_block_findings(spec, everywhere, used)
    yield from _iter_case_findings(spec)


def _scope(spec: Spec, *runtimes: Runtime) -> Scope:
    """Return the scope of a runtime, or what several know together."""
    values = {*spec.config, *spec.options, *BASE_AXES, *QUANTISATION}
    indices, lets = dict(spec.index), dict(spec.let)
    for runtime in runtimes:
        values |= runtime.mesh.axes.keys()
        indices |= runtime.index
        lets |= runtime.let
    return Scope(frozenset(values), indices, lets)


# --- sections -------------------------------------------------------------------------------------------------------


def _iter_let_findings(lets: Mapping[str, Let], scope: Scope) -> Iterator[Diagnostic]:
    for let in lets.values():
        inside = scope if let.parameter is None else scope.with_names([let.parameter])
        yield from iter_name_findings(let.expression, inside, let.place)


def _iter_index_findings(indices: Mapping[str, Index], scope: Scope) -> Iterator[Diagnostic]:
    for index in indices.values():
        for expression in (index.first, index.count, index.where):
            yield from iter_name_findings(expression, scope, index.place)


def _iter_axis_findings(indices: Mapping[str, Index], runtime: Runtime) -> Iterator[Diagnostic]:
    axes = {*BASE_AXES, *runtime.mesh.axes}
    for index in indices.values():
        if index.axis is not None and index.axis not in axes:
            yield finding("M210", place=index.place, hint=did_you_mean(index.axis, axes), name=index.axis)


def _iter_format_findings(formats: Mapping[str, Format], scope: Scope) -> Iterator[Diagnostic]:
    for format in formats.values():
        for alternative in format.alternatives:
            yield from iter_name_findings(alternative.when, scope, alternative.place)
            for leaf in alternative.leaves:
                for expression in _leaf_expressions(leaf):
                    yield from iter_name_findings(expression, scope, leaf.place)


def _leaf_expressions(leaf: Leaf) -> Iterator[Expression | None]:
    yield from (leaf.dtype, leaf.cast, leaf.bitcast, leaf.neutral)
    yield from (axis.divisor for axis in (*leaf.dims, *(leaf.stored or ())))
    for half in leaf.dequantize or ():
        yield half.dtype
        yield from (axis.divisor for axis in half.dims)


def _iter_runtime_findings(runtime: Runtime, spec: Spec, used: set[str]) -> Iterator[Diagnostic]:
    scope = _scope(spec, runtime)
    mesh = runtime.mesh
    yield from _iter_version_findings(runtime.versions)
    for expression in (*mesh.axes.values(), mesh.redundant_experts, mesh.round_robin):
        yield from iter_name_findings(expression, scope, mesh.place)
    yield from _iter_let_findings(runtime.let, scope)
    yield from _iter_index_findings(runtime.index, scope)
    yield from _iter_axis_findings(scope.indices, runtime)
    yield from _iter_format_findings(runtime.formats, scope)
    for requirement in runtime.requires:
        yield from iter_name_findings(requirement.that, scope, requirement.place)
    for count in runtime.counts:
        yield from _iter_count_findings(count, spec, scope)
    exempt: tuple[Skip | Keep, ...] = (*runtime.skip, *runtime.keep)
    for each in exempt:
        yield from iter_pattern_findings(each.pattern, scope, each.place)
        yield from iter_name_findings(each.when, scope, each.place)
    for each in runtime.skip:
        if each.copy_of is not None:
            yield from iter_pattern_findings(each.copy_of, scope, each.place)
    for step in runtime.finalize:
        for pattern in (*step.inputs, step.output):
            yield from iter_pattern_findings(pattern, scope, step.place)
        for expression in step_expressions(step):
            yield from iter_name_findings(expression, scope, step.place)
    yield from iter_item_findings(runtime.rules, RuleContext.of_runtime(runtime, spec, scope, used))


def _iter_version_findings(versions: Mapping[str, Versions]) -> Iterator[Diagnostic]:
    if not versions:
        return
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    for package, each in versions.items():
        try:
            SpecifierSet(each.specifier)
        except InvalidSpecifier:
            yield finding("M225", place=each.place, package=package, text=each.specifier)


def _iter_count_findings(count: Count, spec: Spec, scope: Scope) -> Iterator[Diagnostic]:
    yield from iter_pattern_findings(count.source, scope, count.place)
    index = scope.indices.get(count.index)
    if index is None or index.count is None:
        yield finding("M207", place=count.place, hint=did_you_mean(count.index, scope.indices), name=count.index)
    elif scope.indices_of(names_in(count.source)) != {count.index}:
        yield finding("M226", place=count.place, index=count.index, source=count.source.text)
    if count.config not in spec.config:
        yield finding("M201", place=count.place, hint=did_you_mean(count.config, spec.config), name=count.config)
    if count.option and count.option not in spec.options:
        yield finding("M201", place=count.place, hint=did_you_mean(count.option, spec.options), name=count.option)


def _iter_unused_block_findings(spec: Spec, scope: Scope, used: set[str]) -> Iterator[Diagnostic]:
    """Check the blocks that no runtime uses, such as those left for a child spec, knowing any group's lets."""
    arguments = {name for items in spec.blocks.values() for name in _group_lets(items)}
    for name, items in spec.blocks.items():
        if name not in used:
            yield from iter_item_findings(items, RuleContext.of_block(name, spec, scope.with_names(arguments), used))


def _group_lets(items: tuple[Item, ...]) -> Iterator[str]:
    for item in items:
        if isinstance(item, Group):
            yield from item.let
            yield from _group_lets(item.items)


def _iter_case_findings(spec: Spec) -> Iterator[Diagnostic]:
    for case in spec.cases:
        if case.runtime not in spec.runtimes:
            yield finding("M221", place=case.place, hint=did_you_mean(case.runtime, spec.runtimes), name=case.runtime)
        for name in case.options:
            if name not in spec.options:
                yield finding("M222", place=case.place, hint=did_you_mean(name, spec.options), name=name)


# --- names ----------------------------------------------------------------------------------------------------------


def _iter_clashes(spec: Spec) -> Iterator[Diagnostic]:
    """Yield names with two meanings, and names that are words of the language."""
    known: dict[str, tuple[str, Place | None]] = dict.fromkeys(BASE_AXES, ("a mesh axis", None))
    known |= dict.fromkeys(QUANTISATION, ("built in", None))
    yield from _iter_clashes_of("a config key", _places(spec.config), known)
    yield from _iter_clashes_of("an option", _places(spec.options), known)
    yield from _iter_clashes_of("a let", _places(spec.let), known)
    yield from _iter_clashes_of("an index", _places(spec.index), known)
    for runtime in spec.runtimes.values():
        axes = dict.fromkeys(runtime.mesh.axes, runtime.mesh.place)
        for kind, places in (("a mesh axis", axes), ("a let", _places(runtime.let)), ("an index", _places(runtime.index))):
            others = {name: value for name, value in known.items() if value[0] != kind}  # a runtime may override its own kind
            yield from _iter_clashes_of(kind, places, others)
    for items in (*spec.blocks.values(), *(runtime.rules for runtime in spec.runtimes.values())):
        for let in _iter_group_let_definitions(items):
            if let.name in spec.config:
                related = [("the config key", spec.config[let.name].place)]
                yield finding("M204", place=let.place, related=related, name=let.name, first="a let", second="a config key")


def _places(
    items: Mapping[str, ConfigKey] | Mapping[str, Option] | Mapping[str, Let] | Mapping[str, Index],
) -> dict[str, Place]:
    return {name: item.place for name, item in items.items()}


def _iter_clashes_of(
    kind: str, places: Mapping[str, Place], known: dict[str, tuple[str, Place | None]]
) -> Iterator[Diagnostic]:
    for name, place in places.items():
        if name in RESERVED:
            yield finding("M212", place=place, name=name, kind=kind)
        if name in known:
            other, other_place = known[name]
            related = [] if other_place is None else [("the other", other_place)]
            yield finding("M204", place=place, related=related, name=name, first=kind, second=other)
        known.setdefault(name, (kind, place))


def _iter_group_let_definitions(items: tuple[Item, ...]) -> Iterator[Let]:
    for item in items:
        if isinstance(item, Group):
            yield from item.let.values()
            yield from _iter_group_let_definitions(item.items)


def _iter_circles(spec: Spec) -> Iterator[Diagnostic]:
    """Yield definitions that depend on themselves: config defaults, lets and the sizes of axes, in each runtime."""
    definitions: dict[str, tuple[Expression, Place, str | None]] = {
        key.name: (key.default, key.place, None) for key in spec.config.values() if key.default is not None
    }
    definitions |= {let.name: (let.expression, let.place, let.parameter) for let in spec.let.values()}
    yield from _iter_circles_in(definitions)
    for runtime in spec.runtimes.values():
        own = {let.name: (let.expression, let.place, let.parameter) for let in runtime.let.values()}
        axes = {name: (size, runtime.mesh.place, None) for name, size in runtime.mesh.axes.items()}
        yield from _iter_circles_in({**definitions, **own, **axes})
    for items in (*spec.blocks.values(), *(runtime.rules for runtime in spec.runtimes.values())):
        for group in _iter_groups(items):
            yield from _iter_circles_in({let.name: (let.expression, let.place, let.parameter) for let in group.let.values()})


def _iter_circles_in(definitions: Mapping[str, tuple[Expression, Place, str | None]]) -> Iterator[Diagnostic]:
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> Iterator[Diagnostic]:
        if name in path:
            circle = path[path.index(name) :]
            yield finding("M206", place=definitions[circle[0]][1], chain=" -> ".join([*circle, name]))
        elif name not in done:
            expression, _, parameter = definitions[name]
            for each in sorted(expression.names | expression.calls):
                if each in definitions and each != parameter:
                    yield from visit(each, [*path, name])
            done.add(name)

    for name in definitions:
        yield from visit(name, [])


def _iter_groups(items: tuple[Item, ...]) -> Iterator[Group]:
    for item in items:
        if isinstance(item, Group):
            yield item
            yield from _iter_groups(item.items)
