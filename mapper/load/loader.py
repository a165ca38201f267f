"""The loader: a program on a model, filled from files or from a stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from mapper.checkpoint import Checkpoint
from mapper.checkpoint.collector import collector_paused
from mapper.compiler import Program
from mapper.diagnostics import MapperError, finding
from mapper.export.digest import digest_rank
from mapper.export.export import MAX_SHARD_BYTES, ExportReport, export
from mapper.finalize import targets_on
from mapper.load.placeholders import placeholders_of
from mapper.messages.suggest import did_you_mean
from mapper.ops.dtypes import is_narrower, num_bytes
from mapper.plan.digest import Digest
from mapper.plan.plan import Plan, Step, iter_steps, target_names
from mapper.plan.ranges import ByteRange, byte_ranges
from mapper.regions import Box, shape_of
from mapper.report.load import FinalizeReport, LoadReport
from mapper.session import MAX_HELD_BYTES, Duplicates, Lifetime, Memory, ScopeArgument, Settings, UpdateSession, groups
from mapper.transfer.bind import Binding, Model, bind, materialize, model_tensors
from mapper.transfer.compute import cast_fault
from mapper.transfer.copies import require_copies
from mapper.transfer.copy import copy_box, copy_twins, fill_padding, read_as, values_of
from mapper.transfer.files import CheckpointFiles
from mapper.transfer.scatter import scatter, takes_bytes
from mapper.transfer.versions import require_versions, versions_of

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) while a load runs."""


class Loader:
    """Fills a model, or a mapping of names to tensors, as a program says.

    A module's parameters on meta get storage on `device` first. Nothing is written before the whole load is proved.
    `versions` are those of the engine's packages that the model is of, by package; None finds those of a module whose class
    comes from such a package. Raises MapperError M604 where the program's runtime is for others.
    """

    def __init__(
        self,
        program: Program,
        model: Model,
        *,
        device: torch.device | str = "cpu",
        versions: Mapping[str, str] | None = None,
    ) -> None:
        require_versions(program, versions_of(program, model) if versions is None else versions)
        self.program = program
        self.model = model
        if isinstance(model, nn.Module):
            materialize(model, device=device)
        self._memory = Memory(program, model)

    def load(self, checkpoint: Checkpoint, *, progress: Progress | None = None, digest: bool = False) -> LoadReport:
        """Fill the model from the checkpoint's files and return the account; raises MapperError before the first write.

        Only the slices that this rank needs are read. With `digest` the report has the checksums of what the parameters hold.
        """
        start = time.perf_counter()
        with collector_paused(), torch.no_grad():
            plan, binding = self.prove(checkpoint)
            state = self._memory.state
            state.require_loadable(plan.targets)
            ranges, steps = _divided(plan, binding)
            proved = time.perf_counter()
            state.mixed |= plan.targets.keys()  # until all of them are written
            read, written = self._fill(checkpoint, plan, binding, ranges, steps, progress)
            padded = fill_padding(binding.tensors, plan.padding())
            written += copy_twins(binding.tensors, binding.copied_twins)
        state.fill(plan.targets.keys())
        finalized = self._memory.graph.run(plan.targets)
        self._memory.plan = plan
        report = _report(plan, binding, read, written, padded, proved - start, time.perf_counter() - proved)
        return replace(report, finalized=finalized, digest=digest_rank(plan, binding.tensors) if digest else None)

    def _fill(
        self,
        checkpoint: Checkpoint,
        plan: Plan,
        binding: Binding,
        ranges: list[ByteRange],
        steps: list[Step],
        progress: Progress | None,
    ) -> tuple[int, int]:
        """Read and write everything that lies in files; return the bytes read and written."""
        written, read = 0, sum(size for _, _, size, _, _ in ranges)
        total = read + sum(_num_bytes(binding, step) for step in steps)

        def advance(count: int) -> None:
            nonlocal written
            written += count
            if progress is not None:
                progress(written, total)

        with CheckpointFiles(checkpoint) as files:
            for file in {plan.tensors[step.source].file for step in steps}:
                files.elements(file, "U8")  # a file that changed since its header was read is found before the first write
            _require_range(files, plan, binding, steps)
            require_copies(plan, files)
            scatter(checkpoint, ranges, binding.tensors, progress=advance)
            for step in steps:
                header = plan.tensors[step.source]
                target = binding.tensors[step.target]
                copy_box(target, step.target_box, _read(files, plan, step), step.reading, step.weaves)
                read += num_bytes(header.dtype, step.shape_read)
                if step.scale is not None:
                    read += num_bytes(plan.tensors[step.scale].dtype, shape_of(_scale_box(step)))
                advance(_num_bytes(binding, step))
        return read, written

    def digest(self, checkpoint: Checkpoint | None = None) -> Digest:
        """Return checksums of the tensors that this rank's parameters stand for, as they would lie in a checkpoint.

        Those of all ranks combine to one for each tensor (`mapper.combine_digests`), which is the same for every layout.
        `checkpoint` gives names, shapes and dtypes; without it they are those of the last load or whole update.
        """
        plan = self.program.plan(checkpoint) if checkpoint is not None else self._memory.plan
        if plan is None:
            raise MapperError([finding("M714")])
        return digest_rank(plan, bind(self.program, plan, self.model).tensors)

    def finalize(self, *, changed: Literal["all"] | Iterable[str] | None = None) -> FinalizeReport:
        """Derive what the spec's finalize steps derive, in the order of a load, for parameters that were filled elsewhere.

        Without `changed` every target counts as filled, and the steps that have not run yet run: the end of a dummy load.
        With it the named targets, or all of them, have just been written by the caller, who vouches for them, and what depends
        on them is derived anew. Raises MapperError M614 where an update was aborted and nobody has written its targets since.
        """
        start = time.perf_counter()
        targets = targets_on(self.program, model_tensors(self.model))
        if changed is None:
            self._memory.state.require_unmixed()
            self._memory.state.filled |= targets
            finalized = self._memory.graph.run_missing()
        else:
            written = targets if changed == "all" else set(changed)
            unknown = sorted(written - targets)
            if unknown:
                raise MapperError(
                    [finding("M637", subject=name, hint=did_you_mean(name, targets), name=name) for name in unknown]
                )
            self._memory.state.fill(written)
            finalized = self._memory.graph.run(written)
        seconds = time.perf_counter() - start
        return FinalizeReport(self.program.rank, str(self.program.layout), finalized, seconds)

    def placeholders(self) -> int:
        """Write to every target the value that stands for nothing in its leaf, and return the number of bytes written.

        That is the leaf's `neutral`, by default 0; padding holds what a load leaves there, kept parameters what they held.
        What steps derive from them is for `finalize`. Raises MapperError, before the first write, where the model does not
        have a target, or has one of another shape or dtype.
        """
        tensors, state = model_tensors(self.model), self._memory.state
        planned = placeholders_of(self.program, tensors)
        state.require_loadable(planned.targets)
        with torch.no_grad():
            written = planned.write(tensors)
        state.fill(planned.targets)
        self._memory.graph.forget(planned.targets)
        return written

    def prove(self, checkpoint: Checkpoint) -> tuple[Plan, Binding]:
        """Return the proved plan and its binding to the model; raises MapperError, and writes nothing."""
        plan = self.program.plan(checkpoint)
        return plan, bind(self.program, plan, self.model)

    def export(self, path: str | Path, *, base: Checkpoint, max_shard_bytes: int = MAX_SHARD_BYTES) -> ExportReport:
        """Write the model's parameters to the new folder `path` as the checkpoint they came from.

        `base` gives the names, dtypes and shapes, and the tensors that the program skips. Raises MapperError before the
        folder exists: M703 where this rank does not hold everything (see `mapper.export.export` for all ranks at once).
        """
        plan = self.program.plan(base)
        parameters = bind(self.program, plan, self.model).tensors
        return export(
            [(plan, parameters)],
            path,
            base=None if base.is_manifest else base,
            config=base.config,
            max_shard_bytes=max_shard_bytes,
        )

    def update(
        self,
        *,
        scope: ScopeArgument = "all",
        version: object = None,
        duplicates: Duplicates = "refuse",
        lifetime: Lifetime = "buffer",
        max_held_bytes: int = MAX_HELD_BYTES,
        staged: bool = False,
        digests: Mapping[str, int] | None = None,
    ) -> UpdateSession:
        """Return a session that fills the model, or a part of it, from a stream of (name, tensor).

        `scope` is what `finish` asks to be complete: `all`, a list of modules or parameters (`*` is one segment of a name,
        `**` any number), or the sources that will come, as a set of names, a mapping of names to headers (None where unknown)
        or a checkpoint. `version` tells the update from others. `duplicates` says what a source that comes twice is: an
        error, or a second value. Tensors are copied at once; only those that wait for another are kept, copied unless
        `lifetime` is `owned`, and up to `max_held_bytes` of them. A staged update writes to shadows of the parameters, as
        large as these, and to the parameters at `finish`. `digests` are checksums of whole tensors, as `combine_digests` gives
        them; a tensor that has another is refused. Raises MapperError where the scope could not be finished.
        """
        settings = Settings(scope, version, duplicates, lifetime, max_held_bytes, staged, digests or {})
        return UpdateSession(self.program, self.model, self._memory, settings)

    def groups(self) -> tuple[tuple[str, ...], ...]:
        """Return the names of the sources that must come in one update: values and the scales that they are multiplied by."""
        return groups(self.program)


def _divided(plan: Plan, binding: Binding) -> tuple[list[ByteRange], list[Step]]:
    """Return the copies that are runs of bytes, and all others in the order in which their bytes lie in the files."""
    ranges: list[ByteRange] = []
    steps: list[Step] = []
    for local in plan.families:
        runs = byte_ranges(local) if all(takes_bytes(binding.tensors[name]) for name in target_names(local)) else None
        if runs is None:
            steps += iter_steps(local)
        else:
            ranges += runs
    tensors = plan.tensors
    return ranges, sorted(steps, key=lambda step: (tensors[step.source].file, tensors[step.source].start, step.source_box))


def _read(files: CheckpointFiles, plan: Plan, step: Step) -> torch.Tensor:
    """Return the step's source box in the order of the target's axes: a view of the mapped file, or dequantised values."""
    header, reading = plan.tensors[step.source], step.reading
    if reading is None or (reading.disk is None and reading.scaling is None and reading.whole is None):
        return read_as(files.read_box(header, step.source_box), reading)
    scales = None if step.scale is None else files.tensor(plan.tensors[step.scale])
    return values_of(read_as(files.tensor(header), reading), step.source_box, reading, scales)


def _require_range(files: CheckpointFiles, plan: Plan, binding: Binding, steps: Sequence[Step]) -> None:
    """Raise MapperError where a cast could not hold a number, before anything is written."""
    faults = []
    for step in steps:
        conversion = step.reading.conversion if step.reading is not None else None
        if (
            conversion is not None
            and conversion.by == "cast"
            and is_narrower(conversion.dtype, plan.tensors[step.source].dtype)
        ):
            fault = cast_fault(step.source, _read(files, plan, step), binding.tensors[step.target].dtype)
            faults += [] if fault is None else [fault]
    if faults:
        raise MapperError(list(dict.fromkeys(faults)))


def _scale_box(step: Step) -> Box:
    assert step.reading is not None
    assert step.reading.scaling is not None
    return step.reading.scaling.box(step.source_box)


def _num_bytes(binding: Binding, step: Step) -> int:
    return binding.tensors[step.target].element_size() * step.num_written


def _report(
    plan: Plan, binding: Binding, read: int, written: int, padded: int, plan_seconds: float, seconds: float
) -> LoadReport:
    matching = plan.matching
    loaded = plan.num_loaded
    return LoadReport(
        rank=plan.rank,
        layout=str(plan.share.mesh.layout),
        sources=matching.num_sources,
        loaded=loaded,
        elsewhere=matching.num_claimed - loaded,
        skipped_by=matching.skipped_by,
        targets=len(plan.targets),
        tied=sum(target.tied_to is not None for target in plan.targets.values()),
        kept=binding.kept,
        bytes_read=read,
        bytes_written=written,
        bytes_padded=padded,
        plan_seconds=plan_seconds,
        seconds=seconds,
    )
