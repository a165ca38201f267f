"""mapper loads checkpoints onto PyTorch models from versioned YAML specs, and proves the load before it happens.

Importing this package imports no torch; `mapper.load` does.
"""

from mapper.checkpoint import Checkpoint
from mapper.compile import Program, compile
from mapper.diagnostics import Diagnostic, MapperError
from mapper.layout import Layout
from mapper.plan import Plan
from mapper.spec import load_spec

__version__ = "0.1.0"

__all__ = ["Checkpoint", "Diagnostic", "Layout", "MapperError", "Plan", "Program", "compile", "load_spec"]
