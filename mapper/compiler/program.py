"""Spec + config + layout + rank + runtime + options -> Program: rule families, ready to meet a checkpoint or a stream."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from mapper import __version__
from mapper.checkpoint import Checkpoint, TensorHeader
from mapper.checkpoint.collector import collector_paused
from mapper.compiler.conflicts import conflicts, keep_conflicts, skip_conflicts
from mapper.compiler.counts import CountRule, count_rules, rerooted_counts, with_counts
from mapper.compiler.exclusions import exclusions_of, with_entries
from mapper.compiler.expand import flatten
from mapper.compiler.families import Context, bound, families_of
from mapper.compiler.finalize import derived_steps, mounted_steps, scoped_steps
from mapper.compiler.mesh import mesh_of
from mapper.compiler.names import Names, config_values, model_dtype, quantization_facts, quantization_section
from mapper.compiler.ranges import counted, range_of
from mapper.compiler.resolve import Resolution, Resolver
from mapper.compiler.sizes import Formats
from mapper.diagnostics import Diagnostic, MapperError, finding
from mapper.expressions import Value
from mapper.layout import Layout, Mesh, placement_faults
from mapper.pattern import IndexValue, PatternError, below, under
from mapper.pattern import parse as parse_pattern
from mapper.plan.derived import DerivedStep, as_keeps
from mapper.plan.family import Family, SkipRule
from mapper.plan.matching import NAME_ONLY, Matching, match
from mapper.plan.plan import Plan, assemble
from mapper.plan.share import Share
from mapper.spec.model import Format, Keep, Let, Runtime, Skip, Spec


@dataclass(frozen=True)
class Program:
    """A spec compiled for one config, runtime, layout and rank. It holds no tensor and imports no torch.

    `domains` are the ranges of all indices, `whole` those before a `where`, and `placed` the mesh axis that owns an index;
    all but `rank` is the same on every rank, so `at_rank` costs nothing. `steps` are what is derived after a load, on every
    rank that has their inputs. `names` gives further patterns and expressions their values.
    """

    spec: Spec
    config: Mapping[str, object]
    runtime: str
    layout: Layout
    rank: int
    options: Mapping[str, Value]
    mesh: Mesh
    domains: Mapping[str, tuple[IndexValue, ...]]
    placed: Mapping[str, str]
    families: tuple[Family, ...]
    skips: tuple[SkipRule, ...]
    keeps: tuple[SkipRule, ...]
    counts: tuple[CountRule, ...]
    names: Names = field(repr=False, compare=False)
    whole: Mapping[str, tuple[IndexValue, ...]] = field(default_factory=dict)
    root: str = field(default="")
    steps: tuple[DerivedStep, ...] = ()

    def at_rank(self, rank: int) -> Program:
        """Return the same program on another rank of the layout."""
        _require_rank(rank, self.layout)
        return replace(self, rank=rank)

    @cached_property
    def share(self) -> Share:
        """What this rank holds."""
        return Share(self.mesh, self.rank, self.domains, self.placed, self.whole)

    @cached_property
    def digests(self) -> dict[str, str]:
        """Return a hash of each input that all ranks must share: version, spec, config, runtime, layout, options, rules."""
        inputs = {
            "version of mapper": __version__,
            "spec": f"{self.spec.id} {self.spec.version} {self.spec.digest}",
            "config": json.dumps(self.config, sort_keys=True, default=str),
            "runtime": self.runtime + self.root,
            "layout": str(self.layout),
            "options": json.dumps(dict(self.options), sort_keys=True, default=str),
            "skips": json.dumps([[each.text, each.why] for each in self.skips]),
        }
        return {what: hashlib.sha256(text.encode()).hexdigest()[:16] for what, text in inputs.items()}

    @cached_property
    def resolver(self) -> Resolver:
        return Resolver(self.families, self.skips)

    def resolve(self, name: str) -> Resolution:
        """Return what happens to one source name on this rank, in time linear in its length."""
        return self.resolver.resolve(name, self.share)

    def match(self, checkpoint: Checkpoint) -> Matching:
        """Return how the checkpoint's tensors are accounted for; the same on every rank."""
        return self._match(checkpoint.tensors)

    def match_names(self, names: Iterable[str]) -> Matching:
        """Return how tensors are accounted for of which only the names are known; shapes and dtypes are not judged."""
        return self._match(dict.fromkeys(names, NAME_ONLY))

    def _match(self, tensors: Mapping[str, TensorHeader]) -> Matching:
        with collector_paused():
            matching = with_counts(match(self.families, self.skips, tensors), self.counts, tensors)
        exclusions = exclusions_of(quantization_section(self.config))
        return with_entries(matching, exclusions) if matching.unknown and exclusions else matching

    def plan(self, checkpoint: Checkpoint) -> Plan:
        """Return this rank's plan for a checkpoint; raises MapperError with every finding."""
        plan = self.assemble(self.match(checkpoint), checkpoint.tensors)
        if plan.findings:
            raise MapperError(plan.findings)
        return plan

    def assemble(self, matching: Matching, tensors: Mapping[str, TensorHeader]) -> Plan:
        """Return this rank's plan from a matching that all ranks share; its findings are not raised."""
        with collector_paused():
            return assemble(matching, self.share, self.keeps, tensors, derived=self.derived)

    @cached_property
    def derived(self) -> tuple[SkipRule, ...]:
        """The rules by which the parameters that steps write are not missed."""
        return as_keeps(self.steps)

    def with_skips(self, skips: Iterable[tuple[str, str]], *, origin: str) -> Program:
        """Return the same program with further skips, each (pattern, why), named in reports as from `origin`.

        The patterns spell names as this program has them. Raises MapperError for a pattern that is none, or that hides
        what a rule loads.
        """
        added, findings = self._further(skips, origin, first=len(self.skips))
        for skip in added:
            findings += [replace(each, hint=f"the skip is {skip.text}") for each in skip_conflicts(self.families, [skip])]
        _raise(findings)
        return replace(self, skips=(*self.skips, *added))

    def with_keeps(self, keeps: Iterable[tuple[str, str]], *, origin: str) -> Program:
        """Return the same program with further keeps, each (pattern, why), named in reports as from `origin`.

        The patterns spell names as this program has them. Raises MapperError for a pattern that is none, or that hides
        what a rule fills.
        """
        added, findings = self._further(keeps, origin, first=len(self.keeps))
        for keep in added:
            findings += [replace(each, hint=f"the keep is {keep.text}") for each in keep_conflicts(self.families, [keep])]
        _raise(findings)
        return replace(self, keeps=(*self.keeps, *added))

    def _further(self, rules: Iterable[tuple[str, str]], origin: str, *, first: int) -> tuple[list[SkipRule], list[Diagnostic]]:
        """Return further skips or keeps, numbered from `first`, and what is wrong with their patterns."""
        added: list[SkipRule] = []
        findings: list[Diagnostic] = []
        for number, (text, why) in enumerate(rules, start=first):
            try:
                template = bound(parse_pattern(text), self.names, self.domains, None)
            except PatternError as error:
                findings.append(finding("M131", subject=text, text=text, problem=error.message))
            except MapperError as error:
                findings += error.diagnostics
            else:
                added.append(SkipRule(number, f"{text} ({origin})", why, (template,), None))
        return added, findings

    def scoped(self, prefix: str) -> Program:
        """Return the same program for names whose `prefix.` a caller has stripped, on both sides, skips included.

        What lies outside of the prefix is not part of it. Raises MapperError where a rule reads from inside and writes
        outside, or the reverse.
        """
        if not prefix:
            return self
        findings: list[Diagnostic] = []
        families = [family for each in self.families if (family := _scoped_family(each, prefix, findings)) is not None]
        steps = scoped_steps(self.steps, prefix, findings)
        if findings:
            raise MapperError(findings)
        return replace(
            self,
            families=tuple(replace(family, number=number) for number, family in enumerate(families)),
            skips=_scoped_rules(self.skips, prefix),
            keeps=_scoped_rules(self.keeps, prefix),
            counts=rerooted_counts(self.counts, lambda each: below(each, prefix)),
            steps=steps,
            root=f"{self.root}-{prefix}",
        )

    def mounted(self, prefix: str) -> Program:
        """Return the same program under a longer prefix, on both sides, for composite models."""
        return replace(
            self,
            families=tuple(_mounted_family(family, prefix) for family in self.families),
            skips=tuple(_mounted_rule(rule, prefix) for rule in self.skips),
            keeps=tuple(_mounted_rule(rule, prefix) for rule in self.keeps),
            counts=rerooted_counts(self.counts, lambda each: [under(each, prefix)]),
            steps=mounted_steps(self.steps, prefix),
            root=f"{self.root}+{prefix}",
        )


def compile(
    spec: Spec,
    *,
    config: Mapping[str, object],
    runtime: str,
    layout: Layout | None = None,
    rank: int = 0,
    options: Mapping[str, Value] | None = None,
) -> Program:
    """Return the program of `spec` for one config, runtime, layout and rank; raises MapperError with every finding."""
    layout = layout or Layout()
    section = spec.runtimes.get(runtime)
    if section is None:
        known = ", ".join(spec.runtimes)
        raise MapperError([finding("M305", place=spec.place, spec=spec.id, runtime=runtime, known=known)])
    _require_rank(rank, layout)
    chosen = _options(spec, options or {})
    _require_architecture(spec, config)
    constants: dict[str, Value] = {**config_values(spec, config), **quantization_facts(config), **chosen}
    lets: dict[str, Let] = {**spec.let, **section.let}
    indices = {**spec.index, **section.index}
    mesh = mesh_of(section, layout, constants, lets)
    constants.update(mesh.sizes)
    constants |= {"redundant_experts": mesh.redundant_experts, "model_dtype": model_dtype(config)}
    names = Names(constants, lets, indices)
    unquantized = Names({**constants, **quantization_facts({})}, lets, indices)
    _check_requirements(section, names)
    whole = {name: range_of(index, names) for name, index in indices.items()}
    domains = {name: counted(index, whole[name], names) for name, index in indices.items()}
    placed = {name: index.axis for name, index in indices.items() if index.axis is not None}
    _raise([fault for name, axis in placed.items() if axis == "ep" for fault in placement_faults(len(domains[name]), mesh)])
    formats: dict[str, Format] = {**spec.formats, **section.formats}
    exclusions = exclusions_of(quantization_section(config))
    context = Context(Formats(formats, names), Formats(formats, unquantized), exclusions, domains, placed, mesh)
    families = families_of(flatten(section.rules, spec.blocks, names), context)
    skips = _named_rules(section.skip, names, domains)
    keeps = _named_rules(section.keep, names, domains)
    _raise(conflicts(families, skips, keeps))
    counts = count_rules(section.counts, spec, chosen, indices, names)
    steps = derived_steps(section.finalize, names, domains, families)
    return Program(
        spec, config, runtime, layout, rank, chosen, mesh, domains, placed, families, skips, keeps, counts, names, whole,
        steps=steps,
    )  # fmt: skip


def _raise(findings: list[Diagnostic]) -> None:
    if findings:
        raise MapperError(findings)


def _require_rank(rank: int, layout: Layout) -> None:
    if not 0 <= rank < layout.num_ranks:
        raise MapperError([finding("M327", rank=rank, layout=str(layout), last=layout.num_ranks - 1)])


def _options(spec: Spec, given: Mapping[str, Value]) -> dict[str, Value]:
    unknown = [name for name in given if name not in spec.options]
    _raise([finding("M306", spec=spec.id, option=name, known=", ".join(spec.options) or "none") for name in unknown])
    return {name: given.get(name, option.default) for name, option in spec.options.items()}


def _require_architecture(spec: Spec, config: Mapping[str, object]) -> None:
    named = config.get("architectures")
    if isinstance(named, list) and named and not set(named) & set(spec.architectures) and not _is_composite(config):
        found = ", ".join(map(str, named))
        raise MapperError([finding("M307", place=spec.place, found=found, spec=spec.id, known=", ".join(spec.architectures))])


def _is_composite(config: Mapping[str, object]) -> bool:
    """A composite model names its own architecture; the text model's sizes lie in `text_config`."""
    return isinstance(config.get("text_config"), Mapping)


def _check_requirements(section: Runtime, names: Names) -> None:
    _raise(
        [
            finding("M302", place=each.place, runtime=section.name, that=each.that.text, why=each.why)
            for each in section.requires
            if not names.evaluate(each.that, {}, each.place)
        ]
    )


def _named_rules(
    rules: Sequence[Skip | Keep], names: Names, domains: Mapping[str, tuple[IndexValue, ...]]
) -> tuple[SkipRule, ...]:
    return tuple(
        _named_rule(number, rule, names, domains)
        for number, rule in enumerate(rules)
        if rule.when is None or names.evaluate(rule.when, {}, rule.place)
    )


def _named_rule(number: int, rule: Skip | Keep, names: Names, domains: Mapping[str, tuple[IndexValue, ...]]) -> SkipRule:
    template = bound(rule.pattern, names, domains, rule.place)
    named = SkipRule(number, rule.id or rule.pattern.text, rule.why, (template,), rule.place)
    if isinstance(rule, Keep) or rule.copy_of is None:
        return named
    original = bound(rule.copy_of, names, domains, rule.place)
    lacking = [index for index in original.indices if index not in template.indices]
    if lacking:
        problem = f"{rule.copy_of.text!r} has the index {lacking[0]!r}, which {rule.pattern.text!r} does not have"
        raise MapperError([finding("M315", place=rule.place, subject=rule.pattern.text, problem=problem)])
    return replace(named, copy_of=original)


def _scoped_rules(rules: tuple[SkipRule, ...], prefix: str) -> tuple[SkipRule, ...]:
    scoped = (_scoped_rule(rule, prefix) for rule in rules)
    return tuple(rule for rule in scoped if rule.templates)


def _scoped_rule(rule: SkipRule, prefix: str) -> SkipRule:
    """Return the rule below a prefix; a copy whose original lies outside is still left out, and not compared."""
    templates = tuple(inner for each in rule.templates for inner in below(each, prefix))
    original = below(rule.copy_of, prefix) if rule.copy_of is not None else ()
    return replace(rule, templates=templates, copy_of=original[0] if original else None)


def _mounted_rule(rule: SkipRule, prefix: str) -> SkipRule:
    templates = tuple(under(each, prefix) for each in rule.templates)
    return replace(rule, templates=templates, copy_of=under(rule.copy_of, prefix) if rule.copy_of is not None else None)


def _scoped_family(family: Family, prefix: str, findings: list[Diagnostic]) -> Family | None:
    targets = below(family.target, prefix)
    alternatives = tuple(
        tuple((source, below(source.template, prefix)) for source in alternative) for alternative in family.alternatives
    )
    inside = [bool(found) for alternative in alternatives for _, found in alternative]
    ties = below(family.tie, prefix) if family.tie is not None else ()
    if family.tie is not None:
        inside.append(bool(ties))
    if not targets and not any(inside):
        return None
    if not targets or not all(inside):
        findings.append(
            finding("M317", place=family.rule.place, subject=str(family.target), rule=family.rule.text, prefix=prefix)
        )
        return None
    spelled = [index for index in family.target.indices if index not in targets[0].indices and index in family.placed]
    if spelled:
        index, axis = spelled[0], family.placed[spelled[0]]
        findings.append(finding("M318", place=family.rule.place, subject=prefix, prefix=prefix, index=index, axis=axis))
        return None
    return replace(
        family,
        target=targets[0],
        tie=ties[0] if ties else None,
        alternatives=tuple(tuple(replace(source, template=found[0]) for source, found in each) for each in alternatives),
    )


def _mounted_family(family: Family, prefix: str) -> Family:
    return replace(
        family,
        target=under(family.target, prefix),
        tie=under(family.tie, prefix) if family.tie is not None else None,
        alternatives=tuple(
            tuple(replace(source, template=under(source.template, prefix)) for source in each) for each in family.alternatives
        ),
    )
