"""Headers of models with grouped-query attention: Llama, Mixtral, Qwen and GLM with experts, and gpt-oss checkpoints."""

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


def qwen2_moe_headers(config: Config) -> Iterator[Header]:
    """Yield the headers of a Qwen2 MoE checkpoint: biases of q, k and v, and a shared expert with a gate."""
    return _headers(config, _qwen2_moe_layer)


def mixtral_headers(config: Config) -> Iterator[Header]:
    """Yield the headers of a Mixtral checkpoint, the matrices of an expert in the order w1, w2, w3."""
    return _headers(config, _mixtral_layer)


def glm4_moe_headers(config: Config) -> Iterator[Header]:
    """Yield the headers of a GLM-4 MoE checkpoint, its draft layer before the last norm."""
    return _headers(config, _glm4_moe_layer, _glm4_moe_draft)


def gpt_oss_headers(config: Config) -> Iterator[Header]:
    """Yield the headers of a gpt-oss checkpoint, its experts in three dimensions."""
    return _headers(config, _gpt_oss_layer)


def _headers(config: Config, layer_headers: LayerHeaders, draft: LayerHeaders | None = None) -> Iterator[Header]:
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    yield Header("model.embed_tokens.weight", (vocab, hidden))
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield from layer_headers(config, prefix, layer)
        yield from _norms(config, prefix)
    if draft is not None:
        yield from draft(config, f"model.layers.{config['num_hidden_layers']}", config["num_hidden_layers"])
    yield Header("model.norm.weight", (hidden,))
    yield Header("lm_head.weight", (vocab, hidden))


def _norms(config: Config, prefix: str) -> Iterator[Header]:
    yield Header(f"{prefix}.input_layernorm.weight", (config["hidden_size"],))
    yield Header(f"{prefix}.post_attention_layernorm.weight", (config["hidden_size"],))


def _llama_layer(config: Config, prefix: str, layer: int) -> Iterator[Header]:
    yield from _attention(config, f"{prefix}.self_attn")
    yield from _mlp(config, f"{prefix}.mlp", config["intermediate_size"])


def _qwen3_moe_layer(config: Config, prefix: str, layer: int) -> Iterator[Header]:
    yield from _attention(config, f"{prefix}.self_attn")
    yield from _head_norms(config, f"{prefix}.self_attn")
    if layer in config["mlp_only_layers"]:
        yield from _mlp(config, f"{prefix}.mlp", config["intermediate_size"])
        return
    yield Header(f"{prefix}.mlp.gate.weight", (config["num_experts"], config["hidden_size"]))
    yield from _experts(config, f"{prefix}.mlp", config["num_experts"])


def _qwen2_moe_layer(config: Config, prefix: str, layer: int) -> Iterator[Header]:
    hidden, num_experts = config["hidden_size"], config["num_experts"]
    yield from _attention(config, f"{prefix}.self_attn", qkv_bias=True)
    yield Header(f"{prefix}.mlp.gate.weight", (num_experts, hidden))
    yield from _experts(config, f"{prefix}.mlp", num_experts)
    yield from _mlp(config, f"{prefix}.mlp.shared_expert", config["shared_expert_intermediate_size"])
    yield Header(f"{prefix}.mlp.shared_expert_gate.weight", (1, hidden))


def _mixtral_layer(config: Config, prefix: str, layer: int) -> Iterator[Header]:
    hidden, width, num_experts = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    yield from _attention(config, f"{prefix}.self_attn")
    yield Header(f"{prefix}.block_sparse_moe.gate.weight", (num_experts, hidden))
    for expert in range(num_experts):
        for matrix, shape in (("w1", (width, hidden)), ("w2", (hidden, width)), ("w3", (width, hidden))):
            yield Header(f"{prefix}.block_sparse_moe.experts.{expert}.{matrix}.weight", shape)


def _glm4_moe_layer(config: Config, prefix: str, layer: int) -> Iterator[Header]:
    num_experts = config["n_routed_experts"]
    yield from _attention(config, f"{prefix}.self_attn", qkv_bias=True)
    yield from _head_norms(config, f"{prefix}.self_attn")
    if layer < config["first_k_dense_replace"]:
        yield from _mlp(config, f"{prefix}.mlp", config["intermediate_size"])
        return
    yield Header(f"{prefix}.mlp.gate.weight", (num_experts, config["hidden_size"]))
    yield Header(f"{prefix}.mlp.gate.e_score_correction_bias", (num_experts,), torch.float32)
    yield from _experts(config, f"{prefix}.mlp", num_experts)
    yield from _mlp(config, f"{prefix}.mlp.shared_experts", config["n_shared_experts"] * config["moe_intermediate_size"])


def _glm4_moe_draft(config: Config, prefix: str, layer: int) -> Iterator[Header]:
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    yield Header(f"{prefix}.embed_tokens.weight", (vocab, hidden))
    yield Header(f"{prefix}.enorm.weight", (hidden,))
    yield Header(f"{prefix}.hnorm.weight", (hidden,))
    yield Header(f"{prefix}.eh_proj.weight", (hidden, 2 * hidden))
    yield from _glm4_moe_layer(config, prefix, layer)
    yield from _norms(config, prefix)
    yield Header(f"{prefix}.shared_head.norm.weight", (hidden,))
    yield Header(f"{prefix}.shared_head.head.weight", (vocab, hidden))


def _gpt_oss_layer(config: Config, prefix: str, layer: int) -> Iterator[Header]:
    hidden, width, num_experts = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    yield from _attention(config, f"{prefix}.self_attn", qkv_bias=True, o_bias=True)
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


def _attention(config: Config, prefix: str, *, qkv_bias: bool = False, o_bias: bool = False) -> Iterator[Header]:
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    q_rows, kv_rows = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    for name, num_rows in (("q_proj", q_rows), ("k_proj", kv_rows), ("v_proj", kv_rows)):
        yield from _projection(config, f"{prefix}.{name}", num_rows, config["hidden_size"], has_bias=qkv_bias)
    yield from _projection(config, f"{prefix}.o_proj", config["hidden_size"], q_rows, has_bias=o_bias)


def _projection(config: Config, prefix: str, num_rows: int, num_columns: int, *, has_bias: bool) -> Iterator[Header]:
    yield from _linear(config, prefix, num_rows, num_columns)
    if has_bias:
        yield Header(f"{prefix}.bias", (num_rows,))


def _head_norms(config: Config, prefix: str) -> Iterator[Header]:
    yield Header(f"{prefix}.q_norm.weight", (config["head_dim"],))
    yield Header(f"{prefix}.k_norm.weight", (config["head_dim"],))


def _experts(config: Config, prefix: str, num_experts: int) -> Iterator[Header]:
    for expert in range(num_experts):
        yield from _mlp(config, f"{prefix}.experts.{expert}", config["moe_intermediate_size"])


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
FP8_DECODER: Config = {  # heads of one block
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
}
QWEN3_MOE_FP8: Config = {  # experts of 2 blocks: a rank's slice is not whole blocks at tp 4
    **FP8_DECODER,
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
QWEN2_MOE: Config = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 128,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": False,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "vocab_size": 300,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
MIXTRAL: Config = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 300,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "sliding_window": None,
}
GLM4_MOE: Config = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 3,
    "num_nextn_predict_layers": 1,
    "vocab_size": 300,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "attention_bias": True,
    "use_qk_norm": True,
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
