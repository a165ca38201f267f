"""Every rank that vLLM's own loaders were recorded on, through the plug-in's path: from what the engine says to the bytes."""

from collections.abc import Iterator

import pytest
import torch

from mapper.checkpoint import Checkpoint
from mapper.integrations.vllm.engine import SHOWN_OPTIONS, Engine, layout_of, options_of, rank_of
from mapper.integrations.vllm.load import Fallback, load, shapes_of
from mapper.integrations.vllm.settings import settings_of
from tests.modules import module_of
from tests.oracle.families import FAMILIES, write_family
from tests.oracle.goldens import GoldenRank, compare, sentinel_tensors
from tests.test_vllm_goldens import (
    COMPARED,
    REPLICAS_UNLOADED,
    architecture_of,
    modes_of,
    ranks_of,
    replicas_of,
    spec_of,
)
from tests.test_vllm_goldens import layout_of as golden_layout

DRAFTS = {"vllm-mtp": "DeepSeekMTPModel", "vllm-dspark": "DSparkDraftModel"}


def whole_is_refused() -> set[str]:
    pytest.fail("the model was left to vLLM's own loader")


def part_is_refused(weights: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
    pytest.fail("tensors were handed over to vLLM's own loader")


REFUSED = Fallback(whole_is_refused, part_is_refused)


def engine_of(rank: GoldenRank) -> Engine:
    """Return what vLLM says of itself on a rank; a draft's architecture is not that of its checkpoint."""
    architecture = architecture_of(rank.family)
    layout = golden_layout(rank)
    return Engine(
        version="0.32.0",
        architectures=(DRAFTS.get(rank.runtime, architecture),),
        config=FAMILIES[rank.family].config,
        tp=rank.tp,
        pp=rank.pp,
        tp_rank=rank.rank % rank.tp,
        pp_rank=rank.rank // rank.tp,
        has_expert_parallelism=rank.ep,
        redundant_experts=layout.redundant_experts,
        placement=layout.placement,
        mega_moe=rank.mega,
    )


@pytest.mark.parametrize("family", COMPARED)
def test_engine_leaves_the_bytes_that_vllm_left_with_nothing_delegated(family: str, tmp_path: pytest.TempPathFactory) -> None:
    checkpoint = Checkpoint.open(write_family(family, tmp_path / family))
    num_ranks = num_parameters = num_kept = 0
    for rank in ranks_of(family):
        model = module_of(sentinel_tensors(rank), aliases=rank.aliases, buffers={"model.attn._k_scale": torch.ones(())})
        report = load(engine_of(rank), settings_of({"fallback": False}), model, checkpoint, REFUSED)
        tensors = dict(model.named_parameters(remove_duplicate=False))
        kept = {name for name, kind in report.parameters.items() if kind == "kept"}
        modes = modes_of(rank, kept)
        if str(rank) in REPLICAS_UNLOADED:
            modes |= dict.fromkeys(replicas_of(rank), "any")
        assert compare(rank, tensors, untouched=modes) == [], str(rank)
        assert report.counts["delegated"] == 0
        assert (report.runtime, report.rank, report.handed_over) == (rank.runtime, rank.rank, 0)
        num_ranks += 1
        num_parameters += len(rank.params)
        num_kept += len(kept - {alias for alias, _ in rank.aliases})
    assert (num_ranks, num_parameters, num_kept) == COMPARED[family]


@pytest.mark.parametrize("family", ["deepseek_v4_fp4", "gpt_oss_mxfp4"])
def test_paddings_of_kernels_are_seen_in_the_parameters(family: str) -> None:
    """The sizes follow from the model alone: no rank of any layout contradicts them."""
    spec, seen = spec_of(family), set()
    for rank in ranks_of(family):
        engine = engine_of(rank)
        assert rank_of(engine) == rank.rank
        assert str(layout_of(engine)) == str(golden_layout(rank))
        options = options_of(engine, spec, shapes_of(module_of(sentinel_tensors(rank))))
        seen |= options.keys()
        assert options.get("sink_slots", 64) == 64
        assert options.get("mega_moe", False) == rank.mega
    assert seen == {*SHOWN_OPTIONS, "mega_moe"} & set(spec.options)
