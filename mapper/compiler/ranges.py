"""The values of an index."""

from __future__ import annotations

from mapper.compiler.names import Names
from mapper.compiler.sizes import require_size
from mapper.pattern import IndexValue
from mapper.spec.model import Index


def range_of(index: Index, names: Names, *, beyond: int = 0) -> tuple[IndexValue, ...]:
    """Return the values of an index before `where` takes any out, and `beyond` more numbers behind them."""
    if index.values is not None:
        return index.values
    assert index.count is not None
    count = require_size(names.evaluate(index.count, {}, index.place), f"the count of {index.name!r}", index.place, least=0)
    first = 0
    if index.first is not None:
        first = require_size(names.evaluate(index.first, {}, index.place), f"the first {index.name!r}", index.place, least=0)
    return tuple(range(first, first + count + beyond))


def counted(index: Index, values: tuple[IndexValue, ...], names: Names) -> tuple[IndexValue, ...]:
    """Return those of the values at which the index's `where` holds."""
    if index.where is None:
        return values
    return tuple(value for value in values if names.evaluate(index.where, {index.name: value}, index.place))
