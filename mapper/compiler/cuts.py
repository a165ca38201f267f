"""Whether a family's cuts are legal: whole units on every rank, whole blocks in every part."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from mapper.diagnostics import Diagnostic, finding
from mapper.layout import Mesh
from mapper.plan.family import Axis, Cut, Family

MAX_SIZES_TRIED = 256
MAX_SIZES_NAMED = 12


def cut_faults(family: Family, mesh: Mesh) -> list[Diagnostic]:
    """Return M316, M329, M330, M331 or M341 for every axis of the family that this mesh cannot cut."""
    faults = [_axis_fault(family, axis, mesh.sizes) or _weave_fault(family, axis, mesh.sizes) for axis in family.axes or ()]
    return [fault for fault in faults if fault is not None]


def _weave_fault(family: Family, axis: Axis, sizes: Mapping[str, int]) -> Diagnostic | None:
    """Return M341 where a cut would go through a block of interleaved parts."""
    if axis.view is None or axis.cut is None:
        return None
    has_own = any(source.part is not None for alternative in family.alternatives for source in alternative)
    block = max((strand.block for strand in (axis.view.by_part if has_own else axis.view.joined)), default=1) * axis.divisor
    cut = axis.as_cut.cut
    assert cut is not None
    if block == axis.divisor or not any(cut.axes):
        return None
    fault = partial(
        finding, "M341", place=family.rule.place, subject=str(family.target), target=str(family.target), dim=axis.dim
    )
    if not axis.cut.joined or cut.uneven is not None or cut.pad_rank > 1:
        return fault(block=block, problem="the parts are cut each on its own, or padded")
    share = _share(axis.as_cut, cut, 0, sizes)
    assert share is not None, "whole units were checked before"
    if share % block:
        return fault(block=block, problem=f"a rank holds {share} elements")
    return None


def _axis_fault(family: Family, axis: Axis, sizes: Mapping[str, int]) -> Diagnostic | None:
    place, target = family.rule.place, str(family.target)
    fault = partial(finding, place=place, subject=target, target=target, dim=axis.dim)
    for size in axis.parts[:-1]:
        if size % axis.divisor:
            return fault("M331", rows=size, block=axis.divisor)
    axis = axis.as_cut
    cut = axis.cut
    for part, name in enumerate(cut.axes if cut is not None else ()):
        if cut is None or name is None:
            continue
        units, padded = cut.units[part], _padded(axis, cut, part)
        if cut.uneven is None and padded % units:
            problem = f"{axis.dim!r} of {family.target} has {padded} elements, which {units} units do not divide"
            return finding("M316", place=place, problem=problem)
        share = _share(axis, cut, part, sizes)
        if share is None:
            hint = _sizes_that_work(axis, cut, sizes, name)
            return fault("M329", hint=hint, units=units, axis=name, size=sizes[name])
        if not _is_whole_blocks(axis, cut, part, share):
            hint = _sizes_that_work(axis, cut, sizes, name)
            return fault("M330", hint=hint, axis=name, size=sizes[name], rows=share, block=axis.divisor)
    return None


def _padded(axis: Axis, cut: Cut, part: int) -> int:
    return -(-axis.parts[part] // cut.pad) * cut.pad


def _share(axis: Axis, cut: Cut, part: int, sizes: Mapping[str, int]) -> int | None:
    """Return the elements of one rank, or None where units would be cut.

    A part with fewer units than ranks is held by several ranks, whole unit by whole unit, where the rule says
    `replicate`, or another part of the same dim has units for every rank: key and value heads beside query heads.
    """
    name = cut.axes[part]
    assert name is not None, "a part that is not cut has no share"
    units, padded, num_ranks = cut.units[part], _padded(axis, cut, part), sizes[name]
    if cut.uneven is not None:
        return -(-units // num_ranks) * -(-padded // units)
    if name == "ep" and units == axis.parts[part]:  # experts need no equal shares
        return 1
    if units % num_ranks == 0:
        return padded // num_ranks
    beside = [others for others, other in zip(cut.units, cut.axes, strict=True) if other == name]
    if num_ranks % units == 0 and (cut.replicate or any(others % num_ranks == 0 for others in beside)):
        return padded // units
    return None


def _is_whole_blocks(axis: Axis, cut: Cut, part: int, share: int) -> bool:
    """Whether a share ends on a block, or is the whole last part, whose last block may be short."""
    is_whole_last = share >= _padded(axis, cut, part) and part == len(axis.parts) - 1
    return share % axis.divisor == 0 or is_whole_last


def _is_legal(axis: Axis, cut: Cut, sizes: Mapping[str, int]) -> bool:
    """Whether no part of the axis has a cut unit or block."""
    for part, name in enumerate(cut.axes):
        if name is not None:
            is_cut = cut.uneven is None and _padded(axis, cut, part) % cut.units[part]
            share = None if is_cut else _share(axis, cut, part, sizes)
            if share is None or not _is_whole_blocks(axis, cut, part, share):
                return False
    return True


def _sizes_that_work(axis: Axis, cut: Cut, sizes: Mapping[str, int], name: str) -> str:
    """Return the sizes of the mesh axis `name` that every part of the axis can be cut by."""
    works = [str(size) for size in range(1, MAX_SIZES_TRIED + 1) if _is_legal(axis, cut, {**sizes, name: size})]
    shown = ", ".join([*works[:MAX_SIZES_NAMED], *(["..."] if len(works) > MAX_SIZES_NAMED else [])])
    return f"sizes of {name} that work: {shown or 'none'}"
