"""The exact text of every finding about a file, an index, a manifest or a folder."""

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mapper.checkpoint import Checkpoint
from mapper.diagnostics import MapperError
from mapper.messages.checkpoint import MESSAGES
from mapper.ops.dtypes import DTYPES
from tests.safetensors_writer import counted, entries, file_bytes, write, write_index

DATA = Path(__file__).parent / "data" / "checkpoints"
INDEX = "model.safetensors.index.json"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 123456\n"


def refusal(path: Path | list[Path], folder: Path) -> str:
    """The findings that opening `path` raises, with DIR for `folder`."""
    with pytest.raises(MapperError) as caught:
        Checkpoint.open(path)
    return str(caught.value).replace(str(folder), "DIR")


def header_of(**changes: Any) -> dict[str, Any]:
    """A header of `a` F32 [2, 3], `b` U8 [5] and `c` BF16 [7], with entries replaced by `changes`."""
    return entries({"a": ("F32", [2, 3]), "b": ("U8", [5]), "c": ("BF16", [7])}) | changes


def entry(dtype: Any, shape: Any, *offsets: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": list(offsets)}


FILES: dict[str, tuple[bytes, str]] = {
    "pointer": (
        POINTER,
        "M410 'DIR/x.safetensors' is a git-LFS pointer, not the file itself\n"
        "  hint: run `git lfs pull` in the folder, or download the file itself",
    ),
    "empty": (
        b"",
        "M430 'DIR/x.safetensors' is not a safetensors file: it has 0 bytes, fewer than the 8 of the header length\n"
        "  hint: download or write the file again",
    ),
    "page": (
        b"<!DOCTYPE html><html></html>",
        "M431 'DIR/x.safetensors' is not a safetensors file: its first 8 bytes b'<!DOCTYP' as a header length are"
        " 5789751444030890300, the limit is 100000000\n"
        "  hint: the file is of another kind (a page, a zip, a pickle?) or damaged: download it again",
    ),
    "cut header": (
        file_bytes(header_of(), counted(43))[:100],
        "M432 'DIR/x.safetensors' is truncated within its header: expected at least 199 bytes, found 100\n"
        "  hint: download or write the file again",
    ),
    "header not JSON": (
        file_bytes('{"a": ', b""),
        "M433 the header of 'DIR/x.safetensors' is not JSON: Expecting value: line 1 column 7 (char 6)\n"
        "  hint: download or write the file again",
    ),
    "header not UTF-8": (
        (3).to_bytes(8, "little") + b'{"\xff',
        "M433 the header of 'DIR/x.safetensors' is not JSON: 'utf-8' codec can't decode byte 0xff in position 2:"
        " invalid start byte\n"
        "  hint: download or write the file again",
    ),
    "half a surrogate pair": (
        file_bytes('{"a.\\ud800": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}', counted(4)),
        "M433 the header of 'DIR/x.safetensors' is not JSON: an escape after '[{\"a.' is half of a surrogate pair\n"
        "  hint: download or write the file again",
    ),
    "header is a list": (
        file_bytes([1], b""),
        "M434 the header of 'DIR/x.safetensors' is not an object of {name: {dtype, shape, data_offsets}}: found an array\n"
        "  hint: write the file again with the safetensors library",
    ),
    "metadata is a text": (
        file_bytes({"__metadata__": "pt"}, b""),
        "M434 the header of 'DIR/x.safetensors' is not an object with an object of texts at '__metadata__': found a text\n"
        "  hint: write the file again with the safetensors library",
    ),
    "metadata holds a number": (
        file_bytes({"__metadata__": {"format": "pt", "step": 7}}, b""),
        "M434 the header of 'DIR/x.safetensors' is not an object with a text at '__metadata__', 'step': found a number\n"
        "  hint: write the file again with the safetensors library",
    ),
    "name twice": (
        file_bytes('{"a": %s, "b": %s, "a": %s}' % ((json.dumps(entry("U8", [3], 0, 3)),) * 3), counted(3)),
        "M413 'DIR/x.safetensors' gives keys twice: 'a'\n"
        "  hint: only one entry can be meant: remove the other, or write the file again",
    ),
    "missing key": (
        file_bytes({"a": {"dtype": "U8", "shape": [3]}, "b": [], "c": 1}, b""),
        "M435 in 'DIR/x.safetensors' tensor 'a' is an object with the keys ['dtype', 'shape'], expected the keys"
        " ['data_offsets', 'dtype', 'shape']; likewise 'b', 'c'\n"
        "  hint: write the file again with the safetensors library",
    ),
    "unknown dtype": (
        file_bytes(header_of(b=entry("F99", [5], 24, 29), c=entry(None, [7], 29, 43)), counted(43)),
        f"M436 in 'DIR/x.safetensors' tensor 'b' has the unknown dtype 'F99'; known are {', '.join(DTYPES)}; likewise 'c'\n"
        "  hint: write the file again with the safetensors library",
    ),
    "bad shape": (
        file_bytes(header_of(b=entry("U8", [-5], 24, 29)), counted(43)),
        "M437 in 'DIR/x.safetensors' tensor 'b' has the shape [-5], expected a list of sizes >= 0 whose product fits in"
        " memory\n"
        "  hint: write the file again with the safetensors library",
    ),
    "half a byte": (
        file_bytes(header_of(c=entry("F4", [3, 9], 29, 43)), counted(43)),
        "M438 in 'DIR/x.safetensors' tensor 'c' of dtype F4 and shape [3, 9] takes 108 bits, expected whole bytes\n"
        "  hint: write the file again with the safetensors library",
    ),
    "bad offsets": (
        file_bytes(header_of(b=entry("U8", [5], 29, 24)), counted(43)),
        "M439 in 'DIR/x.safetensors' tensor 'b' has the data_offsets [29, 24], expected [begin, end] with 0 <= begin <= end\n"
        "  hint: write the file again with the safetensors library",
    ),
    "negative offsets": (
        file_bytes(header_of(a=entry("F32", [2, 3], -24, 0)), counted(43)),
        "M439 in 'DIR/x.safetensors' tensor 'a' has the data_offsets [-24, 0], expected [begin, end] with 0 <= begin <= end\n"
        "  hint: write the file again with the safetensors library",
    ),
    "unknown key": (
        file_bytes(header_of(b=entry("U8", [5], 24, 29) | {"strides": [1]}), counted(43)),
        "M435 in 'DIR/x.safetensors' tensor 'b' is an object with the keys ['data_offsets', 'dtype', 'shape', 'strides'],"
        " expected the keys ['data_offsets', 'dtype', 'shape']\n"
        "  hint: write the file again with the safetensors library",
    ),
    "tensor inside another": (
        file_bytes(header_of(b=entry("U8", [5], 4, 9), c=entry("BF16", [7], 24, 38)), counted(38)),
        "M441 in 'DIR/x.safetensors' tensor 'b' starts at byte 4 of the data, before 'a' ends at 24\n"
        "  hint: write the file again with the safetensors library",
    ),
    "wrong size": (
        file_bytes(header_of(b=entry("U8", [4], 24, 29)), counted(43)),
        "M440 in 'DIR/x.safetensors' tensor 'b' of dtype U8 and shape [4] takes 4 bytes, its offsets hold 5\n"
        "  hint: write the file again with the safetensors library",
    ),
    "overlap": (
        file_bytes(header_of(b=entry("U8", [5], 20, 25), c=entry("BF16", [7], 25, 39)), counted(39)),
        "M441 in 'DIR/x.safetensors' tensor 'b' starts at byte 20 of the data, before 'a' ends at 24\n"
        "  hint: write the file again with the safetensors library",
    ),
    "hole": (
        file_bytes(header_of(b=entry("U8", [5], 25, 30), c=entry("BF16", [7], 32, 46)), counted(46)),
        "M442 in 'DIR/x.safetensors' tensor 'b' starts at byte 25 of the data, expected 24: there is a hole before it;"
        " likewise 'c'\n"
        "  hint: write the file again with the safetensors library",
    ),
    "truncated": (
        file_bytes(header_of(), counted(43))[:-15],
        "M443 'DIR/x.safetensors' is truncated: expected 242 bytes, found 227; past the end 2 tensors, first 'b'\n"
        "  hint: download the file again",
    ),
    "goes on": (
        file_bytes(header_of(), counted(46)),
        "M444 'DIR/x.safetensors' goes on after its last tensor: expected 242 bytes, found 245\n"
        "  hint: download or write the file again",
    ),
}


@pytest.mark.parametrize("case", FILES)
def test_wrong_file_is_reported(case: str, tmp_path: Path) -> None:
    data, expected = FILES[case]
    (tmp_path / "x.safetensors").write_bytes(data)
    assert refusal(tmp_path / "x.safetensors", tmp_path) == expected


def manifest(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "m.header.json"
    path.write_text(text)
    return path


def index_of_two(tmp_path: Path, **weight_map: Any) -> Path:
    """Files 1 (`a`, `b`) and 2 (`c`, `d`, `e`) with an index of `weight_map`; by default the right one."""
    write(tmp_path / "1.safetensors", {"a": ("F32", [2, 3]), "b": ("U8", [5])})
    write(tmp_path / "2.safetensors", {"c": ("BF16", [7]), "d": ("U8", [3]), "e": ("U8", [2])})
    right = dict.fromkeys("ab", "1.safetensors") | dict.fromkeys("cde", "2.safetensors")
    write_index(tmp_path / INDEX, right | weight_map)
    return tmp_path


def shards(tmp_path: Path, *names: str) -> Path:
    for number, name in enumerate(names):
        write(tmp_path / name, {f"t{number}": ("U8", [3])})
    return tmp_path


def same_names(tmp_path: Path) -> Path:
    write(tmp_path / "model-4bit.safetensors", {name: ("U8", [2]) for name in "abcd"})
    write(tmp_path / "model.safetensors", {name: ("BF16", [2]) for name in "dcbaz"})
    return tmp_path


def with_text(name: str, data: bytes) -> Callable[[Path], Path]:
    def make(tmp_path: Path) -> Path:
        index_of_two(tmp_path)
        (tmp_path / name).write_bytes(data)
        return tmp_path

    return make


def linked_folder(tmp_path: Path) -> Path:
    outside = tmp_path / "outside"
    outside.mkdir()
    write(outside / "s.safetensors", {"s": ("U8", [3])})
    folder = tmp_path / "inside"
    folder.mkdir()
    (folder / "link").symlink_to(outside)
    return index_of_two(folder, s="link/s.safetensors", p="../outside/s.safetensors", q=str(outside / "s.safetensors"))


def empty_folder(tmp_path: Path, *names: str) -> Path:
    for name in names:
        (tmp_path / name).write_bytes(b"")
    return tmp_path


PATHS: dict[str, tuple[Callable[[Path], Path | list[Path]], str]] = {
    "nothing there": (
        lambda tmp_path: tmp_path / "absent",
        "M401 'DIR/absent' does not exist\n  hint: check the path; a link may point to a file that was removed",
    ),
    "broken link": (
        lambda tmp_path: [shards(tmp_path, "s.safetensors") / "s.safetensors", tmp_path / "gone.safetensors"],
        "M401 'DIR/gone.safetensors' does not exist\n  hint: check the path; a link may point to a file that was removed",
    ),
    "empty folder": (
        empty_folder,
        "M402 'DIR' holds no .safetensors file: it is empty\n  hint: open the folder that holds the .safetensors files",
    ),
    "another format": (
        lambda tmp_path: empty_folder(
            tmp_path, "pytorch_model-1.bin", "pytorch_model-2.bin", "model.pt", "README.md", "x.gguf"
        ),
        "M402 'DIR' holds no .safetensors file: found 'model.pt', 'pytorch_model-1.bin', 'pytorch_model-2.bin' and 1 more\n"
        "  hint: convert these files to safetensors first",
    ),
    "other files": (
        lambda tmp_path: empty_folder(tmp_path, "README.md", "config.json"),
        "M402 'DIR' holds no .safetensors file: found 2 other entries\n"
        "  hint: open the folder that holds the .safetensors files",
    ),
    "two indexes": (
        lambda tmp_path: empty_folder(tmp_path, "a.safetensors.index.json", "b.safetensors.index.json"),
        "M403 'DIR' holds 2 indexes and none is model.safetensors.index.json: 'a.safetensors.index.json',"
        " 'b.safetensors.index.json'\n  hint: open one of the index files",
    ),
    "another kind of file": (
        lambda tmp_path: empty_folder(tmp_path, "model.bin") / "model.bin",
        "M404 'DIR/model.bin' is not a checkpoint: expected a folder, a .safetensors file, an index or a manifest"
        " (.json, .json.gz)",
    ),
    "empty list": (
        lambda tmp_path: [],
        "M405 the list of files is empty\n  hint: give at least one file, and each file once",
    ),
    "file twice": (
        lambda tmp_path: [shards(tmp_path, "s.safetensors") / "s.safetensors"] * 2,
        "M405 the list of files names a file twice: 'DIR/s.safetensors'\n  hint: give at least one file, and each file once",
    ),
    "folder in a list": (
        lambda tmp_path: [tmp_path],
        "M406 'DIR' cannot be read: Is a directory",
    ),
    "index is a pointer": (
        with_text(INDEX, POINTER),
        f"M410 'DIR/{INDEX}' is a git-LFS pointer, not the file itself\n"
        "  hint: run `git lfs pull` in the folder, or download the file itself",
    ),
    "conflict in the index": (
        with_text(INDEX, b'{"weight_map": {\n<<<<<<< HEAD\n"a": "1.safetensors"\n=======\n'),
        f"DIR/{INDEX}:2:1: M411 the index holds a git conflict marker '<<<<<<< HEAD'\n"
        "  2 | <<<<<<< HEAD\n    | ^\n  hint: keep one side of the conflict, or download the file again",
    ),
    "index not JSON": (
        with_text(INDEX, b'{"weight_map": {'),
        f"M412 the index 'DIR/{INDEX}' is not JSON: Expecting property name enclosed in double quotes:"
        " line 1 column 17 (char 16)\n"
        "  hint: download or write the file again",
    ),
    "config not JSON": (
        with_text("config.json", b"\x1f\x8bx"),
        "M412 the config 'DIR/config.json' is not JSON: Compressed file ended before the end-of-stream marker was reached\n"
        "  hint: download or write the file again",
    ),
    "key twice in the index": (
        with_text(INDEX, b'{"weight_map": {"a": "1.safetensors", "c": "2.safetensors", "a": "2.safetensors"}}'),
        f"M413 'DIR/{INDEX}' gives keys twice: 'a'\n"
        "  hint: only one entry can be meant: remove the other, or write the file again",
    ),
    "no weight_map": (
        with_text(INDEX, b'{"a": "1.safetensors"}'),
        f"M414 the index 'DIR/{INDEX}' is not an object with a 'weight_map' of {{tensor: file}}: found an object without one",
    ),
    "config is a list": (
        with_text("config.json", b"[]"),
        "M414 the config 'DIR/config.json' is not an object: found an array",
    ),
    "missing files": (
        lambda tmp_path: index_of_two(tmp_path, x="4.safetensors", y="3.safetensors", z="3.safetensors"),
        "M420 missing 2 files that the index names: '3.safetensors', '4.safetensors', with 3 of 8 tensors:"
        " 'y', 'z', 'x'\n"
        "  hint: download the missing files",
    ),
    "files outside": (
        linked_folder,
        "M421 the index names 3 files outside its folder: '../outside/s.safetensors', 'DIR/outside/s.safetensors',"
        " 'link/s.safetensors'\n  hint: move the files into the folder of the index and name them relative to it",
    ),
    "no file name": (
        lambda tmp_path: index_of_two(tmp_path, a=None, b=""),
        "M422 the index gives no file name to 2 tensors: 'a', 'b'; expected a text, found None\n  hint: write the index again",
    ),
    "tensor in no file": (
        lambda tmp_path: index_of_two(tmp_path, **dict.fromkeys(["w", "x", "y", "z"], "1.safetensors")),
        "M423 '1.safetensors' does not hold 4 tensors that the index gives to it: 'w', 'x', 'y' and 1 more\n"
        "  hint: download the file and the index again",
    ),
    "tensor in another file": (
        lambda tmp_path: index_of_two(tmp_path, d="1.safetensors", c="1.safetensors", x="1.safetensors"),
        "M424 the index gives 2 tensors to '1.safetensors', found in '2.safetensors': 'c', 'd'\n"
        "  hint: download the files and the index again\n"
        "M423 '1.safetensors' does not hold 1 tensor that the index gives to it: 'x'\n"
        "  hint: download the file and the index again",
    ),
    "tensor in two files": (
        same_names,
        "M450 4 tensors in both 'DIR/model-4bit.safetensors' and 'DIR/model.safetensors': 'd', 'c', 'b' and 1 more\n"
        "  hint: open the list of files that is meant, or remove the other",
    ),
    "parts missing without an index": (
        lambda tmp_path: shards(tmp_path, "model-00001-of-00006.safetensors", "model-00003-of-00006.safetensors"),
        "M451 'DIR' has no index and lacks 4 of the 6 files 'model-*-of-00006.safetensors':"
        " 'model-00002-of-00006.safetensors', 'model-00004-of-00006.safetensors', 'model-00005-of-00006.safetensors'"
        " and 1 more\n"
        "  hint: download the missing files, or open the list of files that is meant",
    ),
    "manifest is a list": (
        lambda tmp_path: manifest(tmp_path, "[]"),
        "M414 the manifest 'DIR/m.header.json' is not an object of {name: {dtype, shape}}: found an array",
    ),
    "manifest not JSON": (
        lambda tmp_path: manifest(tmp_path, "{"),
        "M412 the manifest 'DIR/m.header.json' is not JSON: Expecting property name enclosed in double quotes:"
        " line 1 column 2 (char 1)\n  hint: download or write the file again",
    ),
    "name twice in a manifest": (
        lambda tmp_path: manifest(tmp_path, '{"a": {"dtype": "U8", "shape": [3]}, "a": {"dtype": "U8", "shape": [3]}}'),
        "M413 'DIR/m.header.json' gives keys twice: 'a'\n"
        "  hint: only one entry can be meant: remove the other, or write the file again",
    ),
    "wrong entries of a manifest": (
        lambda tmp_path: manifest(
            tmp_path, '{"a": {"dtype": "F4", "shape": [3]}, "b": {"dtype": "U8"}, "c": {"dtype": "U8", "shape": [2.0]}}'
        ),
        "M438 in 'DIR/m.header.json' tensor 'a' of dtype F4 and shape [3] takes 12 bits, expected whole bytes\n"
        "  hint: write the file again with the safetensors library\n"
        "M435 in 'DIR/m.header.json' tensor 'b' is an object with the keys ['dtype'], expected the keys"
        " ['dtype', 'shape']\n"
        "  hint: write the file again with the safetensors library\n"
        "M437 in 'DIR/m.header.json' tensor 'c' has the shape [2.0], expected a list of sizes >= 0 whose product fits in"
        " memory\n"
        "  hint: write the file again with the safetensors library",
    ),
}


@pytest.mark.parametrize("case", PATHS)
def test_wrong_checkpoint_is_reported(case: str, tmp_path: Path) -> None:
    make, expected = PATHS[case]
    assert refusal(make(tmp_path), tmp_path) == expected


def test_conflict_marker_of_a_real_index_is_recognised(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_bytes(gzip.decompress((DATA / "bloom-invalid.index.json.gz").read_bytes()))
    assert refusal(tmp_path, tmp_path) == (
        f"DIR/{INDEX}:2:1: M411 the index holds a git conflict marker '======='\n"
        "  2 | =======\n    | ^\n  hint: keep one side of the conflict, or download the file again"
    )


def test_findings_of_all_files_are_collected(tmp_path: Path) -> None:
    index_of_two(tmp_path, x="3.safetensors")
    (tmp_path / "1.safetensors").write_bytes(POINTER)
    (tmp_path / "2.safetensors").write_bytes(b"")
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(MapperError) as caught:
        Checkpoint.open(tmp_path)
    assert [each.code for each in caught.value.diagnostics] == ["M420", "M410", "M430", "M414"]


def test_every_message_has_its_text_here() -> None:
    asserted = {match[0] for _, text in [*FILES.values(), *PATHS.values()] for match in re.finditer(r"\bM\d{3}\b", text)}
    assert asserted == MESSAGES.keys()
