"""Checkpoints as a spec describes them: everything that a runtime reads, and what it skips."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress

import torch
from hypothesis import event
from hypothesis import strategies as st

from mapper.spec.model import Spec
from mapper.testing.reference import Declared, Misfit, declared_sources, matches, skip_patterns
from mapper.testing.reference.arrays import dtype_of
from mapper.testing.strategies.quiet import Case
from mapper.testing.strategies.values import unique_values
from mapper.testing.tensors import Tensors

WEIGHT_DTYPES = ("bfloat16", "bfloat16", "float16", "float32")


def checkpoints(
    spec: Spec, runtime: str, config: Mapping[str, object], options: Mapping[str, object] | None = None
) -> st.SearchStrategy[Tensors]:
    """Return the tensors of checkpoints in the order of their files.

    Where a rule has several spellings, one is drawn; optional sources are there or not, a whole leaf of a rule at a time.
    What other runtimes of the spec read is there too where this one skips it, and a name of its own for each skip; what is
    skipped as a copy is one.
    """
    return _checkpoints(Case(spec, runtime, config, options or {}))


@st.composite
def _checkpoints(draw: st.DrawFn, case: Case) -> Tensors:
    weight, scale = dtype_of(draw(st.sampled_from(WEIGHT_DTYPES))), torch.float32
    vector = draw(st.sampled_from((weight, torch.float32)))
    declared = _declared(case)
    shapes = {each.name: each.shape for runtime in declared.values() for each in runtime if each.shape is not None}
    chosen = _chosen_sources(draw, declared[case.runtime])
    patterns = skip_patterns(case.spec, config=case.config, runtime=case.runtime, options=case.options)
    skipped = _skipped_sources(draw, case.runtime, declared, patterns)
    tensors = Tensors()
    start = 0
    for each in {each.name: each for each in [*chosen, *skipped]}.values():
        shape = each.shape
        if shape is None:
            shape = shapes.get(each.name, (5, 3) if each.leaf in ("", "weight") else (5,))
        if shape in ((), (1,)):  # one element is stored either way
            shape = draw(st.sampled_from(((), (1,))))
        is_scale = "scale" in each.leaf
        dtype = scale if is_scale else vector if len(shape) < 2 and not each.leaf else weight
        if each.dtype is not None:
            dtype = dtype_of(each.dtype)
        tensors[each.name] = unique_values(shape, dtype, start)
        start += tensors[each.name].numel()
    for name, original in patterns.items():
        if original is not None and original in tensors and name in tensors:
            tensors[name] = tensors[original].clone()
    event(f"fp8: {any(tensor.dtype == torch.float8_e4m3fn for tensor in tensors.values())}")
    return tensors


def _chosen_sources(draw: st.DrawFn, declared: list[Declared]) -> list[Declared]:
    alternatives: dict[int, set[int]] = {}
    for each in declared:
        alternatives.setdefault(each.rule, set()).add(each.alternative)
    spelling = {rule: draw(st.sampled_from(sorted(numbers))) for rule, numbers in alternatives.items() if len(numbers) > 1}
    passing = {each.rule for each in declared if each.passes_over_others}
    has_others = {rule: draw(st.booleans()) for rule in spelling if rule in passing}
    optional = dict.fromkeys((*each.group, each.alternative) for each in declared if each.is_optional)
    present = {group for group in optional if draw(st.booleans())}
    chosen = []
    for each in declared:
        number = spelling.get(each.rule, 0)
        is_wanted = each.alternative == number or (has_others.get(each.rule, False) and each.alternative > number)
        if is_wanted and not each.is_refused and (not each.is_optional or (*each.group, each.alternative) in present):
            chosen.append(each)
    return chosen


def _skipped_sources(
    draw: st.DrawFn, runtime: str, declared: Mapping[str, list[Declared]], patterns: Iterable[str]
) -> list[Declared]:
    """Return what the other runtimes read and this one skips, and one made-up name per skip."""
    found: dict[str, Declared] = {}
    claimed = {each.name for each in declared[runtime]}
    for each in (each for other in declared if other != runtime for each in declared[other]):
        if each.name not in claimed and any(matches(pattern, each.name) for pattern in patterns):
            found.setdefault(each.name, each)
    middle = draw(st.sampled_from(("extra.weight", "extra", "model.layers.0.extra")))
    for pattern in patterns:
        name = ".".join(middle if part == "**" else "extra" if part == "*" else part for part in pattern.split("."))
        if name not in claimed:
            found.setdefault(name, Declared(name, (3,), "float32", -1, 0, (-1, ""), "", False, False, False, False))
    return list(found.values())


def _declared(case: Case) -> dict[str, list[Declared]]:
    """Return what each runtime reads, as far as it accepts the config."""
    found: dict[str, list[Declared]] = {}
    for runtime in case.spec.runtimes:
        with suppress(Misfit, IndexError):
            found[runtime] = declared_sources(case.spec, config=case.config, runtime=runtime, options=case.options)
    return found
