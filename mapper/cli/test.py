"""`mapper test`: the cases that specs pin about themselves."""

from __future__ import annotations

import argparse

from mapper.cases import run_cases
from mapper.cli.output import Result
from mapper.cli.specs import SpecFindings, SpecsReport, add_specs, count, load_each
from mapper.spec.model import Spec

EXAMPLES = ("mapper test", "mapper test deepseek_v2 --format json")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_specs(parser)


def run(arguments: argparse.Namespace) -> Result:
    """Run the cases of each spec."""
    found = []
    for name, spec in load_each(arguments.specs):
        if not isinstance(spec, Spec):
            found.append(SpecFindings(name, spec, "its cases were not run", {}))
            continue
        cases = run_cases(spec)
        numbers = {key: value for key, value in cases.to_json().items() if key not in ("ok", "spec", "failures")}
        kinds = {"passed": cases.passed, "missed": cases.missed, "grabbed": cases.grabbed, "misrouted": cases.misrouted}
        counts = [f"{number:,} {kind}" for kind, number in {**kinds, "not run": cases.not_run}.items() if number]
        summary = f"{count(cases.cases, 'case')}, {count(cases.lines, 'line')}: {', '.join(counts) or 'none'}"
        found.append(SpecFindings(name, cases.failures, summary, numbers))
    report = SpecsReport(tuple(found))
    return Result(report, report.ok, report.findings)
