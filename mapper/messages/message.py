"""What a message is made of."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Message:
    """One kind of finding: `template` is formatted with the finding's values; `why` and `fix` are for `mapper explain`."""

    template: str
    why: str
    fix: str
