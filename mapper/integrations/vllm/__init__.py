"""mapper inside vLLM: a load format, the entrance for a model's own `load_weights`, and updates of a running engine.

`register` is the entry point that vLLM calls in every process. Importing this package imports neither vLLM nor torch; all but
`loader` and `worker` works, and is tested, without vLLM.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mapper.integrations.vllm.client import EngineUpdate
    from mapper.integrations.vllm.entrance import load_weights, require_complete

__all__ = ["LOAD_FORMAT", "EngineUpdate", "load_weights", "register", "require_complete"]

LOAD_FORMAT = "mapper"
_HOMES = {
    "EngineUpdate": "mapper.integrations.vllm.client",
    "load_weights": "mapper.integrations.vllm.entrance",
    "require_complete": "mapper.integrations.vllm.entrance",
}


def register() -> None:
    """Make `--load-format mapper` known to the vLLM of this process; calling it again changes nothing."""
    import_module("mapper.integrations.vllm.loader").register(LOAD_FORMAT)


def __getattr__(name: str) -> object:
    """Import a name from its home on first use (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
