"""Every single change of deepseek_v2 is found, swaps of equal shape by evidence alone; and what the report says of the others."""

import json
from collections import Counter
from dataclasses import replace

import pytest

import mapper
from mapper.checkpoint import Checkpoint
from mapper.compiler import compile
from mapper.diagnostics import MapperError
from mapper.load import Loader
from mapper.spec.bundled import bundled_ids
from mapper.testing.mutation import Evidence, mutants_of, mutate
from mapper.testing.mutation.trials import iter_trials
from mapper.testing.specs import spec_from
from mapper.testing.strategies import chosen_profile
from tests.oracle.families import FAMILIES, write_family
from tests.oracle.goldens import compare, iter_ranks, layout_text, sentinel_tensors

IS_QUICK = chosen_profile() == "dev"
# What every selection has, and how many of the others a quick one has.
ALWAYS = ("swap sources", "swap any_of", "change pad", "drop units")
ONE_OF = 8
FAMILIES_OF_V2 = ("deepseek_v3_fp8_mtp", "deepseek_v2_lite")
LAYOUTS = ("tp=1,pp=1,dp=1,ep=1", "tp=2,pp=2,dp=1,ep=1", "tp=2,pp=1,dp=1,ep=2")
# Swaps that no case pins and no golden was recorded for: vLLM on CUDA keeps shared experts apart.
UNPINNED = {
    "in the rule for 'experts.routed_experts.w13_{leaf}' 'shared_experts.gate_proj.{leaf}' and 'shared_experts.up_proj.{leaf}' "
    "change places",
}


@pytest.fixture(scope="module")
def goldens(tmp_path_factory):
    """Return evidence that loads tiny checkpoints and compares every byte with what vLLM's own loader left."""
    folder = tmp_path_factory.mktemp("families")
    checkpoints = {family: Checkpoint.open(write_family(family, folder / family)) for family in FAMILIES_OF_V2}
    ranks = [rank for family in FAMILIES_OF_V2 for rank in iter_ranks(family) if layout_text(rank) in LAYOUTS]

    def failures(spec, runtimes):
        for rank in ranks:
            if rank.runtime not in runtimes:
                continue
            tensors = sentinel_tensors(rank)
            model = tensors | {alias: tensors[name] for alias, name in rank.aliases}
            layout = mapper.Layout.parse(layout_text(rank))
            try:
                program = compile(spec, config=FAMILIES[rank.family].config, runtime=rank.runtime, layout=layout, rank=rank.rank)
                Loader(program, model).load(checkpoints[rank.family])
            except MapperError:  # refused by its structure: no value was loaded
                continue
            yield from (f"{rank} {each}" for each in compare(rank, model, untouched="init"))

    return Evidence("bytes of vLLM 0.32.0's own loader", failures)


@pytest.fixture(scope="module")
def report(goldens):
    spec = mapper.load_spec("deepseek_v2")
    every = mutants_of(spec)
    chosen = [each for number, each in enumerate(every) if not IS_QUICK or each.kind in ALWAYS or number % ONE_OF == 0]
    return mutate(spec, mutants=chosen, evidence=[goldens])


def test_the_goldens_speak_for_the_spec_as_it_is(goldens):
    spec = mapper.load_spec("deepseek_v2")
    assert list(goldens.failures(spec, tuple(spec.runtimes))) == []


def test_every_mutant_that_is_another_spec_is_found(report):
    assert {each.mutant.sentence for each in report.survivors} == UNPINNED


def test_swaps_of_equal_shape_are_found_by_evidence_and_never_by_structure(report):
    swaps = [each for each in report.outcomes if each.is_same_shape]
    assert len(swaps) == 5
    assert [each.structure for each in swaps] == [None] * 5
    assert {each.mutant.sentence for each in swaps if each.evidence is None} == UNPINNED
    assert all(each.difference is not None for each in swaps)


def test_a_swap_of_other_shapes_is_found_by_structure(report):
    (swap,) = [each for each in report.outcomes if each.mutant.kind == "swap sources" and not each.is_same_shape]
    assert "'q_a_proj.{leaf}' and 'kv_a_proj_with_mqa.{leaf}'" in swap.mutant.sentence
    assert swap.structure is not None


def test_only_evidence_tells_which_of_two_spellings_counts(report):
    """The draft's own embedding, or the target model's, where a checkpoint has both."""
    swaps = [each for each in report.outcomes if each.mutant.kind == "swap any_of" and not each.is_equivalent]
    assert len(swaps) == 1
    assert swaps[0].structure is None
    assert swaps[0].evidence is not None
    assert swaps[0].evidence.startswith("bytes of vLLM 0.32.0's own loader: ")
