"""The mutants of the core: mutmut's operators and three of ours, on all code but prose, types and assertions.

A text with a blank in it is prose: messages may be worded in many ways, their codes may not. An assertion says what
cannot happen, so a weaker one cannot be noticed; `strict=True` of zip is one too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import libcst
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import mutation_operators, operator_match, operator_string

from tests.deep.core import ROOT

TYPING_CALLS = ("cast", "TypeVar", "NewType", "get_args")
BRANCHES = (libcst.If, libcst.While, libcst.CompIf, libcst.MatchCase)


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one module. `first` to `last` are the lines of the node; before and after say what changes in them."""

    path: str
    where: str
    first: int
    last: int
    before: str
    after: str
    text: str

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What a list of survivors knows a mutant by; line numbers move, the rest changes with the code only."""
        return self.path, self.where, self.before, self.after

    def __str__(self) -> str:
        return f"{self.path}:{self.first} {self.where}\n    - {self.before}\n    + {self.after}"


def mutants_of(path: str) -> list[Mutant]:
    """Return the mutants of one module in the order of its lines."""
    text = (ROOT / path).read_text(encoding="utf-8")
    finder = _Finder(path, text)
    MetadataWrapper(libcst.parse_module(text)).visit(finder)
    return list({mutant.text: mutant for mutant in finder.mutants if _compiles(mutant.text)}.values())


def _compiles(text: str) -> bool:
    try:
        compile(text, "mutant", "exec")
    except SyntaxError:
        return False
    return True


class _Finder(libcst.CSTVisitor):
    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self, path: str, text: str) -> None:
        super().__init__()
        self.path = path
        self.text = text
        self.starts = [0]
        for line in text.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.scope: list[str] = []
        self.mutants: list[Mutant] = []

    def on_visit(self, node: libcst.CSTNode) -> bool:
        if _is_left_alone(node, is_at_top=not self.scope):
            return False
        if isinstance(node, libcst.FunctionDef | libcst.ClassDef):
            self.scope.append(node.name.value)
        for original, replacement in _replacements(node):
            self._add(original, replacement)
        return True

    def on_leave(self, original_node: libcst.CSTNode) -> None:
        if isinstance(original_node, libcst.FunctionDef | libcst.ClassDef):
            self.scope.pop()

    def _add(self, node: libcst.CSTNode, replacement: str) -> None:
        span = self.get_metadata(PositionProvider, node)
        start = self.starts[span.start.line - 1] + span.start.column
        end = self.starts[span.end.line - 1] + span.end.column
        mutated = self.text[:start] + replacement + self.text[end:]
        before, after = _changed_lines(self.text, mutated)
        self.mutants.append(Mutant(self.path, ".".join(self.scope), span.start.line, span.end.line, before, after, mutated))


def _replacements(node: libcst.CSTNode) -> Iterator[tuple[libcst.CSTNode, str]]:
    """Yield (the node whose text is replaced, its new text)."""
    empty = libcst.Module(())
    for kind, operator in mutation_operators:
        if not isinstance(node, kind) or operator is operator_match:
            continue
        mutated = [each for each in operator(node) if _is_worth_it(node, each)]
        yield from ((node, empty.code_for_node(each)) for each in (mutated[:1] if operator is operator_string else mutated))
    if isinstance(node, BRANCHES):
        test = node.guard if isinstance(node, libcst.MatchCase) else node.test
        if test is not None:
            code = empty.code_for_node(test)
            yield test, f"({code}) and False"
            if not isinstance(node, libcst.While):
                yield test, f"({code}) or True"
        if isinstance(node, libcst.MatchCase) and node.guard is None:
            yield node.pattern, f"{empty.code_for_node(node.pattern)} if False"
    if isinstance(node, libcst.Expr) and not isinstance(node.value, libcst.SimpleString | libcst.Ellipsis):
        yield node, "pass"


def _is_left_alone(node: libcst.CSTNode, *, is_at_top: bool) -> bool:
    """Whether neither the node nor what is in it is mutated."""
    match node:
        case libcst.Annotation() | libcst.Decorator() | libcst.Assert() | libcst.Import() | libcst.ImportFrom():
            return True
        case libcst.Arg(keyword=libcst.Name(value="strict")):
            return True
        case libcst.Call(func=libcst.Name(value=name)) if name in TYPING_CALLS:
            return True
        case libcst.Assign(targets=[libcst.AssignTarget(target=libcst.Name(value=name))]) if is_at_top:
            return name.startswith("__") or (name[0].isupper() and not name.isupper())
        case _:
            return _is_prose(node)


def _is_prose(node: libcst.CSTNode) -> bool:
    match node:
        case libcst.SimpleString(value=value):
            return " " in value or value.startswith('"""')
        case libcst.FormattedString(parts=parts):
            return any(isinstance(part, libcst.FormattedStringText) and " " in part.value for part in parts)
        case libcst.ConcatenatedString(left=left, right=right):
            return _is_prose(left) or _is_prose(right)
        case _:
            return False


def _is_worth_it(node: libcst.CSTNode, mutated: libcst.CSTNode) -> bool:
    """Whether the change is no change of prose or `strict`, and the only one of an argument.

    A positional argument becomes None and a keyword is taken out: a call with one argument less mostly just fails.
    """
    match node, mutated:
        case libcst.Assign() | libcst.AnnAssign(), _:
            return not (node.value is not None and _is_prose(node.value))
        case libcst.Call(), libcst.Call() if len(node.args) > len(mutated.args):
            (lost,) = [each for each in node.args if each not in mutated.args]
            is_strict = lost.keyword is not None and lost.keyword.value == "strict"
            return not is_strict and not _is_prose(lost.value) and (lost.keyword is not None or lost.star != "")
        case libcst.Call(), libcst.Call() if node.func is mutated.func:
            changed = [before for before, after in zip(node.args, mutated.args, strict=True) if before is not after]
            return all(each.keyword is None and not _is_prose(each.value) for each in changed)
        case _:
            return True


def _changed_lines(before: str, after: str) -> tuple[str, str]:
    old, new = before.splitlines(), after.splitlines()
    while old and new and old[0] == new[0]:
        del old[0], new[0]
    while old and new and old[-1] == new[-1]:
        del old[-1], new[-1]
    return " ".join(map(str.strip, old)), " ".join(map(str.strip, new))
