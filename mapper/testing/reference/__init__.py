"""A slow, obvious loader to hold the engine against. It shares nothing with it but the parsed spec."""

from mapper.testing.reference.declare import Declared, declared_sources, layout_fault, skip_patterns
from mapper.testing.reference.evaluate import Misfit
from mapper.testing.reference.grids import WrongShape
from mapper.testing.reference.load import ReferenceResult, reference_load
from mapper.testing.reference.names import matches
from mapper.testing.reference.ranks import IllegalLayout

__all__ = [
    "Declared",
    "IllegalLayout",
    "Misfit",
    "ReferenceResult",
    "WrongShape",
    "declared_sources",
    "layout_fault",
    "matches",
    "reference_load",
    "skip_patterns",
]
