"""The case that a test is about, and the folder where a property of one may write."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bugs.harness import Case, read_case


@pytest.fixture
def bug(request: pytest.FixtureRequest) -> Iterator[Case]:
    """The case named by `@case`; its test must have read all that the scenario says."""
    found = read_case(request.param)
    yield found
    assert not found.unused, f"the test of {found.id} does not use {sorted(found.unused)} of its scenario"


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for tests with many examples, to which each example adds folders of its own."""
    return tmp_path_factory.mktemp("bugs")
