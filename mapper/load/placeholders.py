"""The values that stand for nothing, in every target of a rank: a model without a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from mapper.compiler import Program
from mapper.diagnostics import Diagnostic, MapperError, finding
from mapper.finalize import iter_targets
from mapper.ops.dtypes import can_hold, safetensors_name, torch_name
from mapper.plan.family import Family
from mapper.plan.local import LocalShape, local_shape, padding_of
from mapper.regions import Box, whole
from mapper.transfer.bind import declare
from mapper.transfer.copy import copy_twins, fill_padding


@dataclass(frozen=True, slots=True)
class Placeholders:
    """What each target holds without a checkpoint: its leaf's neutral value, and in padding what a load leaves there.

    `twins` are the tied targets that have storage of their own, each with the target it is a copy of.
    """

    values: tuple[tuple[str, Box, float], ...]
    padding: tuple[tuple[str, Box, float], ...]
    twins: Mapping[str, str]

    @property
    def targets(self) -> frozenset[str]:
        """The names of all targets that are written."""
        return frozenset(name for name, _, _ in self.values) | self.twins.keys()

    def write(self, tensors: Mapping[str, torch.Tensor]) -> int:
        """Write everything and return the number of bytes, padding counted once."""
        written = fill_padding(tensors, self.values)
        fill_padding(tensors, self.padding)
        return written + copy_twins(tensors, self.twins)


def placeholders_of(program: Program, tensors: Mapping[str, torch.Tensor]) -> Placeholders:
    """Return what the targets of the program's rank hold without a checkpoint, but for those that are kept.

    `tensors` are the model's, by name. Raises MapperError M304, M508, M531, M532, M533 or M602 for all that do not fit.
    """
    declared = declare(tensors)
    findings: list[Diagnostic] = []
    found: dict[str, list[Family]] = {}
    ties: dict[str, tuple[str, Family]] = {}
    for name, family in iter_targets(program, tensors):
        if any(rule.matches(name) for rule in program.keeps):
            continue
        if family.tie is None:
            found.setdefault(name, []).append(family)
            continue
        bindings = family.target.match(name)
        assert bindings is not None, f"{name!r} is a name of its family"
        ties[name] = (family.tie.name(bindings), family)
    shapes = {
        family.number: None if family.axes is None else local_shape(family, program.share)
        for families in found.values() for family in families
    }  # fmt: skip
    values: list[tuple[str, Box, float]] = []
    padding: list[tuple[str, Box, float]] = []
    for name, families in found.items():
        faults = list(_faults(name, families, shapes[families[-1].number], tensors.get(name)))
        findings += faults
        for family in [] if faults else families:
            shape = shapes[family.number]
            box = whole(tuple(tensors[name].shape)) if shape is None else _own_box(family, shape)
            values.append((name, box, _value(family)))
            padding += [] if shape is None else [(name, *each) for each in padding_of(family, shape)]
    targets = {name for name, _, _ in values}
    twins = {}
    for name, (twin, family) in ties.items():
        if twin not in targets and not findings:
            rank = program.share.rank
            findings.append(finding("M508", place=family.rule.place, subject=name, name=name, twin=twin, rank=rank))
        elif name in declared and twin in declared and declared[name].storage != declared[twin].storage:
            twins[name] = twin
    if findings:
        raise MapperError(findings)
    return Placeholders(tuple(values), tuple(padding), twins)


def _value(family: Family) -> float:
    return family.neutral if family.fill is None else family.fill


def _faults(
    name: str, families: Sequence[Family], shape: LocalShape | None, tensor: torch.Tensor | None
) -> Iterator[Diagnostic]:
    """Yield what keeps the model's tensor from being the target of these families, the last of which gives the shape."""
    rule = families[-1].rule
    if tensor is None:
        yield finding("M531", place=rule.place, subject=name, rule=rule.text, name=name)
        return
    if tensor.is_meta:
        yield finding("M602", subject=name, name=name)
    if shape is not None and tuple(tensor.shape) != shape.full:
        sizes, full = list(tensor.shape), list(shape.full)
        yield finding("M532", place=rule.place, subject=name, name=name, found=sizes, expected=full)
    held, dtypes = safetensors_name(str(tensor.dtype)), _dtypes(families[-1])
    if dtypes and held not in dtypes:
        given = " or ".join(sorted(str(torch_name(each)) for each in dtypes))
        found = str(tensor.dtype).removeprefix("torch.")
        yield finding("M533", place=rule.place, subject=name, name=name, found=found, expected=given)
        return
    for value in map(_value, families):
        if value and held is not None and not can_hold(held, value):
            what, given = f"the neutral value of {name!r}", f"a number that {torch_name(held)} holds"
            yield finding("M304", place=rule.place, subject=name, what=what, found=value, expected=given)


def _dtypes(family: Family) -> frozenset[str]:
    """Return the dtypes that the family's targets may have, empty where only a checkpoint says."""
    if family.conversion is not None:
        return frozenset({family.conversion.dtype})
    given = [source.dtypes for alternative in family.alternatives for source in alternative if source.scale_of is None]
    return frozenset().union(*given) if all(given) else frozenset()


def _own_box(family: Family, shape: LocalShape) -> Box:
    """Return the box of a target that the family accounts for: all of it, but where slots of several are in one target."""
    box = whole(shape.full)
    at = family.append_axis
    if at is None:
        return box
    return (*box[:at], (shape.offset, shape.offset + shape.own[at]), *box[at + 1 :])
