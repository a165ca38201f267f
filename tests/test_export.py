"""The way back: what a load filled, gathered from all ranks, is the checkpoint again, byte for byte."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import mapper
from mapper.export import export
from mapper.load import Loader, allocate
from mapper.transfer.files import CheckpointFiles
from tests.oracle.families import write_family

LAYOUTS = ["tp=1", "tp=2,ep=2", "tp=4", "tp=2,pp=2", "tp=2,pp=2,ep=2", "tp=2,ep=2,redundant_experts=4"]


def loaded(folder: Path, layout: str, runtime: str = "vllm") -> tuple[mapper.Checkpoint, list]:
    checkpoint = mapper.Checkpoint.open(folder)
    spec = mapper.load_spec("deepseek_v2")
    program = mapper.compile(spec, config=checkpoint.config, runtime=runtime, layout=mapper.Layout.parse(layout))
    plans = []
    for rank in range(program.layout.num_ranks):
        own = program.at_rank(rank)
        plan = own.plan(checkpoint)
        parameters = allocate(plan)
        Loader(own, parameters).load(checkpoint)
        plans.append((plan, parameters))
    return checkpoint, plans


def contents(checkpoint: mapper.Checkpoint) -> dict[str, bytes]:
    with CheckpointFiles(checkpoint) as files:
        return {
            f"{name} {header.dtype} {header.shape}": files.tensor(header)
            .contiguous()
            .reshape(-1)
            .view(torch.uint8)
            .numpy()
            .tobytes()
            for name, header in checkpoint.tensors.items()
        }


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["deepseek_v3_mtp", "deepseek_v3_fp8", "deepseek_v2_lite"])
def test_what_all_ranks_hold_is_the_checkpoint_again(family: str, layout: str, tmp_path: Path) -> None:
    checkpoint, plans = loaded(write_family(family, tmp_path / "in"), layout)
    report = export(plans, tmp_path / "out", base=checkpoint, config=checkpoint.config)
    again = mapper.Checkpoint.open(tmp_path / "out")
    assert contents(again) == contents(checkpoint)
    assert again.config == checkpoint.config
    assert report.written + report.copied == len(checkpoint.tensors)
    assert report.copied == len(plans[0][0].matching.skipped)


def test_shards_are_cut_at_the_limit_and_the_index_names_every_tensor(tmp_path: Path) -> None:
    checkpoint, plans = loaded(write_family("deepseek_v2", tmp_path / "in"), "tp=1")
    report = export(plans, tmp_path / "out", base=checkpoint, max_shard_bytes=200_000)
    assert report.files > 2
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(checkpoint.tensors)
    assert index["metadata"]["total_size"] == report.num_bytes == checkpoint.total_bytes
    assert contents(mapper.Checkpoint.open(tmp_path / "out")) == contents(checkpoint)


def test_without_a_base_skipped_tensors_are_left_out_by_name(tmp_path: Path) -> None:
    checkpoint, plans = loaded(write_family("deepseek_v3_mtp", tmp_path / "in"), "tp=1")
    report = export(plans, tmp_path / "out")
    assert set(report.left_out) == set(plans[0][0].matching.skipped)
    assert set(mapper.Checkpoint.open(tmp_path / "out").tensors) == set(checkpoint.tensors) - set(report.left_out)


def test_loader_writes_back_what_it_holds(tmp_path: Path) -> None:
    folder = write_family("deepseek_v2", tmp_path / "in")
    checkpoint, [(plan, parameters)] = loaded(folder, "tp=1", runtime="transformers")
    name = "model.layers.0.self_attn.o_proj.weight"
    parameters[name] += 1
    program = mapper.compile(mapper.load_spec("deepseek_v2"), config=checkpoint.config, runtime="transformers")
    report = Loader(program, parameters).export(tmp_path / "out", base=checkpoint)
    before, after = contents(checkpoint), contents(mapper.Checkpoint.open(tmp_path / "out"))
    assert {key.split()[0] for key in before if before[key] != after[key]} == {name}
    assert report.written == plan.num_loaded


def refused(plans: list, path: Path) -> list[str]:
    with pytest.raises(mapper.MapperError) as error:
        export(plans, path)
    assert not path.exists()
    assert not list(path.parent.glob(f".{path.name}.*"))
    return [f"{each.code} {each.message}" for each in error.value.diagnostics]


def test_one_rank_of_many_is_refused(tmp_path: Path) -> None:
    _, plans = loaded(write_family("deepseek_v2", tmp_path / "in"), "tp=2,pp=2,ep=2")
    texts = refused(plans[:1], tmp_path / "out")
    assert "M703 [0:128, 128:256] of 'model.layers.0.self_attn.o_proj.weight' is in none of the parameters given" in texts
    assert "M703 [0:64, 0:128] of 'model.layers.1.mlp.experts.7.up_proj.weight' is in none of the parameters given" in texts
    assert "M703 [0:128] of 'model.norm.weight' is in none of the parameters given" in texts


def test_ranks_that_differ_are_refused(tmp_path: Path) -> None:
    _, plans = loaded(write_family("deepseek_v2", tmp_path / "in"), "tp=2")
    plans[1][1]["model.norm.weight"][3] += 1
    assert refused(plans, tmp_path / "out") == ["M704 the ranks do not agree on [0:128] of 'model.norm.weight'"]


def test_cast_is_undone_only_where_nothing_is_lost(tmp_path: Path) -> None:
    _, plans = loaded(write_family("deepseek_v3", tmp_path / "in"), "tp=1", runtime="transformers")
    router = plans[0][1]["model.layers.1.mlp.gate.weight"]
    assert router.dtype == torch.float32
    router[0, 0] = 1.0 + 2.0**-20
    assert refused(plans, tmp_path / "out") == [
        "M702 'model.layers.1.mlp.gate.weight' cannot be written back as bfloat16: "
        "'model.layers.1.mlp.gate.weight' holds values that it cannot hold"
    ]


def test_folder_that_holds_files_is_left_alone(tmp_path: Path) -> None:
    _, plans = loaded(write_family("deepseek_v2", tmp_path / "in"), "tp=1")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(mapper.MapperError, match=r"M705 '.*out' exists and is not empty"):
        export(plans, tmp_path / "out")
    assert [each.name for each in (tmp_path / "out").iterdir()] == ["notes.txt"]
