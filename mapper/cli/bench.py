"""`mapper bench`: how fast mapper is beside the loaders that are installed, in one run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mapper.bench.rows import ROWS
from mapper.bench.run import Bench, Outcome, plan_figures
from mapper.bench.table import table
from mapper.cli.output import Result
from mapper.diagnostics import MapperError, finding
from mapper.messages.suggest import did_you_mean

EXAMPLES = (
    "mapper bench",
    "mapper bench experts matrices --samples 5",
    "mapper bench experts-vllm --python vllm=/opt/vllm/bin/python --format json",
)


@dataclass(frozen=True, slots=True)
class Benched:
    """All rows of a run."""

    plan: Mapping[str, float]
    outcomes: Sequence[Outcome]

    def to_json(self) -> dict[str, object]:
        """Return the run as an object for JSON."""
        return {"ok": True, "plan": dict(self.plan), "rows": [each.to_json() for each in self.outcomes], "findings": []}

    def to_text(self) -> str:
        """Return the run for a person."""
        return table(self.outcomes, self.plan)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    names = ", ".join(row.name for row in ROWS)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"plan, {names} (default: all)")
    parser.add_argument(
        "--samples", type=int, default=3, metavar="N", help="processes per loader; medians are shown (default: 3)"
    )
    parser.add_argument("--folder", type=Path, default=Path(".bench"), help="where inputs are made and kept (default: .bench)")
    parser.add_argument("--cold", action="store_true", help="drop the files from the page cache before each sample")
    parser.add_argument(
        "--python",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="an interpreter for a loader that is installed elsewhere: vllm, fastsafetensors, runai",
    )


def run(arguments: argparse.Namespace) -> Result:
    """Measure the rows that were asked for."""
    known = ["plan", *(row.name for row in ROWS)]
    for name in arguments.rows:
        if name not in known:
            raise MapperError(
                [finding("M920", subject=name, hint=did_you_mean(name, known), name=name, known=", ".join(known))]
            )
    wanted = arguments.rows or known
    pythons = {}
    for text in arguments.python:
        name, separator, path = text.partition("=")
        if not separator or not Path(path).exists():
            raise MapperError([finding("M921", subject=text, text=text)])
        pythons[name] = path
    bench = Bench(arguments.folder, arguments.samples, pythons, arguments.cold, _say)
    plan = plan_figures(arguments.folder) if "plan" in wanted else {}
    outcomes = [bench.measure(row) for row in ROWS if row.name in wanted]
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    return Result(Benched(plan, outcomes), is_ok=True)


def _say(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
