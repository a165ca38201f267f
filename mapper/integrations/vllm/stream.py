"""A model's weights that come over several calls: one update per model, judged complete by what has come, not by a call."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from mapper.compiler import Program
from mapper.diagnostics import MapperError, finding
from mapper.load import Loader
from mapper.transfer.bind import Model

MISSING = "M501"


class WeightStream:
    """An update that is finished by the call that completes it."""

    def __init__(self, program: Program, model: Model) -> None:
        self._session = Loader(program, model).update()
        self._missing: set[str] | None = None
        self._num_missing = self._since = 0

    def take(self, weights: Iterable[tuple[str, torch.Tensor]]) -> bool:
        """Write the tensors; return whether the model is complete. Raises MapperError for a wrong tensor before writing it.

        Judging costs more than a tensor does, so that it waits until as many have come as were missing the last time.
        """
        for name, tensor in weights:
            self._session.feed(name, tensor)
            self._since += 1
            if self._missing is not None:
                self._missing.discard(name)
        if self._missing and self._since < self._num_missing:
            return False
        try:
            self._session.finish()
        except MapperError as error:
            self._missing = {each.subject for each in error.diagnostics if each.code == MISSING}
            self._num_missing, self._since = len(self._missing), 0
            if not self._missing:
                raise
            return False
        return True

    def require_complete(self) -> None:
        """Raise MapperError M756 for what has not come."""
        missing = sorted(self._missing or ())
        raise MapperError([finding("M756", subject=missing[0], count=len(missing), name=missing[0])])
