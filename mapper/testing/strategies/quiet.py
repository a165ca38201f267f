"""Arguments of strategies that are short to print: hypothesis spells them out in every report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mapper.spec.model import Spec


@dataclass(frozen=True, slots=True, repr=False)
class Named:
    """A spec that prints as its id."""

    spec: Spec

    def __repr__(self) -> str:
        return self.spec.id

    def _repr_pretty_(self, printer: Any, is_cycle: bool) -> None:
        printer.text(repr(self))


@dataclass(frozen=True, slots=True, repr=False)
class Case:
    """A runtime of a spec at a config and options; it prints as their names."""

    spec: Spec
    runtime: str
    config: Mapping[str, object]
    options: Mapping[str, object]

    def __repr__(self) -> str:
        return f"{self.spec.id} {self.runtime}"

    def _repr_pretty_(self, printer: Any, is_cycle: bool) -> None:
        printer.text(repr(self))
