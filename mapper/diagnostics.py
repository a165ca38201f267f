"""What a user is told: a place, a code, what was expected, what was found and what to do."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Literal

from mapper.messages import CATALOGUE

OutputFormat = Literal["text", "json", "github"]


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
    """One finding. `subject` names the tensor, parameter or file it is about; `related` are other places it concerns."""

    code: str
    message: str
    place: Place | None = None
    subject: str = ""
    hint: str = ""
    related: tuple[tuple[str, Place], ...] = field(default=())

    def __str__(self) -> str:
        return render_text(self)


class MapperError(Exception):
    """Everything that was found wrong at one stage. It pickles, and its text holds every finding."""

    def __init__(self, diagnostics: Iterable[Diagnostic]) -> None:
        self.diagnostics = tuple(diagnostics)
        assert self.diagnostics, "an error needs at least one finding"
        super().__init__("\n".join(render_text(each) for each in self.diagnostics))

    def __reduce__(self) -> tuple[type[MapperError], tuple[tuple[Diagnostic, ...]]]:
        return MapperError, (self.diagnostics,)


def finding(
    code: str,
    *,
    place: Place | None = None,
    subject: str = "",
    hint: str = "",
    related: Iterable[tuple[str, Place]] = (),
    **values: object,
) -> Diagnostic:
    """Return the finding `code` with its catalogue text filled in from `values`.

    >>> finding('M901', command='chekc').message
    "unknown command 'chekc'"
    """
    message = CATALOGUE[code].template.format(**values)
    return Diagnostic(code, message, place, subject, hint, tuple(related))


def render_text(diagnostic: Diagnostic) -> str:
    """Return the finding as a person reads it: place, code, message, the line with a caret, related places, hint."""
    where = f"{diagnostic.place}: " if diagnostic.place else ""
    lines = [f"{where}{diagnostic.code} {diagnostic.message}"]
    if diagnostic.place is not None:
        lines += _excerpt(diagnostic.place)
    for label, place in diagnostic.related:
        lines.append(f"  {label}: {place}")
        lines += _excerpt(place)
    if diagnostic.hint:
        lines.append(f"  hint: {diagnostic.hint}")
    return "\n".join(lines)


def render_json(diagnostics: Iterable[Diagnostic]) -> str:
    """Return the findings as a JSON array of objects with the fields of `Diagnostic`."""
    return json.dumps(as_objects(diagnostics), indent=1)


def as_objects(diagnostics: Iterable[Diagnostic]) -> list[dict[str, object]]:
    """Return the findings as plain objects, ready for JSON."""
    return [asdict(each) for each in diagnostics]


def render_github(diagnostic: Diagnostic) -> str:
    """Return the finding as a workflow command that GitHub shows beside the line."""
    text = diagnostic.message + (f" ({diagnostic.hint})" if diagnostic.hint else "")
    escaped = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    place = diagnostic.place
    where = f" file={place.file},line={place.line},col={place.column}," if place else " "
    return f"::error{where}title={diagnostic.code}::{escaped}"


def _excerpt(place: Place) -> list[str]:
    if not place.text:
        return []
    number = str(place.line)
    pad = "".join("\t" if char == "\t" else " " for char in place.text[: place.column - 1])
    return [f"  {number} | {place.text}", f"  {' ' * len(number)} | {pad}^"]
