"""`mapper lint`: everything that can be found in a spec without a checkpoint."""

from __future__ import annotations

import argparse

from mapper.cli.output import Result
from mapper.cli.specs import SpecFindings, SpecsReport, add_specs, count, load_each
from mapper.lint import lint
from mapper.spec.model import Spec

EXAMPLES = ("mapper lint", "mapper lint deepseek_v2", "mapper lint ./my.yaml --format github")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_specs(parser)


def run(arguments: argparse.Namespace) -> Result:
    """Lint each spec; warnings are advice and do not fail."""
    found = []
    for name, spec in load_each(arguments.specs):
        findings = lint(spec) if isinstance(spec, Spec) else spec
        num_warnings = sum(each.severity == "warning" for each in findings)
        num_errors = len(findings) - num_warnings
        summary = f"{count(num_errors, 'error')}, {count(num_warnings, 'warning')}"
        found.append(SpecFindings(name, findings, summary, {"errors": num_errors, "warnings": num_warnings}))
    report = SpecsReport(tuple(found))
    return Result(report, report.ok, report.findings)
