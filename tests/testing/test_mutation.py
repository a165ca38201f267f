"""Every single change of deepseek_v2 is found, swaps of equal shape by evidence alone; and what the report says of them."""

import re
from collections import Counter

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
ALWAYS = ("swap sources", "swap any_of")
ONE_OF = 8
FAMILIES_OF_V2 = ("deepseek_v3_fp8_mtp", "deepseek_v2_lite")
LAYOUTS = ("tp=1,pp=1,dp=1,ep=1", "tp=2,pp=2,dp=1,ep=1", "tp=2,pp=1,dp=1,ep=2")


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
                program = compile(
                    spec, config=FAMILIES[rank.family].config, runtime=rank.runtime, layout=layout, rank=rank.rank
                )
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
    assert [each.mutant.sentence for each in report.survivors] == []


def test_swaps_of_equal_shape_are_found_by_evidence_and_never_by_structure(report):
    swaps = [each for each in report.outcomes if each.is_same_shape]
    assert len(swaps) == 5
    assert [each.structure for each in swaps] == [None] * 5
    assert [each.mutant.sentence for each in swaps if each.evidence is None] == []
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


def test_every_kind_and_place_is_there_and_ids_are_unique():
    for name in bundled_ids():
        mutants = mutants_of(mapper.load_spec(name))
        assert len({each.id for each in mutants}) == len(mutants)
        assert all(each.place.line > 0 and each.runtimes for each in mutants)
    counts = Counter(each.kind for each in mutants_of(mapper.load_spec("deepseek_v2")))
    assert counts == {
        "drop rule": 55, "flip optional": 55, "change axis": 34, "shift index": 25, "drop cast": 21, "move shard": 18,
        "drop shard": 16, "drop skip": 9, "widen skip": 9, "change pad": 8, "change stage": 8, "swap sources": 6,
        "drop units": 4, "swap any_of": 3,
    }  # fmt: skip


@pytest.mark.parametrize("name", bundled_ids())
def test_a_spec_passes_its_own_trials(name):
    """Headers and model parameters are there for every runtime, and every layout that compiles has some."""
    spec = mapper.load_spec(name)
    trials = [each for each in iter_trials(spec, max_ranks=1 if IS_QUICK else 2) if each.program is not None]
    assert {each.setting.runtime for each in trials} == set(spec.runtimes)
    assert all(each.variants for each in trials)


# --- a spec of a test -----------------------------------------------------------------------------------------------

TINY = """
    index:
      layer: {count: 3, axis: pp}
    runtimes:
      engine:
        mesh: vllm
        skip:
          - {source: '**.freq', why: computed}
        keep:
          - {target: '**.cache', why: filled at run time}
        rules:
          - {target: model.embed, dims: {v: 61, h: 7}, shard: {v: {axis: tp, pad: 4}}, stage: first}
          - at: model.layers.{layer}
            rules:
              - target: up
                sources: [one, two]
                dims: {out: [8, 8], in: 7}
                shard: {out: tp}
          - {target: head, tie: model.embed, stage: first}
"""
CASE = """
    cases:
      - config: {architectures: [Tested]}
        runtime: engine
        layout: tp=2
        rank: 1
        maps:
          model.layers.2.one[4:8]: model.layers.2.up[0:4]
"""


def test_an_unpinned_swap_survives_and_the_case_that_it_asks_for_finds_it():
    before = mutate(spec_from(TINY), max_ranks=2)
    (survivor,) = before.survivors
    assert survivor.mutant.kind == "swap sources"
    assert (survivor.structure, survivor.evidence, survivor.is_same_shape, before.ok) == (None, None, True, False)
    case = "\n".join(f"    {line}" for line in ("cases:", *survivor.case.splitlines()))
    after = mutate(spec_from(f"{TINY}\n{case}\n"), max_ranks=2)
    assert after.ok
    (swap,) = [each for each in after.outcomes if each.mutant.kind == "swap sources"]
    assert swap.structure is None
    assert swap.evidence is not None
    assert swap.evidence.startswith("pinned cases: ")


def test_drops_widened_skips_cuts_and_ties_are_found_by_structure():
    report = mutate(spec_from(TINY), max_ranks=2)
    rows = report.counts()
    for kind in ("drop rule", "drop skip", "drop keep", "widen skip", "drop shard", "move shard", "change stage", "change tie"):
        assert rows[kind]["mutants"] == rows[kind]["structure"] > 0, kind
        assert rows[kind]["evidence"] == 0, kind


def test_evidence_is_asked_about_every_mutant_and_only_about_its_runtimes():
    spec, asked = spec_from(TINY), []

    def failures(mutant, runtimes):
        asked.append(runtimes)
        yield "it is not what was recorded"

    report = mutate(spec, evidence=[Evidence("a recording", failures)], max_ranks=1)
    assert asked == [("engine",)] * len(report.outcomes)
    assert {each.evidence for each in report.outcomes} == {"a recording: it is not what was recorded"}
    assert report.evidence == ("pinned cases", "a recording")


def test_a_spec_that_never_compiles_is_told_and_not_passed():
    spec = spec_from("config: {required: [width]}\n" + TINY.replace("h: 7", "h: width").replace("\n    ", "\n"))
    with pytest.raises(MapperError) as raised:
        mutate(spec, max_ranks=1)
    assert [each.code for each in raised.value.diagnostics] == ["M816"]


# --- the command ----------------------------------------------------------------------------------------------------

HEAD = "spec: 1\nid: tiny\ntitle: A spec of a test\nversion: 0.1.0\narchitectures: [Tested]\n"


def written(folder, text):
    path = folder / "tiny.yaml"
    path.write_text(HEAD + "\n".join(line[4:] for line in text.splitlines()))
    return path


def test_a_survivor_fails_the_command_and_is_told_with_its_place_and_case(run, tmp_path):
    code, out, _ = run("test", written(tmp_path, TINY), "--mutate")
    assert code == 1
    lines = out.splitlines()
    assert lines[0].endswith(
        "M832 nothing finds this change: in the rule for 'up' 'one' and 'two' change places; on "
        '{"architectures": ["Tested"]}, engine, tp=2,pp=2,dp=1,ep=1, rank 0: model.layers.0.up[0:4, 0:7] has '
        "model.layers.0.two[0:4, 0:7] in place of model.layers.0.one[0:4, 0:7]"
    )
    assert "  hint: add under `cases`, if the spec is right:" in lines
    assert "  swaps of sources of equal shape, which no structure can tell apart: 1, of which evidence finds 0" in lines
    assert lines[-1] == "  1 survived"


def test_a_pinned_spec_passes_and_json_has_every_mutant(run_json, tmp_path):
    code, report = run_json("test", written(tmp_path, TINY + CASE), "--mutate")
    assert (code, report["findings"]) == (0, [])
    (spec,) = report["specs"]
    mutation = spec["mutation"]
    assert mutation["total"]["mutants"] == len(mutation["mutants"]) == sum(row["mutants"] for row in mutation["kinds"].values())
    assert mutation["same_shape_swaps"] == {"mutants": 1, "structure": 0, "evidence": 1, "survived": 0, "equivalent": 0}
    assert all(re.fullmatch(r".+tiny.yaml:\d+:\d+", each["place"]) for each in mutation["mutants"])


def test_mutants_and_synthetic_loads_exclude_each_other(run):
    code, _, err = run("test", "deepseek_v2", "--mutate", "--examples", "3")
    assert code == 2
    assert "not allowed with argument" in err
