"""Layouts that can hold a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from hypothesis import event
from hypothesis import strategies as st

from mapper import Layout
from mapper.spec.model import Spec
from mapper.testing.reference import layout_fault
from mapper.testing.reference.evaluate import integer
from mapper.testing.reference.world import World, world_of
from mapper.testing.strategies.quiet import Case

TP_SIZES = (2, 4, 1, 2, 8, 3, 4, 6, 16)


def layouts(
    spec: Spec,
    runtime: str,
    config: Mapping[str, object],
    max_ranks: int = 16,
    options: Mapping[str, object] | None = None,
) -> st.SearchStrategy[Layout]:
    """Return layouts of at most `max_ranks` ranks that can hold the model; most have tensor or expert parallelism.

    Some say how many layers each stage holds; some have redundant experts, or place experts round robin or by a table. On
    every rank there is at least one expert.
    """
    return _layouts(Case(spec, runtime, config, options or {}), max_ranks)


@st.composite
def _layouts(draw: st.DrawFn, case: Case, max_ranks: int) -> Layout:
    if case.spec.runtimes[case.runtime].mesh.like == "single":
        return Layout()
    tp = draw(st.sampled_from([size for size in TP_SIZES if size <= max_ranks]))
    dp = draw(st.sampled_from([size for size in (1, 1, 2, 3) if tp * size <= max_ranks]))
    pp = draw(st.sampled_from([size for size in (1, 2, 3, 2, 4) if tp * dp * size <= max_ranks]))
    has_ep = draw(st.sampled_from((True, False, True)))
    layout = next((each for each in _ever_smaller(tp, pp, dp, has_ep=has_ep) if _can_hold(case, each)), None)
    assert layout is not None, f"the config of {case.spec.id} fits on no layout, not even one rank"
    if layout.pp > 1 and draw(st.sampled_from((True, False, True))):
        layout = replace(layout, pp_layers=_draw_split(draw, case, layout.pp))
    placed = _draw_placement(draw, case, layout)
    layout = placed if _can_hold(case, placed) else layout
    event(f"tp > 1: {layout.tp > 1}, ep > 1: {layout.ep > 1}, pp > 1: {layout.pp > 1}, dp > 1: {layout.dp > 1}")
    event(f"redundant: {layout.redundant_experts > 0}, placement: {_kind(layout)}")
    return layout


def _ever_smaller(tp: int, pp: int, dp: int, *, has_ep: bool) -> Iterator[Layout]:
    for size in [tp, *(each for each in (8, 6, 4, 3, 2, 1) if each < tp)]:
        if has_ep:
            yield Layout(tp=size, pp=pp, dp=dp, ep=size * dp)
            yield Layout(tp=size, pp=pp, ep=size)
        yield Layout(tp=size, pp=pp, dp=dp)
    yield Layout(pp=pp)
    yield Layout()


def _can_hold(case: Case, layout: Layout) -> bool:
    if layout_fault(case.spec, config=case.config, runtime=case.runtime, layout=layout, options=case.options) is not None:
        return False
    last = _world(case, layout, layout.num_ranks - 1)
    return all(last.held(name) for name, index in last.indices().items() if index.axis == "ep" and last.values(name))


def _draw_split(draw: st.DrawFn, case: Case, pp: int) -> tuple[int, ...] | None:
    """Draw how many layers each stage holds; all indices on pp must have one length for that."""
    lengths = _lengths(case, "pp")
    if len(lengths) != 1:
        return None
    (num_layers,) = lengths
    cuts = sorted(draw(st.lists(st.integers(0, num_layers), min_size=pp - 1, max_size=pp - 1)))
    return tuple(stop - start for start, stop in zip([0, *cuts], [*cuts, num_layers], strict=True))


def _draw_placement(draw: st.DrawFn, case: Case, layout: Layout) -> Layout:
    """Draw redundant experts and a placement, as far as the model has experts that are dealt out."""
    lengths = _lengths(case, "ep")
    if layout.ep == 1 or len(lengths) != 1:
        return layout
    (num_experts,) = lengths
    match draw(st.sampled_from(("linear", "redundant", "round_robin", "table"))):
        case "redundant":
            return replace(layout, redundant_experts=-num_experts % layout.ep + layout.ep)
        case "round_robin":
            return replace(layout, placement="round_robin")
        case "table" if num_experts % layout.ep == 0:
            return replace(layout, placement=tuple(draw(st.permutations(range(num_experts)))))
    return layout


def _kind(layout: Layout) -> str:
    return layout.placement if isinstance(layout.placement, str) else "table"


def _lengths(case: Case, axis: str) -> set[int]:
    """Return the lengths of the ranges that are split over an axis."""
    world = _world(case, Layout(), 0)
    return {
        integer(index.count.text, world.scope)
        for index in world.indices().values()
        if index.axis == axis and index.count is not None
    }


def _world(case: Case, layout: Layout, rank: int) -> World:
    return world_of(case.spec, config=case.config, runtime=case.runtime, layout=layout, rank=rank, options=case.options)
