"""Lists of rules and groups; `copy` and `rename` become one rule a name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal, cast

from mapper.pattern import Pattern
from mapper.pattern import parse as parse_pattern
from mapper.spec.model import (
    Dim,
    Group,
    Item,
    Rule,
    Shard,
    Source,
    SourceAlternative,
)
from mapper.spec.names import parse_lets
from mapper.spec.operations import parse_value_operations
from mapper.spec.scalars import (
    Findings,
    boolean,
    expressions_of,
    items_of,
    optional_expression,
    order,
    pattern_of,
    require_mapping,
    require_scalar,
    text_of,
)
from mapper.yaml_source import Entry, Mapping, Node, Scalar, Sequence

EMPTY = parse_pattern("")


def parse_items(node: Node | None, findings: Findings) -> tuple[Item, ...]:
    """Return the rules and groups of a list, in order."""
    return tuple(item for each in items_of(node) for item in _iter_items(require_mapping(each), findings))


def _iter_items(node: Mapping, findings: Findings) -> Iterator[Item]:
    copies, renames = node.get("copy"), node.get("rename")
    if copies is not None:
        common = _rule(node, (), findings)
        for each in items_of(copies):
            pattern = pattern_of(each, findings)
            yield _same(common, pattern, pattern, each)
    elif renames is not None:
        common = _rule(node, (), findings)
        for entry in require_mapping(renames).entries:
            source, target = pattern_of(entry.key, findings), pattern_of(entry.value, findings)
            yield _same(common, source, target, entry.key)
    elif node.get("rules") is not None or node.get("use") is not None:
        yield _group(node, findings)
    else:
        yield _rule(node, _targets(node, findings), findings)


def _same(common: Rule, source: Pattern, target: Pattern, node: Node) -> Rule:
    alternative = SourceAlternative((Source(source, None, node.place),), None, node.place)
    return replace(common, targets=(target,), alternatives=(alternative,), place=node.place)


def _group(node: Mapping, findings: Findings) -> Group:
    source, target = _at(node.get("at"), findings)
    use = node.get("use")
    return Group(
        source=source,
        target=target,
        when=optional_expression(node.get("when"), findings),
        stage=optional_expression(node.get("stage"), findings),
        let=parse_lets(node.get("let"), findings),
        items=parse_items(node.get("rules"), findings),
        use=None if use is None else text_of(use),
        place=(use if use is not None else node).place,
    )


def _at(node: Node | None, findings: Findings) -> tuple[Pattern, Pattern]:
    if node is None:
        return EMPTY, EMPTY
    if isinstance(node, Scalar):
        both = pattern_of(node, findings)
        return both, both
    source, target = (require_mapping(node).get(side) for side in ("source", "target"))
    return (
        EMPTY if source is None else pattern_of(source, findings),
        EMPTY if target is None else pattern_of(target, findings),
    )


def _rule(node: Mapping, targets: tuple[tuple[Pattern, Node], ...], findings: Findings) -> Rule:
    tie = node.get("tie")
    return Rule(
        targets=tuple(pattern for pattern, _ in targets),
        alternatives=_alternatives(node, targets, findings) if tie is None else (),
        others=cast(Literal["error", "skip"], text_of(node.get("others"), "error")),
        stack=_stack(node.get("stack")),
        dims=None if node.get("dims") is None else _dims(node.get("dims"), findings),
        stored=_stored(node.get("stored"), findings),
        append=_optional_text(node.get("append")),
        shard=_shard(node.get("shard"), findings),
        format=_optional_text(node.get("format")),
        dtype=optional_expression(node.get("dtype"), findings),
        cast=optional_expression(node.get("cast"), findings),
        bitcast=optional_expression(node.get("bitcast"), findings),
        optional=boolean(node.get("optional")),
        stage=optional_expression(node.get("stage"), findings),
        do=parse_value_operations(node.get("do"), findings),
        tie=None if tie is None else pattern_of(tie, findings),
        reuse=boolean(node.get("reuse")),
        when=optional_expression(node.get("when"), findings),
        id=text_of(node.get("id")),
        note=text_of(node.get("note")),
        place=targets[0][1].place if targets else node.place,
    )


def _targets(node: Mapping, findings: Findings) -> tuple[tuple[Pattern, Node], ...]:
    one = node.get("target")
    nodes = (one,) if one is not None else items_of(node.get("targets"))
    return tuple((pattern_of(each, findings), each) for each in nodes)


def _alternatives(
    node: Mapping, targets: tuple[tuple[Pattern, Node], ...], findings: Findings
) -> tuple[SourceAlternative, ...]:
    any_of = node.get("any_of")
    if any_of is not None:
        return tuple(_alternative(require_mapping(each), findings) for each in items_of(any_of))
    if node.get("source") is not None or node.get("sources") is not None:
        return (SourceAlternative(_sources(node, findings), None, node.place),)
    same = tuple(Source(pattern, None, each.place) for pattern, each in targets)
    return (SourceAlternative(same, None, node.place),) if same else ()


def _alternative(node: Mapping, findings: Findings) -> SourceAlternative:
    return SourceAlternative(_sources(node, findings), _optional_text(node.get("format")), node.place)


def _sources(node: Mapping, findings: Findings) -> tuple[Source, ...]:
    one = node.get("source")
    nodes = (one,) if one is not None else items_of(node.get("sources"))
    return tuple(_source(each, findings) for each in nodes)


def _source(node: Node, findings: Findings) -> Source:
    if isinstance(node, Scalar):
        return Source(pattern_of(node, findings), None, node.place)
    mapping = require_mapping(node)
    source = mapping.get("source")
    assert source is not None, "the schema requires source"
    return Source(pattern_of(source, findings), _optional_text(mapping.get("format")), source.place)


def _stack(node: Node | None) -> tuple[tuple[str, str | None], ...]:
    if node is None:
        return ()
    if isinstance(node, Scalar):
        return ((node.text, None),)
    return tuple((entry.name, text_of(entry.value)) for entry in require_mapping(node).entries)


def _entries(node: Node | None) -> tuple[Entry, ...]:
    return () if node is None else require_mapping(node).entries


def _dims(node: Node | None, findings: Findings) -> dict[str, Dim]:
    return {
        entry.name: Dim(
            entry.name,
            expressions_of(entry.value, findings),
            isinstance(entry.value, Sequence),
            entry.key.place,
        )
        for entry in _entries(node)
    }


def _stored(node: Node | None, findings: Findings) -> dict[str, tuple[str, ...]]:
    return {entry.name: order(entry.value, findings) for entry in _entries(node)}


def _shard(node: Node | None, findings: Findings) -> dict[str, Shard]:
    return {entry.name: _cut(entry, findings) for entry in _entries(node)}


def _cut(entry: Entry, findings: Findings) -> Shard:
    place = entry.key.place
    if isinstance(entry.value, Scalar):
        return Shard(entry.name, (_axis(entry.value),), (), None, None, None, None, None, False, False, place)
    node = require_mapping(entry.value)
    axis, uneven, bias = node.get("axis"), node.get("uneven"), node.get("bias")
    axes = (axis,) if isinstance(axis, Scalar) else items_of(axis)
    return Shard(
        dim=entry.name,
        axis=tuple(_axis(each) for each in axes),
        units=expressions_of(node.get("units"), findings),
        pad=optional_expression(node.get("pad"), findings),
        uneven=None if uneven is None else cast(Literal["pad", "short"], text_of(uneven)),
        pad_rank=optional_expression(node.get("pad_rank"), findings),
        fill=optional_expression(node.get("fill"), findings),
        bias=None if bias is None else cast(Literal["first", "all"], text_of(bias)),
        replicate=boolean(node.get("replicate")),
        joined=boolean(node.get("joined")),
        place=place,
    )


def _axis(node: Node) -> str | None:
    """Return the axis of a dim or part; null is a part that every rank holds whole."""
    scalar = require_scalar(node)
    return None if scalar.value is None else scalar.text


def _optional_text(node: Node | None) -> str | None:
    return None if node is None else text_of(node)
