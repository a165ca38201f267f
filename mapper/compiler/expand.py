"""Groups and blocks unfolded: every rule with its full prefixes, all conditions that must hold, and its names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mapper.compiler.names import Names
from mapper.diagnostics import Place
from mapper.expressions import Expression
from mapper.pattern import Pattern, join
from mapper.spec.model import Group, Item, Rule


@dataclass(frozen=True, slots=True)
class Condition:
    """A `when` and the names it is read with."""

    expression: Expression
    names: Names
    place: Place


@dataclass(frozen=True, slots=True)
class FlatRule:
    """A rule outside its groups. `number` counts the rules of the runtime in reading order."""

    number: int
    rule: Rule
    source_prefix: Pattern
    target_prefix: Pattern
    conditions: tuple[Condition, ...]
    stage: tuple[Expression, Names] | None
    names: Names

    @property
    def target(self) -> Pattern:
        return join(self.target_prefix, self.rule.targets[0])

    def source(self, pattern: Pattern) -> Pattern:
        """Return a source pattern of the rule below the groups' prefix."""
        return join(self.source_prefix, pattern)


@dataclass(frozen=True, slots=True)
class _Surrounding:
    source: Pattern
    target: Pattern
    conditions: tuple[Condition, ...]
    stage: tuple[Expression, Names] | None
    names: Names


def flatten(items: tuple[Item, ...], blocks: Mapping[str, tuple[Item, ...]], names: Names) -> list[FlatRule]:
    """Return all rules in reading order; the spec has been checked, so blocks exist and do not use themselves."""
    rules: list[FlatRule] = []
    empty = Pattern("", ())
    _walk(items, _Surrounding(empty, empty, (), None, names), blocks, rules)
    return rules


def _walk(items: tuple[Item, ...], around: _Surrounding, blocks: Mapping[str, tuple[Item, ...]], rules: list[FlatRule]) -> None:
    for item in items:
        if isinstance(item, Group):
            _walk(blocks[item.use] if item.use else item.items, _inside(item, around), blocks, rules)
            continue
        conditions = around.conditions
        if item.when is not None:
            conditions = (*conditions, Condition(item.when, around.names, item.place))
        stage = (item.stage, around.names) if item.stage is not None else around.stage
        rules.append(FlatRule(len(rules), item, around.source, around.target, conditions, stage, around.names))


def _inside(group: Group, around: _Surrounding) -> _Surrounding:
    conditions = around.conditions
    if group.when is not None:
        conditions = (*conditions, Condition(group.when, around.names, group.place))
    return _Surrounding(
        join(around.source, group.source),
        join(around.target, group.target),
        conditions,
        (group.stage, around.names) if group.stage is not None else around.stage,
        around.names.below(group.let),
    )
