"""Tensors that wait for another: values for their scales, scales for their values."""

from __future__ import annotations

from collections.abc import Hashable
from threading import Lock
from typing import Literal

import torch

from mapper.diagnostics import MapperError, finding

Lifetime = Literal["buffer", "view", "owned"]

MAX_HELD_BYTES = 1 << 30
MAX_NAMED = 5


class Halves:
    """Keeps one half of each pair until the other comes, in memory of its own and within a budget. Safe for several threads.

    `lifetime` says what a tensor that is fed is: `buffer`, memory that the sender uses again; `view`, a part of memory that
    it wants back; or `owned`, the session's from then on. Only the last is kept without a copy.
    """

    def __init__(self, *, max_bytes: int, lifetime: Lifetime) -> None:
        self._max_bytes = max_bytes
        self._lifetime = lifetime
        self._held: dict[tuple[Hashable, bool], tuple[str, torch.Tensor]] = {}
        self._reserved = 0
        self._lock = Lock()
        self.peak_bytes = 0

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors that wait."""
        with self._lock:
            return tuple(name for name, _ in self._held.values())

    @property
    def num_bytes(self) -> int:
        """The bytes that are held, or about to be."""
        return self._reserved

    def meet(self, key: Hashable, name: str, tensor: torch.Tensor, *, is_scale: bool) -> torch.Tensor | None:
        """Return the other half of the pair `key`, which is then no longer held, or keep this one.

        A half that is held already is replaced. Raises MapperError M620 where the budget does not allow to keep it.
        """
        num_bytes = tensor.numel() * tensor.element_size()
        with self._lock:
            other = self._pop(key, is_scale=not is_scale)
            if other is not None:
                return other
            self._require_room(name, num_bytes)
            self._reserved += num_bytes
            self.peak_bytes = max(self.peak_bytes, self._reserved)
        own = tensor if self._lifetime == "owned" else tensor.detach().clone()
        with self._lock:
            other = self._pop(key, is_scale=not is_scale)
            if other is not None:  # it came while this one was copied
                self._reserved -= num_bytes
                return other
            self._pop(key, is_scale=is_scale)
            self._held[key, is_scale] = (name, own)
        return None

    def clear(self) -> None:
        """Let go of everything."""
        with self._lock:
            self._held.clear()
            self._reserved = 0

    def _pop(self, key: Hashable, *, is_scale: bool) -> torch.Tensor | None:
        found = self._held.pop((key, is_scale), None)
        if found is None:
            return None
        self._reserved -= found[1].numel() * found[1].element_size()
        return found[1]

    def _require_room(self, name: str, num_bytes: int) -> None:
        if self._reserved + num_bytes > self._max_bytes:
            held = [repr(each) for each, _ in self._held.values()]
            more = f" and {len(held) - MAX_NAMED} more" if len(held) > MAX_NAMED else ""
            listed = ", ".join(held[:MAX_NAMED]) + more
            raise MapperError(
                [
                    finding(
                        "M620", subject=name, name=name, size=num_bytes, held=self._reserved, limit=self._max_bytes,
                        waiting=listed or "nothing",
                    )
                ]
            )  # fmt: skip
