"""Real processes of torch.distributed with gloo: all ranks load, or all ranks stop, and every one says why."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.oracle.families import write_family

RANK = """
import json, os, sys, torch, torch.distributed as dist
import mapper
from mapper.integrations import distributed
from mapper.load import allocate

folder, out, fault = sys.argv[1:]
dist.init_process_group("gloo")
rank = dist.get_rank()
checkpoint = mapper.Checkpoint.open(folder)
config = dict(checkpoint.config)
if fault == "config" and rank == 1:
    config["rope_theta"] = 5.0
spec = mapper.load_spec("deepseek_v2")
program = mapper.compile(spec, config=config, runtime="vllm", layout=mapper.Layout(tp=2, ep=2))
memory = allocate(program.at_rank(rank).plan(checkpoint))
for tensor in memory.values():
    tensor.fill_(7)
if fault == "target" and rank == 1:
    memory["model.norm.weight"] = torch.full((3,), 7.0, dtype=torch.bfloat16)
try:
    report = distributed.load(program, memory, checkpoint)
    found = ["loaded", report.rank, report.loaded]
except mapper.MapperError as error:
    untouched = all(bool((tensor == 7).all()) for tensor in memory.values())
    found = [[f"{each.code} {each.message}" for each in error.diagnostics], untouched]
with open(f"{out}/{rank}.json", "w") as file:
    json.dump(found, file)
dist.barrier()
dist.destroy_process_group()
"""


def run(tmp_path: Path, fault: str) -> list[object]:
    folder = write_family("deepseek_v2_lite", tmp_path / "in")
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    subprocess.run(
        [*torchrun, str(script), str(folder), str(tmp_path), fault], check=True, capture_output=True, text=True, timeout=120
    )
    return [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]


def test_every_rank_loads_its_own_share(tmp_path: Path) -> None:
    assert run(tmp_path, "none") == [["loaded", 0, 59], ["loaded", 1, 59]]


def test_ranks_with_other_inputs_all_stop_before_a_write(tmp_path: Path) -> None:
    first, second = run(tmp_path, "config")
    assert first == second
    (text,), untouched = first  # type: ignore[misc]
    assert text.startswith("M710 rank 1 has another config than rank 0: ")
    assert untouched


def test_rank_that_cannot_load_stops_the_others_with_its_reason(tmp_path: Path) -> None:
    first, second = run(tmp_path, "target")
    reason = "'model.norm.weight' has the shape [3] in the model, and the rule gives [128]"
    assert first == [[f"M711 rank 1 cannot load: M532 {reason}"], True]
    assert second == [[f"M532 {reason}"], True]


@pytest.mark.parametrize("what", ["spec", "config", "layout"])
def test_digest_changes_with_its_input_alone(what: str, tmp_path: Path) -> None:
    import mapper

    config = json.loads((write_family("deepseek_v2_lite", tmp_path) / "config.json").read_text())
    spec = mapper.load_spec("deepseek_v2")
    program = mapper.compile(spec, config=config, runtime="vllm")
    changed = {
        "spec": lambda: mapper.compile(mapper.load_spec(edited(tmp_path)), config=config, runtime="vllm"),
        "config": lambda: mapper.compile(spec, config={**config, "rope_theta": 5.0}, runtime="vllm"),
        "layout": lambda: mapper.compile(spec, config=config, runtime="vllm", layout=mapper.Layout(tp=2)),
    }[what]()
    assert [key for key in program.digests if program.digests[key] != changed.digests[key]] == [what]


def edited(folder: Path) -> Path:
    import mapper

    place = mapper.load_spec("deepseek_v2").place.file
    path = folder / "deepseek_v2.yaml"
    path.write_text(Path(place).read_text() + "# a comment\n")
    return path
