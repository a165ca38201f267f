"""Writes a tiny DeepSeek-V3 checkpoint in which every element of every tensor has a value of its own.

Elements are numbered from 1 through the whole checkpoint. Number k has the value signed(scramble(k)) * 2**-24, exact in
float32 and between -0.5 and 0.5; number 0 has the value 0 and is given to no element, so that zeros can only be padding.
A value found anywhere in memory therefore says which element it is: `element_number`, then `locate`. The file
`elements.json` beside the shards holds the first number and the shape of every tensor.

Run `python -m demo.checkpoint FOLDER` to write one.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

NUM_BITS = 24  # the integers that float32 holds exactly
MASK = (1 << NUM_BITS) - 1
# Odd, so that each product modulo 2**24 is a permutation; tried until the reference's prompt reached every expert.
FACTORS = (0xB07BF3, 0xAFCD81)
NUM_SHARDS = 4

# No two sizes alike: primes where nothing is cut, multiples of 4 where tensor parallelism cuts. The hidden size is one too,
# since torch's grouped matrix product takes rows of whole 16 bytes.
CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "torch_dtype": "float32",
    "vocab_size": 521,
    "hidden_size": 92,
    "intermediate_size": 212,
    "moe_intermediate_size": 76,
    "num_hidden_layers": 5,
    "num_nextn_predict_layers": 1,
    "first_k_dense_replace": 2,
    "moe_layer_freq": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 53,
    "kv_lora_rank": 37,
    "qk_nope_head_dim": 19,
    "qk_rope_head_dim": 6,
    "v_head_dim": 13,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Span:
    """Where a tensor's elements lie in the numbering; they are numbered in row-major order from `first`."""

    first: int
    shape: Shape


def write_tiny_deepseek_v3(folder: Path) -> Path:
    """Write shards, index, config.json and elements.json into `folder` and return `folder`."""
    spans = element_spans()
    shards = _split(spans)
    folder.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file({name: _tensor(spans[name]) for name in names}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": 4 * num_elements(spans)}, "weight_map": dict(sorted(weight_map.items()))}
    elements = {name: {"first": span.first, "shape": span.shape} for name, span in spans.items()}
    for name, content in (("model.safetensors.index.json", index), ("config.json", CONFIG), ("elements.json", elements)):
        (folder / name).write_text(json.dumps(content, indent=1) + "\n")
    return folder


# --- elements and values ----------------------------------------------------------------------------------------------


def element_values(numbers: torch.Tensor) -> torch.Tensor:
    """Return the float32 values of the elements numbered `numbers` (int64, 0 to 2**24 - 1)."""
    scrambled = numbers * FACTORS[0] & MASK
    scrambled ^= scrambled >> NUM_BITS // 2
    scrambled = scrambled * FACTORS[1] & MASK
    signed = scrambled - (scrambled >> NUM_BITS - 1 << NUM_BITS)
    return signed.to(torch.float32) * 2.0**-NUM_BITS


def element_number(value: float) -> int:
    """Return the number of the element that has `value`, 0 for padding; raises ValueError for any other value."""
    signed = value * 2.0**NUM_BITS
    if not (math.isfinite(signed) and signed == int(signed) and -(1 << NUM_BITS - 1) <= signed < 1 << NUM_BITS - 1):
        raise ValueError(f"{value!r} is the value of no element")
    number = int(signed) * pow(FACTORS[1], -1, MASK + 1) & MASK
    number ^= number >> NUM_BITS // 2
    return number * pow(FACTORS[0], -1, MASK + 1) & MASK


def locate(number: int, spans: Mapping[str, Span]) -> tuple[str, Shape] | None:
    """Return the tensor and the index of element `number`, or None for a number that no element has."""
    for name, span in spans.items():
        offset = number - span.first
        if 0 <= offset < math.prod(span.shape):
            return name, tuple(int(each) for each in torch.unravel_index(torch.tensor(offset), span.shape))
    return None


def element_spans() -> dict[str, Span]:
    """Return the span of every tensor of the checkpoint, in the order of the files."""
    spans, first = {}, 1
    for name, shape in tensor_shapes(CONFIG):
        spans[name] = Span(first, shape)
        first += math.prod(shape)
    assert first <= MASK + 1, f"{first - 1} elements, float32 tells only {MASK} apart"
    return spans


def read_spans(folder: Path) -> dict[str, Span]:
    """Return the spans that `elements.json` records."""
    elements = json.loads((folder / "elements.json").read_text())
    return {name: Span(element["first"], tuple(element["shape"])) for name, element in elements.items()}


def num_elements(spans: Mapping[str, Span]) -> int:
    """Return how many elements all tensors have together."""
    return sum(math.prod(span.shape) for span in spans.values())


def _tensor(span: Span) -> torch.Tensor:
    numbers = torch.arange(span.first, span.first + math.prod(span.shape), dtype=torch.int64)
    return element_values(numbers).reshape(span.shape)


def _split(spans: Mapping[str, Span]) -> list[list[str]]:
    """Return the tensor names of each shard, in order, with about equal numbers of elements."""
    share = math.ceil(num_elements(spans) / NUM_SHARDS)
    shards: list[list[str]] = [[] for _ in range(NUM_SHARDS)]
    for name, span in spans.items():
        shards[(span.first - 1) // share].append(name)
    return shards


# --- names and shapes -------------------------------------------------------------------------------------------------


def tensor_shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, Shape]]:
    """Yield the name and shape of every tensor of a DeepSeek-V3 checkpoint, the multi-token-prediction layer included."""
    vocab, hidden, num_layers = config["vocab_size"], config["hidden_size"], config["num_hidden_layers"]
    yield "model.embed_tokens.weight", (vocab, hidden)
    for layer in range(num_layers):
        yield from _layer_shapes(config, f"model.layers.{layer}", is_dense=layer < config["first_k_dense_replace"])
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocab, hidden)
    for layer in range(num_layers, num_layers + config["num_nextn_predict_layers"]):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.embed_tokens.weight", (vocab, hidden)
        yield f"{prefix}.enorm.weight", (hidden,)
        yield f"{prefix}.hnorm.weight", (hidden,)
        yield f"{prefix}.eh_proj.weight", (hidden, 2 * hidden)
        yield from _layer_shapes(config, prefix, is_dense=False)
        yield f"{prefix}.shared_head.norm.weight", (hidden,)
        yield f"{prefix}.shared_head.head.weight", (vocab, hidden)


def _layer_shapes(config: Mapping[str, Any], prefix: str, *, is_dense: bool) -> Iterator[tuple[str, Shape]]:
    hidden, num_heads, num_experts = config["hidden_size"], config["num_attention_heads"], config["n_routed_experts"]
    q_rank, kv_rank = config["q_lora_rank"], config["kv_lora_rank"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    yield f"{prefix}.input_layernorm.weight", (hidden,)
    yield f"{prefix}.self_attn.q_a_proj.weight", (q_rank, hidden)
    yield f"{prefix}.self_attn.q_a_layernorm.weight", (q_rank,)
    yield f"{prefix}.self_attn.q_b_proj.weight", (num_heads * (nope + rope), q_rank)
    yield f"{prefix}.self_attn.kv_a_proj_with_mqa.weight", (kv_rank + rope, hidden)
    yield f"{prefix}.self_attn.kv_a_layernorm.weight", (kv_rank,)
    yield f"{prefix}.self_attn.kv_b_proj.weight", (num_heads * (nope + value), kv_rank)
    yield f"{prefix}.self_attn.o_proj.weight", (hidden, num_heads * value)
    yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
    if is_dense:
        yield from _mlp_shapes(f"{prefix}.mlp", hidden, config["intermediate_size"])
        return
    yield f"{prefix}.mlp.gate.weight", (num_experts, hidden)
    yield f"{prefix}.mlp.gate.e_score_correction_bias", (num_experts,)
    for expert in range(num_experts):
        yield from _mlp_shapes(f"{prefix}.mlp.experts.{expert}", hidden, config["moe_intermediate_size"])
    shared_width = config["n_shared_experts"] * config["moe_intermediate_size"]
    yield from _mlp_shapes(f"{prefix}.mlp.shared_experts", hidden, shared_width)


def _mlp_shapes(prefix: str, hidden: int, width: int) -> Iterator[tuple[str, Shape]]:
    yield f"{prefix}.gate_proj.weight", (width, hidden)
    yield f"{prefix}.up_proj.weight", (width, hidden)
    yield f"{prefix}.down_proj.weight", (hidden, width)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = write_tiny_deepseek_v3(parser.parse_args().folder)
    spans = read_spans(folder)
    print(f"{folder}: {len(spans)} tensors, {num_elements(spans):,} elements, no two alike")


if __name__ == "__main__":
    main()
