"""Values and scales that wait for each other in an update: what is kept, for how long, and that nothing is left behind."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from mapper.diagnostics import MapperError
from mapper.load import Loader
from mapper.session import halves as halves_module
from tests.loads import Tensors, all_raw, told
from tests.small import program_of, rules

PAIRS = """
index: {layer: {count: 3}}
runtimes:
  own:
    mesh: vllm
    rules:
      - {target: 'w.{layer}.{leaf}', format: dequantized, dims: {out: 4, in: 6}}
      - {copy: [plain]}
"""
CONFIG = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [2, 3]}}


def weight(layer: int) -> str:
    return f"w.{layer}.weight"


def scale(layer: int) -> str:
    return f"w.{layer}.weight_scale_inv"


def pair_sources(seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    found: Tensors = {"plain": torch.randn(2, generator=generator)}
    for layer in range(3):
        found[weight(layer)] = torch.randn(4, 6, generator=generator).to(torch.float8_e4m3fn)
        found[scale(layer)] = torch.randn(2, 2, generator=generator)
    return found


def product(sources: Tensors, layer: int) -> torch.Tensor:
    grid = sources[scale(layer)].repeat_interleave(2, 0).repeat_interleave(3, 1)
    return (sources[weight(layer)].float() * grid).bfloat16()


@pytest.fixture
def paired() -> tuple[Loader, Tensors]:
    model: Tensors = {weight(layer): torch.zeros(4, 6, dtype=torch.bfloat16) for layer in range(3)} | {"plain": torch.zeros(2)}
    return Loader(program_of(PAIRS, config=CONFIG), model), model


def test_pairs_are_the_groups_that_must_travel_together(paired: tuple[Loader, Tensors]) -> None:
    assert paired[0].groups() == tuple((weight(layer), scale(layer)) for layer in range(3))
    assert Loader(program_of(rules("{copy: [a]}")), {"a": torch.zeros(2)}).groups() == ()


@pytest.mark.parametrize("lifetime", ["buffer", "view", "owned"])
def test_half_is_kept_until_the_other_comes_whatever_happens_to_its_memory(
    lifetime: Any, paired: tuple[Loader, Tensors]
) -> None:
    loader, model = paired
    sources = pair_sources(0)
    session = loader.update(lifetime=lifetime)
    buffer = torch.empty(4, 6, dtype=torch.float8_e4m3fn)
    for layer in range(3):
        own = sources[weight(layer)].clone() if lifetime == "owned" else buffer.copy_(sources[weight(layer)])
        session.feed(weight(layer), own)
    buffer.copy_(torch.zeros(4, 6))
    assert session.waiting == tuple(map(weight, range(3)))
    assert session.held_bytes == 72
    session.feed_all((scale(layer), sources[scale(layer)]) for layer in (2, 0, 1))
    session.feed("plain", sources["plain"])
    report = session.finish()
    assert all(torch.equal(model[weight(layer)], product(sources, layer)) for layer in range(3))
    assert (session.waiting, session.held_bytes, report.held_bytes) == ((), 0, 72)
    assert "72 bytes held for pairs, 0 staged" in report.to_text()


def test_owned_half_is_not_copied(paired: tuple[Loader, Tensors]) -> None:
    sources = pair_sources(0)
    session = paired[0].update(lifetime="owned")
    session.feed(weight(0), sources[weight(0)])
    (held,) = session._halves._held.values()
    assert held[1].data_ptr() == sources[weight(0)].data_ptr()
    session.abort()


def test_lone_half_is_named_and_never_kept(paired: tuple[Loader, Tensors]) -> None:
    loader, _ = paired
    sources = pair_sources(0)
    session = loader.update()
    session.feed_all((name, each) for name, each in sources.items() if name != scale(1))
    with pytest.raises(MapperError) as caught:
        session.finish()
    (found,) = caught.value.diagnostics
    assert (told([found]), found.hint) == ([("M501", scale(1))], f"{weight(1)!r} lacks it in [0:4, 0:6]")
    assert session.waiting == (weight(1),)
    session.abort()
    assert (session.waiting, session.held_bytes) == ((), 0)
    with pytest.raises(MapperError, match="M612"):
        session.feed(scale(1), sources[scale(1)])
    again = loader.update()
    again.feed_all(pair_sources(1).items())
    again.finish()
    assert torch.equal(paired[1][weight(1)], product(pair_sources(1), 1))


def test_leaked_half_is_caught_at_finish(paired: tuple[Loader, Tensors], monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer that forgets to let go of a half that it has handed out."""
    pop = halves_module.Halves._pop

    def leaking(self: halves_module.Halves, key: Any, *, is_scale: bool) -> torch.Tensor | None:
        held = dict(self._held)
        found = pop(self, key, is_scale=is_scale)
        if found is not None and held[key, is_scale][0] == weight(2):
            self._held[key, is_scale] = held[key, is_scale]
        return found

    monkeypatch.setattr(halves_module.Halves, "_pop", leaking)
    session = paired[0].update()
    session.feed_all(pair_sources(0).items())
    with pytest.raises(MapperError) as caught:
        session.finish()
    assert "M618 'w.2.weight' waits for the tensor it belongs with" in str(caught.value)
    assert told(caught.value.diagnostics) == [("M618", weight(2))]


def test_half_that_comes_again_after_its_pair_was_written_waits_again(paired: tuple[Loader, Tensors]) -> None:
    loader, model = paired
    old, new = pair_sources(0), pair_sources(1)
    session = loader.update(duplicates="overwrite")
    session.feed_all(old.items())
    session.feed(weight(0), old[weight(0)])
    session.feed(weight(0), new[weight(0)])
    with pytest.raises(MapperError, match=r"M618 'w.0.weight'"):
        session.finish()
    session.feed(scale(0), new[scale(0)])
    session.finish()
    assert torch.equal(model[weight(0)], product(new, 0))
    assert torch.equal(model[weight(1)], product(old, 1))


def test_memory_of_waiting_tensors_is_bounded(paired: tuple[Loader, Tensors]) -> None:
    loader, model = paired
    sources = pair_sources(0)
    session = loader.update(max_held_bytes=50)
    session.feed(weight(0), sources[weight(0)])
    session.feed(weight(1), sources[weight(1)])
    before = all_raw(model)
    with pytest.raises(MapperError) as caught:
        session.feed(weight(2), sources[weight(2)])
    assert (
        "M620 'w.2.weight' would be held until the tensor it belongs with comes: 24 bytes beside 48, the limit is 50; "
        "'w.0.weight', 'w.1.weight' wait as well"
    ) in str(caught.value)
    assert all_raw(model) == before
    session.feed(scale(0), sources[scale(0)])
    session.feed(weight(2), sources[weight(2)])
    session.feed_all((name, each) for name, each in sources.items() if name in (scale(1), scale(2), "plain"))
    assert session.finish().held_bytes == 48


def test_manifest_with_half_of_a_pair_is_refused(paired: tuple[Loader, Tensors]) -> None:
    with pytest.raises(MapperError) as caught:
        paired[0].update(scope={weight(0), scale(1)})
    assert "M621 the scope has 'w.0.weight' and not 'w.0.weight_scale_inv', which it is read with" in str(caught.value)
    assert told(caught.value.diagnostics) == [("M621", weight(0)), ("M621", scale(1))]


def test_delta_of_values_with_scales_is_refused(paired: tuple[Loader, Tensors]) -> None:
    session = paired[0].update()
    with pytest.raises(MapperError, match=r"M619 'w.0.weight' cannot be taken as a delta: its values are multiplied by scales"):
        session.feed(weight(0), pair_sources(0)[weight(0)], nan_means_unchanged=True)


def test_halves_that_meet_in_two_threads_are_written_once_each() -> None:
    num = 200
    text = PAIRS.replace("count: 3", f"count: {num}").replace("      - {copy: [plain]}\n", "")
    model: Tensors = {weight(layer): torch.zeros(4, 6, dtype=torch.bfloat16) for layer in range(num)}
    loader = Loader(program_of(text, config=CONFIG), model)
    one = pair_sources(3)
    sources = {weight(layer): one[weight(layer % 3)] for layer in range(num)}
    sources |= {scale(layer): one[scale(layer % 3)] for layer in range(num)}
    session = loader.update()
    barrier = threading.Barrier(2)

    def feed(name: Callable[[int], str]) -> None:
        for layer in range(num):
            barrier.wait()
            session.feed(name(layer), sources[name(layer)])

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(feed, (weight, scale)))
    session.finish()
    assert all(torch.equal(model[weight(layer)], product(one, layer % 3)) for layer in range(num))
    assert session.held_bytes == 0


# --- memory -----------------------------------------------------------------------------------------------------------


def anonymous_kib() -> int:
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1])
    raise AssertionError("no Anonymous line")


def test_five_hundred_updates_move_no_address_and_need_no_more_memory(paired: tuple[Loader, Tensors]) -> None:
    loader, model = paired
    streams_ = [list(pair_sources(seed).items()) for seed in range(5)]
    shuffler = random.Random(0)

    def update(number: int) -> None:
        stream = streams_[number % 5]
        shuffler.shuffle(stream)
        with loader.update(version=number) as session:
            session.feed_all(stream)
        assert session.held_bytes == 0

    for number in range(200):
        update(number)
    addresses = {name: each.data_ptr() for name, each in model.items()}
    gc.collect()
    before = anonymous_kib()
    for number in range(500):
        update(number)
    gc.collect()
    assert anonymous_kib() - before <= 500
    assert {name: each.data_ptr() for name, each in model.items()} == addresses
    assert torch.equal(model[weight(0)], product(pair_sources(499 % 5), 0))
