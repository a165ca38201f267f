"""What one sample notes: wall time, CPU time, bytes read by system calls, and the peak of anonymous memory."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

PERIOD = 0.002
"""Seconds between two looks at the memory."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement. `peak_anonymous` is how far anonymous memory rose above its size at the start, in bytes."""

    seconds: float
    cpu_seconds: float
    bytes_read: int
    peak_anonymous: int


class Watch:
    """Measures a `with` block; `sample` is there after it."""

    sample: Sample

    def __enter__(self) -> Watch:
        self._before = _anonymous()
        self._peak = self._before
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        self._read = _bytes_read()
        self._cpu = time.process_time()
        self._start = time.perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        seconds = time.perf_counter() - self._start
        cpu_seconds = time.process_time() - self._cpu
        read = _bytes_read() - self._read
        self._stop.set()
        self._thread.join()
        self._peak = max(self._peak, _anonymous())
        self.sample = Sample(seconds, cpu_seconds, read, self._peak - self._before)

    def _look(self) -> None:
        while not self._stop.wait(PERIOD):
            self._peak = max(self._peak, _anonymous())


def _anonymous() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def _bytes_read() -> int:
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("rchar:"):
            return int(line.split()[1])
    return 0
