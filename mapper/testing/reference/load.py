"""The load itself: every whole target from whole sources, and only then this rank's share of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from mapper import Layout
from mapper.spec.model import Spec
from mapper.testing.reference.arrays import Bits, tensor_of
from mapper.testing.reference.evaluate import holds
from mapper.testing.reference.names import indices_in, matches, spell
from mapper.testing.reference.rules import FlatRule, flat_rules
from mapper.testing.reference.tensors import PADDING, Labels, Values
from mapper.testing.reference.units import Unit, chosen_alternative, units_of
from mapper.testing.reference.whole import local, plan_of, split_targets, target_dtype, whole
from mapper.testing.reference.world import Config, World, combinations, world_of


@dataclass(frozen=True, slots=True)
class ReferenceResult:
    """What one rank holds after a load, and where every source went.

    `targets` are this rank's parameters. `wholes` are the same parameters uncut and without padding, and `positions` say
    for every element of a target where it lies in its whole (counted in row-major order; -1 is padding). `tied` names the
    twin of a target that shares its storage. `kept` are targets that no source fills, by their rule's reason. `missing` are
    sources that this rank lacks, `missing_elsewhere` those that only other ranks do. Finalize steps are not run.
    """

    targets: Mapping[str, torch.Tensor]
    wholes: Mapping[str, torch.Tensor]
    positions: Mapping[str, torch.Tensor]
    tied: Mapping[str, str]
    kept: Mapping[str, str]
    loaded: frozenset[str]
    elsewhere: frozenset[str]
    skipped: frozenset[str]
    unknown: frozenset[str]
    missing: tuple[str, ...]
    missing_elsewhere: tuple[str, ...]

    def padding(self, target: str) -> torch.Tensor:
        """Return which elements of a target are padding."""
        return self.positions[target] == PADDING


def reference_load(
    spec: Spec,
    *,
    config: Config,
    runtime: str,
    layout: Layout,
    rank: int,
    tensors: Mapping[str, torch.Tensor],
    options: Mapping[str, object] | None = None,
) -> ReferenceResult:
    """Return what a rank holds after loading `tensors`, worked out slowly from the spec alone.

    Raises IllegalLayout where the layout cannot hold the model, WrongShape where a source does not fit its rule's dims, and
    NotImplementedError naming a key of the language that the reference does not know.
    """
    world = world_of(spec, config=config, runtime=runtime, layout=layout, rank=rank, options=options)
    rules = flat_rules(world)
    owned, reusing, others = _chosen_units(rules, world, tensors)
    units = [*owned, *reusing]

    absent = [unit for unit in units if unit.is_optional and not any(name in tensors for name in unit.sources())]
    wanted = [unit for unit in units if unit not in absent]
    lacking = {name: unit.is_here(world) for unit in wanted for name in unit.sources() if name not in tensors}
    missing = [name for name in lacking if any(name in _needed(unit, world) for unit in wanted if unit.is_here(world))]

    complete = [unit for unit in wanted if unit.is_here(world) and all(name in tensors for name in unit.sources())]
    targets, wholes, positions, loaded = _built(complete, world, tensors)
    tied = _ties(rules, world)
    for name, twin in tied.items():
        if twin in targets:
            targets[name], wholes[name], positions[name] = targets[twin], wholes[twin], positions[twin]

    known = {name for unit in owned for name in unit.sources() if name in tensors}
    unclaimed = [name for name in tensors if name not in known]
    patterns = spelled_skips(world)
    skipped = {name for name in unclaimed if name in others or any(matches(pattern, name) for pattern in patterns)}
    return ReferenceResult(
        targets=targets,
        wholes=wholes,
        positions=positions,
        tied=tied,
        kept=_kept(world),
        loaded=frozenset(loaded),
        elsewhere=frozenset(known - loaded),
        skipped=frozenset(skipped),
        unknown=frozenset(name for name in unclaimed if name not in skipped),
        missing=tuple(missing),
        missing_elsewhere=tuple(name for name in lacking if name not in missing),
    )


def _chosen_units(
    rules: list[FlatRule], world: World, tensors: Mapping[str, torch.Tensor]
) -> tuple[list[Unit], list[Unit], set[str]]:
    """Return the units that own their sources, those that reuse others', and the names that are passed over on purpose."""
    owned: list[Unit] = []
    reusing: list[Unit] = []
    others: set[str] = set()
    for flat in rules:
        units = units_of(flat, world)
        number = chosen_alternative(units, tensors)
        chosen = [unit for unit in units if unit.alternative == number]
        (reusing if flat.rule.reuse else owned).extend(chosen)
        if flat.rule.others == "skip":
            others |= {name for unit in units if unit.alternative != number for name in unit.sources()}
    return owned, reusing, others


def _needed(unit: Unit, world: World) -> set[str]:
    """Return the sources that a unit needs on this rank: those of the stacked values that the rank holds."""
    stacked = unit.flat.stacked()
    needed: set[str] = set()
    for piece in unit.pieces:
        if piece.holds_stack or not stacked or not piece.names:
            needed.update(name for names in piece.names for name in names)
            continue
        every = list(combinations(stacked, {index: world.values(index) for index in stacked}))
        held = {index: world.held(index) for index in stacked}
        for choice, names in zip(every, piece.names, strict=True):
            if all(choice[index] in held[index] for index in stacked):
                needed.update(names)
    return needed


def _built(
    units: list[Unit], world: World, tensors: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, torch.Tensor], set[str]]:
    """Return targets, wholes and positions by target name, and the names of the sources that some element comes from."""
    values, labels = Values(tensors), Labels(tensors, [])
    slabs: dict[str, list[tuple[Unit, int, Bits, Bits]]] = {}
    for unit in units:
        plan = plan_of(unit, world)
        whole_values = split_targets(whole(unit, world, values), unit, plan)
        whole_labels = split_targets(whole(unit, world, labels), unit, plan)
        for part, name in enumerate(unit.targets):
            assert unit.flat.rule.append is not None or name not in slabs, f"two rules fill {name!r}"
            slabs.setdefault(name, []).append((unit, part, whole_values[part], whole_labels[part]))

    targets: dict[str, torch.Tensor] = {}
    wholes: dict[str, torch.Tensor] = {}
    positions: dict[str, torch.Tensor] = {}
    loaded: set[str] = set()
    for name, entries in slabs.items():
        dtype = target_dtype(entries[0][0], world, values)
        axis = _append_axis(entries[-1][0], world)
        together = np.concatenate([each for _, _, each, _ in entries], axis=axis) if len(entries) > 1 else entries[0][2]
        numbers = np.arange(together.size, dtype=np.int64).reshape(together.shape)
        here: list[Bits] = []
        places: list[Bits] = []
        start = 0
        for unit, part, whole_value, whole_label in entries:
            place = numbers
            if len(entries) > 1:
                place = np.take(numbers, np.arange(start, start + whole_value.shape[axis]), axis=axis)
                start += whole_value.shape[axis]
            here.append(local(whole_value, part, unit, world, values, dtype))
            places.append(local(place, part, unit, world, labels, dtype))
            label = local(whole_label, part, unit, world, labels, dtype)
            loaded.update(each for number in np.unique(label) if number != PADDING for each in labels.names[number])
        targets[name] = tensor_of(np.concatenate(here, axis=axis) if len(here) > 1 else here[0], dtype)
        positions[name] = torch.from_numpy(np.concatenate(places, axis=axis) if len(places) > 1 else places[0])
        wholes[name] = tensor_of(together, dtype)
    return targets, wholes, positions, loaded


def _append_axis(unit: Unit, world: World) -> int:
    if unit.flat.rule.append is None:
        return 0
    plan = plan_of(unit, world)
    assert plan is not None, "append needs dims"
    return [line.dim for line in plan.lines].index(unit.flat.rule.append)


def _ties(rules: list[FlatRule], world: World) -> dict[str, str]:
    """Return the target that each tied target on this rank shares its storage with."""
    found = {}
    for flat in rules:
        if flat.tie is None:
            continue
        indices = list(dict.fromkeys(index for text in flat.targets for index in indices_in(text, world.indices())))
        for values in combinations(indices, {index: world.held(index) for index in indices}):
            if flat.applies(world, values) and flat.is_on_stage(world, values):
                scope = flat.scope(world).with_values(values)
                (target,) = (spell(text, scope) for text in flat.targets)
                found[target] = spell(flat.tie, scope)
    return found


def spelled_skips(world: World) -> dict[str, str | None]:
    """Return every skip pattern that applies, for every value of its indices, with the source of which it is a copy.

    Wildcards stay.
    """
    found: dict[str, str | None] = {}
    for skip in world.runtime.skip:
        indices = indices_in(skip.pattern.text, world.indices())
        for values in combinations(indices, {index: world.values(index) for index in indices}):
            scope = world.scope.with_values(values)
            if skip.when is None or holds(skip.when.text, scope):
                found[spell(skip.pattern.text, scope)] = None if skip.copy_of is None else spell(skip.copy_of.text, scope)
    return found


def _kept(world: World) -> dict[str, str]:
    """Return the targets that keep their value on this rank; patterns with wildcards stand for themselves."""
    found = {}
    for keep in world.runtime.keep:
        indices = indices_in(keep.pattern.text, world.indices())
        for values in combinations(indices, {index: world.held(index) for index in indices}):
            scope = world.scope.with_values(values)
            if keep.when is None or holds(keep.when.text, scope):
                found[spell(keep.pattern.text, scope)] = keep.why
    return found
