"""Samples in fresh processes, in turn: A B C, A B C, ... so that a slow minute of the machine meets all loaders alike."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import mapper
from mapper.bench import inputs
from mapper.bench.measure import Sample
from mapper.bench.rows import Peer, Row

CHUNK = 64 << 20
MAKERS: Mapping[str, Callable[[Path], Path]] = {"experts": inputs.experts, "matrices": inputs.matrices}


@dataclass(frozen=True, slots=True)
class Measured:
    """All samples of one loader in one row; `absent` says why there are none."""

    peer: Peer
    samples: tuple[Sample, ...]
    absent: str = ""

    @property
    def seconds(self) -> float:
        """The median wall time."""
        return median(sample.seconds for sample in self.samples)

    @property
    def cpu_seconds(self) -> float:
        """The median CPU time."""
        return median(sample.cpu_seconds for sample in self.samples)

    @property
    def bytes_read(self) -> int:
        """The median of bytes read by system calls; reading mapped files does not count."""
        return int(median(sample.bytes_read for sample in self.samples))

    @property
    def peak_anonymous(self) -> int:
        """The largest rise of anonymous memory, in bytes."""
        return max(sample.peak_anonymous for sample in self.samples)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one row came to."""

    row: Row
    ours: Measured
    others: tuple[Measured, ...]
    floor: Measured | None

    def ratio(self, other: Measured) -> float | None:
        """Return how many times longer the other took, or None where one of both is absent."""
        return other.seconds / self.ours.seconds if other.samples and self.ours.samples else None

    def to_json(self) -> dict[str, object]:
        """Return the row as an object for JSON."""
        measured = [self.ours, *self.others, *([self.floor] if self.floor is not None else [])]
        return {
            "row": self.row.name,
            "input": self.row.input,
            "layout": self.row.layout,
            "bar": self.row.bar,
            "floor_bar": self.row.floor_bar,
            "loaders": [
                {
                    "loader": each.peer.loader,
                    "what": each.peer.words,
                    "absent": each.absent,
                    "ratio": self.ratio(each),
                    "samples": [asdict(sample) for sample in each.samples],
                }
                for each in measured
            ],
        }


@dataclass(slots=True)
class Bench:
    """Makes inputs in `folder` and measures rows; `pythons` are interpreters for loaders that need another environment."""

    folder: Path
    num_samples: int = 3
    pythons: Mapping[str, str] = field(default_factory=dict)
    is_cold: bool = False
    say: Callable[[str], None] = lambda text: None

    def measure(self, row: Row) -> Outcome:
        """Return the row, measured."""
        self.say(f"{row.name}: the input")
        folder = MAKERS[row.input](self.folder / row.input)
        if not self.is_cold:
            _warm(folder)
        peers = [row.ours, *row.others, *([row.floor] if row.floor is not None else [])]
        samples: dict[str, list[Sample]] = {peer.loader: [] for peer in peers}
        absent: dict[str, str] = {}
        for number in range(self.num_samples):
            for peer in peers:
                if peer.loader not in absent:
                    self.say(f"{row.name}: {peer.words}, sample {number + 1} of {self.num_samples}")
                    found = self._sample(peer.loader, folder, row)
                    if isinstance(found, str):
                        absent[peer.loader] = found
                    else:
                        samples[peer.loader].append(found)
        measured = {peer: Measured(peer, tuple(samples[peer.loader]), absent.get(peer.loader, "")) for peer in peers}
        floor = measured[row.floor] if row.floor is not None else None
        return Outcome(row, measured[row.ours], tuple(measured[peer] for peer in row.others), floor)

    def _sample(self, loader: str, folder: Path, row: Row) -> Sample | str:
        """Return one sample, or why there is none."""
        if self.is_cold:
            _drop_cache(folder)
        needs_vllm = "vllm" in loader
        python = self.pythons.get("vllm" if needs_vllm else loader.split("_")[0], sys.executable)
        command = [python, "-m", "mapper.bench.samples", loader, str(folder), row.layout]
        where = str(Path(mapper.__file__).parents[1])
        environment = {**os.environ, "PYTHONPATH": where}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        lines = done.stdout.strip().splitlines()
        if done.returncode or not lines:
            return _last(done.stderr) or f"it ended with {done.returncode}"
        found: dict[str, Any] = json.loads(lines[-1])
        return str(found["absent"]) if "absent" in found else Sample(**found)


def _last(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else ""


def _warm(folder: Path) -> None:
    """Read the files once, so that the first loader does not pay for what the others find in the page cache."""
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as stream:
            while stream.read(CHUNK):
                pass


def _drop_cache(folder: Path) -> None:
    """Ask the system to forget the pages of the files, so that the next reader has to get them from the disk."""
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def plan_figures(folder: Path) -> dict[str, float]:
    """Return what planning costs on the headers of DeepSeek-V3: for one rank, for 32 ranks, and per name of a stream."""
    path = inputs.manifest(folder / "manifest")
    checkpoint = mapper.Checkpoint.open(str(path))
    assert checkpoint.config is not None
    start = time.perf_counter()
    spec = mapper.load_spec("deepseek_v2")
    layout = mapper.Layout.parse("tp=8,pp=2,dp=2,ep=16")
    program = mapper.compile(spec, config=checkpoint.config, runtime="vllm", layout=layout, rank=0)
    program.plan(checkpoint)
    one = time.perf_counter() - start
    start = time.perf_counter()
    matching = program.match(checkpoint)
    for rank in range(layout.num_ranks):
        program.at_rank(rank).assemble(matching, checkpoint.tensors)
    every = time.perf_counter() - start
    names: Sequence[str] = list(checkpoint.tensors)
    program.resolve(names[0])
    start = time.perf_counter()
    for name in names:
        program.resolve(name)
    stream = time.perf_counter() - start
    return {
        "tensors": len(names),
        "one_rank_seconds": one,
        "one_rank_microseconds_per_name": one / len(names) * 1e6,
        "ranks": layout.num_ranks,
        "all_ranks_seconds": every,
        "stream_microseconds_per_name": stream / len(names) * 1e6,
    }
