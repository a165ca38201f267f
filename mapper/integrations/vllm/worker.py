"""Updates of a running engine, as an extension of vLLM's worker: `mapper.integrations.vllm.worker.Updates`.

`mapper.integrations.vllm.client.EngineUpdate` calls the methods, on all workers at once. The new weights go through vLLM's own
layerwise reload, which restores each layer as it was before post-processing, processes it again, and copies the result to where
the engine serves from.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from vllm.config import set_current_vllm_config
from vllm.distributed import get_world_group
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEExperts
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info, make_online_process_loader
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS, SKIP_TENSORS
from vllm.platforms import current_platform

from mapper.checkpoint import Checkpoint
from mapper.diagnostics import Diagnostic, MapperError, finding
from mapper.integrations.distributed import raise_together
from mapper.integrations.vllm.live import LiveUpdate, answered, unpacked
from mapper.integrations.vllm.state import changes, forget, loaded_of, remember_served
from mapper.integrations.vllm.targets import without_wrappers


class Updates:
    """Methods of every worker; vLLM mixes this class into its own.

    Each answers {"gave": ..., "findings": [...]}: a worker that raises leaves the answers of the others in vLLM's queue, and
    the next call would take them for its own.
    """

    model_runner: Any
    vllm_config: Any

    @answered
    def begin_update(self) -> None:
        """Open an update, unless the model cannot be updated. The engine may serve on meanwhile."""
        if self._open_update() is not None:
            raise MapperError([finding("M758")])
        model = self.model_runner.get_model()
        _packing_kernels(model)
        self._mapper_update: LiveUpdate | None = LiveUpdate(model)

    @answered
    def feed(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take tensors of the new checkpoint by name, in any order and any number of calls."""
        self._required_update().feed(tensors)

    @answered
    def feed_packed(self, data: bytes) -> None:
        """Take tensors that come from another process."""
        self._required_update().feed(unpacked(data))

    @answered
    def feed_files(self, path: str) -> None:
        """Take every tensor of a checkpoint's folder or file."""
        self._required_update().feed_files(Checkpoint.open(path))

    @answered
    def finish(self) -> dict[str, object]:
        """Put the new weights in place, once every rank has all that it needs; no request may run meanwhile.

        All ranks refuse, and nothing has changed, where any of them lacks something; more may be fed then.
        The engine's caches of what the old weights computed are the caller's to drop (`reset_prefix_cache`).
        """
        update = self._required_update()
        findings: tuple[Diagnostic, ...] = ()
        account: dict[str, object] = {}
        try:
            account = update.finish().to_json()
        except MapperError as error:
            findings = error.diagnostics
        raise_together(findings, get_world_group().cpu_group)
        model = self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            _put_in_place(model, update.filled, self.vllm_config.model_config)
        self._mapper_update = None
        for reset in ("reset_lora_state", "reset_encoder_cache", "reset_mm_cache"):
            getattr(self.model_runner, reset, lambda: None)()
        return account

    @answered
    def abort(self) -> None:
        """Forget the open update; the engine goes on with the weights that it has."""
        self._required_update()
        self._mapper_update = None

    def _open_update(self) -> LiveUpdate | None:
        return getattr(self, "_mapper_update", None)

    def _required_update(self) -> LiveUpdate:
        update = self._open_update()
        if update is None:
            raise MapperError([finding("M757")])
        return update


def _put_in_place(model: nn.Module, values: dict[str, torch.Tensor], model_config: Any) -> None:
    loaded = loaded_of(model)
    assert loaded is not None
    assert loaded.served is not None
    fillings = _fillings(model, values)
    _restore_emptied(model, {name: trace.shape for name, trace in loaded.filled.items()})
    for method in _packing_kernels(model):
        method.moe_kernel = None
    initialize_layerwise_reload(model)
    own_loaders: list[tuple[torch.Tensor, Any]] = []
    filling = "its last layers"
    try:
        for module, path, leaf, value in fillings:
            filling = f"{path}.{leaf}"
            target: Any = getattr(module, leaf)
            if leaf in SKIP_TENSORS:  # vLLM leaves these where they are
                target.data.copy_(value)
            elif target.is_meta:
                own_loaders.append((target, target.weight_loader))
                target.weight_loader = _copied
                target.weight_loader = make_online_process_loader(module, leaf)
                target.weight_loader(target, value)
        finalize_layerwise_reload(model, model_config)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        failure = MapperError([finding("M759", subject=filling, name=filling, problem=problem)])
        _stop_serving(model, failure)
        raise failure from error
    for target, loader in own_loaders:
        target.weight_loader = loader
    moved = changes(loaded.served, model)
    remember_served(model)
    if moved:
        _stop_serving(model, MapperError(moved))
        raise MapperError(moved)


def _stop_serving(model: nn.Module, failure: MapperError) -> None:
    """Let every further use of the model raise what has made it unusable."""

    def refuse(*_: object) -> None:
        raise failure

    model.register_forward_pre_hook(refuse)
    forget(model)


def _fillings(model: nn.Module, values: dict[str, torch.Tensor]) -> list[tuple[nn.Module, str, str, torch.Tensor]]:
    """Return (module, its path, leaf, value) of every tensor of each module that has new values, in the order of the modules.

    vLLM makes such a module anew, so that what has no new value must be given its old one; raises MapperError M755 where that
    is not what it was before post-processing.
    """
    found: list[tuple[nn.Module, str, str, torch.Tensor]] = []
    findings: list[Diagnostic] = []
    for path, module in model.named_modules():
        leaves = {**module._parameters, **module._buffers}
        own = {leaf: values.get(without_wrappers(f"{path}.{leaf}")) for leaf, each in leaves.items() if each is not None}
        if all(value is None for value in own.values()):
            continue
        before = {name: each for part in get_layerwise_info(module).restore_metadata for name, each in part.items()}
        for leaf, value in own.items():
            if value is None and leaf not in SKIP_LOAD_TENSORS | SKIP_TENSORS and leaf in before:
                value, was = leaves[leaf], before[leaf]
                assert value is not None
                if (value.shape, value.dtype) != (was.shape, was.dtype):
                    reason = f"{path}.{leaf} has been reshaped since the load, and no source gives it a new value"
                    findings.append(finding("M755", reason=reason))
            if value is not None:
                found.append((module, path, leaf, value))
    if findings:
        raise MapperError(findings)
    return found


def _packing_kernels(model: nn.Module) -> list[Any]:
    """Return the quantisation methods of layers whose experts pack their weights in a step that vLLM takes only once.

    vLLM takes it when it builds the kernel, and keeps the kernel in a reload: the weights would lie unpacked where packed ones
    are read. Without the kernel it builds another, which a captured graph would not know: M755, but on a CPU.
    """
    found = []
    for path, module in model.named_modules():
        method: Any = getattr(module, "quant_method", None)
        experts = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
        step = getattr(type(experts), "process_weights_after_loading", None)
        if step is not None and step is not FusedMoEExperts.process_weights_after_loading:
            if not current_platform.is_cpu():
                reason = f"vLLM packs the experts of {path} only once ({type(experts).__name__})"
                raise MapperError([finding("M755", reason=reason)])
            found.append(method)
    return found


def _restore_emptied(model: nn.Module, shapes: dict[str, tuple[int, ...]]) -> None:
    """Give back their size to weights that an attention layer has emptied after absorbing them; it will do so again."""
    absorbed = {
        id(each)
        for module in model.modules()
        if is_deferred_attention_layer(module)
        for each in (*vars(module).values(), *module._modules.values())
        if isinstance(each, nn.Module)
    }
    for path, module in model.named_modules():
        if id(module) in absorbed:
            for leaf, parameter in list(module._parameters.items()):
                shape = shapes.get(without_wrappers(f"{path}.{leaf}"))
                if parameter is not None and shape is not None and parameter.numel() == 0:
                    restored = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
                    module.register_parameter(leaf, nn.Parameter(restored, requires_grad=False))


def _copied(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
    """Load a parameter as a whole; vLLM counts what is copied, and calls it by these names."""
    param.data.copy_(loaded_weight)
