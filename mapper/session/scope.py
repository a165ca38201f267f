"""What an update is about: the whole model, some modules, or a list of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from mapper.checkpoint import Checkpoint, TensorHeader
from mapper.compiler import Program
from mapper.compiler.families import as_products, bound
from mapper.compiler.resolve import is_here
from mapper.diagnostics import Diagnostic, MapperError, finding
from mapper.finalize import targets_on
from mapper.messages.suggest import did_you_mean
from mapper.pattern import PatternError, Template
from mapper.pattern import parse as parse_pattern
from mapper.plan.family import Family
from mapper.plan.share import Share
from mapper.regions import Box, uncovered, whole
from mapper.session.groups import partners
from mapper.session.intake import Intakes

Manifest = Mapping[str, TensorHeader | None] | Set[str] | Checkpoint
ScopeArgument = Literal["all"] | Sequence[str] | Manifest


@dataclass(frozen=True, slots=True)
class Scope:
    """The targets of this rank that an update is about (None: all), and the sources that may come (None: those of the targets).

    `templates` are the module patterns of a scope of modules; `text` is the scope as a report tells it.
    """

    text: str
    targets: frozenset[str] | None = None
    names: frozenset[str] | None = None
    templates: tuple[Template, ...] = ()

    @property
    def key(self) -> object:
        """What is equal for two scopes of one program that ask for the same."""
        return self.text, self.names

    def takes(self, name: str, program: Program, intakes: Intakes) -> bool:
        """Return whether the source may be fed: for modules, whether it goes to one of them on any rank, or is skipped."""
        if self.names is not None:
            return name in self.names
        if self.targets is None:
            return True
        resolution = intakes.resolve(name)
        if resolution.outcome in ("skipped", "unknown"):
            return True
        return any(
            _matches(self.templates, target)
            for claim in resolution.claims
            for target in claim.family.target.names(
                {
                    index: [claim.bindings[index]] if index in claim.bindings else claim.family.domains[index]
                    for index in claim.family.target.indices
                }
            )
        )

    def families(self, families: Sequence[Family]) -> list[Family]:
        """Return the families, which are those of one rank, cut down to the targets of the scope."""
        if self.targets is None:
            return list(families)
        return [part for family in families for part in _narrowed(family, self.targets)]


def scope_of(scope: ScopeArgument, program: Program, intakes: Intakes) -> Scope:
    """Return the scope that the argument means; raises MapperError with everything that is wrong with it."""
    if isinstance(scope, Checkpoint):
        return _of_manifest(scope.tensors, intakes, program)
    if isinstance(scope, Mapping):
        return _of_manifest(scope, intakes, program)
    if isinstance(scope, Set):
        return _of_manifest(dict.fromkeys(sorted(scope)), intakes, program)
    if isinstance(scope, str):
        if scope == "all":
            return Scope("all")
        raise MapperError([finding("M616", subject=scope, scope=scope, problem="it is one text")])
    return _of_modules(list(scope), program)


def on_rank(family: Family, share: Share) -> Family | None:
    """Return the family cut down to what this rank reads, or None where that is nothing."""
    if not share.holds(family.stage):
        return None
    domains = {index: share.owned(index, values) for index, values in family.domains.items()}
    if not all(domains[index] for index in family.target.indices):
        return None
    return _with_domains(family, domains)


def _with_domains(family: Family, domains: Mapping[str, tuple[int | str, ...]]) -> Family:
    return replace(
        family,
        domains=domains,
        alternatives=tuple(
            tuple(replace(source, domains={index: domains[index] for index in source.domains}) for source in alternative)
            for alternative in family.alternatives
        ),
    )


def _narrowed(family: Family, targets: Set[str]) -> list[Family]:
    if family.tie is not None:
        return [family]  # follows its twin
    indices = family.target.indices
    combinations = list(product(*(family.domains[index] for index in indices)))
    names = family.target.names({index: family.domains[index] for index in indices})
    inside = [each for each, name in zip(combinations, names, strict=True) if name in targets]
    if len(inside) == len(combinations):
        return [family]
    if not inside:
        return []
    return [_with_domains(family, {**family.domains, **part}) for part in as_products(list(indices), inside)]


def _of_modules(patterns: Sequence[str], program: Program) -> Scope:
    templates: list[Template] = []
    findings: list[Diagnostic] = []
    everywhere = [name for family in program.families for name in family.target.names(family.domains)]
    for text in patterns:
        try:
            found = [bound(parse_pattern(each), program.names, program.domains, None) for each in (text, f"{text}.**")]
        except PatternError as error:
            findings.append(finding("M131", subject=text, text=text, problem=error.message))
            continue
        except MapperError as error:
            findings += error.diagnostics
            continue
        if not any(_matches(found, name) for name in everywhere):
            hint = did_you_mean(text, {name.rpartition(".")[0] for name in everywhere})
            findings.append(finding("M616", subject=text, hint=hint, scope=text, problem="it names no target"))
        templates += found
    if not patterns:
        findings.append(finding("M616", scope="[]", problem="it is empty"))
    if findings:
        raise MapperError(findings)
    here = targets_on(program, None)
    targets = frozenset(name for name in here if _matches(templates, name))
    return Scope(", ".join(patterns), targets, None, tuple(templates))


def _of_manifest(headers: Mapping[str, TensorHeader | None], intakes: Intakes, program: Program) -> Scope:
    """Return the scope of exactly these tensors, with all that their names and headers say checked."""
    findings: list[Diagnostic] = []
    targets: set[str] = set()
    for name, header in headers.items():
        resolution = intakes.resolve(name)
        if resolution.outcome == "unknown":
            findings.append(finding("M502", subject=name, name=name))
        lacking = [partner for partner in partners(resolution.claims) if partner not in headers]
        findings += [finding("M621", subject=name, name=name, partner=partner) for partner in lacking]
        for claim in resolution.claims:
            if is_here(claim, program.share):
                targets.update(intakes.target_names(claim))
        if header is not None:
            findings += intakes.faults(name, header)
    if findings:
        raise MapperError(findings)
    return Scope(f"{len(headers):,} tensors", frozenset(targets), frozenset(headers))


def covered_by(names: Set[str], intakes: Intakes) -> frozenset[str]:
    """Return the targets that these sources fill as a whole."""
    boxes: dict[str, list[Box]] = {}
    for name in names:
        for target, box in intakes.regions(name):
            boxes.setdefault(target, []).append(box)
    declared = intakes.declared
    return frozenset(
        target for target, found in boxes.items()
        if target in declared and not uncovered(whole(declared[target].shape), found)
    )  # fmt: skip


def _matches(templates: Sequence[Template], name: str) -> bool:
    return any(template.match(name) is not None for template in templates)
