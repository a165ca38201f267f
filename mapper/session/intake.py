"""How each source of a program is taken in on one model: checked, and turned into views to copy to, once for all sessions."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import NamedTuple

import torch

from mapper.checkpoint import TensorHeader
from mapper.compiler import Program
from mapper.compiler.resolve import Claim, Resolution, is_here
from mapper.diagnostics import Diagnostic, MapperError, finding
from mapper.ops.dtypes import COMPUTED_DTYPES, is_narrower, safetensors_name, torch_name
from mapper.pattern import IndexValue
from mapper.plan.family import Family
from mapper.plan.geometry import Piece
from mapper.plan.local import LocalShape, Move, Reading, local_shape, placed, reading_of, source_pieces
from mapper.plan.matching import fits_bitcast, match
from mapper.plan.plan import Step
from mapper.plan.targets import DeclaredTarget
from mapper.regions import Box, shape_of, volume, whole
from mapper.transfer.bind import Model, declare, model_tensors
from mapper.transfer.compute import cast_fault
from mapper.transfer.copy import aligned, copy_box, read_as, values_of, view_of

HalfKey = tuple[object, ...]

NOT_HERE = TensorHeader("", (), -1, 0, 0)
"""The header of what another rank reads: it is not looked at."""


class Write(NamedTuple):
    """One box of one source into one box of one target.

    `view` is what a plain copy writes to, after `narrows` (dim, start, length) and `axes` have been applied to the source; it
    is None where the values are computed, or lie between others.
    """

    target: str
    move: Move
    view: torch.Tensor | None
    narrows: tuple[tuple[int, int, int], ...]
    axes: tuple[int, ...]


class Part(NamedTuple):
    """What one rule does with a source, in one of the rule's spellings: how it is read and what it writes.

    `half` is the pair that it is one half of, where two tensors are needed; the reading is then that of the values.
    `is_narrowing` says that numbers are cast to a dtype that holds fewer.
    """

    rule: int
    alternative: int
    reading: Reading | None
    writes: tuple[Write, ...]
    half: HalfKey | None
    is_scale: bool
    is_narrowing: bool


@dataclass(frozen=True, slots=True)
class Route:
    """Everything that a tensor of one name, dtype and shape does here.

    `is_owned_elsewhere` marks the source of a second reader whose first one is on another rank, `has_choice` a name that
    other spellings may replace.
    """

    header: TensorHeader
    dtype: torch.dtype
    shape: torch.Size
    outcome: str
    parts: tuple[Part, ...]
    targets: tuple[str, ...]
    num_bytes: int
    is_owned_elsewhere: bool
    has_choice: bool
    is_narrowing: bool

    def within(self, targets: Set[str]) -> Route:
        """Return the route to these targets alone."""
        parts = tuple(
            part._replace(writes=tuple(each for each in part.writes if each.target in targets)) for part in self.parts
        )
        return replace(self, parts=parts, targets=tuple(each for each in self.targets if each in targets))


@dataclass(frozen=True, slots=True)
class _Intake:
    """What one source of a family is on this rank: how it is read, the local shape of its targets, the boxes it fills.

    `shape` is None where the tensor itself decides. `slots` are the slots of each value of a stacked index.
    """

    reading: Reading | None
    shape: LocalShape | None
    pieces: tuple[Piece, ...]
    slots: Mapping[IndexValue | None, dict[int, int]] | None


class Intakes:
    """The routes of a program's sources into one model, found as they come and kept for the next session.

    Not safe for several threads: a session asks under its lock. A route holds views of the parameters, so that it lasts as
    long as their memory does; `refresh` forgets all routes where the model's tensors are others than before.
    """

    def __init__(self, program: Program, model: Model) -> None:
        self._program = program
        self._model = model
        self._appending = [each for each in program.families if each.append_axis is not None]
        self._intakes: dict[tuple[int, int, int], _Intake] = {}
        self._names: dict[tuple[int, tuple[IndexValue | None, ...]], tuple[str, ...]] = {}
        self._headers: dict[tuple[torch.dtype, torch.Size], TensorHeader] = {}
        self._pointers: dict[str, tuple[torch.Tensor, int]] = {}
        self.declared: Mapping[str, DeclaredTarget] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self._forget()
        self.refresh()

    def _forget(self) -> None:
        self.routes: dict[str, Route] = {}
        self._owners: dict[str, str] = {}
        self._fitting: set[tuple[int, str, tuple[int, ...] | None, str]] = set()
        self._shapes: dict[tuple[int, str], list[tuple[int, ...]]] = {}

    def refresh(self) -> bool:
        """Look at the model again, and return whether its tensors are those of before, or more of them."""
        tensors = model_tensors(self._model)
        pointers = {name: (tensor, 0 if tensor.is_meta else tensor.data_ptr()) for name, tensor in tensors.items()}
        is_same = all(
            name in pointers and pointers[name][0] is tensor and pointers[name][1] == pointer
            for name, (tensor, pointer) in self._pointers.items()
        )
        if is_same and len(pointers) == len(self._pointers):
            return True
        if not is_same:
            self._forget()
        self._pointers = pointers
        self.declared = declare(tensors)
        self.tensors = {name: tensor.detach() for name, tensor in tensors.items()}
        return is_same

    def resolve(self, name: str) -> Resolution:
        """Return what happens to the name on this rank."""
        return self._program.resolve(name)

    def route(self, resolution: Resolution, tensor: torch.Tensor, *, is_checked: bool = True) -> Route:
        """Return what the tensor does here; raises MapperError with everything wrong with it or its targets.

        Without `is_checked` the tensor is not used: another spelling of it was taken.
        """
        name = resolution.name
        header = self._header(name, tensor) if resolution.outcome != "elsewhere" else NOT_HERE
        claims = resolution.claims if resolution.outcome == "loaded" and is_checked else ()
        is_owned_elsewhere = False
        if len(claims) > 1:
            claims = tuple(claim for claim in claims if is_here(claim, self._program.share))
            is_owned_elsewhere = all(claim.family.reuses for claim in claims) and not all(
                each.family.reuses for each in resolution.claims
            )
        findings = [fault for claim in claims for fault in self._faults(claim, name, header)]
        if findings:
            raise MapperError(findings)
        parts = tuple([self._part(claim, tensor, header.dtype) for claim in claims])
        taken = [_num_read(write.move, part.reading) for part in parts if not part.is_scale for write in part.writes]
        targets = self.target_names(claims[0]) if len(claims) == 1 else ()
        if len(claims) > 1:
            targets = tuple(dict.fromkeys(target for claim in claims for target in self.target_names(claim)))
        found = Route(
            header,
            tensor.dtype,
            tensor.shape,
            resolution.outcome,
            parts,
            targets,
            sum(taken) * tensor.element_size(),
            is_owned_elsewhere,
            any(len(claim.family.alternatives) > 1 for claim in resolution.claims),
            any(part.is_narrowing for part in parts),
        )
        if is_checked:
            self.routes[name] = found
        return found

    def _header(self, name: str, tensor: torch.Tensor) -> TensorHeader:
        key = (tensor.dtype, tensor.shape)
        known = self._headers.get(key)
        if known is None:
            known = self._headers[key] = header_of(name, tensor)
        return known

    def faults(self, name: str, header: TensorHeader) -> list[Diagnostic]:
        """Return what is wrong with a tensor of this header, or with its targets here."""
        claims = [claim for claim in self.resolve(name).claims if is_here(claim, self._program.share)]
        return [fault for claim in claims for fault in self._faults(claim, name, header)]

    def target_names(self, claim: Claim) -> tuple[str, ...]:
        """Return the targets that the claimed source feeds here; an index it does not have runs over all values held."""
        family, bindings = claim.family, claim.bindings
        key = (family.number, tuple([bindings.get(index) for index in family.target.indices]))
        known = self._names.get(key)
        if known is None:
            owned = self._program.share.owned
            known = self._names[key] = tuple(
                family.target.names(
                    {
                        index: [bindings[index]] if index in bindings else owned(index, family.domains[index])
                        for index in family.target.indices
                    }
                )
            )
        return known

    def regions(self, name: str) -> list[tuple[str, Box]]:
        """Return the boxes of targets that the source `name` fills here."""
        found: list[tuple[str, Box]] = []
        for claim in self.resolve(name).claims:
            if is_here(claim, self._program.share):
                values = claim if claim.source.scale_of is None else replace(claim, position=claim.source.scale_of)
                intake = self._intake(values)
                for target in self.target_names(claim):
                    if intake.shape is not None:
                        found += [(target, move.spans[1]) for move in self._moves(values, intake, ())]
                    elif target in self.declared:
                        found.append((target, whole(self.declared[target].shape)))
        return found

    def _part(self, claim: Claim, tensor: torch.Tensor, stored: str) -> Part:
        """Return what the claim does with the tensor, whose dtype is `stored` on disk, after `_faults` found nothing."""
        family, source = claim.family, claim.source
        sources = family.alternatives[claim.alternative]
        position = claim.position if source.scale_of is None else source.scale_of
        number, alternative = family.rule.number, claim.alternative
        if position == claim.position and not any(each.scale_of == position for each in sources):
            intake = self._intake(claim)
            writes = self._writes(claim, intake, tuple(tensor.shape))
            if intake.reading is None or not (intake.reading.values or intake.reading.packed > 1):
                shape = _shape_read(tensor, intake.reading)
                writes = [write if write.move.weaves else self._plain(write, shape) for write in writes]
            conversion = family.conversion
            is_narrowing = conversion is not None and conversion.by == "cast" and is_narrower(conversion.dtype, stored)
            return Part(number, alternative, intake.reading, tuple(writes), None, False, is_narrowing)
        key = (family.number, alternative, position, tuple(sorted(claim.bindings.items())))
        values = replace(claim, position=position)
        intake = self._intake(values)
        writes = self._writes(values, intake, ())
        return Part(number, alternative, intake.reading, tuple(writes), key, position != claim.position, False)

    def _writes(self, claim: Claim, intake: _Intake, shape: tuple[int, ...]) -> list[Write]:
        moves = self._moves(claim, intake, shape)
        return [Write(name, move, None, (), ()) for name in self.target_names(claim) for move in moves]

    def _plain(self, write: Write, shape: tuple[int, ...]) -> Write:
        """Return the write with the view that it fills; `shape` is that of the source as it is read."""
        move = write.move
        sizes = shape_of(move.source)
        view = view_of(self.tensors[write.target], move.target)
        if view.dim() == len(sizes) + 1:
            view = view.squeeze(0)
        view, axes = aligned(view, sizes)
        narrows: tuple[tuple[int, int, int], ...] = ()
        if sizes != shape:
            narrows = tuple(
                (dim, start, stop - start) for dim, (start, stop) in enumerate(move.source) if stop - start != shape[dim]
            )
        return Write(write.target, move, view, narrows, axes)

    def _moves(self, claim: Claim, intake: _Intake, shape: tuple[int, ...]) -> list[Move]:
        """Return everything that the claimed source gives to one of its targets."""
        if intake.shape is None:
            return [Move(whole(shape), whole(shape))]
        slots = None
        if intake.slots is not None:
            slots = intake.slots.get(claim.bindings.get(str(claim.family.stack)), {})
        return list(placed(claim.family, claim.source, intake.shape, intake.pieces, slots))

    def _intake(self, claim: Claim) -> _Intake:
        key = (claim.family.number, claim.alternative, claim.position)
        known = self._intakes.get(key)
        if known is None:
            known = self._intakes[key] = self._intake_of(claim)
        return known

    def _intake_of(self, claim: Claim) -> _Intake:
        family, source, share = claim.family, claim.source, self._program.share
        reading = reading_of(family, family.alternatives[claim.alternative], claim.position)
        if family.axes is None:
            return _Intake(reading, None, (), None)
        shape = local_shape(family, share)
        slots: dict[IndexValue | None, dict[int, int]] | None = None
        if shape.slots is not None:
            assert shape.positions is not None
            slots = {None: dict(enumerate(shape.positions))}
            for slot, (value, position) in enumerate(zip(shape.slots, shape.positions, strict=True)):
                slots.setdefault(value, {})[slot] = position
        return _Intake(reading, shape, source_pieces(family, source, share), slots)

    def _faults(self, claim: Claim, name: str, header: TensorHeader) -> list[Diagnostic]:
        """Return what is wrong with the tensor or its targets; nothing has been written yet."""
        family, source, intake = claim.family, claim.source, self._intake(claim)
        findings: list[Diagnostic] = []
        if (
            family.refusal
            or (source.disk is not None and not source.disk.accepts(header.shape))
            or (source.dtypes and header.dtype not in source.dtypes)
            or not fits_bitcast(family, source, header.dtype)
            or (family.values and header.dtype not in COMPUTED_DTYPES)
        ):
            one = replace(source, domains={index: (value,) for index, value in claim.bindings.items()})
            narrowed = replace(family, domains={**family.domains, **one.domains}, alternatives=((one,),))
            findings += [each for each in match([narrowed], (), {name: header}).findings if each.subject == name]
        shape = header.shape if intake.shape is None else None
        for target in self.target_names(claim):
            key = (family.number, target, shape, header.dtype)
            if key not in self._fitting:
                faults = self._target_faults(family, target, header, intake)
                findings += faults
                if not faults:
                    self._fitting.add(key)
        return findings

    def _target_faults(self, family: Family, name: str, header: TensorHeader, intake: _Intake) -> list[Diagnostic]:
        model, place = self.declared.get(name), family.rule.place
        if model is None:
            return [finding("M531", place=place, subject=name, rule=family.rule.text, name=name)]
        findings = []
        shapes = self._local_shapes(family, name, intake.shape) if intake.shape is not None else [header.shape]
        dtype = torch_name(family.conversion.dtype if family.conversion is not None else header.dtype)
        if model.shape not in shapes:
            found, expected = list(model.shape), list(shapes[-1])
            findings.append(finding("M532", place=place, subject=name, name=name, found=found, expected=expected))
        if model.dtype != dtype:
            findings.append(finding("M533", place=place, subject=name, name=name, found=model.dtype, expected=dtype))
        if self.tensors[name].is_meta:
            findings.append(finding("M602", subject=name, name=name))
        other = self._owners.setdefault(model.storage, name)
        if other != name:
            findings.append(finding("M601", subject=name, name=name, other=other))
        return findings

    def _local_shapes(self, family: Family, name: str, own: LocalShape) -> list[tuple[int, ...]]:
        """Return the shapes that the target may have here: later rules append to it, and `finish` knows which optional ones."""
        known = self._shapes.get((family.number, name))
        if known is None:
            share = self._program.share
            known = [own.full]
            for each in self._appending:
                follows = any(before.rule.number == family.rule.number for before in each.after)
                if follows and share.holds(each.stage) and each.target.match(name) is not None:
                    full = local_shape(each, share).full
                    known = [*known, full] if each.optional else [full]
            self._shapes[family.number, name] = known
        return known


def copy_part(
    part: Part, tensor: torch.Tensor, scales: torch.Tensor | None, targets: Mapping[str, torch.Tensor], *, is_direct: bool
) -> None:
    """Write everything that the part takes of the tensor, times its scales where it has any, to `targets`.

    `is_direct` says that these are the parameters, whose views the part has.
    """
    read = read_as(tensor, part.reading)
    for write in part.writes:
        if is_direct and write.view is not None:
            view = read
            for dim, start, length in write.narrows:
                view = view.narrow(dim, start, length)
            for axis in write.axes:
                view = view.unsqueeze(axis)
            write.view.copy_(view)
        else:
            move = write.move
            values = values_of(read, move.source, part.reading, scales)
            copy_box(targets[write.target], move.target, values, part.reading, move.weaves)


def range_faults(route: Route, name: str, tensor: torch.Tensor, targets: Mapping[str, torch.Tensor]) -> list[Diagnostic]:
    """Return M613 where a number among what is taken of the tensor does not fit its target's dtype."""
    for part in route.parts:
        if part.is_narrowing:
            read = read_as(tensor, part.reading)
            for write in part.writes:
                fault = cast_fault(name, view_of(read, write.move.source), targets[write.target].dtype)
                if fault is not None:
                    return [fault]
    return []


def _num_read(move: Move, reading: Reading | None) -> int:
    if not move.weaves and (reading is None or (reading.whole is None and reading.packed == 1)):
        return volume(move.source)
    return prod(Step("", move.source, "", move.target, reading, None, move.weaves).shape_read)


def _shape_read(tensor: torch.Tensor, reading: Reading | None) -> tuple[int, ...]:
    return tuple(tensor.shape) if reading is None or reading.disk is None else reading.disk.seen


def header_of(name: str, tensor: torch.Tensor) -> TensorHeader:
    """Return the header that a file would have for the tensor; raises MapperError M611 where no file could hold it."""
    dtype = _stored_dtype(tensor.dtype)
    if dtype is None:
        raise MapperError([finding("M611", subject=name, name=name, dtype=str(tensor.dtype))])
    return TensorHeader(dtype, tuple(tensor.shape), -1, 0, 0)


@cache
def _stored_dtype(dtype: torch.dtype) -> str | None:
    return safetensors_name(str(dtype))
