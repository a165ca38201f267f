"""Every mutant of a spec: one change each, of the kinds that a hand or a merge makes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mapper.diagnostics import Place
from mapper.expressions import Expression
from mapper.pattern import Pattern
from mapper.pattern import parse as parse_pattern
from mapper.spec.model import (
    Group,
    Index,
    PlacedPattern,
    Rule,
    Runtime,
    Shard,
    Source,
    SourceAlternative,
    Spec,
    placed_expression,
)
from mapper.spec.scope import BASE_AXES
from mapper.testing.mutation.mutant import Kind, Mutant
from mapper.testing.mutation.sites import Site, changed, index_sites, item_sites, leaf_sites, swapped, with_runtime, without

EVERYTHING = "**"
STAGES = ("first", "last", "all")
CUT_AXES = tuple(axis for axis in BASE_AXES if axis in ("tp", "ep"))


def mutants_of(spec: Spec) -> tuple[Mutant, ...]:
    """Return every mutant of a spec, in file order within each section. A rule of `copy` or `rename` is one of its own."""
    seen: dict[str, int] = {}
    found = []
    for each in _iter_all(spec):
        file = "" if each.place.file == spec.place.file else f"{each.place.file.rpartition('/')[2]}:"
        start = f"{each.kind.replace(' ', '-')}:{file}{each.place.line}:{each.place.column}"
        seen[start] = seen.get(start, 0) + 1
        found.append(replace(each, id=start if seen[start] == 1 else f"{start}/{seen[start]}"))
    return tuple(found)


def _iter_all(spec: Spec) -> Iterator[Mutant]:
    for site in item_sites(spec):
        if isinstance(site.item, Rule):
            yield from _of_rule(spec, site, site.item)
        else:
            yield from _of_group(spec, site, site.item)
    yield from _of_indices(spec)
    yield from _of_leaves(spec)
    yield from _of_exemptions(spec)


# --- rules and groups -----------------------------------------------------------------------------------------------


def _of_rule(spec: Spec, site: Site, rule: Rule) -> Iterator[Mutant]:
    name = f"the rule for {rule.targets[0].text!r}"

    def mutant(
        kind: Kind, sentence: str, *new: Rule, place: Place | None = None, parts: tuple[int, int] | None = None
    ) -> Mutant:
        lacking = rule.place if kind == "flip optional" else None
        return Mutant(
            "", kind, place or rule.place, sentence.format(rule=name), site.put(new), site.runtimes, rule.place, parts, lacking
        )

    yield mutant("drop rule", "{rule} is dropped")
    for number, alternative in enumerate(rule.alternatives):
        for position in range(len(alternative.sources) - 1):
            other = replace(alternative, sources=swapped(alternative.sources, position))
            first, second = (each.pattern.text for each in alternative.sources[position : position + 2])
            yield mutant(
                "swap sources",
                f"in {{rule}} {_quoted(first)} and {_quoted(second)} change places",
                replace(rule, alternatives=changed(rule.alternatives, number, other)),
                place=alternative.sources[position].place,
                parts=(position, position + 1),
            )
        for position, source in enumerate(alternative.sources):
            for pattern, text in _shifted(source.pattern, spec):
                sources = changed(alternative.sources, position, replace(source, pattern=pattern))
                shifted = changed(rule.alternatives, number, SourceAlternative(sources, alternative.format, alternative.place))
                sentence = f"in {{rule}} the source is {_quoted(text)}"
                yield mutant("shift index", sentence, replace(rule, alternatives=shifted), place=source.place)
    for position in range(len(rule.alternatives) - 1):
        sentence = f"in {{rule}} the ways {position + 1} and {position + 2} of `any_of` change places"
        alternatives = swapped(rule.alternatives, position)
        place = rule.alternatives[position].place
        yield mutant("swap any_of", sentence, replace(rule, alternatives=alternatives), place=place)
    for shard in rule.shard.values():
        yield from (
            mutant(kind, f"in {{rule}} {sentence}", replace(rule, shard=cuts), place=shard.place)
            for kind, sentence, cuts in _of_shard(spec, site, rule, shard)
        )
    yield from (
        mutant("change stage", f"{{rule}} is on the stage {text!r}", replace(rule, stage=stage))
        for text, stage in _other_stages(rule.stage, rule.place)
    )
    if rule.cast is not None:
        yield mutant("drop cast", "{rule} has no `cast`", replace(rule, cast=None))
    if rule.bitcast is not None:
        yield mutant("drop cast", "{rule} has no `bitcast`", replace(rule, bitcast=None))
    if rule.tie is None:
        is_now = "required" if rule.optional else "optional"
        yield mutant("flip optional", f"{{rule}} is {is_now}", replace(rule, optional=not rule.optional))
    else:
        own = (SourceAlternative(tuple(Source(target, None, rule.place) for target in rule.targets), None, rule.place),)
        yield mutant(
            "change tie", "{rule} is not tied, and reads a tensor of its own name", replace(rule, tie=None, alternatives=own)
        )
        twin = next((pattern for pattern in _other_twins(site, rule)), None)
        if twin is not None:
            yield mutant("change tie", f"{{rule}} is tied to {_quoted(twin.text)}", replace(rule, tie=twin))


def _of_shard(spec: Spec, site: Site, rule: Rule, shard: Shard) -> Iterator[tuple[Kind, str, dict[str, Shard]]]:
    rest = {dim: each for dim, each in rule.shard.items() if dim != shard.dim}
    axis = next((each for each in shard.axis if each is not None), None)

    def with_cut(new: Shard) -> dict[str, Shard]:
        return {dim: new if each is shard else each for dim, each in rule.shard.items()}

    yield "drop shard", f"{shard.dim!r} is not cut", rest
    if axis is not None:
        moved = replace(shard, axis=(axis,), units=(), pad=None, uneven=None, pad_rank=None, fill=None, bias=None)
        for dim in (each for each in rule.dims or {} if each not in rule.shard):
            yield "move shard", f"{dim!r} is cut in place of {shard.dim!r}", {**rest, dim: replace(moved, dim=dim)}
    for position, old in enumerate(shard.axis):
        for new in _axes(spec, site.runtimes) if old is not None else ():
            if new != old:
                yield (
                    "change axis",
                    f"{shard.dim!r} is cut over {new!r} in place of {old!r}",
                    with_cut(replace(shard, axis=changed(shard.axis, position, new))),
                )
    if shard.units:
        yield "drop units", f"the cut of {shard.dim!r} has no `units`", with_cut(replace(shard, units=(), replicate=False))
    for key, size in (("pad", shard.pad), ("pad_rank", shard.pad_rank)):
        if size is not None:
            text = f"2 * ({size.text})"
            for words, new_size in ((f"has no `{key}`", None), (f"has `{key}: {text}`", placed_expression(text, shard.place))):
                padded = replace(shard, pad=new_size) if key == "pad" else replace(shard, pad_rank=new_size)
                yield "change pad", f"the cut of {shard.dim!r} {words}", with_cut(padded)
    if shard.fill is not None:
        text = "1" if shard.fill.text == "0" else "0"
        filled = replace(shard, fill=placed_expression(text, shard.place))
        yield "change fill", f"the padding of {shard.dim!r} holds {text}", with_cut(filled)


def _of_group(spec: Spec, site: Site, group: Group) -> Iterator[Mutant]:
    name = f"the group at {group.source.text!r}" if group.source.text else "the group"
    for text, stage in _other_stages(group.stage, group.place):
        new = replace(group, stage=stage)
        yield Mutant("", "change stage", group.place, f"{name} is on the stage {text!r}", site.put((new,)), site.runtimes)
    for pattern, text in _shifted(group.source, spec):
        place = group.source.place if isinstance(group.source, PlacedPattern) else group.place
        new, sentence = replace(group, source=pattern), f"the sources of {name} are at {_quoted(text)}"
        yield Mutant("", "shift index", place, sentence, site.put((new,)), site.runtimes)


def _other_twins(site: Site, rule: Rule) -> Iterator[Pattern]:
    """Yield the targets of fixed names beside the rule that it might be tied to by mistake."""
    assert rule.tie is not None, "the rule is tied"
    for other in site.beside:
        if isinstance(other, Rule) and other is not rule and other.tie is None:
            yield from (each for each in other.targets if not each.names and each.text != rule.tie.text)


def _other_stages(stage: Expression | None, place: Place) -> Iterator[tuple[str, Expression]]:
    if stage is not None:
        yield from ((text, placed_expression(text, place)) for text in STAGES if text != stage.text)


def _axes(spec: Spec, runtimes: tuple[str, ...]) -> tuple[str, ...]:
    """Return the axes that a cut may name in all of the runtimes."""
    own = [spec.runtimes[name].mesh.axes.keys() for name in runtimes]
    return (*CUT_AXES, *(axis for axis in own[0] if all(axis in each for each in own)))


# --- indices, formats, skips and keeps ------------------------------------------------------------------------------


def _of_indices(spec: Spec) -> Iterator[Mutant]:
    for index, runtimes, put in index_sites(spec):
        for kind, sentence, new in _of_index(index):
            yield Mutant("", kind, index.place, f"the index {index.name!r} {sentence}", put(new), runtimes)


def _of_index(index: Index) -> Iterator[tuple[Kind, str, Index]]:
    if index.count is not None:
        first = f"{index.first.text} + 1" if index.first is not None else "1"
        yield "shift index", "begins one later", replace(index, first=placed_expression(first, index.place))
        fewer = placed_expression(f"({index.count.text}) - 1", index.place)
        yield "shift index", "has one value fewer", replace(index, count=fewer)
    if index.axis is not None:
        yield "change axis", f"is not owned by {index.axis!r}", replace(index, axis=None)


def _of_leaves(spec: Spec) -> Iterator[Mutant]:
    for leaf, runtimes, put in leaf_sites(spec):
        name = f"the leaf {leaf.name!r}"
        if leaf.cast is not None:
            yield Mutant("", "drop cast", leaf.place, f"{name} has no `cast`", put(replace(leaf, cast=None)), runtimes)
        if leaf.bitcast is not None:
            yield Mutant("", "drop cast", leaf.place, f"{name} has no `bitcast`", put(replace(leaf, bitcast=None)), runtimes)


def _of_exemptions(spec: Spec) -> Iterator[Mutant]:
    for runtime in spec.runtimes.values():
        name = (runtime.name,)
        for position, skip in enumerate(runtime.skip):
            text = skip.pattern.text
            dropped = with_runtime(spec, replace(runtime, skip=without(runtime.skip, position)))
            yield Mutant("", "drop skip", skip.place, f"the skip {text!r} is dropped", dropped, name)
            if text != EVERYTHING:
                yield _with_skip(spec, runtime, position, "widen skip", parse_pattern(EVERYTHING))
            for pattern, _ in _shifted(skip.pattern, spec):
                yield _with_skip(spec, runtime, position, "shift index", pattern)
        for position, keep in enumerate(runtime.keep):
            dropped = with_runtime(spec, replace(runtime, keep=without(runtime.keep, position)))
            yield Mutant("", "drop keep", keep.place, f"the keep {keep.pattern.text!r} is dropped", dropped, name)


def _with_skip(spec: Spec, runtime: Runtime, position: int, kind: Kind, pattern: Pattern) -> Mutant:
    skip = runtime.skip[position]
    skips = changed(runtime.skip, position, replace(skip, pattern=pattern))
    sentence = f"the skip {skip.pattern.text!r} is {pattern.text!r}"
    return Mutant("", kind, skip.place, sentence, with_runtime(spec, replace(runtime, skip=skips)), (runtime.name,))


def _shifted(pattern: Pattern, spec: Spec) -> list[tuple[Pattern, str]]:
    """Return the pattern with each placeholder that holds an index of numbers one further."""
    indices = {**spec.index, **{name: each for section in spec.runtimes.values() for name, each in section.index.items()}}
    found = []
    for each in pattern.placeholders:
        if any(name in indices and indices[name].count is not None for name in each.expression.names):
            start, end = each.column, pattern.text.index("}", each.column)
            inner = each.expression.text.strip()
            text = f"{pattern.text[:start]}{{{inner if inner.isidentifier() else f'({inner})'} + 1{pattern.text[end:]}"
            parsed = parse_pattern(text)
            place = pattern.place if isinstance(pattern, PlacedPattern) else None
            found.append((PlacedPattern(parsed.text, parsed.segments, place) if place is not None else parsed, text))
    return found


def _quoted(text: str) -> str:
    """Return the text as a message names it, its braces safe from `format`."""
    return repr(text).replace("{", "{{").replace("}", "}}")
