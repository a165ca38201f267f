"""One source name: which rule reads it, or skips it, or what is near; which ranks hold it, and which slice goes where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from mapper.checkpoint import Checkpoint, TensorHeader
from mapper.compiler import Program
from mapper.compiler.resolve import Claim
from mapper.diagnostics import Diagnostic, Place, as_objects, render_text
from mapper.explain.copies import Copy, copies_on, copy_object, spell_copy, spell_ranks
from mapper.explain.near import NearRule, nearest_rules
from mapper.pattern import IndexValue
from mapper.plan.family import SkipRule
from mapper.plan.matching import Matching

Outcome = Literal["loaded", "elsewhere", "skipped", "unknown"]


@dataclass(frozen=True, slots=True)
class Reading:
    """One rule that reads the name: at which index values, as which part, in which spelling, and what each rank copies.

    `part` and `spelling` are (position from 1, how many, along which dim); `copies` are grouped by equal copies of ranks.
    `do` are the operations on its values.
    """

    rule: str
    place: Place
    note: str
    leaf: str
    at: Mapping[str, IndexValue]
    part: tuple[int, int, str] | None
    spelling: tuple[int, int] | None
    copies: tuple[tuple[tuple[int, ...], Copy], ...]
    do: tuple[str, ...] = ()

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks asked about that hold the name."""
        return tuple(sorted({rank for ranks, _ in self.copies for rank in ranks}))


@dataclass(frozen=True, slots=True)
class SourceExplanation:
    """What happens to one source name.

    `header` is what the checkpoint has under the name; `is_present` is None without a checkpoint. `remark` says why a
    name that a rule reads is not loaded. `ranks` are those asked about.
    """

    name: str
    outcome: Outcome
    is_present: bool | None
    header: TensorHeader | None
    ranks: tuple[int, ...]
    readings: tuple[Reading, ...]
    skip: SkipRule | None
    remark: str
    near: tuple[NearRule, ...]
    findings: tuple[Diagnostic, ...]

    def to_json(self) -> dict[str, object]:
        """Return the explanation as an object for JSON."""
        return {
            "name": self.name,
            "outcome": self.outcome,
            "in_checkpoint": self.is_present,
            "dtype": self.header.dtype if self.header else None,
            "shape": list(self.header.shape) if self.header else None,
            "rules": [_reading_object(each) for each in self.readings],
            "skip": _skip_object(self.skip) if self.skip else None,
            "remark": self.remark,
            "near": [each.to_json() for each in self.near],
            "findings": as_objects(self.findings),
        }

    def to_text(self) -> str:
        """Return the explanation for a person."""
        header = f", {self.header.dtype} {list(self.header.shape)}" if self.header else ""
        is_nothing = self.outcome == "unknown" and not self.readings and not self.is_present
        lines = [f"{self.name}: {'no name of this spec' if is_nothing else f'a source{header}'}"]
        if self.is_present is False and self.outcome != "unknown":
            lines.append("  the checkpoint has no tensor of this name")
        if self.skip is not None:
            where = f" ({self.skip.place})" if self.skip.place else ""
            lines += [f"  skipped by {self.skip.text}{where}", f"    why: {self.skip.why}"]
        for reading in self.readings:
            lines += _reading_lines(reading, self.ranks, is_loaded=self.outcome == "loaded" and self.is_present is not False)
        if self.outcome == "unknown" and not self.readings:
            lines.append("  unknown: no rule reads it, and no skip names it")
        if self.remark:
            lines.append(f"  {self.remark}")
        for each in self.near:
            lines += [f"  {line}" for line in each.to_lines()]
        lines += [render_text(each) for each in self.findings]
        return "\n".join(lines)


def explain_source(
    program: Program, name: str, *, ranks: Sequence[int], checkpoint: Checkpoint | None = None, matching: Matching | None = None
) -> SourceExplanation:
    """Return what happens to the name on `ranks`; `matching` is the program's match with the checkpoint, if there is one."""
    header = checkpoint.tensors.get(name) if checkpoint else None
    claims = program.resolver.claims(name)
    skip = next((rule for rule in program.skips if rule.matches(name)), None)
    remark = ""
    if matching is not None and header is not None:
        skip = matching.skipped.get(name)
        if claims and (skip is not None or name in matching.unknown):
            remark = "the checkpoint has another spelling of the same tensors, which was taken"
    readings = tuple(_reading(program, claim, ranks, header) for claim in claims)
    outcome: Outcome = "loaded" if any(each.ranks for each in readings) else "elsewhere"
    if remark or not claims:
        outcome = "skipped" if skip is not None else "unknown"
    near = nearest_rules(program, name) if outcome == "unknown" and not claims else ()
    findings = tuple(each for each in matching.findings if each.subject == name) if matching else ()
    is_present = None if checkpoint is None else header is not None
    return SourceExplanation(
        name,
        outcome,
        is_present,
        header,
        tuple(ranks),
        readings,
        None if claims and not remark else skip,
        remark,
        near,
        findings,
    )


def _reading(program: Program, claim: Claim, ranks: Sequence[int], header: TensorHeader | None) -> Reading:
    family, source = claim.family, claim.source
    grouped: dict[Copy, list[int]] = {}
    for rank in ranks:
        share = program.at_rank(rank).share
        held = copies_on(
            share,
            family,
            family.alternatives[claim.alternative],
            claim.bindings,
            shape_of=lambda _: header.shape if header is not None else None,
            position=claim.position,
        )
        for copy in held.copies if held is not None else ():
            grouped.setdefault(copy, []).append(rank)
    parts_axis = family.parts_axis
    part = None
    if source.part is not None and parts_axis is not None and family.axes is not None:
        axis = family.axes[parts_axis]
        part = (source.part + 1, len(axis.parts), axis.dim)
    spelling = (claim.alternative + 1, len(family.alternatives)) if len(family.alternatives) > 1 else None
    return Reading(
        family.rule.text,
        family.rule.place,
        family.rule.note,
        family.leaf,
        claim.bindings,
        part,
        spelling,
        tuple((tuple(holders), copy) for copy, holders in grouped.items()),
        family.do,
    )


def _reading_lines(reading: Reading, asked: Sequence[int], *, is_loaded: bool) -> list[str]:
    facts = [str(reading.place), *([f"leaf {reading.leaf}"] if reading.leaf else [])]
    facts += [f"{index} {value}" for index, value in reading.at.items()]
    if reading.part is not None:
        number, count, dim = reading.part
        facts.append(f"part {number} of {count} along {dim}")
    if reading.spelling is not None:
        facts.append("spelling {} of {}".format(*reading.spelling))
    lines = [f"  {'loaded' if is_loaded else 'read'} by the rule for {reading.rule}", f"    {', '.join(facts)}"]
    if reading.note:
        lines.append(f"    note: {reading.note}")
    lines += [f"    do: {each}" for each in reading.do]
    if not reading.copies:
        lines.append(f"    not on {spell_ranks(asked)}")
    for ranks, copy in reading.copies:
        lines.append(f"    {spell_ranks(ranks)}: {spell_copy(copy)}")
    return lines


def _reading_object(reading: Reading) -> dict[str, object]:
    return {
        "rule": reading.rule,
        "place": str(reading.place),
        "note": reading.note,
        "leaf": reading.leaf,
        "at": dict(reading.at),
        "part": list(reading.part) if reading.part else None,
        "spelling": list(reading.spelling) if reading.spelling else None,
        **({"do": list(reading.do)} if reading.do else {}),
        "ranks": list(reading.ranks),
        "copies": [{"ranks": list(ranks), **copy_object(copy)} for ranks, copy in reading.copies],
    }


def _skip_object(skip: SkipRule) -> dict[str, object]:
    return {"rule": skip.text, "why": skip.why, "place": str(skip.place) if skip.place else None}
