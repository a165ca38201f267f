"""One rank of a real vLLM model on the CPU, without an engine: for a comparison of loaders."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed

from mapper.layout import Layout

SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


@contextmanager
def vllm_model(folder: Path, layout: str) -> Iterator[tuple[Any, Any]]:
    """Yield (model, vLLM's config) of rank 0 of a layout; raises ImportError where vLLM is not installed.

    The process groups are torch's fake ones: the other ranks do not exist, and nothing may be communicated.
    """
    os.environ.update({key: os.environ.get(key, value) for key, value in SETTINGS.items()})
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    wanted = Layout.parse(layout)
    arguments = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=128,
        max_num_batched_tokens=128,
        max_num_seqs=2,
        dtype="bfloat16",
        tensor_parallel_size=wanted.tp,
        pipeline_parallel_size=wanted.pp,
        enable_expert_parallel=wanted.ep > 1,
        distributed_executor_backend="uni" if wanted.num_ranks == 1 else "mp",
    )
    config = arguments.create_engine_config()
    new_group = torch.distributed.new_group

    def fake_group(ranks: Any = None, *unused: Any, **also_unused: Any) -> Any:
        return new_group(ranks, backend="fake")

    with set_current_vllm_config(config), patch.object(torch.distributed, "new_group", fake_group):
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=wanted.num_ranks)
        with patch.object(parallel_state, "in_the_same_node_as", lambda *_, **__: [True] * wanted.num_ranks):
            parallel_state.init_distributed_environment(wanted.num_ranks, 0, "env://", 0, "fake")
            parallel_state.initialize_model_parallel(wanted.tp, wanted.pp, backend="fake")
        with set_default_torch_dtype(torch.bfloat16), torch.device("cpu"):
            model = initialize_model(config, model_config=config.model_config)
        yield model, config
