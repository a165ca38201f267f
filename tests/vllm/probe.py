"""What a worker of vLLM is asked for in these tests: hashes of its parameters as the loader left them."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn

from mapper.integrations.vllm.state import loaded_of
from mapper.integrations.vllm.worker import Updates
from vllm.model_executor.model_loader import base_loader

HASHES: dict[str, str] = {}
"""By name, the parameters of this process's model, after the load and before vLLM's post-processing."""

_process = base_loader.process_weights_after_loading


def _hash_then_process(model: nn.Module, *arguments: Any) -> None:
    HASHES.clear()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        data = parameter.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        HASHES[name] = hashlib.sha256(f"{parameter.dtype} {list(parameter.shape)} ".encode() + data).hexdigest()
    _process(model, *arguments)


base_loader.process_weights_after_loading = _hash_then_process  # a worker imports its extension before it loads a model


class Probe(Updates):
    """The extension under test, and what it is asked besides."""

    def probe_hashes(self) -> dict[str, str]:
        return dict(HASHES)

    def probe_report(self) -> dict[str, object] | None:
        loaded = loaded_of(self.model_runner.get_model())
        return None if loaded is None else loaded.report.to_json()

    def probe_addresses(self) -> dict[str, int]:
        return {name: each.data_ptr() for name, each in self.model_runner.get_model().named_parameters()}

    def probe_replace(self, name: str) -> None:
        """Give a parameter other memory, as a careless reload would."""
        parameter = self.model_runner.get_model().get_parameter(name)
        parameter.data = parameter.data.clone()
