"""Headers of models with grouped-query attention: Llama, Qwen3 MoE and gpt-oss checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from tests.oracle.tensors import FP8_BLOCKS, Config, Header, linear_headers

LayerHeaders = Callable[[Config, str, int], Iterator[Header]]


def llama_headers(config: Config) -> Iterator[Header]:
    """Yield the headers of a Llama checkpoint."""
    return _headers(config, _llama_layer)


def qwen3_moe_headers(config: Config) -> Iterator[Header]:
    """Yield the headers of a Qwen3 MoE checkpoint, one matrix per expert."""
    return _headers(config, _qwen3_moe_layer)


def gpt_oss_headers(config: Config) -> Iterator[Header]:
    """Yield the headers of a gpt-oss checkpoint, its experts in three dimensions."""
    return _headers(config, _gpt_oss_layer)


def _headers(config: Config, layer_headers: LayerHeaders) -> Iterator[Header]:
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    yield Header("model.embed_tokens.weight", (vocab, hidden))
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield from layer_headers(config, prefix, layer)
        yield Header(f"{prefix}.input_layernorm.weight", (hidden,))
        yield Header(f"{prefix}.post_attention_layernorm.weight", (hidden,))
    yield Header("model.norm.weight", (hidden,))
    yield Header("lm_head.weight", (vocab, hidden))


def _llama_layer(config: Config, prefix: str, layer: int) -> Iterator[Header]:
    yield from _attention(config, f"{prefix}.self_attn")
    yield from _mlp(config, f"{prefix}.mlp", config["intermediate_size"])


def _qwen3_moe_layer(config: Config, prefix: str, layer: int) -> Iterator[Header]:
    yield from _attention(config, f"{prefix}.self_attn")
    yield Header(f"{prefix}.self_attn.q_norm.weight", (config["head_dim"],))
    yield Header(f"{prefix}.self_attn.k_norm.weight", (config["head_dim"],))
    if layer in config["mlp_only_layers"]:
        yield from _mlp(config, f"{prefix}.mlp", config["intermediate_size"])
        return
    yield Header(f"{prefix}.mlp.gate.weight", (config["num_experts"], config["hidden_size"]))
    for expert in range(config["num_experts"]):
        yield from _mlp(config, f"{prefix}.mlp.experts.{expert}", config["moe_intermediate_size"])


def _gpt_oss_layer(config: Config, prefix: str, layer: int) -> Iterator[Header]:
    hidden, width, num_experts = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    yield from _attention(config, f"{prefix}.self_attn")
    yield Header(f"{prefix}.self_attn.sinks", (config["num_attention_heads"],))
    yield Header(f"{prefix}.mlp.router.weight", (num_experts, hidden))
    yield Header(f"{prefix}.mlp.router.bias", (num_experts,))
    experts = f"{prefix}.mlp.experts"
    matrices = (("gate_up_proj", 2 * width, hidden), ("down_proj", hidden, width))
    for matrix, num_rows, num_columns in matrices:
        if "quantization_config" in config:  # MXFP4: two values a byte, one scale per 32
            yield Header(f"{experts}.{matrix}_blocks", (num_experts, num_rows, num_columns // 32, 16), torch.uint8)
            yield Header(f"{experts}.{matrix}_scales", (num_experts, num_rows, num_columns // 32), torch.uint8)
        else:
            yield Header(f"{experts}.{matrix}", (num_experts, num_columns, num_rows))
    for matrix, num_rows, _ in matrices:
        yield Header(f"{experts}.{matrix}_bias", (num_experts, num_rows))


def _attention(config: Config, prefix: str) -> Iterator[Header]:
    q_rows = config["num_attention_heads"] * config["head_dim"]
    kv_rows = config["num_key_value_heads"] * config["head_dim"]
    for name, num_rows in (("q_proj", q_rows), ("k_proj", kv_rows), ("v_proj", kv_rows)):
        yield from _projection(config, f"{prefix}.{name}", num_rows, config["hidden_size"])
    yield from _projection(config, f"{prefix}.o_proj", config["hidden_size"], q_rows)


def _projection(config: Config, prefix: str, num_rows: int, num_columns: int) -> Iterator[Header]:
    yield from _linear(config, prefix, num_rows, num_columns)
    if config.get("attention_bias"):
        yield Header(f"{prefix}.bias", (num_rows,))


def _mlp(config: Config, prefix: str, width: int) -> Iterator[Header]:
    hidden = config["hidden_size"]
    yield from _linear(config, f"{prefix}.gate_proj", width, hidden)
    yield from _linear(config, f"{prefix}.up_proj", width, hidden)
    yield from _linear(config, f"{prefix}.down_proj", hidden, width)


def _linear(config: Config, prefix: str, num_rows: int, num_columns: int) -> Iterator[Header]:
    is_fp8 = config.get("quantization_config", {}).get("quant_method") == "fp8"
    yield from linear_headers(prefix, num_rows, num_columns, is_fp8=is_fp8)


LLAMA: Config = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 3,
    "vocab_size": 300,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
QWEN3_MOE: Config = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [1],
    "norm_topk_prob": True,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 3,
    "vocab_size": 300,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "attention_bias": False,
}
QWEN3_MOE_FP8: Config = {  # experts of 2 blocks: a rank's slice is not whole blocks at tp 4
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "num_hidden_layers": 2,
    "vocab_size": 300,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "attention_bias": False,
    "quantization_config": {
        **FP8_BLOCKS,
        "modules_to_not_convert": [
            "lm_head",
            "model.layers.0.input_layernorm",
            "model.layers.0.post_attention_layernorm",
            "model.layers.1.input_layernorm",
            "model.layers.1.post_attention_layernorm",
            "model.layers.0.mlp.gate",
            "model.layers.1.mlp.gate",
        ],
    },
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 256,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
GPT_OSS: Config = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "experts_per_token": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_hidden_layers": 2,
    "vocab_size": 320,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "max_position_embeddings": 512,
    "initial_context_length": 128,
    "hidden_act": "silu",
    "swiglu_limit": 7.0,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"],
    "attention_bias": True,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "attention_dropout": 0.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 128,
        "truncate": False,
    },
}
MXFP4: Config = {
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    }
}
