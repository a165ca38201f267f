"""What was found of each mutant, in two columns that are never added up: structure and evidence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mapper.diagnostics import Diagnostic, as_objects, finding, render_text
from mapper.testing.mutation.mutant import KINDS, Mutant

COLUMNS = ("mutants", "structure", "evidence", "survived", "equivalent")
STRUCTURE = "names, shapes, coverage and conservation, against headers and model parameters that fit the spec"
ALONE = "no case can tell it apart: it takes values recorded from the engine's own loader"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One mutant: what the structure says against it, what the evidence says, and where it differs from the spec.

    `is_advice` marks a structure that only warns. `case` is one to add, for a mutant that nothing finds.
    """

    mutant: Mutant
    structure: str | None
    is_advice: bool
    evidence: str | None
    difference: str | None
    is_same_shape: bool
    case: str = ""

    @property
    def survived(self) -> bool:
        """Whether the mutant is another spec and nothing finds it."""
        return self.structure is None and self.evidence is None and self.difference is not None

    @property
    def is_equivalent(self) -> bool:
        """Whether the mutant does the same as the spec, everywhere it was tried, and nothing speaks against it."""
        return self.structure is None and self.evidence is None and self.difference is None


@dataclass(frozen=True, slots=True)
class MutationReport:
    """All mutants of a spec. `num_programs` is how many programs of the spec they were tried on."""

    spec: str
    outcomes: tuple[Outcome, ...]
    evidence: tuple[str, ...]
    num_programs: int
    num_layouts: int
    max_ranks: int

    @property
    def ok(self) -> bool:
        return not self.survivors

    @property
    def survivors(self) -> tuple[Outcome, ...]:
        return tuple(each for each in self.outcomes if each.survived)

    @property
    def findings(self) -> tuple[Diagnostic, ...]:
        """One finding for each survivor."""
        return tuple(_survived(each) for each in self.survivors)

    def counts(self) -> dict[str, dict[str, int]]:
        """Return the numbers of each kind that there is, by column."""
        found: dict[str, dict[str, int]] = {}
        for kind in KINDS:
            own = [each for each in self.outcomes if each.mutant.kind == kind]
            if own:
                found[kind] = _row(own)
        return found

    def to_json(self) -> dict[str, object]:
        """Return the report as an object for JSON."""
        return {
            "ok": self.ok,
            "spec": self.spec,
            "kinds": self.counts(),
            "total": _row(list(self.outcomes)),
            "same_shape_swaps": self._swaps(),
            "only_advised": sum(each.is_advice for each in self.outcomes),
            "programs": self.num_programs,
            "layouts": self.num_layouts,
            "max_ranks": self.max_ranks,
            "mutants": [_as_object(each) for each in self.outcomes],
            "findings": as_objects(self.findings),
            "structure": STRUCTURE,
            "evidence": list(self.evidence),
        }

    def to_text(self) -> str:
        """Return the report for a person."""
        return "\n".join([*(render_text(each) for each in self.findings), self.summary])

    @property
    def summary(self) -> str:
        """The table of kinds, and what its columns mean."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield (
            f"{self.spec}: {len(self.outcomes):,} mutants, tried on {self.num_programs:,} programs, the layouts of up to "
            f"{self.max_ranks} ranks"
        )
        rows = {**self.counts(), "all": _row(list(self.outcomes))}
        yield f"  {'':<14}" + "".join(f"{column:>12}" for column in COLUMNS)
        for kind, row in rows.items():
            yield f"  {kind:<14}" + "".join(f"{row[column] or '-':>12}" for column in COLUMNS)
        yield f"  structure  {STRUCTURE}"
        yield f"  evidence   {' and '.join(self.evidence)}"
        swaps = self._swaps()
        if swaps["mutants"]:
            yield (
                f"  swaps of sources of equal shape, which no structure can tell apart: {swaps['mutants']}, "
                f"of which evidence finds {swaps['evidence']}"
            )
        advised = sum(each.is_advice for each in self.outcomes)
        if advised:
            yield f"  {advised} of the structure are advice of lint only, which fails nothing"
        equivalent = sum(each.is_equivalent for each in self.outcomes)
        if equivalent:
            yield f"  {equivalent} do what the spec does, on everything tried"
        yield "  ok: each of the others is found" if self.ok else f"  {len(self.survivors):,} survived"

    def _swaps(self) -> dict[str, int]:
        return _row([each for each in self.outcomes if each.is_same_shape])


def _row(outcomes: list[Outcome]) -> dict[str, int]:
    return {
        "mutants": len(outcomes),
        "structure": sum(each.structure is not None for each in outcomes),
        "evidence": sum(each.evidence is not None for each in outcomes),
        "survived": sum(each.survived for each in outcomes),
        "equivalent": sum(each.is_equivalent for each in outcomes),
    }


def _as_object(outcome: Outcome) -> dict[str, object]:
    mutant = outcome.mutant
    return {
        "id": mutant.id,
        "kind": mutant.kind,
        "place": str(mutant.place),
        "sentence": mutant.sentence,
        "structure": outcome.structure,
        "only_advised": outcome.is_advice,
        "evidence": outcome.evidence,
        "difference": outcome.difference,
        "same_shape": outcome.is_same_shape,
        "survived": outcome.survived,
        "equivalent": outcome.is_equivalent,
    }


def _survived(outcome: Outcome) -> Diagnostic:
    mutant = outcome.mutant
    hint = f"add under `cases`, if the spec is right:\n{outcome.case}" if outcome.case else ALONE
    assert outcome.difference is not None, "a survivor differs from the spec"
    return finding(
        "M832", place=mutant.place, subject=mutant.id, hint=hint, mutant=mutant.sentence, difference=outcome.difference
    )
