import pytest
import safetensors
import torch

from mapper.ops.dtypes import BITS, DTYPES, num_bytes, safetensors_name, torch_name
from tests.safetensors_writer import file_bytes

TORCH_NAMES = [name for name, dtype in DTYPES.items() if dtype.torch_name is not None]


@pytest.mark.parametrize("name", DTYPES)
def test_size_is_the_size_that_the_safetensors_library_expects(name: str) -> None:
    size = num_bytes(name, [4, 3])
    header = {"x": {"dtype": name, "shape": [4, 3], "data_offsets": [0, size]}}
    [(found, tensor)] = safetensors.deserialize(file_bytes(header, bytes(size)))
    assert (found, tensor["dtype"], tensor["shape"], len(tensor["data"])) == ("x", name, [4, 3], size)
    header["x"]["data_offsets"] = [0, size + 1]
    with pytest.raises(safetensors.SafetensorError):
        safetensors.deserialize(file_bytes(header, bytes(size + 1)))


def test_library_knows_no_dtype_that_is_missing_here() -> None:
    header = {"x": {"dtype": "?", "shape": [], "data_offsets": [0, 0]}}
    with pytest.raises(safetensors.SafetensorError) as caught:
        safetensors.deserialize(file_bytes(header, b""))
    text = str(caught.value)
    assert "expected one of" in text
    assert set(text.split("expected one of ")[1].split(" at line")[0].replace("`", "").split(", ")) == DTYPES.keys()


@pytest.mark.parametrize("name", TORCH_NAMES)
def test_torch_dtype_has_the_same_size(name: str) -> None:
    dtype = getattr(torch, str(torch_name(name)))
    elements_per_item = 2 if name == "F4" else 1
    assert dtype.itemsize * 8 == BITS[name] * elements_per_item


@pytest.mark.parametrize("name", TORCH_NAMES)
def test_names_go_there_and_back(name: str) -> None:
    assert safetensors_name(str(torch_name(name))) == name
    assert safetensors_name(str(getattr(torch, str(torch_name(name))))) == name


@pytest.mark.parametrize("name", ["F6_E2M3", "F6_E3M2"])
def test_dtype_that_torch_lacks_has_no_torch_name(name: str) -> None:
    assert torch_name(name) is None


def test_torch_dtype_that_the_format_lacks_has_no_name() -> None:
    assert safetensors_name("torch.complex128") is None


@pytest.mark.parametrize(
    ("dtype", "shape", "expected"),
    [("F32", [], 4), ("BF16", [3, 5], 30), ("F4", [3, 4], 6), ("F6_E2M3", [4, 1], 3), ("U8", [0, 7], 0)],
)
def test_num_bytes(dtype: str, shape: list[int], expected: int) -> None:
    assert num_bytes(dtype, shape) == expected


def test_num_bytes_of_half_a_byte_is_no_size() -> None:
    with pytest.raises(AssertionError, match="F4 elements of a tensor fill whole bytes"):
        num_bytes("F4", [3])
