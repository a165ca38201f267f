"""Whole examples: a config, a layout, ranks of it and a checkpoint, drawn together."""

from __future__ import annotations

from hypothesis import strategies as st

from mapper.spec.model import Spec
from mapper.testing.example import Example
from mapper.testing.strategies.checkpoint import checkpoints
from mapper.testing.strategies.config import configs
from mapper.testing.strategies.layout import layouts
from mapper.testing.strategies.quiet import Named


def examples(spec: Spec, runtime: str, *, max_ranks: int = 16) -> st.SearchStrategy[Example]:
    """Return examples of a spec's runtime; two ranks of each are to be looked at, the last and any other."""
    return _examples(Named(spec), runtime, max_ranks)


@st.composite
def _examples(draw: st.DrawFn, named: Named, runtime: str, max_ranks: int) -> Example:
    config = draw(configs(named.spec, runtime))
    layout = draw(layouts(named.spec, runtime, config, max_ranks))
    tensors = draw(checkpoints(named.spec, runtime, config))
    last = layout.num_ranks - 1
    ranks = sorted({draw(st.integers(0, last)), last})
    return Example(named.spec, runtime, config, layout, tuple(ranks), tensors)
