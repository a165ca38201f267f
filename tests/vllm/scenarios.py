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

STEPS = {
    "a feed without an update": ["feed_files", "{b0}"],
    "begin": ["begin_update"],
    "a second update": ["begin_update"],
    "feed": ["feed_files", "{b0}"],
    "feed more": ["feed_files", "{b1}"],
    "half an update": ["finish"],
    "logprobs then": ["logprobs"],
    "addresses then": ["probe_addresses"],
    "feed the rest": ["feed_files", "{b2}"],
    "finish": ["finish"],
    "logprobs after": ["logprobs"],
    "addresses after": ["probe_addresses"],
    "update back": ["update", "{a}"],
    "logprobs again": ["logprobs"],
    "move a parameter": ["probe_replace", "model.norm.weight"],
    "an update of what has moved": ["begin_update"],
}
"""An update to `b` in two halves and one back to `a`, and what must be refused on the way."""

REFUSED = {
    "a feed without an update": "M757",
    "a second update": "M758",
    "half an update": "M501",
    "an update of what has moved": "M754",
}
ALLOWED = tuple(name for name, step in STEPS.items() if name not in REFUSED and step != ["logprobs"])

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
        files = {"{a}": f"{folder}/a"} | {f"{{b{number}}}": f"{folder}/b/{shard}" for number, shard in enumerate(SHARDS)}
        steps = [[files.get(word, word) for word in step] for step in STEPS.values()]
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
    steps = dict(zip(STEPS, updated["steps"], strict=True))
    unchanged, after, returned = (steps[name] for name in ("logprobs then", "logprobs after", "logprobs again"))
    faults = [f"{name} failed: {steps[name]['error']}" for name in ALLOWED if "error" in steps[name]]
    faults += [
        f"{name} was not refused with {code}" for name, code in REFUSED.items() if code not in steps[name].get("error", "")
    ]
    if not torch.equal(unchanged, updated["logprobs"]):
        faults.append("half an update has changed the engine")
    if not torch.equal(after, fresh["logprobs"]):
        faults.append("an updated engine differs from a fresh one")
    if torch.equal(after, updated["logprobs"]):
        faults.append("an update has changed nothing")
    if not torch.equal(returned, updated["logprobs"]):
        faults.append("an update back to the first weights differs from the first load")
    if steps["addresses then"] != steps["addresses after"]:
        faults.append("an update has moved parameters")
    return faults
