"""The main job in one run: a DeepSeek-V3 checkpoint onto real models, compared with what others make of it.

    python -m demo [CHECKPOINT_FOLDER]

1. Loads the checkpoint with the spec `deepseek_v2` into Transformers' DeepseekV3ForCausalLM, built on meta, and compares
   every parameter and the logits with `from_pretrained`.
2. Loads every rank of tp=2,pp=2,ep=2 in vLLM's layout, one process each, and lets `demo/count.py`, which knows nothing of
   mapper, find every element again in the ranks' memory by its value.

Without a folder it writes a tiny checkpoint with the real names first. The second step needs that one, since it needs
elements that all differ.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
from tqdm import tqdm

import mapper
from demo.checkpoint import write_tiny_deepseek_v3
from demo.reference import compare_models, load_reference
from mapper.integrations.transformers import build
from mapper.load import Loader

OUT = Path(".demo")
LAYOUT = mapper.Layout(tp=2, pp=2, ep=2)


def main(arguments: list[str]) -> int:
    start = time.perf_counter()
    if arguments:
        folder = Path(arguments[0])
    else:
        shutil.rmtree(OUT, ignore_errors=True)
        folder = OUT / "checkpoint"
        write_tiny_deepseek_v3(folder)
        print(f"wrote a tiny DeepSeek-V3 checkpoint with the real names to {folder}")
    is_equal = _load_into_transformers(folder)
    is_counted = bool(arguments) or _count_over_ranks(folder)
    print(f"\n{'all equal' if is_equal and is_counted else 'NOT EQUAL'} after {time.perf_counter() - start:.1f} s")
    return 0 if is_equal and is_counted else 1


def _load_into_transformers(folder: Path) -> bool:
    print("\nTransformers, one rank")
    checkpoint = mapper.Checkpoint.open(folder)
    assert checkpoint.config is not None, f"{folder} has no config.json"
    spec = mapper.load_spec("deepseek_v2")
    program = mapper.compile(spec, config=checkpoint.config, runtime="transformers")
    dtype = getattr(torch, str(checkpoint.config.get("torch_dtype", checkpoint.config.get("dtype", "float32"))))
    model = build(folder, dtype=dtype)
    with tqdm(desc="load", unit="B", unit_scale=True, leave=True) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        report = Loader(program, model).load(checkpoint, progress=show)
    print(report.to_text())
    compared = compare_models(model, load_reference(folder, dtype=dtype))
    print(
        f"  against  from_pretrained: {compared.num_parameters} parameters and {compared.num_buffers} buffers, "
        f"{compared.num_elements:,} elements, {len(compared.different_parameters) + len(compared.different_buffers)} differ; "
        f"{compared.num_logits:,} logits {'equal bit for bit' if compared.logits_are_equal else 'DIFFER'}"
    )
    return compared.is_equal


def _count_over_ranks(folder: Path) -> bool:
    print(f"\nvLLM's layout, {LAYOUT.num_ranks} ranks of {LAYOUT}")
    ranks = OUT / "ranks"
    ranks.mkdir(parents=True, exist_ok=True)
    sizes = {"tp": LAYOUT.tp, "pp": LAYOUT.pp, "dp": LAYOUT.dp, "ep": LAYOUT.ep}
    (ranks / "layout.json").write_text(json.dumps(sizes))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={LAYOUT.num_ranks}"]
    quiet = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*torchrun, "-m", "demo.rank", str(folder), str(LAYOUT), str(ranks)], check=True, env=quiet)
    return subprocess.run([sys.executable, "demo/count.py", str(ranks), str(folder)], check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
