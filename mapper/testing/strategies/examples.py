"""Whole examples: a config, a layout, ranks of it and a checkpoint, drawn together."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import strategies as st

from mapper import Layout
from mapper.spec.model import Option, Spec
from mapper.testing.example import Example
from mapper.testing.reference import layout_fault
from mapper.testing.strategies.checkpoint import checkpoints
from mapper.testing.strategies.config import configs
from mapper.testing.strategies.layout import layouts
from mapper.testing.strategies.quiet import Named

LEAST_WIDTH = 32


def examples(
    spec: Spec, runtime: str, *, max_ranks: int = 16, config: Mapping[str, object] | None = None
) -> st.SearchStrategy[Example]:
    """Return examples of a spec's runtime, at a drawn config or the given one; the last rank and any other are looked at."""
    return _examples(Named(spec), runtime, max_ranks, config)


@st.composite
def _examples(draw: st.DrawFn, named: Named, runtime: str, max_ranks: int, config: Mapping[str, object] | None) -> Example:
    spec = named.spec
    chosen = draw(configs(spec, runtime)) if config is None else config
    options = {name: value for name, option in spec.options.items() if (value := _draw_option(draw, option)) is not None}
    if options and layout_fault(spec, config=chosen, runtime=runtime, layout=Layout(), options=options) is not None:
        options = {}
    layout = draw(layouts(spec, runtime, chosen, max_ranks, options))
    tensors = draw(checkpoints(spec, runtime, chosen, options))
    last = layout.num_ranks - 1
    ranks = sorted({draw(st.integers(0, last)), last})
    return Example(spec, runtime, chosen, layout, tuple(ranks), tensors, options)


def _draw_option(draw: st.DrawFn, option: Option) -> object:
    """Draw another value of an option, or None to leave it out; a width that a kernel pads to becomes small."""
    if isinstance(option.default, bool):
        return draw(st.booleans()) or None
    if isinstance(option.default, int) and option.default > LEAST_WIDTH:
        return draw(st.sampled_from((LEAST_WIDTH, 2 * LEAST_WIDTH)))
    return None
