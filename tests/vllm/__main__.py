"""`python -m tests.vllm [WORDS]`: start real engines one after the other, compare them, write evidence/vllm.json.

Run it with a Python that has vLLM, and mapper installed (`pip install --no-deps -e .`). With words, only scenarios that have
one of them in their name are asked; what is up to date is not asked again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from tests.vllm import evidence
from tests.vllm.models import write_model
from tests.vllm.scenarios import SCENARIOS, Scenario

MAX_SECONDS = 900
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


def main(words: list[str]) -> int:
    """Ask every scenario that is stale; return 1 where one has faults."""
    stale = set(evidence.stale())
    chosen = [each for each in SCENARIOS if each.name in stale and (not words or any(word in each.name for word in words))]
    num_faulty = 0
    with tempfile.TemporaryDirectory() as folder:
        for scenario in chosen:
            found = asked(scenario, Path(folder))
            evidence.note(scenario.name, found)
            num_faulty += bool(found["faults"])
            print(f"{scenario.name}: {found['faults'] or 'as it must be'} ({found['seconds']:.0f} s)", flush=True)
    return int(num_faulty > 0)


def asked(scenario: Scenario, folder: Path) -> dict[str, Any]:
    """Return what one scenario found."""
    start, digest = time.perf_counter(), evidence.digest()
    model = folder / scenario.model
    for seed, name in enumerate("ab"):
        write_model(scenario.model, model / name, seed=seed)
    results = {}
    faults = []
    for name, job in scenario.jobs(str(model)).items():
        result = run(job, folder / "job", tp=scenario.tp, is_split=scenario.is_live)
        if isinstance(result, str):
            faults.append(f"the engine {name!r} failed: {result}")
        else:
            results[name] = result
    faults = faults or scenario.faults(results)
    return {
        "faults": faults,
        "valid_for": digest,
        "engines": {name: [len(each) for each in result["hashes"]] for name, result in results.items()},
        "vllm": next((report["vllm"] for result in results.values() for report in result["reports"] if report), None),
        "positions": [list(result["logprobs"].shape) for result in results.values()],
        "seconds": round(time.perf_counter() - start, 1),
    }


def run(job: dict[str, Any], path: Path, *, tp: int, is_split: bool) -> dict[str, Any] | str:
    """Start one engine in a fresh process and return its result, or the end of what it printed.

    The workers are processes of their own; the engine's core is one where `is_split`.
    """
    asked, answer = path.with_suffix(".json"), path.with_suffix(".pt")
    asked.write_text(json.dumps(job))
    answer.unlink(missing_ok=True)
    cores = sorted(os.sched_getaffinity(0))
    bind = "|".join(str(cores[rank % len(cores)]) for rank in range(tp))
    done = subprocess.run(
        [sys.executable, "-m", "tests.vllm.serve", str(asked), str(answer)],
        env={
            **os.environ,
            **ENVIRONMENT,
            "VLLM_CPU_OMP_THREADS_BIND": bind,
            "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(is_split)),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=MAX_SECONDS,
        check=False,
    )
    if not answer.exists():
        return "\n".join(done.stdout.splitlines()[-80:])
    result: dict[str, Any] = torch.load(answer, weights_only=False)
    return result


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
