"""Expressions of the spec language: parsed once, whitelisted, evaluated without `eval`.

The grammar is Python's expression grammar cut down to literals, names, `[]`, arithmetic, comparison, `in`,
`and or not`, `if else` and the functions below. `null` is the missing value; dtype and stage words are strings.
What is left means what it means in Python: `and` and `or` give the operand that decides (`head_dim or 64`), and
nothing is computed that does not decide. Arithmetic is on numbers; `+` also joins texts, and lists.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

Value = object
Evaluator = Callable[["Scope"], Value]

FUNCTIONS: dict[str, Callable[..., Value]] = {
    "ceil_div": lambda a, b: -(-a // b),
    "gcd": math.gcd,
    "min": min,
    "max": max,
    "len": len,
    "count": lambda values, value: sum(1 for each in values if each == value),
}

STAGE_WORDS = ("first", "last", "both", "all")
DTYPE_WORDS = (
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu",
    "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool",
)  # fmt: skip
WORDS = frozenset(STAGE_WORDS + DTYPE_WORDS)
CONSTANTS: dict[str, Value] = {"null": None, "true": True, "false": False, "inf": math.inf}

ARGUMENTS: dict[str, tuple[int, int | None]] = {
    "ceil_div": (2, 2), "gcd": (2, None), "min": (1, None), "max": (1, None), "len": (1, 1), "count": (2, 2),
}  # fmt: skip
"""The least and the most arguments of each function; None is no bound."""

MAX_NUMBER = 2**63
MAX_LENGTH = 2**16


def _on_numbers(sign: str, apply: Callable[..., Value], *, joins: bool = False) -> Callable[..., Value]:
    """Return `apply` for two numbers; Python's `*` and `%` on texts can fill the memory, as can sums of sums of lists."""

    def run(a: Value, b: Value) -> Value:
        if joins and isinstance(a, str | list) and type(a) is type(b):
            if len(a) + len(b) > MAX_LENGTH:
                raise ValueError(f"the result of {sign!r} is longer than {MAX_LENGTH}")
        elif not isinstance(a, int | float) or not isinstance(b, int | float):
            raise TypeError(f"{sign!r} is for numbers, found {a!r} and {b!r}")
        result = apply(a, b)
        if isinstance(result, int) and abs(result) > MAX_NUMBER:
            raise ValueError(f"the result of {sign!r} is beyond 2**63")
        return result

    return run


_BINARY: dict[type[ast.operator], Callable[..., Value]] = {
    ast.Add: _on_numbers("+", operator.add, joins=True),
    ast.Sub: _on_numbers("-", operator.sub),
    ast.Mult: _on_numbers("*", operator.mul),
    ast.FloorDiv: _on_numbers("//", operator.floordiv),
    ast.Mod: _on_numbers("%", operator.mod),
}


def _is_same(a: Value, b: Value) -> bool:
    """Whether both are null, true or false; between numbers `is` would depend on which Python keeps as one object."""
    if not any(each is None or isinstance(each, bool) for each in (a, b)):
        raise TypeError("'is' compares with null, true or false; use '=='")
    return a is b


_COMPARE: dict[type[ast.cmpop], Callable[..., Value]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: _is_same,
    ast.IsNot: lambda a, b: not _is_same(a, b),
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}
_UNARY: dict[type[ast.unaryop], Callable[..., Value]] = {ast.Not: operator.not_, ast.USub: operator.neg}


class ExpressionError(ValueError):
    """A text that is no expression, or one that fails on these values.

    `column` counts characters from 0 within the text, without the blanks around it.
    """

    def __init__(self, message: str, column: int = 0) -> None:
        super().__init__(message)
        self.message = message
        self.column = column


class Scope(Protocol):
    """Where an expression finds its names."""

    def value(self, name: str) -> Value:
        """Return the value of `name`; raise `ExpressionError` when there is none."""
        ...

    def call(self, name: str, argument: Value) -> Value:
        """Return the value of the spec's own function `name` at `argument`."""
        ...


@dataclass(frozen=True, slots=True)
class Expression:
    """A parsed expression; equal texts are equal expressions. `names` and `calls` are what it refers to."""

    text: str
    names: frozenset[str] = field(compare=False)
    calls: frozenset[str] = field(compare=False)
    _run: Evaluator = field(compare=False, repr=False)

    def evaluate(self, scope: Scope) -> Value:
        """Return the value in `scope`; raises `ExpressionError` where names or types do not fit."""
        try:
            return self._run(scope)
        except ExpressionError:
            raise
        except (TypeError, ArithmeticError, LookupError, ValueError) as error:
            raise ExpressionError(f"{self.text!r} fails: {error}") from error
        except RecursionError as error:
            raise ExpressionError(TOO_DEEP) from error

    def __reduce__(self) -> tuple[Callable[[str], Expression], tuple[str]]:
        return parse, (self.text,)


TOO_DEEP = "the expression is nested too deeply"
_CACHE: dict[str, Expression] = {}


def parse(text: str) -> Expression:
    """Return the expression that `text` spells; raises `ExpressionError` with the column of what is not allowed.

    >>> sorted(parse('layer >= first_k_dense_replace and not tied').names)
    ['first_k_dense_replace', 'layer', 'tied']
    """
    known = _CACHE.get(text)
    if known is None:
        known = _CACHE[text] = _parse(text)
    return known


def literal(value: Value) -> Expression:
    """Return the expression that always has this value: null, a boolean, a number, a text, or a list of these."""
    return parse(_spell(value))


def _spell(value: Value) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_spell, value))}]"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return repr(value)


def _parse(text: str) -> Expression:
    stripped = text.strip()
    if not stripped:
        raise ExpressionError("expected an expression, found nothing")
    try:
        tree = ast.parse(stripped, mode="eval")
    except SyntaxError as error:
        # Python gives offset 0 where the text ends too early.
        column = _start_of_line(stripped, error.lineno or 1) + error.offset - 1 if error.offset else len(stripped)
        raise ExpressionError(f"{text!r} is not an expression", min(column, len(stripped))) from error
    except ValueError as error:
        raise ExpressionError(f"{text!r} is not an expression") from error
    except (MemoryError, RecursionError) as error:
        raise ExpressionError(TOO_DEEP) from error
    names: set[str] = set()
    calls: set[str] = set()
    try:
        run = _compile(tree.body, names, calls)
    except _Refused as error:
        raise ExpressionError(error.message, _column(stripped, error.node)) from error
    except RecursionError as error:
        raise ExpressionError(TOO_DEEP) from error
    return Expression(stripped, frozenset(names), frozenset(calls), run)


def _start_of_line(text: str, line: int) -> int:
    return sum(len(each) + 1 for each in text.split("\n")[: line - 1])


def _column(text: str, node: ast.expr) -> int:
    """Return the node's position in characters; Python counts it in bytes of its line."""
    start = _start_of_line(text, node.lineno)
    return start + len(text[start:].encode()[: node.col_offset].decode())


class _Refused(Exception):
    """A node that is not part of the language."""

    def __init__(self, message: str, node: ast.expr) -> None:
        super().__init__(message)
        self.message = message
        self.node = node


def _compile(node: ast.expr, names: set[str], calls: set[str]) -> Evaluator:
    def inner(child: ast.expr) -> Evaluator:
        return _compile(child, names, calls)

    match node:
        case ast.Constant(value=value) if type(value) in (int, float, str):
            return lambda scope: value
        case ast.Name(id=name):
            return _compile_name(node, name, names)
        case ast.List(elts=items) | ast.Tuple(elts=items):
            parts = [inner(item) for item in items]
            return lambda scope: [part(scope) for part in parts]
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            apply_unary, value_of = _UNARY[type(op)], inner(operand)
            return lambda scope: apply_unary(value_of(scope))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            apply_binary, first, second = _BINARY[type(op)], inner(left), inner(right)
            return lambda scope: apply_binary(first(scope), second(scope))
        case ast.BoolOp(op=op, values=values):
            return _compile_choice([inner(value) for value in values], decides=isinstance(op, ast.Or))
        case ast.Compare(left=left, ops=ops, comparators=comparators) if all(type(op) in _COMPARE for op in ops):
            return _compile_comparison([inner(each) for each in (left, *comparators)], [_COMPARE[type(op)] for op in ops])
        case ast.IfExp(test=test, body=body, orelse=orelse):
            condition, yes, no = inner(test), inner(body), inner(orelse)
            return lambda scope: yes(scope) if condition(scope) else no(scope)
        case ast.Subscript(value=value, slice=index) if not isinstance(index, ast.Slice):
            items_of, index_of = inner(value), inner(index)
            return lambda scope: items_of(scope)[index_of(scope)]  # type: ignore[index]
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]):
            return _compile_call(name, [inner(each) for each in arguments], node, calls)
        case _:
            raise _Refused(_refusal(node), node)


def _compile_name(node: ast.expr, name: str, names: set[str]) -> Evaluator:
    if name in CONSTANTS:
        constant = CONSTANTS[name]
        return lambda scope: constant
    if name in WORDS:
        return lambda scope: name
    if name in FUNCTIONS:
        raise _Refused(f"the function {name!r} needs arguments", node)
    names.add(name)
    return lambda scope: scope.value(name)


def _compile_choice(parts: list[Evaluator], *, decides: bool) -> Evaluator:
    """`or` gives the first operand that is true, `and` the first that is not, both the last one where none decides."""

    def run(scope: Scope) -> Value:
        value: Value = None
        for part in parts:
            value = part(scope)
            if bool(value) is decides:
                break
        return value

    return run


def _compile_comparison(parts: list[Evaluator], tests: list[Callable[..., Value]]) -> Evaluator:
    if len(tests) == 1:
        first, second, test = parts[0], parts[1], tests[0]
        return lambda scope: test(first(scope), second(scope))

    def run(scope: Scope) -> Value:
        left = parts[0](scope)
        for test, part in zip(tests, parts[1:], strict=True):
            right = part(scope)
            if not test(left, right):
                return False
            left = right
        return True

    return run


def _compile_call(name: str, arguments: list[Evaluator], node: ast.expr, calls: set[str]) -> Evaluator:
    function = FUNCTIONS.get(name)
    if function is not None:
        least, most = ARGUMENTS[name]
        if len(arguments) < least or (most is not None and len(arguments) > most):
            expected = f"{least}" if least == most else f"at least {least}"
            raise _Refused(f"{name!r} takes {expected} argument{'' if least == 1 else 's'}, found {len(arguments)}", node)
        return lambda scope: function(*[argument(scope) for argument in arguments])
    if len(arguments) != 1:
        raise _Refused(f"{name!r} takes 1 argument, found {len(arguments)}", node)
    calls.add(name)
    argument = arguments[0]
    return lambda scope: scope.call(name, argument(scope))


def _refusal(node: ast.expr) -> str:
    match node:
        case ast.Constant(value=value) if value is None or isinstance(value, bool):
            spelling = "null" if value is None else str(value).lower()
            return f"{value!r} is written {spelling!r} here"
        case ast.BinOp(op=ast.Div()):
            return "'/' stands in dims only; use '//' or ceil_div"
        case ast.Attribute(attr=attribute):
            return f"attributes such as '.{attribute}' are not part of the language"
        case _:
            return f"{ast.unparse(node)!r} is not part of the language"


def names_with_values(names: Iterable[str]) -> frozenset[str]:
    """Return `names` without the words that every expression knows."""
    return frozenset(name for name in names if name not in WORDS and name not in CONSTANTS)
