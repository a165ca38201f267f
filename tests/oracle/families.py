"""Tiny checkpoints of model families, with the names, dtypes and shard files that a published checkpoint has.

A family is a config.json and a function from that config to the headers of its tensors. The values of a tensor follow
from its name, shape and dtype alone, so the goldens beside this file hold for any machine. No element has all its bytes
equal to `SENTINEL_BYTE`: a parameter filled with it shows afterwards which of its elements a loader wrote.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

SENTINEL_BYTE = 0x7F
BLOCK_SIZE = 128  # rows and columns of a weight that share one fp8 scale

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Header:
    """One tensor of a checkpoint: its name, shape and dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16


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
    tensors = tensors_of(family)
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


# --- values -----------------------------------------------------------------------------------------------------------


def tensor_values(header: Header) -> torch.Tensor:
    """Return the values of the tensor `header` describes, drawn from a generator that its name seeds."""
    generator = torch.Generator().manual_seed(zlib.crc32(header.name.encode()))
    low, high, convert = DRAWS[header.dtype]
    drawn = torch.randint(low, high, (math.prod(header.shape),), generator=generator, dtype=torch.int32)
    return convert(drawn).reshape(header.shape)


def _bfloat16(drawn: torch.Tensor) -> torch.Tensor:
    # Bits 0 to 6 are the mantissa, bits 7 to 9 lower the exponent from that of 128, bit 11 is the sign.
    mantissa, exponent, sign = drawn & 127, 127 + 7 - (drawn >> 7 & 7), drawn >> 11
    return (sign << 15 | exponent << 7 | mantissa).to(torch.uint16).view(torch.bfloat16)


def _float8(drawn: torch.Tensor) -> torch.Tensor:
    # 254 of the 256 bytes: 0x7f and 0xff are the two spellings of NaN, and the first is the sentinel too.
    return (drawn + (drawn >= SENTINEL_BYTE)).to(torch.uint8).view(torch.float8_e4m3fn)


def _float32(drawn: torch.Tensor) -> torch.Tensor:
    return drawn.to(torch.float32)


DRAWS: dict[torch.dtype, tuple[int, int, Callable[[torch.Tensor], torch.Tensor]]] = {
    torch.bfloat16: (0, 1 << 12, _bfloat16),
    torch.float8_e4m3fn: (0, 254, _float8),
    torch.float32: (-(1 << 20), 1 << 20, _float32),
}


# --- files ------------------------------------------------------------------------------------------------------------


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


# --- DeepSeek V2 and V3 -----------------------------------------------------------------------------------------------


def deepseek_headers(config: Config) -> Iterator[Header]:
    """Yield the headers of a DeepSeek V2 or V3 checkpoint: embedding, layers, draft layers, final norm, head."""
    hidden, vocab, num_layers = config["hidden_size"], config["vocab_size"], config["num_hidden_layers"]
    yield Header("model.embed_tokens.weight", (vocab, hidden))
    for layer in range(num_layers):
        yield from _decoder_layer(config, f"model.layers.{layer}", is_dense=layer < config["first_k_dense_replace"])
    for layer in range(num_layers, num_layers + config.get("num_nextn_predict_layers", 0)):
        prefix = f"model.layers.{layer}"
        yield Header(f"{prefix}.embed_tokens.weight", (vocab, hidden))
        yield Header(f"{prefix}.enorm.weight", (hidden,))
        yield Header(f"{prefix}.hnorm.weight", (hidden,))
        yield Header(f"{prefix}.eh_proj.weight", (hidden, 2 * hidden))
        yield from _decoder_layer(config, prefix, is_dense=False)
        yield Header(f"{prefix}.shared_head.norm.weight", (hidden,))
        yield Header(f"{prefix}.shared_head.head.weight", (vocab, hidden))
    yield Header("model.norm.weight", (hidden,))
    yield Header("lm_head.weight", (vocab, hidden))


def _decoder_layer(config: Config, prefix: str, *, is_dense: bool) -> Iterator[Header]:
    yield from _attention(config, f"{prefix}.self_attn")
    if is_dense:
        yield from _mlp(config, f"{prefix}.mlp", config["intermediate_size"])
    else:
        yield from _experts(config, f"{prefix}.mlp")
    yield Header(f"{prefix}.input_layernorm.weight", (config["hidden_size"],))
    yield Header(f"{prefix}.post_attention_layernorm.weight", (config["hidden_size"],))


def _attention(config: Config, prefix: str) -> Iterator[Header]:
    hidden, num_heads = config["hidden_size"], config["num_attention_heads"]
    q_rank, kv_rank = config["q_lora_rank"], config["kv_lora_rank"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    q_rows = num_heads * (nope + rope)
    if q_rank is None:
        yield from _linear(config, f"{prefix}.q_proj", q_rows, hidden)
    else:
        yield from _linear(config, f"{prefix}.q_a_proj", q_rank, hidden)
        yield Header(f"{prefix}.q_a_layernorm.weight", (q_rank,))
        yield from _linear(config, f"{prefix}.q_b_proj", q_rows, q_rank)
    yield from _linear(config, f"{prefix}.kv_a_proj_with_mqa", kv_rank + rope, hidden)
    yield Header(f"{prefix}.kv_a_layernorm.weight", (kv_rank,))
    yield from _linear(config, f"{prefix}.kv_b_proj", num_heads * (nope + value), kv_rank)
    yield from _linear(config, f"{prefix}.o_proj", hidden, num_heads * value)


def _experts(config: Config, prefix: str) -> Iterator[Header]:
    num_experts, width = config["n_routed_experts"], config["moe_intermediate_size"]
    yield Header(f"{prefix}.gate.weight", (num_experts, config["hidden_size"]))
    if config["topk_method"] == "noaux_tc":
        yield Header(f"{prefix}.gate.e_score_correction_bias", (num_experts,), torch.float32)
    for expert in range(num_experts):
        yield from _mlp(config, f"{prefix}.experts.{expert}", width)
    yield from _mlp(config, f"{prefix}.shared_experts", width * config["n_shared_experts"])


def _mlp(config: Config, prefix: str, width: int) -> Iterator[Header]:
    hidden = config["hidden_size"]
    yield from _linear(config, f"{prefix}.gate_proj", width, hidden)
    yield from _linear(config, f"{prefix}.up_proj", width, hidden)
    yield from _linear(config, f"{prefix}.down_proj", hidden, width)


def _linear(config: Config, prefix: str, num_rows: int, num_columns: int) -> Iterator[Header]:
    if "quantization_config" not in config:
        yield Header(f"{prefix}.weight", (num_rows, num_columns))
        return
    yield Header(f"{prefix}.weight", (num_rows, num_columns), torch.float8_e4m3fn)
    blocks = (math.ceil(num_rows / BLOCK_SIZE), math.ceil(num_columns / BLOCK_SIZE))
    yield Header(f"{prefix}.weight_scale_inv", blocks, torch.float32)


V3: Config = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 300,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "routed_scaling_factor": 1.0,
    "kv_lora_rank": 64,
    "q_lora_rank": 96,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "qk_nope_head_dim": 32,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "rope_scaling": None,
    "attention_bias": False,
}
V2: Config = {
    **V3,
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "n_shared_experts": 2,
    "scoring_func": "softmax",
    "topk_method": "group_limited_greedy",
}
V3_FP8: Config = {  # every projection fills whole scale blocks
    **V3,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 512,
    "kv_lora_rank": 128,
    "q_lora_rank": 256,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
}
ONE_DRAFT_LAYER: Config = {"num_nextn_predict_layers": 1}
FP8_BLOCKS: Config = {
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK_SIZE, BLOCK_SIZE],
    }
}

FAMILIES: dict[str, Family] = {
    "deepseek_v2": Family(V2, deepseek_headers),
    "deepseek_v2_lite": Family({**V2, "q_lora_rank": None}, deepseek_headers),
    "deepseek_v3": Family({**V3, "num_hidden_layers": 5}, deepseek_headers),
    "deepseek_v3_fp8": Family({**V3_FP8, **FP8_BLOCKS}, deepseek_headers),
    "deepseek_v3_mtp": Family({**V3, **ONE_DRAFT_LAYER}, deepseek_headers),
    "deepseek_v3_fp8_mtp": Family({**V3_FP8, "num_hidden_layers": 2, **ONE_DRAFT_LAYER, **FP8_BLOCKS}, deepseek_headers),
}
