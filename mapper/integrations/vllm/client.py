"""An update of a running engine from the process that has the engine: `with EngineUpdate(llm) as update: ...`."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch

from mapper.diagnostics import Diagnostic, MapperError, from_objects
from mapper.integrations.vllm.live import packed


class EngineUpdate:
    """Feeds new weights to all workers of an engine; a block that is left without an error finishes, another aborts.

    The engine is vLLM's `LLM`, or anything with its `collective_rpc`, started with the worker extension
    `mapper.integrations.vllm.worker.Updates`. Raises MapperError with what any of the workers refuses.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._is_open = False
        self._call("begin_update")
        self._is_open = True

    def __enter__(self) -> EngineUpdate:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None and self._is_open:
                self.finish()
        finally:
            if self._is_open:
                self.abort()

    def feed(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Send tensors of the new checkpoint by name."""
        self._call("feed_packed", packed(tensors))

    def feed_files(self, path: str) -> None:
        """Let every worker read the tensors of a checkpoint's folder or file."""
        self._call("feed_files", path)

    def finish(self) -> list[dict[str, object]]:
        """Put the new weights in place and return the account of each worker; where one lacks something, more may be fed."""
        accounts = self._call("finish")
        self._is_open = False
        self._engine.reset_prefix_cache()
        return accounts

    def abort(self) -> None:
        """Let the workers forget what was fed; the engine goes on with the weights that it has."""
        self._is_open = False
        self._call("abort")

    def _call(self, method: str, *arguments: object) -> list[Any]:
        answers = self._engine.collective_rpc(method, args=arguments)
        refused: list[Diagnostic] = [each for answer in answers for each in from_objects(answer["findings"])]
        if refused:
            raise MapperError(dict.fromkeys(refused))
        return [answer["gave"] for answer in answers]
