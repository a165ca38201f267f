"""The plan of one rank: the exact boxes that go from each source tensor to each parameter, proved to cover them.

It stays symbolic: a few boxes per family. Steps, one per source tensor and box, are spelled out on demand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import NamedTuple

from mapper.checkpoint import TensorHeader
from mapper.diagnostics import Diagnostic, finding
from mapper.ops.dtypes import num_bytes
from mapper.pattern import IndexValue, Template, instantiate
from mapper.plan.family import SkipRule, SourceFamily
from mapper.plan.geometry import LocalAxis, Piece, local_axis, padding_boxes, pieces
from mapper.plan.matching import Combination, MatchedFamily, Matching
from mapper.plan.share import Share
from mapper.regions import Box, spell, tiling_faults, whole


class Step(NamedTuple):
    """Copy `source_box` of the tensor `source` to `target_box` of the parameter `target`; the boxes have equal sizes."""

    source: str
    source_box: Box
    target: str
    target_box: Box


@dataclass(frozen=True, slots=True)
class PlannedTarget:
    """One parameter of this rank: local shape, safetensors dtype, and for a tied one the parameter it is a twin of."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    rule: int
    tied_to: str | None
    is_optional: bool


@dataclass(frozen=True, slots=True)
class LocalFamily:
    """A family on one rank: the index values held here, the local shape, and per source the boxes it fills.

    `slots` are the values of a stacked index in slot order; boxes leave its axis out. `padding` is filled with zeros.
    """

    matched: MatchedFamily
    values: Mapping[str, tuple[IndexValue, ...]]
    slots: tuple[IndexValue, ...] | None
    shape: tuple[int, ...] | None
    pieces: tuple[tuple[Piece, ...], ...]
    padding: tuple[Box, ...]

    @property
    def combinations(self) -> list[Combination]:
        """The targets held here, as values of the target's indices."""
        absent = self.matched.absent
        held = product(*(self.values[index] for index in self.matched.family.target.indices))
        return [each for each in held if each not in absent] if absent else list(held)

    @property
    def num_sources(self) -> int:
        """How many source tensors are read on this rank."""
        return sum(
            prod(len(self.values[index]) for index in source.template.indices)
            for source, boxes in zip(self.matched.sources, self.pieces, strict=True)
            if boxes
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """What one rank does with one checkpoint. `findings` is empty when the load is proved.

    Structure is what is proved: every element of every target is written once, is padding, or belongs to a kept target;
    every source is used, lives elsewhere or is skipped by a named rule. What a value means is not.
    """

    rank: int
    share: Share
    matching: Matching
    families: tuple[LocalFamily, ...]
    targets: Mapping[str, PlannedTarget]
    keeps: tuple[SkipRule, ...]
    tensors: Mapping[str, TensorHeader]
    findings: tuple[Diagnostic, ...]

    def steps(self) -> Iterator[Step]:
        """Yield every copy of this rank, family by family."""
        for local in self.families:
            yield from iter_steps(local)
        for target in self.targets.values():
            if target.tied_to is not None:
                yield from (step._replace(target=target.name) for step in self.steps_to(target.tied_to))

    def steps_to(self, name: str) -> list[Step]:
        """Return the copies that fill one target."""
        target = self.targets[name]
        if target.tied_to is not None:
            return [step._replace(target=name) for step in self.steps_to(target.tied_to)]
        return [
            step
            for local in self.families
            if local.matched.family.rule.number == target.rule
            for step in iter_steps(local)
            if step.target == name
        ]

    def padding(self) -> Iterator[tuple[str, Box]]:
        """Yield every (target, box) that is declared padding."""
        for local in self.families:
            if local.padding:
                for name in target_names(local):
                    for box in local.padding:
                        yield name, box if local.slots is None else ((0, len(local.slots)), *box)

    @property
    def num_loaded(self) -> int:
        """How many source tensors this rank reads."""
        return len({step.source for step in self.steps()}) if self._has_shared_sources else sum(
            local.num_sources for local in self.families
        )  # fmt: skip

    @property
    def _has_shared_sources(self) -> bool:
        return any(local.matched.absent or local.matched.incomplete for local in self.families)

    @property
    def num_bytes(self) -> int:
        """The bytes of the targets of this rank; twins count once, a target without any source not at all."""
        own = (target for target in self.targets.values() if target.tied_to is None and target.dtype)
        return sum(num_bytes(target.dtype, target.shape) for target in own)


def assemble(matching: Matching, share: Share, keeps: Sequence[SkipRule], tensors: Mapping[str, TensorHeader]) -> Plan:
    """Return the plan of one rank, with the findings of the checkpoint and of this rank's coverage."""
    findings: list[Diagnostic] = list(matching.findings)
    families = []
    for matched in matching.families:
        if matched.family.tie is None:
            local = localize(matched, share, findings)
            if local is not None:
                families.append(local)
    targets = _targets(families)
    _add_ties(targets, matching, share, findings)
    return Plan(share.rank, share, matching, tuple(families), targets, tuple(keeps), tensors, tuple(findings))


def iter_steps(local: LocalFamily) -> Iterator[Step]:
    """Yield the copies of one family, target by target."""
    family, tensors_absent = local.matched.family, local.matched.incomplete | local.matched.absent
    indices = family.target.indices
    for combination, target in zip(local.combinations, target_names(local), strict=True):
        fixed = dict(zip(indices, combination, strict=True))
        for source, boxes in zip(local.matched.sources, local.pieces, strict=True):
            if not boxes or (tensors_absent and combination in tensors_absent):
                continue
            if local.slots is None:
                name = _name(source, fixed)
                if local.shape is None:
                    header = local.matched.header(combination)
                    assert header is not None, f"{target!r} is held without a header"
                    boxes = (Piece(whole(header.shape), whole(header.shape)),)
                yield from (Step(name, piece.source, target, piece.target) for piece in boxes)
                continue
            assert family.stack is not None
            for slot, name in enumerate(_stacked_names(source, fixed, family.stack, local.slots)):
                yield from (Step(name, piece.source, target, ((slot, slot + 1), *piece.target)) for piece in boxes)


def target_names(local: LocalFamily) -> list[str]:
    """Return the names of the targets held here, in the order of `combinations`."""
    return _names_at(local.matched.family.target, local.combinations)


def _names_at(template: Template, combinations: Iterable[Combination]) -> list[str]:
    return [instantiate(template, [[value] for value in each])[0] for each in combinations]


def _name(source: SourceFamily, fixed: Mapping[str, IndexValue]) -> str:
    return instantiate(source.template, [[fixed[index]] for index in source.template.indices])[0]


def _stacked_names(source: SourceFamily, fixed: Mapping[str, IndexValue], stack: str, slots: Sequence[IndexValue]) -> list[str]:
    assert source.template.indices[-1] == stack or stack in source.template.indices
    return instantiate(
        source.template, [list(slots) if index == stack else [fixed[index]] for index in source.template.indices]
    )


def localize(matched: MatchedFamily, share: Share, findings: list[Diagnostic]) -> LocalFamily | None:
    family = matched.family
    if not share.holds(family.stage):
        return None
    values = {index: share.owned(index, domain) for index, domain in family.domains.items()}
    if any(not values[index] for index in family.target.indices):
        return None
    if not matched.headers and family.optional:
        return None
    slots = share.slots(family.stack) if family.stack is not None else None
    if family.axes is None:
        return LocalFamily(matched, values, None, None, tuple((_WHOLE,) for _ in matched.sources), ())
    axes = [local_axis(axis, share.coordinate) for axis in family.axes]
    parts_axis = family.parts_axis
    boxes = tuple(pieces(axes, source.part, parts_axis) for source in matched.sources)
    padding = padding_boxes(axes)
    local = LocalFamily(matched, values, slots, _shape(axes, slots), boxes, padding)
    findings += _coverage_findings(local, axes, share.rank)
    return local


_WHOLE = Piece((), ())
"""Stands for the whole tensor where only the header knows the shape."""


def _shape(axes: Sequence[LocalAxis], slots: tuple[IndexValue, ...] | None) -> tuple[int, ...]:
    shape = tuple(axis.size for axis in axes)
    return shape if slots is None else (len(slots), *shape)


def _coverage_findings(local: LocalFamily, axes: Sequence[LocalAxis], rank: int) -> Iterator[Diagnostic]:
    """Yield what keeps the boxes of the family's sources and its padding from tiling the local shape exactly once."""
    family = local.matched.family
    place, target = family.rule.place, str(family.target)
    shape = [axis.size for axis in axes]
    boxes = [*(piece.target for source in local.pieces for piece in source), *local.padding]
    faults = tiling_faults(shape, boxes)
    faulty = [("M520", box) for box in faults.gaps]
    faulty += [("M521", box) for _, _, box in faults.overlaps]
    faulty += [("M522", boxes[position]) for position in faults.outside]
    for code, box in faulty:
        yield finding(code, place=place, subject=target, target=target, box=spell(box), rank=rank, shape=shape)
    if local.slots is not None:
        assert family.stack is not None
        known = set(family.domains[family.stack])
        for slot, value in enumerate(local.slots):
            if value not in known:
                yield finding(
                    "M523", place=place, subject=target, target=target, rank=rank, slot=slot, index=family.stack, value=value
                )


def _targets(families: Iterable[LocalFamily]) -> dict[str, PlannedTarget]:
    targets: dict[str, PlannedTarget] = {}
    for local in families:
        family = local.matched.family
        for combination, name in zip(local.combinations, target_names(local), strict=True):
            header = local.matched.header(combination)
            shape = local.shape if local.shape is not None else header.shape if header is not None else ()
            dtype = header.dtype if header is not None else ""
            targets[name] = PlannedTarget(name, shape, dtype, family.rule.number, None, family.optional)
    return targets


def _add_ties(targets: dict[str, PlannedTarget], matching: Matching, share: Share, findings: list[Diagnostic]) -> None:
    for matched in matching.families:
        family = matched.family
        if family.tie is None or not share.holds(family.stage):
            continue
        values = {index: list(share.owned(index, domain)) for index, domain in family.domains.items()}
        for combination in product(*(values[index] for index in family.target.indices)):
            fixed = dict(zip(family.target.indices, combination, strict=True))
            name, twin = family.target.name(fixed), family.tie.name(fixed)
            tied = targets.get(twin)
            if tied is None:
                findings.append(finding("M508", place=family.rule.place, subject=name, name=name, twin=twin, rank=share.rank))
                continue
            targets[name] = PlannedTarget(name, tied.shape, tied.dtype, family.rule.number, twin, family.optional)
