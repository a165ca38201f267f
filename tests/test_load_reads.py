"""What a load reads: the slices of its rank and no byte more; scales that are single numbers, under any of their names."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
import torch

from mapper.checkpoint import Checkpoint
from mapper.compiler import Program, compile
from mapper.diagnostics import MapperError
from mapper.layout import Layout
from mapper.load import Loader
from mapper.regions import volume
from mapper.report import check
from mapper.spec import load_spec
from mapper.transfer.bind import declare
from tests.loads import Tensors, all_raw, fill, prefilled, spec_of, told, write
from tests.oracle.families import FAMILIES, family_tensors, write_family

LAYOUTS = ["tp=1,pp=1", "tp=1,pp=2", "tp=2,ep=2", "tp=4,pp=2", "tp=2,dp=2,ep=4", "tp=1,pp=3,dp=2"]
SHARDED = ("embed_tokens.", "lm_head.", "q_b_proj.", "kv_b_proj.", "o_proj.", "_proj.weight")
WHOLE = ("q_a_proj.", "kv_a_proj_with_mqa.")


def program_of(family: str, layout: str = "", *, runtime: str = "vllm") -> Program:
    return compile(load_spec("deepseek_v2"), config=FAMILIES[family].config, runtime=runtime, layout=Layout.parse(layout))


@pytest.fixture(scope="module")
def v3(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.open(write_family("deepseek_v3", tmp_path_factory.mktemp("reads") / "v3"))


def is_cut(name: str) -> bool:
    """Whether the ranks of a stage hold a tensor once between them, told from its name."""
    return any(part in name for part in SHARDED) and not any(part in name for part in WHOLE)


@pytest.mark.parametrize("text", LAYOUTS)
def test_bytes_read_are_the_slices_of_each_rank_and_add_up_over_ranks(text: str, v3: Checkpoint) -> None:
    program = program_of("deepseek_v3", text)
    layout = program.layout
    read: Counter[str] = Counter()
    total = 0
    for rank in range(layout.num_ranks):
        at_rank = program.at_rank(rank)
        plan = at_rank.plan(v3)
        tensors = prefilled(plan)
        report = Loader(at_rank, tensors).load(v3)
        slices: Counter[str] = Counter()
        for step in plan.steps():
            header = v3.tensors[step.source]
            slices[step.source] += (
                volume(step.source_box) * (header.stop - header.start) // max(torch.Size(header.shape).numel(), 1)
            )
        filled = sum(tensor.nbytes for tensor in tensors.values())
        assert report.bytes_read == report.bytes_written == sum(slices.values()) == filled - report.bytes_padded
        assert report.loaded == len(slices)
        read += slices
        total += report.bytes_read
    for name, header in v3.tensors.items():
        # A stage is tp * dp ranks. A routed expert is cut by all of them, other cut tensors by the tp ranks of each dp.
        copies = layout.dp if is_cut(name) else layout.tp * layout.dp
        if ".experts." in name:
            copies = 1
        assert read[name] == copies * (header.stop - header.start), name
    assert total == sum(read.values())


def test_nothing_of_other_ranks_is_read(v3: Checkpoint) -> None:
    program = program_of("deepseek_v3", "tp=1,pp=2")
    reports = [Loader(p, prefilled(p.plan(v3))).load(v3) for p in (program.at_rank(0), program.at_rank(1))]
    assert sum(report.bytes_read for report in reports) == v3.total_bytes
    assert all(0 < report.bytes_read < v3.total_bytes for report in reports)
    assert [report.loaded for report in reports] == [report.elsewhere for report in reports[::-1]]


@pytest.mark.parametrize("is_stream", [False, True])
def test_source_that_holds_all_parts_is_cut_part_by_part(is_stream: bool, tmp_path: Path) -> None:
    rule = "{target: qkv, dims: {out: [8, 4, 2], in: 3}, shard: {out: tp}}"
    text = f"runtimes:\n  own:\n    mesh: vllm\n    rules:\n      - {rule}\n"
    source = torch.arange(42.0).reshape(14, 3)
    checkpoint = write(tmp_path / "fused", {"qkv": source}, {})
    whole = compile(spec_of(tmp_path, text), config={}, runtime="own", layout=Layout(tp=2))
    for rank, rows in enumerate(([0, 1, 2, 3, 8, 9, 12], [4, 5, 6, 7, 10, 11, 13])):
        model = {"qkv": torch.zeros(7, 3)}
        loader = Loader(whole.at_rank(rank), model)
        if is_stream:
            with loader.update() as session:
                session.feed("qkv", source)
        else:
            assert loader.load(checkpoint).bytes_read == 7 * 3 * 4
        assert torch.equal(model["qkv"], source[rows])


def test_rank_of_padding_alone_counts_its_source_as_elsewhere_from_a_stream_too(tmp_path: Path) -> None:
    text = "runtimes:\n  own:\n    mesh: vllm\n    rules:\n      - {target: w, dims: {n: 3}, shard: {n: {axis: tp, pad: 8}}}\n"
    program = compile(spec_of(tmp_path, text), config={}, runtime="own", layout=Layout(tp=2), rank=1)
    model = {"w": torch.ones(4)}
    with Loader(program, model).update() as session:
        session.feed("w", torch.arange(3.0))
    report = session.finish()
    assert not model["w"].any()
    assert (report.sources, report.loaded, report.elsewhere, report.bytes_read) == (1, 0, 1, 0)


def test_progress_counts_up_to_all_bytes_to_write(v3: Checkpoint) -> None:
    program = program_of("deepseek_v3", "tp=2")
    calls: list[tuple[int, int]] = []
    report = Loader(program, prefilled(program.plan(v3))).load(v3, progress=lambda done, total: calls.append((done, total)))
    assert calls == sorted(calls)
    assert {total for _, total in calls} == {report.bytes_written}
    assert calls[-1][0] == report.bytes_written


def test_file_that_changed_since_it_was_opened_is_found_before_any_write(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_family("deepseek_v2", tmp_path / "v2"))
    program = program_of("deepseek_v2")
    tensors = prefilled(program.plan(checkpoint))
    before = all_raw(tensors)
    last = checkpoint.files[-1]
    os.utime(last, ns=(1, 1))
    with pytest.raises(MapperError) as caught:
        Loader(program, tensors).load(checkpoint)
    assert told(caught.value.diagnostics) == [("M650", last)]
    assert all_raw(tensors) == before


def test_check_counts_what_does_not_fit_and_lives_through_any_missing_tensor(v3: Checkpoint) -> None:
    program = program_of("deepseek_v3", "tp=1,pp=2")
    declared = [declare(prefilled(program.at_rank(rank).plan(v3))) for rank in range(2)]
    num_targets = sum(map(len, declared))
    for lost in v3.tensors:
        tensors = {name: header for name, header in v3.tensors.items() if name != lost}
        faulty = Checkpoint(v3.path, (), tensors, v3.config, (), ())
        report = check(program, faulty, targets=declared)
        assert told(report.findings) == [("M501", lost)]
        assert (report.targets.total, report.targets.complete, report.targets.incomplete) == (num_targets, num_targets - 1, 1)
    extra = [each | declare({"x": torch.zeros(2)}) for each in declared]
    report = check(program, v3, targets=extra)
    assert told(report.findings) == [("M530", "x")]
    assert (report.targets.total, report.targets.incomplete) == (num_targets + 2, 2)


def test_check_of_some_ranks_counts_what_any_of_them_loads(v3: Checkpoint) -> None:
    program = program_of("deepseek_v3", "tp=2,pp=2,ep=2")
    names = [{step.source for step in program.at_rank(rank).plan(v3).steps()} for rank in range(4)]
    for ranks in ([0], [1], [0, 1], [0, 3], [0, 1, 2], [0, 1, 2, 3]):
        report = check(program, v3, ranks=ranks)
        loaded = len(set().union(*(names[rank] for rank in ranks)))
        assert (report.sources.loaded, report.sources.elsewhere) == (loaded, len(v3.tensors) - loaded)


# --- scales: optional, single numbers, three spellings ----------------------------------------------------------------

SPELLINGS = {
    "k_scale": {"k": "k_scale", "v": "v_scale"},
    "k_proj.k_scale": {"k": "k_proj.k_scale", "v": "v_proj.v_scale"},
    "kv_scale": {"k": "kv_scale", "v": "kv_scale"},
}
LAYERS = range(FAMILIES["deepseek_v2_lite"].config["num_hidden_layers"])


def scales(spelling: str, layers: range = LAYERS) -> Tensors:
    """Return the scales of some layers, each a number of its own."""
    names = dict.fromkeys((layer, name) for layer in layers for name in SPELLINGS[spelling].values())
    return {
        f"model.layers.{layer}.self_attn.{name}": torch.tensor(10.0 * layer + number + 1, dtype=torch.float32)
        for number, (layer, name) in enumerate(names)
    }


def loaded_scales(tmp_path: Path, added: Tensors, layers: range = LAYERS, kinds: str = "kv") -> tuple[Tensors, Tensors]:
    """Load a checkpoint with these scales, from files and from a stream; return the scales of both models."""
    tensors = family_tensors("deepseek_v2_lite")
    config = FAMILIES["deepseek_v2_lite"].config
    program = program_of("deepseek_v2_lite")
    plain = prefilled(program.plan(write(tmp_path / "plain", tensors, config)))
    checkpoint = write(tmp_path / "scales", tensors | added, config)
    models = []
    for _ in range(2):
        own = {
            f"model.layers.{layer}.self_attn.mla_attn.mla_attn.{kind}_scale": torch.zeros(())
            for layer in layers
            for kind in kinds
        }
        fill(own)
        models.append(own)
    Loader(program, plain | models[0]).load(checkpoint)
    with Loader(program, plain | models[1]).update() as session:
        session.feed_all(reversed((tensors | added).items()))
    return models[0], models[1]


@pytest.mark.parametrize("layers", [LAYERS, range(1, 2)])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_scales_are_single_numbers_under_each_of_their_names(spelling: str, layers: range, tmp_path: Path) -> None:
    added = scales(spelling, layers)
    for model in loaded_scales(tmp_path, added, layers):
        assert len(model) == 2 * len(layers)
        for name, scale in model.items():
            prefix, _, kind = name.partition(".mla_attn.mla_attn.")
            assert scale.shape == ()
            assert scale == added[f"{prefix}.{SPELLINGS[spelling][kind[0]]}"], name


def test_one_scale_without_the_other_is_loaded_alone(tmp_path: Path) -> None:
    added = {name: each for name, each in scales("k_scale").items() if name.endswith(".k_scale")}
    for model in loaded_scales(tmp_path, added, kinds="k"):
        assert sorted(each.item() for each in model.values()) == sorted(each.item() for each in added.values())


def test_two_spellings_in_one_checkpoint_are_refused(tmp_path: Path) -> None:
    added = scales("k_scale", range(1)) | scales("kv_scale", range(1, 2))
    with pytest.raises(MapperError) as caught:
        loaded_scales(tmp_path, added, range(2))
    assert told(caught.value.diagnostics) == [("M502", "model.layers.1.self_attn.kv_scale")]


def test_scales_that_are_vectors_of_one_are_single_numbers(tmp_path: Path) -> None:
    added = scales("k_scale")
    for model in loaded_scales(tmp_path, {name: each.reshape(1) for name, each in added.items()}):
        assert sorted(each.item() for each in model.values()) == sorted(each.item() for each in added.values())
        assert {each.shape for each in model.values()} == {()}


@pytest.mark.parametrize("shape", [(1, 1), (2,)])
def test_scale_that_is_no_single_number_is_refused(shape: tuple[int, ...], tmp_path: Path) -> None:
    added = {name: torch.full(shape, each.item()) for name, each in scales("k_scale").items()}
    with pytest.raises(MapperError) as caught:
        loaded_scales(tmp_path, added)
    assert sorted(told(caught.value.diagnostics)) == sorted(("M503", name) for name in added)
