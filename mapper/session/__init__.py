"""A stream of tensors -> parameters filled, with what is complete judged at the end."""

from mapper.session.groups import groups
from mapper.session.halves import MAX_HELD_BYTES, Lifetime
from mapper.session.scope import ScopeArgument
from mapper.session.session import Duplicates, Memory, Settings, UpdateSession

__all__ = ["MAX_HELD_BYTES", "Duplicates", "Lifetime", "Memory", "ScopeArgument", "Settings", "UpdateSession", "groups"]
