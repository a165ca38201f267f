"""Adds entries of a recording to `architectures/`: `python -m tests.oracle.add_architecture RECORDING ENTRY...`.

RECORDING has `configs/ENTRY.json`, `manifests/ENTRY.json` ({name: {dtype, shape}}) and `goldens/ENTRY.jsonl.gz`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tests.oracle.architectures import FOLDER
from tests.oracle.reduce import read_lines, reduce_family, write_lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recording", type=Path)
    parser.add_argument("entries", nargs="+")
    arguments = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    for entry in arguments.entries:
        config, tensors = (
            json.loads((arguments.recording / kind / f"{entry}.json").read_text()) for kind in ("configs", "manifests")
        )
        lines = reduce_family(read_lines(arguments.recording / "goldens" / f"{entry}.jsonl.gz"))
        text = json.dumps({"config": config, "tensors": tensors}, separators=(",", ":"))
        (FOLDER / f"{entry}.json").write_text(text + "\n")
        write_lines(lines, FOLDER / f"{entry}.jsonl.gz")
        num_params = sum(len(line["params"]) for line in lines[1:])
        print(f"{entry}: {lines[0]['num_ranks']} ranks, {num_params} parameters, {len(lines[0]['failed'])} failed ranks")


if __name__ == "__main__":
    main()
