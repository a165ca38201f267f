"""Scalars of a spec: expressions, patterns, dims, orders and boxes, with errors placed inside the scalar."""

from __future__ import annotations

import re

from mapper import expressions, pattern
from mapper.diagnostics import Diagnostic, finding
from mapper.expressions import Expression, ExpressionError
from mapper.pattern import Pattern, PatternError
from mapper.spec.model import PARTS, Axis, Located, PlacedPattern, placed_expression
from mapper.yaml_source import Mapping, Node, Scalar, Sequence, describe, place_at, plain

Findings = list[Diagnostic]

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ORDER = re.compile(r"\(\s*([A-Za-z_]\w*(?:\s+[A-Za-z_]\w*)*)\s*\)|([A-Za-z_]\w*)")
_LOCATED = re.compile(r"([^\[\]]+?)\s*(?:\[([^\[\]]*)\])?\s*")
_WILDCARD = re.compile(r"(?:^|\.)(\*)")
_RANGE = re.compile(r"\s*([0-9]+)\s*(?::\s*([0-9]+)\s*)?")
# A text that some language spells a constant with; in a spec it would be a true string, or an unknown name.
SPELLINGS_OF_CONSTANTS = {"none": "null", "None": "null", "True": "true", "False": "false"}
_QUOTED_CONSTANT = re.compile(r"""(['"])(none|None|True|False)\1""")


def expression(node: Node, findings: Findings) -> Expression:
    """Return the expression a scalar spells; what is wrong with it is added to `findings`."""
    scalar = require_scalar(node)
    if scalar.value is None and not scalar.text:
        findings.append(finding("M130", place=scalar.place, problem="expected an expression, found nothing"))
        return expressions.literal(None)
    if not isinstance(scalar.value, str):
        return placed_expression(_spelled(scalar.value), scalar.place)
    return _expression(scalar, scalar.text, 0, findings)


def literal_expression(node: Node) -> Expression:
    """Return the expression that a value which stands for itself would be spelled as."""
    return placed_expression(_spelled(plain(node)), node.place)


def optional_expression(node: Node | None, findings: Findings) -> Expression | None:
    return None if node is None else expression(node, findings)


def expressions_of(node: Node | None, findings: Findings) -> tuple[Expression, ...]:
    """Return one expression, or one per item of a list."""
    if node is None:
        return ()
    if isinstance(node, Sequence):
        return tuple(expression(item, findings) for item in node.items)
    return (expression(node, findings),)


def pattern_of(node: Node, findings: Findings, *, wildcards: bool = False) -> Pattern:
    """Return the pattern a scalar spells; `*` and `**` are for skip and keep only."""
    scalar = require_scalar(node)
    try:
        parsed = pattern.parse(scalar.text)
    except PatternError as error:
        findings.append(finding("M131", place=place_at(scalar, error.column), text=scalar.text, problem=error.message))
        return pattern.parse("")
    if parsed.has_wildcards and not wildcards:
        findings.append(finding("M132", place=place_at(scalar, _wildcard_column(parsed)), text=scalar.text))
    return PlacedPattern(parsed.text, parsed.segments, place_at(scalar, 0))


def axes(node: Node, findings: Findings) -> tuple[Axis, ...]:
    """Return the axes of a DIMS list: `dim`, `dim / EXPR` or an integer each."""
    assert isinstance(node, Sequence), "the schema lets only lists through"
    return tuple(_axis(item, findings) for item in node.items)


def order(node: Node, findings: Findings) -> tuple[str, ...]:
    """Return the names in `(outer inner)`, outermost first; a bare name stands alone."""
    scalar = require_scalar(node)
    match = _ORDER.fullmatch(scalar.text.strip())
    if match is None:
        findings.append(finding("M134", place=scalar.place, text=scalar.text))
        return ()
    return tuple((match.group(1) or match.group(2)).split())


def located(node: Node, findings: Findings) -> Located:
    """Return a name with an optional box: `a.b[9, 0:2048]`; a plain integer i is `i:i+1`."""
    scalar = require_scalar(node)
    match = _LOCATED.fullmatch(scalar.text)
    if match is None:
        findings.append(finding("M135", place=scalar.place, text=scalar.text))
        return Located(scalar.text, None, scalar.place)
    box = None if match.group(2) is None else _box(scalar, match.group(2), match.start(2), findings)
    return Located(match.group(1), box, scalar.place)


def text_of(node: Node | None, default: str = "") -> str:
    return default if node is None else require_scalar(node).text


def boolean(node: Node | None) -> bool:
    """Return the value of a boolean key; absent is false."""
    if node is None:
        return False
    value = require_scalar(node).value
    assert isinstance(value, bool), "the schema lets only booleans through"
    return value


def require_scalar(node: Node) -> Scalar:
    assert isinstance(node, Scalar), f"the schema lets only scalars through, found {describe(node)}"
    return node


def require_mapping(node: Node) -> Mapping:
    assert isinstance(node, Mapping), f"the schema lets only mappings through, found {describe(node)}"
    return node


def items_of(node: Node | None) -> tuple[Node, ...]:
    if node is None:
        return ()
    assert isinstance(node, Sequence), f"the schema lets only lists through, found {describe(node)}"
    return node.items


def _expression(scalar: Scalar, text: str, offset: int, findings: Findings) -> Expression:
    """Parse `text`, which starts at `offset` of the scalar."""
    quoted = _QUOTED_CONSTANT.search(text)
    if quoted is not None:
        word = quoted.group(2)
        place = place_at(scalar, offset + quoted.start())
        findings.append(finding("M124", place=place, word=word, instead=SPELLINGS_OF_CONSTANTS[word]))
        return expressions.literal(None)
    start = offset + len(text) - len(text.lstrip())
    try:
        return placed_expression(text, place_at(scalar, start))
    except ExpressionError as error:
        findings.append(finding("M130", place=place_at(scalar, start + error.column), problem=error.message))
        return expressions.literal(None)


def _spelled(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_spelled, value))}]"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return repr(value)


def _axis(node: Node, findings: Findings) -> Axis:
    scalar = require_scalar(node)
    if isinstance(scalar.value, int):
        return Axis(None, None, scalar.value, scalar.place)
    dim, slash, divisor = scalar.text.partition("/")
    if NAME.fullmatch(dim.strip()) is None or (slash and dim.strip() == PARTS):
        findings.append(finding("M133", place=scalar.place, text=scalar.text))
        return Axis(dim, None, None, scalar.place)
    parsed = _expression(scalar, divisor, len(dim) + 1, findings) if slash else None
    return Axis(dim.strip(), parsed, None, scalar.place)


def _box(scalar: Scalar, text: str, offset: int, findings: Findings) -> tuple[tuple[int, int], ...]:
    box: list[tuple[int, int]] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        start = int(match.group(1)) if match else 0
        stop = start + 1 if match is None or match.group(2) is None else int(match.group(2))
        if match is None or stop <= start:
            findings.append(finding("M136", place=place_at(scalar, offset), text=part.strip()))
        box.append((start, stop))
        offset += len(part) + 1
    return tuple(box)


def _wildcard_column(parsed: Pattern) -> int:
    match = _WILDCARD.search(parsed.text)
    return match.start(1) if match else 0
