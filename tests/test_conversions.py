"""What lies between a stored value and a parameter: scales, casts, repeats; the way in, and what has no way back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mapper.checkpoint import Checkpoint
from mapper.compiler import Program, compile
from mapper.diagnostics import MapperError
from mapper.layout import Layout
from mapper.load import Loader
from mapper.plan.local import Scaling
from mapper.spec import load_spec
from mapper.testing.reference import reference_load
from mapper.transfer.dequantize import FP4_VALUES, dequantize
from tests.loads import Tensors, all_raw, prefilled, spec_of, write
from tests.oracle.families import FAMILIES, family_tensors, write_family

SPEC = """
formats:
  scaled:
    - leaves:
        weight:
          dequantize:
            weight: {dims: [out, in], dtype: float8_e4m3fn}
            scale: {dims: [out / 2, in / 4]}
          dims: [out, in]
          cast: bfloat16
  finer:
    - leaves:
        scale: {stored: [out / 4], dims: [out / 2]}
runtimes:
  one:
    rules:
      - target: a.{leaf}
        format: scaled
        dims: {out: 5, in: 6}
      - target: b.{leaf}
        format: finer
        dims: {out: 8}
  reader:
    rules:
      - target: a
        source: s
        reuse: true
  narrow:
    rules:
      - target: n
        dims: {out: 3}
        cast: bfloat16
  bad:
    rules:
      - target: a
        dims: {out: 1 - 2}
"""


@pytest.fixture
def tensors() -> Tensors:
    codes = torch.arange(30, dtype=torch.uint8).reshape(5, 6) + 40
    scales = torch.tensor([[2.0, -3.0], [0.5, 7.0], [11.0, 0.25]])
    return {"a.weight": codes.view(torch.float8_e4m3fn), "a.scale": scales, "b.scale": torch.tensor([3.0, 5.0])}


def program(folder: Path, runtime: str = "one") -> Program:
    return compile(spec_of(folder, SPEC), config={}, runtime=runtime)


def model() -> Tensors:
    return {"a.weight": torch.zeros(5, 6, dtype=torch.bfloat16), "b.scale": torch.zeros(4)}


def expected(tensors: Tensors) -> Tensors:
    product = torch.empty(5, 6)
    for row in range(5):
        for column in range(6):
            product[row, column] = tensors["a.weight"][row, column].float() * tensors["a.scale"][row // 2, column // 4]
    return {"a.weight": product.bfloat16(), "b.scale": torch.tensor([3.0, 3.0, 5.0, 5.0])}


def require_equal(found: Tensors, wanted: Tensors) -> None:
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("order", [1, -1])
def test_values_are_multiplied_by_their_scales(order: int, tensors: Tensors, tmp_path: Path) -> None:
    from_files, from_stream = model(), model()
    report = Loader(program(tmp_path), from_files).load(write(tmp_path / "in", tensors, {}))
    with Loader(program(tmp_path), from_stream).update() as session:
        for name, tensor in list(tensors.items())[::order]:
            borrowed = tensor.clone()
            session.feed(name, borrowed)
            borrowed.view(torch.uint8).zero_()  # the sender's buffer is its own again
    require_equal(from_files, expected(tensors))
    require_equal(from_stream, expected(tensors))
    assert report.loaded == 3
    assert report.bytes_read == 30 + 24 + 8


@pytest.mark.parametrize("lost", ["a.weight", "a.scale"])
def test_lone_half_is_named_at_the_end(lost: str, tensors: Tensors, tmp_path: Path) -> None:
    del tensors[lost]
    with pytest.raises(MapperError) as error, Loader(program(tmp_path), model()).update() as session:
        session.feed_all(tensors.items())
    assert [(each.code, each.subject) for each in error.value.diagnostics] == [("M501", lost)]


def test_product_has_no_way_back(tensors: Tensors, tmp_path: Path) -> None:
    checkpoint = write(tmp_path / "in", tensors, {})
    loader = Loader(program(tmp_path), model())
    loader.load(checkpoint)
    assert refused(loader, checkpoint, tmp_path) == [
        "M701 'a.weight' cannot be written back: its values were multiplied by the scales in 'a.scale' when they were loaded"
    ]


def test_repeated_elements_go_back_only_while_they_are_equal(tensors: Tensors, tmp_path: Path) -> None:
    checkpoint = write(tmp_path / "in", tensors, {})
    parameters = model()
    loader = Loader(program(tmp_path), parameters)
    loader.load(checkpoint)
    parameters["b.scale"][1] += 1
    assert "M706 'b.scale' cannot be written back: 'b.scale' holds different values where one stored element was repeated" in (
        refused(loader, checkpoint, tmp_path)
    )


def test_narrowing_cast_has_no_way_back(tmp_path: Path) -> None:
    checkpoint = write(tmp_path / "in", {"n": torch.tensor([1.0, 2.0, 257.0])}, {})
    loader = Loader(program(tmp_path, "narrow"), {"n": torch.zeros(3, dtype=torch.bfloat16)})
    loader.load(checkpoint)
    assert refused(loader, checkpoint, tmp_path) == [
        "M707 'n' cannot be written back as float32: 'n' holds it as bfloat16, which lost digits when it was loaded"
    ]


def refused(loader: Loader, checkpoint: Checkpoint, folder: Path) -> list[str]:
    with pytest.raises(MapperError) as error:
        loader.export(folder / "out", base=checkpoint)
    assert not (folder / "out").exists()
    return [f"{each.code} {each.message}" for each in error.value.diagnostics]


def test_second_reader_needs_an_owner(tmp_path: Path) -> None:
    checkpoint = write(tmp_path / "in", {"s": torch.ones(2)}, {})
    with pytest.raises(MapperError) as error:
        program(tmp_path, "reader").plan(checkpoint)
    assert "M509 's' is read by a rule marked `reuse`, and by no other" in [
        f"{each.code} {each.message}" for each in error.value.diagnostics
    ]


def test_size_that_is_none_is_named_with_its_expression(tmp_path: Path) -> None:
    with pytest.raises(MapperError, match=r"M304 the size of 'out' \(1 - 2\) is -1, expected a whole number of at least 1"):
        program(tmp_path, "bad")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
def test_packed_codes_are_two_values_low_bits_first(dtype: torch.dtype) -> None:
    codes = torch.tensor([[0x10, 0x32], [0xFE, 0x9A]], dtype=torch.uint8).view(dtype)
    scales = torch.tensor([[128], [126]], dtype=torch.uint8)
    from mapper.plan.family import DiskLayout

    scaling = Scaling(DiskLayout((2, 1), (2, 1), (0, 1), (1, 4)), (1, 2), (1, 4))
    found = dequantize(codes, ((0, 2), (0, 2)), scales, scaling)
    by_hand = [[FP4_VALUES[0], FP4_VALUES[1], FP4_VALUES[2], FP4_VALUES[3]], [FP4_VALUES[each] for each in (14, 15, 10, 9)]]
    assert torch.equal(found, torch.tensor(by_hand) * torch.tensor([[2.0], [0.5]]))


@pytest.mark.parametrize("family", ["deepseek_v3_fp8", "deepseek_v4_fp4"])
def test_dequantised_models_equal_the_reference_loader(family: str, tmp_path: Path) -> None:
    folder = write_family(family, tmp_path / family)
    config = FAMILIES[family].config
    spec = load_spec(config["architectures"][0])
    program = compile(spec, config=config, runtime="transformers", options={"dequantize": True})
    checkpoint = Checkpoint.open(folder)
    targets = prefilled(program.plan(checkpoint))
    Loader(program, targets).load(checkpoint)
    expected = reference_load(
        spec,
        config=config,
        runtime="transformers",
        layout=Layout(),
        rank=0,
        tensors=family_tensors(family),
        options={"dequantize": True},
    )
    assert all_raw(targets) == all_raw(expected.targets)
