"""YAML text -> a tree of nodes, each with its place.

Scalars follow the YAML 1.2 core schema: `no`, `on` and `1:30` are texts, `012` is 12, `0o14` is 12, `1e3` is a float.
What makes a file read otherwise than it looks is an error: duplicate keys, anchors, aliases, tags, merge keys, tabs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mapper.diagnostics import Diagnostic, MapperError, Place, finding

Value = None | bool | int | float | str

MAX_DEPTH = 64

_NULL = frozenset({"null", "Null", "NULL", "~", ""})
_BOOLEANS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INTEGER = re.compile(r"[-+]?[0-9]+")
_OCTAL = re.compile(r"0o[0-7]+")
_HEXADECIMAL = re.compile(r"0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_INFINITY = re.compile(r"[-+]?\.(inf|Inf|INF)")
_NAN = frozenset({".nan", ".NaN", ".NAN"})
# Every plain scalar that is no text starts with one of these; most scalars of a spec do not.
_STARTS_OF_OTHERS = frozenset("-+.0123456789~nNtTfF")

_LINE_BREAK = re.compile("\r\n|[\n\r\x85\u2028\u2029]")
_FORBIDDEN = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True, slots=True)
class Scalar:
    """A value of YAML 1.2 core; `text` is what is written, without quotes and folding."""

    value: Value
    text: str
    place: Place


@dataclass(frozen=True, slots=True)
class Sequence:
    items: tuple[Node, ...]
    place: Place


@dataclass(frozen=True, slots=True)
class Entry:
    key: Scalar
    value: Node

    @property
    def name(self) -> str:
        return self.key.text


@dataclass(frozen=True, slots=True)
class Mapping:
    entries: tuple[Entry, ...]
    place: Place

    def get(self, name: str) -> Node | None:
        """Return the value of the key `name`, or None."""
        for entry in self.entries:
            if entry.key.text == name:
                return entry.value
        return None


Node = Scalar | Sequence | Mapping


def read_file(path: Path) -> tuple[Mapping, str]:
    """Return the tree and the text of a YAML file; raises `MapperError` with everything wrong in it."""
    try:
        data = path.read_bytes()
    except OSError as error:
        reason = error.strerror or str(error)
        raise MapperError([finding("M110", subject=str(path), file=str(path), reason=reason)]) from error
    try:
        text = data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        before = data[: error.start].decode("utf-8")
        lines = _LINE_BREAK.split(before)
        place = Place(str(path), len(lines), len(lines[-1]) + 1)
        raise MapperError([finding("M111", place=place, byte=data[error.start])]) from error
    return parse_text(text, file=str(path)), text


def parse_text(text: str, *, file: str, loader: Any = None) -> Mapping:
    """Return the tree of a YAML text whose top level is a mapping; raises `MapperError` with everything wrong in it.

    `loader` is a PyYAML loader class: the C one where PyYAML has it (5 ms instead of 58 ms for a large spec).
    """
    lines = _LINE_BREAK.split(text)
    findings = _forbidden_characters(lines, file)
    if findings:
        raise MapperError(findings)
    builder = _Builder(file, lines, findings)
    try:
        root = builder.build(_iter_events(text, loader or _fastest_loader()))
    except yaml.MarkedYAMLError as error:
        findings.append(_syntax_finding(error, file, lines))
        raise MapperError(findings) from error
    if findings:
        raise MapperError(findings)
    if root is None or (isinstance(root, Scalar) and root.text == ""):
        raise MapperError([finding("M109", place=Place(file, 1, 1, lines[0]))])
    if not isinstance(root, Mapping):
        raise MapperError([finding("M112", place=root.place, found=describe(root))])
    return root


def place_at(scalar: Scalar, offset: int) -> Place:
    """Return the place of the character `offset` of the scalar's text; its start where folding or escapes hide it."""
    start = scalar.place
    raw = start.text[start.column - 1 :]
    before = scalar.text[:offset]
    quote = raw[:1]
    written: str | None
    if quote == "'":
        written = before.replace("'", "''")
    elif quote == '"':
        written = before if "\\" not in raw[1 : offset + 1] else None
    else:
        written = before
    skipped = 1 if quote in ("'", '"') else 0
    if written is None or not raw.startswith(written, skipped):
        return start
    return Place(start.file, start.line, start.column + skipped + len(written), start.text)


def describe(node: Node) -> str:
    """Return what a node is, in words for a message.

    >>> describe(parse_text('a: [1]', file='x').entries[0].value)
    'a list'
    """
    match node:
        case Mapping():
            return "a mapping"
        case Sequence():
            return "a list"
        case Scalar(value=None):
            return "null"
        case Scalar(value=bool() as value):
            return str(value).lower()
        case Scalar(value=str() as value):
            return f"the text {value!r}"
        case _:
            return f"the number {node.text}"


def plain(node: Node) -> object:
    """Return the tree as dicts, lists and values."""
    if isinstance(node, Scalar):
        return node.value
    if isinstance(node, Sequence):
        return [plain(item) for item in node.items]
    return {entry.key.text: plain(entry.value) for entry in node.entries}


def resolve(text: str) -> Value:
    """Return the value of a plain scalar under YAML 1.2 core.

    >>> [resolve(each) for each in ('no', '012', '0o14', '1_000', '1e3', '~')]
    ['no', 12, 12, '1_000', 1000.0, None]
    """
    if text in _NULL:
        return None
    if text[0] not in _STARTS_OF_OTHERS:
        return text
    if text in _BOOLEANS:
        return _BOOLEANS[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _OCTAL.fullmatch(text):
        return int(text[2:], 8)
    if _HEXADECIMAL.fullmatch(text):
        return int(text[2:], 16)
    if _FLOAT.fullmatch(text):
        return float(text)
    if _INFINITY.fullmatch(text):
        return float("-inf") if text[0] == "-" else float("inf")
    return float("nan") if text in _NAN else text


def _fastest_loader() -> Any:
    return getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _iter_events(text: str, loader_class: Any) -> Iterator[yaml.Event]:
    loader = loader_class(text)
    try:
        while loader.check_event():
            yield loader.get_event()
    finally:
        loader.dispose()


class _Builder:
    """Builds the tree from parser events; the node graph of `compose` no longer knows anchors."""

    def __init__(self, file: str, lines: list[str], findings: list[Diagnostic]) -> None:
        self.file = file
        self.lines = lines
        self.findings = findings

    def build(self, events: Iterator[yaml.Event]) -> Node | None:
        root: Node | None = None
        num_documents = 0
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                num_documents += 1
                if num_documents > 1:
                    self.report("M108", event)
                    break
            elif isinstance(event, yaml.NodeEvent):
                root = self.node(event, events, 0)
        return root

    def node(self, event: Any, events: Iterator[yaml.Event], depth: int) -> Node:
        place = self.place(event)
        if isinstance(event, yaml.AliasEvent):
            self.report("M103", event, name=str(event.anchor), mark="*")
            return Scalar(None, "", place)
        if event.anchor is not None:
            self.report("M103", event, name=event.anchor, mark="&")
        if event.tag is not None:
            self.report("M104", event, tag=event.tag)
        if isinstance(event, yaml.ScalarEvent):
            return self.scalar(event, place)
        if depth >= MAX_DEPTH:
            raise MapperError([*self.findings, finding("M113", place=place, limit=MAX_DEPTH)])
        if isinstance(event, yaml.SequenceStartEvent):
            return self.sequence(place, events, depth + 1)
        return self.mapping(place, events, depth + 1)

    def scalar(self, event: Any, place: Place) -> Scalar:
        text = event.value
        if event.style not in (None, ""):
            return Scalar(text, text, place)
        try:
            return Scalar(resolve(text), text, place)
        except ValueError:  # more digits than Python converts
            self.report("M101", event, problem="the number has too many digits")
            return Scalar(0, text, place)

    def sequence(self, place: Place, events: Iterator[yaml.Event], depth: int) -> Sequence:
        items: list[Node] = []
        for event in events:
            if isinstance(event, yaml.SequenceEndEvent):
                break
            items.append(self.node(event, events, depth))
        return Sequence(tuple(items), place)

    def mapping(self, place: Place, events: Iterator[yaml.Event], depth: int) -> Mapping:
        entries: dict[str, Entry] = {}
        for event in events:
            if isinstance(event, yaml.MappingEndEvent):
                break
            key = self.node(event, events, depth)
            value = self.node(next(events), events, depth)
            if self.is_key(key, event):
                assert isinstance(key, Scalar), "is_key refuses what is no scalar"
                first = entries.setdefault(key.text, Entry(key, value))
                if first.key is not key:
                    related = [("first given here", first.key.place)]
                    self.findings.append(finding("M102", place=key.place, related=related, key=key.text))
        return Mapping(tuple(entries.values()), place)

    def is_key(self, key: Node, event: Any) -> bool:
        if isinstance(event, yaml.AliasEvent):
            return False
        if not isinstance(key, Scalar) or not isinstance(key.value, str):
            self.report("M106", event, found=describe(key))
            return False
        if key.text == "<<" and event.style in (None, ""):
            self.report("M105", event)
            return False
        return True

    def report(self, code: str, event: yaml.Event, **values: str) -> None:
        message_values: dict[str, Any] = {**values}
        self.findings.append(finding(code, place=self.place(event), **message_values))

    def place(self, event: Any) -> Place:
        return _place(self.file, self.lines, event.start_mark.line, event.start_mark.column)


def _place(file: str, lines: list[str], line: int, column: int) -> Place:
    return Place(file, line + 1, column + 1, lines[line] if line < len(lines) else "")


def _syntax_finding(error: yaml.MarkedYAMLError, file: str, lines: list[str]) -> Diagnostic:
    mark = error.problem_mark or error.context_mark
    place = _place(file, lines, mark.line, mark.column) if mark else Place(file, 1, 1, lines[0])
    related = []
    if error.context and error.context_mark:
        related.append((error.context, _place(file, lines, error.context_mark.line, error.context_mark.column)))
    at_brace = place.text[place.column - 1 : place.column] == "{"
    hint = "inside { } and [ ], quote a name that has braces" if at_brace else ""
    return finding("M101", place=place, related=related, hint=hint, problem=error.problem or "not YAML")


def _forbidden_characters(lines: list[str], file: str) -> list[Diagnostic]:
    findings = []
    for number, line in enumerate(lines):
        tab = line.find("\t")
        if tab >= 0:
            findings.append(finding("M107", place=_place(file, lines, number, tab)))
        bad = _FORBIDDEN.search(line)
        if bad:
            problem = f"the character U+{ord(bad.group()):04X} cannot stand in YAML"
            findings.append(finding("M101", place=_place(file, lines, number, bad.start()), problem=problem))
    return findings
