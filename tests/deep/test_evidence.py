"""The evidence of the deep runs, which are too long for every commit, must be about the tree that is here."""

import pytest

from tests.deep import evidence, survivors
from tests.deep.core import CORE, EVIDENCE, PENDING, paths_of

JUDGED = [path for path in paths_of(CORE) if path not in paths_of(PENDING)]
pytestmark = pytest.mark.skipif(not EVIDENCE.exists(), reason="there is no evidence yet: `make deep` has not run on this core")


def test_every_module_that_is_not_pending_has_been_judged_as_it_is():
    assert set(evidence.stale_modules()) == set(paths_of(PENDING)), "`make deep` judges what is stale; PENDING lists the rest"


@pytest.mark.parametrize("path", JUDGED)
def test_the_judges_notice_nearly_every_mutant(path):
    found = evidence.read()["modules"][path]
    assert evidence.score_of(found) >= evidence.LEAST_SCORE
    assert found["survived"] == sum(key[0] == path for key in survivors.listed()), "each survivor is listed with the reason"


@pytest.mark.skipif(not evidence.read()[evidence.GUARANTEES], reason="the guarantees have not been checked at length yet")
def test_the_guarantees_have_been_checked_at_length_on_this_engine_and_these_specs():
    assert not evidence.are_guarantees_stale(), "`make deep` checks them again"
    assert evidence.read()[evidence.GUARANTEES]["exit_code"] == 0
