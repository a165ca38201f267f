"""Runs of bytes from files straight into parameters: many of them in one call, neighbours together, a few threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import NamedTuple

import torch

from mapper.checkpoint import Checkpoint
from mapper.diagnostics import MapperError, finding
from mapper.plan.ranges import ByteRange
from mapper.transfer.files import opened

MAX_BUFFERS = 1024
"""How many buffers the system takes in one call: IOV_MAX of Linux."""
MAX_CALL_BYTES = 32 << 20
"""How much one call reads: enough to make the call cheap, little enough to share among threads and to show progress."""
MAX_GAP = 16 << 10
"""Bytes between two runs that are read along, and thrown away, rather than skipped by another call."""
MIN_BYTES_PER_THREAD = 64 << 20
MAX_THREADS = 4


class Call(NamedTuple):
    """One read of consecutive bytes of a file into buffers; `useful` of them are not thrown away."""

    file: int
    start: int
    buffers: list[memoryview]
    useful: int


def takes_bytes(tensor: torch.Tensor) -> bool:
    """Return whether runs of bytes can be read straight into a tensor."""
    return tensor.device.type == "cpu" and tensor.is_contiguous()


def scatter(
    checkpoint: Checkpoint,
    ranges: Iterable[ByteRange],
    tensors: Mapping[str, torch.Tensor],
    *,
    progress: Callable[[int], None] | None = None,
) -> int:
    """Read every range into its parameter and return the number of bytes; all tensors must take bytes.

    `progress` is called with the bytes of each call that is done. Raises MapperError before the first write where a file is
    not what it was when its header was read.
    """
    calls = list(calls_of(ranges, tensors))
    total = sum(call.useful for call in calls)
    num_threads = max(1, min(os.cpu_count() or 1, MAX_THREADS, total // MIN_BYTES_PER_THREAD))
    with ExitStack() as stack:
        descriptors: dict[int, int] = {}
        for file in dict.fromkeys(call.file for call in calls):
            descriptors[file] = opened(checkpoint.files[file], checkpoint.stamps[file])
            stack.callback(os.close, descriptors[file])

        def read(call: Call) -> int:
            _read(checkpoint.files[call.file], descriptors[call.file], call)
            return call.useful

        pool = stack.enter_context(ThreadPoolExecutor(num_threads)) if num_threads > 1 else None
        done: Iterable[int] = map(read, calls) if pool is None else pool.map(read, calls)
        for useful in done:
            if progress is not None:
                progress(useful)
    return total


def calls_of(ranges: Iterable[ByteRange], tensors: Mapping[str, torch.Tensor]) -> Iterator[Call]:
    """Yield the calls that read the ranges, in the order of the files; ranges that touch on both sides become one buffer."""
    sink = memoryview(bytearray(MAX_GAP))
    views: dict[str, memoryview] = {}
    buffers: list[memoryview] = []
    begin = end = useful = 0
    file = -1
    for at_file, start, stop, name, offset in _joined(sorted(ranges)):
        size, gap = stop - start, start - end
        if at_file != file or not 0 <= gap <= MAX_GAP or len(buffers) >= MAX_BUFFERS - 1 or stop - begin > MAX_CALL_BYTES:
            if buffers:
                yield Call(file, begin, buffers, useful)
            buffers, file, begin, useful = [], at_file, start, 0
        elif gap:
            buffers.append(sink[:gap])
        view = views.get(name)
        if view is None:
            view = views[name] = _bytes_of(tensors[name])
        buffers.append(view[offset : offset + size])
        end = stop
        useful += size
    if buffers:
        yield Call(file, begin, buffers, useful)


def _joined(ranges: Iterable[ByteRange]) -> Iterator[tuple[int, int, int, str, int]]:
    """Yield (file, start, stop, target, offset): neighbours on both sides as one, none of more bytes than a call reads."""
    file, begin, end, target, first = -1, 0, 0, "", 0
    for at_file, start, size, name, offset in ranges:
        if start == end and name == target and offset - first == end - begin and at_file == file:
            end += size
            continue
        yield from _split(file, begin, end, target, first)
        file, begin, end, target, first = at_file, start, start + size, name, offset
    yield from _split(file, begin, end, target, first)


def _split(file: int, begin: int, end: int, target: str, first: int) -> Iterator[tuple[int, int, int, str, int]]:
    for start in range(begin, end, MAX_CALL_BYTES):
        yield file, start, min(start + MAX_CALL_BYTES, end), target, first + start - begin


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _read(path: str, descriptor: int, call: Call) -> None:
    buffers, start = call.buffers, call.start
    while buffers:
        count = os.preadv(descriptor, buffers, start)
        if count <= 0:
            raise MapperError([finding("M654", subject=path, path=path, reason=f"it ends at byte {start}")])
        start += count
        buffers = _rest(buffers, count)


def _rest(buffers: list[memoryview], count: int) -> list[memoryview]:
    """Return what is left of the buffers after `count` bytes."""
    for position, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[position + 1 :]]
        count -= len(buffer)
    return []
