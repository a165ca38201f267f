"""The load format `mapper`: vLLM's state in, parameters filled. Only this module and `worker` need vLLM."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import vllm
from torch import nn
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.model_loader import get_model_loader, register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from mapper.checkpoint import Checkpoint
from mapper.integrations.vllm.engine import Engine
from mapper.integrations.vllm.load import Fallback, load
from mapper.integrations.vllm.reload import proved_tensors
from mapper.integrations.vllm.settings import settings_of
from mapper.integrations.vllm.state import remember, remember_served

LOGGER = init_logger("vllm.mapper")  # below `vllm`, so that vLLM's own handlers print it


def register(load_format: str) -> None:
    """Register the load format; vLLM calls this in every process, more than once in some."""
    try:
        known = type(get_model_loader(vllm.config.LoadConfig(load_format=load_format)))
    except ValueError:
        known = None
    if known is not MapperModelLoader:
        register_model_loader(load_format)(MapperModelLoader)


class MapperModelLoader(BaseModelLoader):  # type: ignore[misc]
    """Fills a vLLM model as a spec says, before vLLM's post-processing, and leaves to vLLM what no spec covers."""

    def __init__(self, load_config: Any) -> None:
        super().__init__(load_config)
        self._settings = settings_of(load_config.model_loader_extra_config or {})

    def download_model(self, model_config: Any) -> None:
        _folder_of(model_config, self._vllm_loader())

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        own = self._vllm_loader()
        checkpoint = Checkpoint.open(_folder_of(model_config, own))
        engine = engine_of(get_current_vllm_config(), model_config, model)
        own_weights: Any = model
        fallback = Fallback(whole=lambda: _loaded_by(own, model, model_config), part=own_weights.load_weights)
        report = load(engine, self._settings, model, checkpoint, fallback)
        remember(model, engine, self._settings, report)
        LOGGER.info(report.to_text())
        if self._settings.report is not None:
            report.write(self._settings.report)

    def load_model(self, *arguments: Any, **named: Any) -> nn.Module:
        """Build, load and post-process as vLLM does, and remember what the parameters have become."""
        model: nn.Module = super().load_model(*arguments, **named)
        remember_served(model)
        return model

    def get_all_weights(self, model_config: Any, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the tensors of the checkpoint for vLLM's reload, proved complete before the first is handed out."""
        checkpoint = Checkpoint.open(_folder_of(model_config, self._vllm_loader()))
        return proved_tensors(model, checkpoint)

    def _vllm_loader(self) -> Any:
        return DefaultModelLoader(replace(self.load_config, load_format="auto", model_loader_extra_config={}))


def engine_here(model: nn.Module) -> Engine:
    """Return what vLLM says about the model that is being built or loaded."""
    vllm_config = get_current_vllm_config()
    return engine_of(vllm_config, vllm_config.model_config, model)


def engine_of(vllm_config: Any, model_config: Any, model: nn.Module) -> Engine:
    """Return what this process of vLLM says about the model that it has built."""
    from vllm.distributed import get_dp_group, get_pp_group, get_tensor_model_parallel_rank
    from vllm.distributed import get_tensor_model_parallel_world_size as tp_size

    parallel = vllm_config.parallel_config
    dp = parallel.data_parallel_size
    pp = get_pp_group()
    experts: list[Any] = [module for module in model.modules() if hasattr(module, "expert_map_manager")]
    return Engine(
        version=vllm.__version__,
        architectures=tuple(model_config.hf_config.architectures or ()),
        config=_config_of(model_config),
        tp=tp_size(),
        pp=pp.world_size,
        dp=dp,
        tp_rank=get_tensor_model_parallel_rank(),
        pp_rank=pp.rank_in_group,
        dp_rank=get_dp_group().rank_in_group if dp > 1 else 0,
        has_expert_parallelism=parallel.enable_expert_parallel,
        redundant_experts=max((_redundant(module) for module in experts), default=0),
        placement=next((module.expert_map_manager.placement_strategy for module in experts), "linear"),
        pp_layers=_pp_layers() if pp.world_size > 1 else None,
        mega_moe=any(getattr(module, "use_native_mega_moe", False) for module in model.modules()),
        fuses_shared_experts=any(module.expert_map_manager.num_fused_shared_experts > 0 for module in experts),
        unsupported=_unsupported(parallel),
    )


def _redundant(module: Any) -> int:
    return int(module.moe_config.num_experts - module.moe_config.num_logical_experts)


def _pp_layers() -> tuple[int, ...] | None:
    """Return the layers of each stage where the user deals them out: vLLM reads this variable, and nothing else."""
    text = os.environ.get("VLLM_PP_LAYER_PARTITION")
    return tuple(int(part) for part in text.split(",")) if text else None


def _unsupported(parallel: Any) -> tuple[str, ...]:
    found = []
    if getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        found.append("prefill context parallelism")
    if getattr(parallel, "decode_context_parallel_size", 1) > 1:
        found.append("decode context parallelism")
    if getattr(parallel, "enable_elastic_ep", False):
        found.append("elastic expert parallelism")
    return tuple(found)


def _config_of(model_config: Any) -> dict[str, Any]:
    """Return the checkpoint's config.json, with what the user overrides in it; vLLM's own form of it renames keys."""
    path = Path(model_config.model, "config.json")
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else model_config.hf_config.to_dict()
    overrides = model_config.hf_overrides
    return {**config, **overrides} if isinstance(overrides, dict) else config


def _folder_of(model_config: Any, own: Any) -> str:
    """Return the checkpoint's folder; vLLM's own loader downloads what is not local."""
    if Path(model_config.model).is_dir():
        return str(model_config.model)
    folder, *_ = own._prepare_weights(model_config.model, None, model_config.revision, False, ["*.safetensors"])
    return str(folder)


def _loaded_by(own: Any, model: nn.Module, model_config: Any) -> set[str] | None:
    """Load the model whole by vLLM's own loader, with its own checks; return the names that the model says it loaded."""
    with _noted(model) as names:
        own.load_weights(model, model_config)
    return names[0] if names else None


@contextmanager
def _noted(model: nn.Module) -> Iterator[list[set[str] | None]]:
    """Yield what the model's `load_weights` returns, which vLLM's loader checks and keeps for itself."""
    names: list[set[str] | None] = []
    load_weights: Any = model.load_weights

    def noting(*args: Any, **kwargs: Any) -> set[str] | None:
        names.append(load_weights(*args, **kwargs))
        return names[-1]

    model.load_weights = noting  # type: ignore[assignment]
    try:
        yield names
    finally:
        del model.load_weights
