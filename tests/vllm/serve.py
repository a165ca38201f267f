"""One engine in a fresh process, `python -m tests.vllm.serve JOB.json RESULT.pt`: it answers, then does the job's steps."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from mapper.integrations.vllm import EngineUpdate
from tests.vllm.models import VOCABULARY, prompts


def serve(job: dict[str, Any]) -> dict[str, Any]:
    """Start the engine that the job describes, and return what each step gave."""
    from vllm import LLM

    start = time.perf_counter()
    llm = LLM(
        model=job["model"],
        load_format=job["load_format"],
        model_loader_extra_config=job.get("settings", {}),
        tensor_parallel_size=job.get("tp", 1),
        enable_expert_parallel=job.get("ep", False),
        worker_extension_cls="tests.vllm.probe.Probe",
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=128,
        max_logprobs=-1,
        enable_prefix_caching=False,
        disable_log_stats=True,
        **job.get("engine", {}),
    )
    result: dict[str, Any] = {"seconds": time.perf_counter() - start}
    result["hashes"] = llm.collective_rpc("probe_hashes")
    result["reports"] = llm.collective_rpc("probe_report")
    result["logprobs"] = logprobs_of(llm)
    result["steps"] = [_step(llm, *step) for step in job.get("steps", ())]
    return result


def _step(llm: Any, method: str, *arguments: Any) -> Any:
    if method == "logprobs":
        return logprobs_of(llm)
    if method == "update":
        return _updated(llm, *arguments)
    answers = llm.collective_rpc(method, args=tuple(arguments))
    refused = [each for answer in answers if isinstance(answer, dict) for each in answer.get("findings", ())]
    return {"error": "; ".join(f"{each['code']} {each['message']}" for each in refused)} if refused else {"gave": answers}


def _updated(llm: Any, folder: str) -> Any:
    """Send the tensors themselves, file by file."""
    with EngineUpdate(llm) as update:
        for path in sorted(Path(folder).glob("*.safetensors")):
            update.feed(load_file(path).items())
    return {"gave": None}


def logprobs_of(llm: Any) -> torch.Tensor:
    """Return the log probability of every token of the vocabulary at every position of every prompt, as float32."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=-1, detokenize=False)
    rows = []
    for prompt in prompts():  # one at a time: which prompts share a batch depends on when they arrive, and moves bits
        (output,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        rows += [[position[token].logprob for token in range(VOCABULARY)] for position in output.prompt_logprobs[1:]]
    return torch.tensor(rows, dtype=torch.float32)


if __name__ == "__main__":
    torch.save(serve(json.loads(Path(sys.argv[1]).read_text())), sys.argv[2])
