"""What each key of a config does in a spec, read off the expressions that mention it."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from mapper.expressions import Expression
from mapper.spec.model import Item, Let, Rule, Spec


@dataclass(frozen=True, slots=True)
class Roles:
    """Config keys by what they do; a key may do several things.

    `layers` and `experts` count the values of an index on pp and ep, `counts` those of other indices. `units` count heads or
    groups that a cut keeps whole, `few_units` those of a part that may have fewer than there are ranks. `cut_by_units`,
    `cut_by_elements` and `joined` are sizes of dims that are cut or have parts, `padded` of dims that are padded first, and
    `sizes` of all dims. `thresholds` are compared with an index, `moduli` divide one, `per_layer` are lists that an index
    reads, `members` lists that it is looked up in. `compared` are the constants that a key is compared with.
    """

    layers: set[str] = field(default_factory=set)
    experts: set[str] = field(default_factory=set)
    counts: set[str] = field(default_factory=set)
    units: set[str] = field(default_factory=set)
    few_units: set[str] = field(default_factory=set)
    cut_by_units: set[str] = field(default_factory=set)
    cut_by_elements: set[str] = field(default_factory=set)
    joined: set[str] = field(default_factory=set)
    padded: set[str] = field(default_factory=set)
    sizes: set[str] = field(default_factory=set)
    thresholds: set[str] = field(default_factory=set)
    moduli: set[str] = field(default_factory=set)
    per_layer: set[str] = field(default_factory=set)
    members: set[str] = field(default_factory=set)
    compared: dict[str, list[object]] = field(default_factory=dict)


def roles_of(spec: Spec) -> Roles:
    """Return what the keys of a spec's config do, over all of its runtimes."""
    roles = Roles()
    lets: dict[str, Let] = {**spec.let}
    for runtime in spec.runtimes.values():
        lets.update(runtime.let)
    for rule_lets in _group_lets(spec):
        lets.update(rule_lets)
    for index in [*spec.index.values(), *(each for runtime in spec.runtimes.values() for each in runtime.index.values())]:
        chosen = {"pp": roles.layers, "ep": roles.experts}.get(index.axis or "", roles.counts)
        if index.count is not None:
            chosen |= _keys(index.count, lets, spec)
    roles.counts.difference_update(roles.layers)
    for rule in _rules(spec):
        _read_dims(rule, lets, spec, roles)
    for expression in _expressions(spec, lets):
        _read_tree(ast.parse(expression.text.strip(), mode="eval"), spec, roles)
    return roles


def constants_compared_with(spec: Spec, name: str) -> list[object]:
    """Return the constants that a built-in name is compared with in the spec's own expressions."""
    roles = Roles()
    for expression in _expressions(spec, spec.let):
        _read_tree(ast.parse(expression.text.strip(), mode="eval"), spec, roles, also=name)
    return roles.compared.get(name, [])


def _read_dims(rule: Rule, lets: Mapping[str, Let], spec: Spec, roles: Roles) -> None:
    for name, dim in (rule.dims or {}).items():
        keys = {key for size in dim.sizes for key in _keys(size, lets, spec)}
        roles.sizes.update(keys)
        if dim.has_parts:
            roles.joined.update(keys)
        shard = rule.shard.get(name)
        if shard is None or not any(shard.axis):
            continue
        if shard.axis == ("ep",):
            roles.experts.update(keys)
            continue
        (roles.cut_by_units if shard.units else roles.cut_by_elements).update(keys)
        if shard.pad is not None:
            roles.padded.update(keys)
        for number, unit in enumerate(shard.units):
            alone = unit.text if unit.text in spec.config else None
            if alone is not None:
                (roles.few_units if number else roles.units).add(alone)
            else:
                roles.units.update(_keys(unit, lets, spec) - keys)
                roles.cut_by_elements.update(_keys(unit, lets, spec) & keys)


def _read_tree(tree: ast.AST, spec: Spec, roles: Roles, also: str = "") -> None:
    for node in ast.walk(tree):
        match node:
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                for one, other in ((left, right), (right, left)):
                    if not isinstance(one, ast.Name) or (one.id not in spec.config and one.id != also):
                        continue
                    if isinstance(other, ast.Constant):
                        roles.compared.setdefault(one.id, []).append(other.value)
                    elif isinstance(op, ast.In | ast.NotIn):
                        roles.members.add(one.id)
                    else:
                        roles.thresholds.add(one.id)
            case ast.BinOp(op=ast.Mod(), right=ast.Name(id=name)):
                roles.moduli.add(name)
            case ast.Subscript(value=ast.Name(id=name), slice=ast.Name()):
                roles.per_layer.add(name)


def _keys(expression: Expression, lets: Mapping[str, Let], spec: Spec) -> set[str]:
    """Return the config keys that an expression comes down to."""
    found: set[str] = set()
    todo, seen = [expression], set[str]()
    while todo:
        tree = ast.parse(todo.pop().text.strip(), mode="eval")
        for node in ast.walk(tree):
            if not isinstance(node, ast.Name) or node.id in seen:
                continue
            seen.add(node.id)
            if node.id in lets:
                todo.append(lets[node.id].expression)
            elif node.id in spec.config:
                found.add(node.id)
    return found


def _expressions(spec: Spec, lets: Mapping[str, Let]) -> Iterator[Expression]:
    yield from (each.expression for each in lets.values())
    for runtime in spec.runtimes.values():
        yield from (each.that for each in runtime.requires)
        yield from (skip.when for skip in runtime.skip if skip.when is not None)
        yield from (keep.when for keep in runtime.keep if keep.when is not None)
        for form in runtime.formats.values():
            yield from (each.when for each in form.alternatives if each.when is not None)
    for form in spec.formats.values():
        if not form.place.file.endswith("builtin.yaml"):
            yield from (each.when for each in form.alternatives if each.when is not None)
    for items in _item_lists(spec):
        yield from (item.when for item in _walk(items) if item.when is not None)


def _rules(spec: Spec) -> Iterator[Rule]:
    for items in _item_lists(spec):
        yield from (item for item in _walk(items) if isinstance(item, Rule))


def _group_lets(spec: Spec) -> Iterator[Mapping[str, Let]]:
    for items in _item_lists(spec):
        yield from (item.let for item in _walk(items) if not isinstance(item, Rule))


def _item_lists(spec: Spec) -> Iterator[Iterable[Item]]:
    yield from spec.blocks.values()
    yield from (runtime.rules for runtime in spec.runtimes.values())


def _walk(items: Iterable[Item]) -> Iterator[Item]:
    for item in items:
        yield item
        if not isinstance(item, Rule):
            yield from _walk(item.items)
