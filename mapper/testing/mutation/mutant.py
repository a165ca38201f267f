"""One changed spec: what was changed, where, and in which runtimes it can matter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from mapper.diagnostics import Place
from mapper.spec.model import Spec

Kind = Literal[
    "swap sources",
    "swap any_of",
    "drop rule",
    "drop skip",
    "drop keep",
    "widen skip",
    "move shard",
    "drop shard",
    "change axis",
    "drop units",
    "change pad",
    "change fill",
    "change stage",
    "shift index",
    "drop cast",
    "flip optional",
    "change tie",
]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class Mutant:
    """A spec with one change. `sentence` says the change, `runtimes` are those whose programs it can change.

    `parts` are the two parts of the rule at `rule` whose sources changed places; `without` is the rule whose sources a
    checkpoint has to lack for the change to show.
    """

    id: str
    kind: Kind
    place: Place
    sentence: str
    spec: Spec
    runtimes: tuple[str, ...]
    rule: Place | None = None
    parts: tuple[int, int] | None = None
    without: Place | None = None
