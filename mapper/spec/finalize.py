"""`finalize`: steps that derive something from loaded targets, and the small formulas they are made of."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

from mapper.diagnostics import finding
from mapper.expressions import Expression
from mapper.spec.model import Finalize, StepFormula, StepOperation
from mapper.spec.scalars import (
    Findings,
    boolean,
    expression,
    expressions_of,
    items_of,
    optional_expression,
    pattern_of,
    require_mapping,
    require_scalar,
    text_of,
)
from mapper.yaml_source import Mapping, Node

OPERATIONS: tuple[Literal["view", "sum", "take", "cast", "dequantize", "call"], ...] = (
    "view", "sum", "take", "cast", "dequantize", "call",
)  # fmt: skip
KINDS: dict[str, Literal["attribute", "buffer", "parameter"]] = {
    "attribute": "attribute", "buffer": "buffer", "parameter": "parameter",
}  # fmt: skip
_AXIS = re.compile(r"\s*(?:\(\s*([^()]*?)\s*\)|([^\s()]+))")
_FACTOR = re.compile(r"[A-Za-z_]\w*|[1-9]\d*")


def parse_steps(node: Node | None, findings: Findings) -> tuple[Finalize, ...]:
    """Return the steps in the order of the spec."""
    return tuple(_step(require_mapping(each), findings) for each in items_of(node))


def step_expressions(step: Finalize) -> Iterator[Expression | None]:
    """Yield every expression of a step outside its patterns."""
    yield step.when
    for operation in step.do:
        yield from operation.arguments
        yield from operation.sizes.values()
        for bounds in operation.ranges.values():
            yield from bounds


def _step(node: Mapping, findings: Findings) -> Finalize:
    output = node.get("output")
    assert output is not None, "the schema requires output"
    id = text_of(node.get("id"))
    step = Finalize(
        id=id,
        inputs=tuple(pattern_of(each, findings) for each in items_of(node.get("inputs"))),
        output=pattern_of(output, findings),
        kind=KINDS[text_of(node.get("kind"), "attribute")],
        do=tuple(_operation(id, require_mapping(each), findings) for each in items_of(node.get("do"))),
        consumes=boolean(node.get("consumes")),
        restore=text_of(node.get("restore")),
        when=optional_expression(node.get("when"), findings),
        place=node.place,
    )
    findings += _iter_findings(step)
    return step


def _operation(step: str, node: Mapping, findings: Findings) -> StepOperation:
    name, value = next((name, value) for name in OPERATIONS if (value := node.get(name)) is not None)
    formula = None
    ranges: dict[str, tuple[Expression, ...]] = {}
    arguments: tuple[Expression, ...] = ()
    if name in ("view", "sum"):
        try:
            formula = parse_formula(require_scalar(value).text)
        except ValueError as error:
            findings.append(finding("M138", place=value.place, step=step, problem=str(error)))
    elif name == "take":
        ranges = {entry.name: expressions_of(entry.value, findings) for entry in require_mapping(value).entries}
    elif name in ("cast", "dequantize"):
        arguments = expressions_of(value, findings)
    sizes = {entry.name: expression(entry.value, findings) for entry in node.entries if entry.name != name}
    return StepOperation(name, formula, ranges, arguments, text_of(value) if name == "call" else "", sizes, node.place)


def parse_formula(text: str) -> StepFormula:
    """Return the formula that `text` spells; raises ValueError.

    >>> parse_formula("mix (stream hidden) -> mix hidden").left
    (('mix',), ('stream', 'hidden'))
    """
    left, arrow, right = text.partition("->")
    if not arrow or "->" in right:
        raise ValueError(f"{text!r} has not one '->' between the axes before and after")
    formula = StepFormula(_side(left), _side(right))
    before = [factor for axis in formula.left for factor in axis]
    after = [factor for axis in formula.right for factor in axis]
    for side in (before, after):
        for factor in side:
            if side.count(factor) > 1:
                raise ValueError(f"{factor!r} stands twice on one side of {text!r}")
    if extra := [factor for factor in after if factor not in before]:
        raise ValueError(f"{extra[0]!r} stands right of the arrow of {text!r} and not left of it")
    return formula


def _side(text: str) -> tuple[tuple[str, ...], ...]:
    axes: list[tuple[str, ...]] = []
    at = 0
    text = text.rstrip()
    while at < len(text):
        found = _AXIS.match(text, at)
        factors = () if found is None else tuple((found[1] if found[1] is not None else found[2]).split())
        if found is None or not factors or not all(map(_FACTOR.fullmatch, factors)):
            raise ValueError(f"{text.strip()!r} is no list of axes such as `mix (stream hidden)`")
        axes.append(factors)
        at = found.end()
    return tuple(axes)


def _iter_findings(step: Finalize) -> Findings:
    """Return what is wrong with the operations together: how many tensors they take, and which names they use."""
    findings: Findings = []

    def wrong(operation: StepOperation, problem: str) -> None:
        findings.append(finding("M138", place=operation.place, step=step.id, problem=problem))

    num_tensors = len(step.inputs)
    axes: list[str] = []
    for operation in step.do:
        if operation.formula is not None:
            before = {factor for axis in operation.formula.left for factor in axis}
            after = {factor for axis in operation.formula.right for factor in axis}
            axes = [axis[0] for axis in operation.formula.right if len(axis) == 1]
            if operation.name == "view" and before != after:
                wrong(operation, f"a view loses nothing, and {sorted(before - after)[0]!r} is not right of the arrow")
            if unknown := [name for name in operation.sizes if name not in before]:
                wrong(operation, f"{unknown[0]!r} is no factor of the formula")
        elif operation.name == "call":
            num_tensors = 1
            axes = []
        elif operation.sizes:
            wrong(operation, f"{operation.name!r} takes no further key, found {next(iter(operation.sizes))!r}")
        for axis, bounds in operation.ranges.items():
            if axis not in axes:
                wrong(operation, f"no view or sum before it names an axis {axis!r}")
            if len(bounds) != 2:
                wrong(operation, f"the range of {axis!r} has {len(bounds)} bounds, expected start and stop")
        if operation.name == "dequantize":
            if num_tensors < 2:
                wrong(operation, "'dequantize' takes two tensors, values and scales")
            num_tensors -= 1
            axes = []
    if num_tensors != 1:
        wrong(step.do[-1], f"{num_tensors} tensors are left at the end, expected one")
    return findings
