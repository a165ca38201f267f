"""What can be said about the operations of a rule before any config is known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from mapper.diagnostics import Diagnostic, finding
from mapper.messages.suggest import did_you_mean
from mapper.spec.model import Format, Formula, Rule, ValueOperation
from mapper.spec.operations import FORMULAS, PART
from mapper.spec.scope import LEAF, Scope, iter_name_findings


def iter_value_operation_findings(rule: Rule, scope: Scope, formats: Sequence[Format]) -> Iterator[Diagnostic]:
    """Yield what is wrong with the `do` of a rule, whose sources are in `formats`."""
    leaves = {leaf.name for each in formats for alternative in each.alternatives for leaf in alternative.leaves}
    for name, operations in rule.do.items():
        if name and name not in leaves:
            place, hint = operations[0].place, did_you_mean(name, leaves)
            problem = f"the rule has no leaf {name!r}" + ("" if leaves else f", for its target has no {{{LEAF}}}")
            yield finding("M228", place=place, hint=hint, op="do", problem=problem)
        for each in operations:
            yield from _iter_findings(each, rule, scope)
            if each.name == "fill" and (len(operations) > 1 or rule.cast is None or rule.dims is None):
                problem = "it reads nothing, so the rule needs `dims` and `cast`, and no other operation"
                yield finding("M228", place=each.place, op=each.text, problem=problem)


def _iter_findings(operation: ValueOperation, rule: Rule, scope: Scope) -> Iterator[Diagnostic]:
    for expression in (*(size for sizes in operation.sizes.values() for size in sizes), operation.value):
        yield from iter_name_findings(expression, scope, operation.place)
    if rule.tie is not None:
        yield finding("M228", place=operation.place, op=operation.text, problem="a tied target is its twin, nothing is read")
    dims = list(rule.dims or {})
    if operation.formula is not None:
        if rule.dims is None:
            yield finding("M228", place=operation.place, op=operation.text, problem="the rule needs `dims`")
        elif operation.formula.text:
            yield from _iter_formula_findings(operation, operation.formula, rule)
        return
    if operation.sizes or operation.parts:
        given = next(iter(operation.sizes), "parts")
        problem = f"{given!r} is for {' and '.join(map(repr, FORMULAS))}"
        yield finding("M228", place=operation.place, op=operation.text, problem=problem)
    if operation.dim and operation.dim not in dims:
        hint = did_you_mean(operation.dim, dims)
        problem = f"the rule has no dim {operation.dim!r}"
        yield finding("M228", place=operation.place, hint=hint, op=operation.text, problem=problem)


def _iter_formula_findings(operation: ValueOperation, formula: Formula, rule: Rule) -> Iterator[Diagnostic]:
    dims = list(rule.dims or {})
    for problem, hint in _formula_problems(operation, formula, dims):
        yield finding("M227", place=operation.place, hint=hint, formula=formula.text, problem=problem)
    num_parts = max((len(dim.sizes) for dim in (rule.dims or {}).values()), default=1)
    if any(part > num_parts for part in operation.parts):
        problem = f"there is no part {max(operation.parts)}, the dims of the rule have {num_parts}"
        yield finding("M228", place=operation.place, op=operation.text, problem=problem)


def _formula_problems(operation: ValueOperation, formula: Formula, dims: list[str]) -> Iterator[tuple[str, str]]:
    """Yield (problem, hint)."""
    if len(formula.left) != len(dims) or len(formula.right) != len(dims):
        given = f"{len(formula.left)} axes on the left and {len(formula.right)} on the right"
        yield f"{given}, expected {len(dims)} on each side: {', '.join(dims)}", ""
        return
    names = [name for factors in formula.left for name in factors]
    for name, count in Counter(names).items():
        if count > 1:
            yield f"the factor {name!r} stands twice on one side", ""
            return
    for dim, left, right, is_bare in zip(dims, formula.left, formula.right, formula.bare, strict=True):
        if is_bare and left != (dim,):
            hint = "" if left[0] in dims else did_you_mean(left[0], dims)
            yield f"the axis {left[0]!r} stands where the dim {dim!r} is", hint
        elif len(set(right)) < len(right):
            yield f"a factor of {dim!r} stands twice on one side", ""
        elif operation.name == "view" and set(left) != set(right):
            lost = sorted(set(left) ^ set(right))
            yield f"the factor {lost[0]!r} of {dim!r} is on one side only", ""
        elif operation.name == "repeat" and not set(left) <= set(right):
            yield f"the factor {sorted(set(left) - set(right))[0]!r} of {dim!r} is lost", ""
    known = {*names, *(name for factors in formula.right for name in factors)} - set(dims)
    for name in operation.sizes:
        if name not in known or name == PART:
            of = "follows from the parts of the dim" if name == PART else "is no factor of the view"
            yield f"the size of {name!r} is given, which {of}", did_you_mean(name, known)
