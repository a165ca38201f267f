"""Small checkpoints whose weights have real sizes, so that a wrong one moves the logits, and that vLLM serves on a CPU.

vLLM's CPU kernels want head dims of 32 or more, and MLA a latent of 512 and a rotary part of 64. Experts of fewer than 32 rows
a rank, as in the second model on two ranks, they pad.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.oracle.deepseek_v3 import V2, V3, deepseek_headers
from tests.oracle.families import Family, write_tensors
from tests.oracle.grouped_query import LLAMA, QWEN3_MOE, llama_headers, qwen3_moe_headers
from tests.oracle.tensors import Config, Header

VOCABULARY = 256
COMMON: Config = {"vocab_size": VOCABULARY, "hidden_size": 64, "max_position_embeddings": 256}
LATENT: Config = {
    **COMMON,
    "intermediate_size": 96,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}
GROUPED: Config = {**COMMON, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": 3}


@dataclass(frozen=True, slots=True)
class Model:
    """A config, and the headers that follow from it."""

    config: Config
    headers: Callable[[Config], Iterator[Header]]


MODELS: Mapping[str, Model] = {
    "llama": Model({**LLAMA, **GROUPED, "intermediate_size": 96}, llama_headers),
    "qwen3_moe": Model(
        {**QWEN3_MOE, **GROUPED, "intermediate_size": 96, "moe_intermediate_size": 32, "num_experts": 8}, qwen3_moe_headers
    ),
    "deepseek_v2_lite": Model({**V2, **LATENT, "q_lora_rank": None}, deepseek_headers),
    "deepseek_v3": Model({**V3, **LATENT, "q_lora_rank": 48, "num_nextn_predict_layers": 1}, deepseek_headers),
}


def write_model(name: str, folder: Path, *, seed: int = 0) -> Path:
    """Write the checkpoint of a model; another seed is the same model after more training."""
    model = MODELS[name]
    tensors = {header.name: _values(header, seed) for header in model.headers(model.config)}
    return write_tensors(Family(model.config, model.headers), tensors, folder)


def _values(header: Header, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {header.name}".encode()))
    drawn = torch.randn(header.shape, generator=generator)
    is_norm = header.name.endswith("norm.weight")
    values = 1 + drawn / 8 if is_norm else drawn / math.sqrt(header.shape[-1])
    return values.to(header.dtype)


def prompts() -> list[list[int]]:
    """Return a few sequences of tokens that share no start."""
    return [[(start + step * number) % VOCABULARY for number in range(24)] for start, step in ((3, 7), (101, 29), (200, 3))]
