"""What mapper proves and writes, and what is left to the engine's own loader, decided before anything is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from mapper.checkpoint import Checkpoint
from mapper.checkpoint.collector import collector_paused
from mapper.compiler import Program
from mapper.compiler.options import with_options
from mapper.diagnostics import Diagnostic, MapperError
from mapper.plan.matching import source_names, targets_fed
from mapper.plan.plan import LocalFamily, Plan, source_names_read, target_names
from mapper.plan.targets import fit
from mapper.transfer.bind import Binding, bind, declare

UNFILLED, LACKING = "M530", "M531"
DIFFERS = ("M532", "M533")
"""The model has the planned parameter in another shape or dtype: its quantisation has a layout of its own."""


@dataclass(frozen=True, slots=True)
class Division:
    """A proved plan and its binding, and what it leaves out.

    `delegated` gives, by name, why a parameter is left to the engine; `handed_over` are the sources that such parameters may
    need. Both are empty where the spec covers the model.
    """

    plan: Plan
    binding: Binding
    delegated: Mapping[str, str] = field(default_factory=dict)
    handed_over: tuple[str, ...] = ()


def divide(program: Program, checkpoint: Checkpoint, tensors: Mapping[str, torch.Tensor]) -> Division:
    """Return the division; raises MapperError for everything that no layout of the model's own explains.

    A parameter is left to the engine where the model's tensor itself differs from the planned one, or where no rule fills
    it. A parameter that is as planned never is: what its sources lack is an error.
    """
    with collector_paused():
        plan = program.assemble(program.match(checkpoint), checkpoint.tensors)
        declared = declare(tensors)
        found = fit(plan, declared).findings
        delegated = _delegated(program, tensors, found)
        if not delegated:
            _raise([*plan.findings, *with_options(program, plan.tensors, declared, found)])
            return Division(plan, bind(program, plan, tensors))
        own, needed = _sources_of(plan, delegated)
        elsewhere = {name for each in plan.matching.families for source in each.sources for name in source_names(source)}
        excused = {*delegated, *own, *elsewhere, *plan.matching.unknown} - needed
        _raise([each for each in (*plan.findings, *found) if each.subject not in excused])
        proved = _without(plan, delegated)
        bound = {name: tensor for name, tensor in tensors.items() if name not in delegated}
        covered = plan.matching.skipped.keys() | (needed - own)
        left = [name for name in checkpoint.tensors if name not in covered]
        present = {name: why for name, why in delegated.items() if name in tensors}
        return Division(proved, bind(program, proved, bound), present, tuple(left))


def _delegated(program: Program, tensors: Mapping[str, torch.Tensor], found: tuple[Diagnostic, ...]) -> dict[str, str]:
    """Return why each of these parameters is left to the engine.

    A planned one that differs must have a loader of its own; one that the model lacks must have others in its place, in the
    same module; and one that no rule fills must not be a target whose sources happen to be absent.
    """
    delegated: dict[str, str] = {}
    for each in found:
        tensor = tensors.get(each.subject)
        if (each.code in DIFFERS and hasattr(tensor, "weight_loader")) or (
            each.code == UNFILLED and not any(family.target.match(each.subject) is not None for family in program.families)
        ):
            delegated.setdefault(each.subject, each.message)
    modules = {_module_of(name) for name in delegated}
    for each in found:
        if each.code == LACKING and _module_of(each.subject) in modules:
            delegated[each.subject] = each.message
    whys = {id(tensors[name]): why for name, why in delegated.items() if name in tensors}
    return {name: whys[id(tensor)] for name, tensor in tensors.items() if id(tensor) in whys} | delegated


def _module_of(name: str) -> str:
    return name.rpartition(".")[0]


def _sources_of(plan: Plan, delegated: Mapping[str, str]) -> tuple[set[str], set[str]]:
    """Return the sources that delegated targets have, and those that the other targets of this rank have."""
    own: set[str] = set()
    needed: set[str] = set()
    for local in plan.families:
        names = dict(zip(local.combinations, target_names(local), strict=True))
        left = {combination for combination, name in names.items() if name in delegated}
        if not left:
            needed.update(name for read in source_names_read(local) for name in read)
            continue
        for source in local.matched.sources:
            for name, fed in zip(source_names(source), targets_fed(local.matched.family, source), strict=True):
                if not left.isdisjoint(fed):
                    own.add(name)
                if any(combination in names and combination not in left for combination in fed):
                    needed.add(name)
    return own, needed


def _without(plan: Plan, delegated: Mapping[str, str]) -> Plan:
    """Return the plan without the delegated targets, and without findings."""
    families = [kept for local in plan.families if (kept := _family_without(local, delegated)) is not None]
    targets = {name: target for name, target in plan.targets.items() if name not in delegated}
    return replace(plan, families=tuple(families), targets=targets, findings=())


def _family_without(local: LocalFamily, delegated: Mapping[str, str]) -> LocalFamily | None:
    pairs = list(zip(local.combinations, target_names(local), strict=True))
    absent = {combination for combination, name in pairs if name in delegated}
    if not absent:
        return local
    if len(absent) == len(pairs):
        return None
    matched = replace(local.matched, absent=local.matched.absent | absent)
    return replace(local, matched=matched)


def _raise(findings: list[Diagnostic]) -> None:
    if findings:
        raise MapperError(findings)
