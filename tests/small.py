"""Programs of a few rules, and what they plan for headers that lie in no file, spelled as lines."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from mapper.checkpoint import TensorHeader
from mapper.compiler import Program, compile
from mapper.diagnostics import Diagnostic, MapperError
from mapper.layout import Layout
from mapper.plan import Plan, Step
from mapper.plan.matching import match
from mapper.plan.plan import assemble
from mapper.regions import spell
from mapper.testing.specs import spec_from

Headers = dict[str, TensorHeader]


def program_of(
    text: str, *, layout: str = "", rank: int = 0, config: Mapping[str, object] | None = None, **options: object
) -> Program:
    """Return the program of the runtime `own` of a spec without its head."""
    spec = spec_from(text)
    return compile(
        spec, config={} if config is None else config, runtime="own", layout=Layout.parse(layout), rank=rank, options=options
    )


def rules(*lines: str, before: str = "", runtime: str = "mesh: vllm") -> str:
    """Return the text of a spec whose runtime `own` has these rules, each on one line in flow style."""
    listed = "".join(f"      - {line}\n" for line in lines)
    return f"{before}\nruntimes:\n  own:\n    {runtime}\n    rules:\n{listed}"


def headers(**shapes: tuple[int, ...]) -> Headers:
    """Return float32 headers; `__` stands for the dot in a name."""
    return {name.replace("__", "."): TensorHeader("F32", shape, "f", 0, 0) for name, shape in shapes.items()}


def plan_of(program: Program, tensors: Headers) -> Plan:
    """Return the plan of the program's rank, its findings in it."""
    return assemble(match(program.families, program.skips, tensors), program.share, program.keeps, tensors)


def lines_of(plan: Plan) -> list[str]:
    """Return every copy of a plan, then its padding: `source[box] -> target[box]`, with what lies between in brackets."""
    padding = [f"{value:g} -> {target}{spell(box)}" for target, box, value in plan.padding()]
    return [*map(_line, plan.steps()), *padding]


def refused(text: str, *, layout: str = "", config: Mapping[str, object] | None = None) -> Diagnostic:
    """Return the only finding with which the program is refused."""
    with pytest.raises(MapperError) as caught:
        program_of(text, layout=layout, config=config)
    (found,) = caught.value.diagnostics
    return found


def _line(step: Step) -> str:
    between = ""
    if step.reading is not None:
        words = []
        if step.reading.disk is not None:
            disk = step.reading.disk
            words.append(f"{list(disk.shape)} as {list(disk.viewed)} in order {list(disk.order)}")
        if step.reading.scaling is not None:
            words.append(f"times {step.scale}{spell(step.reading.scaling.box(step.source_box))}")
        if step.reading.conversion is not None:
            words.append(f"{step.reading.conversion.by} to {step.reading.conversion.dtype}")
        between = f" ({', '.join(words)})"
    return f"{step.source}{spell(step.source_box)}{between} -> {step.target}{spell(step.target_box)}"
