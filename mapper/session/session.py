"""An update session: any order, any split into calls, any threads, one judgement at `finish` against what was declared."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from threading import Lock
from types import TracebackType
from typing import Literal

import torch

from mapper.checkpoint import TensorHeader
from mapper.compiler import Program
from mapper.compiler.resolve import Claim, Resolution
from mapper.diagnostics import Diagnostic, MapperError, finding
from mapper.finalize import Graph, TargetState
from mapper.plan.matching import Matching, match
from mapper.plan.plan import Plan, assemble
from mapper.regions import Box, spell
from mapper.report.load import LoadReport
from mapper.session.delta import copy_changed
from mapper.session.halves import Halves, Lifetime
from mapper.session.intake import Intakes, Route, copy_part, range_faults
from mapper.session.scope import ScopeArgument, covered_by, on_rank, scope_of
from mapper.session.staging import Staging
from mapper.transfer.bind import Binding, Model, bind
from mapper.transfer.copy import copy_twins, fill_padding
from mapper.transfer.digest import digest_tensor

Duplicates = Literal["refuse", "overwrite"]


@dataclass(frozen=True, slots=True)
class Settings:
    """How an update is made; `Loader.update` says what each means."""

    scope: ScopeArgument
    version: object
    duplicates: Duplicates
    lifetime: Lifetime
    max_held_bytes: int
    is_staged: bool
    digests: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class _Judgement:
    """What was fed, and that it is all that the scope asks for: the plan, how it lies on the model, and what it completes."""

    fed: Mapping[str, TensorHeader]
    chosen: Mapping[int, int]
    matching: Matching
    plan: Plan
    binding: Binding
    num_loaded: int
    padding: tuple[tuple[str, Box, float], ...]
    completed: frozenset[str]


class Memory:
    """What a loader keeps from one session to the next: the state of its targets, its steps, its routes, its last judgement."""

    def __init__(self, program: Program, model: Model) -> None:
        self.state = TargetState()
        self.graph = Graph(program, model, self.state)
        self.intakes: Intakes | None = None
        self.judgements: dict[object, _Judgement] = {}
        self.plan: Plan | None = None

    def refreshed(self, program: Program, model: Model) -> Intakes:
        """Return the routes, those of other tensors than the model has now forgotten."""
        if self.intakes is None:
            self.intakes = Intakes(program, model)
        elif not self.intakes.refresh():
            self.judgements.clear()
        return self.intakes


class UpdateSession:
    """Takes tensors one by one and writes each straight to its slices; use it in a `with` block.

    A name that no rule claims or that is outside of the scope, a wrong shape or dtype, or a name fed twice raises before any
    write of that tensor. Where a rule has several spellings, the first one listed wins, in whatever order they arrive. `feed`
    may be called from several threads. A block that is left without an error is judged as `finish` judges it; one that is
    left with an error is aborted.
    """

    def __init__(self, program: Program, model: Model, memory: Memory, settings: Settings) -> None:
        """Raise MapperError where the scope is none, or where it could not be finished: nothing is written then."""
        self._program = program
        self._model = model
        self._memory = memory
        self._settings = settings
        self._intakes = memory.refreshed(program, model)
        self._scope = scope_of(settings.scope, program, self._intakes)
        self._require_possible()
        self._halves = Halves(max_bytes=settings.max_held_bytes, lifetime=settings.lifetime)
        storages = {name: each.storage for name, each in self._intakes.declared.items()}
        self._staging = Staging(self._intakes.tensors, storages) if settings.is_staged else None
        self._fed: dict[str, TensorHeader] = {}
        self._elsewhere: set[str] = set()
        self._owned_elsewhere: set[str] = set()
        self._chosen: dict[int, int] = {}
        self._touched: set[str] = set()
        self._mixed_before = frozenset(memory.state.mixed)
        self._bytes = 0
        self._start = time.perf_counter()
        self._lock = Lock()
        self._is_open = True
        self._account: LoadReport | None = None

    def __enter__(self) -> UpdateSession:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None and self._is_open:
                self.finish()
        finally:
            self.abort()

    @property
    def version(self) -> object:
        """What `Loader.update` was given to tell this update from others."""
        return self._settings.version

    @property
    def waiting(self) -> tuple[str, ...]:
        """The tensors that are held because the one they belong with has not come yet."""
        return self._halves.names

    @property
    def held_bytes(self) -> int:
        """The bytes of the tensors that wait."""
        return self._halves.num_bytes

    @property
    def staged_bytes(self) -> int:
        """The bytes of the shadows that a staged update has made so far."""
        return self._staging.num_bytes if self._staging is not None else 0

    def feed(
        self,
        name: str,
        tensor: torch.Tensor,
        *,
        only_where: torch.Tensor | None = None,
        nan_means_unchanged: bool = False,
        version: object = None,
    ) -> None:
        """Write one source tensor to every slice of this rank that it fills; raises MapperError before any write of it.

        `only_where`, a mask of the tensor's shape, leaves the elements alone where it is false, and `nan_means_unchanged`
        those that are NaN: a delta of what is there. Otherwise NaN is a value like any other. `version`, where given, must
        be the session's.
        """
        is_delta = only_where is not None or nan_means_unchanged
        if name in self._settings.digests:
            self._require_digest(name, tensor)
        with self._lock:
            if not self._is_open:
                raise MapperError([finding("M612")])
            if version is not None and version != self.version:
                raise MapperError([finding("M617", subject=name, name=name, version=version, expected=self.version)])
            before = self._fed.get(name)
            route = self._accepted(name, tensor, is_again=before is not None)
            if is_delta:
                self._require_delta(name, route, tensor, only_where)
            if route.is_narrowing and (faults := range_faults(route, name, tensor, self._intakes.tensors)):
                raise MapperError(faults)
            if route.outcome == "elsewhere":
                self._elsewhere.add(name)
                return
            self._fed[name] = route.header
            self._bytes += route.num_bytes
            if route.is_owned_elsewhere:
                self._owned_elsewhere.add(name)
            self._touched.update(route.targets)
            if self._staging is None:
                self._memory.state.mixed.update(route.targets)
        if not route.parts:
            return
        try:
            self._write(name, route, tensor.detach() if tensor.requires_grad else tensor, only_where, is_delta=is_delta)
        except BaseException:
            with self._lock:
                del self._fed[name]
                if before is not None:
                    self._fed[name] = before
            raise

    def feed_all(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Write every tensor of a stream."""
        for name, tensor in tensors:
            self.feed(name, tensor)

    def finish(self) -> LoadReport:
        """Return the account of the session; raises MapperError naming every source that its scope still lacks, and where.

        A staged update writes now, after everything was found right. Then padding, tied copies and what is derived from the
        changed targets follow. After a success it returns the same account again; after such an error the session goes on
        taking tensors.
        """
        with self._lock:
            if self._account is not None:
                return self._account
            if not self._is_open:
                raise MapperError([finding("M612")])
            self._account = self._finished()
            return self._account

    def abort(self) -> None:
        """Close the session and let go of all it holds.

        What it has written stays, mixed with what was there; the loader remembers these targets as incomplete. A staged
        update has written nothing.
        """
        with self._lock:
            self._is_open = False
            self._halves.clear()
            if self._staging is not None:
                self._staging.drop()

    # --- one tensor -------------------------------------------------------------------------------------------------

    def _accepted(self, name: str, tensor: torch.Tensor, *, is_again: bool) -> Route:
        """Return what the tensor does; raises MapperError where it may not come, or not so."""
        if is_again or name in self._elsewhere:
            if self._settings.duplicates == "refuse":
                raise MapperError([finding("M610", subject=name, name=name)])
        elif self._scope.targets is not None and not self._scope.takes(name, self._program, self._intakes):
            raise MapperError([finding("M615", subject=name, name=name, scope=self._scope.text)])
        route = self._intakes.routes.get(name)
        if route is None or route.has_choice or route.dtype is not tensor.dtype or route.shape != tensor.shape:
            resolution = self._intakes.resolve(name)
            is_superseded = self._require_known(resolution)
            route = self._intakes.route(resolution, tensor, is_checked=not is_superseded)
            if route.has_choice:
                for part in route.parts:
                    self._chosen[part.rule] = min(self._chosen.get(part.rule, part.alternative), part.alternative)
        if self._scope.targets is not None and not self._scope.targets.issuperset(route.targets):
            route = route.within(self._scope.targets)
        return route

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

    def _require_delta(self, name: str, route: Route, tensor: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Raise MapperError M619 where there is nothing that a delta could leave unchanged."""
        problem = ""
        if mask is not None and (mask.shape != tensor.shape or mask.dtype != torch.bool):
            problem = f"the mask is {mask.dtype} {list(mask.shape)}, expected torch.bool {list(tensor.shape)}"
        elif any(part.half is not None for part in route.parts):
            problem = "its values are multiplied by scales, so that what is there is not what is stored"
        elif any(part.reading is not None and part.reading.whole is not None for part in route.parts):
            problem = "what is written of it depends on all of its elements"
        elif name not in self._fed:
            lacking = [each for each in route.targets if not self._is_filled(each)]
            problem = f"{lacking[0]!r} is not complete, so that what stays would be of no checkpoint" if lacking else ""
        if problem:
            raise MapperError([finding("M619", subject=name, name=name, problem=problem)])

    def _require_digest(self, name: str, tensor: torch.Tensor) -> None:
        found, expected = digest_tensor(tensor), self._settings.digests[name]
        if found != expected:
            raise MapperError([finding("M623", subject=name, name=name, found=found, expected=expected)])

    def _is_filled(self, target: str) -> bool:
        return target in self._memory.state.filled and target not in self._mixed_before

    def _write(self, name: str, route: Route, tensor: torch.Tensor, mask: torch.Tensor | None, *, is_delta: bool) -> None:
        staging = self._staging
        targets = self._intakes.tensors if staging is None else staging.shadows(route.targets)
        for part in route.parts:
            scales = None
            values = tensor
            if part.half is not None:
                other = self._halves.meet(part.half, name, tensor, is_scale=part.is_scale)
                if other is None:
                    continue
                values, scales = (other, tensor) if part.is_scale else (tensor, other)
            if is_delta:
                copy_changed(part, values, mask, targets)
            else:
                copy_part(part, values, scales, targets, is_direct=staging is None)

    # --- the end ----------------------------------------------------------------------------------------------------

    def _require_possible(self) -> None:
        """Raise MapperError where the update could not be finished, whatever is fed."""
        state, scope = self._memory.state, self._scope
        names = state.consumed.keys() if scope.targets is None else scope.targets
        state.require_loadable(names, can_restore=self._settings.is_staged)
        if scope.targets is not None:
            covered = scope.targets if scope.names is None else covered_by(scope.names, self._intakes)
            state.require_unmixed(but=covered)
            self._memory.graph.require_inputs(scope.targets, state.filled | covered)

    def _finished(self) -> LoadReport:
        start = time.perf_counter()
        judgement = self._judged()
        if self._halves.names:
            waiting = self._halves.names
            raise MapperError([finding("M618", subject=name, name=name) for name in waiting])
        changed = self._touched | judgement.completed
        changed |= {each.name for each in judgement.plan.targets.values() if each.tied_to in changed}
        self._require_nothing_left(judgement.completed)
        plan, binding = judgement.plan, judgement.binding
        staged_bytes = self.staged_bytes
        with torch.no_grad():
            if self._staging is not None:
                self._memory.graph.restore(changed)
                self._memory.state.mixed |= self._touched
                self._staging.commit()
            padded = fill_padding(binding.tensors, judgement.padding)
            twinned = copy_twins(binding.tensors, binding.copied_twins)
        self._settle(judgement.completed)
        finalized = self._memory.graph.run(changed)
        self._is_open = False
        if self._scope.targets is None:
            self._memory.plan = plan
        seconds = time.perf_counter() - start
        return LoadReport(
            rank=plan.rank,
            layout=str(self._program.layout),
            sources=len(self._fed) + len(self._elsewhere),
            loaded=judgement.num_loaded,
            elsewhere=len(self._elsewhere) + judgement.matching.num_claimed - judgement.num_loaded,
            skipped_by=judgement.matching.skipped_by,
            targets=len(plan.targets),
            tied=sum(target.tied_to is not None for target in plan.targets.values()),
            kept=binding.kept,
            bytes_read=self._bytes,
            bytes_written=self._bytes + twinned,
            bytes_padded=padded,
            plan_seconds=seconds,
            seconds=time.perf_counter() - self._start - seconds,
            finalized=finalized,
            scope=self._scope.text,
            version=self.version,
            held_bytes=self._halves.peak_bytes,
            staged_bytes=staged_bytes,
        )

    def _judged(self) -> _Judgement:
        """Return what was fed as a plan that covers the scope; raises MapperError with everything that it lacks."""
        known = self._memory.judgements.get(self._scope.key)
        if known is not None and known.fed == self._fed and known.chosen == self._chosen:
            return known
        share, scope = self._program.share, self._scope
        families = scope.families([local for each in self._program.families if (local := on_rank(each, share)) is not None])
        owned = self._owned_elsewhere if scope.targets is None else self._fed.keys()
        matching = match(families, self._program.skips, self._fed, chosen=self._chosen, owned=owned)
        plan = assemble(matching, share, self._program.keeps, self._fed, derived=self._program.derived)
        findings = [self._with_region(each) for each in self._scoped(plan.findings)]
        if findings:
            raise MapperError(findings)
        binding = bind(self._program, plan, self._model, only=scope.targets)
        incomplete = {
            local.matched.family.target.name(dict(zip(local.matched.family.target.indices, combination, strict=True)))
            for local in plan.families
            for combination in local.matched.incomplete
        }
        judgement = _Judgement(
            dict(self._fed),
            dict(self._chosen),
            matching,
            plan,
            binding,
            plan.num_loaded,
            tuple(plan.padding()),
            frozenset(name for name in plan.targets if name not in incomplete),
        )
        self._memory.judgements.clear()
        self._memory.judgements[scope.key] = judgement
        return judgement

    def _scoped(self, findings: Iterable[Diagnostic]) -> list[Diagnostic]:
        """Return the findings that concern the scope: a list of tensors asks for these, and for no others."""
        scope = self._scope
        if scope.targets is None:
            return list(findings)
        found = [each for each in findings if each.code != "M508" and (each.code != "M501" or scope.names is None)]
        for name in sorted(scope.names or ()):
            resolution = self._intakes.resolve(name)
            if resolution.outcome == "loaded" and name not in self._fed:
                rule = resolution.claims[0].family.rule
                found.append(finding("M501", place=rule.place, subject=name, name=name, rule=rule.text))
        return found

    def _with_region(self, each: Diagnostic) -> Diagnostic:
        """Return a missing source with the region of the target that lacks it."""
        if each.code != "M501":
            return each
        targets = [
            (target, box) for target, box in self._intakes.regions(each.subject)
            if self._scope.targets is None or target in self._scope.targets
        ]  # fmt: skip
        if not targets:
            return each
        target, box = targets[0]
        more = f", and {len(targets) - 1} more regions" if len(targets) > 1 else ""
        where = f"{target!r} lacks it in {spell(box)}{more}"
        return replace(each, hint=f"{where}; {each.hint}" if each.hint else where)

    def _require_nothing_left(self, completed: frozenset[str]) -> None:
        """Raise MapperError M614 where another update left targets incomplete that this one does not write as a whole."""
        fresh = self._touched - self._mixed_before
        self._memory.state.require_unmixed(but=completed | fresh)

    def _settle(self, completed: frozenset[str]) -> None:
        """Take what the update completes as filled, and the targets of which it wrote a part as they were before."""
        state = self._memory.state
        state.fill(completed)
        state.mixed -= self._touched
