from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mapper.checkpoint import Checkpoint
from mapper.compiler import compile
from mapper.compiler.resolve import Claim, Resolver
from mapper.layout import BASE_AXES, Layout, Mesh, Stage, expert_slots, on_stage, stage_layers
from mapper.pattern import Bindings, IndexValue
from mapper.plan.share import Share
from mapper.spec import load_spec
from tests.test_conflicts import Sources, built, programs, rules_of
from tests.test_pattern import SMALL, bound, names_over, patterns, readings

THOROUGH = settings(max_examples=3 * settings().max_examples, deadline=None)

Families = list[tuple[int, str, Sources]]
Read = tuple[int, int, int, tuple[tuple[str, IndexValue], ...]]
DATA = Path(__file__).parent / "data" / "checkpoints"


def read(claim: Claim) -> Read:
    return claim.family.number, claim.alternative, claim.position, tuple(sorted(claim.bindings.items()))


def slow_claims(families: Families, name: str) -> list[Read]:
    """Every template against the name, one after the other."""
    return [
        (number, a, position, tuple(sorted(values.items())))
        for number, (_, _, alternatives) in enumerate(families)
        for a, alternative in enumerate(alternatives)
        for position, text in enumerate(alternative)
        for values in readings(text, name)
    ]


def names_for(families: Families, extra: tuple[str, ...] = (), limit: int = 150) -> list[str]:
    texts = [text for _, _, alternatives in families for alternative in alternatives for text in alternative]
    listed = {name for text in texts for name in bound(text).names(SMALL)}
    return sorted(listed | set(names_over(*texts, *extra, limit=limit)) | {"#", "#.a", "a.#", "00", "1.01", "²"})


def share_of(layout: Layout, rank: int) -> Share:
    mesh = Mesh(layout, {axis: getattr(layout, axis) for axis in BASE_AXES})
    return Share(mesh, rank, SMALL, {"i": "pp", "j": "ep"})


@THOROUGH
@given(programs())
@example([(0, "a", (("{w}_{i}.l{j}{w}", "{i}{j}.{i}"), ("{i}.a.{i}",))), (1, "b", (("1.a.{i}",),))])
def test_claims_are_every_template_that_spells_the_name(families: Families) -> None:
    resolver = Resolver(built(families), ())
    for name in names_for(families):
        claims = resolver.claims(name)
        assert sorted(map(read, claims)) == sorted(slow_claims(families, name)), name
        for claim in claims:
            assert claim.source.template.match(name) == claim.bindings


@settings(deadline=None)
@given(
    programs(),
    st.lists(patterns(wildcards=True), max_size=2),
    st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 2), st.booleans()),
)
def test_name_is_loaded_where_one_of_its_index_values_lives(
    families: Families, skips: list[str], sizes: tuple[int, int, int, bool]
) -> None:
    tp, pp, dp, is_expert_parallel = sizes
    layout = Layout(tp=tp, pp=pp, dp=dp, ep=tp * dp if is_expert_parallel else 1)
    rules = rules_of(skips, 1)
    resolver = Resolver(built(families), rules)
    names = names_for(families, tuple(skips), limit=40)
    for share, name in product([share_of(layout, rank) for rank in range(layout.num_ranks)], names):
        claims = slow_claims(families, name)
        found = resolver.resolve(name, share)
        assert (found.name, sorted(map(read, found.claims))) == (name, sorted(claims))
        if claims:
            here = any(lives_here(dict(values), layout, share.mesh, share.rank) for *_, values in claims)
            assert (found.outcome, found.skip) == ("loaded" if here else "elsewhere", None)
        else:
            first = next((rule for rule in rules if readings(rule.text, name)), None)
            assert (found.outcome, found.skip) == ("unknown" if first is None else "skipped", first)


def lives_here(values: Bindings, layout: Layout, mesh: Mesh, rank: int) -> bool:
    layers = [SMALL["i"][layer] for layer in stage_layers(len(SMALL["i"]), layout, mesh.coordinate("pp", rank))]
    experts = [SMALL["j"][slot] for slot in expert_slots(len(SMALL["j"]), layout.ep, mesh.coordinate("ep", rank))]
    held = {"i": layers, "j": experts}
    return all(value in held.get(index, [value]) for index, value in values.items())


@pytest.mark.parametrize("stage", ["all", "first", "last", "both"])
def test_name_of_a_stage_is_loaded_on_that_stage(stage: Stage) -> None:
    (family,) = built([(0, "head", (("head",),))])
    resolver = Resolver([replace(family, stage=stage)], ())
    layout = Layout(tp=2, pp=3)
    found = [resolver.resolve("head", share_of(layout, rank)).outcome == "loaded" for rank in range(layout.num_ranks)]
    assert found == [on_stage(stage, layout, rank) for rank in range(layout.num_ranks)]


def test_claims_on_a_real_checkpoint_are_those_of_every_template() -> None:
    checkpoint = Checkpoint.open(DATA / "DeepSeek-V2-Lite-Chat.header.json.gz")
    program = compile(load_spec("deepseek_v2"), config=checkpoint.config, runtime="vllm", layout=Layout(tp=2, pp=2))
    names = [
        *list(checkpoint.tensors)[::23],
        "model.layers.27.input_layernorm.weight",
        "model.layers.0.mlp.gate.weight",
        "lm_head",
    ]
    assert len(names) > 200
    for name in names:
        expected = [
            (family.number, a, position, tuple(sorted(bindings.items())))
            for family in program.families
            for a, alternative in enumerate(family.alternatives)
            for position, source in enumerate(alternative)
            if (bindings := source.template.match(name)) is not None
        ]
        assert sorted(map(read, program.resolver.claims(name))) == sorted(expected), name
        assert bool(expected) == (name in checkpoint.tensors), name
