"""M6xx: binding to a model, reading and writing."""

from mapper.messages.message import Message

MESSAGES: dict[str, Message] = {}
