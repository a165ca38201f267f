"""A spec proved on every legal layout up to a number of ranks, from a config alone: no checkpoint, no model.

What is decided is structure: on every rank the boxes of a target's sources tile it, and over all ranks every element of
every source is read. The smallest layout that fails is the counterexample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from mapper.checkpoint import TensorHeader
from mapper.compiler import Program
from mapper.diagnostics import Diagnostic, MapperError, as_objects, render_text
from mapper.layout import Layout
from mapper.plan.family import Family
from mapper.plan.matching import MatchedFamily
from mapper.plan.plan import localize
from mapper.report.reads import Reads

ILLEGAL = frozenset({"M302", "M328", "M329", "M330"})
"""A layout that compiles to one of these alone is not legal for the config: units or blocks would be cut."""

Compile = Callable[[Layout], Program]


@dataclass(frozen=True, slots=True)
class Counterexample:
    """The first failure in order of ranks, then of layouts: where it happens and what fails."""

    layout: str
    rank: int | None
    findings: tuple[Diagnostic, ...]


@dataclass(frozen=True, slots=True)
class LayoutsReport:
    """All layouts up to `max_ranks`: how many were proved, which the config does not allow, and what failed first."""

    spec: str
    runtime: str
    max_ranks: int
    layouts: int
    ranks: int
    refused: Mapping[str, tuple[str, ...]]
    counterexample: Counterexample | None

    @property
    def ok(self) -> bool:
        return self.counterexample is None and self.layouts > 0

    def to_json(self) -> dict[str, object]:
        """Return the report as an object for JSON."""
        found = self.counterexample
        return {
            "ok": self.ok,
            "spec": self.spec,
            "runtime": self.runtime,
            "max_ranks": self.max_ranks,
            "layouts": self.layouts,
            "ranks": self.ranks,
            "refused": {reason: list(layouts) for reason, layouts in self.refused.items()},
            "counterexample": found and {"layout": found.layout, "rank": found.rank, "findings": as_objects(found.findings)},
            "evidence": "structure: coverage and conservation by region; meaning is not judged here",
        }

    def to_text(self) -> str:
        """Return the report for a person."""
        lines = [f"{self.spec} {self.runtime}: {self.layouts:,} layouts of up to {self.max_ranks} ranks, {self.ranks:,} ranks"]
        for reason, layouts in self.refused.items():
            lines.append(f"  {len(layouts):,} layouts are not legal for this config, the smallest {layouts[0]}: {reason}")
        if self.counterexample is not None:
            where = f" rank {self.counterexample.rank}" if self.counterexample.rank is not None else ""
            lines.append(f"  smallest counterexample: {self.counterexample.layout}{where}")
            lines += [f"  {render_text(each)}" for each in self.counterexample.findings]
        elif self.ok:
            lines.append("  ok: the structure is proved on all of them; what the values mean is not judged here")
        else:
            lines.append("  no layout is legal for this config")
        return "\n".join(lines)


def iter_layouts(max_ranks: int) -> Iterator[Layout]:
    """Yield every layout of tp, pp, dp and ep (1 or tp * dp) with at most `max_ranks` ranks, fewest ranks first."""
    for num_ranks in range(1, max_ranks + 1):
        for tp in _divisors(num_ranks):
            for pp in _divisors(num_ranks // tp):
                dp = num_ranks // tp // pp
                yield Layout(tp=tp, pp=pp, dp=dp)
                if tp * dp > 1:
                    yield Layout(tp=tp, pp=pp, dp=dp, ep=tp * dp)


def check_layouts(compile_at: Compile, *, max_ranks: int) -> LayoutsReport:
    """Return the proof of what `compile_at` gives for every layout of up to `max_ranks` ranks.

    Raises MapperError where the spec does not compile on a single rank.
    """
    first = compile_at(Layout())
    num_layouts = num_ranks = 0
    refused: dict[str, list[str]] = {}
    counterexample: Counterexample | None = None
    for layout in iter_layouts(max_ranks):
        try:
            program = first if layout == Layout() else compile_at(layout)
        except MapperError as error:
            if all(each.code in ILLEGAL for each in error.diagnostics):
                refused.setdefault(_reason(error.diagnostics[0]), []).append(str(layout))
                continue
            counterexample = Counterexample(str(layout), None, error.diagnostics)
            break
        num_layouts += 1
        num_ranks += layout.num_ranks
        counterexample = _counterexample(program)
        if counterexample is not None:
            break
    reasons = {reason: tuple(layouts) for reason, layouts in refused.items()}
    return LayoutsReport(first.spec.id, first.runtime, max_ranks, num_layouts, num_ranks, reasons, counterexample)


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _reason(diagnostic: Diagnostic) -> str:
    return f"{diagnostic.code} at {diagnostic.place}" if diagnostic.place else diagnostic.code


def _counterexample(program: Program) -> Counterexample | None:
    variants = [variant for family in program.families if family.tie is None for variant in _spelled(family)]
    reads = Reads()
    for rank in range(program.layout.num_ranks):
        share = program.at_rank(rank).share
        findings: list[Diagnostic] = []
        for position, variant in enumerate(variants):
            local = localize(variant, share, findings)
            if local is not None:
                reads.note(position, local)
        if findings:
            return Counterexample(str(program.layout), rank, tuple(findings))
    unread = [each for position, variant in enumerate(variants) for each in reads.unread(position, variant)]
    return Counterexample(str(program.layout), None, tuple(unread)) if unread else None


def _spelled(family: Family) -> Iterator[MatchedFamily]:
    """Yield the family as matched by a checkpoint that has everything, once for each way to spell its sources."""
    for alternative in family.alternatives:
        yield MatchedFamily(family, alternative, frozenset(), frozenset(), {(): TensorHeader("BF16", (), -1, 0, 0)})
