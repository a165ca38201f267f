"""Headers of DeepSeek V4 checkpoints: hyper-connections, compressed attention, hash layers, MTP and DSpark drafts."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tests.oracle.tensors import FP8_BLOCKS, Config, Header, linear_headers


def deepseek_v4_headers(config: Config) -> Iterator[Header]:
    """Yield the headers of a checkpoint: embedding, layers, final norm, head, drafts."""
    hidden, vocab, num_layers = config["hidden_size"], config["vocab_size"], config["num_hidden_layers"]
    yield Header("embed.weight", (vocab, hidden))
    for layer in range(num_layers):
        ratio, is_hash = config["compress_ratios"][layer], layer < config["num_hash_layers"]
        yield from _decoder_layer(config, f"layers.{layer}", ratio=ratio, is_hash=is_hash)
    yield Header("norm.weight", (hidden,))
    yield Header("head.weight", (vocab, hidden))
    yield from _hyper_head(config, "")
    num_drafts = config["num_nextn_predict_layers"]
    for draft in range(num_drafts):
        yield from _decoder_layer(config, f"mtp.{draft}", ratio=0, is_hash=False)
        if "dspark_markov_rank" in config:
            yield from _dspark(config, f"mtp.{draft}", is_first=draft == 0, is_last=draft == num_drafts - 1)
        else:
            yield from _mtp(config, f"mtp.{draft}")


def _decoder_layer(config: Config, prefix: str, *, ratio: int, is_hash: bool) -> Iterator[Header]:
    hidden = config["hidden_size"]
    yield from _attention(config, f"{prefix}.attn", ratio=ratio)
    yield from _experts(config, f"{prefix}.ffn", is_hash=is_hash)
    yield Header(f"{prefix}.attn_norm.weight", (hidden,))
    yield Header(f"{prefix}.ffn_norm.weight", (hidden,))
    num_streams = config["hc_mult"]
    num_mixes = (2 + num_streams) * num_streams
    for branch in ("attn", "ffn"):
        yield Header(f"{prefix}.hc_{branch}_fn", (num_mixes, num_streams * hidden), torch.float32)
        yield Header(f"{prefix}.hc_{branch}_base", (num_mixes,), torch.float32)
        yield Header(f"{prefix}.hc_{branch}_scale", (3,), torch.float32)


def _attention(config: Config, prefix: str, *, ratio: int) -> Iterator[Header]:
    hidden, num_heads, head_dim = config["hidden_size"], config["num_attention_heads"], config["head_dim"]
    q_rank, num_groups, o_rank = config["q_lora_rank"], config["o_groups"], config["o_lora_rank"]
    yield Header(f"{prefix}.attn_sink", (num_heads,), torch.float32)
    yield from _linear(config, f"{prefix}.wq_a", q_rank, hidden)
    yield Header(f"{prefix}.q_norm.weight", (q_rank,))
    yield from _linear(config, f"{prefix}.wq_b", num_heads * head_dim, q_rank)
    yield from _linear(config, f"{prefix}.wkv", head_dim, hidden)
    yield Header(f"{prefix}.kv_norm.weight", (head_dim,))
    yield from _linear(config, f"{prefix}.wo_a", num_groups * o_rank, num_heads * head_dim // num_groups)
    yield from _linear(config, f"{prefix}.wo_b", hidden, num_groups * o_rank)
    if ratio:
        yield from _compressor(config, f"{prefix}.compressor", ratio=ratio, width=head_dim)
    if ratio == 4:
        num_index_heads, width = config["index_n_heads"], config["index_head_dim"]
        yield from _linear(config, f"{prefix}.indexer.wq_b", num_index_heads * width, q_rank)
        yield Header(f"{prefix}.indexer.weights_proj.weight", (num_index_heads, hidden))
        yield from _compressor(config, f"{prefix}.indexer.compressor", ratio=ratio, width=width)


def _compressor(config: Config, prefix: str, *, ratio: int, width: int) -> Iterator[Header]:
    rows = width * (2 if ratio == 4 else 1)
    yield Header(f"{prefix}.ape", (ratio, rows), torch.float32)
    yield Header(f"{prefix}.wkv.weight", (rows, config["hidden_size"]))
    yield Header(f"{prefix}.wgate.weight", (rows, config["hidden_size"]))
    yield Header(f"{prefix}.norm.weight", (width,))


def _experts(config: Config, prefix: str, *, is_hash: bool) -> Iterator[Header]:
    hidden, width, num_experts = config["hidden_size"], config["moe_intermediate_size"], config["n_routed_experts"]
    matrices = (("w1", width, hidden), ("w2", hidden, width), ("w3", width, hidden))
    yield Header(f"{prefix}.gate.weight", (num_experts, hidden))
    if is_hash:
        yield Header(f"{prefix}.gate.tid2eid", (config["vocab_size"], config["num_experts_per_tok"]), torch.int64)
    else:
        yield Header(f"{prefix}.gate.bias", (num_experts,), torch.float32)
    for expert in range(num_experts):
        for matrix, num_rows, num_columns in matrices:
            name = f"{prefix}.experts.{expert}.{matrix}"
            if config["expert_dtype"] == "fp4":  # two values a byte, one scale per 32
                yield Header(f"{name}.weight", (num_rows, num_columns // 2), torch.int8)
                yield Header(f"{name}.scale", (num_rows, num_columns // 32), torch.float8_e8m0fnu)
            else:
                yield from _linear(config, name, num_rows, num_columns)
    for matrix, num_rows, num_columns in matrices:
        yield from _linear(config, f"{prefix}.shared_experts.{matrix}", num_rows, num_columns)


def _mtp(config: Config, prefix: str) -> Iterator[Header]:
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    yield from _linear(config, f"{prefix}.e_proj", hidden, hidden)
    yield from _linear(config, f"{prefix}.h_proj", hidden, hidden)
    yield Header(f"{prefix}.enorm.weight", (hidden,))
    yield Header(f"{prefix}.hnorm.weight", (hidden,))
    yield Header(f"{prefix}.norm.weight", (hidden,))
    yield from _hyper_head(config, f"{prefix}.")
    yield Header(f"{prefix}.emb.tok_emb.weight", (vocab, hidden))
    yield Header(f"{prefix}.head.weight", (vocab, hidden))


def _dspark(config: Config, prefix: str, *, is_first: bool, is_last: bool) -> Iterator[Header]:
    hidden, vocab, rank = config["hidden_size"], config["vocab_size"], config["dspark_markov_rank"]
    if is_first:
        yield from _linear(config, f"{prefix}.main_proj", hidden, hidden * len(config["dspark_target_layer_ids"]))
        yield Header(f"{prefix}.main_norm.weight", (hidden,))
    if is_last:
        yield Header(f"{prefix}.norm.weight", (hidden,))
        yield from _hyper_head(config, f"{prefix}.")
        yield Header(f"{prefix}.markov_head.markov_w1.weight", (vocab, rank))
        yield Header(f"{prefix}.markov_head.markov_w2.weight", (vocab, rank))
        yield Header(f"{prefix}.confidence_head.proj.weight", (1, hidden + rank))


def _hyper_head(config: Config, prefix: str) -> Iterator[Header]:
    num_streams = config["hc_mult"]
    yield Header(f"{prefix}hc_head_fn", (num_streams, num_streams * config["hidden_size"]), torch.float32)
    yield Header(f"{prefix}hc_head_base", (num_streams,), torch.float32)
    yield Header(f"{prefix}hc_head_scale", (1,), torch.float32)


def _linear(config: Config, prefix: str, num_rows: int, num_columns: int) -> Iterator[Header]:
    scale_dtype = torch.float8_e8m0fnu if config["expert_dtype"] == "fp4" else torch.float32
    is_fp8 = "quantization_config" in config
    yield from linear_headers(prefix, num_rows, num_columns, is_fp8=is_fp8, scale="scale", scale_dtype=scale_dtype)


V4: Config = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": 300,
    "hidden_size": 256,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 128,
    "o_groups": 4,
    "o_lora_rank": 128,
    "num_experts_per_tok": 2,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "topk_method": "noaux_tc",
    "hc_mult": 4,
    "hc_eps": 1e-6,
    "hc_sinkhorn_iters": 20,
    "swiglu_limit": 10.0,
    "sliding_window": 128,
    "compress_rope_theta": 160000,
    "rope_theta": 10000,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "compress_ratios": [0, 4, 128, 4, 0],
    "num_hash_layers": 1,
    "index_n_heads": 8,
    "index_head_dim": 128,
    "index_topk": 64,
    "num_nextn_predict_layers": 1,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 128,
        "beta_fast": 32,
        "beta_slow": 1,
    },
}
FP8: Config = {"expert_dtype": "fp8", "quantization_config": {**FP8_BLOCKS, "scale_fmt": "ue8m0"}}
FP4: Config = {**FP8, "expert_dtype": "fp4"}

CONFIGS: dict[str, Config] = {
    "deepseek_v4_bf16": {**V4, "moe_intermediate_size": 128, "expert_dtype": "bf16"},
    "deepseek_v4_fp8": {**V4, **FP8},
    "deepseek_v4_fp4": {**V4, **FP4},
    # Shared experts of 3 blocks: padded with zeros at tp 2 and 4.
    "deepseek_v4_fp4_odd": {
        **V4,
        "moe_intermediate_size": 384,
        "num_hidden_layers": 2,
        "compress_ratios": [4, 128, 0],
        **FP4,
    },
    "deepseek_v4_dspark": {
        **V4,
        "num_hidden_layers": 3,
        "compress_ratios": [0, 4, 128, 0, 0, 0],
        "num_nextn_predict_layers": 3,
        **FP4,
        "n_mtp_layers": 3,
        "dspark_target_layer_ids": [1, 2],
        "dspark_markov_rank": 64,
        "dspark_block_size": 4,
        "dspark_noise_token_id": 7,
    },
}
