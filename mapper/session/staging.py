"""Shadows of the parameters that an update writes to: filled first, checked, and copied over at the end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from threading import Lock

import torch


class Staging:
    """Shadow tensors by target, made when they are first written to, with the parameter's values in them.

    Targets that share their memory share one shadow. Safe for several threads.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], storages: Mapping[str, str]) -> None:
        """`storages` gives every target the first name of its memory."""
        self._tensors = tensors
        self._storages = storages
        self._shadows: dict[str, torch.Tensor] = {}
        self._lock = Lock()
        self.num_bytes = 0

    def shadows(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Return the shadows of these targets."""
        found = {}
        with self._lock:
            for name in names:
                storage = self._storages[name]
                shadow = self._shadows.get(storage)
                if shadow is None:
                    shadow = self._shadows[storage] = self._tensors[name].clone()
                    self.num_bytes += shadow.numel() * shadow.element_size()
                found[name] = shadow
        return found

    def commit(self) -> None:
        """Copy every shadow to its parameter, and let go of it."""
        for storage, shadow in self._shadows.items():
            self._tensors[storage].copy_(shadow)
        self.drop()

    def drop(self) -> None:
        """Let go of the shadows; the parameters stay as they are."""
        self._shadows.clear()
