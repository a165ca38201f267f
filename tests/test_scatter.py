"""Runs of bytes read straight into parameters: which copies are runs, how they are put into calls, what is refused."""

import os

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from mapper import Checkpoint, MapperError
from mapper.plan.ranges import contiguous
from mapper.transfer import scatter as module
from mapper.transfer.scatter import calls_of, scatter, takes_bytes


@st.composite
def boxed(draw):
    shape = tuple(draw(st.lists(st.integers(1, 4), max_size=4)))
    box = []
    for size in shape:
        start = draw(st.integers(0, size - 1))
        box.append((start, draw(st.integers(start + 1, size))))
    return shape, tuple(box)


@given(boxed())
def test_a_box_is_a_run_where_its_elements_follow_each_other(drawn):
    shape, box = drawn
    numbers = np.arange(int(np.prod(shape))).reshape(shape)[tuple(slice(*each) for each in box)].reshape(-1)
    run = contiguous(shape, box)
    follow = bool((np.diff(numbers) == 1).all())
    assert (run is not None) == follow
    if run is not None:
        assert run == (numbers[0], len(numbers))


@pytest.fixture
def checkpoint(tmp_path):
    tensors = {f"t{number}": torch.arange(number * 100, number * 100 + 60, dtype=torch.int16) for number in range(7)}
    save_file(tensors, tmp_path / "model.safetensors")
    return Checkpoint.open(str(tmp_path))


def ranges_of(checkpoint, names, *, target, skip=0):
    """Return ranges that lay the named tensors end to end in a target, each without its first `skip` bytes."""
    ranges, offset = [], 0
    for name in names:
        header = checkpoint.tensors[name]
        size = header.stop - header.start - skip
        ranges.append((header.file, header.start + skip, size, target, offset))
        offset += size
    return ranges


@pytest.mark.parametrize("names", [["t0", "t1", "t2"], ["t2", "t0", "t6"], ["t5"], []])
@pytest.mark.parametrize("skip", [0, 40])
@pytest.mark.parametrize(
    "limits", [{}, {"MAX_CALL_BYTES": 50}, {"MAX_BUFFERS": 2}, {"MAX_GAP": 8}, {"MIN_BYTES_PER_THREAD": 1}]
)
def test_every_range_lands_whatever_the_limits(checkpoint, monkeypatch, names, skip, limits):
    for name, value in limits.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    expected = [torch.arange(int(name[1:]) * 100 + skip // 2, int(name[1:]) * 100 + 60, dtype=torch.int16) for name in names]
    target = torch.full((len(names) * (60 - skip // 2) + 3,), -1, dtype=torch.int16)
    advances = []
    ranges = ranges_of(checkpoint, names, target="w", skip=skip)
    read = scatter(checkpoint, ranges, {"w": target}, progress=advances.append)
    assert torch.equal(target, torch.cat([*expected, torch.full((3,), -1, dtype=torch.int16)]))
    assert read == sum(advances) == len(names) * (120 - skip)


def test_neighbours_on_both_sides_are_one_buffer_and_gaps_are_read_along(checkpoint):
    target = torch.zeros(420, dtype=torch.int16)
    (joined,) = calls_of(ranges_of(checkpoint, [f"t{number}" for number in range(7)], target="w"), {"w": target})
    assert [len(each) for each in joined.buffers] == [7 * 120]
    (gapped,) = calls_of(ranges_of(checkpoint, ["t0", "t2"], target="w"), {"w": target})
    assert ([len(each) for each in gapped.buffers], gapped.useful) == ([120, 120, 120], 240)


def test_a_read_that_stops_early_goes_on_where_it_stopped(checkpoint, monkeypatch):
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda descriptor, buffers, start: real(descriptor, [buffers[0][:7]], start))
    target = torch.zeros(180, dtype=torch.int16)
    scatter(checkpoint, ranges_of(checkpoint, ["t1", "t3", "t4"], target="w"), {"w": target})
    assert target.tolist() == [*range(100, 160), *range(300, 360), *range(400, 460)]


def test_a_file_that_ends_early_or_changed_is_an_error_and_files_are_closed(checkpoint, monkeypatch):
    ranges = ranges_of(checkpoint, ["t0"], target="w")
    target = torch.zeros(60, dtype=torch.int16)
    num_open = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", lambda descriptor, buffers, start: 0)
        with pytest.raises(MapperError, match=r"M654 .* cannot be read: it ends at byte"):
            scatter(checkpoint, ranges, {"w": target})
    os.utime(checkpoint.files[0], ns=(1, 1))
    with pytest.raises(MapperError, match=r"M650 .* changed since its header was read"):
        scatter(checkpoint, ranges, {"w": target})
    assert not target.any()
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_strided_and_meta_tensors_do_not_take_bytes():
    assert takes_bytes(torch.zeros(3, 4))
    assert not takes_bytes(torch.zeros(3, 4).T)
    assert not takes_bytes(torch.zeros(3, device="meta"))
