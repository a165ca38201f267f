import gc
import gzip
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mapper.checkpoint import Checkpoint, TensorHeader
from mapper.diagnostics import MapperError
from tests.safetensors_writer import write, write_index

DATA = Path(__file__).parent / "data" / "checkpoints"
INDEX = "model.safetensors.index.json"


def two_files(folder: Path) -> Path:
    """Files 1 (`a`, `b`) and 2 (`c`) without an index, and a config."""
    write(folder / "1.safetensors", {"a": ("F32", [2, 3]), "b": ("U8", [5])})
    write(folder / "2.safetensors", {"c": ("BF16", [7])})
    (folder / "config.json").write_text('{"num_hidden_layers": 3}')
    return folder


def test_file_of_the_safetensors_library_is_read(tmp_path: Path) -> None:
    tensors = {
        "w": torch.arange(6, dtype=torch.float32).reshape(2, 3),
        "scalar": torch.tensor(7, dtype=torch.int64),
        "empty": torch.zeros(0, 5, dtype=torch.bfloat16),
    }
    path = tmp_path / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    checkpoint = Checkpoint.open(path)
    assert checkpoint.files == (str(path),)
    assert not checkpoint.is_manifest
    assert checkpoint.total_bytes == 6 * 4 + 8
    assert {name: header[:3] for name, header in checkpoint.tensors.items()} == {
        "w": ("F32", (2, 3), 0),
        "scalar": ("I64", (), 0),
        "empty": ("BF16", (0, 5), 0),
    }
    data = path.read_bytes()
    header = checkpoint.tensors["w"]
    assert data[header.start : header.stop] == bytes(tensors["w"].flatten().view(torch.uint8).tolist())


def test_folder_without_index_is_all_its_files(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(two_files(tmp_path))
    assert checkpoint.path == str(tmp_path)
    assert checkpoint.files == (str(tmp_path / "1.safetensors"), str(tmp_path / "2.safetensors"))
    assert {name: header[:3] for name, header in checkpoint.tensors.items()} == {
        "a": ("F32", (2, 3), 0),
        "b": ("U8", (5,), 0),
        "c": ("BF16", (7,), 1),
    }
    assert checkpoint.config == {"num_hidden_layers": 3}
    assert checkpoint.ignored == ()
    assert checkpoint.total_bytes == 24 + 5 + 14
    assert [stamp.size for stamp in checkpoint.stamps] == [Path(file).stat().st_size for file in checkpoint.files]


def test_list_keeps_its_order_and_takes_the_config_beside_it(tmp_path: Path) -> None:
    two_files(tmp_path)
    checkpoint = Checkpoint.open([tmp_path / "2.safetensors", str(tmp_path / "1.safetensors")])
    assert checkpoint.files == (str(tmp_path / "2.safetensors"), str(tmp_path / "1.safetensors"))
    assert {name: header.file for name, header in checkpoint.tensors.items()} == {"c": 0, "a": 1, "b": 1}
    assert checkpoint.config == {"num_hidden_layers": 3}


def test_list_over_two_folders_has_no_config(tmp_path: Path) -> None:
    two_files(tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text('{"num_hidden_layers": 5}')
    path = write(tmp_path / "other" / "3.safetensors", {"d": ("U8", [3])})
    checkpoint = Checkpoint.open([tmp_path / "1.safetensors", path])
    assert checkpoint.config is None
    assert checkpoint.path == str(tmp_path)


def test_relative_path_gives_absolute_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert Checkpoint.open("1.safetensors").files == (str(tmp_path / "1.safetensors"),)


@pytest.mark.parametrize("opened", [".", INDEX])
def test_index_decides_and_the_rest_is_told(opened: str, tmp_path: Path) -> None:
    two_files(tmp_path)
    # A stale tensor of another file, one that the index does not name, a second split, another index, a folder of copies.
    write(tmp_path / "3.safetensors", {"a": ("F32", [9, 9]), "d": ("U8", [3]), "lm_head": ("U8", [2])})
    write(tmp_path / "model-00001-of-00002.safetensors", {"a": ("F32", [2, 3])})
    (tmp_path / "consolidated.safetensors.index.json").write_text("{}")
    for name in ("original", "empty"):
        (tmp_path / name).mkdir()
    write(tmp_path / "original" / "model.safetensors", {"a": ("F32", [2, 3])})
    files = {"a": "1.safetensors", "b": "1.safetensors", "c": "2.safetensors", "d": "3.safetensors"}
    write_index(tmp_path / INDEX, files)
    checkpoint = Checkpoint.open(tmp_path / opened)
    assert {name: Path(checkpoint.files[header.file]).name for name, header in checkpoint.tensors.items()} == files
    assert checkpoint.tensors["a"].shape == (2, 3)
    assert checkpoint.config == {"num_hidden_layers": 3}
    assert checkpoint.ignored == (
        f"consolidated.safetensors.index.json: not named by {INDEX}",
        f"model-00001-of-00002.safetensors: not named by {INDEX}",
        "original/: a subfolder with 1 .safetensors file",
        "3.safetensors: 1 tensor that the index gives to 1.safetensors: 'a'",
        "3.safetensors: 1 tensor that the index does not name: 'lm_head'",
    )


def test_only_index_in_a_folder_is_taken_whatever_its_stem(tmp_path: Path) -> None:
    two_files(tmp_path)
    write_index(tmp_path / "diffusion_pytorch_model.safetensors.index.json", {"c": "2.safetensors"})
    assert list(Checkpoint.open(tmp_path).tensors) == ["c"]


def test_subfolder_that_the_index_names_is_read(tmp_path: Path) -> None:
    (tmp_path / "part").mkdir()
    write(tmp_path / "part" / "1.safetensors", {"a": ("U8", [3])})
    write_index(tmp_path / INDEX, {"a": "part/1.safetensors"})
    assert Checkpoint.open(tmp_path).files == (str(tmp_path / "part" / "1.safetensors"),)


def test_snapshot_of_links_to_blobs_is_read(tmp_path: Path) -> None:
    # The layout of a Hugging Face cache: snapshots/REVISION/NAME -> ../../blobs/HASH.
    snapshot = tmp_path / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    (tmp_path / "blobs").mkdir()
    write(tmp_path / "blobs" / "f00d", {"a": ("U8", [3])})
    write_index(tmp_path / "blobs" / "cafe", {"a": "model-00001-of-00001.safetensors"})
    (snapshot / "model-00001-of-00001.safetensors").symlink_to("../../blobs/f00d")
    (snapshot / INDEX).symlink_to("../../blobs/cafe")
    checkpoint = Checkpoint.open(snapshot)
    assert checkpoint.files == (str(snapshot / "model-00001-of-00001.safetensors"),)
    assert checkpoint.tensors["a"].shape == (3,)


@pytest.mark.parametrize(
    "name", ["__proto__", "", "a\nb", 'quote"', "back\\slash", "model.layers.0-0.w", "weight_map", "ünï", "\0"]
)
def test_unusual_tensor_name_is_kept(name: str, tmp_path: Path) -> None:
    write(tmp_path / "1.safetensors", {name: ("U8", [3]), "b": ("U8", [2])})
    assert list(Checkpoint.open(tmp_path).tensors) == [name, "b"]
    write_index(tmp_path / INDEX, {name: "1.safetensors", "b": "1.safetensors"})
    assert list(Checkpoint.open(tmp_path).tensors) == [name, "b"]
    manifest = tmp_path / "m.json"
    manifest.write_text(json.dumps({name: {"dtype": "U8", "shape": [3]}}, ensure_ascii=False))
    assert list(Checkpoint.open(manifest).tensors) == [name]


@pytest.mark.parametrize(
    ("name", "num_tensors", "total_bytes", "num_layers"),
    # Totals of the published checkpoints.
    [("DeepSeek-V3", 91_991, 688_574_839_360, 61), ("DeepSeek-V2-Lite-Chat", 5_291, 31_412_968_448, 27)],
)
def test_manifest_of_a_real_checkpoint_is_read(name: str, num_tensors: int, total_bytes: int, num_layers: int) -> None:
    checkpoint = Checkpoint.open(DATA / f"{name}.header.json.gz")
    assert checkpoint.is_manifest
    assert (checkpoint.files, checkpoint.stamps, checkpoint.ignored) == ((), (), ())
    assert len(checkpoint.tensors) == num_tensors
    assert checkpoint.total_bytes == total_bytes
    assert checkpoint.config is not None
    assert checkpoint.config["num_hidden_layers"] == num_layers


def test_digest_of_a_real_checkpoint_stays() -> None:
    # Ranks and recorded results compare it: a change of its making is a change of a format.
    digest = Checkpoint.open(DATA / "DeepSeek-V2-Lite-Chat.header.json.gz").digest
    assert digest == "15350d8860f40580e223f5fa2476cf918232f6535bd52f9c3bfa8cea4992230d"


@pytest.mark.parametrize("ending", [".header.json.gz", ".header.json", ".json.gz", ".json"])
def test_manifest_takes_the_config_of_its_stem(ending: str, tmp_path: Path) -> None:
    text = json.dumps({"w": {"dtype": "BF16", "shape": [2, 3]}, "s": {"dtype": "F32", "shape": []}})
    path = tmp_path / f"name.v1{ending}"
    path.write_bytes(gzip.compress(text.encode()) if ending.endswith("gz") else text.encode())
    assert Checkpoint.open(path).config is None
    (tmp_path / "name.v1.config.json").write_text('{"x": 1}')
    checkpoint = Checkpoint.open(path)
    assert checkpoint.config == {"x": 1}
    assert checkpoint.tensors == {"w": TensorHeader("BF16", (2, 3), -1, 0, 12), "s": TensorHeader("F32", (), -1, 0, 4)}


def test_opening_leaves_the_collector_as_it_was(tmp_path: Path) -> None:
    two_files(tmp_path)
    assert gc.isenabled()
    Checkpoint.open(tmp_path)
    assert gc.isenabled()
    with pytest.raises(MapperError):
        Checkpoint.open(tmp_path / "absent")
    assert gc.isenabled()
    gc.disable()
    try:
        Checkpoint.open(tmp_path)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_checkpoint_pickles(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(two_files(tmp_path))
    copy = pickle.loads(pickle.dumps(checkpoint))
    assert (copy.tensors, copy.files, copy.stamps, copy.digest) == (
        checkpoint.tensors,
        checkpoint.files,
        checkpoint.stamps,
        checkpoint.digest,
    )


def test_import_takes_neither_torch_nor_numpy() -> None:
    code = "import sys, mapper.checkpoint; print({'torch', 'numpy', 'safetensors'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
