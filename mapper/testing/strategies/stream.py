"""Orders and buckets in which tensors may arrive."""

from __future__ import annotations

import random
from collections.abc import Mapping

import torch
from hypothesis import event
from hypothesis import strategies as st


class Stream(list[list[tuple[str, torch.Tensor]]]):
    """Buckets of (name, tensor), in order; short to print."""

    def __repr__(self) -> str:
        return f"<{sum(map(len, self))} tensors in {len(self)} buckets>"


@st.composite
def streams(draw: st.DrawFn, tensors: Mapping[str, torch.Tensor]) -> Stream:
    """Draw an order of the tensors, in buckets of drawn sizes; some tensors are strided views."""
    order = draw(st.sampled_from(("shuffled", "reversed", "by file")))
    size = draw(st.sampled_from((1, 7, 64, len(tensors) + 1)))
    seed = draw(st.integers(0, 2**16))
    names = list(tensors)
    if order == "reversed":
        names.reverse()
    elif order == "shuffled":
        random.Random(seed).shuffle(names)
    event(f"stream: {order}, buckets of {'all' if size > len(tensors) else size}")
    items = [(name, _strided(tensors[name]) if (seed + place) % 3 == 0 else tensors[name]) for place, name in enumerate(names)]
    return Stream(items[start : start + size] for start in range(0, len(items), size))


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same elements as a view with other strides."""
    return tensor.T.contiguous().T if tensor.ndim == 2 else tensor
