"""The evidence of real engines, which are too slow for every commit, must be about the tree that is here."""

from pathlib import Path

import pytest
import torch

from mapper.checkpoint import Checkpoint
from mapper.compiler import compile
from mapper.spec import load_spec
from tests.vllm import evidence
from tests.vllm.models import MODELS, write_model
from tests.vllm.scenarios import COMPARED, LIVE, SCENARIOS, SIZES

with_evidence = pytest.mark.skipif(
    not evidence.EVIDENCE.exists(), reason="there is no evidence yet: `make vllm-check` has not run on this tree"
)


@with_evidence
def test_every_scenario_has_been_asked_of_what_is_here() -> None:
    assert evidence.stale() == [], "`make vllm-check` asks them again"


@with_evidence
@pytest.mark.parametrize("name", [each.name for each in SCENARIOS])
def test_engine_answered_as_it_must(name: str) -> None:
    assert evidence.read()[name]["faults"] == []


def test_scenarios_are_those_that_the_claims_need() -> None:
    assert len({each.name for each in SCENARIOS}) == len(COMPARED) * len(SIZES) + len(LIVE)
    assert set(COMPARED) == set(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_checkpoints_are_whole_and_differ_in_every_tensor(name: str, tmp_path: Path) -> None:
    first, second = (Checkpoint.open(write_model(name, tmp_path / f"{seed}", seed=seed)) for seed in range(2))
    config = MODELS[name].config
    program = compile(load_spec(str(config["architectures"][0])), config=config, runtime="vllm")
    assert program.plan(first).targets == program.plan(second).targets
    assert first.tensors.keys() == second.tensors.keys()
    assert all(a.read_bytes() != b.read_bytes() for a, b in _shards(tmp_path))


def _shards(folder: Path) -> list[tuple[Path, Path]]:
    return [(path, folder / "1" / path.name) for path in sorted((folder / "0").glob("*.safetensors"))]


def _result(**changes: object) -> dict[str, object]:
    report = {"rank": 0, "delegated": 0, "fell_back": None, "proved": 3}
    logprobs = torch.arange(6.0).reshape(2, 3)
    return {"hashes": [{"a": "1"}], "reports": [report], "logprobs": logprobs, **changes}


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        ({}, {}, None),
        ({"hashes": [{"a": "2"}]}, {}, "the parameters differ before post-processing"),
        ({"hashes": [{}]}, {"hashes": [{}]}, "a worker has no parameters"),
        ({"logprobs": torch.ones(2, 3)}, {}, "the log probabilities differ"),
        ({"logprobs": torch.ones(2, 3)}, {"logprobs": torch.ones(2, 3)}, "the log probabilities say nothing"),
        ({"reports": [{"rank": 0, "delegated": 1, "fell_back": None, "proved": 3}]}, {}, "worker 0 reports"),
        ({}, {"reports": [{}]}, "mapper took part in a load of vLLM's own"),
    ],
)
def test_faults_of_a_load_are_seen(ours: dict[str, object], theirs: dict[str, object], expected: str | None) -> None:
    results = {"mapper": _result(**ours), "safetensors": _result(**{"reports": [None], **theirs})}
    faults = SCENARIOS[0].faults(results)
    assert faults == [] if expected is None else [each for each in faults if each.startswith(expected)]
