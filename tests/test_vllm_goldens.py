"""What vLLM's own loaders left in every parameter of every rank, against a load from files and from a stream."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from mapper.checkpoint import Checkpoint
from mapper.compiler import Program, compile
from mapper.diagnostics import MapperError
from mapper.layout import Layout
from mapper.load import Loader
from mapper.plan.targets import DeclaredTarget
from mapper.report import LoadReport, check
from mapper.spec import load_spec
from mapper.spec.model import Spec
from mapper.transfer.bind import declare
from tests.oracle.families import FAMILIES, family_tensors, write_family
from tests.oracle.goldens import (
    GoldenRank,
    Untouched,
    compare,
    failed_ranks,
    family_names,
    iter_ranks,
    layout_text,
    sentinel_tensors,
)

SINGLE = "tp=1,pp=1,dp=1,ep=1"
# Ranks whose replicas of experts are not compared with vLLM's bytes but with the expert itself, and why. Where vLLM's
# bytes are ours after all, the entry has to go.
DRAFT = "vLLM 0.32 leaves the replicas of experts in a draft unloaded; we load them"
TARGET = "vLLM 0.32 leaves the replicas of V4's experts unloaded, but for mega MoE; we load them"
DRAFT_RANKS = ("vllm-mtp tp=2,pp=1,dp=1,ep=2,redundant_experts=4 rank 1",)
TARGET_RANKS = (
    "vllm tp=2,pp=1,dp=1,ep=2,redundant_experts=4 rank 1",
    "vllm tp=2,pp=2,dp=1,ep=2,redundant_experts=4 rank 1",
    "vllm tp=2,pp=2,dp=1,ep=2,redundant_experts=4 rank 3",
    "vllm tp=4,pp=1,dp=1,ep=4,redundant_experts=4 rank 2",
    "vllm tp=4,pp=1,dp=1,ep=4,redundant_experts=4 rank 3",
)
V4 = ("deepseek_v4_bf16", "deepseek_v4_fp8", "deepseek_v4_fp4", "deepseek_v4_dspark")
DRAFTS = (
    "deepseek_v3_mtp",
    "deepseek_v3_fp8_mtp",
    "deepseek_v32",
    "deepseek_v32_fp8",
    "deepseek_v4_bf16",
    "deepseek_v4_fp8",
    "deepseek_v4_fp4",
    "deepseek_v4_fp4_odd",
    "glm4_moe",
)
REPLICAS_UNLOADED = {
    **{f"{family} {rank}": DRAFT for family in DRAFTS for rank in DRAFT_RANKS},
    **{f"{family} {rank}": TARGET for family in V4 for rank in TARGET_RANKS},
    **{f"deepseek_v4_fp4_odd {rank}": TARGET for rank in TARGET_RANKS[:3]},
}
# What vLLM silently leaves out of account for a model, by architecture; mapper refuses a layout that asks for it.
IGNORED = {
    "DeepseekV4ForCausalLM": {"placement": "M333"},
    "Glm4MoeForCausalLM": {"placement": "M333"},
    "MixtralForCausalLM": {"placement": "M333"},
    "Qwen2MoeForCausalLM": {"placement": "M333", "redundant": "M332"},
    "Qwen3MoeForCausalLM": {"placement": "M333"},
    "GptOssForCausalLM": {"placement": "M333", "redundant": "M332"},
}
# Families that we refuse whole, and why.
REFUSED = {
    "deepseek_v3_fp8_mis": ("M331", "a scale block of kv_a starts inside one of q_a; vLLM fails as well"),
    "deepseek_v3_fp8_mis2": ("M331", "the same; vLLM loads the scales of kv_a's rows one block too far down"),
}
# Parameters that we keep and vLLM writes, one part's after the other's, and reads nowhere: the shape before packing.
UNREAD = ".weight_shape"
# Families in which every alias is a target of the spec: a tied head.
TIED = ("gemma3",)
# Ranks that vLLM could not build or load, per family.
FAILED = {"deepseek_v3_fp8_mis": 55, "deepseek_v3_int4": 10, "gpt_oss_mxfp4": 10, "qwen3_fp8_halfblock": 18}
# Per family: the ranks and the parameters compared, and how many of these no file fills.
COMPARED = {
    "deepseek_v2": (55, 1560, 0),
    "deepseek_v2_lite": (55, 1440, 0),
    "deepseek_v3": (55, 2760, 0),
    "deepseek_v32": (72, 2528, 0),
    "deepseek_v32_fp8": (72, 2601, 0),
    "deepseek_v3_fp8": (55, 2520, 0),
    "deepseek_v3_fp8_mtp": (72, 2116, 0),
    "deepseek_v3_fp8_odd": (23, 656, 0),
    "deepseek_v3_int4": (45, 1568, 0),
    "deepseek_v3_mtp": (72, 1980, 0),
    "deepseek_v4_bf16": (72, 4932, 0),
    "deepseek_v4_dspark": (70, 5760, 30),
    "deepseek_v4_fp4": (91, 8695, 0),
    "deepseek_v4_fp4_odd": (47, 2530, 0),
    "deepseek_v4_fp8": (72, 6462, 0),
    "glm4_moe": (72, 1843, 0),
    "gpt_oss_bf16": (55, 1205, 0),
    "gpt_oss_mxfp4": (54, 1392, 0),
    "llama": (21, 294, 0),
    "mixtral": (55, 725, 0),
    "qwen2_moe": (55, 1485, 0),
    "qwen3_moe": (55, 1205, 0),
    "qwen3_moe_fp8": (55, 1525, 320),
    "gemma3": (21, 462, 0),
    "llama_fp8_tensor": (21, 546, 56),
    "llama_fp8_channel": (21, 490, 112),
    "llama_fp8_tensor_of_one": (21, 602, 168),
    "llama_awq": (21, 434, 0),
    "llama_gptq": (21, 434, 0),
    "llama_int4": (21, 602, 280),
    "llama_nvfp4": (21, 658, 56),
    "phi3": (21, 294, 0),
    "qwen3_fp8": (21, 490, 112),
    "qwen3_fp8_halfblock": (3, 70, 16),
}
NUM_RANKS, NUM_PARAMETERS = 1563, 62864


@cache
def ranks_of(family: str) -> list[GoldenRank]:
    return list(iter_ranks(family))


@cache
def settings_of(family: str) -> list[dict[int, GoldenRank]]:
    """Return the ranks by number, per engine that was started."""
    settings: dict[str, dict[int, GoldenRank]] = {}
    for rank in ranks_of(family):
        settings.setdefault(rank.setting, {})[rank.rank] = rank
    return list(settings.values())


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    folder = tmp_path_factory.mktemp("families")
    return {family: Checkpoint.open(write_family(family, folder / family)) for family in COMPARED}


def architecture_of(family: str) -> str:
    return str(FAMILIES[family].config["architectures"][0])


def spec_of(family: str) -> Spec:
    return load_spec(architecture_of(family))


def layout_of(rank: GoldenRank) -> Layout:
    """Return the layout that vLLM loaded, without what it ignored."""
    ignored = IGNORED.get(architecture_of(rank.family), {})
    placement = "linear" if "placement" in ignored else rank.placement
    redundant = 0 if "redundant" in ignored else rank.redundant
    return Layout.parse(layout_text(replace(rank, placement=placement, redundant=redundant)))


def program_of(rank: GoldenRank, layout: Layout | None = None) -> Program:
    config = FAMILIES[rank.family].config
    layout = layout_of(rank) if layout is None else layout
    return compile(spec_of(rank.family), config=config, runtime=rank.runtime, layout=layout, options=rank.options)


def model_of(rank: GoldenRank) -> dict[str, torch.Tensor]:
    """Return the rank's parameters under all of their names, every byte the sentinel."""
    tensors = sentinel_tensors(rank)
    return tensors | {alias: tensors[name] for alias, name in rank.aliases}


def modes_of(rank: GoldenRank, kept: set[str]) -> dict[str, Untouched]:
    """Return what is expected where vLLM wrote nothing: nothing in a kept parameter, else the padding it started with."""
    return {param.name: "sentinel" if param.name in kept else "init" for param in rank.params}


def loaded(program: Program, rank: GoldenRank, checkpoint: Checkpoint) -> tuple[dict[str, torch.Tensor], LoadReport]:
    tensors = model_of(rank)
    return tensors, Loader(program.at_rank(rank.rank), tensors).load(checkpoint)


def same_bytes(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.equal(first.reshape(-1).view(torch.uint8), second.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("family", COMPARED)
def test_files_leave_the_bytes_that_vllm_left(family: str, checkpoints: dict[str, Checkpoint]) -> None:
    checkpoint = checkpoints[family]
    num_ranks = num_parameters = num_kept = 0
    for ranks in settings_of(family):
        program = program_of(next(iter(ranks.values())))
        for rank in ranks.values():
            tensors, report = loaded(program, rank, checkpoint)
            modes = modes_of(rank, set(report.kept))
            if str(rank) in REPLICAS_UNLOADED:
                replicas = replicas_of(rank)
                assert {each.partition(":")[0] for each in compare(rank, tensors, untouched=modes)} == replicas, str(rank)
                modes |= dict.fromkeys(replicas, "any")
            differences = compare(rank, tensors, untouched=modes)
            unread = {name for name in report.kept if name.endswith(UNREAD)}
            assert {each.partition(":")[0] for each in differences} == unread, (str(rank), differences)
            num_filled = report.targets - report.tied + len(report.kept)
            assert (num_filled, report.sources) == (len(rank.params), len(checkpoint.tensors)), str(rank)
            num_ranks += 1
            num_parameters += len(rank.params)
            num_kept += len(report.kept)
    assert (num_ranks, num_parameters, num_kept) == COMPARED[family]


def replicas_of(rank: GoldenRank) -> set[str]:
    """Return the parameters and aliases of the rank that have slots of experts which vLLM left alone."""
    params = {param.name for param in rank.params if ".experts.routed_experts.w" in param.name and param.untouched}
    return params | {alias for alias, name in rank.aliases if name in params}


@pytest.mark.parametrize("family", [*DRAFTS, "deepseek_v4_dspark"])
def test_replicas_that_vllm_leaves_unloaded_hold_their_expert(family: str, checkpoints: dict[str, Checkpoint]) -> None:
    checkpoint, num_experts = checkpoints[family], FAMILIES[family].config["n_routed_experts"]
    single: dict[str, dict[str, torch.Tensor]] = {}
    for ranks in settings_of(family):
        rank = next(iter(ranks.values()))
        if layout_text(rank) == SINGLE and not rank.mega:
            single[rank.runtime] = loaded(program_of(rank), rank, checkpoint)[0]
    num_slots = 0
    for rank in ranks_of(family):
        if str(rank) in REPLICAS_UNLOADED:
            tensors, _ = loaded(program_of(rank), rank, checkpoint)
            for name in replicas_of(rank):
                slots, experts = tensors[name], single[rank.runtime][name]
                first = rank.rank % rank.tp * len(slots)
                for number, slot in enumerate(slots):
                    expected = experts[(first + number) % num_experts]
                    assert same_bytes(slot, expected), f"{rank} {name}[{number}]"
                    num_slots += 1
    assert num_slots > 0


@pytest.mark.parametrize("family", COMPARED)
def test_a_reversed_stream_leaves_the_same_bytes(family: str, checkpoints: dict[str, Checkpoint]) -> None:
    """The last rank of each setting with two ranks along tp, which covers all runtimes, stages, experts and options."""
    reversed_stream = list(family_tensors(family).items())[::-1]
    for ranks in settings_of(family):
        rank = ranks[max(ranks)]
        if rank.tp != 2:
            continue
        program = program_of(rank)
        tensors, report = loaded(program, rank, checkpoints[family])
        streamed = model_of(rank)
        with Loader(program.at_rank(rank.rank), streamed).update() as session:
            session.feed_all(reversed_stream)
            finished = session.finish()
        for name, tensor in tensors.items():
            assert same_bytes(streamed[name], tensor), f"{rank} {name}"
        assert (finished.sources, finished.targets, finished.kept) == (report.sources, report.targets, report.kept)
        assert finished.bytes_padded == report.bytes_padded


@pytest.mark.parametrize("family", COMPARED)
def test_check_agrees_with_the_parameters_of_every_setting(family: str, checkpoints: dict[str, Checkpoint]) -> None:
    num_kept = 0
    for ranks in settings_of(family):
        program = program_of(next(iter(ranks.values())))
        targets: list[dict[str, DeclaredTarget]] = [
            declare(model_of(ranks[number])) if number in ranks else {} for number in range(program.layout.num_ranks)
        ]
        report = check(program, checkpoints[family], ranks=sorted(ranks), targets=targets)
        assert report.findings == ()
        assert report.ok
        num_parameters = sum(len(rank.params) + (len(rank.aliases) if family in TIED else 0) for rank in ranks.values())
        counts = report.targets
        assert (counts.total, counts.complete + counts.kept, counts.incomplete) == (num_parameters, num_parameters, 0)
        assert report.sources.unknown == 0
        assert report.targets_declared_by == "model"
        num_kept += counts.kept
    assert num_kept == COMPARED[family][2]


@pytest.mark.parametrize("family", [each for each in COMPARED if architecture_of(each) in IGNORED])
def test_a_layout_with_what_vllm_ignores_is_refused(family: str) -> None:
    refused: set[str] = set()
    for ranks in settings_of(family):
        rank = next(iter(ranks.values()))
        if layout_of(rank) != Layout.parse(layout_text(rank)):
            with pytest.raises(MapperError) as raised:
                program_of(rank, Layout.parse(layout_text(rank)))
            refused |= {each.code for each in raised.value.diagnostics}
    failed_in_vllm = {"M332"} if family == "gpt_oss_mxfp4" else set()
    assert refused == set(IGNORED[architecture_of(family)].values()) - failed_in_vllm


@pytest.mark.parametrize("family", REFUSED)
def test_blocks_that_start_inside_a_block_are_refused_on_every_layout(family: str) -> None:
    code, _ = REFUSED[family]
    layouts = {layout_text(rank) for rank in ranks_of(family)} | {failed.text for failed in failed_ranks(family)}
    assert len(layouts) == 15
    for layout in layouts:
        with pytest.raises(MapperError) as raised:
            compile(spec_of(family), config=FAMILIES[family].config, runtime="vllm", layout=Layout.parse(layout))
        assert {each.code for each in raised.value.diagnostics} == {code}


@pytest.mark.parametrize(("family", "code"), [("gpt_oss_mxfp4", "M332"), ("deepseek_v3_int4", "M302")])
def test_redundant_experts_that_fail_in_vllm_are_refused(family: str, code: str) -> None:
    config = FAMILIES[family].config
    for layout in {each.text for each in failed_ranks(family)}:
        with pytest.raises(MapperError) as raised:
            compile(spec_of(family), config=config, runtime="vllm", layout=Layout.parse(layout))
        assert [each.code for each in raised.value.diagnostics] == [code]


def test_a_head_of_half_a_block_fails_in_vllm_where_it_is_cut_and_is_refused() -> None:
    config = FAMILIES["qwen3_fp8_halfblock"].config
    layouts = {each.text for each in failed_ranks("qwen3_fp8_halfblock")}
    assert layouts == {f"tp={tp},pp={pp},dp=1,ep=1" for tp in (2, 4) for pp in (1, 2)}
    for layout in layouts:
        with pytest.raises(MapperError) as raised:
            compile(spec_of("qwen3_fp8_halfblock"), config=config, runtime="vllm", layout=Layout.parse(layout))
        assert {each.code for each in raised.value.diagnostics} == {"M330"}


def test_totals_are_all_ranks_and_every_exemption_is_one_of_them() -> None:
    assert set(COMPARED) | set(REFUSED) == set(family_names()) == set(FAMILIES)
    compared = list(COMPARED.values())
    assert (sum(ranks for ranks, _, _ in compared), sum(number for _, number, _ in compared)) == (NUM_RANKS, NUM_PARAMETERS)
    every = {str(rank) for family in COMPARED for rank in ranks_of(family)}
    assert len(every) == NUM_RANKS
    assert set(REPLICAS_UNLOADED) - every == set()
    assert {family: len(failed_ranks(family)) for family in family_names() if failed_ranks(family)} == FAILED
    texts = {layout_text(rank) for family in COMPARED for rank in ranks_of(family)}
    assert {text for text in texts if "redundant_experts" in text or "placement" in text} == {
        "tp=2,pp=1,dp=1,ep=2,redundant_experts=2",
        "tp=2,pp=2,dp=1,ep=2,redundant_experts=2",
        "tp=4,pp=1,dp=1,ep=4,redundant_experts=2",
        "tp=2,pp=1,dp=1,ep=2,redundant_experts=4",
        "tp=2,pp=2,dp=1,ep=2,redundant_experts=4",
        "tp=4,pp=1,dp=1,ep=4,redundant_experts=4",
        "tp=2,pp=1,dp=1,ep=2,placement=round_robin",
        "tp=4,pp=1,dp=1,ep=4,placement=round_robin",
    }


def test_one_element_off_is_seen(checkpoints: dict[str, Checkpoint]) -> None:
    family = "deepseek_v3"
    rank = ranks_of(family)[0]
    tensors, _ = loaded(program_of(rank), rank, checkpoints[family])
    name = rank.params[-1].name
    tensors[name].view(torch.uint8).reshape(-1)[0] ^= 1
    assert [each.partition(":")[0] for each in compare(rank, tensors)] == [name]
