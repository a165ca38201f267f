"""What vLLM's own loaders left in every parameter of every rank, against a load from files and from a stream."""

from collections.abc import Iterator
from functools import cache

import pytest
import torch

from mapper.checkpoint import Checkpoint
from mapper.compiler import Program, compile
from mapper.layout import Layout
from mapper.load import Loader
from mapper.plan.targets import DeclaredTarget
from mapper.report import check
from mapper.spec import load_spec
from mapper.transfer.bind import declare
from tests.oracle.families import family_tensors, write_family
from tests.oracle.goldens import GoldenRank, compare, family_names, iter_ranks, layout_text, sentinel_tensors

REPLICAS = "tp=2,pp=1,dp=1,ep=2,redundant_experts=4"
# Ranks of which a part is not compared, with the reason. Where vLLM's bytes are ours after all, the entry has to go.
NOT_COMPARED = {
    f"{family} vllm-mtp {REPLICAS} rank 1": "vLLM 0.32 leaves the replicas of experts in a draft unloaded; we load them"
    for family in ("deepseek_v3_mtp", "deepseek_v3_fp8_mtp")
}
# Per family: the ranks and the parameters compared.
COMPARED = {
    "deepseek_v2": (55, 1560),
    "deepseek_v2_lite": (55, 1440),
    "deepseek_v3": (55, 2760),
    "deepseek_v3_fp8": (55, 2520),
    "deepseek_v3_fp8_mtp": (72, 2116),
    "deepseek_v3_mtp": (72, 1980),
}
NUM_RANKS, NUM_PARAMETERS = 364, 12376


@cache
def ranks_of(family: str) -> list[GoldenRank]:
    return list(iter_ranks(family))


@cache
def layouts_of(family: str) -> dict[tuple[str, str], dict[int, GoldenRank]]:
    """Return the ranks by layout and runtime."""
    layouts: dict[tuple[str, str], dict[int, GoldenRank]] = {}
    for rank in ranks_of(family):
        layouts.setdefault((layout_text(rank), rank.runtime), {})[rank.rank] = rank
    return layouts


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    folder = tmp_path_factory.mktemp("families")
    return {family: Checkpoint.open(write_family(family, folder / family)) for family in family_names()}


def programs_of(family: str, checkpoint: Checkpoint) -> Iterator[tuple[Program, GoldenRank]]:
    for (layout, runtime), ranks in layouts_of(family).items():
        spec = load_spec("deepseek_v2")
        program = compile(spec, config=checkpoint.config or {}, runtime=runtime, layout=Layout.parse(layout))
        yield from ((program.at_rank(number), rank) for number, rank in ranks.items())


def model_of(rank: GoldenRank) -> dict[str, torch.Tensor]:
    """Return the rank's parameters under all of their names, every byte the sentinel."""
    tensors = sentinel_tensors(rank)
    return tensors | {alias: tensors[name] for alias, name in rank.aliases}


@pytest.mark.parametrize("family", COMPARED)
def test_files_and_stream_leave_the_bytes_that_vllm_left(family: str, checkpoints: dict[str, Checkpoint]) -> None:
    checkpoint = checkpoints[family]
    reversed_stream = list(family_tensors(family).items())[::-1]
    num_ranks = num_parameters = 0
    for program, rank in programs_of(family, checkpoint):
        from_files, from_stream = model_of(rank), model_of(rank)
        report = Loader(program, from_files).load(checkpoint)
        with Loader(program, from_stream).update() as session:
            session.feed_all(reversed_stream)
            streamed = session.finish()
        for tensors in (from_files, from_stream):
            is_partly_compared = str(rank) in NOT_COMPARED
            assert compare(rank, tensors, untouched="any" if is_partly_compared else "sentinel") == [], str(rank)
            if is_partly_compared:
                assert compare(rank, tensors) != [], f"{rank} is as vLLM left it"
        assert (report.targets, streamed.targets) == (len(rank.params), len(rank.params)), str(rank)
        assert report.sources == streamed.sources == len(reversed_stream)
        assert report.bytes_padded == streamed.bytes_padded
        num_ranks += 1
        num_parameters += len(rank.params)
    assert (num_ranks, num_parameters) == COMPARED[family]


@pytest.mark.parametrize("family", COMPARED)
def test_check_agrees_with_the_parameters_of_every_layout(family: str, checkpoints: dict[str, Checkpoint]) -> None:
    checkpoint = checkpoints[family]
    for (layout, runtime), ranks in layouts_of(family).items():
        program = compile(
            load_spec("deepseek_v2"), config=checkpoint.config or {}, runtime=runtime, layout=Layout.parse(layout)
        )
        targets: list[dict[str, DeclaredTarget]] = [
            declare(model_of(ranks[number])) if number in ranks else {} for number in range(program.layout.num_ranks)
        ]
        report = check(program, checkpoint, ranks=sorted(ranks), targets=targets)
        assert report.findings == ()
        assert report.ok
        num_parameters = sum(len(rank.params) for rank in ranks.values())
        counts = report.targets
        assert (counts.total, counts.complete, counts.kept, counts.incomplete) == (num_parameters, num_parameters, 0, 0)
        assert report.sources.unknown == 0
        assert report.targets_declared_by == "model"


def test_totals_are_all_ranks_and_every_exemption_is_one_of_them() -> None:
    assert set(COMPARED) == set(family_names())
    compared = list(COMPARED.values())
    assert (sum(ranks for ranks, _ in compared), sum(number for _, number in compared)) == (NUM_RANKS, NUM_PARAMETERS)
    every = {str(rank) for family in COMPARED for rank in ranks_of(family)}
    assert len(every) == NUM_RANKS
    assert set(NOT_COMPARED) - every == set()
    texts = {layout_text(rank) for family in COMPARED for rank in ranks_of(family)}
    assert {text for text in texts if "redundant_experts" in text or "placement" in text} == {
        REPLICAS,
        "tp=2,pp=2,dp=1,ep=2,redundant_experts=4",
        "tp=4,pp=1,dp=1,ep=4,redundant_experts=4",
        "tp=2,pp=1,dp=1,ep=2,placement=round_robin",
        "tp=4,pp=1,dp=1,ep=4,placement=round_robin",
    }


def test_one_element_off_is_seen(checkpoints: dict[str, Checkpoint]) -> None:
    family = "deepseek_v3"
    program, rank = next(programs_of(family, checkpoints[family]))
    tensors = model_of(rank)
    Loader(program, tensors).load(checkpoints[family])
    name = rank.params[-1].name
    tensors[name].view(torch.uint8).reshape(-1)[0] ^= 1
    assert [each.partition(":")[0] for each in compare(rank, tensors)] == [name]
