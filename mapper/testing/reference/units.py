"""Units of a load: one target tensor each (or one per part where a rule has several), with the sources that it is made of."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass

from mapper.spec.model import Leaf
from mapper.testing.reference.evaluate import Scope
from mapper.testing.reference.names import indices_in, spell
from mapper.testing.reference.operations import fill_of
from mapper.testing.reference.rules import FlatRule, Reading, leaves_of
from mapper.testing.reference.world import IndexValue, World, combinations


@dataclass(frozen=True, slots=True)
class Piece:
    """One source of a unit. `names` holds, per stacked value, one name, or two where a pair is dequantised; none for a fill.

    `holds_stack` says that one tensor holds all stacked values already, along leading axes.
    """

    reading: Reading
    leaf: Leaf | None
    names: tuple[tuple[str, ...], ...]
    holds_stack: bool


@dataclass(frozen=True, slots=True)
class Unit:
    flat: FlatRule
    alternative: int
    targets: tuple[str, ...]
    pieces: tuple[Piece, ...]
    values: Mapping[str, IndexValue]
    is_optional: bool

    @property
    def leaf(self) -> Leaf | None:
        return self.pieces[0].leaf

    def scope(self, world: World) -> Scope:
        return self.flat.scope(world).with_values(self.values)

    def sources(self) -> list[str]:
        """Return every name that the unit reads, whichever rank holds it."""
        return [name for piece in self.pieces for names in piece.names for name in names]

    def is_here(self, world: World) -> bool:
        """Say whether the rank holds the unit's targets."""
        return self.flat.is_on_stage(world, self.values) and all(
            value in world.held(index) for index, value in self.values.items()
        )


def units_of(flat: FlatRule, world: World) -> list[Unit]:
    """Return every unit of a rule, for all index values and all alternatives of its sources."""
    if flat.rule.tie is not None:
        return []
    found = []
    every = {index: world.values(index) for index in flat.indices(world)}
    for values in combinations(list(every), every):
        if flat.applies(world, values):
            for alternative in range(len(flat.alternatives)):
                found += list(_units(flat, alternative, values, world))
    return found


def chosen_alternative(units: list[Unit], present: Container[str]) -> int:
    """Return the first alternative of which the checkpoint has any tensor, or the first."""
    for number in sorted({unit.alternative for unit in units}):
        if any(name in present for unit in units if unit.alternative == number for name in unit.sources()):
            return number
    return 0


def _units(flat: FlatRule, alternative: int, values: Mapping[str, IndexValue], world: World) -> Iterator[Unit]:
    readings = flat.alternatives[alternative]
    by_name = [{None if leaf is None else leaf.target: leaf for leaf in leaves_of(world, each)} for each in readings]
    for name in by_name[0]:
        if any(name not in leaves for leaves in by_name):
            continue  # an optional leaf that only some of the sources' formats have
        leaves = [each[name] for each in by_name]
        scope = flat.scope(world).with_values(values)
        yield Unit(
            flat=flat,
            alternative=alternative,
            targets=tuple(spell(pattern, scope, leaf=name) for pattern in flat.targets),
            pieces=tuple(_piece(flat, reading, leaf, scope, world) for reading, leaf in zip(readings, leaves, strict=True)),
            values=values,
            is_optional=flat.rule.optional or any(leaf is not None and leaf.optional for leaf in leaves),
        )


def _piece(flat: FlatRule, reading: Reading, leaf: Leaf | None, scope: Scope, world: World) -> Piece:
    if fill_of(flat.rule, leaf, scope) is not None:
        return Piece(reading, leaf, (), holds_stack=False)
    stacked = indices_in(reading.pattern, flat.stacked())
    if stacked and set(stacked) != set(flat.stacked()):
        raise NotImplementedError("a source that holds one of two stacked indices")
    words: list[str | None] = [None]
    if leaf is not None:
        words = [leaf.source] if leaf.dequantize is None else [half.name for half in leaf.dequantize]
    in_order = flat.stacked() if stacked else []
    names = tuple(
        tuple(spell(reading.pattern, scope.with_values(choice), leaf=word) for word in words)
        for choice in combinations(in_order, {index: world.values(index) for index in in_order})
    )
    return Piece(reading, leaf, names, holds_stack=bool(flat.stacked()) and not stacked)
