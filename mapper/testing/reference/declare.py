"""What a checkpoint holds according to a spec: the names, shapes and dtypes of everything that a runtime reads or skips."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mapper import Layout
from mapper.expressions import Expression
from mapper.spec.model import Spec
from mapper.testing.reference.evaluate import Misfit, evaluate
from mapper.testing.reference.grids import Line, lines_of, stored_shape
from mapper.testing.reference.load import spelled_skips
from mapper.testing.reference.operations import operations_of
from mapper.testing.reference.rules import flat_rules
from mapper.testing.reference.units import Piece, Unit, units_of
from mapper.testing.reference.whole import Plan, check_cuts, is_bias, plan_of, stored_lines
from mapper.testing.reference.world import Config, World, world_of

Shape = tuple[int, ...]
COMPUTING = {"neg_exp", "add", "multiply", "subtract_mean"}


@dataclass(frozen=True, slots=True)
class Declared:
    """One source that a rule reads. `shape` and `dtype` are None where the spec leaves them to the file.

    `group` is equal for the sources that are present or absent together: one leaf of one rule, and of what is appended to
    it. `refused` says that the source must not be there: a leaf without a cut dim, of which the rule does not say what the
    ranks hold. `is_computed` says that the rule computes with the source's values.
    """

    name: str
    shape: Shape | None
    dtype: str | None
    rule: int
    alternative: int
    group: tuple[int, str]
    leaf: str
    is_optional: bool
    is_refused: bool
    is_reused: bool
    passes_over_others: bool
    is_cast: bool = False
    is_computed: bool = False


def declared_sources(
    spec: Spec, *, config: Config, runtime: str, options: Mapping[str, object] | None = None
) -> list[Declared]:
    """Return every source of every rule, all alternatives included; a source that two rules read comes twice."""
    world = world_of(spec, config=config, runtime=runtime, layout=Layout(), rank=0, options=options)
    rules = flat_rules(world)
    first: dict[tuple[str, ...], int] = {}
    for flat in rules:
        first.setdefault(flat.targets, flat.number)
    return [
        each
        for flat in rules
        for unit in units_of(flat, world)
        for each in _declared(unit, world, first[flat.targets] if flat.rule.append else flat.number)
    ]


def skip_patterns(
    spec: Spec, *, config: Config, runtime: str, options: Mapping[str, object] | None = None
) -> dict[str, str | None]:
    """Return the skip patterns of a runtime with every index value spelled out, each with what it is a copy of.

    Wildcards stay.
    """
    return spelled_skips(world_of(spec, config=config, runtime=runtime, layout=Layout(), rank=0, options=options))


def layout_fault(
    spec: Spec, *, config: Config, runtime: str, layout: Layout, options: Mapping[str, object] | None = None
) -> str | None:
    """Return why a layout cannot hold the model, or None where it can."""
    try:
        world = world_of(spec, config=config, runtime=runtime, layout=layout, rank=0, options=options)
        ranks = [world.at_rank(rank) for rank in range(layout.num_ranks)]
        for index in world.indices():
            for each in ranks:
                each.held(index)
        seen: set[object] = set()
        for flat in flat_rules(world):
            for unit in units_of(flat, world):
                plan = plan_of(unit, world)
                if plan is None:
                    continue
                leaf = None if unit.leaf is None else unit.leaf.target
                key = (flat.number, unit.alternative, leaf, tuple(plan.sizes.items()), plan.lines)
                if key not in seen:
                    seen.add(key)
                    for each in ranks:
                        check_cuts(unit, each)
    except (Misfit, IndexError) as fault:
        return str(fault)
    return None


def _declared(unit: Unit, world: World, group: int) -> Iterator[Declared]:
    plan = plan_of(unit, world)
    scope = unit.scope(world)
    for number, piece in enumerate(unit.pieces):
        for names in piece.names:
            for half, name in enumerate(names):
                shape = None if plan is None else _shape(unit, piece, number, half, plan, world)
                dtype = unit.flat.rule.dtype or (None if piece.leaf is None else piece.leaf.dtype)
                if piece.leaf is not None and piece.leaf.dequantize is not None:
                    dtype = piece.leaf.dequantize[half].dtype
                elif dtype is None:
                    dtype = _cast_beside(unit)
                leaf = "" if piece.leaf is None else piece.leaf.name
                yield Declared(
                    name=name,
                    shape=shape,
                    dtype=None if dtype is None else str(evaluate(dtype.text, scope)),
                    rule=unit.flat.number,
                    alternative=unit.alternative,
                    group=(group, leaf),
                    leaf=leaf if len(names) == 1 or piece.leaf is None else names[half].rpartition(".")[2],
                    is_optional=unit.is_optional,
                    is_refused=plan is not None and _is_refused(unit, plan),
                    is_reused=unit.flat.rule.reuse,
                    passes_over_others=unit.flat.rule.others == "skip",
                    is_cast=_is_cast(unit, piece, world),
                    is_computed=any(each.name in COMPUTING for each in operations_of(unit.flat.rule, piece.leaf)),
                )


def _cast_beside(unit: Unit) -> Expression | None:
    """Return the dtype that a source has to have because another one of its target is dequantised to it."""
    leaves = (piece.leaf for piece in unit.pieces if piece.leaf is not None)
    return next((leaf.cast for leaf in leaves if leaf.dequantize is not None), None)


def _is_cast(unit: Unit, piece: Piece, world: World) -> bool:
    cast = (None if piece.leaf is None else piece.leaf.cast) or unit.flat.rule.cast
    return cast is not None and evaluate(cast.text, unit.scope(world)) is not None


def _is_refused(unit: Unit, plan: Plan) -> bool:
    present = {line.dim for line in plan.lines}
    return is_bias(unit) and any(
        dim not in present and any(shard.axis) and shard.bias is None for dim, shard in unit.flat.rule.shard.items()
    )


def _shape(unit: Unit, piece: Piece, number: int, half: int, plan: Plan, world: World) -> Shape:
    scope = unit.scope(world)
    sizes = dict(plan.source_sizes)
    if len(unit.pieces) > 1:
        assert plan.parts is not None
        sizes[plan.parts] = (sizes[plan.parts][number],)
    if piece.leaf is not None and piece.leaf.dequantize is not None:
        leading = [Line(dim, 1, ()) for dim in plan.leading]
        return stored_shape([*leading, *lines_of(piece.leaf.dequantize[half].dims, scope)], sizes, {})
    shape = stored_shape(stored_lines(piece, plan, scope), sizes, plan.joined)
    if piece.holds_stack:
        shape = (*(len(world.values(index)) for index in unit.flat.stacked()), *shape)
    return shape
