"""An update as the process that has the engine sees it: what any worker refuses is raised once, and nothing is left open."""

from typing import Any

import pytest
import torch

from mapper.diagnostics import MapperError, finding
from mapper.integrations.vllm import EngineUpdate
from mapper.integrations.vllm.live import answered, packed, unpacked


class Worker:
    def __init__(self, refuses: str = "") -> None:
        self.refuses = refuses
        self.called: list[str] = []

    def call(self, method: str, *arguments: object) -> dict[str, object]:
        return answered(self._do)(method, *arguments)

    def _do(self, method: str, *arguments: object) -> object:
        self.called.append(method)
        if method == self.refuses:
            raise MapperError([finding("M501", subject="a", name="a", rule="b")])
        return {"loaded": 3} if method == "finish" else None


class Engine:
    def __init__(self, *workers: Worker) -> None:
        self.workers = workers
        self.num_resets = 0

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[dict[str, object]]:
        return [worker.call(method, *args) for worker in self.workers]

    def reset_prefix_cache(self) -> None:
        self.num_resets += 1


def test_block_finishes() -> None:
    engine = Engine(Worker(), Worker())
    with EngineUpdate(engine) as update:
        update.feed([("a", torch.zeros(1))])
        update.feed_files("folder")
    assert [worker.called for worker in engine.workers] == [["begin_update", "feed_packed", "feed_files", "finish"]] * 2
    assert engine.num_resets == 1


def test_tensors_travel_as_bytes() -> None:
    tensors = {"a": torch.arange(3).to(torch.bfloat16), "b": torch.arange(4.0).to(torch.float8_e4m3fn), "c": torch.ones(())}
    found = dict(unpacked(packed(tensors.items())))
    assert found.keys() == tensors.keys()
    assert all(found[name].dtype == each.dtype for name, each in tensors.items())
    assert all(torch.equal(found[name].float(), each.float()) for name, each in tensors.items())


def test_account_of_each_worker() -> None:
    engine = Engine(Worker(), Worker())
    update = EngineUpdate(engine)
    assert update.finish() == [{"loaded": 3}] * 2


def test_what_a_worker_refuses_is_raised_once_and_aborts() -> None:
    engine = Engine(Worker("finish"), Worker("finish"))
    with pytest.raises(MapperError) as caught, EngineUpdate(engine):
        pass
    assert [each.code for each in caught.value.diagnostics] == ["M501"]
    assert engine.workers[0].called == ["begin_update", "finish", "abort"]
    assert engine.num_resets == 0


def test_error_in_the_block_aborts() -> None:
    engine = Engine(Worker())
    with pytest.raises(KeyError), EngineUpdate(engine):
        raise KeyError("own")
    assert engine.workers[0].called == ["begin_update", "abort"]


def test_update_that_cannot_begin_is_not_aborted() -> None:
    engine = Engine(Worker("begin_update"))
    with pytest.raises(MapperError):
        EngineUpdate(engine)
    assert engine.workers[0].called == ["begin_update"]
