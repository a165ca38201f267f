"""Arguments of strategies that are short to print: hypothesis spells them out in every report."""

from __future__ import annotations

from dataclasses import dataclass

from mapper.spec.model import Spec


@dataclass(frozen=True, slots=True, repr=False)
class Named:
    """A spec that prints as its id."""

    spec: Spec

    def __repr__(self) -> str:
        return self.spec.id
