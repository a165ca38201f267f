"""How a source lies on disk: its axes in another order, several in one, one in several, on a coarser grid."""

from __future__ import annotations

from math import prod

from mapper.compiler.sizes import StoredAxis
from mapper.diagnostics import MapperError, Place, finding
from mapper.plan.family import Axis, DiskLayout


def disk_layout(
    axes: tuple[Axis, ...], stored: tuple[StoredAxis, ...], part: int | None, place: Place, *, is_bitcast: bool = False
) -> DiskLayout:
    """Return the layout of the source of one part (None: of all parts) whose axes on disk are `stored`.

    `[in, out]` for a target `[out, in]` is a transposition, `[out, in / 32, 16]` for `[out, in / 2]` one axis in two,
    `(expert out)` two axes in one, `[out / 128]` for `[out / 32]` a grid whose elements are repeated, `[1, out]` for `[out]` an
    axis more, `[out, in / 32]` for a bitcast `[out, in / 128]` four elements whose bytes are one of the target's.
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
    packed = 1
    if is_bitcast and axes and order[len(axes) - 1] == len(viewed) - 1:
        packed = _packed(axes[-1], divisors[-1], place)
        viewed[-1] //= packed
        divisors[-1] *= packed
    for axis, divisor in zip(axes, divisors, strict=True):
        if divisor % axis.divisor:
            problem = f"{axis.dim!r} has one element per {divisor} on disk and one per {axis.divisor} in the target: too coarse"
            raise MapperError([finding("M316", place=place, problem=problem)])
        if axis.view is not None and divisor != axis.divisor:
            problem = f"it has one element per {divisor} on disk and one per {axis.divisor} in the target"
            raise MapperError([finding("M340", place=place, formula=axis.view.text, dim=axis.dim, problem=problem)])
    turned = tuple(order[position] for position in range(len(axes)))
    single = () if shape in ([], [1]) else None
    return DiskLayout(tuple(shape), tuple(viewed), turned, tuple(divisors), packed, single)


def below_stack(disk: DiskLayout, count: int) -> DiskLayout:
    """Return the layout of a tensor that holds `count` such sources along its first axis."""
    order, divisors = (0, *(each + 1 for each in disk.order)), (1, *disk.divisors)
    single = None if disk.single is None else (count, *disk.single)
    return DiskLayout((count, *disk.shape), (count, *disk.viewed), order, divisors, disk.packed, single)


def _packed(axis: Axis, divisor: int, place: Place) -> int:
    """Return how many stored elements are one of the target's along its last axis; raises MapperError where one is not full."""
    packed, rest = divmod(axis.divisor, divisor)
    if rest or packed <= 1:
        return 1
    partial = next((size for size in axis.parts if size % axis.divisor), None)
    if partial is not None:
        problem = f"{axis.dim!r} has {partial} elements, and one element of the target holds the bytes of {axis.divisor}"
        raise MapperError([finding("M316", place=place, problem=problem)])
    return packed


def _append_fixed(
    size: int,
    axes: tuple[Axis, ...],
    shape: list[int],
    viewed: list[int],
    order: dict[int, int],
    divisors: list[int],
    place: Place,
) -> None:
    """Take an axis of fixed size: it stands alone where the target has it too, else it belongs to the dim before it.

    One of a single element before all dims is on disk only.
    """
    own = next(
        (position for position, axis in enumerate(axes) if not axis.dim and axis.parts == (size,) and position not in order),
        None,
    )
    if own is not None:
        order[own] = len(viewed)
        viewed.append(size)
        shape.append(size)
        return
    if size == 1 and not order:
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
