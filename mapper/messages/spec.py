"""M2xx: the meaning of a spec, before any config is known."""

from mapper.messages.message import Message

MESSAGES: dict[str, Message] = {}
