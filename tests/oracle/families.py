"""Tiny checkpoints of model families, with the names, dtypes and shard files that a published checkpoint has.

A family is a config.json and a function from that config to the headers of its tensors. The values of a tensor follow
from its name, shape and dtype alone, so the goldens beside this file hold for any machine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.oracle import deepseek_v3, deepseek_v4, quantized
from tests.oracle.deepseek_v3 import ONE_DRAFT_LAYER, V2, V3, deepseek_headers
from tests.oracle.deepseek_v4 import deepseek_v4_headers
from tests.oracle.dense import (
    GEMMA3,
    PHI3,
    QWEN3_FP8,
    QWEN3_FP8_HALF_BLOCK,
    gemma3_headers,
    phi3_headers,
    qwen3_headers,
)
from tests.oracle.grouped_query import (
    GLM4_MOE,
    GPT_OSS,
    LLAMA,
    MIXTRAL,
    MXFP4,
    QWEN2_MOE,
    QWEN3_MOE,
    QWEN3_MOE_FP8,
    glm4_moe_headers,
    gpt_oss_headers,
    llama_headers,
    mixtral_headers,
    qwen2_moe_headers,
    qwen3_moe_headers,
)
from tests.oracle.tensors import DRAWS, SENTINEL_BYTE, Config, Header, tensor_values

__all__ = [
    "DRAWS",
    "FAMILIES",
    "ONE_DRAFT_LAYER",
    "PLAIN_V3",
    "SENTINEL_BYTE",
    "V2",
    "V3",
    "Config",
    "Family",
    "Header",
    "deepseek_headers",
    "family_tensors",
    "tensor_values",
    "tensors_of",
    "write_checkpoint",
    "write_tensors",
    "write_family",
]


@dataclass(frozen=True, slots=True)
class Family:
    """A checkpoint as its config.json and the headers that follow from it, in the order of the files."""

    config: Config
    headers: Callable[[Config], Iterator[Header]]
    num_shards: int = 3


def family_tensors(name: str) -> dict[str, torch.Tensor]:
    """Return every tensor of the named family's checkpoint, in the order of the files."""
    return tensors_of(FAMILIES[name])


def write_family(name: str, folder: Path) -> Path:
    """Write the named family's checkpoint (config.json, shards and index) into `folder` and return `folder`."""
    return write_checkpoint(FAMILIES[name], folder)


def tensors_of(family: Family) -> dict[str, torch.Tensor]:
    """Return every tensor of a family's checkpoint, in the order of the files."""
    return {header.name: tensor_values(header) for header in family.headers(family.config)}


def write_checkpoint(family: Family, folder: Path) -> Path:
    """Write a family's checkpoint into `folder` and return `folder`."""
    return write_tensors(family, tensors_of(family), folder)


def write_tensors(family: Family, tensors: Mapping[str, torch.Tensor], folder: Path) -> Path:
    """Write a family's config.json, and these tensors as its shards and index, into `folder` and return `folder`."""
    shards = _split(tensors, family.num_shards)
    folder.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": sum(map(_num_bytes, tensors.values()))}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    (folder / "config.json").write_text(json.dumps(family.config, indent=1))
    return folder


def _split(tensors: Mapping[str, torch.Tensor], num_shards: int) -> list[dict[str, torch.Tensor]]:
    """Return consecutive groups of tensors, each closed by the tensor that fills its even share of the bytes."""
    share = sum(map(_num_bytes, tensors.values())) / num_shards
    shards: list[dict[str, torch.Tensor]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        shards[-1][name] = tensor
        filled += _num_bytes(tensor)
        if filled >= share and len(shards) < num_shards:
            shards.append({})
            filled = 0
    return [shard for shard in shards if shard]


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


FAMILIES: dict[str, Family] = {
    **{name: Family(config, deepseek_headers) for name, config in deepseek_v3.CONFIGS.items()},
    **{name: Family(config, deepseek_v4_headers) for name, config in deepseek_v4.CONFIGS.items()},
    "llama": Family(LLAMA, llama_headers),
    "mixtral": Family(MIXTRAL, mixtral_headers),
    "glm4_moe": Family(GLM4_MOE, glm4_moe_headers),
    "qwen2_moe": Family(QWEN2_MOE, qwen2_moe_headers),
    "qwen3_moe": Family(QWEN3_MOE, qwen3_moe_headers),
    "qwen3_moe_fp8": Family(QWEN3_MOE_FP8, qwen3_moe_headers),
    "phi3": Family(PHI3, phi3_headers),
    "gemma3": Family(GEMMA3, gemma3_headers),
    "qwen3_fp8": Family(QWEN3_FP8, qwen3_headers),
    "qwen3_fp8_halfblock": Family(QWEN3_FP8_HALF_BLOCK, qwen3_headers),
    "llama_fp8_tensor": Family(quantized.FP8_PER_TENSOR, quantized.fp8_per_tensor_headers),
    "llama_fp8_tensor_of_one": Family(quantized.FP8_PER_TENSOR_OF_ONE, quantized.fp8_per_tensor_of_one_headers),
    "llama_fp8_channel": Family(quantized.FP8_PER_CHANNEL, quantized.fp8_per_channel_headers),
    "llama_awq": Family(quantized.AWQ, quantized.awq_headers),
    "llama_gptq": Family(quantized.GPTQ, quantized.gptq_headers),
    "llama_int4": Family(quantized.INT4, quantized.int4_headers),
    "llama_nvfp4": Family(quantized.NVFP4, quantized.nvfp4_headers),
    "gpt_oss_bf16": Family(GPT_OSS, gpt_oss_headers),
    "gpt_oss_mxfp4": Family({**GPT_OSS, **MXFP4}, gpt_oss_headers),
}
# The families of the spec deepseek_v2 that load on every layout, by their sizes.
PLAIN_V3 = ("deepseek_v2", "deepseek_v2_lite", "deepseek_v3", "deepseek_v3_fp8", "deepseek_v3_fp8_mtp", "deepseek_v3_mtp")
