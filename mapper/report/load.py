"""The account of one load on one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

from mapper.plan.digest import Digest


class Finalized(NamedTuple):
    """A finalize step that ran, and what it wrote."""

    step: str
    output: str


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Every source and every target of a load, accounted for.

    `loaded` counts the sources that this rank reads, `elsewhere` those that other ranks hold, `skipped_by` those left out
    by a named rule. `kept` names the rule per parameter that keeps its value. Bytes are of this rank; `seconds` is wall
    time of reading and writing, `plan_seconds` of the proof before it. `finalized` are the finalize steps in the order in
    which they ran. For an update, `scope` and `version` say which, `held_bytes` is the most that tensors took that waited for
    another, `staged_bytes` the size of the shadows of a staged one. `digest` has checksums of what was loaded, if asked for.
    """

    rank: int
    layout: str
    sources: int
    loaded: int
    elsewhere: int
    skipped_by: Mapping[str, int]
    targets: int
    tied: int
    kept: Mapping[str, str]
    bytes_read: int
    bytes_written: int
    bytes_padded: int
    plan_seconds: float
    seconds: float
    finalized: tuple[Finalized, ...] = ()
    scope: str = "all"
    version: object = None
    held_bytes: int = 0
    staged_bytes: int = 0
    digest: Digest | None = None

    @property
    def skipped(self) -> int:
        return sum(self.skipped_by.values())

    def to_json(self) -> dict[str, object]:
        """Return the report as an object for JSON."""
        plain = {**asdict(replace(self, digest=None)), "skipped": self.skipped}
        return {**plain, "digest": self.digest.to_json()} if self.digest is not None else plain

    def to_text(self) -> str:
        """Return the report for a person."""
        rate = self.bytes_read / self.seconds / 1e9 if self.seconds else 0.0
        lines = [
            f"rank {self.rank} of {self.layout}",
            f"  sources  {self.sources:,}: {self.loaded:,} loaded, {self.elsewhere:,} on other ranks, "
            f"{self.skipped:,} skipped, 0 unknown",
            *(f"           {count:,} skipped by {rule}" for rule, count in self.skipped_by.items() if count),
            *([f"  scope    {self.scope}"] if self.scope != "all" else []),
            f"  targets  {self.targets:,}: all complete" + (f", {self.tied:,} tied" if self.tied else ""),
            *(f"           {len(names):,} kept by {rule}" for rule, names in _by_rule(self.kept).items()),
            f"  bytes    {self.bytes_read:,} read, {self.bytes_written:,} written, {self.bytes_padded:,} padding",
            *([f"  memory   {self._beside}"] if self.held_bytes or self.staged_bytes else []),
            *([f"  derived  {len(self.finalized):,} by {_told(self.finalized)}"] if self.finalized else []),
            f"  time     {self.plan_seconds:.2f} s proof, {self.seconds:.2f} s load ({rate:.2f} GB/s)",
        ]
        return "\n".join(lines)

    @property
    def _beside(self) -> str:
        return f"{self.held_bytes:,} bytes held for pairs, {self.staged_bytes:,} staged"


@dataclass(frozen=True, slots=True)
class FinalizeReport:
    """What `Loader.finalize` derived, in the order in which the steps ran."""

    rank: int
    layout: str
    finalized: tuple[Finalized, ...]
    seconds: float


def _told(finalized: tuple[Finalized, ...]) -> str:
    return ", ".join(dict.fromkeys(each.step for each in finalized))


def _by_rule(kept: Mapping[str, str]) -> dict[str, list[str]]:
    grouped: dict[str, list[str]] = {}
    for name, rule in kept.items():
        grouped.setdefault(rule, []).append(name)
    return grouped
