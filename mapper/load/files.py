"""The tensors of checkpoint files as views of mapped memory: only the pages that a view's reader touches are read.

Each file is mapped private and writable. Private, so that a write to a view stays in this process; writable, because torch
warns about a buffer that is not; without reserved swap space, because Linux refuses to reserve it for a file that is larger
than the memory.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
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
        return self.read_box(header, whole(header.shape))

    def read_box(self, header: TensorHeader, box: Box) -> torch.Tensor:
        """Return the part of the tensor in `box`: a view of the mapped file, or a copy where its offset is not aligned.

        `box` counts elements as `header.shape` does. An F4 tensor is given as float4_e2m1fn_x2, whose last dim is half as long.
        Raises MapperError where the file changed since its header was read, or torch cannot hold the tensor.
        """
        shape, box = _storage_geometry(header, box)
        sizes = [stop - start for start, stop in box]
        strides = _strides(shape)
        first = sum(start * stride for (start, _), stride in zip(box, strides, strict=True))
        dtype = _torch_dtype(header)
        with self._lock:
            self.bytes_read += prod(sizes) * dtype.itemsize
        if header.start % dtype.itemsize == 0:
            return self.elements(header.file, header.dtype).as_strided(sizes, strides, header.start // dtype.itemsize + first)
        byte_strides = [stride * dtype.itemsize for stride in strides]
        part = self._file_bytes(header.file).as_strided(
            [*sizes, dtype.itemsize], [*byte_strides, 1], header.start + first * dtype.itemsize
        )
        return part.clone(memory_format=torch.contiguous_format).view(dtype).view(sizes)

    def elements(self, file: int, dtype: str) -> torch.Tensor:
        """Return the whole of file number `file`, header included, as a vector of the safetensors dtype `dtype`.

        A rest of less than one element at its end is left out. It is for readers of many boxes: `as_strided` on it is one call.
        """
        found = self._elements.get((file, dtype))
        if found is None:
            data = self._file_bytes(file)
            element = _torch_dtype(TensorHeader(dtype, (), file, 0, 0))
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


def _mapped(path: str, stamp: FileStamp) -> torch.Tensor:
    """Return the bytes of the file as a vector; raise MapperError where it is not what `stamp` says."""
    try:
        with open(path, "rb") as stream:
            status = os.fstat(stream.fileno())
            found = FileStamp(status.st_size, status.st_mtime_ns)
            if found != stamp:
                raise MapperError([_changed(path, expected=_told(stamp), found=_told(found))])
            memory = mmap.mmap(
                stream.fileno(),
                stamp.size,
                flags=mmap.MAP_PRIVATE | _MAP_NORESERVE,
                prot=mmap.PROT_READ | mmap.PROT_WRITE,
            )
    except FileNotFoundError as error:
        raise MapperError([_changed(path, expected=_told(stamp), found="no such file")]) from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise MapperError([finding("M654", subject=path, path=path, reason=reason)]) from error
    return torch.frombuffer(memory, dtype=torch.uint8)


def _changed(path: str, *, expected: str, found: str) -> Diagnostic:
    hint = "open the checkpoint again once nothing writes to it"
    return finding("M650", subject=path, hint=hint, path=path, expected=expected, found=found)


def _told(stamp: FileStamp) -> str:
    seconds, nanoseconds = divmod(stamp.modified_ns, 10**9)
    return f"{stamp.size} bytes of {datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S}.{nanoseconds:09} UTC"


def _torch_dtype(header: TensorHeader) -> torch.dtype:
    name = DTYPES[header.dtype].torch_name
    dtype = None if name is None else getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        hint = "convert the checkpoint to another dtype" if name is None else f"torch.{name} needs a newer torch"
        raise MapperError([finding("M652", hint=hint, dtype=header.dtype, version=str(torch.__version__))])
    return dtype


def _storage_geometry(header: TensorHeader, box: Box) -> tuple[tuple[int, ...], Box]:
    """Return shape and box in elements of the torch dtype: pairs along the last dim for F4, themselves for any other."""
    assert len(box) == len(header.shape), f"box {box} has a pair for each dim of {header.shape}"
    assert all(0 <= start <= stop <= size for (start, stop), size in zip(box, header.shape, strict=True)), (
        f"box {box} lies in {header.shape}"
    )
    if header.dtype != "F4":
        return header.shape, box
    *rows, last = header.shape
    *outer, (start, stop) = box
    if last % 2 or start % 2 or stop % 2:
        hint = "cut the last dim at even places"
        raise MapperError([finding("M653", hint=hint, shape=list(header.shape), found=[start, stop])])
    return (*rows, last // 2), (*outer, (start // 2, stop // 2))


def _strides(shape: Iterable[int]) -> list[int]:
    strides: list[int] = []
    stride = 1
    for size in reversed(tuple(shape)):
        strides.append(stride)
        stride *= max(size, 1)
    return strides[::-1]
