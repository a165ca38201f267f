"""Evaluates the expression texts of a spec, straight over Python's syntax tree."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache

from mapper.spec.model import Let

CONSTANTS: dict[str, object] = {"null": None, "true": True, "false": False, "inf": math.inf}
STAGES = {"first", "last", "both", "all"}
DTYPES = {
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu",
    "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool",
}  # fmt: skip


class Misfit(ValueError):
    """A config, or a layout, that a spec cannot be used with."""


@dataclass(frozen=True, slots=True)
class Scope:
    """What names stand for: values, and definitions that are evaluated where they are used."""

    values: Mapping[str, object]
    lets: Mapping[str, Let] = field(default_factory=dict)

    def with_values(self, values: Mapping[str, object]) -> Scope:
        return replace(self, values={**self.values, **values})

    def with_lets(self, lets: Mapping[str, Let]) -> Scope:
        return replace(self, lets={**self.lets, **lets})


@cache
def parse(text: str) -> ast.expr:
    return ast.parse(text.strip(), mode="eval").body


@cache
def names_in(text: str) -> frozenset[str]:
    """Return every name that an expression mentions."""
    return frozenset(node.id for node in ast.walk(parse(text)) if isinstance(node, ast.Name))


def evaluate(text: str, scope: Scope) -> object:
    """Return the value of an expression; raises KeyError for an unknown name.

    >>> evaluate('ceil_div(size, 4) if size is not null else 0', Scope({'size': 10}))
    3
    """
    return _value(parse(text), scope)


def integer(text: str, scope: Scope) -> int:
    """Return the value of an expression that must be a whole number."""
    value = evaluate(text, scope)
    if not isinstance(value, int):
        raise Misfit(f"{text!r} is {value!r}, expected a whole number")
    return value


def holds(text: str, scope: Scope) -> bool:
    return bool(evaluate(text, scope))


def _value(node: ast.expr, scope: Scope) -> object:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return _named(name, scope)
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item, scope) for item in items]
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return _value(body, scope) if _value(test, scope) else _value(orelse, scope)
        case ast.BoolOp(op=ast.And(), values=operands):
            return all(_value(each, scope) for each in operands)
        case ast.BoolOp(op=ast.Or(), values=operands):
            return any(_value(each, scope) for each in operands)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not _value(operand, scope)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_number(operand, scope)
        case ast.BinOp(left=left, op=op, right=right):
            return _arithmetic(op, _number(left, scope), _number(right, scope))
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            compared = [_value(each, scope) for each in (left, *comparators)]
            return all(_compare(op, a, b) for op, a, b in zip(ops, compared, compared[1:], strict=False))
        case ast.Subscript(value=container, slice=place):
            return operator.getitem(_value(container, scope), _value(place, scope))  # type: ignore[call-overload]
        case ast.Call(func=ast.Name(id=name), args=arguments):
            return _call(name, [_value(each, scope) for each in arguments], scope)
    raise NotImplementedError(f"the expression {ast.unparse(node)!r}")


def _named(name: str, scope: Scope) -> object:
    if name in scope.values:
        return scope.values[name]
    if name in scope.lets:
        return evaluate(scope.lets[name].expression.text, scope)
    if name in CONSTANTS:
        return CONSTANTS[name]
    if name in STAGES or name in DTYPES:
        return name
    raise KeyError(name)


def _number(node: ast.expr, scope: Scope) -> int | float:
    value = _value(node, scope)
    if not isinstance(value, int | float):
        raise Misfit(f"{ast.unparse(node)!r} is {value!r}, expected a number")
    return value


def _arithmetic(op: ast.operator, a: int | float, b: int | float) -> int | float:
    match op:
        case ast.Add():
            return a + b
        case ast.Sub():
            return a - b
        case ast.Mult():
            return a * b
        case ast.FloorDiv():
            return a // b
        case ast.Mod():
            return a % b
    raise NotImplementedError(f"the operator {type(op).__name__}")


def _compare(op: ast.cmpop, a: object, b: object) -> bool:
    match op:
        case ast.Eq() | ast.Is():
            return a == b
        case ast.NotEq() | ast.IsNot():
            return a != b
        case ast.In():
            assert isinstance(b, list | str)
            return a in b
        case ast.NotIn():
            assert isinstance(b, list | str)
            return a not in b
    assert isinstance(a, int | float), f"{a!r} is no number"
    assert isinstance(b, int | float), f"{b!r} is no number"
    match op:
        case ast.Lt():
            return a < b
        case ast.LtE():
            return a <= b
        case ast.Gt():
            return a > b
        case ast.GtE():
            return a >= b
    raise NotImplementedError(f"the comparison {type(op).__name__}")


def _call(name: str, arguments: list[object], scope: Scope) -> object:
    let = scope.lets.get(name)
    if let is not None:
        assert let.parameter is not None, f"{name} takes no argument"
        (argument,) = arguments
        return evaluate(let.expression.text, scope.with_values({let.parameter: argument}))
    if name in ("len", "count"):
        values = arguments[0]
        assert isinstance(values, list)
        return len(values) if name == "len" else sum(each == arguments[1] for each in values)
    numbers = [each for each in arguments if isinstance(each, int | float)]
    if name in ("min", "max") and isinstance(arguments[0], list):
        numbers = arguments[0]
    match name:
        case "ceil_div":
            return math.ceil(numbers[0] / numbers[1])
        case "gcd":
            return math.gcd(*(int(each) for each in numbers))
        case "min":
            return min(numbers)
        case "max":
            return max(numbers)
    raise NotImplementedError(f"the function {name}")
