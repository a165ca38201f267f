"""Which option, set otherwise, would make a plan fit a model: a kernel's choice that the model was built with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from mapper.checkpoint import TensorHeader
from mapper.compiler.program import Program, compile
from mapper.diagnostics import Diagnostic, MapperError
from mapper.expressions import Value
from mapper.plan.matching import match
from mapper.plan.targets import DeclaredTarget, fit

MAX_SIZES = 8
"""An option that is a number is tried with 1 and with at most this many sizes that the model's parameters have."""


def with_options(
    program: Program,
    tensors: Mapping[str, TensorHeader],
    declared: Mapping[str, DeclaredTarget],
    findings: Sequence[Diagnostic],
) -> list[Diagnostic]:
    """Return the findings of `fit`, each that one option alone would settle with a hint that names it.

    An option counts where its other value leaves a part of the findings and adds none.
    """
    settled: dict[Diagnostic, str] = {}
    for option, value in _others(program, declared, findings) if findings and not program.root else ():
        left = _findings(program, tensors, declared, option, value)
        if left is None or not left < set(map(_key, findings)):
            continue
        note = program.spec.options[option].note
        hint = f"the option {option} is {_spell(program.options[option])} here; with {option}={_spell(value)} "
        for each in findings:
            if _key(each) not in left:
                settled.setdefault(
                    each, f"{hint}the rules give what the model has" + (f" ({note.rstrip('.')})" if note else "")
                )
    return [replace(each, hint=settled.get(each, each.hint)) for each in findings]


def _others(
    program: Program, declared: Mapping[str, DeclaredTarget], findings: Sequence[Diagnostic]
) -> Iterator[tuple[str, Value]]:
    """Yield (option, value) for the other truth value of each switch, and for likely values of each number."""
    wrong = {each.subject for each in findings}
    sizes = dict.fromkeys(size for name, each in declared.items() if name in wrong for size in each.shape)
    for option, value in program.options.items():
        if isinstance(value, bool):
            yield option, not value
        elif isinstance(value, int):
            yield from ((option, other) for other in (1, *list(sizes)[:MAX_SIZES]) if other != value)


def _findings(
    program: Program,
    tensors: Mapping[str, TensorHeader],
    declared: Mapping[str, DeclaredTarget],
    option: str,
    value: Value,
) -> set[tuple[str, str]] | None:
    """Return what would not fit with the option's other value, None where the spec does not compile with it."""
    try:
        other = compile(
            program.spec,
            config=program.config,
            runtime=program.runtime,
            layout=program.layout,
            rank=program.rank,
            options={**program.options, option: value},
        )
    except MapperError:
        return None
    plan = other.assemble(match(other.families, other.skips, tensors), tensors)
    return set(map(_key, fit(plan, declared).findings))


def _key(diagnostic: Diagnostic) -> tuple[str, str]:
    return diagnostic.code, diagnostic.subject


def _spell(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
