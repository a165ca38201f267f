"""A spec against the names of a checkpoint alone, as an index gives them: what each name is, and which are not there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from mapper.checkpoint import CheckpointNames
from mapper.compiler import Program
from mapper.diagnostics import Diagnostic, as_objects, render_findings
from mapper.report.check import SkipCount, SourceCounts, count_findings, skip_counts

NOT_JUDGED = "shapes, dtypes and the coverage of parameters are not judged"


@dataclass(frozen=True, slots=True)
class NamesReport:
    """Every name accounted for: claimed by a rule (`sources.loaded`), skipped by a named rule, or unknown."""

    ok: bool
    spec: str
    runtime: str
    layout: str
    sources: SourceCounts
    skipped_by: Mapping[str, int]
    findings: tuple[Diagnostic, ...]
    skips: tuple[SkipCount, ...]

    def to_json(self) -> dict[str, object]:
        """Return the report as an object for JSON; what is not judged is null."""
        return {
            **{name: getattr(self, name) for name in ("ok", "spec", "runtime", "layout")},
            "sources": asdict(self.sources),
            "skipped_by": dict(self.skipped_by),
            "skips": [asdict(each) for each in self.skips],
            "targets": None,
            "bytes_per_rank": None,
            "findings": as_objects(self.findings),
            "evidence": f"names: each is claimed, skipped or unknown; {NOT_JUDGED}",
        }

    def to_text(self) -> str:
        """Return the report for a person."""
        sources = self.sources
        lines = [
            *render_findings(self.findings),
            f"{self.spec} {self.runtime} on {self.layout}: names only",
            f"  sources  {sources.total:,}: "
            f"{sources.loaded:,} claimed, {sources.skipped:,} skipped, {sources.unknown:,} unknown",
            *(f"           {count:,} skipped by {rule}" for rule, count in self.skipped_by.items() if count),
            f"  {'ok: every name is accounted for' if self.ok else count_findings(self.findings)}; {NOT_JUDGED}",
        ]
        return "\n".join(lines)


def check_names(program: Program, checkpoint: CheckpointNames) -> NamesReport:
    """Return how `program` accounts for the names; a name that a rule needs and that is not there is a finding too."""
    matching = program.match_names(checkpoint.names)
    return NamesReport(
        ok=not matching.findings,
        spec=program.spec.id,
        runtime=program.runtime,
        layout=str(program.layout),
        sources=SourceCounts(matching.num_sources, matching.num_claimed, 0, len(matching.skipped), len(matching.unknown)),
        skipped_by=matching.skipped_by,
        findings=matching.findings,
        skips=skip_counts(program, matching),
    )
