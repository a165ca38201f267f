"""`runtimes`: how one engine lays the checkpoint out."""

from __future__ import annotations

from collections.abc import Mapping as Values

from mapper.diagnostics import Place, finding
from mapper.expressions import Expression
from mapper.messages.suggest import did_you_mean, nearest
from mapper.spec.finalize import parse_steps
from mapper.spec.formats import parse_formats
from mapper.spec.model import Count, Keep, Mesh, Requirement, Runtime, Skip, Versions
from mapper.spec.names import parse_indices, parse_lets
from mapper.spec.rules import parse_items
from mapper.spec.scalars import (
    Findings,
    expression,
    items_of,
    optional_expression,
    pattern_of,
    require_mapping,
    text_of,
)
from mapper.yaml_source import Entry, Mapping, Node, Scalar

Presets = Values[str, Values[str, Expression]]

DEFAULT_MESH = "single"
MESH_KEYS = ("like", "redundant_experts", "round_robin")


def parse_runtimes(node: Node | None, presets: Presets, findings: Findings) -> dict[str, Runtime]:
    """Return the runtimes by name; a mesh holds the axes of its preset and its own."""
    if node is None:
        return {}
    return {entry.name: _runtime(entry, presets, findings) for entry in require_mapping(node).entries}


def parse_presets(node: Node | None, findings: Findings) -> dict[str, dict[str, Expression]]:
    """Return the mesh presets: the sizes of their axes, by name."""
    if node is None:
        return {}
    return {
        entry.name: {axis.name: expression(axis.value, findings) for axis in require_mapping(entry.value).entries}
        for entry in require_mapping(node).entries
    }


def _runtime(entry: Entry, presets: Presets, findings: Findings) -> Runtime:
    node = require_mapping(entry.value)
    versions = node.get("versions")
    return Runtime(
        name=entry.name,
        versions={
            entry.name: Versions(text_of(entry.value), entry.value.place)
            for entry in (require_mapping(versions).entries if versions else ())
        },
        mesh=_mesh(node.get("mesh"), entry.key.place, presets, findings),
        requires=tuple(_requirement(require_mapping(each), findings) for each in items_of(node.get("requires"))),
        counts=tuple(_count(require_mapping(each), findings) for each in items_of(node.get("counts"))),
        let=parse_lets(node.get("let"), findings),
        index=parse_indices(node.get("index"), findings),
        formats=parse_formats(node.get("formats"), findings),
        skip=tuple(_skip(require_mapping(each), findings) for each in items_of(node.get("skip"))),
        keep=tuple(_keep(require_mapping(each), findings) for each in items_of(node.get("keep"))),
        rules=parse_items(node.get("rules"), findings),
        finalize=parse_steps(node.get("finalize"), findings),
        place=entry.key.place,
    )


def _mesh(node: Node | None, place: Place, presets: Presets, findings: Findings) -> Mesh:
    if node is None:
        return Mesh(DEFAULT_MESH, presets[DEFAULT_MESH], None, None, place)
    if isinstance(node, Scalar):
        return Mesh(node.text, _preset(node, presets, findings), None, None, node.place)
    mapping = require_mapping(node)
    like = mapping.get("like")
    axes = dict(presets[DEFAULT_MESH] if like is None else _preset(like, presets, findings))
    for entry in mapping.entries:
        if entry.name not in MESH_KEYS:
            axes[entry.name] = _axis_size(entry, findings)
    return Mesh(
        like=text_of(like, DEFAULT_MESH),
        axes=axes,
        redundant_experts=optional_expression(mapping.get("redundant_experts"), findings),
        round_robin=optional_expression(mapping.get("round_robin"), findings),
        place=node.place,
    )


def _axis_size(entry: Entry, findings: Findings) -> Expression:
    key = nearest(entry.name, MESH_KEYS)
    if key is not None:
        findings.append(finding("M223", place=entry.key.place, name=entry.name, key=key))
    return expression(entry.value, findings)


def _preset(node: Node, presets: Presets, findings: Findings) -> Values[str, Expression]:
    name = text_of(node)
    if name not in presets:
        findings.append(finding("M205", place=node.place, hint=did_you_mean(name, presets), name=name))
    return presets.get(name, {})


def _requirement(node: Mapping, findings: Findings) -> Requirement:
    that = node.get("that")
    assert that is not None, "the schema requires that"
    return Requirement(expression(that, findings), text_of(node.get("why")), node.place)


def _count(node: Mapping, findings: Findings) -> Count:
    source = node.get("source")
    assert source is not None, "the schema requires source"
    return Count(
        index=text_of(node.get("index")),
        source=pattern_of(source, findings, wildcards=True),
        config=text_of(node.get("config")),
        option=text_of(node.get("option")),
        why=text_of(node.get("why")),
        place=node.place,
    )


def _skip(node: Mapping, findings: Findings) -> Skip:
    source = node.get("source")
    assert source is not None, "the schema requires source"
    original = node.get("copy_of")
    pattern = pattern_of(source, findings, wildcards=original is None)
    copy_of = None if original is None else pattern_of(original, findings)
    when = optional_expression(node.get("when"), findings)
    return Skip(pattern, copy_of, text_of(node.get("why")), when, text_of(node.get("id")), source.place)


def _keep(node: Mapping, findings: Findings) -> Keep:
    target = node.get("target")
    assert target is not None, "the schema requires target"
    pattern = pattern_of(target, findings, wildcards=True)
    when = optional_expression(node.get("when"), findings)
    return Keep(pattern, text_of(node.get("why")), when, text_of(node.get("id")), target.place)
