"""The cases of a spec, run: each pinned line against what the compiled program does, without a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from mapper.cases.effect import Effect, Side, effects
from mapper.compiler import Program, compile
from mapper.diagnostics import Diagnostic, MapperError, as_objects, finding, render_text
from mapper.folding import runs
from mapper.layout import Layout
from mapper.regions import spell
from mapper.spec.configs import config_of
from mapper.spec.model import Case, Located, Spec

EVIDENCE = "pinned cases"
MISSED, GRABBED, MISROUTED = "M800", "M801", "M802"
KINDS = (MISSED, GRABBED, MISROUTED)
COUNTS = ("cases", "lines", "passed", "missed", "grabbed", "misrouted", "not_run")

PinnedPart = tuple[int, int]
"""A rule of the case's runtime by its number, and one of the rule's parts."""


@dataclass(frozen=True, slots=True)
class CaseResult:
    """One case: its lines, how many of them hold, and the parts whose place in the target they pin."""

    case: Case
    lines: int
    passed: int
    pinned: frozenset[PinnedPart]
    failures: tuple[Diagnostic, ...]


@dataclass(frozen=True, slots=True)
class CaseReport:
    """All cases of a spec. `lines` counts pinned facts; `not_run` those of cases that do not compile."""

    spec: str
    cases: int
    lines: int
    passed: int
    missed: int
    grabbed: int
    misrouted: int
    not_run: int
    failures: tuple[Diagnostic, ...] = field(default=())

    @property
    def ok(self) -> bool:
        return not self.failures

    def to_json(self) -> dict[str, object]:
        """Return the report as an object for JSON."""
        counts = {name: getattr(self, name) for name in COUNTS}
        return {"ok": self.ok, "spec": self.spec, **counts, "failures": as_objects(self.failures), "evidence": EVIDENCE}

    @property
    def summary(self) -> str:
        """The counts in one line."""
        kinds = {"missed": self.missed, "grabbed": self.grabbed, "misrouted": self.misrouted, "not run": self.not_run}
        counts = [f"{self.passed:,} passed", *(f"{count:,} {kind}" for kind, count in kinds.items() if count)]
        nouns = f"{self.cases:,} case{'s' if self.cases != 1 else ''}, {self.lines:,} line{'s' if self.lines != 1 else ''}"
        return f"{nouns}: {', '.join(counts)}"

    def to_text(self) -> str:
        """Return the report for a person."""
        lines = [*(render_text(each) for each in self.failures), f"{self.spec}: {self.summary}", f"  evidence: {EVIDENCE}"]
        return "\n".join(lines)


def run_cases(spec: Spec) -> CaseReport:
    """Return what the cases of a spec say, each checked at its own config, layout, rank and options.

    A line of `maps` holds when the rank copies exactly that box of the source to exactly that box of the target. A side
    without a box is the whole tensor (of the target: this rank's); full axes at the end of a box may be left out. The
    lines of a case for one source are all that the rank does with it. A name under `skips` is left out by a skip, one
    under `unknown` is named by nothing.
    """
    results = list(iter_results(spec))
    failures = tuple(failure for result in results for failure in result.failures)
    lines, passed = sum(result.lines for result in results), sum(result.passed for result in results)
    missed, grabbed, misrouted = (sum(each.code == kind for each in failures) for kind in KINDS)
    not_run = sum(result.lines for result in results if any(each.code not in KINDS for each in result.failures))
    return CaseReport(spec.id, len(results), lines, passed, missed, grabbed, misrouted, not_run, failures)


def iter_results(spec: Spec) -> Iterator[CaseResult]:
    """Yield the result of every case, in file order."""
    return (_run(case, spec) for case in spec.cases)


def _run(case: Case, spec: Spec) -> CaseResult:
    lines = len(case.maps) + len(case.skips) + len(case.unknown)
    try:
        program = _compile(case, spec)
    except MapperError as error:
        return CaseResult(case, lines, 0, frozenset(), tuple(_in_case(each, case) for each in error.diagnostics))
    pinned: set[PinnedPart] = set()
    failures = [
        *_map_failures(case, program, pinned),
        *(failure for line in case.skips for failure in _skip_failures(line, program)),
        *(failure for line in case.unknown for failure in _unknown_failures(line, program)),
    ]
    return CaseResult(case, lines, lines - len(failures), frozenset(pinned), tuple(failures))


def _compile(case: Case, spec: Spec) -> Program:
    config = config_of(spec, case.config) if isinstance(case.config, str) else case.config
    layout = Layout.parse(case.layout)
    return compile(spec, config=config, runtime=case.runtime, layout=layout, rank=case.rank, options=case.options)


def _in_case(diagnostic: Diagnostic, case: Case) -> Diagnostic:
    """Return the finding with the case's place: its own where it has none, beside it where it has."""
    if diagnostic.place is None:
        return replace(diagnostic, place=case.place)
    return replace(diagnostic, related=(*diagnostic.related, ("in the case", case.place)))


# --- maps -----------------------------------------------------------------------------------------------------------


def _map_failures(case: Case, program: Program, pinned: set[PinnedPart]) -> Iterator[Diagnostic]:
    by_source: dict[str, list[tuple[Located, Located]]] = {}
    for source, target in case.maps:
        by_source.setdefault(source.name, []).append((source, target))
    for name, lines in by_source.items():
        found = effects(program, name)
        if found:
            yield from _misrouted(name, lines, found, pinned)
            continue
        nothing = _nothing(program, name)
        for source, target in lines:
            expected = f"go to {_spell(target)}"
            yield finding(MISSED, place=source.place, subject=name, name=name, expected=expected, found=nothing)


def _misrouted(
    name: str, lines: Sequence[tuple[Located, Located]], found: Sequence[Effect], pinned: set[PinnedPart]
) -> Iterator[Diagnostic]:
    left = list(found)
    wrong: list[tuple[Located, Located]] = []
    for source, target in lines:
        effect = next((each for each in left if _is(each, source, target)), None)
        if effect is None:
            wrong.append((source, target))
            continue
        left.remove(effect)
        if effect.claim.source.part is not None:
            pinned.add((effect.claim.family.rule.number, effect.claim.source.part))
    for source, target in wrong:
        actual = f"goes to {_list(left)}" if left else f"goes only to {_list(found)}"
        expected = _spell(target) + (f" from {_box(source)}" if source.box is not None else "")
        yield finding(MISROUTED, place=target.place, subject=name, name=name, expected=expected, found=actual)
    if left and not wrong:
        expected = " and ".join(_spell(target) for _, target in lines)
        place, actual = lines[-1][1].place, f"goes also to {_list(left)}"
        yield finding(MISROUTED, place=place, subject=name, name=name, expected=f"{expected} only", found=actual)


def _is(effect: Effect, source: Located, target: Located) -> bool:
    named = effect.target.name == target.name
    return named and effect.source.is_written_as(source.box) and effect.target.is_written_as(target.box)


def _list(found: Iterable[Effect]) -> str:
    """Spell where a source goes; the box read is named where it is not the whole source."""
    return " and ".join(f"{each.target}{_from(each.source)}" for each in found)


def _from(source: Side) -> str:
    text = str(source)
    return f" from {text.removeprefix(source.name)}" if text != source.name else ""


def _nothing(program: Program, name: str) -> str:
    """Say why a name has no effect on the program's rank."""
    resolution = program.resolve(name)
    if resolution.outcome == "skipped":
        assert resolution.skip is not None
        return f"the skip {resolution.skip.text!r} leaves it out"
    if resolution.outcome == "unknown":
        return "no rule names it"
    ranks = [rank for rank in range(program.layout.num_ranks) if effects(program.at_rank(rank), name)]
    readers = f"rank{'s' if len(ranks) > 1 else ''} {runs(ranks, through='-')}" if ranks else "no rank"
    return f"rank {program.rank} reads nothing of it ({readers} would)"


# --- skips and unknown ----------------------------------------------------------------------------------------------


def _skip_failures(line: Located, program: Program) -> Iterator[Diagnostic]:
    outcome = program.resolve(line.name).outcome
    if outcome == "unknown":
        name, found = line.name, "no skip names it"
        yield finding(MISSED, place=line.place, subject=name, name=name, expected="be skipped", found=found)
    elif outcome != "skipped":
        yield _grabbed(line, program, "skipped")


def _unknown_failures(line: Located, program: Program) -> Iterator[Diagnostic]:
    if program.resolve(line.name).outcome != "unknown":
        yield _grabbed(line, program, "unknown")


def _grabbed(line: Located, program: Program, expected: str) -> Diagnostic:
    resolution = program.resolve(line.name)
    if resolution.skip is not None:
        found, related = f"the skip {resolution.skip.text!r} leaves it out", [("the skip", resolution.skip.place)]
    else:
        rule = resolution.claims[0].family.rule
        found, related = f"the rule for {rule.text!r} reads it", [("the rule", rule.place)]
    known = [(label, place) for label, place in related if place is not None]
    return finding(GRABBED, place=line.place, subject=line.name, related=known, name=line.name, expected=expected, found=found)


def _spell(located: Located) -> str:
    return located.name + _box(located)


def _box(located: Located) -> str:
    return spell(located.box) if located.box is not None else ""
