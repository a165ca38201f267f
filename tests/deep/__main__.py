"""`python -m tests.deep`: judge the mutants of every module of the core, check the guarantees at length, note the evidence.

Only what has changed since it was last judged, unless `--all`. With patterns such as `mapper/plan/*` only these modules.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatch
from functools import partial
from importlib.metadata import version
from pathlib import Path

from tests.deep import evidence, survivors, trial
from tests.deep.core import CORE, ROOT, digest_of, digest_of_guarantees, judges_of, paths_of
from tests.deep.mutants import Mutant, mutants_of

TOOLS = ("mutmut", "libcst", "coverage", "hypothesis", "pytest")
GUARANTEES = "tests/testing"


@dataclass(frozen=True, slots=True)
class Result:
    """What became of the mutants of one module."""

    num_mutants: int
    num_out_of_time: int
    survived: tuple[Mutant, ...]
    seconds: float

    @property
    def counts(self) -> dict[str, int]:
        num_survived = len(self.survived)
        return {
            "mutants": self.num_mutants,
            "killed": self.num_mutants - num_survived,
            "out_of_time": self.num_out_of_time,
            "survived": num_survived,
        }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.deep", description=__doc__)
    parser.add_argument("patterns", nargs="*", help="modules to judge, and no guarantees (default: the whole core, and them)")
    parser.add_argument("--all", action="store_true", help="also what has not changed since it was judged")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="mutants at a time")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only every Nth mutant, and no evidence")
    parser.add_argument("--profile", default="ci", help="how long the guarantees run: ci (default), or deep for a night")
    arguments = parser.parse_args()
    chosen = paths_of(CORE) if arguments.all or arguments.every > 1 else evidence.stale_modules()
    if arguments.patterns:
        chosen = [path for path in chosen if any(fnmatch(path, each) for each in arguments.patterns)]
    complaints = mutate(chosen, jobs=arguments.jobs, every=arguments.every)
    if not arguments.patterns and arguments.every == 1 and (arguments.all or evidence.are_guarantees_stale()):
        complaints += check_guarantees(arguments.jobs, arguments.profile)
    print(f"{len(complaints)} complaints, each above" if complaints else "passed")
    return 1 if complaints else 0


def mutate(paths: Iterable[str], *, jobs: int, every: int) -> list[str]:
    """Judge the mutants of each module and note what became of them; prints one line for each, returns what is wrong."""
    complaints: list[str] = []
    if not (paths := list(paths)):
        return complaints
    trial.prepare()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        valid_for = {path: digest_of(path) for path in paths}
        coverage = trial.measure(list(dict.fromkeys(file for path in paths for file in judges_of(path))), folder)
        gc.collect()
        gc.freeze()
        for path in paths:
            began = time.monotonic()
            codes = _judge_all(mutants_of(path)[::every], coverage, folder, jobs)
            survived = tuple(mutant for mutant, code in codes.items() if code in (trial.SURVIVED, trial.NOT_RUN))
            num_out_of_time = sum(code == trial.OUT_OF_TIME for code in codes.values())
            result = Result(len(codes), num_out_of_time, survived, time.monotonic() - began)
            print(f"{path}: {_spell(result)}", flush=True)
            is_whole = every == 1
            found = faults(path, result, is_whole=is_whole)
            print(*found, sep="\n", flush=True)
            complaints += found
            if is_whole and digest_of(path) == valid_for[path]:
                evidence.note_module(path, {"valid_for": valid_for[path], **result.counts, **_circumstances(began)})
            elif is_whole:
                complaints.append(f"{path} or its judges changed while it was judged")
    return complaints


def faults(path: str, result: Result, *, is_whole: bool) -> list[str]:
    """Return what is wrong: a mutant that lives and is not listed, one that is listed and does not, a low score."""
    known = {key for key in survivors.listed() if key[0] == path}
    alive = {mutant.key for mutant in result.survived}
    name = survivors.LIST.name
    found = [f"a mutant lives and is not in {name}:\n{survivors.spell(key)}\n" for key in sorted(alive - known)]
    if is_whole:
        found += [f"{name} lists a mutant that does not live:\n{survivors.spell(key)}\n" for key in sorted(known - alive)]
        if evidence.score_of(result.counts) < evidence.LEAST_SCORE:
            found.append(f"{path}: {_spell(result)}")
    return found


def check_guarantees(jobs: int, profile: str) -> list[str]:
    """Run the guarantees of the engine on every bundled spec with a profile and note how that went; returns what is wrong."""
    began, valid_for = time.monotonic(), digest_of_guarantees()
    command = [sys.executable, "-m", "pytest", "-n", str(jobs), "-q", "-p", "no:cacheprovider", GUARANTEES]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "MAPPER_PROFILE": profile}, capture_output=True, text=True, check=False
    )
    lines = done.stdout.strip().splitlines()
    said = lines[-1].strip("= ") if lines else ""
    moved = [line for line in lines if " rules in " in line]
    found = {
        "valid_for": valid_for,
        "profile": profile,
        "exit_code": done.returncode,
        "said": said,
        "moved": moved,
        **_circumstances(began),
    }
    complaints = [f"the guarantees do not hold:\n{done.stdout}"] if done.returncode else []
    if valid_for == digest_of_guarantees():
        evidence.note_guarantees(found)
    else:
        complaints.append("the engine, a spec or a test changed while the guarantees were checked")
    print(*complaints, sep="\n", flush=True)
    return complaints


def _circumstances(began: float) -> dict[str, object]:
    return {
        "seconds": round(time.monotonic() - began),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "tools": " ".join(f"{tool} {version(tool)}" for tool in TOOLS),
    }


def _judge_all(mutants: list[Mutant], coverage: trial.Coverage, folder: Path, jobs: int) -> dict[Mutant, int]:
    waiting, running, codes = deque(mutants), dict[int, tuple[Mutant, Path]](), dict[Mutant, int]()
    while waiting or running:
        while waiting and len(running) < jobs:
            mutant = waiting.popleft()
            tests = coverage.judges(mutant.path, mutant.first, mutant.last, judges_of(mutant.path))
            log = folder / f"{len(waiting)}.log"
            run = partial(trial.judge, mutant.path, mutant.text, tests, coverage.seconds)
            if tests:
                running[trial.in_process(run, log)] = mutant, log
            else:
                codes[mutant] = trial.NOT_RUN
        if running:
            child, status = os.wait()
            mutant, log = running.pop(child)
            codes[mutant] = os.waitstatus_to_exitcode(status)
            assert codes[mutant] in trial.VERDICTS, f"{mutant} ended with {codes[mutant]}:\n{log.read_text()}"
            log.unlink()
    return {mutant: codes[mutant] for mutant in mutants}


def _spell(result: Result) -> str:
    counts = result.counts
    times = f"{counts['out_of_time']} of them out of time, {result.seconds:.0f} s"
    return f"{counts['killed']} of {counts['mutants']} killed ({evidence.score_of(counts):.1%}), {times}"


if __name__ == "__main__":
    sys.exit(main())
