"""`mapper test`: the cases that specs pin about themselves, and synthetic loads against the reference loader, or mutants."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, TypeVar

from mapper.cases import run_cases
from mapper.cli.output import Result
from mapper.cli.specs import SpecFindings, SpecsReport, add_specs, count, load_each
from mapper.diagnostics import Diagnostic, MapperError, finding
from mapper.spec.model import Spec

if TYPE_CHECKING:
    from mapper.testing.mutation import MutationReport

T = TypeVar("T")
EXAMPLES = (
    "mapper test deepseek_v2",
    "mapper test my.yaml --examples 100      # as many drawn configs and layouts for each guarantee",
    "mapper test --examples 0 --format json  # the pinned cases only",
    "mapper test my.yaml --mutate            # every single change of the spec, and what finds it",
)
DEFAULT_EXAMPLES = 8


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_specs(parser)
    help_text = f"synthetic loads per runtime and guarantee (default: {DEFAULT_EXAMPLES}; 0: cases only)"
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--examples", type=int, default=DEFAULT_EXAMPLES, metavar="N", help=help_text)
    instead.add_argument(
        "--mutate",
        action="store_true",
        help="in place of synthetic loads, change the spec in every single way (swap sources, drop a rule, ...) and "
        "tell what finds each change: checks of the structure, and evidence, which here is the pinned cases; a change "
        "that nothing finds fails",
    )


def run(arguments: argparse.Namespace) -> Result:
    """Run the cases of each spec, then its synthetic loads."""
    is_loaded = arguments.examples and not arguments.mutate
    if is_loaded:
        _require_testing()
    found = []
    for name, spec in load_each(arguments.specs):
        if not isinstance(spec, Spec):
            found.append(SpecFindings(name, spec, "it was not run", {}))
            continue
        cases = run_cases(spec)
        numbers = {key: value for key, value in cases.to_json().items() if key not in ("ok", "spec", "failures")}
        kinds = {"passed": cases.passed, "missed": cases.missed, "grabbed": cases.grabbed, "misrouted": cases.misrouted}
        counts = [f"{number:,} {kind}" for kind, number in {**kinds, "not run": cases.not_run}.items() if number]
        summary = f"{count(cases.cases, 'case')}, {count(cases.lines, 'line')}: {', '.join(counts) or 'none'}"
        failures: tuple[Diagnostic, ...] = cases.failures
        if is_loaded:
            loads, broken = _loads(spec, arguments.examples)
            numbers["loads"] = loads
            summary += f"; {count(sum(loads.values()), 'synthetic load')}, {count(len(broken), 'broken guarantee')}"
            failures += tuple(broken)
        if arguments.mutate and cases.ok:
            try:
                mutations = _mutate(spec)
            except MapperError as error:
                failures += error.diagnostics
            else:
                numbers["mutation"] = {key: value for key, value in mutations.to_json().items() if key != "findings"}
                summary += f"\n{mutations.summary}"
                failures += mutations.findings
        found.append(SpecFindings(name, failures, summary, numbers))
    report = SpecsReport(tuple(found))
    return Result(report, report.ok, report.findings)


def _require_testing() -> None:
    missing = next((module for module in ("torch", "hypothesis", "numpy", "safetensors") if find_spec(module) is None), None)
    if missing is not None:
        raise MapperError([finding("M831", module=missing)])


def _loads(spec: Spec, num_examples: int) -> tuple[dict[str, int], list[Diagnostic]]:
    """Return the loads done per runtime and guarantee, and what they broke."""
    from mapper.testing.run import GUARANTEES, run_guarantee

    loads: dict[str, int] = {}
    broken: list[Diagnostic] = []
    pairs = [(runtime, each) for runtime in spec.runtimes for each in GUARANTEES]
    for runtime, guarantee in _with_progress(pairs, " ".join):
        try:
            loads[f"{runtime} {guarantee}"] = run_guarantee(spec, runtime, guarantee, max_examples=num_examples).checked
        except (AssertionError, MapperError) as error:
            problem = "\n".join([str(error), *getattr(error, "__notes__", ())])
            place = spec.runtimes[runtime].place
            broken.append(finding("M830", place=place, subject=spec.id, runtime=runtime, guarantee=guarantee, problem=problem))
    return loads, broken


def _mutate(spec: Spec) -> MutationReport:
    """Return what finds each mutant of a spec whose own cases hold."""
    from mapper.testing.mutation import mutate

    return mutate(spec, progress=lambda mutants: _with_progress(mutants, lambda mutant: f"{spec.id} {mutant.kind}"))


def _with_progress(items: Sequence[T], label: Callable[[T], str]) -> Iterator[T]:
    if not sys.stderr.isatty():
        yield from items
        return
    from tqdm import tqdm

    with tqdm(items, leave=False) as bar:
        for item in bar:
            bar.set_description(label(item))
            yield item
