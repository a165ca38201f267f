"""M9xx: how the command line and the library are called."""

from mapper.messages.message import Message

MESSAGES: dict[str, Message] = {
    "M901": Message(
        "unknown command {command!r}",
        "The command line knows a fixed set of commands.",
        "Run `mapper --help` for the list.",
    ),
}
