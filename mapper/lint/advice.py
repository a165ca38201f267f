"""Rules that a reader would doubt: a cut without its unit, padding without its value, a bias without its place."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from mapper.compile.expand import FlatRule, flatten
from mapper.compile.names import Names
from mapper.diagnostics import Diagnostic, Place, finding
from mapper.expressions import Expression
from mapper.lint.programs import Attempts
from mapper.plan.family import Family
from mapper.spec.model import Let, Shard, Spec

MAX_DEPTH = 20
UNIT_SUFFIXES = ("_heads", "_groups", "head_dim")
BIAS_KEYS = {"attention_bias": "attn", "mlp_bias": "mlp"}
"""Keys of config.json that say whether a bias is there, and a word in the names of the modules that they are about."""


def flat_rules(spec: Spec) -> Iterator[tuple[str, FlatRule]]:
    """Yield every rule of every runtime outside its groups, with the runtime's name."""
    for name, runtime in spec.runtimes.items():
        names = Names({}, {**spec.let, **runtime.let}, {**spec.index, **runtime.index})
        for flat in flatten(runtime.rules, spec.blocks, names):
            yield name, flat


def doubtful_cuts(spec: Spec) -> Iterator[Diagnostic]:
    """Yield M811 and M812 for the cuts of all rules, each once where several runtimes use a rule."""
    seen: set[tuple[str, Place]] = set()
    for _, flat in flat_rules(spec):
        for shard in flat.rule.shard.values():
            for each in (_without_unit(flat, shard), _without_fill(flat, shard)):
                if each is not None and each.place is not None and (each.code, each.place) not in seen:
                    seen.add((each.code, each.place))
                    yield each


def doubtful_biases(attempts: Attempts) -> Iterator[Diagnostic]:
    """Yield M813 for each rule that cuts a dim which its bias lacks, says nothing of it, and whose config has a bias."""
    seen: set[Place] = set()
    for attempt, program in attempts.programs:
        for family in program.families:
            place = family.rule.place
            if family.refusal and place not in seen and _has_bias(family, attempts.configs[attempt.config]):
                seen.add(place)
                dim = _summed_dim(family, program.families)
                yield finding(
                    "M813", place=place, subject=str(family.target), severity="warning",
                    rule=family.rule.text, dim=dim, config=attempt.config_text,
                )  # fmt: skip


def _without_unit(flat: FlatRule, shard: Shard) -> Diagnostic | None:
    dim = (flat.rule.dims or {}).get(shard.dim)
    if dim is None or shard.units or all(axis is None for axis in shard.axis):
        return None
    factors = [factor for size in dim.sizes for factor in _factors(size, flat.names, 0)]
    factor = next((each for each in factors if _is_unit(each)), None)
    if factor is None:
        return None
    return finding(
        "M811", place=shard.place, subject=flat.target.text, severity="warning",
        dim=shard.dim, rule=flat.rule.id or flat.target.text, factor=factor,
    )  # fmt: skip


def _without_fill(flat: FlatRule, shard: Shard) -> Diagnostic | None:
    key = "pad_rank" if shard.pad_rank is not None else "uneven" if shard.uneven == "pad" else None
    if key is None or shard.fill is not None or "leaf" in flat.target.names:
        return None
    return finding(
        "M812", place=shard.place, subject=flat.target.text, severity="warning",
        dim=shard.dim, rule=flat.rule.id or flat.target.text, key=key,
    )  # fmt: skip


def _is_unit(name: str) -> bool:
    return name.endswith(UNIT_SUFFIXES)


def _factors(expression: Expression, names: Names, depth: int) -> Iterator[str]:
    """Yield the names that an expression is a product of, seen through lets."""
    if depth < MAX_DEPTH:
        yield from _factors_of(ast.parse(expression.text.strip(), mode="eval").body, names, depth)


def _factors_of(node: ast.expr, names: Names, depth: int) -> Iterator[str]:
    match node:
        case ast.Name(id=name):
            yield name
            yield from _factors_of_let(name, names, depth)
        case ast.Call(func=ast.Name(id=name)):
            yield from _factors_of_let(name, names, depth)
        case ast.BinOp(left=left, op=ast.Mult(), right=right) | ast.IfExp(body=left, orelse=right):
            yield from _factors_of(left, names, depth)
            yield from _factors_of(right, names, depth)
        case ast.BinOp(left=left, op=ast.FloorDiv()):
            yield from _factors_of(left, names, depth)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub(), right=right):
            # a sum of head sizes is a head size
            others = list(_factors_of(right, names, depth))
            if any(map(_is_unit, others)):
                yield from (each for each in _factors_of(left, names, depth) if _is_unit(each))


def _factors_of_let(name: str, names: Names, depth: int) -> Iterator[str]:
    let, level = _let(name, names)
    if let is not None and level is not None:
        yield from _factors(let.expression, level, depth + 1)


def _let(name: str, names: Names | None) -> tuple[Let | None, Names | None]:
    while names is not None:
        if name in names.lets:
            return names.lets[name], names
        names = names.parent
    return None, None


def _has_bias(family: Family, config: Mapping[str, object]) -> bool:
    if not family.optional:
        return True
    return any(config.get(key) is True and word in str(family.target) for key, word in BIAS_KEYS.items())


def _summed_dim(family: Family, families: tuple[Family, ...]) -> str:
    """Return the cut dim that the bias does not have."""
    own = {axis.dim for axis in family.axes or ()}
    beside = (each for each in families if each.rule.number == family.rule.number)
    return next(axis.dim for each in beside for axis in each.axes or () if axis.cut is not None and axis.dim not in own)
