"""Checksums of a checkpoint's tensors as the ranks of a layout hold them, added up without gathering a tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from mapper.diagnostics import Diagnostic, MapperError, finding
from mapper.regions import Box, intersection, spell, uncovered, volume, whole

MODULUS = 1 << 64


class Strided(NamedTuple):
    """Elements of a tensor that lie between others: at `offset` plus any sum of `strides`, each up to its size, on disk."""

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


Region = Box | Strided


@dataclass(frozen=True, slots=True)
class Digest:
    """What one rank knows of each source tensor: its shape, and a checksum for every region of it that lies here.

    Shapes and boxes are in the order of the target's axes; the checksum of an element depends on where it lies on disk. A
    source whose stored values cannot be told from the parameters is in `unknown`, with the reason.
    """

    shapes: Mapping[str, tuple[int, ...]]
    parts: Mapping[str, Mapping[Region, int]]
    unknown: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        """Return the digest as an object for JSON; checksums are hexadecimal."""
        parts = {name: {tell(region): f"{part:016x}" for region, part in found.items()} for name, found in self.parts.items()}
        return {
            "shapes": {name: list(shape) for name, shape in self.shapes.items()},
            "parts": parts,
            "unknown": dict(self.unknown),
        }


def combine_digests(digests: Iterable[Digest]) -> dict[str, int]:
    """Return one checksum for every source tensor that the ranks hold together: that of the whole tensor.

    Replicas count once. Sources that some rank cannot tell are left out. Raises MapperError M712 where replicas differ and
    M713 where a part is on none of the ranks.
    """
    given = list(digests)
    unknown = {name for each in given for name in each.unknown}
    shapes: dict[str, tuple[int, ...]] = {}
    parts: dict[str, dict[Region, int]] = {}
    findings: list[Diagnostic] = []
    for each in given:
        shapes.update(each.shapes)
        for name, found in each.parts.items():
            known = parts.setdefault(name, {})
            for region, part in found.items():
                if known.setdefault(region, part) != part:
                    findings.append(finding("M712", subject=name, name=name, box=tell(region)))
    totals: dict[str, int] = {}
    for name, found in parts.items():
        if name not in unknown:
            chosen, missing = _tiling(shapes[name], list(found))
            findings += [finding("M713", subject=name, name=name, box=spell(box)) for box in missing]
            totals[name] = sum(found[region] for region in chosen) % MODULUS
    if findings:
        raise MapperError(list(dict.fromkeys(findings)))
    return totals


def tell(region: Region) -> str:
    """Return the region as a message names it."""
    return str(tuple(region)) if isinstance(region, Strided) else spell(region)


def _tiling(shape: tuple[int, ...], regions: list[Region]) -> tuple[list[Region], list[Box]]:
    """Return regions without overlap, the largest first, and the boxes that are in none of them.

    Two readers of one tensor may have cut it in two ways. Regions that lie between others are counted.
    """
    boxes = [region for region in regions if not isinstance(region, Strided)]
    if len(boxes) < len(regions):
        num_held = sum(prod(region.sizes) if isinstance(region, Strided) else volume(region) for region in regions)
        return regions, [] if num_held == prod(shape) else [whole(shape)]
    chosen: list[Box] = []
    for box in sorted(boxes, key=lambda each: (-volume(each), each)):
        if volume(box) and all(intersection(box, other) is None for other in chosen if box):
            chosen.append(box)
    return list(chosen), uncovered(whole(shape), chosen)
