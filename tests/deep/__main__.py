"""`python -m tests.deep`: judge every mutant of the core, check the guarantees at length, write the evidence.

With patterns such as `mapper/plan/*` only the mutants of these modules, and no evidence.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatch
from functools import partial
from importlib.metadata import version
from pathlib import Path

from tests.deep import survivors, trial
from tests.deep.core import CORE, EVIDENCE, ROOT, digest, judges_of, paths_of
from tests.deep.mutants import Mutant, mutants_of

LEAST_SCORE = 0.95
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
    def score(self) -> float:
        return 1 - len(self.survived) / self.num_mutants if self.num_mutants else 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.deep", description=__doc__)
    parser.add_argument("patterns", nargs="*", help="modules to mutate (default: the whole core)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="mutants at a time")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only every Nth mutant")
    arguments = parser.parse_args()
    is_whole = not arguments.patterns and arguments.every == 1
    valid_for, began = digest(), time.monotonic()
    chosen = [
        path for path in paths_of(CORE) if not arguments.patterns or any(fnmatch(path, each) for each in arguments.patterns)
    ]
    results = mutate(chosen, jobs=arguments.jobs, every=arguments.every)
    complaints = faults(results, is_whole=is_whole)
    if is_whole:
        mutated = time.monotonic()
        outcome = check_guarantees(arguments.jobs)
        complaints += [f"the guarantees do not hold: {outcome}"] if outcome["exit_code"] else []
        complaints += ["the tree changed while it was judged"] if digest() != valid_for else []
        evidence = {
            "valid_for": valid_for,
            "result": "failed" if complaints else "passed",
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "python": platform.python_version(),
            "tools": {tool: version(tool) for tool in TOOLS},
            "mutants": {**totals(results), "seconds": round(mutated - began)},
            "guarantees": {**outcome, "seconds": round(time.monotonic() - mutated)},
        }
        EVIDENCE.parent.mkdir(exist_ok=True)
        EVIDENCE.write_text(json.dumps(evidence, indent=2) + "\n", encoding="utf-8")
    print("\n".join(complaints or ["passed"]))
    return 1 if complaints else 0


def mutate(paths: Iterable[str], *, jobs: int, every: int) -> dict[str, Result]:
    """Return what became of the mutants of each module; prints one line for each."""
    trial.prepare()
    results: dict[str, Result] = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        coverage = trial.measure(list(dict.fromkeys(file for path in paths for file in judges_of(path))), folder)
        gc.collect()
        gc.freeze()
        for path in paths:
            began = time.monotonic()
            codes = _judge_all(mutants_of(path)[::every], coverage, folder, jobs)
            survived = tuple(mutant for mutant, code in codes.items() if code in (trial.SURVIVED, trial.NOT_RUN))
            num_out_of_time = sum(code == trial.OUT_OF_TIME for code in codes.values())
            results[path] = Result(len(codes), num_out_of_time, survived, time.monotonic() - began)
            print(f"{path}: {_spell(results[path])}", flush=True)
    return results


def faults(results: Mapping[str, Result], *, is_whole: bool) -> list[str]:
    """Return what is wrong: a mutant that lives and is not listed, one that is listed and does not, a low score."""
    known = survivors.listed()
    alive = {mutant.key for result in results.values() for mutant in result.survived}
    found = [
        f"a mutant lives and is not in {survivors.LIST.name}:\n{survivors.spell(key)}\n" for key in sorted(alive - known.keys())
    ]
    if is_whole:
        dead = [
            f"{survivors.LIST.name} lists a mutant that does not live:\n{survivors.spell(key)}\n"
            for key in known
            if key not in alive
        ]
        low = [f"{path}: {_spell(result)}" for path, result in results.items() if result.score < LEAST_SCORE]
        return [*found, *dead, *low]
    return found


def totals(results: Mapping[str, Result]) -> dict[str, object]:
    """Return the counts of all modules and of each."""
    modules = {
        path: {
            "mutants": result.num_mutants,
            "killed": result.num_mutants - len(result.survived),
            "of these out of time": result.num_out_of_time,
            "survived": len(result.survived),
        }
        for path, result in results.items()
    }
    sums: Counter[str] = Counter()
    for counts in modules.values():
        sums.update(counts)
    return {**sums, "score": round(sums["killed"] / sums["mutants"], 4), "modules": modules}


def check_guarantees(jobs: int) -> dict[str, object]:
    """Run the guarantees of the engine with the profile `deep`."""
    command = [sys.executable, "-m", "pytest", "-n", str(jobs), "-q", "-p", "no:cacheprovider", GUARANTEES]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "MAPPER_PROFILE": "deep"}, capture_output=True, text=True, check=False
    )
    lines = done.stdout.strip().splitlines()
    if done.returncode:
        print(done.stdout)
    return {"profile": "deep", "ran": GUARANTEES, "exit_code": done.returncode, "said": lines[-1].strip("= ") if lines else ""}


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
    killed = result.num_mutants - len(result.survived)
    times = f"{result.num_out_of_time} of them out of time, {result.seconds:.0f} s"
    return f"{killed} of {result.num_mutants} killed ({result.score:.1%}), {times}"


if __name__ == "__main__":
    sys.exit(main())
