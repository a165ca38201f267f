"""Headers of a Llama in the formats of quantised matrices: fp8 per tensor and per channel, AWQ, GPTQ, int4 and NVFP4."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from tests.oracle.tensors import Config, Header, decoder_matrices

GROUP = 64  # columns of a matrix that share one scale in int4
NVFP4_GROUP = 16
CODES = 8  # 4-bit codes in an int32

Matrix = Callable[[str, int, int], Iterator[Header]]


def fp8_per_tensor_headers(config: Config) -> Iterator[Header]:
    """Yield the headers of fp8 with one scale a matrix, a scalar, and one for its inputs; scales of the cache beside keys."""
    return _headers(config, _fp8_per_tensor(()), "{kv}_proj.{kv}_scale")


def fp8_per_tensor_of_one_headers(config: Config) -> Iterator[Header]:
    """Yield the same with scales of one element in bfloat16, and without scales of the cache."""
    return _headers(config, _fp8_per_tensor((1,), torch.bfloat16))


def fp8_per_channel_headers(config: Config) -> Iterator[Header]:
    """Yield the headers of fp8 with one scale a row, and scales of the cache beside the projections."""
    return _headers(config, _fp8_per_channel, "{kv}_scale", cache_shape=(1,))


def awq_headers(config: Config) -> Iterator[Header]:
    """Yield the headers of AWQ: matrices lie transposed, codes of neighbouring rows in one word."""
    return _headers(config, _awq)


def gptq_headers(config: Config) -> Iterator[Header]:
    """Yield the headers of GPTQ: matrices lie transposed, codes of neighbouring columns in one word."""
    return _headers(config, _gptq)


def int4_headers(config: Config) -> Iterator[Header]:
    """Yield the headers of compressed-tensors in int4, packed along the columns."""
    return _headers(config, _int4)


def nvfp4_headers(config: Config) -> Iterator[Header]:
    """Yield the headers of NVFP4: two codes a byte, fp8 scales of groups, and a scale of these for each matrix."""
    return _headers(config, _nvfp4, "{kv}_proj.{kv}_scale")


def _headers(config: Config, matrix: Matrix, cache_scale: str = "", cache_shape: tuple[int, ...] = ()) -> Iterator[Header]:
    hidden = config["hidden_size"]
    yield Header("model.embed_tokens.weight", (config["vocab_size"], hidden))
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name, num_rows, num_columns in decoder_matrices(config):
            yield from matrix(f"{prefix}.{name}", num_rows, num_columns)
        for kv in ("k", "v") if cache_scale else ():
            yield Header(f"{prefix}.self_attn.{cache_scale.format(kv=kv)}", cache_shape, torch.float32)
        yield Header(f"{prefix}.input_layernorm.weight", (hidden,))
        yield Header(f"{prefix}.post_attention_layernorm.weight", (hidden,))
    yield Header("model.norm.weight", (hidden,))
    yield Header("lm_head.weight", (config["vocab_size"], hidden))


def _fp8_per_tensor(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Matrix:
    def headers(prefix: str, num_rows: int, num_columns: int) -> Iterator[Header]:
        yield Header(f"{prefix}.weight", (num_rows, num_columns), torch.float8_e4m3fn)
        yield Header(f"{prefix}.weight_scale", shape, dtype)
        yield Header(f"{prefix}.input_scale", shape, dtype)

    return headers


def _fp8_per_channel(prefix: str, num_rows: int, num_columns: int) -> Iterator[Header]:
    yield Header(f"{prefix}.weight", (num_rows, num_columns), torch.float8_e4m3fn)
    yield Header(f"{prefix}.weight_scale", (num_rows, 1))


def _awq(prefix: str, num_rows: int, num_columns: int) -> Iterator[Header]:
    yield Header(f"{prefix}.qweight", (num_columns, num_rows // CODES), torch.int32)
    yield Header(f"{prefix}.qzeros", (num_columns // GROUP, num_rows // CODES), torch.int32)
    yield Header(f"{prefix}.scales", (num_columns // GROUP, num_rows))


def _gptq(prefix: str, num_rows: int, num_columns: int) -> Iterator[Header]:
    yield Header(f"{prefix}.qweight", (num_columns // CODES, num_rows), torch.int32)
    yield Header(f"{prefix}.qzeros", (num_columns // GROUP, num_rows // CODES), torch.int32)
    yield Header(f"{prefix}.scales", (num_columns // GROUP, num_rows))
    yield Header(f"{prefix}.g_idx", (num_columns,), torch.int32)


def _int4(prefix: str, num_rows: int, num_columns: int) -> Iterator[Header]:
    yield Header(f"{prefix}.weight_packed", (num_rows, num_columns // CODES), torch.int32)
    yield Header(f"{prefix}.weight_scale", (num_rows, num_columns // GROUP))
    yield Header(f"{prefix}.weight_shape", (2,), torch.int64)


def _nvfp4(prefix: str, num_rows: int, num_columns: int) -> Iterator[Header]:
    yield Header(f"{prefix}.weight", (num_rows, num_columns // 2), torch.uint8)
    yield Header(f"{prefix}.weight_scale", (num_rows, num_columns // NVFP4_GROUP), torch.float8_e4m3fn)
    yield Header(f"{prefix}.weight_scale_2", (), torch.float32)
    yield Header(f"{prefix}.input_scale", (), torch.float32)


LLAMA: Config = {  # two key heads: on four ranks each is held twice
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_hidden_layers": 2,
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


def _compressed(format: str, weights: Config, inputs: Config | None, cache: Config | None = None) -> Config:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}}
    quantization = {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ["lm_head"],
        "kv_cache_scheme": cache,
    }
    return {**LLAMA, "quantization_config": quantization}


FLOAT8: Config = {"num_bits": 8, "type": "float", "symmetric": True, "group_size": None}
PER_TENSOR: Config = {**FLOAT8, "strategy": "tensor", "dynamic": False}

FP8_PER_TENSOR: Config = {
    **LLAMA,
    "quantization_config": {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
}
FP8_PER_TENSOR_OF_ONE = _compressed("float-quantized", PER_TENSOR, PER_TENSOR)
FP8_PER_CHANNEL = _compressed(
    "float-quantized",
    {**FLOAT8, "strategy": "channel", "dynamic": False},
    {**FLOAT8, "strategy": "token", "dynamic": True},
    PER_TENSOR,
)
AWQ: Config = {
    **LLAMA,
    "quantization_config": {
        "quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm",
        "modules_to_not_convert": None,
    },
}  # fmt: skip
GPTQ: Config = {
    **LLAMA,
    "quantization_config": {
        "quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True, "lm_head": False,
    },
}  # fmt: skip
INT4 = _compressed(
    "pack-quantized",
    {"num_bits": 4, "type": "int", "symmetric": True, "group_size": GROUP, "strategy": "group", "dynamic": False},
    None,
)
FLOAT4: Config = {"num_bits": 4, "type": "float", "group_size": NVFP4_GROUP, "dynamic": False}
NVFP4: Config = {
    **LLAMA,
    "quantization_config": {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": FLOAT4, "input_activations": FLOAT4}},
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False},
        "ignore": ["lm_head"],
    },
}
