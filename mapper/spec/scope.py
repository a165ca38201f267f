"""Which names mean something where an expression or a pattern stands."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from mapper.diagnostics import Diagnostic, Place, finding
from mapper.expressions import CONSTANTS, FUNCTIONS, WORDS, Expression
from mapper.messages.suggest import did_you_mean
from mapper.pattern import Pattern
from mapper.schema.words import INSTEAD
from mapper.spec.model import Index, Let, PlacedExpression, PlacedPattern
from mapper.yaml_source import Scalar, place_at

BASE_AXES = ("tp", "pp", "dp", "ep")
QUANTISATION = (
    "quant_method",
    "block_out",
    "block_in",
    "group_size",
    "weight_bits",
    "scales_per",
    "model_dtype",
    "redundant_experts",
)
LEAF = "leaf"
RESERVED = WORDS | CONSTANTS.keys() | FUNCTIONS.keys() | {LEAF}


@dataclass(frozen=True, slots=True)
class Scope:
    """`values` are config keys, options, axes and built-ins; indices and lets are kept whole."""

    values: frozenset[str]
    indices: Mapping[str, Index]
    lets: Mapping[str, Let]

    def with_lets(self, lets: Mapping[str, Let]) -> Scope:
        """Return the scope inside a group."""
        return replace(self, lets={**self.lets, **lets}) if lets else self

    def with_names(self, names: Iterable[str]) -> Scope:
        return replace(self, values=self.values.union(names))

    def knows(self, name: str) -> bool:
        return name in self.values or name in self.indices or name in self.lets

    def indices_of(self, names: Iterable[str]) -> frozenset[str]:
        """Return the indices that these names depend on, directly or through lets."""
        found: set[str] = set()
        waiting, seen = list(names), set[str]()
        while waiting:
            name = waiting.pop()
            if name in seen:
                continue
            seen.add(name)
            if name in self.indices:
                found.add(name)
            elif name in self.lets:
                let = self.lets[name]
                waiting += [each for each in let.expression.names | let.expression.calls if each != let.parameter]
        return frozenset(found)


def names_in(pattern: Pattern) -> frozenset[str]:
    """Return every name that a pattern's placeholders refer to, functions too."""
    return pattern.names.union(*(each.expression.calls for each in pattern.placeholders))


def place_of(item: Expression | Pattern, default: Place) -> Place:
    """Return where an expression or a pattern stands."""
    return item.place if isinstance(item, PlacedExpression | PlacedPattern) else default


def iter_name_findings(expression: Expression | None, scope: Scope, default: Place) -> Iterator[Diagnostic]:
    """Yield the unknown names and wrong uses of names in an expression."""
    if expression is not None:
        yield from _iter_names(expression, scope, place_of(expression, default), frozenset())


def iter_pattern_findings(pattern: Pattern, scope: Scope, default: Place) -> Iterator[Diagnostic]:
    """Yield the same for the placeholders of a pattern."""
    start = place_of(pattern, default)
    for each in pattern.placeholders:
        place = place_at(Scalar(None, pattern.text, start), each.column + 1)
        yield from _iter_names(each.expression, scope, place, frozenset({LEAF}))


def _iter_names(expression: Expression, scope: Scope, start: Place, extra: frozenset[str]) -> Iterator[Diagnostic]:
    for name in sorted(expression.names - extra):
        place = _place_of_name(name, expression, start)
        if name in INSTEAD and not scope.knows(name):
            yield finding("M124", place=place, word=name, instead=INSTEAD[name])
        elif not scope.knows(name):
            yield finding("M201", place=place, hint=did_you_mean(name, _known_values(scope) | extra), name=name)
        elif name in scope.lets and scope.lets[name].parameter is not None:
            yield finding("M203", place=place, name=name, problem=f"needs an argument: {name}({scope.lets[name].parameter})")
    for name in sorted(expression.calls):
        place = _place_of_name(name, expression, start)
        if name in scope.lets and scope.lets[name].parameter is None:
            yield finding("M203", place=place, name=name, problem="takes no argument")
        elif name not in scope.lets and scope.knows(name):
            yield finding("M203", place=place, name=name, problem="is a value, not a function")
        elif name not in scope.lets:
            yield finding("M202", place=place, hint=did_you_mean(name, _known_functions(scope)), name=name)


def _known_values(scope: Scope) -> set[str]:
    lets = {name for name, let in scope.lets.items() if let.parameter is None}
    return lets | scope.values | scope.indices.keys() | WORDS | CONSTANTS.keys()


def _known_functions(scope: Scope) -> set[str]:
    return {name for name, let in scope.lets.items() if let.parameter is not None} | FUNCTIONS.keys()


def _place_of_name(name: str, expression: Expression, start: Place) -> Place:
    found = re.search(rf"(?<![\w'\"]){re.escape(name)}(?!\w)", expression.text)
    return place_at(Scalar(None, expression.text, start), found.start()) if found else start
