"""Every mutant tried against the structure and against the evidence, each on its own account."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from mapper.diagnostics import MapperError, finding
from mapper.spec.model import Spec
from mapper.testing.mutation.case_to_add import case_to_add
from mapper.testing.mutation.evidence import Evidence, pinned_cases
from mapper.testing.mutation.mutant import Mutant
from mapper.testing.mutation.mutants import mutants_of
from mapper.testing.mutation.report import MutationReport, Outcome
from mapper.testing.mutation.structure import judge_structure
from mapper.testing.mutation.trials import MAX_RANKS, Trial, iter_trials

Progress = Callable[[Sequence[Mutant]], Iterable[Mutant]]


def mutate(
    spec: Spec,
    *,
    mutants: Sequence[Mutant] | None = None,
    evidence: Sequence[Evidence] = (),
    max_ranks: int = MAX_RANKS,
    progress: Progress = iter,
) -> MutationReport:
    """Return what finds each mutant of a spec (None: all of them), on layouts of up to `max_ranks` ranks.

    The spec's own cases are evidence always, `evidence` is more of it. `progress` goes through the mutants. Raises
    MapperError M816 where no config is known with which the spec compiles.
    """
    every = (pinned_cases(spec), *evidence)
    trials = tuple(iter_trials(spec, max_ranks=max_ranks))
    if all(trial.program is None for trial in trials):
        raise MapperError([finding("M816", place=spec.place, subject=spec.id, spec=spec.id)])
    chosen = mutants_of(spec) if mutants is None else mutants
    outcomes = tuple(_outcome(each, spec, trials, every) for each in progress(chosen))
    proved = [trial for trial in trials if trial.program is not None]
    return MutationReport(
        spec=spec.id,
        outcomes=outcomes,
        evidence=tuple(each.name for each in every),
        num_programs=len(proved),
        num_layouts=len({str(trial.setting.layout) for trial in proved}),
        max_ranks=max_ranks,
    )


def _outcome(mutant: Mutant, spec: Spec, trials: Sequence[Trial], evidence: Sequence[Evidence]) -> Outcome:
    verdict = judge_structure(mutant, spec, trials)
    killer = _killer(mutant, evidence)
    survives = verdict.by is None and killer is None
    case = case_to_add(mutant, spec, verdict.difference) if survives and verdict.difference is not None else ""
    return Outcome(
        mutant=mutant,
        structure=None if verdict.by is None else str(verdict),
        is_advice=verdict.by == "advice",
        evidence=killer,
        difference=None if verdict.difference is None else str(verdict.difference),
        is_same_shape=mutant.parts is not None and _is_same_shape(mutant, trials),
        case=case,
    )


def _killer(mutant: Mutant, evidence: Sequence[Evidence]) -> str | None:
    """Return the first failure of the first evidence that has one."""
    for each in evidence:
        try:
            failure = next(iter(each.failures(mutant.spec, mutant.runtimes)), None)
        except MapperError:  # it does not compile, which is for the structure to say
            continue
        if failure is not None:
            return f"{each.name}: {failure}"
    return None


def _is_same_shape(mutant: Mutant, trials: Sequence[Trial]) -> bool:
    """Whether the two parts that changed places are equally long in every program, so that no shape can tell."""
    assert mutant.parts is not None, "two parts changed places"
    first, second = mutant.parts
    pairs = {
        (sizes[first], sizes[second])
        for trial in trials
        if trial.program is not None
        for family in trial.program.families
        if family.rule.place == mutant.rule and family.axes is not None and family.parts_axis is not None
        for sizes in [family.axes[family.parts_axis].parts]
        if len(sizes) > second
    }
    return bool(pairs) and all(one == other for one, other in pairs)
