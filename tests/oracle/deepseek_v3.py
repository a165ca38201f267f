"""Headers of DeepSeek V2, V3 and V3.2 checkpoints: latent attention, routed and shared experts, draft layers."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tests.oracle.tensors import FP8_BLOCKS, Config, Header, linear_headers


def deepseek_headers(config: Config) -> Iterator[Header]:
    """Yield the headers of a checkpoint: embedding, layers, draft layers, final norm, head."""
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
    if "index_n_heads" in config:
        yield from _indexer(config, f"{prefix}.indexer")


def _indexer(config: Config, prefix: str) -> Iterator[Header]:
    hidden, num_heads, width = config["hidden_size"], config["index_n_heads"], config["index_head_dim"]
    yield from _linear(config, f"{prefix}.wq_b", num_heads * width, config["q_lora_rank"])
    yield from _linear(config, f"{prefix}.wk", width, hidden)
    yield Header(f"{prefix}.k_norm.weight", (width,), torch.float32)
    yield Header(f"{prefix}.k_norm.bias", (width,), torch.float32)
    yield Header(f"{prefix}.weights_proj.weight", (num_heads, hidden))


def _experts(config: Config, prefix: str) -> Iterator[Header]:
    num_experts, width = config["n_routed_experts"], config["moe_intermediate_size"]
    yield Header(f"{prefix}.gate.weight", (num_experts, config["hidden_size"]))
    if config["topk_method"] == "noaux_tc":
        yield Header(f"{prefix}.gate.e_score_correction_bias", (num_experts,), torch.float32)
    for expert in range(num_experts):
        if _quant_method(config) == "compressed-tensors":
            yield from _int4_mlp(config, f"{prefix}.experts.{expert}", width)
        else:
            yield from _mlp(config, f"{prefix}.experts.{expert}", width)
    yield from _mlp(config, f"{prefix}.shared_experts", width * config["n_shared_experts"])


def _mlp(config: Config, prefix: str, width: int) -> Iterator[Header]:
    hidden = config["hidden_size"]
    yield from _linear(config, f"{prefix}.gate_proj", width, hidden)
    yield from _linear(config, f"{prefix}.up_proj", width, hidden)
    yield from _linear(config, f"{prefix}.down_proj", hidden, width)


def _int4_mlp(config: Config, prefix: str, width: int) -> Iterator[Header]:
    hidden, group_size = config["hidden_size"], INT4_WEIGHTS["group_size"]
    for name, num_rows, num_columns in (("gate_proj", width, hidden), ("up_proj", width, hidden), ("down_proj", hidden, width)):
        yield Header(f"{prefix}.{name}.weight_packed", (num_rows, num_columns // 8), torch.int32)
        yield Header(f"{prefix}.{name}.weight_scale", (num_rows, num_columns // group_size))
        yield Header(f"{prefix}.{name}.weight_shape", (2,), torch.int32)


def _linear(config: Config, prefix: str, num_rows: int, num_columns: int) -> Iterator[Header]:
    yield from linear_headers(prefix, num_rows, num_columns, is_fp8=_quant_method(config) == "fp8")


def _quant_method(config: Config) -> object:
    return config.get("quantization_config", {}).get("quant_method")


INT4_WEIGHTS: Config = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
INT4_EXPERTS: Config = {  # routed experts alone, eight codes to a word
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": INT4_WEIGHTS}},
}


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
V3_WIDE: Config = {  # every projection fills whole scale blocks
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
V32: Config = {
    **V3_WIDE,
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "num_nextn_predict_layers": 1,
}
ONE_DRAFT_LAYER: Config = {"num_nextn_predict_layers": 1}
FP8: Config = {"quantization_config": FP8_BLOCKS}
INDEXER: Config = {"index_n_heads": 8, "index_head_dim": 128, "index_topk": 64}

CONFIGS: dict[str, Config] = {
    "deepseek_v2": V2,
    "deepseek_v2_lite": {**V2, "q_lora_rank": None},
    "deepseek_v3": {**V3, "num_hidden_layers": 5},
    "deepseek_v3_fp8": {**V3_WIDE, **FP8},
    # Experts of 3 blocks: a rank's slice is not whole blocks at tp 2 and 4.
    "deepseek_v3_fp8_odd": {
        **V3_WIDE,
        "num_hidden_layers": 2,
        "n_shared_experts": 4,
        "moe_intermediate_size": 384,
        **FP8,
    },
    # q_a is 1.5 blocks, so the blocks of kv_a behind it start inside one: 192 + 192 rows, and 192 + 128 rows.
    "deepseek_v3_fp8_mis": {**V3_WIDE, "num_hidden_layers": 2, "n_routed_experts": 4, "q_lora_rank": 192, **FP8},
    "deepseek_v3_fp8_mis2": {
        **V3_WIDE,
        "num_hidden_layers": 2,
        "n_routed_experts": 4,
        "q_lora_rank": 192,
        "kv_lora_rank": 64,
        **FP8,
    },
    "deepseek_v3_int4": {**V3, "moe_intermediate_size": 256, "quantization_config": INT4_EXPERTS},
    "deepseek_v3_mtp": {**V3, **ONE_DRAFT_LAYER},
    "deepseek_v3_fp8_mtp": {**V3_WIDE, "num_hidden_layers": 2, **ONE_DRAFT_LAYER, **FP8},
    "deepseek_v32": {**V32, "intermediate_size": 256, "moe_intermediate_size": 64, **INDEXER},
    "deepseek_v32_fp8": {**V32, "num_hidden_layers": 2, **FP8, **INDEXER},
}
