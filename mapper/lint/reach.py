"""Rules, skips and keeps that no config reaches. Those that a spec inherits are judged where they are written."""

from __future__ import annotations

from collections.abc import Iterator

from mapper.compiler.expand import FlatRule
from mapper.compiler.names import Names
from mapper.diagnostics import Diagnostic, Place, finding
from mapper.expressions import Expression
from mapper.lint.advice import flat_rules
from mapper.lint.programs import UNMET, UNSUPPORTED, Attempts
from mapper.plan.family import SkipRule
from mapper.spec.model import Spec


def unreached(spec: Spec, attempts: Attempts) -> Iterator[Diagnostic]:
    """Yield M814 to M817 for what no compiled program has; nothing of a runtime whose rules did not compile."""
    if not attempts.all:
        yield finding("M816", place=spec.place, subject=spec.id, severity="warning", spec=spec.id)
        return
    compiled = {attempt.runtime for attempt, _ in attempts.programs}
    for name, runtime in spec.runtimes.items():
        codes = {each.code for attempt in attempts.of(name) for each in attempt.findings}
        if name not in compiled and codes == {UNMET}:
            yield finding("M817", place=runtime.place, subject=name, severity="warning", runtime=name)
    yield from _unreached_rules(spec, attempts, compiled)
    yield from _unreached_skips(spec, attempts, compiled)


def _unreached_rules(spec: Spec, attempts: Attempts, compiled: set[str]) -> Iterator[Diagnostic]:
    reached = {family.rule.place for _, program in attempts.programs for family in program.families}
    reached |= {each.place for attempt in attempts.all for each in attempt.findings if each.place is not None}
    refused = {
        option
        for attempt in attempts.all
        if attempt.program is None and {each.code for each in attempt.findings} == {UNSUPPORTED}
        for option in attempt.options
    }
    missing: dict[Place, FlatRule] = {}
    for runtime, flat in flat_rules(spec):
        if flat.rule.place in reached or _depends_on(flat, refused) or runtime not in compiled:
            reached.add(flat.rule.place)
        else:
            missing.setdefault(flat.rule.place, flat)
    for place, flat in missing.items():
        if place not in reached and place.file == spec.place.file:
            text = flat.rule.id or flat.target.text
            yield finding("M814", place=place, subject=text, severity="warning", rule=text)


def _unreached_skips(spec: Spec, attempts: Attempts, compiled: set[str]) -> Iterator[Diagnostic]:
    reached = {rule.place for _, program in attempts.programs for rule in (*program.skips, *program.keeps) if _has_names(rule)}
    for runtime in spec.runtimes.values():
        for kind, rules in (("skip", runtime.skip), ("keep", runtime.keep)):
            for each in rules if runtime.name in compiled else ():
                if each.place not in reached and each.place.file == spec.place.file:
                    text = each.pattern.text
                    yield finding("M815", place=each.place, subject=text, severity="warning", kind=kind, pattern=text)


def _has_names(rule: SkipRule) -> bool:
    return any(all(isinstance(segment, str) or segment.texts for segment in each.segments) for each in rule.templates)


def _depends_on(flat: FlatRule, options: set[str]) -> bool:
    """Whether a condition of the rule refers to one of the options, through lets too."""
    return any(_refers(condition.expression, condition.names, options, set()) for condition in flat.conditions)


def _refers(expression: Expression, names: Names, options: set[str], seen: set[str]) -> bool:
    for name in expression.names | expression.calls:
        if name in options:
            return True
        level: Names | None = names
        while level is not None and name not in level.lets:
            level = level.parent
        if level is not None and name not in seen:
            seen.add(name)
            if _refers(level.lets[name].expression, level, options, seen):
                return True
    return False
