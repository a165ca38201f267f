"""Every bundled spec and runtime against the engine's guarantees, and random specs too; MAPPER_PROFILE says how long."""

from collections import Counter

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

import mapper
from mapper.spec.bundled import bundled_ids
from mapper.testing import guarantees
from mapper.testing.guarantees import NotBuilt
from mapper.testing.strategies import chosen_profile, examples, faults, register_profiles, specs, streams
from mapper.testing.strategies.spec import RUNTIME

register_profiles()
SPECS = {name: mapper.load_spec(name) for name in bundled_ids()}
CASES = [(name, runtime) for name, spec in SPECS.items() for runtime in spec.runtimes]
GUARANTEES = (
    "coverage",
    "conservation",
    "layout_independence",
    "order",
    "rerooting",
    "in_place",
    "fault",
    "ranks_agree",
)
MAX_RANKS = {"layout_independence": 6, "ranks_agree": 6}
# How many random specs stand for one example of a bundled one.
SPECS_PER_EXAMPLE = 5


def check(guarantee, example, data):
    match guarantee:
        case "order":
            guarantees.check_order(example, data.draw(streams(example.tensors)))
        case "fault":
            guarantees.check_fault(example, data.draw(faults(example)))
        case _:
            getattr(guarantees, f"check_{guarantee}")(example)


@pytest.mark.parametrize("guarantee", GUARANTEES)
@pytest.mark.parametrize(("name", "runtime"), CASES)
def test_a_bundled_spec_keeps_the_guarantee(name, runtime, guarantee):
    refused = Counter()
    checked = Counter()

    @given(st.data())
    def run(data):
        example = data.draw(examples(SPECS[name], runtime, max_ranks=MAX_RANKS.get(guarantee, 16)))
        try:
            check(guarantee, example, data)
        except NotBuilt as reason:
            event(f"refused: {reason}")
            refused[str(reason)] += 1
        else:
            checked[guarantee] += 1

    run()
    if not checked:
        pytest.skip(f"nothing to check: {'; '.join(refused)}")


@pytest.mark.parametrize(("name", "runtime"), CASES)
def test_the_round_trip_of_a_bundled_spec(name, runtime):
    @settings(max_examples=1)
    @given(examples(SPECS[name], runtime))
    def run(example):
        guarantees.check_round_trip(example)

    try:
        run()
    except NotBuilt as reason:
        pytest.skip(str(reason))


@settings(max_examples=settings().max_examples * SPECS_PER_EXAMPLE)
@given(st.data())
def test_random_specs_keep_all_guarantees(data):
    drawn = data.draw(specs())
    example = data.draw(examples(drawn.spec, RUNTIME, config=drawn.config, max_ranks=6))
    for guarantee in GUARANTEES:
        check(guarantee, example, data)


def test_the_profile_is_one_of_three():
    assert chosen_profile() in ("dev", "ci", "deep")
    assert settings().deadline is None
