"""The case that would find a mutant which nothing else finds."""

from __future__ import annotations

import json

from mapper.cases.effect import effects
from mapper.compiler import compile
from mapper.diagnostics import MapperError
from mapper.spec.model import Spec
from mapper.testing.mutation.mutant import Mutant
from mapper.testing.mutation.structure import Difference


def case_to_add(mutant: Mutant, spec: Spec, difference: Difference) -> str:
    """Return the YAML lines of a case that holds for the spec and not for the mutant; empty where no case can tell them apart.

    A case says where one source goes on one rank. It cannot say which layouts are refused, what padding holds, or which of
    several spellings counts.
    """
    setting, name = difference.setting, difference.source
    if name is None or setting.config.is_odd:
        return ""
    for rank in range(setting.layout.num_ranks):
        pinned, changed = (_effects(each, difference, name, rank) for each in (spec, mutant.spec))
        if pinned and pinned != changed:
            lines = [f"  - config: {setting.config.name}", f"    runtime: {setting.runtime}"]
            lines += [f"    layout: {setting.layout}", f"    rank: {rank}"] if setting.layout.num_ranks > 1 else []
            lines += [f"    options: {json.dumps(dict(setting.options))}"] if setting.options else []
            targets = [target for _, target in pinned]
            value = targets[0] if len(targets) == 1 else json.dumps(targets)
            return "\n".join([*lines, "    maps:", f"      {pinned[0][0]}: {value}"])
    return ""


def _effects(spec: Spec, difference: Difference, name: str, rank: int) -> list[tuple[str, str]]:
    setting = difference.setting
    try:
        program = compile(
            spec,
            config=setting.config.whole,
            runtime=setting.runtime,
            layout=setting.layout,
            rank=rank,
            options=setting.options,
        )
    except MapperError:
        return []
    return [(str(each.source), str(each.target)) for each in effects(program, name)]
