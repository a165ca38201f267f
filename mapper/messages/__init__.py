"""The catalogue of every message: its code, its text, why it exists and how to fix what it reports.

One file a stage: M1xx text and schema, M2xx meaning of a spec, M3xx config, layout and compile, M4xx checkpoint files,
M5xx plan, M6xx bind and load, M7xx export, ranks and engines, M8xx cases and lint, M9xx usage. A code is never reused.
"""

from mapper.messages import checkpoint, compile, engine, export, lint, load, plan, spec, text, usage
from mapper.messages.message import Message

CATALOGUE: dict[str, Message] = {
    **text.MESSAGES,
    **spec.MESSAGES,
    **compile.MESSAGES,
    **checkpoint.MESSAGES,
    **plan.MESSAGES,
    **load.MESSAGES,
    **export.MESSAGES,
    **engine.MESSAGES,
    **lint.MESSAGES,
    **usage.MESSAGES,
}

__all__ = ["CATALOGUE", "Message"]
