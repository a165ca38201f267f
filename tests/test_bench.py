"""The benchmark's inputs and its table; no timing decides anything."""

import json

import pytest

from mapper import Checkpoint, compile, load_spec
from mapper.bench import inputs
from mapper.bench.measure import Watch
from mapper.bench.rows import ROWS, Peer, Row
from mapper.bench.run import Bench, plan_figures
from mapper.bench.samples import LOADERS
from mapper.bench.table import table
from mapper.cli import main
from tests.manifests import V3


def test_the_manifest_is_that_of_deepseek_v3(tmp_path):
    made, real = Checkpoint.open(str(inputs.manifest(tmp_path))), Checkpoint.open(str(V3))
    assert {name: (each.dtype, each.shape) for name, each in made.tensors.items()} == {
        name: (each.dtype, each.shape) for name, each in real.tensors.items()
    }


def test_tiny_experts_have_the_topology_of_v3():
    config = inputs.tiny_experts_config()
    assert len(list(inputs.deepseek_v3_headers(config))) == 45_395


@pytest.mark.parametrize("runtime", ["vllm", "transformers"])
def test_the_inputs_are_checkpoints_of_their_specs_and_are_kept(tmp_path, runtime):
    folder = inputs.experts(tmp_path, layers=4, experts=4)
    checkpoint = Checkpoint.open(folder)
    assert compile(load_spec("deepseek_v2"), config=checkpoint.config, runtime=runtime).plan(checkpoint).findings == ()
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    inputs.experts(tmp_path, layers=4, experts=4)
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    inputs.experts(tmp_path, layers=5, experts=4)
    assert len(Checkpoint.open(folder).tensors) > len(checkpoint.tensors)


def test_large_matrices_are_a_llama():
    config = inputs.large_matrices_config()
    names = [name for name, _, _ in inputs.llama_headers(config)]
    program = compile(load_spec("llama"), config=config, runtime="vllm")
    assert {program.resolve(name).outcome for name in names} == {"loaded"}
    assert len(names) == 3 + 9 * config["num_hidden_layers"]


def test_a_row_is_measured_in_fresh_processes_and_an_absent_loader_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("mapper.bench.run.MAKERS", {"experts": small})
    row = Row(
        "r",
        "experts",
        "tp=1",
        Peer("mapper_load", "mapper"),
        (Peer("safetensors_copy", "copy"), Peer("runai_copy", "runai")),
        2,
    )
    outcome = Bench(tmp_path, num_samples=2).measure(row)
    ours, (copy, runai) = outcome.ours, outcome.others
    assert (len(ours.samples), len(copy.samples), runai.samples) == (2, 2, ())
    assert "runai_model_streamer" in runai.absent
    assert ours.bytes_read > sum(path.stat().st_size for path in (tmp_path / "experts").glob("*.safetensors")) * 0.9
    assert outcome.ratio(copy) == copy.seconds / ours.seconds
    text = table([outcome], {})
    assert "runai: absent, " in text
    assert ">= 2" in text
    assert json.loads(json.dumps(outcome.to_json()))["loaders"][0]["loader"] == "mapper_load"


def small(folder):
    config = inputs.tiny_experts_config(layers=4, experts=4)
    return inputs._written(folder, config, list(inputs.deepseek_v3_headers(config)), num_files=2)


def test_every_row_names_loaders_that_exist():
    for row in ROWS:
        for peer in (row.ours, *row.others, *([row.floor] if row.floor else [])):
            assert peer.loader in LOADERS, row.name


def test_plan_figures_are_about_all_names(tmp_path):
    figures = plan_figures(tmp_path)
    assert (figures["tensors"], figures["ranks"]) == (91_991, 32)
    assert all(value > 0 for value in figures.values())


def test_a_watch_sees_memory_that_is_written():
    with Watch() as watch:
        block = bytearray(b"x" * (32 << 20))
    assert len(block) <= watch.sample.peak_anonymous < len(block) * 2


@pytest.mark.parametrize(
    ("words", "code"),
    [(["nothing"], "M920"), (["plan", "--python", "vllm"], "M921"), (["plan", "--python", "vllm=/none"], "M921")],
)
def test_wrong_use_is_said(words, code, tmp_path, capsys):
    assert main(["bench", *words, "--folder", str(tmp_path)]) == 2
    assert code in capsys.readouterr().err
