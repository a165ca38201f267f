"""Random files, right and wrong: this reader and the safetensors library must tell the same story."""

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mapper.checkpoint import Checkpoint
from mapper.diagnostics import MapperError
from mapper.ops.dtypes import BITS, DTYPES
from tests.safetensors_writer import counted, entries, file_bytes

# The only codes under which a file is refused that the library reads: a key given twice (the library keeps the last), an entry
# with other keys than the format has (it ignores them, or takes a list for an entry), strides beyond 63 bits.
STRICTER = {"M413", "M435", "M437"}

NAMES = st.one_of(st.sampled_from(["a", "b", "model.layers.0.w", "dtype", "shape", ""]), st.text(max_size=6)).filter(
    lambda name: name != "__metadata__"
)
SHAPES = st.lists(st.integers(0, 5), max_size=3)
METADATA = st.none() | st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2)

THOROUGH = settings(max_examples=8 * settings().max_examples, deadline=None)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("properties") / "model.safetensors"


@st.composite
def headers(draw: st.DrawFn) -> tuple[dict[str, Any], int]:
    """A right header, its entries in another order than their data, and the size of the data."""
    tensors: dict[str, tuple[str, list[int]]] = {}
    for name in draw(st.lists(NAMES, max_size=5, unique=True)):
        dtype, shape = draw(st.sampled_from(sorted(DTYPES))), draw(SHAPES)
        whole_bytes = shape if BITS[dtype] % 8 == 0 else [*shape, 4]
        tensors[name] = (dtype, whole_bytes)
    header = entries(tensors)
    size = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    shuffled = {name: header[name] for name in draw(st.permutations(list(header)))}
    metadata = draw(METADATA)
    return (shuffled if metadata is None else {"__metadata__": metadata, **shuffled}), size


def library_view(data: bytes) -> dict[str, tuple[str, tuple[int, ...], bytes]] | None:
    try:
        found = safetensors.deserialize(data)
    except safetensors.SafetensorError:
        return None
    return {name: (tensor["dtype"], tuple(tensor["shape"]), bytes(tensor["data"])) for name, tensor in found}


def view(path: Path, data: bytes) -> dict[str, tuple[str, tuple[int, ...], bytes]] | set[str]:
    """What the file holds, or the codes under which it is refused."""
    path.write_bytes(data)
    try:
        checkpoint = Checkpoint.open(path)
    except MapperError as error:
        return {each.code for each in error.diagnostics}
    return {name: (header.dtype, header.shape, data[header.start : header.stop]) for name, header in checkpoint.tensors.items()}


def require_agreement(path: Path, data: bytes) -> None:
    expected, found = library_view(data), view(path, data)
    if expected is None:
        assert isinstance(found, set), f"the library refuses what is read as {found}"
    elif isinstance(found, set):
        assert found <= STRICTER
    else:
        assert found == expected


@given(headers(), st.integers(0, 9), st.booleans())
def test_right_file_reads_as_the_library_reads_it(
    path: Path, made: tuple[dict[str, Any], int], padding: int, ascii: bool
) -> None:
    header, size = made
    data = file_bytes(json.dumps(header, ensure_ascii=ascii) + " " * padding, counted(size))
    expected = library_view(data)
    assert expected is not None
    assert view(path, data) == expected


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-1, 9)
    | st.sampled_from([2**31, 2**62, 2**63, 2**64, 0.0, 2.0, "F32", "F4", "X", ""]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "x"]), inner, max_size=3)
    ),
    max_leaves=4,
)


@st.composite
def wrong_values(draw: st.DrawFn) -> bytes:
    """A file with some places of its header replaced, removed or added."""
    header, size = draw(headers())
    header = json.loads(json.dumps(header))
    for _ in range(draw(st.integers(1, 3))):
        container: Any = header
        for _ in range(draw(st.integers(0, 2))):
            below = [
                each
                for each in (container.values() if isinstance(container, dict) else container)
                if isinstance(each, dict | list)
            ]
            if not below:
                break
            container = draw(st.sampled_from(below))
        if isinstance(container, dict):
            key = draw(st.sampled_from([*container, "x", "__metadata__"]))
            if draw(st.integers(0, 3)) or key not in container:
                container[key] = draw(JSON_VALUES)
            else:
                del container[key]
        elif container and draw(st.booleans()):
            container[draw(st.integers(0, len(container) - 1))] = draw(JSON_VALUES)
        else:
            container.append(draw(JSON_VALUES))
    return file_bytes(header, counted(size + draw(st.sampled_from([0, 0, 0, 1, 8]))))


@THOROUGH
@given(wrong_values())
@example(file_bytes('{"a":{"dtype":"F32","shape":[-0],"data_offsets":[0,0]}}', b""))
@example(file_bytes('{"a":{"dtype":"F32","shape":[true],"data_offsets":[0,4]}}', counted(4)))
@example(file_bytes('{"a":{"dtype":"F32","shape":[1],"data_offsets":[0.0,4]}}', counted(4)))
@example(file_bytes('{"a":{"dtype":"F32","shape":[9223372036854775808,2,0],"data_offsets":[0,0]}}', b""))
@example(file_bytes('{"a":{"dtype":"F32","shape":[-1,-4],"data_offsets":[0,16]}}', counted(16)))
@example(file_bytes('{"a":{"dtype":"F4","shape":[3,9],"data_offsets":[0,13]}}', counted(13)))
@example(
    file_bytes(
        '{"a":{"dtype":"U8","shape":[4],"data_offsets":[0]},"b":{"dtype":"U8","shape":[4],"data_offsets":[4,4,8]}}', counted(8)
    )
)
@example(file_bytes('{"a":{"dtype":"F32","shape":[1],"shape":[1],"data_offsets":[0,4]}}', counted(4)))
@example(file_bytes('{"a":["F32",[1],[0,4]]}', counted(4)))
@example(file_bytes('{"__metadata__":{"a":1}}', b""))
@example(file_bytes('{"__metadata__":{},"__metadata__":{}}', b""))
@example(file_bytes("[]", b""))
def test_wrong_header_is_refused_where_the_library_refuses_it(path: Path, data: bytes) -> None:
    require_agreement(path, data)


TOKENS = st.sampled_from(
    [
        *(
            b'"',
            b"\\",
            b"[",
            b"]",
            b"{",
            b"}",
            b",",
            b":",
            b" ",
            b"\n",
            b"\0",
            b"\xff",
            b"\xef\xbb\xbf",
            b'"\\ud800"',
            b"\\u0061",
        ),
        *(b"0", b"01", b"-0", b"1.0", b"1e3", b"NaN", b"true", b"null", b"18446744073709551616", b"9" * 5000, b"[" * 300),
        *(b'"a":1,', b'"dtype":"F32",'),
    ]
)


@st.composite
def wrong_bytes(draw: st.DrawFn) -> bytes:
    """A file with bytes of its header replaced, its header length changed, or its end cut or extended."""
    header, size = draw(headers())
    text = json.dumps(header).encode()
    for _ in range(draw(st.integers(0, 2))):
        start = draw(st.integers(0, len(text)))
        text = text[:start] + draw(TOKENS) + text[start + draw(st.integers(0, 3)) :]
    length = len(text) + draw(st.sampled_from([0, 0, 0, 1, -1, 100_000_001, 2**63]))
    data = max(length, 0).to_bytes(8, "little") + text + counted(size + draw(st.sampled_from([0, 0, 0, 5])))
    return data[: len(data) - draw(st.sampled_from([0, 0, 0, 1, 3, 50, 10_000]))] if draw(st.booleans()) else data


@THOROUGH
@given(wrong_bytes())
@example(b"")
@example(b"\0" * 7)
@example(b"\0" * 8)
@example(file_bytes("{}", b""))
@example(file_bytes('{"\\ud800":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', counted(4)))
@example(file_bytes('{"__metadata__":{"a":"\\udc00"}}', b""))
@example(file_bytes("[" * 100_000, b""))
@example(file_bytes("9" * 5000, b""))
@example(file_bytes(f'{{"__metadata__": {{"\\n": {"[" * 900}{"]" * 900}}}}}', b""))
@example(file_bytes(f'{{"\\n": {"[" * 900}{"]" * 900}}}', b""))
def test_damaged_file_is_refused_where_the_library_refuses_it(path: Path, data: bytes) -> None:
    require_agreement(path, data)


@THOROUGH
@given(wrong_values())
def test_escape_in_the_header_changes_no_verdict(path: Path, data: bytes) -> None:
    # A header with a backslash takes the careful way through the reader, one without the quick way.
    length = int.from_bytes(data[:8], "little")
    escaped = data[8 : 8 + length].decode().replace('"dtype"', '"\\u0064type"')
    verdict = view(path, file_bytes(escaped, data[8 + length :]))
    plain = view(path, data)
    assert verdict.keys() == plain.keys() if isinstance(verdict, dict) and isinstance(plain, dict) else verdict == plain


def test_deep_nesting_is_refused_at_every_depth(path: Path) -> None:
    # Around the limit of Python's stack the quick and the careful parser give up at different depths.
    limit = sys.getrecursionlimit()
    for depth in range(limit // 2, limit + 20):
        nested = '{"a":' * depth + "{}" + "}" * depth
        assert isinstance(view(path, file_bytes(f'{{"\\n":{nested}}}', b"")), set)


@given(st.integers(0, 2**32))
def test_digest_depends_on_names_dtypes_and_shapes_only(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    rng = random.Random(seed)
    tensors = {f"t{number}": (rng.choice(["F32", "BF16", "I8"]), [rng.randint(0, 3), 2]) for number in range(6)}
    folder = tmp_path_factory.mktemp("digest")

    def digest(parts: list[dict[str, tuple[str, list[int]]]]) -> str:
        files: list[Path] = []
        for number, part in enumerate(parts):
            header = entries(part)
            file = folder / f"{len(parts)}-{number}.safetensors"
            file.write_bytes(file_bytes(header, counted(max((each["data_offsets"][1] for each in header.values()), default=0))))
            files.append(file)
        return Checkpoint.open(files).digest

    names = rng.sample(list(tensors), len(tensors))
    whole = digest([tensors])
    assert digest([{name: tensors[name] for name in names[:2]}, {name: tensors[name] for name in names[2:]}]) == whole
    manifest = folder / "m.json"
    manifest.write_text(json.dumps({name: {"dtype": tensors[name][0], "shape": tensors[name][1]} for name in names}))
    assert Checkpoint.open(manifest).digest == whole
    dtype, shape = tensors["t0"]
    for changed in ({"t0": (dtype, [*shape, 1])}, {"t0": ("U8", shape)}, {"t9": (dtype, shape)}):
        assert digest([tensors | changed]) != whole
