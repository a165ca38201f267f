"""Finalize steps of a runtime, at the index values where `when` holds; the graph is checked before any load."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product

from mapper.compiler.families import bound
from mapper.compiler.names import Names
from mapper.compiler.sizes import require_size
from mapper.diagnostics import Diagnostic, MapperError, finding
from mapper.ops.dtypes import DTYPES
from mapper.pattern import Bindings
from mapper.plan.derived import DerivedStep, Operation, in_order, renamed
from mapper.plan.family import Domains, Family
from mapper.spec.model import Finalize, StepOperation

_TORCH_DTYPES = frozenset(dtype.torch_name for dtype in DTYPES.values())


def derived_steps(
    steps: Sequence[Finalize], names: Names, domains: Domains, families: Sequence[Family]
) -> tuple[DerivedStep, ...]:
    """Return every step at every index value, in the order of the spec, then of the indices.

    Raises MapperError with everything wrong: M350 to M353 for inputs that nothing writes, outputs that two write, circles.
    """
    found: list[DerivedStep] = []
    findings: list[Diagnostic] = []
    for number, step in enumerate(steps):
        try:
            found += _at_all_values(number, step, names, domains)
        except MapperError as error:
            findings += error.diagnostics
    findings = findings or list(_graph_findings(found, families))
    if findings:
        raise MapperError(findings)
    return tuple(found)


def scoped_steps(steps: Iterable[DerivedStep], prefix: str, findings: list[Diagnostic]) -> tuple[DerivedStep, ...]:
    """Return the steps below `prefix`, their names without it; adds M354 for one that lies inside only in part."""
    inner = f"{prefix}."
    scoped = []
    for step in steps:
        names = (*step.inputs, step.output)
        inside = [name for name in names if name.startswith(inner)]
        if len(inside) == len(names):
            scoped.append(renamed(step, (name.removeprefix(inner) for name in step.inputs), step.output.removeprefix(inner)))
        elif inside:
            outside = next(name for name in names if name not in inside)
            findings.append(
                finding(
                    "M354", place=step.place, subject=outside, step=step.id, inside=inside[0], outside=outside, prefix=prefix
                )
            )
    return tuple(scoped)


def mounted_steps(steps: Iterable[DerivedStep], prefix: str) -> tuple[DerivedStep, ...]:
    """Return the same steps under a longer prefix."""
    return tuple(renamed(step, (f"{prefix}.{name}" for name in step.inputs), f"{prefix}.{step.output}") for step in steps)


def _at_all_values(number: int, step: Finalize, names: Names, domains: Domains) -> Iterator[DerivedStep]:
    output = bound(step.output, names, domains, step.place)
    inputs = [bound(each, names, domains, step.place) for each in step.inputs]
    indices = list(dict.fromkeys(index for template in (output, *inputs) for index in template.indices))
    for values in product(*(domains[index] for index in indices)):
        bindings: Bindings = dict(zip(indices, values, strict=True))
        if step.when is None or names.evaluate(step.when, bindings, step.place):
            yield DerivedStep(
                number=number,
                id=step.id,
                kind=step.kind,
                inputs=tuple(template.name(bindings) for template in inputs),
                output=output.name(bindings),
                bindings=bindings,
                operations=_operations(step, names, bindings),
                consumes=step.consumes,
                restore=step.restore,
                place=step.place,
            )


def _operations(step: Finalize, names: Names, bindings: Bindings) -> tuple[Operation, ...]:
    operations = []
    axes: list[str] = []
    for each in step.do:
        if each.formula is not None:
            axes = [axis[0] if len(axis) == 1 else "" for axis in each.formula.right]
        operations.append(_operation(each, axes, names, bindings))
    return tuple(operations)


def _operation(operation: StepOperation, axes: Sequence[str], names: Names, bindings: Bindings) -> Operation:
    place = operation.place
    ranges = []
    for axis, bounds in operation.ranges.items():
        start, stop = (
            require_size(names.evaluate(each, bindings, place), f"a bound of {axis!r}", place, least=0) for each in bounds
        )
        ranges.append((axes.index(axis), start, stop))
    arguments = [names.evaluate(each, bindings, place) for each in operation.arguments]
    sizes = {name: names.evaluate(size, bindings, place) for name, size in operation.sizes.items()}
    dtype = ""
    if operation.formula is not None:
        for name, size in sizes.items():
            require_size(size, f"the factor {name!r}", place)
    elif operation.name == "cast":
        if arguments[0] not in _TORCH_DTYPES:
            expected = "a dtype such as bfloat16"
            raise MapperError([finding("M304", place=place, what="dtype", found=arguments[0], expected=expected)])
        dtype = str(arguments[0])
    blocks = tuple(require_size(each, "a block", place) for each in arguments) if operation.name == "dequantize" else ()
    return Operation(
        operation.name, operation.formula, tuple(ranges), blocks, dtype, operation.function, tuple(sizes.items())
    )  # fmt: skip


def _graph_findings(steps: Sequence[DerivedStep], families: Sequence[Family]) -> Iterator[Diagnostic]:
    targets = _Targets(families)
    writers: dict[str, DerivedStep] = {}
    faulty: set[tuple[str, int]] = set()
    for step in steps:
        other = writers.setdefault(step.output, step)
        if other is not step and ("M351", step.number) not in faulty:
            faulty.add(("M351", step.number))
            related = [("the other step", other.place)] if other.number != step.number else []
            yield finding("M351", place=step.place, subject=step.output, name=step.output, related=related)
        rule = targets.find(step.output)
        if rule is not None and ("M352", step.number) not in faulty:
            faulty.add(("M352", step.number))
            related = [("the rule", rule.rule.place)]
            yield finding("M352", place=step.place, subject=step.output, step=step.id, name=step.output, related=related)
    unwritten: dict[tuple[int, int], tuple[DerivedStep, str]] = {}
    written: set[tuple[int, int]] = set()
    for step in steps:
        for position, name in enumerate(step.inputs):
            if name in writers or targets.find(name) is not None:
                written.add((step.number, position))
            else:
                unwritten.setdefault((step.number, position), (step, name))
    for key, (step, name) in unwritten.items():
        if key not in written:
            yield finding("M350", place=step.place, subject=name, step=step.id, name=name)
    if not faulty:
        circle = in_order(steps)[1]
        if circle:
            yield finding("M353", place=circle[0].place, subject=circle[0].output, chain=_chain(circle))


def _chain(circle: Sequence[DerivedStep]) -> str:
    """Return one circle among steps that all wait: each step follows one that it waits for."""
    writers = {step.output: step for step in circle}
    path = [circle[0].output]
    while path.count(path[-1]) == 1:
        path.append(next(name for name in writers[path[-1]].inputs if name in writers))
    return " <- ".join(path[path.index(path[-1]) :])


class _Targets:
    """Which rule writes a name, found by its last segment."""

    def __init__(self, families: Iterable[Family]) -> None:
        self._by_end: dict[tuple[int, str], list[Family]] = {}
        for family in families:
            last = family.target.segments[-1]
            assert not isinstance(last, str), "a target has no wildcards"
            for text in last.texts:
                self._by_end.setdefault((len(family.target.segments), text), []).append(family)

    def find(self, name: str) -> Family | None:
        parts = name.split(".")
        return next(
            (each for each in self._by_end.get((len(parts), parts[-1]), ()) if each.target.match(name) is not None), None
        )
