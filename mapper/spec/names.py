"""What expressions refer to: `config`, `options`, `let` and `index`."""

from __future__ import annotations

import re

from mapper import expressions
from mapper.expressions import Expression
from mapper.spec.model import ConfigKey, Index, Let, Literals, Option
from mapper.spec.scalars import (
    Findings,
    expression,
    items_of,
    literal_expression,
    optional_expression,
    require_mapping,
    require_scalar,
    text_of,
)
from mapper.yaml_source import Entry, Mapping, Node, plain

_SIGNATURE = re.compile(r"([A-Za-z_]\w*)(?:\(\s*([A-Za-z_]\w*)\s*\))?")
FIRST = expressions.literal(0)


def parse_config(node: Node | None, findings: Findings) -> dict[str, ConfigKey]:
    """Return the config keys by name, the required ones first."""
    if node is None:
        return {}
    mapping = require_mapping(node)
    keys = {each.name: each for each in map(_required, items_of(mapping.get("required")))}
    optional = mapping.get("optional")
    for entry in () if optional is None else require_mapping(optional).entries:
        keys[entry.name] = _optional(entry, findings)
    return keys


def parse_options(node: Node | None) -> dict[str, Option]:
    if node is None:
        return {}
    return {entry.name: _option(entry) for entry in require_mapping(node).entries}


def parse_lets(node: Node | None, findings: Findings) -> dict[str, Let]:
    """Return the definitions `name: EXPR` and `name(parameter): EXPR` by name."""
    if node is None:
        return {}
    lets: dict[str, Let] = {}
    for entry in require_mapping(node).entries:
        match = _SIGNATURE.fullmatch(entry.name)
        assert match is not None, "the schema lets only names and one-parameter functions through"
        lets[match.group(1)] = Let(match.group(1), match.group(2), expression(entry.value, findings), entry.key.place)
    return lets


def parse_indices(node: Node | None, findings: Findings) -> dict[str, Index]:
    if node is None:
        return {}
    return {entry.name: _index(entry, findings) for entry in require_mapping(node).entries}


def literal_of(node: Node) -> Literals:
    """Return the value of a node that stands for itself."""
    value = plain(node)
    assert value is None or isinstance(value, int | float | str | bool | list | dict), "YAML has no other values"
    return value


def _required(node: Node) -> ConfigKey:
    name = require_scalar(node).text
    return ConfigKey(name, name, None, node.place)


def _optional(entry: Entry, findings: Findings) -> ConfigKey:
    if not isinstance(entry.value, Mapping):
        return ConfigKey(entry.name, entry.name, literal_expression(entry.value), entry.key.place)
    path = text_of(entry.value.get("path"), entry.name)
    return ConfigKey(entry.name, path, optional_expression(entry.value.get("default"), findings), entry.key.place)


def _option(entry: Entry) -> Option:
    node = require_mapping(entry.value)
    default = node.get("default")
    assert default is not None, "the schema requires default"
    return Option(entry.name, literal_of(default), text_of(node.get("note")), entry.key.place)


def _index(entry: Entry, findings: Findings) -> Index:
    node = require_mapping(entry.value)
    place = entry.key.place
    values = node.get("values")
    if values is not None:
        return Index(entry.name, None, None, None, None, tuple(_word(each) for each in items_of(values)), place)
    axis = node.get("axis")
    return Index(
        name=entry.name,
        first=_first(node, findings),
        count=optional_expression(node.get("count"), findings),
        axis=None if axis is None else text_of(axis),
        where=optional_expression(node.get("where"), findings),
        values=None,
        place=place,
    )


def _first(node: Mapping, findings: Findings) -> Expression:
    first = node.get("first")
    return FIRST if first is None else expression(first, findings)


def _word(node: Node) -> str | int:
    value = require_scalar(node).value
    assert isinstance(value, str | int), "the schema lets only words and integers through"
    return value
