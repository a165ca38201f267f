"""Guarantees run over many examples: for the pytest plug-in, for `mapper test`, and for our own suite."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from hypothesis import event, given, settings
from hypothesis import strategies as st

from mapper import Layout
from mapper.spec.model import Spec
from mapper.testing import guarantees
from mapper.testing.example import Example
from mapper.testing.guarantees import NotBuilt
from mapper.testing.strategies import examples, faults, profile, streams

GUARANTEES = (
    "coverage",
    "conservation",
    "layout_independence",
    "order",
    "rerooting",
    "round_trip",
    "in_place",
    "fault",
    "ranks_agree",
)
"""The names of the guarantees, in the order of their numbers."""

MAX_RANKS: Mapping[str, int] = {"layout_independence": 6, "round_trip": 6, "ranks_agree": 6}
DEFAULT_MAX_RANKS = 16


@dataclass(slots=True)
class Outcome:
    """What a run of one guarantee saw: examples checked, those refused with the reason, and what moved bytes.

    `moved` counts, per rule (by its place), the (layout class, rank role) pairs in which it moved at least one byte.
    """

    checked: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    moved: dict[str, set[tuple[str, str]]] = field(default_factory=dict)


def run_guarantee(spec: Spec, runtime: str, guarantee: str, *, max_examples: int | None = None) -> Outcome:
    """Check one guarantee of a spec's runtime on drawn examples; raises AssertionError with the example that breaks it.

    `max_examples` is that of the profile by default (see `mapper.testing.strategies.profile`).
    """
    assert guarantee in GUARANTEES, f"{guarantee!r} is none of {', '.join(GUARANTEES)}"
    outcome = Outcome()

    @settings(profile(), max_examples=max_examples or profile().max_examples)
    @given(st.data())
    def run(data: st.DataObject) -> None:
        example = data.draw(examples(spec, runtime, max_ranks=MAX_RANKS.get(guarantee, DEFAULT_MAX_RANKS)))
        try:
            check_guarantee(guarantee, example, data)
        except NotBuilt as reason:
            event(f"refused: {reason}")
            outcome.refused[str(reason)] += 1
            return
        outcome.checked += 1
        if guarantee == "coverage":
            _note_moved(example, outcome.moved)

    run()
    return outcome


def check_guarantee(guarantee: str, example: Example, data: st.DataObject) -> None:
    """Check one guarantee on one example; `data` draws what the guarantee needs beside it."""
    match guarantee:
        case "order":
            guarantees.check_order(example, data.draw(streams(example.tensors)))
        case "fault":
            guarantees.check_fault(example, data.draw(faults(example)))
        case _:
            getattr(guarantees, f"check_{guarantee}")(example)


def _note_moved(example: Example, moved: dict[str, set[tuple[str, str]]]) -> None:
    """Add to `moved` every rule that wrote at least one byte on a rank that the example looked at."""
    program = guarantees.program_of(example)
    for family in program.families:
        moved.setdefault(str(family.rule.place), set())
    with guarantees.checkpoint_of(example) as checkpoint:
        matching = program.match(checkpoint)
        for rank in example.ranks:
            plan = program.at_rank(rank).assemble(matching, checkpoint.tensors)
            where = (layout_class(example.layout), rank_role(example.layout, rank))
            for local in plan.families:
                if any(local.pieces) or local.shape is None:
                    moved[str(local.matched.family.rule.place)].add(where)
            for matched in matching.families:
                if matched.family.tie is not None and any(each.tied_to for each in plan.targets.values()):
                    moved[str(matched.family.rule.place)].add(where)


def layout_class(layout: Layout) -> str:
    """Return which axes of the layout are longer than 1, such as 'tp+ep'."""
    return "+".join(axis for axis in ("tp", "pp", "dp", "ep") if getattr(layout, axis) > 1) or "one rank"


def rank_role(layout: Layout, rank: int) -> str:
    """Return where the rank is: first, middle or last stage, and first or another rank of its tensor parallel group."""
    stage, tp = (rank // layout.tp) % layout.pp, rank % layout.tp
    where = "only" if layout.pp == 1 else "first" if stage == 0 else "last" if stage == layout.pp - 1 else "middle"
    return f"{where} stage, {'first' if tp == 0 else 'other'} tp rank"


__all__ = ["GUARANTEES", "Outcome", "check_guarantee", "layout_class", "rank_role", "run_guarantee"]
