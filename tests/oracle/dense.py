"""Headers of dense decoders: Phi 3, whose projections are fused on disk, Gemma 3, and Qwen 3 in block fp8."""

from __future__ import annotations

from collections.abc import Iterator

from tests.oracle.grouped_query import FP8_DECODER
from tests.oracle.tensors import FP8_BLOCKS, Config, Header, decoder_matrices, linear_headers

GEMMA_NORMS = ("post_feedforward_layernorm", "pre_feedforward_layernorm")


def phi3_headers(config: Config) -> Iterator[Header]:
    """Yield the headers of a Phi 3 checkpoint."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = hidden // heads
    qkv_rows = (heads + 2 * config["num_key_value_heads"]) * head_dim
    for prefix in _layers(config):
        yield Header(f"{prefix}.self_attn.qkv_proj.weight", (qkv_rows, hidden))
        yield Header(f"{prefix}.self_attn.o_proj.weight", (hidden, heads * head_dim))
        yield Header(f"{prefix}.mlp.gate_up_proj.weight", (2 * config["intermediate_size"], hidden))
        yield Header(f"{prefix}.mlp.down_proj.weight", (hidden, config["intermediate_size"]))
    yield from _around(config)
    yield Header("lm_head.weight", (config["vocab_size"], hidden))


def gemma3_headers(config: Config) -> Iterator[Header]:
    """Yield the headers of a Gemma 3 checkpoint: the head is the embedding and is not stored."""
    for prefix in _layers(config):
        yield from _layer(config, prefix)
        for norm in GEMMA_NORMS:
            yield Header(f"{prefix}.{norm}.weight", (config["hidden_size"],))
    yield from _around(config)


def qwen3_headers(config: Config) -> Iterator[Header]:
    """Yield the headers of a dense Qwen 3 checkpoint, in bfloat16 or in block fp8."""
    for prefix in _layers(config):
        yield from _layer(config, prefix)
    yield from _around(config)
    yield Header("lm_head.weight", (config["vocab_size"], config["hidden_size"]))


def _layers(config: Config) -> Iterator[str]:
    for layer in range(config["num_hidden_layers"]):
        yield f"model.layers.{layer}"


def _around(config: Config) -> Iterator[Header]:
    """Yield what is outside the layers' projections, but for the head."""
    yield Header("model.embed_tokens.weight", (config["vocab_size"], config["hidden_size"]))
    for prefix in _layers(config):
        yield Header(f"{prefix}.input_layernorm.weight", (config["hidden_size"],))
        yield Header(f"{prefix}.post_attention_layernorm.weight", (config["hidden_size"],))
    yield Header("model.norm.weight", (config["hidden_size"],))


def _layer(config: Config, prefix: str) -> Iterator[Header]:
    head_dim = config["head_dim"]
    is_fp8 = "quantization_config" in config
    for name, num_rows, num_columns in decoder_matrices(config):
        yield from linear_headers(f"{prefix}.{name}", num_rows, num_columns, is_fp8=is_fp8)
    yield Header(f"{prefix}.self_attn.q_norm.weight", (head_dim,))
    yield Header(f"{prefix}.self_attn.k_norm.weight", (head_dim,))


PHI3: Config = {
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "vocab_size": 300,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "original_max_position_embeddings": 512,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "sliding_window": None,
}
GEMMA3: Config = {  # one key head for four query heads
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "num_hidden_layers": 3,
    "vocab_size": 300,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "max_position_embeddings": 512,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "sliding_window": 64,
    "sliding_window_pattern": 2,
    "query_pre_attn_scalar": 32,
    "attention_bias": False,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
QWEN3_FP8: Config = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    **FP8_DECODER,
    "quantization_config": {
        **FP8_BLOCKS,
        "modules_to_not_convert": [
            "lm_head",
            "model.layers.0.input_layernorm",
            "model.layers.0.post_attention_layernorm",
            "model.layers.1.input_layernorm",
            "model.layers.1.post_attention_layernorm",
        ],
    },
}
QWEN3_FP8_HALF_BLOCK: Config = {**QWEN3_FP8, "head_dim": 64}  # a key head is half a block
