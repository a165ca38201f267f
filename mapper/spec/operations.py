"""The `do` of a rule: operations on values, and the formulas by which a view takes an axis apart."""

from __future__ import annotations

import re
from typing import Any, cast

from mapper.diagnostics import finding
from mapper.spec.model import Formula, ValueOperation, ValueOperations
from mapper.spec.scalars import Findings, expression, expressions_of, items_of, require_mapping, require_scalar, text_of
from mapper.yaml_source import Node, Scalar, Sequence, place_at

NAMES = ("view", "repeat", "neg_exp", "add", "multiply", "fill", "subtract_mean")
FORMULAS = ("view", "repeat")
PART = "part"
"""The factor that runs over the parts of a dim."""

_TERM = re.compile(r"\(\s*(\w+(?:\s+\w+)*)\s*\)|([A-Za-z_]\w*)")
_EMPTY = Formula("", (), (), ())


def parse_value_operations(node: Node | None, findings: Findings) -> ValueOperations:
    """Return the operations of a rule's `do`, by leaf."""
    if node is None:
        return {}
    if isinstance(node, Sequence):
        return {"": _operations(node, findings)}
    return {entry.name: _operations(entry.value, findings) for entry in require_mapping(node).entries}


def _operations(node: Node, findings: Findings) -> tuple[ValueOperation, ...]:
    return tuple(_operation(each, findings) for each in items_of(node))


def _operation(node: Node, findings: Findings) -> ValueOperation:
    if isinstance(node, Scalar):
        return ValueOperation(cast(Any, node.text), None, {}, (), None, "", node.place)
    mapping = require_mapping(node)
    name = next(entry.name for entry in mapping.entries if entry.name in NAMES)
    given = mapping.get(name)
    assert given is not None
    formula, value, dim = None, None, ""
    rest = [entry for entry in mapping.entries if entry.name not in (name, "parts")]
    sizes = {entry.name: expressions_of(entry.value, findings) for entry in rest}
    parts = tuple(cast(int, require_scalar(each).value) for each in items_of(mapping.get("parts")))
    if name in FORMULAS:
        formula = _formula(given, findings)
    elif name == "subtract_mean":
        dim = text_of(given)
    else:
        value = expression(given, findings)
    return ValueOperation(cast(Any, name), formula, sizes, parts, value, dim, mapping.place)


def _formula(node: Node, findings: Findings) -> Formula:
    scalar = require_scalar(node)
    text = " ".join(scalar.text.split())
    sides = scalar.text.split("->")
    terms = [_terms(side) for side in sides]
    if len(sides) != 2 or any(each is None for each in terms):
        findings.append(finding("M137", place=place_at(scalar, 0), text=text))
        return _EMPTY
    left, right = (tuple(factors for factors, _ in each or ()) for each in terms)
    return Formula(text, left, right, tuple(is_bare for _, is_bare in terms[0] or ()))


def _terms(side: str) -> list[tuple[tuple[str, ...], bool]] | None:
    """Return the factors of each axis of one side, and whether it is a bare name; None where the side is no list of axes."""
    found: list[tuple[tuple[str, ...], bool]] = []
    rest = side.strip()
    while rest:
        match = _TERM.match(rest)
        if match is None:
            return None
        factors = tuple((match.group(1) or match.group(2)).split())
        found.append((factors, match.group(2) is not None))
        rest = rest[match.end() :].lstrip()
    return found or None
