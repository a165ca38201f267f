"""What is asked of real engines, and what their answers must be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

SIZES = (1, 2)
COMPARED = ("llama", "qwen3_moe", "deepseek_v2_lite", "deepseek_v3")
SHARDS = tuple(f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3))
LIVE = (("llama", 1), ("qwen3_moe", 2), ("deepseek_v3", 2))
"""Models and tensor parallel sizes that are updated while they run."""

STRICT: Mapping[str, Any] = {"fallback": False}
Result = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Scenario:
    """Engines that are compared with each other, each started on a checkpoint: `a`, or `b`, the same model trained on."""

    name: str
    model: str
    tp: int
    is_live: bool

    def jobs(self, folder: str) -> dict[str, dict[str, Any]]:
        """Return what to start: a job by name."""
        first = {"model": f"{folder}/a", "tp": self.tp}
        if not self.is_live:
            return {
                "mapper": {**first, "load_format": "mapper", "settings": STRICT},
                "safetensors": {**first, "load_format": "safetensors"},
            }
        files = [f"{folder}/b/{shard}" for shard in SHARDS]
        steps = [
            ["feed_files", files[0]],
            ["begin_update"],
            ["begin_update"],
            ["feed_files", files[0]],
            ["feed_files", files[1]],
            ["finish"],
            ["logprobs"],
            ["probe_addresses"],
            ["feed_files", files[2]],
            ["finish"],
            ["logprobs"],
            ["probe_addresses"],
            ["begin_update"],
            ["feed_files", f"{folder}/a"],
            ["finish"],
            ["logprobs"],
            ["probe_replace", "model.norm.weight"],
            ["begin_update"],
        ]
        return {
            "updated": {**first, "load_format": "mapper", "settings": STRICT, "steps": steps},
            "fresh": {"model": f"{folder}/b", "tp": self.tp, "load_format": "safetensors"},
        }

    def faults(self, results: Mapping[str, Result]) -> list[str]:
        """Return what is not as it must be, in sentences; none where all is well."""
        return _live_faults(results) if self.is_live else _load_faults(results, self.tp)


SCENARIOS = tuple(
    [Scenario(f"{model} tp={tp}", model, tp, False) for model in COMPARED for tp in SIZES]
    + [Scenario(f"{model} tp={tp} updated while it runs", model, tp, True) for model, tp in LIVE]
)


def _load_faults(results: Mapping[str, Result], tp: int) -> list[str]:
    ours, theirs = results["mapper"], results["safetensors"]
    faults = []
    if len(ours["hashes"]) != tp or ours["hashes"] != theirs["hashes"]:
        faults.append("the parameters differ before post-processing")
    if not all(ours["hashes"]):
        faults.append("a worker has no parameters")
    if not torch.equal(ours["logprobs"], theirs["logprobs"]):
        faults.append("the log probabilities differ")
    if not ours["logprobs"].isfinite().all() or ours["logprobs"].std() < 0.1:
        faults.append("the log probabilities say nothing")
    for rank, report in enumerate(ours["reports"]):
        if (report["rank"], report["delegated"], report["fell_back"]) != (rank, 0, None) or not report["proved"]:
            faults.append(f"worker {rank} reports {report}")
    if any(report is not None for report in theirs["reports"]):
        faults.append("mapper took part in a load of vLLM's own")
    return faults


def _live_faults(results: Mapping[str, Result]) -> list[str]:
    updated, fresh = results["updated"], results["fresh"]
    (
        unopened, begun, twice, first, second, half, unchanged, before, third, done, after, addresses, again, fed, back, returned,
        _, moved,
    ) = updated["steps"]  # fmt: skip
    faults = [
        f"{what} failed: {step['error']}"
        for what, step in {
            "begin": begun, "feed": first, "second feed": second, "third feed": third, "finish": done, "begin again": again,
            "feed again": fed, "finish again": back,
        }.items()
        if "error" in step
    ]  # fmt: skip
    refusals = {
        "a feed without an update": (unopened, "M757"),
        "a second update": (twice, "M758"),
        "half an update": (half, "M501"),
        "an update of a parameter that has moved": (moved, "M754"),
    }
    faults += [f"{what} was not refused with {code}" for what, (step, code) in refusals.items() if code not in step.get("error", "")]
    if not torch.equal(unchanged, updated["logprobs"]):
        faults.append("half an update has changed the engine")
    if not torch.equal(after, fresh["logprobs"]):
        faults.append("an updated engine differs from a fresh one")
    if torch.equal(after, updated["logprobs"]):
        faults.append("an update has changed nothing")
    if not torch.equal(returned, updated["logprobs"]):
        faults.append("an update back to the first weights differs from the first load")
    if before != addresses:
        faults.append("an update has moved parameters")
    return faults
