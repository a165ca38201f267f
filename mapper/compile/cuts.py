"""Whether a family's cuts are legal: whole units on every rank, whole blocks in every part."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from mapper.diagnostics import Diagnostic, finding
from mapper.layout import Mesh
from mapper.plan.family import Axis, Cut, Family

MAX_SIZES_TRIED = 256
MAX_SIZES_NAMED = 12


def cut_faults(family: Family, mesh: Mesh) -> list[Diagnostic]:
    """Return M329, M330 and M331 for every axis of the family that this mesh cannot cut."""
    return [fault for axis in family.axes or () for fault in _axis_faults(family, axis, mesh)]


def _axis_faults(family: Family, axis: Axis, mesh: Mesh) -> list[Diagnostic]:
    place, target = family.rule.place, str(family.target)
    fault = partial(finding, place=place, subject=target, target=target, dim=axis.dim)
    if axis.divisor > 1:
        for size in axis.parts[:-1]:
            if size % axis.divisor:
                return [fault("M331", rows=size, block=axis.divisor)]
    cut = axis.cut
    if cut is None:
        return []
    for part, size in enumerate(axis.parts):
        name = cut.axes[part]
        if name is None:
            continue
        units, padded, ranks = cut.units[part], -(-size // cut.pad) * cut.pad, mesh.sizes[name]
        if cut.uneven is None and padded % units:
            problem = f"{axis.dim!r} of {family.target} has {padded} elements, which {units} units do not divide"
            return [finding("M316", place=place, problem=problem)]
        share = _share(cut, name, part, padded, ranks)
        if share is None:
            works = _working(partial(_is_whole_units, cut, name, part, padded))
            return [fault("M329", units=units, axis=name, size=ranks, works=works)]
        if not _whole_blocks(axis, part, padded, share):
            works = _working(partial(_is_legal, axis, cut, name, part, padded))
            return [fault("M330", axis=name, size=ranks, rows=share, block=axis.divisor, works=works)]
    return []


def _share(cut: Cut, name: str, part: int, padded: int, num_ranks: int) -> int | None:
    """Return the elements of one rank, or None where units would be cut.

    A part with fewer units than ranks is held by several ranks, whole unit by whole unit, where another part of the
    same dim has units for every rank: that is how key and value heads are replicated beside query heads. Experts need no
    equal shares.
    """
    units = cut.units[part]
    if cut.uneven is not None:
        return -(-units // num_ranks) * -(-padded // units)
    if name == "ep" and units == padded:
        return 1
    if units % num_ranks == 0:
        return padded // num_ranks
    if num_ranks % units == 0 and max(cut.units) % num_ranks == 0:
        return padded // units
    return None


def _is_whole_units(cut: Cut, name: str, part: int, padded: int, num_ranks: int) -> bool:
    return _share(cut, name, part, padded, num_ranks) is not None


def _is_legal(axis: Axis, cut: Cut, name: str, part: int, padded: int, num_ranks: int) -> bool:
    share = _share(cut, name, part, padded, num_ranks)
    return share is not None and _whole_blocks(axis, part, padded, share)


def _whole_blocks(axis: Axis, part: int, padded: int, share: int) -> bool:
    """Whether a share ends on a block, or is the whole last part, whose last block may be short."""
    is_whole_last = share >= padded and part == len(axis.parts) - 1
    return share % axis.divisor == 0 or is_whole_last


def _working(is_legal: Callable[[int], bool]) -> str:
    sizes = [str(size) for size in range(1, MAX_SIZES_TRIED + 1) if is_legal(size)]
    shown = ", ".join(sizes[:MAX_SIZES_NAMED])
    return shown + (", ..." if len(sizes) > MAX_SIZES_NAMED else "") if sizes else "none"
