"""What a user is told: a place, a code, what was expected, what was found and what to do."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from mapper.folding import fold, split, unfold
from mapper.messages import CATALOGUE

OutputFormat = Literal["text", "json", "github"]
Severity = Literal["error", "warning"]


@dataclass(frozen=True, slots=True)
class Place:
    """A position in a text file; line and column count from 1, `text` is the whole line."""

    file: str
    line: int
    column: int
    text: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One finding. `subject` names the tensor, parameter or file it is about; `related` are other places it concerns.

    An error is wrong whatever the user meant; a warning is advice, and nothing stops because of it.
    """

    code: str
    message: str
    place: Place | None = None
    subject: str = ""
    hint: str = ""
    related: tuple[tuple[str, Place], ...] = field(default=())
    severity: Severity = "error"

    def __str__(self) -> str:
        return render_text(self)


class MapperError(Exception):
    """Everything that was found wrong at one stage. It pickles, and its text holds every finding, repeats folded."""

    def __init__(self, diagnostics: Iterable[Diagnostic]) -> None:
        self.diagnostics = tuple(diagnostics)
        assert self.diagnostics, "an error needs at least one finding"
        super().__init__("\n".join(render_text(each) for each in fold_findings(self.diagnostics)))

    def __reduce__(self) -> tuple[type[MapperError], tuple[tuple[Diagnostic, ...]]]:
        return MapperError, (self.diagnostics,)


def finding(
    code: str,
    *,
    place: Place | None = None,
    subject: str = "",
    hint: str = "",
    related: Iterable[tuple[str, Place]] = (),
    severity: Severity = "error",
    **values: object,
) -> Diagnostic:
    """Return the finding `code` with its catalogue text filled in from `values`.

    >>> finding('M901', command='chekc').message
    "unknown command 'chekc'"
    """
    message = CATALOGUE[code].template.format(**values)
    return Diagnostic(code, message, place, subject, hint, tuple(related), severity)


def render_text(diagnostic: Diagnostic) -> str:
    """Return the finding as a person reads it: place, code, message, the line with a caret, related places, hint."""
    where = f"{diagnostic.place}: " if diagnostic.place else ""
    kind = "" if diagnostic.severity == "error" else f"{diagnostic.severity} "
    lines = [f"{where}{kind}{diagnostic.code} {diagnostic.message}"]
    if diagnostic.place is not None:
        lines += _excerpt(diagnostic.place)
    for label, place in diagnostic.related:
        lines.append(f"  {label}: {place}")
        lines += _excerpt(place)
    if diagnostic.hint:
        lines.append(f"  hint: {diagnostic.hint}")
    return "\n".join(lines)


def render_findings(diagnostics: Iterable[Diagnostic]) -> list[str]:
    """Return the findings as a person reads them, repeats folded, and what to do about those that have no hint of their own."""
    folded = fold_findings(diagnostics)
    codes = dict.fromkeys(each.code for each in folded if not each.hint and each.severity == "error")
    return [render_text(each) for each in folded] + [f"what to do about {code}: {CATALOGUE[code].fix}" for code in codes]


def fold_findings(diagnostics: Iterable[Diagnostic]) -> list[Diagnostic]:
    """Return the findings with those of one code and place that differ only in numbers as one, in order.

    The one names all numbers and counts what it stands for; what stays alone is unchanged.
    """
    groups: dict[tuple[object, ...], list[Diagnostic]] = {}
    for each in diagnostics:
        words, _ = split(each.message)
        groups.setdefault((each.code, each.place, each.related, words), []).append(each)
    return [folded for group in groups.values() for folded in _folded(group)]


def _folded(group: Sequence[Diagnostic]) -> list[Diagnostic]:
    if len(group) == 1:
        return list(group)
    by_message: dict[str, list[Diagnostic]] = {}
    for each in group:
        by_message.setdefault(each.message, []).append(each)
    folded = []
    for one in fold(by_message):
        members = [each for message in unfold([one]) for each in by_message[message]]
        if len(members) == 1:
            folded += members
            continue
        subjects, hints = (fold(getattr(each, name) for each in members) for name in ("subject", "hint"))
        folded.append(
            replace(
                members[0],
                message=f"{one} ({len(members):,} findings)",
                subject=str(subjects[0]) if len(subjects) == 1 else members[0].subject,
                hint=str(hints[0])
                if len(hints) == 1
                else f"for one of them: {next(each.hint for each in members if each.hint)}",
            )
        )
    return folded


def render_json(diagnostics: Iterable[Diagnostic]) -> str:
    """Return the findings as a JSON array of objects with the fields of `Diagnostic`."""
    return json.dumps(as_objects(diagnostics), indent=1)


def as_objects(diagnostics: Iterable[Diagnostic]) -> list[dict[str, object]]:
    """Return the findings as plain objects, ready for JSON."""
    return [asdict(each) for each in diagnostics]


def from_objects(objects: Iterable[Mapping[str, Any]]) -> list[Diagnostic]:
    """Return the findings that `as_objects` has made objects of.

    >>> found = finding('M901', command='chekc', place=Place('a', 1, 2), related=[('there', Place('b', 3, 4))])
    >>> from_objects(as_objects([found])) == [found]
    True
    """
    return [
        Diagnostic(
            **{
                **each,
                "place": None if each["place"] is None else Place(**each["place"]),
                "related": tuple((label, Place(**place)) for label, place in each["related"]),
            }
        )
        for each in objects
    ]


def render_github(diagnostic: Diagnostic) -> str:
    """Return the finding as a workflow command that GitHub shows beside the line."""
    text = diagnostic.message + (f" ({diagnostic.hint})" if diagnostic.hint else "")
    escaped = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    place = diagnostic.place
    where = f" file={place.file},line={place.line},col={place.column}," if place else " "
    return f"::{diagnostic.severity}{where}title={diagnostic.code}::{escaped}"


def _excerpt(place: Place) -> list[str]:
    if not place.text:
        return []
    number = str(place.line)
    pad = "".join("\t" if char == "\t" else " " for char in place.text[: place.column - 1])
    return [f"  {number} | {place.text}", f"  {' ' * len(number)} | {pad}^"]
