"""Checkpoints with one thing wrong, each with what has to be reported."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from hypothesis import assume, event
from hypothesis import strategies as st

from mapper import Layout
from mapper.testing.example import Example
from mapper.testing.reference import reference_load
from mapper.testing.tensors import Tensors

Kind = Literal["drop", "add", "rename", "reshape", "retype", "duplicate", "truncate"]
KINDS: tuple[Kind, ...] = ("drop", "add", "rename", "reshape", "retype", "duplicate", "truncate")
OTHER_DTYPES = {1: torch.float8_e5m2, 2: torch.int16, 4: torch.int32, 8: torch.float64}


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong. `tensors` are those of the checkpoint with the fault.

    `reported` are the names that the findings must be about, all of them and no others. For a retyped source without a
    stated dtype it is the whole target that disagrees, so any of `reported` will do. A tensor that is there twice, and a
    file that is cut short, are faults of the files: they are written that way, and `tensors` are whole.
    """

    kind: Kind
    name: str
    tensors: Tensors
    codes: frozenset[str]
    reported: frozenset[str]
    any_will_do: bool = False


@st.composite
def faults(draw: st.DrawFn, example: Example) -> Fault:
    """Draw a fault of a checkpoint that has none."""
    kind = draw(st.sampled_from(KINDS))
    event(f"fault: {kind}")
    tensors, claimed = example.tensors, sorted(example.claimed())
    assume(claimed)
    name = draw(st.sampled_from(claimed))
    match kind:
        case "drop":
            broken = _without(tensors, name)
            return _judged(kind, name, broken, example)
        case "add":
            added = draw(st.sampled_from((f"{name}.extra", f"extra.{name}", f"{name}_", name.replace(".0.", ".99."))))
            assume(added not in tensors)
            return _judged(kind, added, Tensors({**tensors, added: tensors[name]}), example)
        case "rename":
            other = draw(st.sampled_from((f"{name}_", name.replace("proj", "porj"), f"model.{name}")))
            assume(other not in tensors)
            broken = Tensors({other if key == name else key: tensor for key, tensor in tensors.items()})
            return _judged(kind, name, broken, example)
        case "reshape":
            stated = _stated_shapes(example)
            name = draw(st.sampled_from(sorted(stated) or claimed))
            assume(stated)
            broken = Tensors({**tensors, name: draw(st.sampled_from(list(_reshaped(tensors[name]))))})
            return Fault(kind, name, broken, frozenset({"M503"}), frozenset({name}))
        case "retype":
            assume(name not in example.copies().values())  # its copy would be reported as well
            wrong = OTHER_DTYPES[tensors[name].dtype.itemsize]
            assume(tensors[name].dtype != wrong)
            raw = torch.ones(tensors[name].shape, dtype=torch.float32).to(wrong)
            assume(not any(each.is_cast for each in example.declared() if each.name == name))
            stated_dtypes = {each.name for each in example.declared() if each.dtype is not None}
            broken = Tensors({**tensors, name: raw})
            if name in stated_dtypes:
                return Fault(kind, name, broken, frozenset({"M504"}), frozenset({name}))
            if any(each.is_computed for each in example.declared() if each.name == name):
                return Fault(kind, name, broken, frozenset({"M505"}), frozenset({name}))
            return Fault(kind, name, broken, frozenset({"M507", "M533"}), _kin(name, example), any_will_do=True)
        case "duplicate":
            return Fault(kind, name, tensors, frozenset(), frozenset({name}))
        case "truncate":
            return Fault(kind, name, tensors, frozenset(), frozenset())


def _judged(kind: Kind, name: str, broken: Tensors, example: Example) -> Fault:
    """Return the fault with what the reference finds missing and unknown; a change that it allows is no fault."""
    result = reference_load(
        example.spec,
        config=example.config,
        runtime=example.runtime,
        layout=Layout(),
        rank=0,
        tensors=broken,
        options=example.options,
    )
    missing, unknown = {*result.missing, *result.missing_elsewhere}, result.unknown
    assume(missing or unknown)
    gone = example.reference_alone().targets.keys() - result.targets.keys()
    assume(missing or not gone)  # an optional tensor may be absent, and then its target is
    codes = {*(("M501",) if missing else ()), *(("M502",) if unknown else ())}
    return Fault(kind, name, broken, frozenset(codes), frozenset(missing | unknown))


def _stated_shapes(example: Example) -> set[str]:
    return {each.name for each in example.declared() if each.shape is not None} & example.claimed()


def _kin(name: str, example: Example) -> frozenset[str]:
    """Return the sources and targets that a source's dtype has to agree with."""
    groups = {each.group for each in example.declared() if each.name == name}
    sources = {each.name for each in example.declared() if each.group in groups}
    return frozenset(sources | set(example.reference_alone().targets))


def _reshaped(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensor with one row more, one row less, its dims swapped and a dim more, as far as that differs.

    A scalar and a vector of one are the same.
    """
    yield tensor.reshape(1, *tensor.shape or (1,))
    if tensor.ndim:
        yield torch.cat([tensor.view(torch.uint8), tensor[:1].view(torch.uint8)]).view(tensor.dtype)
    if tensor.ndim == 2 and tensor.shape[0] != tensor.shape[1]:
        yield tensor.T.contiguous()


def _without(tensors: Tensors, name: str) -> Tensors:
    return Tensors({key: tensor for key, tensor in tensors.items() if key != name})
