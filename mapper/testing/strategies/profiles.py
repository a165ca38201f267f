"""How long properties run: dev takes seconds and shrinks nothing, ci minutes, deep as long as it is given."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings

PROFILES = {"dev": 2, "ci": 20, "deep": 2000}
VARIABLE = "MAPPER_PROFILE"


def profile() -> settings:
    """Return the settings of the profile that the environment variable MAPPER_PROFILE names, or of dev.

    They are given to the properties of mapper only: what else a suite tests keeps its own.
    """
    name = chosen_profile()
    return settings(
        max_examples=PROFILES[name],
        deadline=None,
        derandomize=name != "deep",
        database=None,
        phases=[phase for phase in Phase if phase is not Phase.shrink] if name == "dev" else list(Phase),
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )


def chosen_profile() -> str:
    """Return the name of the profile that the environment asks for."""
    name = os.environ.get(VARIABLE, "dev")
    assert name in PROFILES, f"{VARIABLE} is {name!r}, expected one of {', '.join(PROFILES)}"
    return name
