"""Names from patterns: every name that a pattern can mean is written out; wildcards are compared segment by segment."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

from mapper.testing.reference.evaluate import Misfit, Scope, evaluate, names_in

LEAF = "leaf"


def join(*texts: str) -> str:
    """Return patterns set one below the other; empty ones count for nothing."""
    return ".".join(text for text in texts if text)


@cache
def pieces(pattern: str) -> list[tuple[str, bool]]:
    """Return the texts of a pattern in order, each with whether it stood in braces.

    >>> pieces('layers.{layer - 1}.w')
    [('layers.', False), ('layer - 1', True), ('.w', False)]
    """
    found: list[tuple[str, bool]] = []
    rest = pattern
    while rest:
        before, brace, after = rest.partition("{")
        found.append((before, False))
        if not brace:
            break
        inside, _, rest = after.partition("}")
        found.append((inside, True))
    return [(text, is_expression) for text, is_expression in found if text]


def indices_in(pattern: str, known: Iterable[str]) -> list[str]:
    """Return the indices that a pattern's placeholders mention, in order of appearance."""
    found: dict[str, None] = {}
    for text, is_expression in pieces(pattern):
        if is_expression:
            found.update(dict.fromkeys(name for name in known if name in names_in(text)))
    return list(found)


def has_leaf(pattern: str) -> bool:
    return (LEAF, True) in pieces(pattern)


def spell(pattern: str, scope: Scope, *, leaf: str | None = None) -> str:
    """Return the one name that a pattern means where every placeholder has a value."""
    values = scope if leaf is None else scope.with_values({LEAF: leaf})
    return "".join(_spelled(text, values) if is_expression else text for text, is_expression in pieces(pattern))


def _spelled(text: str, scope: Scope) -> str:
    value = evaluate(text, scope)
    if isinstance(value, int) and value < 0:
        raise Misfit(f"{text!r} in a name is {value}")
    return str(value)


def matches(pattern: str, name: str) -> bool:
    """Say whether a spelled-out pattern with `*` and `**` means a name.

    >>> matches('**.inv_freq', 'model.layers.0.inv_freq'), matches('a.*', 'a.b.c')
    (True, False)
    """
    return _segments_match(pattern.split("."), name.split("."))


def _segments_match(pattern: Sequence[str], name: Sequence[str]) -> bool:
    if not pattern:
        return not name
    if pattern[0] == "**":
        return any(_segments_match(pattern[1:], name[start:]) for start in range(len(name) + 1))
    return bool(name) and pattern[0] in ("*", name[0]) and _segments_match(pattern[1:], name[1:])
