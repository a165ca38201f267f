"""The tensors of checkpoint files as views of mapped memory: only the pages that a view's reader touches are read.

Each file is mapped private and writable. Private, so that a write to a view stays in this process; writable, because torch
warns about a buffer that is not; without reserved swap space, because Linux refuses to reserve it for a file that is larger
than the memory.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import lru_cache
from math import prod
from threading import Lock
from types import TracebackType
from typing import Final

import torch

from mapper.checkpoint import Checkpoint, FileStamp, TensorHeader
from mapper.diagnostics import Diagnostic, MapperError, finding
from mapper.ops.dtypes import DTYPES
from mapper.regions import Box, whole

# `mmap` has the constant from Python 3.13 on; the number is that of every Linux but alpha, mips, powerpc, sparc and xtensa.
_MAP_NORESERVE: Final = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


class CheckpointFiles:
    """The files of a checkpoint, each mapped when it is first asked for. A context manager; safe to use from several threads.

    A view keeps its mapping alive, so that leaving the context while views exist is safe: the mapping goes with the last one.
    `bytes_read` is the size of all boxes handed out.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Raise MapperError where `checkpoint` is a manifest: it has no files."""
        if checkpoint.is_manifest:
            hint = "open the folder of the checkpoint"
            raise MapperError([finding("M651", subject=checkpoint.path, hint=hint, path=checkpoint.path)])
        self.bytes_read = 0
        self._checkpoint = checkpoint
        self._elements: dict[tuple[int, str], torch.Tensor] = {}
        self._bytes: dict[int, torch.Tensor] = {}
        self._lock = Lock()
        self._is_closed = False

    def __enter__(self) -> CheckpointFiles:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the mappings; those with living views stay until the last view dies."""
        # `mmap.close` would unmap at once, for torch does not export the buffer it holds: the next read of a view would crash.
        with self._lock:
            self._is_closed = True
            self._elements.clear()
            self._bytes.clear()

    def tensor(self, header: TensorHeader) -> torch.Tensor:
        """Return the whole tensor, as `read_box` does."""
        if header.dtype == "F4":
            return self.read_box(header, whole(header.shape))
        return self._view(header, header.shape, strides=_strides(header.shape), first=0)

    def read_box(self, header: TensorHeader, box: Box) -> torch.Tensor:
        """Return the part of the tensor in `box`: a view of the mapped file, or a copy where its offset is not aligned.

        `box` counts elements as `header.shape` does. An F4 tensor is given as float4_e2m1fn_x2, whose last dim is half as long.
        Raises MapperError where the file changed since its header was read, or torch cannot hold the tensor.
        """
        shape = header.shape
        if header.dtype == "F4":
            shape, box = _in_pairs(shape, box)
        assert len(box) == len(shape), f"box {box} has a pair for each dim of {shape}"
        strides = _strides(shape)
        sizes: list[int] = []
        first = 0
        for (start, stop), size, stride in zip(box, shape, strides, strict=True):
            assert 0 <= start <= stop <= size, f"box {box} lies in {shape}"
            sizes.append(stop - start)
            first += start * stride
        return self._view(header, sizes, strides=strides, first=first)

    def _view(self, header: TensorHeader, sizes: Sequence[int], *, strides: tuple[int, ...], first: int) -> torch.Tensor:
        """Return the elements of `header` from number `first` on, with these sizes and strides of the torch dtype."""
        found = self.elements(header.file, header.dtype)
        item_size = found.itemsize
        with self._lock:
            self.bytes_read += prod(sizes) * item_size
        if header.start % item_size == 0:
            return found.as_strided(sizes, strides, header.start // item_size + first)
        part = self._file_bytes(header.file).as_strided(
            [*sizes, item_size], [*(stride * item_size for stride in strides), 1], header.start + first * item_size
        )
        return part.clone(memory_format=torch.contiguous_format).view(found.dtype).view(sizes)

    def elements(self, file: int, dtype: str) -> torch.Tensor:
        """Return the whole of file number `file`, header included, as a vector of the safetensors dtype `dtype`.

        A rest of less than one element at its end is left out. It is for readers of many boxes: `as_strided` on it is one call.
        """
        found = self._elements.get((file, dtype))
        if found is None:
            data = self._file_bytes(file)
            element = _torch_dtype(dtype)
            found = data[: len(data) // element.itemsize * element.itemsize].view(element)
            self._elements[file, dtype] = found
        return found

    def _file_bytes(self, file: int) -> torch.Tensor:
        with self._lock:
            assert not self._is_closed, "no tensor is asked for after close()"
            found = self._bytes.get(file)
            if found is None:
                found = self._bytes[file] = _mapped(self._checkpoint.files[file], self._checkpoint.stamps[file])
            return found


def opened(path: str, stamp: FileStamp) -> int:
    """Return a descriptor of the file, open for reading; raise MapperError where it is not what `stamp` says."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        status = os.fstat(descriptor)
    except FileNotFoundError as error:
        raise MapperError([_changed(path, expected=_told(stamp), found="no such file")]) from error
    except OSError as error:
        raise _unreadable(path, error) from error
    found = FileStamp(status.st_size, status.st_mtime_ns)
    if found != stamp:
        os.close(descriptor)
        raise MapperError([_changed(path, expected=_told(stamp), found=_told(found))])
    return descriptor


def _mapped(path: str, stamp: FileStamp) -> torch.Tensor:
    """Return the bytes of the file as a vector; raise MapperError where it is not what `stamp` says."""
    descriptor = opened(path, stamp)
    try:
        memory = mmap.mmap(
            descriptor, stamp.size, flags=mmap.MAP_PRIVATE | _MAP_NORESERVE, prot=mmap.PROT_READ | mmap.PROT_WRITE
        )
    except OSError as error:
        raise _unreadable(path, error) from error
    finally:
        os.close(descriptor)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _unreadable(path: str, error: OSError) -> MapperError:
    return MapperError([finding("M654", subject=path, path=path, reason=error.strerror or str(error))])


def _changed(path: str, *, expected: str, found: str) -> Diagnostic:
    hint = "open the checkpoint again once nothing writes to it"
    return finding("M650", subject=path, hint=hint, path=path, expected=expected, found=found)


def _told(stamp: FileStamp) -> str:
    seconds, nanoseconds = divmod(stamp.modified_ns, 10**9)
    return f"{stamp.size} bytes of {datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S}.{nanoseconds:09} UTC"


def _torch_dtype(dtype: str) -> torch.dtype:
    name = DTYPES[dtype].torch_name
    found = None if name is None else getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        hint = "convert the checkpoint to another dtype" if name is None else f"torch.{name} needs a newer torch"
        raise MapperError([finding("M652", hint=hint, dtype=dtype, version=str(torch.__version__))])
    return found


def _in_pairs(shape: tuple[int, ...], box: Box) -> tuple[tuple[int, ...], Box]:
    """Return shape and box with pairs of F4 elements along the last dim, as torch counts them."""
    *rows, last = shape
    *outer, (start, stop) = box
    if last % 2 or start % 2 or stop % 2:
        hint = "cut the last dim at even places"
        raise MapperError([finding("M653", hint=hint, shape=list(shape), found=[start, stop])])
    return (*rows, last // 2), (*outer, (start // 2, stop // 2))


@lru_cache(maxsize=1024)  # a checkpoint has few shapes, and its tensors come in tens of thousands
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
