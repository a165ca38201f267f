"""Node tree -> Spec. The tree has passed the schema; what is left to go wrong is inside its scalars."""

from __future__ import annotations

from collections.abc import Mapping as Values
from dataclasses import dataclass
from typing import cast

from mapper.diagnostics import MapperError
from mapper.expressions import Expression
from mapper.spec.cases import parse_cases
from mapper.spec.formats import parse_formats
from mapper.spec.model import Format, Spec, Status
from mapper.spec.names import parse_config, parse_indices, parse_lets, parse_options
from mapper.spec.rules import parse_items
from mapper.spec.runtimes import parse_presets, parse_runtimes
from mapper.spec.scalars import Findings, items_of, require_mapping, text_of
from mapper.yaml_source import Mapping


@dataclass(frozen=True, slots=True)
class Builtin:
    """What every spec gets without saying it."""

    meshes: Values[str, Values[str, Expression]]
    formats: Values[str, Format]


def parse_builtin(node: Mapping) -> Builtin:
    """Return the mesh presets and formats of `builtin.yaml`."""
    findings: Findings = []
    builtin = Builtin(parse_presets(node.get("mesh"), findings), parse_formats(node.get("formats"), findings))
    if findings:
        raise MapperError(findings)
    return builtin


def parse_spec(node: Mapping, *, builtin: Builtin, digest: str = "") -> Spec:
    """Return the spec that `node` spells, over `builtin`; raises `MapperError` with all that is wrong in its scalars."""
    findings: Findings = []
    blocks = node.get("blocks")
    extends = node.get("extends")
    spec = Spec(
        id=text_of(node.get("id")),
        title=text_of(node.get("title")),
        version=text_of(node.get("version")),
        status=cast(Status, text_of(node.get("status"), "draft")),
        architectures=tuple(text_of(each) for each in items_of(node.get("architectures"))),
        extends=None if extends is None else text_of(extends),
        config=parse_config(node.get("config"), findings),
        options=parse_options(node.get("options")),
        let=parse_lets(node.get("let"), findings),
        index=parse_indices(node.get("index"), findings),
        formats={**builtin.formats, **parse_formats(node.get("formats"), findings)},
        blocks={entry.name: parse_items(entry.value, findings) for entry in require_mapping(blocks).entries} if blocks else {},
        runtimes=parse_runtimes(node.get("runtimes"), builtin.meshes, findings),
        cases=parse_cases(node.get("cases"), findings),
        place=node.place,
        digest=digest,
    )
    if findings:
        raise MapperError(findings)
    return spec
