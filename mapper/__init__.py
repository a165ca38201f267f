"""mapper loads checkpoints onto PyTorch models from versioned YAML specs, and proves the load before it happens.

Importing this package imports nothing else of it: each name below is imported when it is first used. `mapper.load` is the
only part that needs torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mapper.checkpoint import Checkpoint
    from mapper.compiler import Program, compile
    from mapper.diagnostics import Diagnostic, MapperError
    from mapper.layout import Layout
    from mapper.plan import Plan
    from mapper.plan.digest import combine_digests
    from mapper.spec import load_spec

__version__ = "0.1.0"

__all__ = ["Checkpoint", "Diagnostic", "Layout", "MapperError", "Plan", "Program", "combine_digests", "compile", "load_spec"]

_HOMES = {
    "Checkpoint": "mapper.checkpoint",
    "Diagnostic": "mapper.diagnostics",
    "Layout": "mapper.layout",
    "MapperError": "mapper.diagnostics",
    "Plan": "mapper.plan",
    "Program": "mapper.compiler",
    "combine_digests": "mapper.plan.digest",
    "compile": "mapper.compiler",
    "load_spec": "mapper.spec",
}


def __getattr__(name: str) -> object:
    """Import a public name from its home on first use (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
