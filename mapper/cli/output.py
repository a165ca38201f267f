"""Results and failures in three formats: text for people, json for programs, github for annotations beside the line."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from mapper.diagnostics import (
    Diagnostic,
    MapperError,
    OutputFormat,
    as_objects,
    finding,
    fold_findings,
    render_findings,
    render_github,
)

FINE, FINDINGS, USAGE, INTERNAL = 0, 1, 2, 3
FORMATS: tuple[OutputFormat, ...] = ("text", "json", "github")

# Findings about how a command was called; all of M9xx are, too.
_USAGE_CODES = frozenset(
    {
        "M110", "M140", "M145",  # a spec that does not exist
        "M305", "M306",  # a runtime or an option that the spec does not have
        "M320", "M321", "M322", "M324", "M325", "M326", "M327", "M328",  # a layout, or a rank of it
        "M401", "M404", "M803",  # a checkpoint or a config that does not exist
    }
)  # fmt: skip


class Report(Protocol):
    """What a command has to say."""

    def to_text(self) -> str: ...
    def to_json(self) -> dict[str, object]: ...


@dataclass(frozen=True, slots=True)
class Result:
    """What a command found; `findings` are those in the report, for the github format."""

    report: Report
    is_ok: bool
    findings: tuple[Diagnostic, ...] = ()


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a command has no result. `trace` is there for an error of mapper's own."""

    findings: tuple[Diagnostic, ...]
    code: int
    trace: str = ""

    @staticmethod
    def of(error: MapperError) -> Failure:
        """Return the failure of an error that the user can mend."""
        is_usage = all(each.code in _USAGE_CODES or each.code.startswith("M9") for each in error.diagnostics)
        return Failure(error.diagnostics, USAGE if is_usage else FINDINGS)

    @staticmethod
    def internal(error: Exception) -> Failure:
        """Return the failure of an error that only mapper can cause."""
        trace = "".join(traceback.format_exception(error))
        told = finding("M990", hint="please report it, with the traceback", error=f"{type(error).__name__}: {error}")
        return Failure((told,), INTERNAL, trace)


def wanted_format(words: Sequence[str]) -> OutputFormat:
    """Return the format that a command line asks for, before it is parsed: its errors are told in it."""
    found: OutputFormat = "text"
    for position, word in enumerate(words):
        value = words[position + 1] if word == "--format" and position + 1 < len(words) else word.removeprefix("--format=")
        if value is not word:
            found = next((each for each in FORMATS if each == value), found)
    return found


def print_result(result: Result, style: OutputFormat) -> int:
    """Print a result to stdout and return the exit code."""
    if style == "json":
        print(json.dumps(result.report.to_json(), indent=1))
    elif style == "github":
        _print_annotations(result.findings)
        if result.is_ok:
            print(result.report.to_text())
    else:
        print(result.report.to_text())
    return FINE if result.is_ok else FINDINGS


def print_failure(failure: Failure, style: OutputFormat) -> int:
    """Print why there is no result: json and github to stdout, text to stderr; return the exit code."""
    if failure.trace:
        print(f"{failure.trace}\nThis is a bug in mapper. Please report it.", file=sys.stderr)
    if style == "json":
        told: dict[str, object] = {"ok": False, "findings": as_objects(failure.findings)}
        if failure.trace:
            told["internal_error"] = failure.trace
        print(json.dumps(told, indent=1))
    elif style == "github":
        _print_annotations(failure.findings)
    else:
        print("\n".join(render_findings(failure.findings)), file=sys.stderr)
    return failure.code


def _print_annotations(findings: Sequence[Diagnostic]) -> None:
    for each in fold_findings(findings):
        print(render_github(each))
