"""The evidence of the last deep run, which is too long for every commit, must be about the tree that is here."""

import json

import pytest

from tests.deep.core import EVIDENCE, digest


def test_evidence_is_about_this_core_and_these_specs():
    if not EVIDENCE.exists():
        pytest.skip("there is no evidence yet: `make deep` has not run on this core")
    evidence = json.loads(EVIDENCE.read_text(encoding="utf-8"))
    assert evidence["valid_for"] == digest(), "the core, a spec or a test of them has changed: run `make deep`"
    assert evidence["result"] == "passed"
