"""The parts of a spec that can be changed, each with the way to put something else in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from mapper.spec.bundled import read_builtin
from mapper.spec.model import Format, FormatAlternative, Group, Index, Item, Leaf, Runtime, Spec

Items = tuple[Item, ...]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Site:
    """A rule or group of a list. `put` returns the spec with other items in its place; `beside` is the whole list."""

    item: Item
    beside: Items
    runtimes: tuple[str, ...]
    put: Callable[[Items], Spec]


def item_sites(spec: Spec) -> Iterator[Site]:
    """Yield every rule and group of all runtimes and of the blocks that a runtime uses, in reading order."""
    for name, items in spec.blocks.items():
        runtimes = tuple(each.name for each in spec.runtimes.values() if name in _blocks_of(each.rules, spec))
        if runtimes:
            yield from _sites(items, runtimes, partial(_with_block, spec, name))
    for runtime in spec.runtimes.values():
        yield from _sites(runtime.rules, (runtime.name,), partial(_with_rules, spec, runtime))


def index_sites(spec: Spec) -> Iterator[tuple[Index, tuple[str, ...], Callable[[Index], Spec]]]:
    """Yield every index with the runtimes that know it by this definition, and the way to define it otherwise."""
    for index in spec.index.values():
        runtimes = tuple(each.name for each in spec.runtimes.values() if index.name not in each.index)
        yield index, runtimes, partial(_with_index, spec, None)
    for runtime in spec.runtimes.values():
        for index in runtime.index.values():
            yield index, (runtime.name,), partial(_with_index, spec, runtime)


def leaf_sites(spec: Spec) -> Iterator[tuple[Leaf, tuple[str, ...], Callable[[Leaf], Spec]]]:
    """Yield every leaf of the formats that the spec itself defines."""
    for form in spec.formats.values():
        runtimes = tuple(each.name for each in spec.runtimes.values() if form.name not in each.formats)
        if read_builtin().formats.get(form.name) is form:
            continue
        for leaf, put in _leaves(form):
            yield leaf, runtimes, partial(_with_format, spec, None, put)
    for runtime in spec.runtimes.values():
        for form in runtime.formats.values():
            for leaf, put in _leaves(form):
                yield leaf, (runtime.name,), partial(_with_format, spec, runtime, put)


def with_runtime(spec: Spec, runtime: Runtime) -> Spec:
    """Return the spec with another runtime of the same name."""
    return replace(spec, runtimes={**spec.runtimes, runtime.name: runtime})


def without(items: Sequence[T], position: int) -> tuple[T, ...]:
    return (*items[:position], *items[position + 1 :])


def swapped(items: Sequence[T], position: int) -> tuple[T, ...]:
    """Return the items with the one at `position` and the next in each other's place."""
    return (*items[:position], items[position + 1], items[position], *items[position + 2 :])


def changed(items: Sequence[T], position: int, item: T) -> tuple[T, ...]:
    return (*items[:position], item, *items[position + 1 :])


def _with_block(spec: Spec, name: str, items: Items) -> Spec:
    return replace(spec, blocks={**spec.blocks, name: items})


def _with_rules(spec: Spec, runtime: Runtime, items: Items) -> Spec:
    return with_runtime(spec, replace(runtime, rules=items))


def _with_index(spec: Spec, runtime: Runtime | None, index: Index) -> Spec:
    if runtime is None:
        return replace(spec, index={**spec.index, index.name: index})
    return with_runtime(spec, replace(runtime, index={**runtime.index, index.name: index}))


def _with_format(spec: Spec, runtime: Runtime | None, put: Callable[[Leaf], Format], leaf: Leaf) -> Spec:
    form = put(leaf)
    if runtime is None:
        return replace(spec, formats={**spec.formats, form.name: form})
    return with_runtime(spec, replace(runtime, formats={**runtime.formats, form.name: form}))


def _sites(items: Items, runtimes: tuple[str, ...], put_all: Callable[[Items], Spec]) -> Iterator[Site]:
    for position, item in enumerate(items):

        def put(new: Items, position: int = position) -> Spec:
            return put_all((*items[:position], *new, *items[position + 1 :]))

        yield Site(item, items, runtimes, put)
        if isinstance(item, Group):

            def put_inside(new: Items, item: Group = item, put: Callable[[Items], Spec] = put) -> Spec:
                return put((replace(item, items=new),))

            yield from _sites(item.items, runtimes, put_inside)


def _leaves(form: Format) -> Iterator[tuple[Leaf, Callable[[Leaf], Format]]]:
    for number, alternative in enumerate(form.alternatives):
        for position, leaf in enumerate(alternative.leaves):
            yield leaf, partial(_with_leaf, form, number, alternative, position)


def _with_leaf(form: Format, number: int, alternative: FormatAlternative, position: int, leaf: Leaf) -> Format:
    leaves = changed(alternative.leaves, position, leaf)
    return replace(form, alternatives=changed(form.alternatives, number, replace(alternative, leaves=leaves)))


def _blocks_of(items: Items, spec: Spec) -> set[str]:
    """Return the blocks that the items use, directly or through other blocks."""
    found: set[str] = set()
    todo = list(items)
    while todo:
        item = todo.pop()
        if isinstance(item, Group):
            todo += item.items
            if item.use is not None and item.use not in found:
                found.add(item.use)
                todo += spec.blocks.get(item.use, ())
    return found
