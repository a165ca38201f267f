"""Fixtures that several test modules use."""

from __future__ import annotations

import json

import hypothesis
import pytest

from mapper.cli import main

# A busy machine is no failure. A run that loads a profile of its own keeps it.
if hypothesis.settings.get_current_profile_name() in ("default", "ci"):
    hypothesis.settings.register_profile("suite", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
    hypothesis.settings.load_profile("suite")


@pytest.fixture
def run(capsys):
    """Run a command in process; return its exit code and what it printed on stdout and stderr."""

    def run(*words):
        capsys.readouterr()
        code = main(list(map(str, words)))
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


@pytest.fixture
def run_json(run):
    """Run a command with --format json; return its exit code and the one object it printed."""

    def run_json(*words):
        code, out, _ = run(*words, "--format", "json")
        return code, json.loads(out)

    return run_json
