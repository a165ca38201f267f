"""Rules without groups: prefixes are set before patterns, conditions are collected, blocks are put in place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from mapper.spec.model import Item, Leaf, Let, Rule
from mapper.testing.reference.evaluate import Scope, evaluate, holds
from mapper.testing.reference.names import has_leaf, indices_in, join
from mapper.testing.reference.world import IndexValue, World


@dataclass(frozen=True, slots=True)
class Around:
    """What the groups around a rule give it."""

    source: str
    target: str
    whens: tuple[str, ...]
    stage: str | None
    lets: Mapping[str, Let]


@dataclass(frozen=True, slots=True)
class Reading:
    """One source of a rule: its whole pattern, and the format it is stored in."""

    pattern: str
    format: str


@dataclass(frozen=True, slots=True)
class FlatRule:
    """A rule with whole patterns. `number` is its place among all rules of the runtime."""

    number: int
    rule: Rule
    targets: tuple[str, ...]
    alternatives: tuple[tuple[Reading, ...], ...]
    tie: str | None
    whens: tuple[str, ...]
    stage: str | None
    lets: Mapping[str, Let]

    def scope(self, world: World) -> Scope:
        return world.scope.with_lets(self.lets)

    def stacked(self) -> list[str]:
        return [index for index, _ in self.rule.stack]

    def indices(self, world: World) -> list[str]:
        """Return the indices that take one value per target, in order of appearance."""
        patterns = [*self.targets, *(reading.pattern for each in self.alternatives for reading in each)]
        found = dict.fromkeys(index for pattern in patterns for index in indices_in(pattern, world.indices()))
        return [index for index in found if index not in self.stacked()]

    def applies(self, world: World, values: Mapping[str, IndexValue]) -> bool:
        scope = self.scope(world).with_values(values)
        return all(holds(when, scope) for when in self.whens)

    def is_on_stage(self, world: World, values: Mapping[str, IndexValue]) -> bool:
        scope = self.scope(world).with_values(values)
        return world.is_on_stage(None if self.stage is None else evaluate(self.stage, scope))


def flat_rules(world: World) -> list[FlatRule]:
    """Return every rule of the runtime in the order in which the spec lists them."""
    start = Around("", "", (), None, {})
    return [_flat(number, rule, around) for number, (rule, around) in enumerate(_walk(world, world.runtime.rules, start))]


def leaves_of(world: World, reading: Reading) -> tuple[Leaf | None, ...]:
    """Return the leaves that a source holds; a pattern without `{leaf}` is one tensor and has none."""
    return world.format(reading.format).leaves if has_leaf(reading.pattern) else (None,)


def _walk(world: World, items: Iterable[Item], around: Around) -> Iterator[tuple[Rule, Around]]:
    for item in items:
        whens = around.whens if item.when is None else (*around.whens, item.when.text)
        stage = around.stage if item.stage is None else item.stage.text
        if isinstance(item, Rule):
            yield item, Around(around.source, around.target, whens, stage, around.lets)
            continue
        inside = Around(
            join(around.source, item.source.text),
            join(around.target, item.target.text),
            whens,
            stage,
            {**around.lets, **item.let},
        )
        yield from _walk(world, item.items if item.use is None else world.spec.blocks[item.use], inside)


def _flat(number: int, rule: Rule, around: Around) -> FlatRule:
    return FlatRule(
        number=number,
        rule=rule,
        targets=tuple(join(around.target, each.text) for each in rule.targets),
        alternatives=tuple(
            tuple(
                Reading(join(around.source, each.pattern.text), each.format or alternative.format or rule.format or "linear")
                for each in alternative.sources
            )
            for alternative in rule.alternatives
        ),
        tie=None if rule.tie is None else join(around.target, rule.tie.text),
        whens=around.whens,
        stage=around.stage,
        lets=around.lets,
    )
