"""The specs that a command is about: those named, or all that are bundled."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from mapper.diagnostics import Diagnostic, MapperError, as_objects, render_findings
from mapper.spec import load_spec
from mapper.spec.bundled import bundled_ids, find_spec
from mapper.spec.model import Spec


@dataclass(frozen=True, slots=True)
class SpecFindings:
    """One spec and what was found in it; `summary` says the rest in a few words, `numbers` for JSON."""

    name: str
    findings: tuple[Diagnostic, ...]
    summary: str
    numbers: dict[str, object]

    @property
    def ok(self) -> bool:
        """Whether nothing was found but advice."""
        return all(each.severity == "warning" for each in self.findings)


@dataclass(frozen=True, slots=True)
class SpecsReport:
    """Several specs, one after the other."""

    specs: tuple[SpecFindings, ...]

    @property
    def ok(self) -> bool:
        """Whether every spec is."""
        return all(each.ok for each in self.specs)

    @property
    def findings(self) -> tuple[Diagnostic, ...]:
        """The findings of all specs."""
        return tuple(finding for each in self.specs for finding in each.findings)

    def to_json(self) -> dict[str, object]:
        """Return the report as an object for JSON."""
        specs = [{"spec": each.name, "ok": each.ok, **each.numbers} for each in self.specs]
        return {"ok": self.ok, "specs": specs, "findings": as_objects(self.findings)}

    def to_text(self) -> str:
        """Return the report for a person."""
        lines = []
        for spec in self.specs:
            lines += render_findings(spec.findings)
            lines.append(f"{spec.name}: {spec.summary}")
        return "\n".join(lines)


def add_specs(parser: argparse.ArgumentParser) -> None:
    """Add the positional SPEC, any number of them."""
    parser.add_argument("specs", metavar="SPEC", nargs="*", help="bundled ids, architectures or paths (default: all bundled)")


def load_each(names: Sequence[str]) -> list[tuple[str, Spec | tuple[Diagnostic, ...]]]:
    """Return each spec, or what is wrong with it; raises MapperError for a name that is no spec's."""
    chosen = list(names) or list(bundled_ids())
    paths = [find_spec(name) for name in chosen]
    specs: list[tuple[str, Spec | tuple[Diagnostic, ...]]] = []
    for name, path in zip(chosen, paths, strict=True):
        try:
            specs.append((name, load_spec(path)))
        except MapperError as error:
            if any(each.code == "M110" and each.subject == str(path) for each in error.diagnostics):
                raise
            specs.append((name, error.diagnostics))
    return specs


def count(number: int, what: str) -> str:
    """Return a number with its noun.

    >>> count(1, 'error'), count(1200, 'warning')
    ('1 error', '1,200 warnings')
    """
    return f"{number:,} {what}{'' if number == 1 else 's'}"
