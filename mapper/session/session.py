"""An update session over a whole model: any order, any split into calls, one judgement at `finish`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from types import TracebackType

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
from mapper.plan.matching import match
from mapper.plan.plan import Step, assemble
from mapper.plan.share import Share
from mapper.regions import volume, whole
from mapper.report.load import LoadReport
from mapper.transfer.bind import Model, bind, declare, model_tensors
from mapper.transfer.compute import cast_fault
from mapper.transfer.copy import copy_box, copy_twins, fill_padding, read_as, values_of, view_of


@dataclass(frozen=True, slots=True)
class _Intake:
    """What one source of a family is on this rank: how it is read, the local shape of its targets, the boxes it fills.

    `shape` is None where the tensor itself decides.
    """

    reading: Reading | None
    shape: LocalShape | None
    pieces: tuple[Piece, ...]


class UpdateSession:
    """Takes tensors one by one and writes each straight to its slices; use it in a `with` block.

    A name that no rule claims, a wrong shape or dtype, or a name fed twice raises before any write of that tensor.
    Where a rule has several spellings, the first one listed wins, in whatever order they arrive. A block that is left
    without an error is judged as `finish` judges it.
    """

    def __init__(self, program: Program, model: Model) -> None:
        self._program = program
        self._model = model
        self._tensors = model_tensors(model)
        self._declared = declare(self._tensors)
        self._owners: dict[str, str] = {}
        self._fed: dict[str, TensorHeader] = {}
        self._elsewhere: set[str] = set()
        self._owned_elsewhere: set[str] = set()
        self._chosen: dict[int, int] = {}
        self._halves: dict[tuple[object, ...], torch.Tensor] = {}
        self._intakes: dict[tuple[int, int, int], _Intake] = {}
        self._targets: dict[tuple[int, tuple[IndexValue | None, ...]], list[str]] = {}
        self._appending = [each for each in program.families if each.append_axis is not None]
        self._shapes: dict[tuple[int, str], list[tuple[int, ...]]] = {}
        self._bytes = 0
        self._start = time.perf_counter()
        self._is_open = True
        self._account: LoadReport | None = None

    def __enter__(self) -> UpdateSession:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None and self._is_open:
                self.finish()
        finally:
            self._is_open = False

    def feed(self, name: str, tensor: torch.Tensor) -> None:
        """Write one source tensor to every slice of this rank that it fills; raises MapperError before any write of it."""
        self._require_open()
        if name in self._fed or name in self._elsewhere:
            raise MapperError([finding("M610", subject=name, name=name)])
        resolution = self._program.resolve(name)
        superseded = self._require_known(resolution)
        if resolution.outcome == "elsewhere":
            self._elsewhere.add(name)
            return
        header = _header(name, tensor)
        if not superseded:
            claims = resolution.claims
            if len(claims) > 1:
                claims = tuple(claim for claim in claims if is_here(claim, self._program.share))
                if all(claim.family.reuses for claim in claims) and not all(each.family.reuses for each in resolution.claims):
                    self._owned_elsewhere.add(name)
            findings = [fault for claim in claims for fault in self._faults(claim, name, header, tensor)]
            if findings:
                raise MapperError(findings)
            with torch.no_grad():
                for claim in claims:
                    self._write(claim, tensor)
        self._fed[name] = header

    def feed_all(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Write every tensor of a stream."""
        for name, tensor in tensors:
            self.feed(name, tensor)

    def finish(self) -> LoadReport:
        """Return the account of the session; raises MapperError naming every source that this rank still lacks.

        After a success it returns the same account again; after such an error the session goes on taking tensors.
        """
        if self._account is not None:
            return self._account
        self._require_open()
        start = time.perf_counter()
        share = self._program.share
        families = [local for each in self._program.families if (local := _on_rank(each, share)) is not None]
        matching = match(families, self._program.skips, self._fed, chosen=self._chosen, owned=self._owned_elsewhere)
        plan = assemble(matching, share, self._program.keeps, self._fed)
        if plan.findings:
            raise MapperError(plan.findings)
        binding = bind(self._program, plan, self._model)
        with torch.no_grad():
            padded = fill_padding(binding.tensors, plan.padding())
            twinned = copy_twins(binding.tensors, binding.copied_twins)
        self._is_open = False
        seconds = time.perf_counter() - start
        self._account = LoadReport(
            rank=plan.rank,
            layout=str(self._program.layout),
            sources=len(self._fed) + len(self._elsewhere),
            loaded=plan.num_loaded,
            elsewhere=len(self._elsewhere) + matching.num_claimed - plan.num_loaded,
            skipped_by=matching.skipped_by,
            targets=len(plan.targets),
            tied=sum(target.tied_to is not None for target in plan.targets.values()),
            kept=binding.kept,
            bytes_read=self._bytes,
            bytes_written=self._bytes + twinned,
            bytes_padded=padded,
            plan_seconds=seconds,
            seconds=time.perf_counter() - self._start - seconds,
        )
        return self._account

    def _require_open(self) -> None:
        if not self._is_open:
            raise MapperError([finding("M612")])

    def _require_known(self, resolution: Resolution) -> bool:
        """Return whether a preferred spelling of the tensor was fed before; raises M502 where that makes it unknown.

        A spelling counts for the whole rule, on whichever rank its tensor lives, as it does in a load from files.
        """
        if resolution.outcome == "unknown":
            raise MapperError([finding("M502", subject=resolution.name, name=resolution.name)])
        superseded = [claim for claim in resolution.claims if claim.alternative > self._best(claim)]
        if any(not claim.family.skips_others for claim in superseded):
            raise MapperError([finding("M502", subject=resolution.name, name=resolution.name)])
        if resolution.outcome == "elsewhere":
            self._chosen.update((claim.family.rule.number, self._best(claim)) for claim in resolution.claims)
        return bool(superseded)

    def _best(self, claim: Claim) -> int:
        return min(self._chosen.get(claim.family.rule.number, claim.alternative), claim.alternative)

    def _faults(self, claim: Claim, name: str, header: TensorHeader, tensor: torch.Tensor) -> list[Diagnostic]:
        """Return what is wrong with the tensor or its targets; nothing has been written yet."""
        family, source, intake = claim.family, claim.source, self._intake(claim)
        findings: list[Diagnostic] = []
        if (
            family.refusal
            or (source.disk is not None and header.shape != source.disk.shape)
            or (source.dtypes and header.dtype not in source.dtypes)
            or (family.values and header.dtype not in COMPUTED_DTYPES)
        ):
            one = replace(source, domains={index: (value,) for index, value in claim.bindings.items()})
            narrowed = replace(family, domains={**family.domains, **one.domains}, alternatives=((one,),))
            findings += [each for each in match([narrowed], (), {name: header}).findings if each.subject == name]
        conversion = family.conversion
        if not findings and conversion is not None and conversion.by == "cast" and is_narrower(conversion.dtype, header.dtype):
            findings += self._range_faults(claim, name, tensor)
        for target in self._target_names(claim):
            findings += self._target_faults(family, target, header, intake)
        return findings

    def _range_faults(self, claim: Claim, name: str, tensor: torch.Tensor) -> list[Diagnostic]:
        """Return M613 where a number among what is taken of the tensor does not fit the target's dtype."""
        intake = self._intake(claim)
        read = read_as(tensor, intake.reading)
        dtypes = [self._tensors[each].dtype for each in self._target_names(claim) if each in self._tensors]
        moves = _moves(claim, intake, tuple(tensor.shape))
        faults = (cast_fault(name, view_of(read, move.source), dtype) for move in moves for dtype in dtypes[:1])
        return [fault for fault in faults if fault is not None][:1]

    def _target_faults(self, family: Family, name: str, header: TensorHeader, intake: _Intake) -> list[Diagnostic]:
        model, place = self._declared.get(name), family.rule.place
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
        if self._tensors[name].is_meta:
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

    def _write(self, claim: Claim, tensor: torch.Tensor) -> None:
        self._chosen[claim.family.rule.number] = self._best(claim)
        sources = claim.family.alternatives[claim.alternative]
        position = claim.position if claim.source.scale_of is None else claim.source.scale_of
        if not any(each.scale_of == position for each in sources):
            self._copy(claim, tensor, None)
            return
        key = (claim.family.number, claim.alternative, position, tuple(sorted(claim.bindings.items())))
        other = self._halves.pop(key, None)
        if other is None:
            self._halves[key] = tensor.clone()  # the sender may use its buffer again before the other half comes
            return
        values, scales = (tensor, other) if claim.source.scale_of is None else (other, tensor)
        self._copy(replace(claim, position=position), values, scales)

    def _copy(self, claim: Claim, tensor: torch.Tensor, scales: torch.Tensor | None) -> None:
        """Write every slice of this rank that the claimed source fills, times its scales where it has any."""
        intake = self._intake(claim)
        moves = list(_moves(claim, intake, tuple(tensor.shape)))
        read = read_as(tensor, intake.reading)
        for name in self._target_names(claim):
            target = self._tensors[name]
            for move in moves:
                self._bytes += _num_read(move, intake.reading) * read.element_size()
                copy_box(target, move.target, values_of(read, move.source, intake.reading, scales), intake.reading, move.weaves)

    def _intake(self, claim: Claim) -> _Intake:
        key = (claim.family.number, claim.alternative, claim.position)
        known = self._intakes.get(key)
        if known is None:
            known = self._intakes[key] = _intake_of(claim, self._program.share)
        return known

    def _target_names(self, claim: Claim) -> list[str]:
        """Return the targets that the claimed source feeds here; an index it does not have runs over all values held."""
        family, bindings = claim.family, claim.bindings
        key = (family.number, tuple([bindings.get(index) for index in family.target.indices]))
        known = self._targets.get(key)
        if known is None:
            owned = self._program.share.owned
            known = self._targets[key] = family.target.names(
                {
                    index: [bindings[index]] if index in bindings else owned(index, family.domains[index])
                    for index in family.target.indices
                }
            )
        return known


def _intake_of(claim: Claim, share: Share) -> _Intake:
    family, source = claim.family, claim.source
    reading = reading_of(family, family.alternatives[claim.alternative], claim.position)
    if family.axes is None:
        return _Intake(reading, None, ())
    return _Intake(reading, local_shape(family, share), source_pieces(family, source, share))


def _moves(claim: Claim, intake: _Intake, shape: tuple[int, ...]) -> Iterator[Move]:
    """Yield everything that the claimed source gives to one of its targets."""
    if intake.shape is None:
        yield Move(whole(shape), whole(shape))
        return
    slots: dict[int, int] | None = None
    if intake.shape.slots is not None:
        assert intake.shape.positions is not None
        value = claim.bindings.get(str(claim.family.stack))
        filled = enumerate(zip(intake.shape.slots, intake.shape.positions, strict=True))
        slots = {slot: position for slot, (each, position) in filled if value is None or each == value}
    yield from placed(claim.family, claim.source, intake.shape, intake.pieces, slots)


def _num_read(move: Move, reading: Reading | None) -> int:
    if not move.weaves and (reading is None or reading.whole is None):
        return volume(move.source)
    return prod(Step("", move.source, "", move.target, reading, None, move.weaves).shape_read)


def _header(name: str, tensor: torch.Tensor) -> TensorHeader:
    dtype = _stored_dtype(tensor.dtype)
    if dtype is None:
        raise MapperError([finding("M611", subject=name, name=name, dtype=str(tensor.dtype))])
    return TensorHeader(dtype, tuple(tensor.shape), -1, 0, 0)


@cache
def _stored_dtype(dtype: torch.dtype) -> str | None:
    return safetensors_name(str(dtype))


def _on_rank(family: Family, share: Share) -> Family | None:
    """Return the family cut down to what this rank reads, or None where that is nothing."""
    if not share.holds(family.stage):
        return None
    domains = {index: share.owned(index, values) for index, values in family.domains.items()}
    if not all(domains[index] for index in family.target.indices):
        return None
    return replace(
        family,
        domains=domains,
        alternatives=tuple(
            tuple(replace(source, domains={index: domains[index] for index in source.domains}) for source in alternative)
            for alternative in family.alternatives
        ),
    )
