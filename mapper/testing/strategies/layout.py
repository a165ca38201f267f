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
from mapper.testing.reference.world import world_of
from mapper.testing.strategies.quiet import Named

TP_SIZES = (2, 4, 1, 2, 8, 3, 4, 6, 16)


def layouts(spec: Spec, runtime: str, config: Mapping[str, object], max_ranks: int = 16) -> st.SearchStrategy[Layout]:
    """Return layouts of at most `max_ranks` ranks that can hold the model; most have tensor or expert parallelism."""
    return _layouts(Named(spec), runtime, config, max_ranks)


@st.composite
def _layouts(draw: st.DrawFn, named: Named, runtime: str, config: Mapping[str, object], max_ranks: int) -> Layout:
    spec = named.spec
    if spec.runtimes[runtime].mesh.like == "single":
        return Layout()
    tp = draw(st.sampled_from([size for size in TP_SIZES if size <= max_ranks]))
    dp = draw(st.sampled_from([size for size in (1, 1, 2, 3) if tp * size <= max_ranks]))
    pp = draw(st.sampled_from([size for size in (1, 2, 1, 3, 4) if tp * dp * size <= max_ranks]))
    has_ep = draw(st.booleans())
    for layout in _ever_smaller(tp, pp, dp, has_ep=has_ep):
        if layout_fault(spec, config=config, runtime=runtime, layout=layout) is None:
            break
    else:
        raise AssertionError(f"the config of {spec.id} fits on no layout, not even one rank")
    if layout.pp > 1 and draw(st.booleans()):
        layout = replace(layout, pp_layers=_draw_split(draw, spec, runtime, config, layout.pp))
    event(f"tp > 1: {layout.tp > 1}, ep > 1: {layout.ep > 1}, pp > 1: {layout.pp > 1}, dp > 1: {layout.dp > 1}")
    return layout


def _ever_smaller(tp: int, pp: int, dp: int, *, has_ep: bool) -> Iterator[Layout]:
    for size in [tp, *(each for each in (8, 6, 4, 3, 2, 1) if each < tp)]:
        yield Layout(tp=size, pp=pp, dp=dp, ep=size * dp if has_ep else 1)
        if has_ep:
            yield Layout(tp=size, pp=pp, dp=dp)
    yield Layout(pp=pp)
    yield Layout()


def _draw_split(draw: st.DrawFn, spec: Spec, runtime: str, config: Mapping[str, object], pp: int) -> tuple[int, ...] | None:
    """Draw how many layers each stage holds; all indices on pp must have one length for that."""
    lengths = placed_lengths(spec, runtime, config)
    if len(lengths) != 1:
        return None
    (num_layers,) = lengths
    cuts = sorted(draw(st.lists(st.integers(0, num_layers), min_size=pp - 1, max_size=pp - 1)))
    return tuple(stop - start for start, stop in zip([0, *cuts], [*cuts, num_layers], strict=True))


def placed_lengths(spec: Spec, runtime: str, config: Mapping[str, object]) -> set[int]:
    """Return the lengths of the ranges that are split over pipeline stages."""
    world = world_of(spec, config=config, runtime=runtime, layout=Layout(), rank=0)
    return {
        integer(index.count.text, world.scope)
        for index in world.indices().values()
        if index.axis == "pp" and index.count is not None
    }
