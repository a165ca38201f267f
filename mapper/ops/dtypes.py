"""The element types a safetensors file can hold: their size in bits and their name in torch."""

from __future__ import annotations

from collections.abc import Iterable
from math import frexp, prod
from typing import NamedTuple


class DType(NamedTuple):
    """`bits` of one element; `torch_name` is the attribute of `torch`, or None where torch has no such dtype.

    One element of `float4_e2m1fn_x2` holds two F4 elements: it is the last dim that halves.
    """

    bits: int
    torch_name: str | None


# Names and sizes: `Dtype` of the safetensors format, https://github.com/huggingface/safetensors (safetensors/src/tensor.rs).
DTYPES: dict[str, DType] = {
    "BOOL": DType(8, "bool"),
    "F4": DType(4, "float4_e2m1fn_x2"),
    "F6_E2M3": DType(6, None),
    "F6_E3M2": DType(6, None),
    "U8": DType(8, "uint8"),
    "I8": DType(8, "int8"),
    "F8_E5M2": DType(8, "float8_e5m2"),
    "F8_E4M3": DType(8, "float8_e4m3fn"),
    "F8_E8M0": DType(8, "float8_e8m0fnu"),
    "F8_E4M3FNUZ": DType(8, "float8_e4m3fnuz"),
    "F8_E5M2FNUZ": DType(8, "float8_e5m2fnuz"),
    "I16": DType(16, "int16"),
    "U16": DType(16, "uint16"),
    "F16": DType(16, "float16"),
    "BF16": DType(16, "bfloat16"),
    "I32": DType(32, "int32"),
    "U32": DType(32, "uint32"),
    "F32": DType(32, "float32"),
    "C64": DType(64, "complex64"),
    "F64": DType(64, "float64"),
    "I64": DType(64, "int64"),
    "U64": DType(64, "uint64"),
}

BITS: dict[str, int] = {name: dtype.bits for name, dtype in DTYPES.items()}

COMPUTED_DTYPES = frozenset({"F16", "BF16", "F32", "F64"})
"""The dtypes whose values a rule may compute with."""

_SAFETENSORS_NAMES = {dtype.torch_name: name for name, dtype in DTYPES.items() if dtype.torch_name is not None}


def torch_name(dtype: str) -> str | None:
    """Return the name in torch of the safetensors dtype `dtype`, or None where torch has none.

    >>> torch_name('F8_E4M3')
    'float8_e4m3fn'
    """
    return DTYPES[dtype].torch_name


def safetensors_name(torch_name: str) -> str | None:
    """Return the safetensors name of the torch dtype called `torch_name` (with or without `torch.`), or None.

    >>> safetensors_name('torch.bfloat16')
    'BF16'
    """
    return _SAFETENSORS_NAMES.get(torch_name.removeprefix("torch."))


def is_narrower(dtype: str, than: str) -> bool:
    """Return whether both are whole numbers and `dtype` does not hold all that `than` does.

    >>> is_narrower('I32', 'I64'), is_narrower('I64', 'U32'), is_narrower('BF16', 'F32')
    (True, False, False)
    """
    if not {dtype[0], than[0]} <= {"I", "U"}:
        return False
    if dtype[0] == than[0]:
        return DTYPES[dtype].bits < DTYPES[than].bits
    return dtype[0] == "U" or DTYPES[dtype].bits <= DTYPES[than].bits


def can_hold(dtype: str, value: float) -> bool:
    """Return whether an element of `dtype` can be `value`: of floats rounded, of whole numbers and exponents exactly.

    >>> can_hold('U8', 127), can_hold('U8', -1), can_hold('I32', 0.5), can_hold('F8_E8M0', 0.25), can_hold('F8_E8M0', 0)
    (True, False, False, True, False)
    """
    bits = DTYPES[dtype].bits
    if dtype[0] == "U":
        return value % 1 == 0 and 0 <= value < 2**bits
    if dtype[0] == "I":
        return value % 1 == 0 and -(2 ** (bits - 1)) <= value < 2 ** (bits - 1)
    if dtype == "F8_E8M0":
        return 2.0**-127 <= value <= 2.0**127 and frexp(value)[0] == 0.5
    return bits >= 8 or value == 0


def num_bytes(dtype: str, shape: Iterable[int]) -> int:
    """Return the size in bytes of a tensor of `shape` stored as the safetensors dtype `dtype`.

    Elements of less than a byte are packed; a tensor of them fills whole bytes.

    >>> num_bytes('BF16', (3, 5)), num_bytes('F4', (3, 4)), num_bytes('F32', ())
    (30, 6, 4)
    """
    num_bits = DTYPES[dtype].bits * prod(shape)
    assert num_bits % 8 == 0, f"{dtype} elements of a tensor fill whole bytes"
    return num_bits // 8
