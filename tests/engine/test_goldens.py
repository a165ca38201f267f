"""Every rank that vLLM's own loaders were recorded on, through the plug-in's path: from what the engine says to the bytes."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mapper.checkpoint import Checkpoint
from mapper.compiler import compile
from mapper.integrations.vllm.engine import SHOWN_OPTIONS, Engine, layout_of, options_of, rank_of
from mapper.integrations.vllm.load import Fallback, load, shapes_of
from mapper.integrations.vllm.settings import settings_of
from mapper.layout import Layout
from mapper.load import Loader
from mapper.spec import load_spec
from tests.modules import module_of
from tests.oracle.architectures import FOLDER, entry_family
from tests.oracle.families import FAMILIES, write_checkpoint, write_family
from tests.oracle.goldens import GoldenRank, compare, iter_ranks, layout_text, sentinel_tensors
from tests.oracle.tensors import Config
from tests.test_vllm_architectures import COMPARED as ARCHITECTURES
from tests.test_vllm_goldens import (
    COMPARED,
    REPLICAS_UNLOADED,
    UNREAD,
    modes_of,
    ranks_of,
    replicas_of,
    same_bytes,
    spec_of,
)
from tests.test_vllm_goldens import layout_of as golden_layout

DRAFTS = {"vllm-mtp": "DeepSeekMTPModel", "vllm-dspark": "DSparkDraftModel"}


def whole_is_refused() -> set[str]:
    pytest.fail("the model was left to vLLM's own loader")


def part_is_refused(weights: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
    pytest.fail("tensors were handed over to vLLM's own loader")


REFUSED = Fallback(whole_is_refused, part_is_refused)


def engine_of(rank: GoldenRank, config: Config, layout: Layout) -> Engine:
    """Return what vLLM says of itself on a rank; a draft's architecture is not that of its checkpoint."""
    return Engine(
        version="0.32.0",
        architectures=(DRAFTS.get(rank.runtime, str(config["architectures"][0])),),
        config=config,
        tp=rank.tp,
        pp=rank.pp,
        tp_rank=rank.rank % rank.tp,
        pp_rank=rank.rank // rank.tp,
        has_expert_parallelism=rank.ep,
        redundant_experts=layout.redundant_experts,
        placement=layout.placement,
        mega_moe=rank.mega,
    )


def family_engine(rank: GoldenRank) -> Engine:
    return engine_of(rank, FAMILIES[rank.family].config, golden_layout(rank))


@pytest.mark.parametrize("family", COMPARED)
def test_engine_leaves_the_bytes_that_vllm_left_with_nothing_delegated(family: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_family(family, tmp_path / family))
    num_ranks = num_parameters = num_kept = 0
    for rank in ranks_of(family):
        model = module_of(sentinel_tensors(rank), aliases=rank.aliases, buffers={"model.attn._k_scale": torch.ones(())})
        report = load(family_engine(rank), settings_of({"fallback": False}), model, checkpoint, REFUSED)
        tensors = dict(model.named_parameters(remove_duplicate=False))
        kept = {name for name, kind in report.parameters.items() if kind == "kept"}
        modes = modes_of(rank, kept)
        if str(rank) in REPLICAS_UNLOADED:
            modes |= dict.fromkeys(replicas_of(rank), "any")
        own = replace(rank, extra=())  # what is derived after a load vLLM derives itself
        differences = {each.partition(":")[0] for each in compare(own, tensors, untouched=modes)}
        assert differences == {name for name in kept if name.endswith(UNREAD)}, str(rank)
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
        engine = family_engine(rank)
        assert rank_of(engine) == rank.rank
        assert str(layout_of(engine)) == str(golden_layout(rank))
        options = options_of(engine, spec, shapes_of(module_of(sentinel_tensors(rank))))
        seen |= options.keys()
        assert options.get("sink_slots", 64) == 64
        assert options.get("mega_moe", False) == rank.mega
    assert seen == {*SHOWN_OPTIONS, "mega_moe"} & set(spec.options)


@pytest.mark.parametrize("entry", ARCHITECTURES)
def test_architecture_is_loaded_as_without_an_engine(entry: str, tmp_path: Path) -> None:
    """The last rank of each layout with two ranks along tp; that a load without an engine is right is tested with it."""
    family = entry_family(entry)
    checkpoint = Checkpoint.open(write_checkpoint(family, tmp_path / "checkpoint"))
    last = {layout_text(rank): rank for rank in iter_ranks(entry, FOLDER) if rank.tp == 2}
    assert last
    for text, rank in last.items():
        layout = Layout.parse(text)
        model = module_of(sentinel_tensors(rank), aliases=rank.aliases)
        report = load(engine_of(rank, family.config, layout), settings_of({"fallback": False}), model, checkpoint, REFUSED)
        assert (report.counts["delegated"], report.rank, report.layout) == (0, rank.rank, text)
        plain = sentinel_tensors(rank)
        plain |= {alias: plain[name] for alias, name in rank.aliases}
        spec = load_spec(ARCHITECTURES[entry][0])
        Loader(compile(spec, config=family.config, runtime="vllm", layout=layout, rank=rank.rank), plain).load(checkpoint)
        assert all(same_bytes(plain[name], each) for name, each in model.named_parameters()), f"{entry} {rank}"
