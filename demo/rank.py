"""One rank: loads its slices into its own memory, then writes out what that memory holds.

torchrun --nproc-per-node=RANKS -m demo.rank CHECKPOINT_FOLDER LAYOUT OUT_FOLDER
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from safetensors.torch import save_file

import mapper
from mapper.load import Loader, allocate


def main(folder: str, layout: str, out: str) -> None:
    rank = int(os.environ["RANK"])
    checkpoint = mapper.Checkpoint.open(folder)
    assert checkpoint.config is not None, f"{folder} has no config.json"
    spec = mapper.load_spec("deepseek_v2")
    program = mapper.compile(spec, config=checkpoint.config, runtime="vllm", layout=mapper.Layout.parse(layout), rank=rank)
    memory = allocate(program.plan(checkpoint))
    report = Loader(program, memory).load(checkpoint)
    save_file(memory, Path(out) / f"rank{rank}.safetensors")
    print(f"  rank {rank}: {report.targets} parameters, {report.bytes_read:,} bytes read, {report.bytes_padded:,} padding")


if __name__ == "__main__":
    main(*sys.argv[1:])
