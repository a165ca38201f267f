"""Shared experts fused into the routed ones: each tensor of theirs lands in the slots behind, in the target and in its draft.

vLLM's loader of the draft once left them out: with fusion on, it looked for `mtp_block.mlp.shared_experts.down_proj` with its
scale, which such a model does not have, and stopped with a KeyError.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from math import gcd

import pytest
import torch

from mapper.checkpoint import Checkpoint
from mapper.compiler import Program, compile
from mapper.diagnostics import MapperError
from mapper.layout import Layout
from mapper.load import Loader
from mapper.report.layouts import ILLEGAL, iter_layouts
from mapper.spec import load_spec
from tests.loads import Tensors, prefilled, raw
from tests.manifests import V3
from tests.oracle.families import FAMILIES, Config, Family, deepseek_headers, tensors_of, write_checkpoint

BLOCK = 128
PREFIXES = {  # of the layers with experts: in the checkpoint, and in the model
    "vllm": {"model.layers.1.mlp": "model.layers.1.mlp"},
    "vllm-mtp": {"model.layers.2.mlp": "model.layers.2.mtp_block.mlp"},
}
LEAVES = ("weight", "weight_scale_inv")
# Redundant experts before them, and slices of half a block, which refine the grid of scales.
MORE = ("tp=2,ep=2,redundant_experts=4", "tp=2,pp=2,ep=2,redundant_experts=2", "tp=8", "tp=4,dp=2", "tp=4,dp=2,ep=8")


@cache
def family(num_shared: int) -> Family:
    """Return two layers, the second with experts, and a draft, in fp8 of whole and of refined blocks."""
    config: Config = {**FAMILIES["deepseek_v3_fp8_mtp"].config, "n_shared_experts": num_shared}
    return Family(config, deepseek_headers)


@cache
def sources(num_shared: int) -> Tensors:
    return tensors_of(family(num_shared))


@pytest.fixture(scope="module", params=[1, 2], ids=["one", "two"])
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Checkpoint]:
    num_shared = request.param
    folder = write_checkpoint(family(num_shared), tmp_path_factory.mktemp("fused") / str(num_shared))
    return num_shared, Checkpoint.open(folder)


def programs(config: Config, runtime: str) -> Iterator[Program]:
    """Yield the program with fused shared experts of every rank of every legal layout of up to 4 ranks, and of MORE."""
    spec = load_spec("deepseek_v2")
    for layout in (*iter_layouts(4), *map(Layout.parse, MORE)):
        try:
            program = compile(spec, config=config, runtime=runtime, layout=layout, options={"fuse_shared_experts": True})
        except MapperError as error:
            if not {each.code for each in error.diagnostics} <= ILLEGAL:
                raise
        else:
            yield from map(program.at_rank, range(layout.num_ranks))


def expected_slot(config: Config, read: Tensors, prefix: str, shared: int, size: int, position: int) -> Tensors:
    """Return what one shared expert's slot holds at a place of the experts' own axis, a scale finer where a cut asks for it."""
    width = config["moe_intermediate_size"] // size
    found: Tensors = {}
    for leaf in LEAVES:
        rows = config["moe_intermediate_size"] // (1 if leaf == "weight" else BLOCK)
        gate, up = (read[f"{prefix}.{part}_proj.{leaf}"][shared * rows : (shared + 1) * rows] for part in ("gate", "up"))
        down = read[f"{prefix}.down_proj.{leaf}"][:, shared * rows : (shared + 1) * rows]
        if leaf == "weight":
            cut = slice(position * width, (position + 1) * width)
        else:
            block = gcd(BLOCK, width)
            gate, up, down = (
                each.repeat_interleave(BLOCK // block, 0).repeat_interleave(BLOCK // block, 1) for each in (gate, up, down)
            )
            cut = slice(position * width // block, (position + 1) * width // block)
        found[f"w13_{leaf}"] = torch.cat([gate[cut], up[cut]])
        found[f"w2_{leaf}"] = down[:, cut]
    return found


@pytest.mark.parametrize("runtime", PREFIXES)
def test_every_rank_of_every_small_layout_has_them_in_the_slots_behind(runtime: str, written: tuple[int, Checkpoint]) -> None:
    num_shared, checkpoint = written
    config, read = family(num_shared).config, sources(num_shared)
    ranks = compared = 0
    layouts = set()
    for program in programs(config, runtime):
        plan = program.plan(checkpoint)
        targets = prefilled(plan)
        Loader(program, targets).load(checkpoint)
        ranks += 1
        layouts.add(str(program.layout))
        assert not [name for name in targets if "shared_experts" in name]
        size, position = program.share.coordinate("moe_tp")
        num_routed = len(program.share.slots("expert"))
        for source, target in PREFIXES[runtime].items():
            if f"{target}.experts.routed_experts.w2_weight" not in targets:
                continue  # another stage
            for shared in range(num_shared):
                expected = expected_slot(config, read, f"{source}.shared_experts", shared, size, position)
                for leaf, tensor in expected.items():
                    found = targets[f"{target}.experts.routed_experts.{leaf}"]
                    assert found.shape[0] == num_routed + num_shared
                    where = f"{leaf} of {program.layout} rank {program.rank}"
                    assert raw(found[num_routed + shared]) == raw(tensor), where
                    compared += 1
    assert (len(layouts), ranks, compared) == (23, 83, 67 * 4 * num_shared)


@pytest.mark.parametrize("runtime", PREFIXES)
def test_the_routed_slots_are_those_of_the_model_without_fusion(runtime: str, written: tuple[int, Checkpoint]) -> None:
    num_shared, checkpoint = written
    config = family(num_shared).config
    for fused in programs(config, runtime):
        if fused.rank != fused.layout.num_ranks - 1 or fused.layout not in map(Layout.parse, MORE):
            continue  # the last rank has a slice of everything
        plain = compile(load_spec("deepseek_v2"), config=config, runtime=runtime, layout=fused.layout, rank=fused.rank)
        loaded = [prefilled(program.plan(checkpoint)) for program in (fused, plain)]
        for program, targets in zip((fused, plain), loaded, strict=True):
            Loader(program, targets).load(checkpoint)
        for name, tensor in loaded[0].items():
            assert raw(tensor[: len(loaded[1][name])] if tensor.dim() else tensor) == raw(loaded[1][name]), name
        assert all(".shared_experts." in name for name in loaded[1].keys() - loaded[0].keys())


def test_the_draft_of_v3_has_no_shared_experts_of_its_own() -> None:
    checkpoint = Checkpoint.open(V3)
    options = {"fuse_shared_experts": True}
    program = compile(load_spec("deepseek_v2"), config=checkpoint.config, runtime="vllm-mtp", options=options)
    source = "model.layers.61.mlp.shared_experts.down_proj.weight_scale_inv"
    (step,) = [step for step in program.plan(checkpoint).steps() if step.source == source]
    assert step.target == "model.layers.61.mtp_block.mlp.experts.routed_experts.w2_weight_scale_inv"
    assert step.target_box == ((256, 257), (0, 56), (0, 16))


def test_a_draft_built_without_fusion_is_refused_before_anything_is_written(written: tuple[int, Checkpoint]) -> None:
    num_shared, checkpoint = written
    config = family(num_shared).config
    fused, plain = (
        compile(load_spec("deepseek_v2"), config=config, runtime="vllm-mtp", options={"fuse_shared_experts": each})
        for each in (True, False)
    )
    targets = prefilled(plain.plan(checkpoint))
    before = {name: raw(each) for name, each in targets.items()}
    with pytest.raises(MapperError) as caught:
        Loader(fused, targets).load(checkpoint)
    assert {name: raw(each) for name, each in targets.items()} == before
    subjects = {each.code: each.subject for each in caught.value.diagnostics}
    assert set(subjects) == {"M530", "M532"}
