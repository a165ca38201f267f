"""Hypothesis strategies: configs of a spec, layouts that can hold them, checkpoints, streams, faults, and whole specs."""

from mapper.testing.strategies.checkpoint import checkpoints
from mapper.testing.strategies.config import configs
from mapper.testing.strategies.examples import examples
from mapper.testing.strategies.fault import Fault, faults
from mapper.testing.strategies.layout import layouts
from mapper.testing.strategies.profiles import chosen_profile, profile
from mapper.testing.strategies.spec import DrawnSpec, specs
from mapper.testing.strategies.stream import streams
from mapper.testing.strategies.values import SENTINEL_BYTE, sentinel, unique_values

__all__ = [
    "SENTINEL_BYTE",
    "DrawnSpec",
    "Fault",
    "checkpoints",
    "chosen_profile",
    "configs",
    "examples",
    "faults",
    "layouts",
    "profile",
    "sentinel",
    "specs",
    "streams",
    "unique_values",
]
