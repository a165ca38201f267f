"""What the structure says of a mutant: refused by a check, or accepted; and where it does something else than the spec.

A mutant is refused where its text does not check, where it does not compile on a layout that the spec takes, or where
`mapper check` has findings for the headers and the model's parameters that fit the spec. Values are not looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from mapper.compiler import Program
from mapper.diagnostics import Diagnostic, MapperError
from mapper.lint.advice import doubtful_cuts
from mapper.plan.plan import LocalFamily, Plan, Step
from mapper.plan.targets import fit
from mapper.regions import Box, spell
from mapper.report import check
from mapper.spec.check import check_spec
from mapper.spec.model import Spec
from mapper.testing.mutation.mutant import Mutant
from mapper.testing.mutation.trials import Setting, Trial, Variant, checkpoint_of, names_of

By = Literal["text", "compile", "check", "advice"]


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a mutant that no check refuses does something else than the spec; `source` is a tensor that goes elsewhere."""

    setting: Setting
    rank: int
    sentence: str
    source: str | None = None

    def __str__(self) -> str:
        return f"on {self.setting}, rank {self.rank}: {self.sentence}"


@dataclass(frozen=True, slots=True)
class StructureVerdict:
    """`by` is the check that refuses the mutant, None where all accept it; advice of lint is told apart, for it fails nothing.

    `difference` is None where the mutant does exactly what the spec does, everywhere it was tried.
    """

    by: By | None
    finding: Diagnostic | None = None
    setting: Setting | None = None
    difference: Difference | None = None

    def __str__(self) -> str:
        assert self.finding is not None, "only a verdict that refuses has a text"
        where = f" on {self.setting}" if self.setting is not None else ""
        return f"{self.by}: {self.finding.code} {self.finding.message.splitlines()[0]}{where}"


def judge_structure(mutant: Mutant, spec: Spec, trials: Sequence[Trial]) -> StructureVerdict:
    """Return what the structure says of a mutant of `spec`."""
    found = check_spec(mutant.spec)
    if found:
        return StructureVerdict("text", found[0])
    difference: Difference | None = None
    for trial in trials:
        if trial.setting.runtime not in mutant.runtimes:
            continue
        verdict = _judge(mutant, trial, is_difference_wanted=difference is None)
        if verdict.by is not None:
            return verdict
        difference = difference or verdict.difference
    advice = [each for each in doubtful_cuts(mutant.spec) if each.place == mutant.place]
    known = set(doubtful_cuts(spec)) if advice else set()
    new = [each for each in advice if each not in known]
    return StructureVerdict("advice" if new else None, new[0] if new else None, None, difference)


def _judge(mutant: Mutant, trial: Trial, *, is_difference_wanted: bool) -> StructureVerdict:
    setting = trial.setting
    try:
        program = setting.compile(mutant.spec)
    except MapperError as error:
        return StructureVerdict(None) if trial.program is None else StructureVerdict("compile", error.diagnostics[0], setting)
    if trial.program is None:
        return StructureVerdict(
            None, difference=Difference(setting, 0, "the spec refuses this layout, and the mutant takes it")
        )
    if _is_same(program, trial.program):
        return StructureVerdict(None)
    difference = None
    for variant in trial.variants:
        report = check(program, variant.checkpoint, targets=variant.targets)
        if report.findings:
            return StructureVerdict("check", report.findings[0], setting)
        if is_difference_wanted and difference is None:
            difference = _difference(program, variant, setting)
    for variant in trial.variants if mutant.without is not None else ():
        found = _fault(mutant, program, trial.program, variant)
        if found is not None:
            return StructureVerdict("check", found, setting)
    return StructureVerdict(None, difference=difference)


def _is_same(program: Program, own: Program) -> bool:
    """Whether two programs do the same, rule by rule."""
    return (
        program.families == own.families
        and program.skips == own.skips
        and program.keeps == own.keeps
        and (program.domains == own.domains and program.placed == own.placed)
    )


def _fault(mutant: Mutant, program: Program, own: Program, variant: Variant) -> Diagnostic | None:
    """Return what a check says of a checkpoint without a rule's sources, where only the mutant takes the headers alone.

    Such a checkpoint leaves a parameter of the model unfilled.
    """
    lost = names_of(each for each in own.families if each.rule.place == mutant.without)
    headers = {name: header for name, header in variant.checkpoint.tensors.items() if name not in lost}
    if len(headers) == len(variant.checkpoint.tensors):
        return None
    checkpoint = checkpoint_of(headers)
    if not own.match(checkpoint).findings or program.match(checkpoint).findings:
        return None
    report = check(program, checkpoint, targets=variant.targets)
    return report.findings[0] if report.findings else None


# --- differences ----------------------------------------------------------------------------------------------------


def _difference(program: Program, variant: Variant, setting: Setting) -> Difference | None:
    """Return the first thing that the mutant's plans do otherwise; no check has found anything."""
    matching = program.match(variant.checkpoint)
    for rank, own in enumerate(variant.plans):
        plan = program.at_rank(rank).assemble(matching, variant.checkpoint.tensors)
        for sentence, source in _iter_differences(plan, own, variant):
            return Difference(setting, rank, sentence, source)
    return None


def _iter_differences(plan: Plan, own: Plan, variant: Variant) -> Iterator[tuple[str, str | None]]:
    is_same = list(map(_moved, plan.families)) == list(map(_moved, own.families))
    expected, found = ({}, {}) if is_same else (_by_box(own), _by_box(plan))
    for key in {**expected, **found} if expected != found else ():
        if expected.get(key) != found.get(key):
            target, box = key
            now, before = found.get(key), expected.get(key)
            source = before.source if before is not None else now.source if now is not None else None
            yield f"{target}{spell(box)} has {_spell(now)} in place of {_spell(before)}", source
    padding, own_padding = (set[tuple[str, Box, float]](),) * 2 if is_same else (set(plan.padding()), set(own.padding()))
    for target, box, value in sorted(padding - own_padding):
        yield f"the padding of {target}{spell(box)} holds {value:g}", None
    for name in sorted(set(plan.matching.skipped) ^ set(own.matching.skipped)):
        yield f"{name} is {'skipped' if name in plan.matching.skipped else 'not skipped'}", name
    kept, own_kept = (set(fit(each, variant.targets[own.rank]).kept) for each in (plan, own))
    for name in sorted(kept ^ own_kept):
        yield f"{name} is {'kept' if name in kept else 'not kept'}", None


def _moved(local: LocalFamily) -> object:
    """Return all of a family on one rank that decides what is copied where, however its cut is written."""
    return (
        replace(local.matched, family=replace(local.matched.family, axes=None, alternatives=())),
        local.values,
        local.shape,
        local.pieces,
    )


def _by_box(plan: Plan) -> dict[tuple[str, Box], Step]:
    return {(step.target, step.target_box): step for step in plan.steps()}


def _spell(step: Step | None) -> str:
    return "nothing" if step is None else f"{step.source}{spell(step.source_box)}"
