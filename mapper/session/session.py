"""An update session over a whole model: any order, any split into calls, one judgement at `finish`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import TracebackType

import torch

from mapper.checkpoint import TensorHeader
from mapper.compile import Program
from mapper.compile.resolve import Claim, is_here
from mapper.diagnostics import Diagnostic, MapperError, finding
from mapper.ops.dtypes import safetensors_name
from mapper.plan.family import Family
from mapper.plan.geometry import Piece, local_axis, pieces
from mapper.plan.matching import Matching, match
from mapper.plan.plan import Plan, assemble
from mapper.plan.share import Share
from mapper.regions import Box, whole
from mapper.report.load import LoadReport
from mapper.transfer.bind import Model, bind, model_tensors
from mapper.transfer.copy import copy_box, fill_padding, view_of


class UpdateSession:
    """Takes tensors one by one and writes each straight to its slices; use it in a `with` block.

    A name that no rule claims, a wrong shape or dtype, or a name fed twice raises before any write of that tensor.
    Where a rule has several spellings, the first one listed wins, in whatever order they arrive.
    """

    def __init__(self, program: Program, model: Model) -> None:
        self._program = program
        self._model = model
        self._tensors = model_tensors(model)
        self._fed: dict[str, TensorHeader] = {}
        self._elsewhere: set[str] = set()
        self._superseded: dict[str, int] = {}
        self._alternatives: dict[int, int] = {}
        self._pieces: dict[tuple[int, int, int], tuple[Piece, ...]] = {}
        self._bytes = 0
        self._start = time.perf_counter()
        self._is_open = True

    def __enter__(self) -> UpdateSession:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._is_open = False

    def feed(self, name: str, tensor: torch.Tensor) -> None:
        """Write one source tensor to every slice of this rank that it fills; raises MapperError before any write of it."""
        assert self._is_open, "the session is closed"
        if name in self._fed or name in self._elsewhere or name in self._superseded:
            raise MapperError([finding("M610", subject=name, name=name)])
        resolution = self._program.resolve(name)
        if resolution.outcome == "unknown":
            raise MapperError([finding("M502", subject=name, name=name)])
        header = _header(name, tensor)
        if resolution.outcome == "elsewhere":
            self._elsewhere.add(name)
            return
        claims = [claim for claim in resolution.claims if is_here(claim, self._program.share)]
        findings = [fault for claim in claims for fault in self._faults(claim, name, header)]
        if findings:
            raise MapperError(findings)
        for claim in claims:
            self._write(claim, name, tensor)
        self._fed[name] = header

    def feed_all(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Write every tensor of a stream."""
        for name, tensor in tensors:
            self.feed(name, tensor)

    def finish(self) -> LoadReport:
        """Return the account of the session; raises MapperError naming every source that this rank still lacks."""
        start = time.perf_counter()
        share = self._program.share
        families = [local for each in self._program.families if (local := _on_rank(each, share)) is not None]
        matching = match(families, self._program.skips, {**self._fed, **dict.fromkeys(self._superseded, _NOTHING)})
        plan = assemble(matching, share, self._program.keeps, self._fed)
        if plan.findings:
            raise MapperError(plan.findings)
        binding = bind(plan, self._model)
        with torch.no_grad():
            self._bytes += self._copy_twins(plan, binding.copied_twins)
            padded = fill_padding(binding.tensors, plan.padding())
        self._is_open = False
        return self._report(plan, matching, binding.kept, padded, time.perf_counter() - start)

    def _faults(self, claim: Claim, name: str, header: TensorHeader) -> list[Diagnostic]:
        family, source = claim.family, claim.source
        one = replace(source, domains={index: (value,) for index, value in claim.bindings.items()})
        narrowed = replace(family, domains={**family.domains, **one.domains}, alternatives=((one,),))
        return [each for each in match([narrowed], (), {name: header}).findings if each.subject == name] + self._target_faults(
            claim, header
        )

    def _target_faults(self, claim: Claim, header: TensorHeader) -> list[Diagnostic]:
        findings = []
        for target, _, _ in self._boxes(claim, header.shape):
            tensor = self._tensors.get(target)
            if tensor is None:
                findings.append(
                    finding("M531", place=claim.family.rule.place, subject=target, rule=claim.family.rule.text, name=target)
                )
            elif safetensors_name(str(tensor.dtype).removeprefix("torch.")) != header.dtype:
                found = str(tensor.dtype).removeprefix("torch.")
                findings.append(
                    finding(
                        "M533", place=claim.family.rule.place, subject=target, name=target, found=found, expected=header.dtype
                    )
                )
        return findings

    def _write(self, claim: Claim, name: str, tensor: torch.Tensor) -> None:
        rule, alternative = claim.family.rule.number, claim.alternative
        best = min(self._alternatives.setdefault(rule, alternative), alternative)
        self._alternatives[rule] = best
        if alternative > best:
            if not claim.family.skips_others:
                raise MapperError([finding("M502", subject=name, name=name)])
            self._superseded[name] = alternative
            return
        with torch.no_grad():
            for target, source_box, target_box in self._boxes(claim, tuple(tensor.shape)):
                view = view_of(tensor, source_box)
                copy_box(self._tensors[target], target_box, view)
                self._bytes += view.numel() * view.element_size()

    def _boxes(self, claim: Claim, shape: tuple[int, ...]) -> list[tuple[str, Box, Box]]:
        """Return (target, source box, target box) of everything that the claimed source fills on this rank."""
        family, share = claim.family, self._program.share
        local = self._local_pieces(claim)
        targets = _target_names(family, claim, share)
        if family.axes is None:
            return [(target, whole(shape), whole(shape)) for target in targets]
        if family.stack is None:
            return [(target, piece.source, piece.target) for target in targets for piece in local]
        slot = share.slots(family.stack).index(claim.bindings[family.stack])
        return [(target, piece.source, ((slot, slot + 1), *piece.target)) for target in targets for piece in local]

    def _local_pieces(self, claim: Claim) -> tuple[Piece, ...]:
        key = (claim.family.number, claim.alternative, claim.position)
        known = self._pieces.get(key)
        if known is None:
            axes = [local_axis(axis, self._program.share.coordinate) for axis in claim.family.axes or ()]
            known = self._pieces[key] = pieces(axes, claim.source.part, claim.family.parts_axis)
        return known

    def _copy_twins(self, plan: Plan, twins: tuple[str, ...]) -> int:
        written = 0
        for name in twins:
            tied = plan.targets[name].tied_to
            assert tied is not None
            self._tensors[name].copy_(self._tensors[tied])
            written += self._tensors[name].numel() * self._tensors[name].element_size()
        return written

    def _report(self, plan: Plan, matching: Matching, kept: Mapping[str, str], padded: int, plan_seconds: float) -> LoadReport:
        return LoadReport(
            rank=plan.rank,
            layout=str(self._program.layout),
            sources=len(self._fed) + len(self._elsewhere) + len(self._superseded),
            loaded=plan.num_loaded,
            elsewhere=len(self._elsewhere),
            skipped_by=matching.skipped_by,
            targets=len(plan.targets),
            tied=sum(target.tied_to is not None for target in plan.targets.values()),
            kept=kept,
            bytes_read=self._bytes,
            bytes_written=self._bytes,
            bytes_padded=padded,
            plan_seconds=plan_seconds,
            seconds=time.perf_counter() - self._start - plan_seconds,
        )


_NOTHING = TensorHeader("BF16", (), -1, 0, 0)
"""Stands in for the header of a tensor that was fed and not used, since another spelling of it was taken."""


def _header(name: str, tensor: torch.Tensor) -> TensorHeader:
    dtype = safetensors_name(str(tensor.dtype).removeprefix("torch."))
    if dtype is None:
        raise MapperError([finding("M611", subject=name, name=name, dtype=str(tensor.dtype))])
    return TensorHeader(dtype, tuple(tensor.shape), -1, 0, 0)


def _target_names(family: Family, claim: Claim, share: Share) -> list[str]:
    values = {
        index: [claim.bindings[index]] if index in claim.bindings else list(share.owned(index, family.domains[index]))
        for index in family.target.indices
    }
    return family.target.names(values)


def _on_rank(family: Family, share: Share) -> Family | None:
    """Return the family cut down to what this rank reads, or None where that is nothing."""
    if not share.holds(family.stage):
        return None
    domains = {index: share.owned(index, values) for index, values in family.domains.items()}
    if not all(domains.values()):
        return None
    return replace(
        family,
        domains=domains,
        alternatives=tuple(
            tuple(replace(source, domains={index: domains[index] for index in source.domains}) for source in alternative)
            for alternative in family.alternatives
        ),
    )
