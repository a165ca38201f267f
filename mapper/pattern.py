"""Name patterns: whole dotted segments, anchored, with placeholders.

`{index}`, `{index + n}`, `{constant}` and `{leaf}` stand for text inside a segment, `*` for one whole segment and
`**` for zero or more. A `Pattern` is text; `bind` gives its placeholders their values and yields a `Template`,
in which every segment is a dictionary from text to index values. Matching a name is one dictionary look-up per segment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Literal

from mapper.expressions import Expression, ExpressionError
from mapper.expressions import parse as parse_expression

IndexValue = int | str
Bindings = dict[str, IndexValue]
Wildcard = Literal["*", "**"]


class PatternError(ValueError):
    """A text that is no pattern; `column` counts from 0 within the text."""

    def __init__(self, message: str, column: int = 0) -> None:
        super().__init__(message)
        self.message = message
        self.column = column


@dataclass(frozen=True, slots=True)
class Placeholder:
    """`{expression}` inside a segment."""

    expression: Expression
    column: int


Atom = str | Placeholder


@dataclass(frozen=True, slots=True)
class Pattern:
    """A parsed pattern: per segment either a wildcard or a tuple of literal texts and placeholders."""

    text: str
    segments: tuple[Wildcard | tuple[Atom, ...], ...]

    @property
    def placeholders(self) -> tuple[Placeholder, ...]:
        """The placeholders in the order they are written."""
        atoms = (atom for segment in self.segments if not isinstance(segment, str) for atom in segment)
        return tuple(atom for atom in atoms if isinstance(atom, Placeholder))

    @property
    def names(self) -> frozenset[str]:
        """The names that the placeholders refer to."""
        return frozenset(name for each in self.placeholders for name in each.expression.names)

    @property
    def has_wildcards(self) -> bool:
        return any(isinstance(segment, str) for segment in self.segments)

    def __str__(self) -> str:
        return self.text


def parse(text: str) -> Pattern:
    """Return the pattern that `text` spells; raises `PatternError`.

    >>> [segment for segment in parse('model.layers.{layer}.**').segments][-1]
    '**'
    """
    if not text:
        return Pattern("", ())
    segments: list[Wildcard | tuple[Atom, ...]] = []
    column = 0
    for part in _split_segments(text):
        segments.append(_parse_segment(part, column))
        column += len(part) + 1
    return Pattern(text, tuple(segments))


def join(prefix: Pattern, pattern: Pattern) -> Pattern:
    """Return `pattern` below `prefix`."""
    if not prefix.segments:
        return pattern
    if not pattern.segments:
        return prefix
    return Pattern(f"{prefix.text}.{pattern.text}", prefix.segments + pattern.segments)


def _split_segments(text: str) -> list[str]:
    parts, depth, start = [], 0, 0
    for position, char in enumerate(text):
        if char == "{":
            depth += 1
        elif char == "}":
            depth -= 1
        elif char == "." and depth == 0:
            parts.append(text[start:position])
            start = position + 1
    return [*parts, text[start:]]


def _parse_segment(text: str, column: int) -> Wildcard | tuple[Atom, ...]:
    if text == "*":
        return "*"
    if text == "**":
        return "**"
    if not text:
        raise PatternError("a segment between two dots is empty", column)
    atoms: list[Atom] = []
    position = 0
    while position < len(text):
        if text[position] == "{":
            end = text.find("}", position)
            if end < 0:
                raise PatternError("'{' is never closed", column + position)
            atoms.append(_parse_placeholder(text[position + 1 : end], column + position))
            position = end + 1
            continue
        end = text.find("{", position)
        piece = text[position : end if end >= 0 else len(text)]
        for offset, char in enumerate(piece):
            if char == "*":
                raise PatternError("'*' stands for a whole segment, not for a part of one", column + position + offset)
            if char == "}" or char.isspace():
                raise PatternError(f"{char!r} cannot stand in a name", column + position + offset)
        atoms.append(piece)
        position += len(piece)
    return tuple(atoms)


def _parse_placeholder(text: str, column: int) -> Placeholder:
    try:
        return Placeholder(parse_expression(text), column)
    except ExpressionError as error:
        start = column + 1 + len(text) - len(text.lstrip())
        raise PatternError(f"in '{{{text}}}': {error.message}", start + error.column) from error


# --- bound patterns -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment with its placeholders bound: every text it can be, with the index values each text stands for.

    `indices` are the names bound here, in order; `texts` maps a text to their values.
    """

    indices: tuple[str, ...]
    texts: Mapping[str, tuple[IndexValue, ...]]


Segments = tuple["Segment | Wildcard", ...]


@dataclass(frozen=True, slots=True)
class Template:
    """A pattern over index values. `indices` are its free indices in order of first use."""

    segments: Segments
    indices: tuple[str, ...]

    def match(self, name: str) -> Bindings | None:
        """Return the index values under which the template spells `name`, or None."""
        return _match(self.segments, name.split("."), 0, 0, {})

    def names(self, values: Mapping[str, Iterable[IndexValue]]) -> list[str]:
        """Return all names for the product of `values`, the last index of `indices` running fastest.

        `values` holds an iterable per index of the template; there are no wildcards in it.
        """
        return instantiate(self, [list(values[index]) for index in self.indices])

    def name(self, values: Mapping[str, IndexValue]) -> str:
        """Return the name at one value per index."""
        return instantiate(self, [[values[index]] for index in self.indices])[0]

    def __str__(self) -> str:
        return ".".join(segment if isinstance(segment, str) else _describe(segment) for segment in self.segments)


def names_of(expression: Expression) -> Iterable[str]:
    """Return the names in an expression, sorted."""
    return sorted(expression.names)


def bind(
    pattern: Pattern,
    value_of: Callable[[Expression, Bindings], object],
    domains: Mapping[str, Iterable[IndexValue]],
    indices_of: Callable[[Expression], Iterable[str]] = names_of,
) -> Template:
    """Return the template of `pattern` where the indices in `domains` run over their values.

    `value_of` evaluates a placeholder's expression at given index values, `indices_of` says which ones it needs. Raises
    `PatternError` when two index values spell the same text, or one spells no text or a dot, since then a name could not be
    read back.
    """
    segments: list[Segment | Wildcard] = []
    order: dict[str, None] = {}
    for segment in pattern.segments:
        if isinstance(segment, str):
            segments.append(segment)
            continue
        bound = _bind_segment(segment, value_of, domains, indices_of)
        order.update(dict.fromkeys(bound.indices))
        segments.append(bound)
    return Template(tuple(segments), tuple(order))


def literal_template(text: str) -> Template:
    """Return the template of one fixed name."""
    return Template(tuple(Segment((), {part: ()}) for part in text.split(".")) if text else (), ())


def _bind_segment(
    atoms: tuple[Atom, ...],
    value_of: Callable[[Expression, Bindings], object],
    domains: Mapping[str, Iterable[IndexValue]],
    indices_of: Callable[[Expression], Iterable[str]],
) -> Segment:
    placeholders = (atom for atom in atoms if isinstance(atom, Placeholder))
    used = dict.fromkeys(name for atom in placeholders for name in indices_of(atom.expression) if name in domains)
    indices = tuple(used)
    texts: dict[str, tuple[IndexValue, ...]] = {}
    for values in product(*(domains[index] for index in indices)):
        bindings = dict(zip(indices, values, strict=True))
        text = "".join(atom if isinstance(atom, str) else _spell(atom, value_of(atom.expression, bindings)) for atom in atoms)
        if not text:
            first = next(atom for atom in atoms if isinstance(atom, Placeholder))
            raise PatternError(f"'{{{first.expression.text}}}' leaves the segment empty", first.column)
        if text in texts:
            raise PatternError(f"{texts[text]} and {values} of {', '.join(indices)} both spell {text!r}")
        texts[text] = values
    return Segment(indices, texts)


def _spell(atom: Placeholder, value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise PatternError(f"'{{{atom.expression.text}}}' is {value!r}, expected an integer or a word", atom.column)
    if isinstance(value, int) and value < 0:
        raise PatternError(f"'{{{atom.expression.text}}}' is {value}, expected 0 or more", atom.column)
    if isinstance(value, str) and "." in value:
        raise PatternError(f"'{{{atom.expression.text}}}' is {value!r}, expected a word without dots", atom.column)
    return str(value)


def _match(segments: Segments, parts: list[str], s: int, p: int, bindings: Bindings) -> Bindings | None:
    while s < len(segments):
        segment = segments[s]
        if segment == "**":
            for end in range(p, len(parts) + 1):
                found = _match(segments, parts, s + 1, end, dict(bindings))
                if found is not None:
                    return found
            return None
        if p >= len(parts):
            return None
        if not isinstance(segment, str):
            values = segment.texts.get(parts[p])
            if values is None or not _agree(segment.indices, values, bindings):
                return None
        s += 1
        p += 1
    return bindings if p == len(parts) else None


def _agree(indices: tuple[str, ...], values: tuple[IndexValue, ...], bindings: Bindings) -> bool:
    """Add the values to `bindings`; return whether every index still has one value."""
    return all(bindings.setdefault(index, value) == value for index, value in zip(indices, values, strict=True))


def instantiate(template: Template, values: list[list[IndexValue]]) -> list[str]:
    """Return the names for the product of `values` (one list per index of the template), the last running fastest."""
    spellings = [_spelling(segment) for segment in template.segments]
    if not template.indices:
        return [".".join(next(iter(spelling.values())) for spelling in spellings)]
    last = template.indices[-1]
    first_use = next(position for position, segment in enumerate(template.segments) if last in segment_indices(segment))
    outer, inner = template.indices[:-1], values[-1]
    names: list[str] = []
    tails: list[str] | None = None
    for combination in product(*values[:-1]):
        fixed = dict(zip(outer, combination, strict=True))
        head = "".join(f"{_text(spellings[s], template.segments[s], fixed)}." for s in range(first_use))
        simple = all(set(segment_indices(segment)) <= {last} for segment in template.segments[first_use:])
        if tails is None or not simple:
            tails = [_tail(spellings, template.segments, first_use, {**fixed, last: value}) for value in inner]
        names += [head + tail for tail in tails]
    return names


def _tail(spellings: list[dict[tuple[IndexValue, ...], str]], segments: Segments, start: int, fixed: Bindings) -> str:
    return ".".join(_text(spellings[s], segments[s], fixed) for s in range(start, len(segments)))


def _text(spelling: dict[tuple[IndexValue, ...], str], segment: Segment | Wildcard, fixed: Bindings) -> str:
    return spelling[tuple(fixed[index] for index in segment_indices(segment))]


def _spelling(segment: Segment | Wildcard) -> dict[tuple[IndexValue, ...], str]:
    assert not isinstance(segment, str), "a template with wildcards has no list of names"
    return {values: text for text, values in segment.texts.items()}


def segment_indices(segment: Segment | Wildcard) -> tuple[str, ...]:
    """Return the indices that a segment's text depends on."""
    return () if isinstance(segment, str) else segment.indices


def _describe(segment: Segment) -> str:
    texts = list(segment.texts)
    if len(texts) == 1:
        return texts[0]
    return f"{{{', '.join(segment.indices)}: {texts[0]}...{texts[-1]}}}" if texts else "{}"


# --- relations between templates ------------------------------------------------------------------------------------


ANY_TEXT = "x"


def common_name(first: Template, second: Template) -> str | None:
    """Return a name that both templates spell, or None. Exact: index ranges and repeated indices count.

    Wildcard segments that both sides leave open are spelled `x`.
    """
    if not _could_share(first.segments, second.segments):
        return None
    parts = next(_common(first.segments, second.segments, {}, {}), None)
    # Only where both are nothing but `**` is the choice of no segment at all left, which is no name.
    return None if parts is None else ".".join(parts) or ANY_TEXT


def _could_share(a: Segments, b: Segments) -> bool:
    if "**" in a or "**" in b:
        return True
    return len(a) == len(b) and all(
        isinstance(left, str) or isinstance(right, str) or not left.texts.keys().isdisjoint(right.texts)
        for left, right in zip(reversed(a), reversed(b), strict=True)
    )


def _common(a: Segments, b: Segments, bound_a: Bindings, bound_b: Bindings) -> Iterator[list[str]]:
    if not a and not b:
        yield []
    elif a and a[0] == "**":
        yield from _common(a[1:], b, bound_a, bound_b)
        if b and b[0] == "**":
            yield from _common(a, b[1:], bound_a, bound_b)
        elif b:
            for text, after in _readings(b, bound_b):
                yield from ([text, *rest] for rest in _common(a, b[1:], bound_a, after))
    elif b and b[0] == "**":
        yield from _common(b, a, bound_b, bound_a)
    elif a and b:
        for text in _shared_texts(a, b, bound_a, bound_b):
            after_a, after_b = _read(a[0], text, bound_a), _read(b[0], text, bound_b)
            if after_a is not None and after_b is not None:
                yield from ([text, *rest] for rest in _common(a[1:], b[1:], after_a, after_b))


def _shared_texts(a: Segments, b: Segments, bound_a: Bindings, bound_b: Bindings) -> list[str]:
    """Return what both first segments can be; only the first where the choice cannot matter for what follows."""
    left, right = a[0], b[0]
    if isinstance(left, str):
        texts = [ANY_TEXT] if isinstance(right, str) else list(right.texts)
    elif isinstance(right, str):
        texts = list(left.texts)
    else:
        small, large = sorted((left.texts, right.texts), key=len)
        texts = [text for text in small if text in large]
    return texts if _repeats(a, bound_a) or _repeats(b, bound_b) else texts[:1]


def _repeats(segments: Segments, bound: Bindings) -> bool:
    used = segment_indices(segments[0])
    return any(index in bound or any(index in segment_indices(later) for later in segments[1:]) for index in used)


def _readings(segments: Segments, bound: Bindings) -> Iterator[tuple[str, Bindings]]:
    """Yield what the first segment can be; only the first text where the choice cannot matter for what follows."""
    segment, repeats = segments[0], _repeats(segments, bound)
    for text in [ANY_TEXT] if isinstance(segment, str) else segment.texts:
        after = _read(segment, text, bound)
        if after is not None:
            yield text, after
            if not repeats:
                return


def _read(segment: Segment | Wildcard, text: str, bound: Bindings) -> Bindings | None:
    if isinstance(segment, str) or not segment.indices:
        return bound
    after = dict(bound)
    return after if _agree(segment.indices, segment.texts[text], after) else None


# --- re-rooting -----------------------------------------------------------------------------------------------------


def below(template: Template, prefix: str) -> tuple[Template, ...]:
    """Return the templates of what `template` spells below `prefix` (none, one, or more when `**` may absorb it).

    An index whose value the prefix spells keeps that one value and is no index of the result.
    """
    states: list[tuple[Segments, Bindings]] = [(template.segments, {})]
    for part in prefix.split("."):
        states = [after for segments, bound in states for after in _below_segment(segments, bound, part)]
    found: list[Template] = []
    for segments, bound in states:
        kept = tuple(_restricted(segment, bound) for segment in segments)
        inner = Template(kept, tuple(index for index in template.indices if index not in bound))
        if kept and inner not in found and all(isinstance(segment, str) or segment.texts for segment in kept):
            found.append(inner)
    return tuple(found)


def under(template: Template, prefix: str) -> Template:
    """Return the template of the same names with `prefix.` in front."""
    return Template(literal_template(prefix).segments + template.segments, template.indices)


def _below_segment(segments: Segments, bound: Bindings, part: str) -> list[tuple[Segments, Bindings]]:
    if not segments:
        return []
    head = segments[0]
    if head == "**":
        return [(segments, bound), *_below_segment(segments[1:], bound, part)]
    if isinstance(head, str):
        return [(segments[1:], bound)]
    after = _read(head, part, bound) if part in head.texts else None
    return [] if after is None else [(segments[1:], after)]


def _restricted(segment: Segment | Wildcard, bound: Bindings) -> Segment | Wildcard:
    """Return the segment where the indices in `bound` have one value each."""
    if isinstance(segment, str) or bound.keys().isdisjoint(segment.indices):
        return segment
    texts = {
        text: tuple(value for index, value in zip(segment.indices, values, strict=True) if index not in bound)
        for text, values in segment.texts.items()
        if all(bound.get(index, value) == value for index, value in zip(segment.indices, values, strict=True))
    }
    return Segment(tuple(index for index in segment.indices if index not in bound), texts)
