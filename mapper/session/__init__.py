"""Weights that arrive as a stream of (name, tensor): each checked before its own write, completeness judged at the end."""

from mapper.session.session import UpdateSession

__all__ = ["UpdateSession"]
