"""Rules that a reader would doubt: a cut without its unit, padding without its value, a bias without its place."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from mapper.compiler.expand import FlatRule, flatten
from mapper.compiler.names import Names
from mapper.diagnostics import Diagnostic, Place, finding
from mapper.expressions import Expression
from mapper.lint.programs import Attempts
from mapper.plan.family import Family
from mapper.spec.model import Let, Shard, Spec

MAX_DEPTH = 20
COUNTS = ("_heads", "_groups")
HEAD_SIZE = "head_dim"
UNITS = (*COUNTS, HEAD_SIZE)
"""How names end that count units, and that say how many rows a unit has."""

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
    for size in dim.sizes:
        factor = next((unit for each in _products(size, flat.names, 0) if (unit := _unit(each)) is not None), None)
        if factor is not None:
            count = f"`units: {factor}`" if factor.endswith(COUNTS) else "the number of heads as `units`"
            return finding(
                "M811", place=shard.place, subject=flat.target.text, severity="warning",
                hint=f"write {count}, or `units: {size.text}` to insist",
                dim=shard.dim, rule=flat.rule.id or flat.target.text, factor=factor,
            )  # fmt: skip
    return None


def _without_fill(flat: FlatRule, shard: Shard) -> Diagnostic | None:
    key = "pad_rank" if shard.pad_rank is not None else "uneven" if shard.uneven == "pad" else None
    if key is None or shard.fill is not None or "leaf" in flat.target.names:
        return None
    return finding(
        "M812", place=shard.place, subject=flat.target.text, severity="warning",
        dim=shard.dim, rule=flat.rule.id or flat.target.text, key=key,
    )  # fmt: skip


def _unit(factors: list[str]) -> str | None:
    """Return the factor that says that a product counts rows of heads or groups; a bare count of heads has no rows in it."""
    counts = [each for each in factors if each.endswith(COUNTS)] if len(factors) > 1 else []
    sizes = [each for each in factors if _is_head_size(each)]
    return next(iter(counts + sizes), None)


def _is_head_size(text: str) -> bool:
    """Whether the text is a head size, or adds up head sizes."""
    names = [node.id for node in ast.walk(ast.parse(text, mode="eval")) if isinstance(node, ast.Name)]
    return bool(names) and all(name.endswith(HEAD_SIZE) for name in names)


def _products(expression: Expression, names: Names, depth: int) -> list[list[str]]:
    """Return the factors of an expression, lets written out; a list for each branch that it may take."""
    if depth >= MAX_DEPTH:
        return [[expression.text]]
    return _products_of(ast.parse(expression.text.strip(), mode="eval").body, names, depth)


def _products_of(node: ast.expr, names: Names, depth: int) -> list[list[str]]:
    match node:
        case ast.Name(id=name) | ast.Call(func=ast.Name(id=name)):
            let, level = _let(name, names)
            if let is None or level is None:
                return [[ast.unparse(node)]]
            inner = _products(let.expression, level, depth + 1)
            is_opaque = all(len(factors) == 1 and not factors[0].endswith(UNITS) for factors in inner)
            return [[name]] if is_opaque and name.endswith(UNITS) else inner
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            rights = _products_of(right, names, depth)
            return [[*one, *other] for one in _products_of(left, names, depth) for other in rights]
        case ast.BinOp(left=left, op=ast.FloorDiv()):
            return _products_of(left, names, depth)
        case ast.IfExp(body=body, orelse=orelse):
            return _products_of(body, names, depth) + _products_of(orelse, names, depth)
        case _:
            return [[ast.unparse(node)]]


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
