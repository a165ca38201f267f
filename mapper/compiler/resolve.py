"""One source name -> what happens to it, by a few dictionary look-ups; the way streams and `explain` ask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

from mapper.pattern import Bindings, IndexValue, Segment, Template
from mapper.plan.family import Family, SkipRule, SourceFamily
from mapper.plan.share import Share

Outcome = Literal["loaded", "elsewhere", "skipped", "unknown"]
NUMBER = "#"


@dataclass(frozen=True, slots=True)
class Claim:
    """One way a name is a source: of which family, in which alternative, for which part, at which index values."""

    family: Family
    alternative: int
    position: int
    bindings: Mapping[str, IndexValue]

    @property
    def source(self) -> SourceFamily:
        return self.family.alternatives[self.alternative][self.position]


@dataclass(frozen=True, slots=True)
class Resolution:
    """What happens to a name on one rank. A name that a rule claims is loaded here, or elsewhere."""

    name: str
    outcome: Outcome
    claims: tuple[Claim, ...] = ()
    skip: SkipRule | None = None


class Resolver:
    """All source templates of a program, found by a name's shape: its words, with every number replaced by `#`."""

    def __init__(self, families: Sequence[Family], skips: Sequence[SkipRule]) -> None:
        self._skips = skips
        self._table: dict[str, list[tuple[Family, int, int, Template]]] = {}
        for family in families:
            for a, alternative in enumerate(family.alternatives):
                for position, source in enumerate(alternative):
                    for shape in _shapes(source.template):
                        self._table.setdefault(shape, []).append((family, a, position, source.template))

    def claims(self, name: str) -> tuple[Claim, ...]:
        """Return every rule that reads the name; more than one only where a rule is marked `reuse`."""
        parts = name.split(".")
        shape = ".".join([NUMBER if part.isdigit() else part for part in parts])
        return tuple(
            Claim(family, alternative, position, bindings)
            for family, alternative, position, template in self._table.get(shape, ())
            if (bindings := _read(template.segments, parts)) is not None
        )

    def resolve(self, name: str, share: Share) -> Resolution:
        """Return what happens to the name on the rank of `share`."""
        claims = self.claims(name)
        if claims:
            here = any(is_here(claim, share) for claim in claims)
            return Resolution(name, "loaded" if here else "elsewhere", claims)
        skip = next((rule for rule in self._skips if rule.matches(name)), None)
        return Resolution(name, "skipped" if skip else "unknown", (), skip)


def is_here(claim: Claim, share: Share) -> bool:
    """Return whether the claim's family and index values live on the rank of `share`."""
    if not share.holds(claim.family.stage):
        return False
    return all(index not in share.placed or value in share.slots(index) for index, value in claim.bindings.items())


def _shapes(template: Template) -> list[str]:
    choices = []
    for segment in template.segments:
        assert not isinstance(segment, str), "a source has no wildcards"
        choices.append(list(dict.fromkeys(NUMBER if text.isdigit() else text for text in segment.texts)))
    return [".".join(choice) for choice in product(*choices)]


def _read(segments: Sequence[Segment | str], parts: list[str]) -> Bindings | None:
    bindings: Bindings = {}
    for segment, part in zip(segments, parts, strict=True):
        assert not isinstance(segment, str)
        values = segment.texts.get(part)
        if values is None:
            return None
        for index, value in zip(segment.indices, values, strict=True):
            if bindings.setdefault(index, value) != value:
                return None
    return bindings
