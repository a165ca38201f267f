import gc
import json
import os
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from mapper.checkpoint import Checkpoint
from mapper.diagnostics import MapperError
from mapper.messages.load import MESSAGES
from mapper.ops.dtypes import DTYPES
from mapper.regions import Box, whole
from mapper.transfer.files import CheckpointFiles
from tests.safetensors_writer import counted, entries, file_bytes, write

TORCH_DTYPES = {
    name: getattr(torch, dtype.torch_name) for name, dtype in DTYPES.items() if dtype.torch_name is not None and name != "F4"
}


def raw(tensor: torch.Tensor) -> list[int]:
    """The bytes of the tensor, row-major: equal even where floats are not, as NaN is not."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist() if tensor.numel() else []


def file_of_all_dtypes(path: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for number, (name, dtype) in enumerate(TORCH_DTYPES.items()):
        size = 5 * 3 * 2 * dtype.itemsize
        data = torch.tensor(
            [(7 * position + number) % (2 if name == "BOOL" else 251) for position in range(size)], dtype=torch.uint8
        )
        tensors[name] = data.view(dtype).reshape(5, 3, 2)
        tensors[f"{name} scalar"] = data[: dtype.itemsize].clone().view(dtype).reshape(())
        tensors[f"{name} empty"] = torch.empty(3, 0, 2, dtype=dtype)
    save_file(tensors, path)
    return tensors


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, dict[str, torch.Tensor]]:
    path = tmp_path_factory.mktemp("every") / "model.safetensors"
    tensors = file_of_all_dtypes(path)
    return Checkpoint.open(path), tensors


def test_every_dtype_reads_as_it_was_written(every: tuple[Checkpoint, dict[str, torch.Tensor]]) -> None:
    checkpoint, tensors = every
    with CheckpointFiles(checkpoint) as files:
        for name, expected in tensors.items():
            found = files.tensor(checkpoint.tensors[name])
            assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
            assert raw(found) == raw(expected), name
        assert files.bytes_read == checkpoint.total_bytes == sum(each.numel() * each.itemsize for each in tensors.values())


INTERVALS = st.tuples(st.integers(0, 5), st.integers(0, 5)).map(lambda pair: (min(pair), max(pair)))


@given(st.sampled_from(sorted(TORCH_DTYPES)), st.tuples(INTERVALS, INTERVALS, INTERVALS), st.integers(0, 9))
def test_box_is_the_slice_of_the_tensor_at_any_offset(
    tmp_path_factory: pytest.TempPathFactory, name: str, box: Box, num_bytes_before: int
) -> None:
    # `before` shifts the data to an offset that is not a multiple of the element size; so does the length of the header.
    header = entries({"before": ("U8", [num_bytes_before]), "x": (name, [5, 5, 5])})
    dtype = TORCH_DTYPES[name]
    size = 125 * dtype.itemsize
    data = bytes(position % 2 for position in range(size)) if name == "BOOL" else counted(size)
    path = tmp_path_factory.mktemp("boxes") / "x.safetensors"
    path.write_bytes(file_bytes(header, bytes(num_bytes_before) + data))
    checkpoint = Checkpoint.open(path)
    index = tuple(slice(start, stop) for start, stop in box)
    expected = torch.frombuffer(bytearray(data), dtype=dtype).reshape(5, 5, 5)[index]
    with CheckpointFiles(checkpoint) as files:
        found = files.read_box(checkpoint.tensors["x"], box)
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert raw(found) == raw(expected)
        assert files.bytes_read == expected.numel() * dtype.itemsize
        assert found.data_ptr() % dtype.itemsize == 0


def test_library_reads_the_same_bytes(every: tuple[Checkpoint, dict[str, torch.Tensor]]) -> None:
    checkpoint, _ = every
    with safe_open(checkpoint.files[0], "pt") as theirs, CheckpointFiles(checkpoint) as ours:
        for name, header in checkpoint.tensors.items():
            expected = theirs.get_tensor(name)
            found = ours.tensor(header)
            assert (found.dtype, found.shape, raw(found)) == (expected.dtype, expected.shape, raw(expected))


def aligned(path: Path) -> Checkpoint:
    """A file of `a` F32 [4, 3] at an offset that is a multiple of 8, as the safetensors library writes it."""
    save_file({"a": torch.arange(12, dtype=torch.float32).reshape(4, 3)}, path)
    return Checkpoint.open(path)


def test_aligned_tensor_is_a_view_of_the_mapping(tmp_path: Path) -> None:
    checkpoint = aligned(tmp_path / "a.safetensors")
    header = checkpoint.tensors["a"]
    with CheckpointFiles(checkpoint) as files:
        whole, part = files.tensor(header), files.read_box(header, ((1, 3), (1, 2)))
        assert part.data_ptr() == whole.data_ptr() + (1 * 3 + 1) * 4
        assert part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
        assert part.tolist() == [[4.0], [7.0]]


def test_elements_are_the_whole_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", {"a": ("U8", [6])})
    data = path.read_bytes()
    assert len(data) % 4
    with CheckpointFiles(Checkpoint.open(path)) as files:
        assert raw(files.elements(0, "I32")) == list(data[: len(data) // 4 * 4])


@pytest.mark.parametrize("shape", [[3, 4], [2, 3, 2], [0, 4]])
def test_f4_is_read_in_pairs(shape: list[int], tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", {"a": ("F4", shape)})
    checkpoint = Checkpoint.open(path)
    header = checkpoint.tensors["a"]
    with CheckpointFiles(checkpoint) as files:
        found = files.tensor(header)
        assert found.dtype == torch.float4_e2m1fn_x2
        assert list(found.shape) == [*shape[:-1], shape[-1] // 2]
        assert raw(found) == list(counted(header.stop - header.start))
        if shape == [3, 4]:
            assert raw(files.read_box(header, ((1, 3), (2, 4)))) == [3, 5]


def test_views_outlive_the_files(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    checkpoint = aligned(path)
    with CheckpointFiles(checkpoint) as files:
        view = files.tensor(checkpoint.tensors["a"])
    gc.collect()
    assert view.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0], [6.0, 7.0, 8.0], [9.0, 10.0, 11.0]]
    assert str(path) in Path("/proc/self/maps").read_text()
    del view
    gc.collect()
    assert str(path) not in Path("/proc/self/maps").read_text()


def test_write_to_a_view_leaves_the_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    checkpoint = aligned(path)
    before = path.read_bytes()
    with CheckpointFiles(checkpoint) as files:
        files.tensor(checkpoint.tensors["a"]).fill_(9.0)
    assert path.read_bytes() == before


def test_reading_gives_no_warning(tmp_path: Path) -> None:
    checkpoint = aligned(tmp_path / "a.safetensors")
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings(), CheckpointFiles(checkpoint) as files:
            warnings.simplefilter("error")
            assert files.tensor(checkpoint.tensors["a"]).sum().item() == 66
    finally:
        torch.set_warn_always(False)


def test_file_larger_than_the_memory_is_mapped(tmp_path: Path) -> None:
    # Four times the memory, sparse: nothing but the pages of the box may be touched.
    size = 4 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    columns = 1 << 20
    path = tmp_path / "sparse.safetensors"
    header = entries({"x": ("U8", [size // columns, columns])})
    path.write_bytes(file_bytes(header, b""))
    os.truncate(path, path.stat().st_size + header["x"]["data_offsets"][1])
    checkpoint = Checkpoint.open(path)
    with CheckpointFiles(checkpoint) as files:
        last = size // columns - 1
        part = files.read_box(checkpoint.tensors["x"], ((last, last + 1), (5, 7)))
        assert part.tolist() == [[0, 0]]
        assert files.bytes_read == 2


def test_threads_share_one_mapping_and_one_count(tmp_path: Path) -> None:
    checkpoint = aligned(tmp_path / "a.safetensors")
    header = checkpoint.tensors["a"]
    addresses: list[int] = []
    with CheckpointFiles(checkpoint) as files:

        def read() -> None:
            addresses.extend(files.tensor(header).data_ptr() for _ in range(200))

        threads = [threading.Thread(target=read) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(addresses) == 1600
        assert len(set(addresses)) == 1
        assert files.bytes_read == 1600 * 48


def refusal(checkpoint: Checkpoint, box: Box | None = None) -> str:
    header = next(iter(checkpoint.tensors.values()))
    with pytest.raises(MapperError) as caught, CheckpointFiles(checkpoint) as files:
        files.read_box(header, whole(header.shape) if box is None else box)
    return str(caught.value)


def stamped(path: Path, nanoseconds: int) -> None:
    os.utime(path, ns=(nanoseconds, nanoseconds))


def test_file_of_another_time_or_size_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", {"a": ("U8", [6])})
    size = path.stat().st_size
    stamped(path, 1_700_000_000_000_000_001)
    checkpoint = Checkpoint.open(path)
    stamped(path, 1_700_000_000_000_000_002)
    told = (
        f"M650 '{path}' changed since its header was read: expected {size} bytes of 2023-11-14 22:13:20.000000001 UTC, found "
    )
    hint = "\n  hint: open the checkpoint again once nothing writes to it"
    assert refusal(checkpoint) == f"{told}{size} bytes of 2023-11-14 22:13:20.000000002 UTC{hint}"
    os.truncate(path, size - 1)
    stamped(path, 1_700_000_000_000_000_001)
    assert refusal(checkpoint) == f"{told}{size - 1} bytes of 2023-11-14 22:13:20.000000001 UTC{hint}"
    path.unlink()
    assert refusal(checkpoint) == f"{told}no such file{hint}"


def test_manifest_has_nothing_to_read(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    path.write_text(json.dumps({"a": {"dtype": "U8", "shape": [3]}}))
    assert refusal(Checkpoint.open(path)) == (
        f"M651 '{path}' is a manifest: it has names, dtypes and shapes, and no files to read from\n"
        "  hint: open the folder of the checkpoint"
    )


def test_dtype_that_torch_lacks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.6.0")
    checkpoint = Checkpoint.open(write(tmp_path / "a.safetensors", {"a": ("F6_E2M3", [4])}))
    assert refusal(checkpoint) == "M652 torch 2.6.0 has no dtype for F6_E2M3\n  hint: convert the checkpoint to another dtype"
    checkpoint = Checkpoint.open(write(tmp_path / "b.safetensors", {"b": ("F8_E8M0", [4])}))
    monkeypatch.delattr(torch, "float8_e8m0fnu")
    assert refusal(checkpoint) == "M652 torch 2.6.0 has no dtype for F8_E8M0\n  hint: torch.float8_e8m0fnu needs a newer torch"


@pytest.mark.parametrize(("shape", "box"), [([2, 6], ((0, 2), (1, 4))), ([2, 6], ((0, 2), (2, 5))), ([4, 3], ((0, 4), (0, 2)))])
def test_half_a_pair_of_f4_is_refused(shape: list[int], box: Box, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write(tmp_path / "a.safetensors", {"a": ("F4", shape)}))
    assert refusal(checkpoint, box=box) == (
        f"M653 an F4 tensor of shape {shape} cannot be cut at {list(box[1])} along its last dim: two elements share a byte\n"
        "  hint: cut the last dim at even places"
    )


def test_file_that_cannot_be_mapped_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.safetensors", {"a": ("U8", [6])})
    checkpoint = Checkpoint.open(path)

    def refuse(*arguments: Any, **named: Any) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("mapper.transfer.files.mmap.mmap", refuse)
    assert refusal(checkpoint) == f"M654 '{path}' cannot be read: Cannot allocate memory"


def test_every_message_of_files_has_its_text_here() -> None:
    codes = {code for code in MESSAGES if "M650" <= code < "M670"}
    source = Path(__file__).read_text()
    assert codes
    assert {code for code in codes if f"{code} " in source} == codes


def test_box_outside_the_tensor_is_our_mistake(tmp_path: Path) -> None:
    checkpoint = aligned(tmp_path / "a.safetensors")
    header = checkpoint.tensors["a"]
    with CheckpointFiles(checkpoint) as files:
        with pytest.raises(AssertionError, match="lies in"):
            files.read_box(header, ((0, 5), (0, 3)))
        with pytest.raises(AssertionError, match="a pair for each dim"):
            files.read_box(header, ((0, 4),))


def test_asking_after_close_is_our_mistake(tmp_path: Path) -> None:
    checkpoint = aligned(tmp_path / "a.safetensors")
    with CheckpointFiles(checkpoint) as files:
        files.tensor(checkpoint.tensors["a"])
    with pytest.raises(AssertionError, match="after close"):
        files.tensor(checkpoint.tensors["a"])
