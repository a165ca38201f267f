"""The checkpoints of the benchmark: the topology of DeepSeek-V3 with tiny matrices, few large matrices, and V3's headers."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from math import ceil
from pathlib import Path
from typing import Any

from mapper.spec.configs import bundled_config

Header = tuple[str, tuple[int, ...], str]
"""(name, shape, dtype as torch names it)"""

NUM_FILES = 8
MARKER = "complete"

# MLA of vLLM's CPU backend wants kv_lora_rank 512 and a rope dim of 64; everything else is as small as it can be.
TINY: Mapping[str, int] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 32,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "num_nextn_predict_layers": 0,
}
LARGE: Mapping[str, int] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}


def tiny_experts_config(*, layers: int = 61, experts: int = 256) -> dict[str, Any]:
    """Return the config of DeepSeek-V3 with tiny matrices, in bfloat16 and without a draft layer."""
    config = {**bundled_config("DeepSeek-V3"), **TINY, "num_hidden_layers": layers, "n_routed_experts": experts}
    config.pop("quantization_config")
    return config


def large_matrices_config() -> dict[str, Any]:
    """Return the config of a Llama of few layers with the matrices of an 8B model: 2.7 GB in bfloat16."""
    return {**bundled_config("Llama-3.1-8B-Instruct"), **LARGE}


def experts(folder: Path, *, layers: int = 61, experts: int = 256) -> Path:
    """Write the checkpoint of 61 layers of 256 experts (45,395 tensors in 8 files) where it is not there yet."""
    config = tiny_experts_config(layers=layers, experts=experts)
    return _written(folder, config, list(deepseek_v3_headers(config)), num_files=NUM_FILES)


def matrices(folder: Path) -> Path:
    """Write the checkpoint of large matrices (48 tensors in 2 files) where it is not there yet."""
    config = large_matrices_config()
    return _written(folder, config, list(llama_headers(config)), num_files=2)


def manifest(folder: Path) -> Path:
    """Write names, dtypes and shapes of DeepSeek-V3 (91,991 tensors) as a manifest with its config beside it."""
    config = bundled_config("DeepSeek-V3")
    tensors = {
        name: {"dtype": {"bfloat16": "BF16", "float32": "F32", "float8_e4m3fn": "F8_E4M3"}[dtype], "shape": list(shape)}
        for name, shape, dtype in deepseek_v3_headers(config)
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "DeepSeek-V3.config.json").write_text(json.dumps(config))
    path = folder / "DeepSeek-V3.header.json.gz"
    path.write_bytes(gzip.compress(json.dumps(tensors).encode(), compresslevel=1, mtime=0))
    return path


def deepseek_v3_headers(config: Mapping[str, Any]) -> Iterator[Header]:
    """Yield the headers of a DeepSeek-V3 checkpoint with this config, in the published order of layers."""
    hidden, heads, vocab = config["hidden_size"], config["num_attention_heads"], config["vocab_size"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    q_lora, kv_lora, num_experts = config["q_lora_rank"], config["kv_lora_rank"], config["n_routed_experts"]
    block = config.get("quantization_config", {}).get("weight_block_size")

    def linear(name: str, rows: int, columns: int) -> Iterator[Header]:
        yield f"{name}.weight", (rows, columns), "bfloat16" if block is None else "float8_e4m3fn"
        if block is not None:
            yield f"{name}.weight_scale_inv", (ceil(rows / block[0]), ceil(columns / block[1])), "float32"

    def mlp(name: str, inner: int) -> Iterator[Header]:
        yield from linear(f"{name}.gate_proj", inner, hidden)
        yield from linear(f"{name}.up_proj", inner, hidden)
        yield from linear(f"{name}.down_proj", hidden, inner)

    yield "model.embed_tokens.weight", (vocab, hidden), "bfloat16"
    num_layers = config["num_hidden_layers"]
    for layer in range(num_layers + config["num_nextn_predict_layers"]):
        at = f"model.layers.{layer}"
        if layer >= num_layers:
            yield f"{at}.embed_tokens.weight", (vocab, hidden), "bfloat16"
            yield f"{at}.enorm.weight", (hidden,), "bfloat16"
            yield f"{at}.hnorm.weight", (hidden,), "bfloat16"
            yield f"{at}.eh_proj.weight", (hidden, 2 * hidden), "bfloat16"
            yield f"{at}.shared_head.norm.weight", (hidden,), "bfloat16"
            yield f"{at}.shared_head.head.weight", (vocab, hidden), "bfloat16"
        yield f"{at}.input_layernorm.weight", (hidden,), "bfloat16"
        yield f"{at}.post_attention_layernorm.weight", (hidden,), "bfloat16"
        attention = f"{at}.self_attn"
        yield from linear(f"{attention}.q_a_proj", q_lora, hidden)
        yield f"{attention}.q_a_layernorm.weight", (q_lora,), "bfloat16"
        yield from linear(f"{attention}.q_b_proj", heads * (nope + rope), q_lora)
        yield from linear(f"{attention}.kv_a_proj_with_mqa", kv_lora + rope, hidden)
        yield f"{attention}.kv_a_layernorm.weight", (kv_lora,), "bfloat16"
        yield from linear(f"{attention}.kv_b_proj", heads * (nope + value), kv_lora)
        yield from linear(f"{attention}.o_proj", hidden, heads * value)
        if layer < config["first_k_dense_replace"]:
            yield from mlp(f"{at}.mlp", config["intermediate_size"])
            continue
        yield f"{at}.mlp.gate.weight", (num_experts, hidden), "bfloat16"
        yield f"{at}.mlp.gate.e_score_correction_bias", (num_experts,), "float32"
        for expert in range(num_experts):
            yield from mlp(f"{at}.mlp.experts.{expert}", config["moe_intermediate_size"])
        yield from mlp(f"{at}.mlp.shared_experts", config["n_shared_experts"] * config["moe_intermediate_size"])
    yield "model.norm.weight", (hidden,), "bfloat16"
    yield "lm_head.weight", (vocab, hidden), "bfloat16"


def llama_headers(config: Mapping[str, Any]) -> Iterator[Header]:
    """Yield the headers of a Llama checkpoint with this config."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    query, key = (config[word] * config["head_dim"] for word in ("num_attention_heads", "num_key_value_heads"))
    yield "model.embed_tokens.weight", (vocab, hidden), "bfloat16"
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        for name, rows, columns in (
            ("self_attn.q_proj", query, hidden),
            ("self_attn.k_proj", key, hidden),
            ("self_attn.v_proj", key, hidden),
            ("self_attn.o_proj", hidden, query),
            ("mlp.gate_proj", inner, hidden),
            ("mlp.up_proj", inner, hidden),
            ("mlp.down_proj", hidden, inner),
        ):
            yield f"{at}.{name}.weight", (rows, columns), "bfloat16"
        yield f"{at}.input_layernorm.weight", (hidden,), "bfloat16"
        yield f"{at}.post_attention_layernorm.weight", (hidden,), "bfloat16"
    yield "model.norm.weight", (hidden,), "bfloat16"
    yield "lm_head.weight", (vocab, hidden), "bfloat16"


def _written(folder: Path, config: Mapping[str, Any], headers: list[Header], *, num_files: int) -> Path:
    """Write a checkpoint of random values into the folder, unless a whole one of the same config is there."""
    text = json.dumps(config, indent=1)
    marker = folder / MARKER
    if marker.exists() and marker.read_text() == text:
        return folder
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    marker.unlink(missing_ok=True)
    generator = torch.Generator().manual_seed(0)
    weight_map: dict[str, str] = {}
    share = ceil(len(headers) / num_files)
    for number in range(num_files):
        part = headers[number * share : (number + 1) * share]
        file = f"model-{number + 1:05d}-of-{num_files:05d}.safetensors"
        tensors = {
            name: torch.randint(-999, 999, shape, generator=generator, dtype=torch.int16).to(getattr(torch, dtype)) / 10000
            for name, shape, dtype in part
        }
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(text)
    marker.write_text(text)
    return folder
