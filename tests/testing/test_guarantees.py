"""Every bundled spec and runtime against the engine's guarantees, and random specs too; MAPPER_PROFILE says how long."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mapper
from mapper.spec.bundled import bundled_ids
from mapper.testing.run import GUARANTEES, check_guarantee, run_guarantee
from mapper.testing.strategies import chosen_profile, examples, profile, specs
from mapper.testing.strategies.spec import RUNTIME
from tests.testing.conftest import MOVED

SPECS = {name: mapper.load_spec(name) for name in bundled_ids()}
CASES = [(name, runtime) for name, spec in SPECS.items() for runtime in spec.runtimes]
# How many random specs stand for one example of a bundled one.
SPECS_PER_EXAMPLE = 10


@pytest.mark.parametrize("guarantee", GUARANTEES)
@pytest.mark.parametrize(("name", "runtime"), CASES)
def test_a_bundled_spec_keeps_the_guarantee(name, runtime, guarantee, record_property):
    outcome = run_guarantee(SPECS[name], runtime, guarantee)
    if not outcome.checked:
        pytest.skip(f"nothing to check: {'; '.join(outcome.refused)}")
    if guarantee == "coverage":
        pairs = sum(map(len, outcome.moved.values()))
        moved = f"{name} {runtime}: {len(outcome.moved)} rules in {pairs} combinations of rule, layout class and rank role"
        record_property(MOVED, moved)
        if chosen_profile() != "dev":
            assert not [rule for rule, where in outcome.moved.items() if not where], "a rule moved nothing"


@settings(profile(), max_examples=profile().max_examples * SPECS_PER_EXAMPLE)
@given(st.data())
def test_random_specs_keep_all_guarantees(data):
    drawn = data.draw(specs())
    example = data.draw(examples(drawn.spec, RUNTIME, config=drawn.config, max_ranks=6))
    for guarantee in GUARANTEES:
        check_guarantee(guarantee, example, data)


def test_the_profile_is_one_of_three():
    assert chosen_profile() in ("dev", "ci", "deep")
    assert profile().deadline is None
