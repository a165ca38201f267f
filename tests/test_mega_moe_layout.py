"""Mega MoE in the kernel's layout: every byte of an expert at the place that the index formulas of vLLM 0.33 give it.

The formulas are those of `deep_gemm_mega_moe.py`, run row by row and byte by byte.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mapper.checkpoint import Checkpoint
from mapper.compiler import Program, compile
from mapper.diagnostics import MapperError
from mapper.export import digest_tensors, export
from mapper.layout import Layout
from mapper.load import Loader, allocate
from mapper.plan.digest import combine_digests
from mapper.spec import load_spec
from mapper.transfer.files import CheckpointFiles
from tests.loads import Tensors, all_raw, fill, raw, spec_of, told, write
from tests.oracle.families import FAMILIES, tensors_of, write_checkpoint

OPTIONS = {"mega_moe": True, "mega_moe_layout": True}
NUM_EXPERTS = 3
W13 = """
formats:
  mega_experts:
    - leaves:
        weight: {dims: [out, in / 2], dtype: int8}
        weight_scale: {source: scale, stored: [out, in / 32], dims: [out, in / 128], dtype: float8_e8m0fnu, bitcast: int32}
index: {expert: {count: 3, axis: ep}}
config: {required: [width, hidden]}
runtimes:
  own:
    mesh: vllm
    rules:
      - target: w13_{leaf}
        sources: ["{expert}.w1.{leaf}", "{expert}.w3.{leaf}"]
        stack: expert
        dims: {out: [width, width], in: hidden}
        format: mega_experts
        do:
          weight: [{view: (part b 8) in -> (b part 8) in}]
          weight_scale: [{view: (part b j q 8) in -> (b q part 8 j) in, j: 4, q: 2}]
"""


def codes(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).view(dtype)


def expert_of(width: int, hidden: int, *, seed: int) -> Tensors:
    """Return one expert's two halves of w13, random bytes."""
    tensors = {}
    for number, part in enumerate(("w1", "w3")):
        tensors[f"{part}.weight"] = codes(width, hidden // 2, seed=seed + number, dtype=torch.int8)
        tensors[f"{part}.scale"] = codes(width, hidden // 32, seed=seed + 10 + number, dtype=torch.float8_e8m0fnu)
    return tensors


def expected_w13(halves: list[torch.Tensor]) -> torch.Tensor:
    """Return the rows of both halves: row r of half h at (r // 8) * 16 + 8 * h + r % 8."""
    found = torch.zeros(2 * len(halves[0]), *halves[0].shape[1:], dtype=torch.int8)
    for half, rows in enumerate(halves):
        for row in range(len(rows)):
            found[row // 8 * 16 + 8 * half + row % 8] = rows[row]
    return found


def expected_words(rows: torch.Tensor, row: int, places: torch.Tensor, at: int) -> None:
    """Write the scales of `row` to places[at], four to a number, the first in the lowest byte."""
    numbers = rows.view(torch.uint8)[row].tolist()
    for column in range(places.shape[1]):
        word = sum(numbers[4 * column + byte] << 8 * byte for byte in range(4))
        places[at, column] = word - (1 << 32) if word >= 1 << 31 else word


def expected_w13_scale(halves: list[torch.Tensor]) -> torch.Tensor:
    """Return the words of both halves: row 64b + 16j + 8q + m of half h at 128b + 64q + 32h + 4m + j."""
    found = torch.zeros(2 * len(halves[0]), halves[0].shape[1] // 4, dtype=torch.int32)
    for half, rows in enumerate(halves):
        for row in range(len(rows)):
            b, j, q, m = row // 64, row % 64 // 16, row % 16 // 8, row % 8
            expected_words(rows, row, found, 128 * b + 64 * q + 32 * half + 4 * m + j)
    return found


def expected_w2_scale(rows: torch.Tensor) -> torch.Tensor:
    """Return the words of w2: row 128b + 32j + i at 128b + 4i + j."""
    found = torch.zeros(len(rows), rows.shape[1] // 4, dtype=torch.int32)
    for row in range(len(rows)):
        b, j, i = row // 128, row % 128 // 32, row % 32
        expected_words(rows, row, found, 128 * b + 4 * i + j)
    return found


def turned(targets: Tensors) -> Tensors:
    """Return parameters like `targets`, those of scales MN-major: their rows lie next to each other."""
    return {
        name: tensor.transpose(1, 2).contiguous().transpose(1, 2) if tensor.dtype == torch.int32 else tensor
        for name, tensor in targets.items()
    }


@pytest.mark.parametrize("width", [64, 128, 192])
@pytest.mark.parametrize("hidden", [512, 896])
@pytest.mark.parametrize("layout", ["tp=1", "tp=3,ep=3"])
def test_gate_and_up_lie_where_the_formulas_put_them_load_after_load(
    width: int, hidden: int, layout: str, tmp_path: Path
) -> None:
    program = compile(
        spec_of(tmp_path, W13), config={"width": width, "hidden": hidden}, runtime="own", layout=Layout.parse(layout)
    )
    targets: list[Tensors] = []
    for number in range(2):
        experts = [expert_of(width, hidden, seed=100 * number + 20 * each) for each in range(NUM_EXPERTS)]
        named = {f"{expert}.{name}": tensor for expert, each in enumerate(experts) for name, tensor in each.items()}
        checkpoint = write(tmp_path / str(number), named, {})
        for rank in range(program.layout.num_ranks):
            own = program.at_rank(rank)
            if not number:
                targets.append(turned(allocate(own.plan(checkpoint))))
            addresses = {name: tensor.data_ptr() for name, tensor in targets[rank].items()}
            fill(targets[rank])
            report = Loader(own, targets[rank]).load(checkpoint)
            assert addresses == {name: tensor.data_ptr() for name, tensor in targets[rank].items()}
            held = experts if program.layout.ep == 1 else experts[rank : rank + 1]
            weights = [expected_w13([each["w1.weight"], each["w3.weight"]]) for each in held]
            scales = [expected_w13_scale([each["w1.scale"], each["w3.scale"]]) for each in held]
            assert torch.equal(targets[rank]["w13_weight"], torch.stack(weights))
            assert torch.equal(targets[rank]["w13_weight_scale"], torch.stack(scales))
            assert targets[rank]["w13_weight_scale"].stride()[1:] == (1, 2 * width)
            assert report.bytes_read == report.bytes_written == sum(raw_size(each) for each in held)
            streamed = turned(allocate(own.plan(checkpoint)))
            with Loader(own, streamed).update() as session:
                session.feed_all(reversed(named.items()))
                fed = session.finish()
            assert all_raw(streamed) == all_raw(targets[rank])
            assert fed.bytes_read == report.bytes_read
        assert all_raw(exported(program, checkpoint, targets, tmp_path / f"out{number}")) == all_raw(named)


@pytest.mark.parametrize(("runtime", "prefix", "targets"), [
    ("vllm", "layers.2.ffn.experts", "model.layers.2.ffn.experts"),
    ("vllm-mtp", "mtp.0.ffn.experts", "model.layers.4.mtp_block.ffn.experts"),
    ("vllm-dspark", "mtp.1.ffn.experts", "model.layers.1.ffn.experts"),
])  # fmt: skip
def test_the_bundled_spec_lays_every_expert_as_the_kernel_has_it(
    runtime: str, prefix: str, targets: str, tmp_path: Path
) -> None:
    known = FAMILIES["deepseek_v4_dspark" if runtime == "vllm-dspark" else "deepseek_v4_fp4"]
    family = replace(known, config={**known.config, "moe_intermediate_size": 128})
    tensors, checkpoint = tensors_of(family), Checkpoint.open(write_checkpoint(family, tmp_path / "c"))
    layout = Layout.parse("tp=2,ep=2,redundant_experts=2")
    program = compile(load_spec("deepseek_v4"), config=family.config, runtime=runtime, layout=layout, rank=1, options=OPTIONS)
    held = allocate(program.plan(checkpoint))
    Loader(program, held).load(checkpoint)
    slots = [5, 6, 7, 0, 1]  # the last two are the replicas
    for slot, expert in enumerate(slots):
        one = {name: tensors[f"{prefix}.{expert}.{name}"] for name in expert_leaves()}
        assert torch.equal(held[f"{targets}.w13_weight"][slot], expected_w13([one["w1.weight"], one["w3.weight"]]))
        assert torch.equal(held[f"{targets}.w13_weight_scale"][slot], expected_w13_scale([one["w1.scale"], one["w3.scale"]]))
        assert raw(held[f"{targets}.w2_weight"][slot]) == raw(one["w2.weight"])
        assert torch.equal(held[f"{targets}.w2_weight_scale"][slot], expected_w2_scale(one["w2.scale"]))
    assert held[f"{targets}.w13_weight"].dtype == torch.int8


def test_updates_of_every_kind_write_through_the_strides_and_digests_are_those_of_the_bytes(tmp_path: Path) -> None:
    program = compile(
        spec_of(tmp_path, W13), config={"width": 64, "hidden": 256}, runtime="own", layout=Layout.parse("tp=3,ep=3")
    )
    before, after = (
        {
            f"{expert}.{name}": tensor
            for expert in range(NUM_EXPERTS)
            for name, tensor in expert_of(64, 256, seed=seed + 20 * expert).items()
        }
        for seed in (0, 500)
    )
    checkpoint = write(tmp_path / "c", before, {})
    digests = []
    for rank in range(NUM_EXPERTS):
        own = program.at_rank(rank)
        targets = turned(allocate(own.plan(checkpoint)))
        loader = Loader(own, targets)
        loader.load(checkpoint)
        digests.append(loader.digest(checkpoint))
        names = [name for name in before if name.startswith(f"{rank}.")]
        mask = {name: codes(*before[name].shape, seed=7, dtype=torch.uint8) > 99 for name in names}
        session = loader.update(scope=set(names))
        for name in names:
            session.feed(name, after[name], only_where=mask[name])
        session.finish()
        merged = {
            name: torch.where(mask[name], after[name].view(torch.uint8), before[name].view(torch.uint8)).view(
                before[name].dtype
            )
            for name in names
        }
        assert_holds(targets, {name.partition(".")[2]: tensor for name, tensor in merged.items()})
        session = loader.update(scope=set(names), staged=True)
        session.feed_all((name, after[name]) for name in names)
        assert_holds(targets, {name.partition(".")[2]: tensor for name, tensor in merged.items()})
        session.finish()
        assert_holds(targets, {name.partition(".")[2]: after[name] for name in names})
        assert targets["w13_weight_scale"].stride()[1:] == (1, 128)
    assert combine_digests(digests) == combine_digests([digest_tensors(before)])


def assert_holds(targets: Tensors, expert: Tensors) -> None:
    """Assert that the parameters hold this expert and no other."""
    assert torch.equal(targets["w13_weight"], expected_w13([expert["w1.weight"], expert["w3.weight"]])[None])
    assert torch.equal(targets["w13_weight_scale"], expected_w13_scale([expert["w1.scale"], expert["w3.scale"]])[None])


def expert_leaves() -> list[str]:
    return [f"{part}.{leaf}" for part in ("w1", "w2", "w3") for leaf in ("weight", "scale")]


@pytest.mark.parametrize(("config", "options", "layout", "message"), [
    ({"moe_intermediate_size": 192}, OPTIONS, "",
     "'in' has 192 elements, and one element of the target holds the bytes of 128"),
    ({"hidden_size": 320}, OPTIONS, "",
     "'in' has 320 elements, and one element of the target holds the bytes of 128"),
    ({}, {"mega_moe_layout": True}, "", "mega MoE"),
    ({"expert_dtype": "fp8"}, OPTIONS, "", "mega MoE"),
    ({}, OPTIONS, "tp=2", "mega MoE"),
])  # fmt: skip
def test_what_the_kernel_has_no_layout_for_is_refused(
    config: dict[str, Any], options: dict[str, bool], layout: str, message: str
) -> None:
    with pytest.raises(MapperError) as caught:
        compile(
            load_spec("deepseek_v4"), config={**FAMILIES["deepseek_v4_fp4"].config, **config}, runtime="vllm",
            layout=Layout.parse(layout or "tp=1"), options=options,
        )  # fmt: skip
    assert any(message in each.message for each in caught.value.diagnostics), str(caught.value)


def test_scales_of_another_width_are_found_in_files_and_in_a_stream(tmp_path: Path) -> None:
    text = W13.replace("dtype: float8_e8m0fnu, bitcast", "bitcast")
    program = compile(spec_of(tmp_path, text), config={"width": 64, "hidden": 128}, runtime="own", layout=Layout())
    tensors = {
        f"{expert}.{name}": tensor for expert in range(NUM_EXPERTS) for name, tensor in expert_of(64, 128, seed=0).items()
    }
    good = write(tmp_path / "good", tensors, {})
    targets = allocate(program.plan(good))
    fill(targets)
    before = all_raw(targets)
    tensors["1.w3.scale"] = torch.ones(64, 4, dtype=torch.bfloat16)
    with pytest.raises(MapperError) as caught:
        Loader(program, targets).load(write(tmp_path / "bad", tensors, {}))
    message = (
        "'1.w3.scale' has the dtype BF16: elements on disk for one of the target are 4, of 64 bits in all, and the bitcast is "
        "to int32, of 32"
    )
    assert [(each.code, each.message) for each in caught.value.diagnostics] == [("M512", message)]
    with pytest.raises(MapperError) as streamed:
        Loader(program, targets).update().feed("1.w3.scale", tensors["1.w3.scale"])
    assert told(streamed.value.diagnostics) == [("M512", "1.w3.scale")]
    assert all_raw(targets) == before


def raw_size(expert: Tensors) -> int:
    return sum(tensor.numel() for tensor in expert.values())


def exported(program: Program, checkpoint: Checkpoint, ranks: list[Tensors], folder: Path) -> Tensors:
    export([(program.at_rank(rank).plan(checkpoint), each) for rank, each in enumerate(ranks)], folder, base=checkpoint)
    again = Checkpoint.open(folder)
    with CheckpointFiles(again) as files:
        return {name: files.tensor(header).clone() for name, header in again.tensors.items()}
