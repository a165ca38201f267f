"""The plan of one rank: the exact boxes that go from each source tensor to each parameter, proved to cover them.

It stays symbolic: a few boxes per family. Steps, one per source tensor and box, are spelled out on demand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product, repeat
from math import prod
from typing import NamedTuple

from mapper.checkpoint import TensorHeader
from mapper.diagnostics import Diagnostic, finding
from mapper.ops.dtypes import num_bytes
from mapper.pattern import IndexValue, instantiate
from mapper.plan.family import SkipRule, SourceFamily
from mapper.plan.geometry import Piece
from mapper.plan.local import LocalShape, Reading, coverage_findings, local_shape, padding_of, placed, reading_of, source_pieces
from mapper.plan.matching import Combination, MatchedFamily, Matching
from mapper.plan.share import Share
from mapper.plan.weave import Weave
from mapper.regions import Box, shape_of, volume, whole


class Step(NamedTuple):
    """Copy `source_box` of the tensor `source` to `target_box` of the parameter `target`.

    The source box is in the order of the target's axes, after `reading` (None: as it lies on disk). Where the target's box
    is k times as long along an axis, each element is repeated k times; a stacked target has one axis more, of one slot.
    `scale` is the tensor of the scales that the values are multiplied by, where the reading has a scaling. `weaves` has an
    entry for each axis of the source where one of them is woven.
    """

    source: str
    source_box: Box
    target: str
    target_box: Box
    reading: Reading | None = None
    scale: str | None = None
    weaves: tuple[Weave | None, ...] = ()

    @property
    def shape_read(self) -> tuple[int, ...]:
        """The elements of the source, along each axis, that are read for this step; all of it where an op needs the whole."""
        if self.reading is not None and self.reading.whole is not None:
            return self.reading.whole
        sizes = shape_of(self.source_box)
        if self.weaves:
            woven = zip(sizes, self.weaves, strict=True)
            sizes = tuple(size if weave is None else weave.num_read for size, weave in woven)
        packed = 1 if self.reading is None else self.reading.packed
        return sizes if packed == 1 else (*sizes, packed)

    @property
    def num_written(self) -> int:
        """How many elements of the target the step fills."""
        count = volume(self.target_box)
        for weave in self.weaves:
            if weave is not None:
                count = count // prod(weave.target_sizes) * weave.num_written
        return count


@dataclass(frozen=True, slots=True)
class PlannedTarget:
    """One parameter of this rank: local shape, safetensors dtype, the rules that fill it, and for a tied one its twin."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    rules: tuple[int, ...]
    tied_to: str | None
    is_optional: bool


@dataclass(frozen=True, slots=True)
class LocalFamily:
    """A family on one rank: the index values held here, the local shape, and per source the boxes it fills.

    `shape` is None where the headers decide it, target by target.
    """

    matched: MatchedFamily
    values: Mapping[str, tuple[IndexValue, ...]]
    shape: LocalShape | None
    pieces: tuple[tuple[Piece, ...], ...]

    @property
    def combinations(self) -> list[Combination]:
        """The targets held here, as values of the target's indices."""
        absent = self.matched.absent
        held = product(*(self.values[index] for index in self.matched.family.target.indices))
        return [each for each in held if each not in absent] if absent else list(held)


@dataclass(frozen=True, slots=True)
class Plan:
    """What one rank does with one checkpoint. `findings` is empty when the load is proved.

    Structure is what is proved: every element of every target is written once, is padding, or belongs to a kept target;
    every source is used, lives elsewhere or is skipped by a named rule. What a value means is not. `derived` names what
    finalize steps write after the load.
    """

    rank: int
    share: Share
    matching: Matching
    families: tuple[LocalFamily, ...]
    targets: Mapping[str, PlannedTarget]
    keeps: tuple[SkipRule, ...]
    tensors: Mapping[str, TensorHeader]
    findings: tuple[Diagnostic, ...]
    derived: tuple[SkipRule, ...] = ()

    def steps(self) -> Iterator[Step]:
        """Yield every copy of this rank, family by family; tied targets last."""
        for local in self.families:
            yield from iter_steps(local)
        for target in self.targets.values():
            if target.tied_to is not None:
                yield from self.steps_to(target.name)

    def steps_to(self, name: str) -> list[Step]:
        """Return the copies that fill one target."""
        target = self.targets[name]
        if target.tied_to is not None:
            return [step._replace(target=name) for step in self.steps_to(target.tied_to)]
        locals_ = (local for local in self.families if local.matched.family.rule.number in target.rules)
        return [step for local in locals_ for step in iter_steps(local) if step.target == name]

    def padding(self) -> Iterator[tuple[str, Box, float]]:
        """Yield every (target, box, value) that is declared padding."""
        for local in self.families:
            if local.shape is not None and local.shape.padding:
                boxes = list(padding_of(local.matched.family, local.shape))
                yield from ((name, box, value) for name in target_names(local) for box, value in boxes)

    @property
    def num_loaded(self) -> int:
        """How many source tensors this rank reads; one that two rules read counts once."""
        read: set[str] = set()
        for local in self.families:
            for names in source_names_read(local):
                read.update(names)
        return len(read if all(each.is_whole for each in self.matching.families) else read & self.tensors.keys())

    @property
    def num_bytes(self) -> int:
        """The bytes of the targets of this rank; twins count once, a target without any source not at all."""
        own = (target for target in self.targets.values() if target.tied_to is None and target.dtype)
        return sum(num_bytes(target.dtype, target.shape) for target in own)


def assemble(
    matching: Matching,
    share: Share,
    keeps: Sequence[SkipRule],
    tensors: Mapping[str, TensorHeader],
    *,
    derived: tuple[SkipRule, ...] = (),
) -> Plan:
    """Return the plan of one rank, with the findings of the checkpoint and of this rank's coverage."""
    findings: list[Diagnostic] = list(matching.findings)
    families = []
    for matched in matching.families:
        if matched.family.tie is None:
            local = localize(matched, share, findings)
            if local is not None:
                families.append(local)
    targets = _targets(families, findings)
    _add_ties(targets, matching, share, findings)
    return Plan(share.rank, share, matching, tuple(families), targets, tuple(keeps), tensors, tuple(findings), derived)


def iter_steps(local: LocalFamily) -> Iterator[Step]:
    """Yield the copies of one family, target by target."""
    family, without = local.matched.family, local.matched.incomplete | local.matched.absent
    sources = local.matched.sources
    readings = [reading_of(family, sources, position) for position in range(len(sources))]
    scales = [next((each for each in sources if each.scale_of == position), None) for position in range(len(sources))]
    for combination, target in zip(local.combinations, target_names(local), strict=True):
        if without and combination in without:
            continue
        fixed = dict(zip(family.target.indices, combination, strict=True))
        for source, scale, boxes, reading in zip(sources, scales, local.pieces, readings, strict=True):
            if local.shape is None:
                header = local.matched.header(combination)
                assert header is not None, f"{target!r} is held without a header"
                yield Step(_name(source, fixed), whole(header.shape), target, whole(header.shape), reading)
            elif boxes:
                scale_names = [name for name, _ in _slots_by_name(local, scale, fixed)] if scale is not None else repeat(None)
                for (name, slots), scale_name in zip(_slots_by_name(local, source, fixed), scale_names, strict=False):
                    for move in placed(family, source, local.shape, boxes, slots):
                        yield Step(name, move.source, target, move.target, reading, scale_name, move.weaves)


def source_names_read(local: LocalFamily) -> Iterator[list[str]]:
    """Yield, per source of a family, the names that this rank reads, those that an optional target lacks included."""
    for source, boxes in zip(local.matched.sources, local.pieces, strict=True):
        read = boxes if source.scale_of is None else local.pieces[source.scale_of]
        if local.shape is None or read:
            yield instantiate(source.template, [list(local.values[index]) for index in source.template.indices])


def target_names(local: LocalFamily) -> list[str]:
    """Return the names of the targets held here, in the order of `combinations`."""
    template = local.matched.family.target
    if local.matched.absent:
        return [instantiate(template, [[value] for value in each])[0] for each in local.combinations]
    return instantiate(template, [list(local.values[index]) for index in template.indices])


def _slots_by_name(
    local: LocalFamily, source: SourceFamily, fixed: Mapping[str, IndexValue]
) -> Iterator[tuple[str, dict[int, int] | None]]:
    """Yield the names that the source template has for one target, each with the slots it fills."""
    family, shape = local.matched.family, local.shape
    assert shape is not None
    if shape.slots is None:
        yield _name(source, fixed), None
        return
    assert family.stack is not None
    if source.holds_stack:
        assert shape.positions is not None
        yield _name(source, fixed), dict(enumerate(shape.positions))
        return
    choices = [list(shape.slots) if index == family.stack else [fixed[index]] for index in source.template.indices]
    yield from ((name, {slot: 0}) for slot, name in enumerate(instantiate(source.template, choices)))


def _name(source: SourceFamily, fixed: Mapping[str, IndexValue]) -> str:
    return instantiate(source.template, [[fixed[index]] for index in source.template.indices])[0]


def localize(matched: MatchedFamily, share: Share, findings: list[Diagnostic]) -> LocalFamily | None:
    """Return the family on this rank, or None where it has no target here; adds what its boxes do not cover."""
    family = matched.family
    if not share.holds(family.stage):
        return None
    values = {index: share.owned(index, domain) for index, domain in family.domains.items()}
    if any(not values[index] for index in family.target.indices):
        return None
    if not matched.headers and family.optional:
        return None
    if family.axes is None:
        return LocalFamily(matched, values, None, tuple(() for _ in matched.sources))
    shape = local_shape(family, share)
    filled = [source_pieces(family, source, share) for source in matched.sources]
    findings += coverage_findings(family, shape, filled, share.rank)
    return LocalFamily(matched, values, shape, tuple(filled))


def _targets(families: Iterable[LocalFamily], findings: list[Diagnostic]) -> dict[str, PlannedTarget]:
    """Return the targets of the families, and report one that lacks slots before those that are appended to it."""
    targets: dict[str, PlannedTarget] = {}
    for local in families:
        family = local.matched.family
        for combination, name in zip(local.combinations, target_names(local), strict=True):
            header = local.matched.header(combination)
            shape = local.shape.full if local.shape is not None else header.shape if header is not None else ()
            dtype = family.conversion.dtype if family.conversion is not None else header.dtype if header is not None else ""
            before = targets[name].rules if name in targets and family.append_axis is not None else ()
            for other in family.after:
                if other.rule.number not in before and other.target.match(name) is not None:
                    first = other.rule.text
                    findings.append(finding("M524", place=family.rule.place, subject=name, name=name, first=first))
            targets[name] = PlannedTarget(name, shape, dtype, (*before, family.rule.number), None, family.optional)
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
            targets[name] = PlannedTarget(name, tied.shape, tied.dtype, (family.rule.number,), twin, family.optional)
