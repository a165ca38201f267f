"""Parallel layouts: which rank holds which layers, experts and slices. All arithmetic on ranks lies here.

Ranks count tp fastest, then pp, then dp. Expert parallelism runs over dp and tp of one pipeline stage.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal

from mapper.diagnostics import Diagnostic, MapperError, finding

Placement = Literal["linear", "round_robin"] | tuple[int, ...]
Stage = Literal["first", "last", "both", "all"]
PLACEMENTS = ("linear", "round_robin")
BASE_AXES = ("tp", "pp", "dp", "ep")

_NUMBER = re.compile(r"-?[0-9]{1,18}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Sizes of the parallel axes, and how layers and experts are placed.

    `ep` is 1 or tp * dp. `pp_layers` gives the layers of each stage where the runtime's own split is not wanted.
    `placement` is 'linear', 'round_robin' or a table of the logical expert in each physical slot.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    redundant_experts: int = 0
    placement: Placement = "linear"
    pp_layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        faults = list(_faults(self))
        if faults:
            raise MapperError(faults)

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Return the layout that a text such as 'tp=2,pp=2,dp=1,ep=2' spells; what is left out is 1.

        Lists are written with `+`: `pp_layers=31+30`.
        """
        values: dict[str, object] = {}
        for item in filter(None, (part.strip() for part in text.split(","))):
            key, _, value = item.partition("=")
            values[key.strip()] = _parse_value(text, key.strip(), value.strip(), values)
        return cls(**values)  # type: ignore[arg-type]

    @property
    def num_ranks(self) -> int:
        return self.tp * self.pp * self.dp

    def __str__(self) -> str:
        sizes = f"tp={self.tp},pp={self.pp},dp={self.dp},ep={self.ep}"
        if self.redundant_experts:
            sizes += f",redundant_experts={self.redundant_experts}"
        if self.placement != "linear":
            sizes += f",placement={self.placement if isinstance(self.placement, str) else '+'.join(map(str, self.placement))}"
        if self.pp_layers is not None:
            sizes += f",pp_layers={'+'.join(map(str, self.pp_layers))}"
        return sizes


@dataclass(frozen=True, slots=True)
class Mesh:
    """The axes of one runtime on one layout: the base axes and those the runtime adds, with their sizes.

    `redundant_experts` and `placement` are what the runtime makes of what the layout asks for.
    """

    layout: Layout
    sizes: Mapping[str, int]
    redundant_experts: int = 0
    placement: Placement = "linear"

    def coordinate(self, axis: str, rank: int) -> int:
        """Return the rank's position along `axis`, 0 to size - 1.

        An added axis of size 1 is nowhere; of size tp it is the tp position; of size tp * dp it runs dp outer, tp inner;
        of size dp it is the dp position.
        """
        layout, size = self.layout, self.sizes[axis]
        tp, pp, dp = positions(layout, rank)
        if axis == "pp":
            return pp
        if size == 1:
            return 0
        if axis == "tp" or (axis != "dp" and size == layout.tp):
            return tp
        if axis == "ep" or (axis != "dp" and size == layout.tp * layout.dp):
            return dp * layout.tp + tp
        assert size == layout.dp, f"axis {axis!r} of size {size} is no product of the base axes of {layout}"
        return dp


def positions(layout: Layout, rank: int) -> tuple[int, int, int]:
    """Return the rank's (tp, pp, dp) position."""
    assert 0 <= rank < layout.num_ranks, f"rank {rank} is not in {layout}"
    rest, tp = divmod(rank, layout.tp)
    dp, pp = divmod(rest, layout.pp)
    return tp, pp, dp


def rank_at(layout: Layout, *, tp: int, pp: int, dp: int) -> int:
    """Return the rank at a (tp, pp, dp) position: the way back from `positions`.

    >>> rank_at(Layout(tp=2, pp=3, dp=2), tp=1, pp=2, dp=1)
    11
    """
    rank = (dp * layout.pp + pp) * layout.tp + tp
    assert positions(layout, rank) == (tp, pp, dp), f"{(tp, pp, dp)} is no position of {layout}"
    return rank


def is_axis_size(layout: Layout, size: object) -> bool:
    """Return whether an added axis may have this size: 1 or a product of base axes that has a position."""
    return isinstance(size, int) and not isinstance(size, bool) and size in (1, layout.tp, layout.dp, layout.tp * layout.dp)


def stage_sizes(num_layers: int, layout: Layout) -> tuple[int, ...]:
    """Return the number of layers of each pipeline stage.

    Without `pp_layers` the split is vLLM's (`get_pp_indices`): equal shares, and the remainder goes one each to the
    stages from the last but one backwards, since the last stage also holds the norm and the head.

    >>> stage_sizes(61, Layout(pp=4))
    (15, 15, 16, 15)
    """
    if layout.pp_layers is not None:
        if sum(layout.pp_layers) != num_layers:
            raise MapperError(
                [finding("M323", listed="+".join(map(str, layout.pp_layers)), total=sum(layout.pp_layers), expected=num_layers)]
            )
        return layout.pp_layers
    share, remainder = divmod(num_layers, layout.pp)
    sizes = [share] * layout.pp
    for stage in range(layout.pp - 1 - remainder, layout.pp - 1):
        sizes[stage] += 1
    return tuple(sizes)


def stage_layers(num_layers: int, layout: Layout, stage: int) -> range:
    """Return the layers of one pipeline stage, counted from 0."""
    sizes = stage_sizes(num_layers, layout)
    start = sum(sizes[:stage])
    return range(start, start + sizes[stage])


def on_stage(stage: Stage, layout: Layout, rank: int) -> bool:
    """Return whether what is marked `stage` lives on the rank's pipeline stage."""
    pp = positions(layout, rank)[1]
    is_first, is_last = pp == 0, pp == layout.pp - 1
    return {"all": True, "first": is_first, "last": is_last, "both": is_first or is_last}[stage]


def expert_slots(
    num_experts: int, num_ranks: int, position: int, *, redundant: int = 0, placement: Placement = "linear"
) -> tuple[int, ...]:
    """Return the logical expert in each slot of one of `num_ranks` expert ranks, in slot order.

    Linear placement gives contiguous shares, the remainder one each to the first ranks (vLLM's `determine_expert_map`);
    round robin deals expert by expert. Redundant slots repeat the experts from the first on behind the last, and the
    physical slots are then shared equally. A table names the logical expert of each physical slot.

    >>> [expert_slots(6, 4, rank) for rank in range(4)]
    [(0, 1), (2, 3), (4,), (5,)]
    """
    if placement == "round_robin":
        return tuple(range(position, num_experts, num_ranks))
    table = placement if isinstance(placement, tuple) else tuple(slot % num_experts for slot in range(num_experts + redundant))
    share, remainder = divmod(len(table), num_ranks)
    start = position * share + min(position, remainder)
    return table[start : start + share + (position < remainder)]


def placement_faults(num_experts: int, mesh: Mesh) -> list[Diagnostic]:
    """Return why the experts cannot be placed so: slots that ranks cannot share, experts without a slot."""
    num_ranks, table = mesh.sizes["ep"], mesh.placement
    num_slots = len(table) if isinstance(table, tuple) else num_experts + mesh.redundant_experts
    faults = []
    if (mesh.redundant_experts or isinstance(table, tuple)) and num_slots % num_ranks:
        faults.append(finding("M334", slots=num_slots, ep=num_ranks))
    if isinstance(table, tuple):
        if num_slots != num_experts + mesh.redundant_experts:
            expected = num_experts + mesh.redundant_experts
            faults.append(
                finding("M335", slots=num_slots, expected=expected, experts=num_experts, redundant=mesh.redundant_experts)
            )
        strangers = sorted({each for each in table if not 0 <= each < num_experts})
        lost = sorted(set(range(num_experts)) - set(table))
        if strangers or lost:
            problem = f"has no slot for {lost}" if lost else f"names {strangers}"
            faults.append(finding("M336", problem=problem, last=num_experts - 1))
    return faults


def _faults(layout: Layout) -> list[Diagnostic]:
    faults = []
    for axis in BASE_AXES:
        size = getattr(layout, axis)
        if not _is_count(size) or size < 1:
            faults.append(finding("M320", axis=axis, size=size))
    if faults:
        return faults
    if layout.ep not in (1, layout.tp * layout.dp):
        faults.append(finding("M321", ep=layout.ep, tp=layout.tp, dp=layout.dp, product=layout.tp * layout.dp))
    if not _is_count(layout.redundant_experts):
        faults.append(finding("M320", axis="redundant_experts", size=layout.redundant_experts))
    if layout.pp_layers is not None and (len(layout.pp_layers) != layout.pp or not all(map(_is_count, layout.pp_layers))):
        faults.append(finding("M322", listed="+".join(map(str, layout.pp_layers)), pp=layout.pp))
    if not _is_placement(layout.placement):
        faults.append(finding("M325", text=f"placement={layout.placement}", key="placement", value=layout.placement))
    return faults


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_placement(value: object) -> bool:
    return value in PLACEMENTS or (isinstance(value, tuple) and bool(value) and all(map(_is_count, value)))


def _parse_value(text: str, key: str, value: str, seen: Mapping[str, object]) -> object:
    known = [each.name for each in fields(Layout)]
    if key not in known:
        raise MapperError([finding("M324", text=text, key=key, known=", ".join(known))])
    if key in seen:
        raise MapperError([finding("M326", text=text, key=key)])
    if key == "placement" and value in PLACEMENTS:
        return value
    parts = value.split("+") if key in ("pp_layers", "placement") else [value]
    if not all(_NUMBER.fullmatch(part) for part in parts):
        raise MapperError([finding("M325", text=text, key=key, value=value)])
    numbers = tuple(map(int, parts))
    return numbers if key in ("pp_layers", "placement") else numbers[0]
