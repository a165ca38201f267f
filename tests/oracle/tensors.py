"""The tensors of a tiny checkpoint: their headers, and values that follow from name, shape and dtype alone.

No element has all its bytes equal to `SENTINEL_BYTE`: a parameter filled with it shows afterwards which of its elements a
loader wrote.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

SENTINEL_BYTE = 0x7F
BLOCK_SIZE = 128  # rows and columns of a weight that share one fp8 scale
FP8_BLOCKS: Mapping[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK_SIZE, BLOCK_SIZE],
}

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Header:
    """One tensor of a checkpoint: its name, shape and dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16


def linear_headers(
    prefix: str,
    num_rows: int,
    num_columns: int,
    *,
    is_fp8: bool,
    scale: str = "weight_scale_inv",
    scale_dtype: torch.dtype = torch.float32,
) -> Iterator[Header]:
    """Yield a matrix in bfloat16, or in fp8 with one scale per block."""
    if not is_fp8:
        yield Header(f"{prefix}.weight", (num_rows, num_columns))
        return
    yield Header(f"{prefix}.weight", (num_rows, num_columns), torch.float8_e4m3fn)
    blocks = (math.ceil(num_rows / BLOCK_SIZE), math.ceil(num_columns / BLOCK_SIZE))
    yield Header(f"{prefix}.{scale}", blocks, scale_dtype)


def decoder_matrices(config: Config) -> Iterator[tuple[str, int, int]]:
    """Yield (name, rows, columns) of the matrices of one layer of a Llama-like decoder, in the order of its checkpoints."""
    hidden, width, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_rows, kv_rows = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    yield "self_attn.q_proj", q_rows, hidden
    yield "self_attn.k_proj", kv_rows, hidden
    yield "self_attn.v_proj", kv_rows, hidden
    yield "self_attn.o_proj", hidden, q_rows
    yield "mlp.gate_proj", width, hidden
    yield "mlp.up_proj", width, hidden
    yield "mlp.down_proj", hidden, width


# --- values -----------------------------------------------------------------------------------------------------------


def tensor_values(header: Header) -> torch.Tensor:
    """Return the values of the tensor `header` describes, drawn from a generator that its name seeds."""
    generator = torch.Generator().manual_seed(zlib.crc32(header.name.encode()))
    low, high, convert = DRAWS[header.dtype]
    drawn = torch.randint(low, high, (math.prod(header.shape),), generator=generator, dtype=torch.int32)
    values = convert(drawn).reshape(header.shape)
    if header.name.endswith("weight_shape"):  # the projections of an expert that vLLM fuses agree on their shape
        values = 256 * torch.arange(1, values.numel() + 1, dtype=header.dtype)
    if "A_log" in header.name.rpartition(".")[2]:  # exp() of it has to stay finite
        values = values / (1 << 18 if header.dtype == torch.float32 else 64)
    return values


def _bfloat16(drawn: torch.Tensor) -> torch.Tensor:
    # Bits 0 to 6 are the mantissa, bits 7 to 9 lower the exponent from that of 128, bit 11 is the sign.
    mantissa, exponent, sign = drawn & 127, 127 + 7 - (drawn >> 7 & 7), drawn >> 11
    return (sign << 15 | exponent << 7 | mantissa).to(torch.uint16).view(torch.bfloat16)


def _bytes_of(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a conversion to raw bytes read as `dtype`, the sentinel left out."""
    return lambda drawn: (drawn + (drawn >= SENTINEL_BYTE)).to(torch.uint8).view(dtype)


def _numbers_of(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda drawn: drawn.to(dtype)


DRAWS: dict[torch.dtype, tuple[int, int, Callable[[torch.Tensor], torch.Tensor]]] = {
    torch.bfloat16: (0, 1 << 12, _bfloat16),
    # 254 of the 256 bytes: 0x7f and 0xff are the two spellings of NaN, and the first is the sentinel too.
    torch.float8_e4m3fn: (0, 254, _bytes_of(torch.float8_e4m3fn)),
    torch.int8: (0, 254, _bytes_of(torch.int8)),
    torch.uint8: (0, 254, _bytes_of(torch.uint8)),
    torch.float8_e8m0fnu: (100, 150, _bytes_of(torch.float8_e8m0fnu)),
    torch.float32: (-(1 << 20), 1 << 20, _numbers_of(torch.float32)),
    torch.int32: (-(1 << 31), (1 << 31) - 1, _numbers_of(torch.int32)),
    torch.int64: (0, 8, _numbers_of(torch.int64)),  # numbers of 8 experts
}
