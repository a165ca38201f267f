"""Where a rank stands and what it holds, by writing all ranks, layers and experts down in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mapper import Layout
from mapper.testing.reference.evaluate import Misfit


class IllegalLayout(Misfit):
    """A layout that cannot hold this model: a cut through a unit or a block, or experts that do not fill their slots."""


@dataclass(frozen=True, slots=True)
class Position:
    tp: int
    pp: int
    dp: int


def positions(layout: Layout) -> list[Position]:
    """Return the position of every rank, in rank order: tp fastest, then pp, then dp."""
    return [Position(tp, pp, dp) for dp in range(layout.dp) for pp in range(layout.pp) for tp in range(layout.tp)]


def coordinate(axis: str, size: int, layout: Layout, position: Position) -> int:
    """Return the place of a rank along an axis of a given size; an axis over dp and tp counts tp fastest."""
    over_both = [(dp, tp) for dp in range(layout.dp) for tp in range(layout.tp)].index((position.dp, position.tp))
    if axis == "pp":
        return position.pp
    if size == 1:
        return 0
    if axis == "dp":
        return position.dp
    if axis == "ep":
        return over_both
    if size == layout.tp:
        return position.tp
    if size == layout.tp * layout.dp:
        return over_both
    if size == layout.dp:
        return position.dp
    raise IllegalLayout(f"{axis} of size {size} is no product of the axes of {layout}")


def stage_of_each_layer(num_layers: int, layout: Layout) -> list[int]:
    """Return the pipeline stage of every layer, as vLLM splits them unless the layout says how.

    What is left after equal shares goes one each to the stages from the last but one backwards.
    """
    if layout.pp_layers is not None:
        sizes = list(layout.pp_layers)
        if sum(sizes) != num_layers:
            raise IllegalLayout(f"pp_layers {sizes} do not add up to {num_layers}")
    else:
        sizes = [num_layers // layout.pp] * layout.pp
        for step in range(num_layers % layout.pp):
            sizes[-2 - step] += 1
    return [stage for stage, size in enumerate(sizes) for _ in range(size)]


def experts_of_each_rank(num_experts: int, layout: Layout, *, redundant: int, is_round_robin: bool) -> list[list[int]]:
    """Return the logical experts in the slots of every rank along ep, in slot order."""
    if is_round_robin:
        return [[expert for expert in range(num_experts) if expert % layout.ep == rank] for rank in range(layout.ep)]
    slots = [slot % num_experts for slot in range(num_experts + redundant)]
    if isinstance(layout.placement, tuple):
        slots = list(layout.placement)
    if (redundant or isinstance(layout.placement, tuple)) and len(slots) % layout.ep:
        raise IllegalLayout(f"{len(slots)} slots do not fill {layout.ep} ranks")
    return _deal(slots, layout.ep)


def _deal(slots: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Deal slots out in contiguous shares; what is left goes one each to the first ranks."""
    left, shares = list(slots), []
    for rank in range(num_ranks):
        size = len(slots) // num_ranks + (1 if rank < len(slots) % num_ranks else 0)
        shares.append(left[:size])
        left = left[size:]
    return shares
