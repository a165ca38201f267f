"""The rules whose names are nearest to a name that none has, and segment by segment why each does not match."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Literal

from mapper.compiler import Program
from mapper.compiler.expand import Condition, FlatRule, flatten
from mapper.compiler.families import LEAF, bound
from mapper.diagnostics import MapperError, Place
from mapper.folding import fold, runs
from mapper.pattern import IndexValue, Segment, Template
from mapper.spec.model import Format, PlacedExpression

Side = Literal["source", "target", "skip"]

MAX_NEAR = 3
MAX_TEXTS_COMPARED = 16
COST_OF_MISSING = 0.9
COST_OF_OUTSIDE = 0.4
COST_OF_WILDCARD = 0.05
COST_OF_CONDITION = 0.1
COST_OF_SKIP = 0.7
"""Rules come before skips that are as near."""
FARTHEST = 0.5
"""A rule is near when at most this share of the name's segments differs."""
FARTHER_THAN_NEAREST = 1.0
"""Beside a rule that is nearer by a whole segment, another is noise."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Why one segment does not match: what the name has there, what the rule has (None: nothing), and why."""

    found: str | None
    expected: str | None
    why: str


@dataclass(frozen=True, slots=True)
class NearRule:
    """A rule, or a skip, that almost names the name; `side` is the side of the rule that is near."""

    side: Side
    pattern: str
    rule: str
    place: Place | None
    differences: tuple[Difference, ...]

    def to_json(self) -> dict[str, object]:
        """Return the rule as an object for JSON."""
        return {
            "side": self.side,
            "pattern": self.pattern,
            "rule": self.rule,
            "place": str(self.place) if self.place else None,
            "differences": [asdict(each) for each in self.differences],
        }

    def to_lines(self) -> list[str]:
        """Return the rule for a person."""
        what = {"source": "the source", "target": "the target", "skip": "the skip"}[self.side]
        where = f" ({self.place})" if self.place else ""
        return [f"near: {what} {self.pattern}{where}", *(f"  {each.why}" for each in self.differences)]


@dataclass(frozen=True, slots=True)
class _Candidate:
    side: Side
    template: Template
    rule: str
    place: Place | None
    conditions: tuple[Condition, ...]
    holds_nowhere: bool


def nearest_rules(program: Program, name: str) -> tuple[NearRule, ...]:
    """Return the rules that are nearest to a name that no rule reads, the nearest first; each rule once."""
    parts = name.split(".")
    found: dict[Place | str | None, tuple[float, NearRule]] = {}
    for candidate in _candidates(program):
        cost, pairs = _align(parts, candidate.template.segments)
        differences = [each for pair in pairs if (each := _difference(pair, candidate, program)) is not None]
        bindings = _bindings(pairs)
        if candidate.holds_nowhere:
            cost += COST_OF_CONDITION
            differences += [_unmet(each) for each in candidate.conditions if _is_false(each, bindings)]
        cost += COST_OF_SKIP if candidate.side == "skip" else 0.0
        if cost > FARTHEST * len(parts) or not differences:
            continue
        near = NearRule(candidate.side, str(candidate.template), candidate.rule, candidate.place, tuple(differences))
        key = candidate.place or candidate.rule
        if key not in found or cost < found[key][0]:
            found[key] = (cost, near)
    ordered = sorted(found.values(), key=lambda each: each[0])
    return tuple(near for cost, near in ordered[:MAX_NEAR] if cost <= ordered[0][0] + FARTHER_THAN_NEAREST)


def _candidates(program: Program) -> Iterator[_Candidate]:
    """Yield the names of all rules on both sides, of rules that hold nowhere for this config, and of skips."""
    section = program.spec.runtimes[program.runtime]
    flat = flatten(section.rules, program.spec.blocks, program.names)
    active = {family.rule.number for family in program.families}
    for family in program.families:
        rule, conditions = family.rule, flat[family.rule.number].conditions
        sides: list[tuple[Side, Template]] = [
            ("source", source.template) for alternative in family.alternatives for source in alternative
        ]
        for side, template in [*sides, ("target", family.target)]:
            yield _Candidate(side, template, rule.text, rule.place, conditions, False)
    if not program.root:  # a rule without families has no names that could be re-rooted
        formats = {**program.spec.formats, **section.formats}
        for each in flat:
            if each.number not in active:
                yield from _inactive(each, program, formats)
    for skip in program.skips:
        for template in skip.templates:
            yield _Candidate("skip", template, skip.text, skip.place, (), False)


def _inactive(flat: FlatRule, program: Program, formats: Mapping[str, Format]) -> Iterator[_Candidate]:
    rule = flat.rule
    domains = {index: values for index, values in program.domains.items() if values}
    for alternative in rule.alternatives:
        for source in alternative.sources:
            leaves = [""]
            if LEAF in source.pattern.names:
                form = formats.get(source.format or alternative.format or rule.format or "linear")
                leaves = sorted({leaf.source for each in form.alternatives for leaf in each.leaves}) if form else []
            for leaf in leaves:
                try:
                    template = bound(flat.source(source.pattern), flat.names, domains, rule.place, {LEAF: leaf})
                except MapperError:  # the rule's names cannot be spelled for this config, which is why it holds nowhere
                    continue
                yield _Candidate("source", template, rule.id or flat.target.text, rule.place, flat.conditions, True)


# --- alignment ------------------------------------------------------------------------------------------------------

Pair = tuple[str | None, "Segment | str | None"]
"""A segment of the name and a segment of the rule; None where one side has nothing."""


Aligned = tuple[float, list[Pair]]


def _align(parts: Sequence[str], segments: Sequence[Segment | str]) -> Aligned:
    """Return the cost of the cheapest alignment of a name with a rule's segments, and its pairs."""
    row: list[Aligned] = [(0.0, [])]
    for part in parts:
        row.append(_then(row[-1], COST_OF_MISSING, (part, None)))
    for segment in segments:
        above, row = row, []
        skips_any = segment == "**"
        absent = 0.0 if skips_any else COST_OF_MISSING
        row.append(_then(above[0], absent, (None, segment)))
        for position, part in enumerate(parts):
            both = _then(above[position], _cost(part, segment), (part, segment))
            only_rule = _then(above[position + 1], absent, (None, segment))
            only_name = (
                _then(row[-1], COST_OF_WILDCARD, (part, segment))
                if skips_any
                else _then(row[-1], COST_OF_MISSING, (part, None))
            )
            row.append(min(both, only_rule, only_name, key=lambda each: each[0]))
    return row[-1]


def _then(before: Aligned, cost: float, pair: Pair) -> Aligned:
    return before[0] + cost, [*before[1], pair]


def _cost(part: str, segment: Segment | str) -> float:
    if isinstance(segment, str):
        return COST_OF_WILDCARD
    if part in segment.texts:
        return 0.0
    if part.isdecimal() and _is_numeric(segment):
        return COST_OF_OUTSIDE
    if len(segment.texts) > MAX_TEXTS_COMPARED:
        return COST_OF_MISSING
    return 1.0 - 0.9 * max((_likeness(part, text) for text in segment.texts), default=0.0)


@cache
def _likeness(one: str, other: str) -> float:
    from difflib import SequenceMatcher  # lazily: only names that fit nowhere need it

    return SequenceMatcher(None, one, other).ratio()


def _is_numeric(segment: Segment) -> bool:
    return bool(segment.indices) and all(text.isdecimal() for text in segment.texts)


def _bindings(pairs: Iterable[Pair]) -> dict[str, IndexValue]:
    bindings: dict[str, IndexValue] = {}
    for part, segment in pairs:
        if part is not None and isinstance(segment, Segment) and part in segment.texts:
            bindings.update(zip(segment.indices, segment.texts[part], strict=True))
    return bindings


# --- words ----------------------------------------------------------------------------------------------------------


def _difference(pair: Pair, candidate: _Candidate, program: Program) -> Difference | None:
    part, segment = pair
    if isinstance(segment, str):
        return None
    if segment is None:
        return Difference(part, None, f"the rule has nothing for {part!r}")
    expected = _spell(segment)
    if part is None:
        return Difference(None, expected, f"the name lacks {expected!r}")
    if part in segment.texts:
        return None
    if not _is_numeric(segment):
        return Difference(part, expected, f"{part!r} is not {expected!r}")
    what = " and ".join(segment.indices)
    if not part.isdecimal():
        return Difference(part, expected, f"{part!r} is no {what}; expected {expected}")
    return Difference(part, expected, f"{what} {part} is outside {expected}{_reason(part, segment, candidate, program)}")


def _reason(part: str, segment: Segment, candidate: _Candidate, program: Program) -> str:
    """Say which conditions of the rule leave out an index value that the config has."""
    (index, *more) = segment.indices
    if more or int(part) not in program.domains[index]:
        return ""
    about = [each for each in candidate.conditions if index in each.names.dependence(each.expression)]
    if not about:
        return ""
    texts = " and ".join(f"`{each.expression.text}`" for each in about)
    return f", where {texts} holds ({_place(about[0])})"


def _spell(segment: Segment) -> str:
    texts = list(segment.texts)
    if not texts:
        return "(no value for this config)"
    if all(text.isdecimal() for text in texts):
        return runs(map(int, texts))
    return " or ".join(map(str, fold(texts)))


def _is_false(condition: Condition, bindings: Mapping[str, IndexValue]) -> bool:
    if any(index not in bindings for index in condition.names.dependence(condition.expression)):
        return False
    return not condition.names.evaluate(condition.expression, dict(bindings), condition.place)


def _unmet(condition: Condition) -> Difference:
    why = f"the rule does not hold here: `when: {condition.expression.text}` ({_place(condition)})"
    return Difference(None, None, why)


def _place(condition: Condition) -> Place:
    """Return where the condition itself is written; its group may start lines above."""
    expression = condition.expression
    return expression.place if isinstance(expression, PlacedExpression) else condition.place
