"""One drawn case: a spec at a config, a layout and a checkpoint, with what the reference makes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mapper import Layout
from mapper.spec.model import Spec
from mapper.testing.reference import Declared, ReferenceResult, declared_sources, reference_load, skip_patterns
from mapper.testing.tensors import Tensors


@dataclass(frozen=True, repr=False)
class Example:
    """What a guarantee is checked on. `ranks` are those to look at where all would take too long."""

    spec: Spec
    runtime: str
    config: Mapping[str, object]
    layout: Layout
    ranks: tuple[int, ...]
    tensors: Tensors
    options: Mapping[str, object] = field(default_factory=dict)
    _known: dict[tuple[Layout, int], ReferenceResult] = field(default_factory=dict, compare=False)

    def __repr__(self) -> str:
        return (
            f"Example({self.spec.id} {self.runtime}, {self.layout}, ranks {self.ranks}, {self.tensors}, options "
            f"{dict(self.options)}, config {dict(self.config)})"
        )

    def _repr_pretty_(self, printer: Any, is_cycle: bool) -> None:
        printer.text(repr(self))

    def reference(self, rank: int) -> ReferenceResult:
        """Return what a rank of the layout holds."""
        return self._reference(self.layout, rank)

    def reference_alone(self) -> ReferenceResult:
        """Return what one rank on its own holds."""
        return self._reference(Layout(), 0)

    def declared(self) -> list[Declared]:
        return declared_sources(self.spec, config=self.config, runtime=self.runtime, options=self.options)

    def claimed(self) -> set[str]:
        """Return the names of the tensors that a rule reads."""
        alone = self.reference_alone()
        return set(alone.loaded | alone.elsewhere)

    def copies(self) -> dict[str, str]:
        """Return the tensors that are skipped as copies of others which are there too, each with the other."""
        patterns = skip_patterns(self.spec, config=self.config, runtime=self.runtime, options=self.options)
        return {
            name: original
            for name, original in patterns.items()
            if original is not None and {name, original} <= self.tensors.keys()
        }

    def _reference(self, layout: Layout, rank: int) -> ReferenceResult:
        if (layout, rank) not in self._known:
            self._known[layout, rank] = reference_load(
                self.spec,
                config=self.config,
                runtime=self.runtime,
                layout=layout,
                rank=rank,
                tensors=self.tensors,
                options=self.options,
            )
        return self._known[layout, rank]
