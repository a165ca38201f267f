"""What the ranks of a layout read together: every element of every source, every value of every index that is dealt out."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from mapper.diagnostics import Diagnostic, finding
from mapper.plan.geometry import Piece
from mapper.plan.local import read_boxes
from mapper.plan.matching import MatchedFamily
from mapper.plan.plan import LocalFamily
from mapper.regions import spell, uncovered, whole


class Reads:
    """Collects, rank by rank, what each family reads; `key` tells families apart."""

    def __init__(self) -> None:
        self._pieces: dict[tuple[Hashable, int], set[Piece]] = {}
        self._held: dict[tuple[Hashable, str], set[object]] = {}

    def note(self, key: Hashable, local: LocalFamily) -> None:
        """Add what one rank reads for a family."""
        for position, pieces in enumerate(local.pieces):
            self._pieces.setdefault((key, position), set()).update(pieces)
        for index in local.matched.family.placed.keys() & local.values.keys():
            self._held.setdefault((key, index), set()).update(local.values[index])

    def unread(self, key: Hashable, matched: MatchedFamily) -> Iterator[Diagnostic]:
        """Yield what no rank reads of a family that the checkpoint has: targets on no rank, boxes of sources on none."""
        family, target = matched.family, str(matched.family.target)
        if family.tie is not None or not matched.headers:
            return
        if (key, 0) not in self._pieces:
            yield finding("M537", place=family.rule.place, subject=target, target=target)
            return
        for index in sorted(family.placed.keys() & family.domains.keys()):
            lost = [value for value in family.domains[index] if value not in self._held[key, index]]
            if lost:
                yield finding("M536", place=family.rule.place, subject=target, target=target, index=index, lost=lost)
        for position, source in enumerate(matched.sources):
            if source.disk is not None and source.scale_of is None:
                shape = source.disk.seen[1:] if source.holds_stack else source.disk.seen
                boxes = sorted(box for piece in self._pieces[key, position] for box in read_boxes(piece))
                for box in uncovered(whole(shape), boxes):
                    name = str(source.template)
                    yield finding("M535", place=family.rule.place, subject=name, name=name, box=spell(box))
