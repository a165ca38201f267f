"""A plan against the parameters that a model really has: names, local shapes and dtypes, before anything is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from mapper.diagnostics import Diagnostic, finding
from mapper.ops.dtypes import torch_name
from mapper.plan.family import RuleInfo
from mapper.plan.plan import Plan, PlannedTarget


@dataclass(frozen=True, slots=True)
class DeclaredTarget:
    """A parameter of the model: local shape, torch dtype name, and the first name of its storage where it has several."""

    shape: tuple[int, ...]
    dtype: str
    storage: str


@dataclass(frozen=True, slots=True)
class Fit:
    """How a plan fits a model: what is kept by which rule, and everything that does not fit."""

    kept: Mapping[str, str]
    findings: tuple[Diagnostic, ...]


def fit(plan: Plan, declared: Mapping[str, DeclaredTarget]) -> Fit:
    """Return how the plan's targets and the model's parameters fit.

    A parameter under several names is filled through one of them; a tied target needs no storage of its own.
    """
    findings: list[Diagnostic] = []
    filled = set()
    for target in plan.targets.values():
        model = declared.get(target.name)
        if model is None:
            findings += _absent(plan, target, declared)
            continue
        filled.add(model.storage)
        if target.dtype:  # without a source its dtype is unknown, and the missing source has been reported
            findings += _mismatch(plan, target, model)
    kept: dict[str, str] = {}
    names: dict[str, list[str]] = {}
    for name, model in declared.items():
        if model.storage not in filled:
            names.setdefault(model.storage, []).append(name)
    for storage, spelled in names.items():
        keep = next((rule for rule in (*plan.keeps, *plan.derived) if any(map(rule.matches, spelled))), None)
        if keep is None:
            findings.append(_unfilled(plan, storage, declared[storage]))
        else:
            kept[storage] = keep.text
    return Fit(kept, tuple(findings))


def _absent(plan: Plan, target: PlannedTarget, declared: Mapping[str, DeclaredTarget]) -> list[Diagnostic]:
    if target.tied_to is not None and target.tied_to in declared:
        return []
    near = get_close_matches(target.name, declared, n=1, cutoff=0.8)
    hint = f"the model has {near[0]!r}" if near else ""
    rule = _rule_of(plan, target)
    return [finding("M531", place=rule.place, subject=target.name, hint=hint, rule=rule.text, name=target.name)]


def _mismatch(plan: Plan, target: PlannedTarget, model: DeclaredTarget) -> list[Diagnostic]:
    place = _rule_of(plan, target).place
    expected = torch_name(target.dtype)
    findings = []
    if target.shape != model.shape:
        found, given = list(model.shape), list(target.shape)
        findings.append(finding("M532", place=place, subject=target.name, name=target.name, found=found, expected=given))
    if expected != model.dtype:
        findings.append(
            finding("M533", place=place, subject=target.name, name=target.name, found=model.dtype, expected=expected)
        )
    return findings


def _unfilled(plan: Plan, name: str, model: DeclaredTarget) -> Diagnostic:
    near = get_close_matches(name, plan.targets, n=1, cutoff=0.8)
    hint = f"a rule fills {near[0]!r}" if near else ""
    return finding("M530", subject=name, hint=hint, name=name, shape=list(model.shape))


def _rule_of(plan: Plan, target: PlannedTarget) -> RuleInfo:
    return next(each.family.rule for each in plan.matching.families if each.family.rule.number == target.rules[0])
