"""How a source lies on disk: its axes in another order, several in one, one in several, on a coarser grid."""

from __future__ import annotations

from math import prod

from mapper.compiler.sizes import StoredAxis
from mapper.diagnostics import MapperError, Place, finding
from mapper.plan.family import Axis, DiskLayout


def disk_layout(axes: tuple[Axis, ...], stored: tuple[StoredAxis, ...], part: int | None, place: Place) -> DiskLayout:
    """Return the layout of the source of one part (None: of all parts) whose axes on disk are `stored`.

    `[in, out]` for a target `[out, in]` is a transposition, `[out, in / 32, 16]` for `[out, in / 2]` one axis in two,
    `(expert out)` two axes in one, `[out / 128]` for `[out / 32]` a grid whose elements are repeated.
    """
    shape: list[int] = []
    viewed: list[int] = []
    order: dict[int, int] = {}
    divisors = [axis.divisor for axis in axes]
    for on_disk in stored:
        if not on_disk.dims:
            assert on_disk.size is not None
            _append_fixed(on_disk.size, axes, shape, viewed, order, divisors, place)
            continue
        sizes = []
        for dim in on_disk.dims:
            position = _position(axes, dim, order, place)
            divisor = on_disk.divisor if dim == on_disk.dims[-1] or len(on_disk.dims) == 1 else 1
            divisors[position] = divisor
            order[position] = len(viewed)
            sizes.append(_stored_size(axes[position], divisor, part))
            viewed.append(sizes[-1])
        shape.append(prod(sizes))
    missing = [axis.dim for position, axis in enumerate(axes) if position not in order]
    if missing:
        raise MapperError([finding("M316", place=place, problem=f"the axes on disk lack the dim {missing[0]!r}")])
    for axis, divisor in zip(axes, divisors, strict=True):
        if divisor % axis.divisor:
            problem = f"{axis.dim!r} has one element per {divisor} on disk and one per {axis.divisor} in the target: too coarse"
            raise MapperError([finding("M316", place=place, problem=problem)])
        if axis.view is not None and divisor != axis.divisor:
            problem = f"it has one element per {divisor} on disk and one per {axis.divisor} in the target"
            raise MapperError([finding("M340", place=place, formula=axis.view.text, dim=axis.dim, problem=problem)])
    in_order = tuple(order[position] for position in range(len(axes)))
    return DiskLayout(tuple(shape), tuple(viewed), in_order, tuple(divisors), () if shape in ([], [1]) else None)


def below_stack(disk: DiskLayout, count: int) -> DiskLayout:
    """Return the layout of a tensor that holds `count` such sources along its first axis."""
    order = (0, *(each + 1 for each in disk.order))
    single = None if disk.single is None else (count, *disk.single)
    return DiskLayout((count, *disk.shape), (count, *disk.viewed), order, (1, *disk.divisors), single)


def _append_fixed(
    size: int,
    axes: tuple[Axis, ...],
    shape: list[int],
    viewed: list[int],
    order: dict[int, int],
    divisors: list[int],
    place: Place,
) -> None:
    """Take an axis of fixed size: it stands alone where the target has it too, else it belongs to the dim before it."""
    own = next(
        (position for position, axis in enumerate(axes) if not axis.dim and axis.parts == (size,) and position not in order),
        None,
    )
    if own is not None:
        order[own] = len(viewed)
        viewed.append(size)
        shape.append(size)
        return
    before = next((position for position, at in order.items() if at == len(viewed) - 1), None)
    if before is None or divisors[before] % size:
        raise MapperError(
            [finding("M316", place=place, problem=f"the axis of {size} on disk has no dim before it that it divides")]
        )
    divisors[before] //= size
    viewed[-1] *= size
    shape.append(size)


def _position(axes: tuple[Axis, ...], dim: str, order: dict[int, int], place: Place) -> int:
    for position, axis in enumerate(axes):
        if axis.dim == dim and position not in order:
            return position
    raise MapperError(
        [finding("M316", place=place, problem=f"the axes on disk name the dim {dim!r}, which the target does not have")]
    )


def _stored_size(axis: Axis, divisor: int, part: int | None) -> int:
    if axis.per_part:
        return 1
    sizes = [-(-size // divisor) for size in axis.source_parts]
    return sizes[part] if part is not None and len(axis.parts) > 1 else sum(sizes)
