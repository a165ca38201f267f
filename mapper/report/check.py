"""A spec proved against a checkpoint's headers, on every rank of a layout or on one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

from mapper.checkpoint import Checkpoint
from mapper.compiler import Program
from mapper.compiler.options import with_options
from mapper.diagnostics import Diagnostic, as_objects, finding, render_findings
from mapper.plan.matching import Matching
from mapper.plan.plan import Plan, target_names
from mapper.plan.targets import DeclaredTarget, fit
from mapper.report.reads import Reads

Targets = Mapping[str, DeclaredTarget]


@dataclass(frozen=True, slots=True)
class SourceCounts:
    """Source tensors: `loaded` by some rank, `elsewhere` where one rank is asked about, `skipped`, and `unknown`."""

    total: int
    loaded: int
    elsewhere: int
    skipped: int
    unknown: int


@dataclass(frozen=True, slots=True)
class TargetCounts:
    """Parameters over all ranks asked about."""

    total: int
    complete: int
    kept: int
    incomplete: int


@dataclass(frozen=True, slots=True)
class SkipCount:
    """A skip in force: its name, why it is there, where it is written (None: on the command line), how much it matched."""

    rule: str
    why: str
    place: str | None
    count: int


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What a check has found. `bytes_per_rank` are the parameters' bytes, in rank order."""

    ok: bool
    spec: str
    runtime: str
    layout: str
    ranks: int
    sources: SourceCounts
    skipped_by: Mapping[str, int]
    targets: TargetCounts
    targets_declared_by: Literal["spec", "model"]
    bytes_per_rank: tuple[int, ...]
    findings: tuple[Diagnostic, ...] = field(default=())
    skips: tuple[SkipCount, ...] = field(default=())

    def to_json(self) -> dict[str, object]:
        """Return the report as an object for JSON."""
        plain = {name: getattr(self, name) for name in ("ok", "spec", "runtime", "layout", "ranks")}
        return {
            **plain,
            "sources": asdict(self.sources),
            "skipped_by": dict(self.skipped_by),
            "skips": [asdict(each) for each in self.skips],
            "targets": asdict(self.targets),
            "targets_declared_by": self.targets_declared_by,
            "bytes_per_rank": list(self.bytes_per_rank),
            "findings": as_objects(self.findings),
            "evidence": "structure: coverage and conservation by region; meaning is not judged here",
        }

    def to_text(self) -> str:
        """Return the report for a person."""
        sources, targets = self.sources, self.targets
        verdict = (
            "ok: the structure is proved; what the values mean is not judged here" if self.ok else count_findings(self.findings)
        )
        declared = "the spec" if self.targets_declared_by == "spec" else "the model"
        lines = [
            *render_findings(self.findings),
            f"{self.spec} {self.runtime} on {self.layout}: {self.ranks} rank{'s' if self.ranks != 1 else ''}",
            f"  sources  {sources.total:,}: {sources.loaded:,} loaded, "
            + (f"{sources.elsewhere:,} elsewhere, " if sources.elsewhere else "")
            + f"{sources.skipped:,} skipped, {sources.unknown:,} unknown",
            *(f"           {count:,} skipped by {rule}" for rule, count in self.skipped_by.items() if count),
            f"  targets  {targets.total:,} (declared by {declared}): {targets.complete:,} complete, "
            f"{targets.kept:,} kept, {targets.incomplete:,} incomplete",
            f"  bytes    {_spread(self.bytes_per_rank)} per rank",
            f"  {verdict}",
        ]
        return "\n".join(lines)


def check(
    program: Program,
    checkpoint: Checkpoint,
    *,
    ranks: Iterable[int] | None = None,
    targets: Sequence[Targets] | None = None,
) -> CheckReport:
    """Return the proof of `program` against the checkpoint's headers on `ranks` (None: all of the layout).

    `targets` are the model's own parameters: one mapping for every rank, or one for each in rank order.
    """
    chosen = list(range(program.layout.num_ranks) if ranks is None else ranks)
    matching = program.match(checkpoint)
    findings: dict[Diagnostic, None] = dict.fromkeys(matching.findings)
    if targets is not None and len(targets) not in (1, program.layout.num_ranks):
        findings[finding("M534", found=len(targets), expected=program.layout.num_ranks)] = None
        targets = None
    covers_all = sorted(chosen) == list(range(program.layout.num_ranks))
    loaded: set[str] = set()
    tally = _Tally(matching)
    hints: dict[tuple[str, str], str] = {}
    for rank in chosen:
        plan = program.at_rank(rank).assemble(matching, checkpoint.tensors)
        findings.update(dict.fromkeys(plan.findings))
        unfit: set[str] = set()
        if targets is not None:
            declared = targets[0] if len(targets) == 1 else targets[rank]
            fitted = fit(plan, declared)
            if fitted.findings and not hints:  # the options are tried on the first rank that does not fit
                tried = with_options(program.at_rank(rank), checkpoint.tensors, declared, fitted.findings)
                hints = {(each.code, each.subject): each.hint for each in tried}
            for each in fitted.findings:
                findings[replace(each, hint=hints.get((each.code, each.subject), each.hint))] = None
            unfit = {each.subject for each in fitted.findings}
            tally.kept += len(fitted.kept)
        tally.add(plan, unfit)
        if not covers_all:
            loaded.update(step.source for step in plan.steps())
    if covers_all:
        findings.update(dict.fromkeys(tally.unread()))
    num_loaded = matching.num_claimed if covers_all else len(loaded)
    sources = SourceCounts(
        matching.num_sources, num_loaded, matching.num_claimed - num_loaded, len(matching.skipped), len(matching.unknown)
    )
    counts = TargetCounts(tally.total + tally.kept, tally.total - tally.incomplete, tally.kept, tally.incomplete)
    return CheckReport(
        ok=not findings,
        spec=program.spec.id,
        runtime=program.runtime,
        layout=str(program.layout),
        ranks=len(chosen),
        sources=sources,
        skipped_by=matching.skipped_by,
        targets=counts,
        targets_declared_by="spec" if targets is None else "model",
        bytes_per_rank=tuple(tally.bytes),
        findings=tuple(findings),
        skips=skip_counts(program, matching),
    )


def skip_counts(program: Program, matching: Matching) -> tuple[SkipCount, ...]:
    """Return every skip in force, with what it matched."""
    return tuple(
        SkipCount(each.text, each.why, str(each.place) if each.place else None, matching.skipped_by.get(each.text, 0))
        for each in program.skips
    )


class _Tally:
    """Counts over ranks, and what they read together."""

    def __init__(self, matching: Matching) -> None:
        self.matching = matching
        self.total = self.incomplete = self.kept = 0
        self.bytes: list[int] = []
        self._reads = Reads()

    def add(self, plan: Plan, unfit: set[str]) -> None:
        """Count one rank; `unfit` are the targets and parameters for which plan and model disagree."""
        lacking = set(unfit)
        for local in plan.families:
            incomplete = local.matched.incomplete
            if incomplete:
                held = zip(target_names(local), local.combinations, strict=True)
                lacking.update(name for name, combination in held if combination in incomplete)
            self._reads.note(local.matched.family.number, local)
        lacking.update(target.name for target in plan.targets.values() if target.tied_to in lacking)
        self.total += len(plan.targets.keys() | lacking)
        self.incomplete += len(lacking)
        self.bytes.append(plan.num_bytes)

    def unread(self) -> Iterable[Diagnostic]:
        """Yield what no rank reads, though a rule claims it."""
        for matched in self.matching.families:
            yield from self._reads.unread(matched.family.number, matched)


def _spread(sizes: Sequence[int]) -> str:
    if not sizes:
        return "0"
    return f"{min(sizes):,}" if min(sizes) == max(sizes) else f"{min(sizes):,} to {max(sizes):,}"


def count_findings(findings: Sequence[Diagnostic]) -> str:
    """Return how many findings there are, with the noun."""
    return f"{len(findings):,} finding{'s' if len(findings) != 1 else ''}"
