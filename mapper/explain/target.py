"""One target name: which rule fills it from which sources, on which ranks; its padding, its twin, or what keeps it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from mapper.checkpoint import Checkpoint
from mapper.compiler import Program
from mapper.diagnostics import Place
from mapper.explain.copies import Held, ShapeOf, as_pairs, copies_on, copy_object, spell_box, spell_copies, spell_ranks
from mapper.pattern import Bindings, IndexValue
from mapper.plan.family import Family, SkipRule, SourceFamily
from mapper.plan.matching import MatchedFamily, Matching

Outcome = Literal["filled", "tied", "kept", "absent"]

_VERBS: dict[Outcome, str] = {"filled": "filled by", "tied": "tied by", "kept": "kept by", "absent": "left out by"}


@dataclass(frozen=True, slots=True)
class Holding:
    """What equal ranks hold of the target."""

    ranks: tuple[int, ...]
    held: Held


@dataclass(frozen=True, slots=True)
class TargetExplanation:
    """What fills one target name.

    `outcome` is 'absent' where the rule is optional and the checkpoint has no source for it. `dtype` is empty without a
    checkpoint. `spelling` is (position from 1, how many) where the rule knows several. `keep` is the rule that leaves it.
    """

    name: str
    outcome: Outcome
    rule: str
    place: Place | None
    note: str
    leaf: str
    at: Mapping[str, IndexValue]
    dtype: str
    spelling: tuple[int, int] | None
    tied_to: str | None
    keep: SkipRule | None
    ranks: tuple[int, ...]
    holdings: tuple[Holding, ...]
    do: tuple[str, ...] = ()

    def to_json(self) -> dict[str, object]:
        """Return the explanation as an object for JSON."""
        return {
            "name": self.name,
            "outcome": self.outcome,
            "rule": self.rule,
            "place": str(self.place) if self.place else None,
            "note": self.note,
            "leaf": self.leaf,
            "at": dict(self.at),
            "dtype": self.dtype or None,
            "spelling": list(self.spelling) if self.spelling else None,
            "tied_to": self.tied_to,
            "why": self.keep.why if self.keep else None,
            **({"do": list(self.do)} if self.do else {}),
            "holdings": [_holding_object(each) for each in self.holdings],
        }

    def to_text(self) -> str:
        """Return the explanation for a person."""
        facts = [*([str(self.place)] if self.place else []), *([f"leaf {self.leaf}"] if self.leaf else [])]
        facts += [f"{index} {value}" for index, value in self.at.items()]
        if self.spelling is not None:
            facts.append("spelling {} of {}".format(*self.spelling))
        lines = [f"{self.name}: a target{f', {self.dtype}' if self.dtype else ''}"]
        if self.keep is not None:
            where = f" ({self.keep.place})" if self.keep.place else ""
            lines += [f"  kept by {self.keep.text}{where}", f"    why: {self.keep.why}"]
        else:
            lines += [f"  {_VERBS[self.outcome]} the rule for {self.rule}", f"    {', '.join(facts)}"]
        if self.note:
            lines.append(f"    note: {self.note}")
        lines += [f"    do: {each}" for each in self.do]
        if self.tied_to is not None:
            lines.append(f"    shares the storage of {self.tied_to}")
        if self.outcome == "absent":
            lines.append("    the rule is optional, and the checkpoint has no source for it")
        if self.outcome == "filled" and not self.holdings:
            lines.append(f"    not on {spell_ranks(self.ranks)}")
        for each in self.holdings:
            shape = f" {list(each.held.shape)}" if each.held.shape is not None else ""
            lines.append(f"    {spell_ranks(each.ranks)}:{shape}")
            lines += [f"      {line}" for line in spell_copies(each.held.copies)]
            lines += [f"      padding {spell_box(box)}" for box in each.held.padding]
        return "\n".join(lines)


def explain_target(
    program: Program, name: str, *, ranks: Sequence[int], checkpoint: Checkpoint | None = None, matching: Matching | None = None
) -> TargetExplanation | None:
    """Return what fills the name on `ranks`, or None where no rule writes it and no keep names it."""
    found = next(((family, at) for family in program.families if (at := family.target.match(name)) is not None), None)
    if found is None:
        keep = next((rule for rule in program.keeps if rule.matches(name)), None)
        if keep is None:
            return None
        return TargetExplanation(name, "kept", keep.text, keep.place, "", "", {}, "", None, None, keep, tuple(ranks), ())
    family, at = found
    twin = None
    if family.tie is not None:
        twin = family.tie.name(at)
        tied = explain_target(program, twin, ranks=ranks, checkpoint=checkpoint, matching=matching)
        return _explanation(family, at, name, "tied", twin, ranks, tied.dtype if tied else "", None, ())
    matched = _matched(matching, family)
    sources, spelling = _sources(family, matched)
    combination = tuple(at[index] for index in family.target.indices)
    dtype = ""
    if matched is not None:
        header = matched.header(combination)
        if combination in matched.absent or (header is None and family.optional):
            return _explanation(family, at, name, "absent", None, ranks, "", spelling, ())
        dtype = header.dtype if header is not None else ""
    grouped: dict[Held, list[int]] = {}
    for rank in ranks:
        held = copies_on(program.at_rank(rank).share, family, sources, at, shape_of=_shape_of(checkpoint))
        if held is not None:
            grouped.setdefault(held, []).append(rank)
    holdings = tuple(Holding(tuple(holders), held) for held, holders in grouped.items())
    return _explanation(family, at, name, "filled", None, ranks, dtype, spelling, holdings)


def _explanation(
    family: Family,
    at: Bindings,
    name: str,
    outcome: Outcome,
    twin: str | None,
    ranks: Sequence[int],
    dtype: str,
    spelling: tuple[int, int] | None,
    holdings: tuple[Holding, ...],
) -> TargetExplanation:
    rule = family.rule
    return TargetExplanation(
        name, outcome, rule.text, rule.place, rule.note, family.leaf, at, dtype, spelling, twin, None, tuple(ranks), holdings,
        family.do,
    )  # fmt: skip


def _matched(matching: Matching | None, family: Family) -> MatchedFamily | None:
    if matching is None:
        return None
    return next(each for each in matching.families if each.family.number == family.number)


def _sources(family: Family, matched: MatchedFamily | None) -> tuple[tuple[SourceFamily, ...], tuple[int, int] | None]:
    """Return the spelling that the checkpoint has, or the first one."""
    sources = matched.sources if matched is not None else family.alternatives[0]
    count = len(family.alternatives)
    return sources, (family.alternatives.index(sources) + 1, count) if count > 1 else None


def _shape_of(checkpoint: Checkpoint | None) -> ShapeOf:
    def shape_of(name: str) -> tuple[int, ...] | None:
        header = checkpoint.tensors.get(name) if checkpoint is not None else None
        return header.shape if header is not None else None

    return shape_of


def _holding_object(holding: Holding) -> dict[str, object]:
    held = holding.held
    return {
        "ranks": list(holding.ranks),
        "shape": list(held.shape) if held.shape is not None else None,
        "copies": [copy_object(each) for each in held.copies],
        "padding": [as_pairs(box) for box in held.padding],
    }
