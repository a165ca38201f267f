"""`formats`: one logical tensor stored as leaves."""

from __future__ import annotations

from mapper.spec.model import Format, FormatAlternative, Leaf, PairedLeaf
from mapper.spec.scalars import (
    Findings,
    axes,
    boolean,
    items_of,
    optional_expression,
    require_mapping,
    text_of,
)
from mapper.yaml_source import Entry, Mapping, Node, Sequence


def parse_formats(node: Node | None, findings: Findings) -> dict[str, Format]:
    """Return the formats under a `formats` key by name."""
    if node is None:
        return {}
    return {
        entry.name: Format(
            entry.name,
            tuple(_alternative(require_mapping(item), findings) for item in items_of(entry.value)),
            entry.key.place,
        )
        for entry in require_mapping(node).entries
    }


def _alternative(node: Mapping, findings: Findings) -> FormatAlternative:
    leaves = node.get("leaves")
    assert leaves is not None, "the schema requires leaves"
    return FormatAlternative(
        when=optional_expression(node.get("when"), findings),
        leaves=tuple(_leaf(entry, findings) for entry in require_mapping(leaves).entries),
        place=node.place,
    )


def _leaf(entry: Entry, findings: Findings) -> Leaf:
    name, place = entry.name, entry.key.place
    if isinstance(entry.value, Sequence):
        dims = axes(entry.value, findings)
        return Leaf(name, name, name, dims, None, None, None, None, None, None, False, place)
    node = require_mapping(entry.value)
    dims_node, stored, dequantize = node.get("dims"), node.get("stored"), node.get("dequantize")
    assert dims_node is not None, "the schema requires dims"
    return Leaf(
        name=name,
        source=text_of(node.get("source"), name),
        target=text_of(node.get("target"), name),
        dims=axes(dims_node, findings),
        stored=None if stored is None else axes(stored, findings),
        dtype=optional_expression(node.get("dtype"), findings),
        cast=optional_expression(node.get("cast"), findings),
        bitcast=optional_expression(node.get("bitcast"), findings),
        neutral=optional_expression(node.get("neutral"), findings),
        dequantize=None if dequantize is None else _pair(require_mapping(dequantize), findings),
        optional=boolean(node.get("optional")),
        place=place,
    )


def _pair(node: Mapping, findings: Findings) -> tuple[PairedLeaf, PairedLeaf]:
    weight, scale = (_paired_leaf(entry, findings) for entry in node.entries)
    return weight, scale


def _paired_leaf(entry: Entry, findings: Findings) -> PairedLeaf:
    node = require_mapping(entry.value)
    dims = node.get("dims")
    assert dims is not None, "the schema requires dims"
    return PairedLeaf(entry.name, axes(dims, findings), optional_expression(node.get("dtype"), findings), entry.key.place)
