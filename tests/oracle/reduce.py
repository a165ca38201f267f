"""Reduces what a recorder wrote about every rank of a family to the goldens that the tests read.

`python -m tests.oracle.reduce RECORDED GOLDEN` reads JSON lines, one rank a line, and writes them gzipped. The first line
of a golden names the engine and lists the ranks on which the engine itself failed; each other line is a rank it loaded.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

LAYOUT_FIELDS = ("tp", "pp", "ep", "redundant", "placement", "mtp", "rank")
# Further fields, written where a rank differs from this.
DEFAULTS = {"dspark": False, "mega": False, "cap": "9.0"}
UNTOUCHED_FIELDS = ("untouched_fraction", "untouched_box", "untouched_init", "sha256_with_init")
# Buffers that are another view of a parameter's memory: they change with it.
VIEWS_OF_PARAMETERS = (".mixer.conv_weights",)

Record = Mapping[str, Any]


def reduce_family(recorded: Iterable[Record]) -> list[dict[str, Any]]:
    """Return the header line and one line per loaded rank; all are of one family, engine version and platform."""
    records = list(recorded)
    (family,) = {record["family"] for record in records}
    ((version, platform),) = {(record["vllm"], record["platform"]) for record in records if "vllm" in record}
    failed = [_layout(record) | {"error": error_of(record)} for record in records if error_of(record)]
    loaded = [_reduce_rank(record) for record in records if not error_of(record)]
    return [{"family": family, "vllm": version, "platform": platform, "num_ranks": len(loaded), "failed": failed}, *loaded]


def error_of(record: Record) -> str:
    """Return why the engine could not build or load this rank, or nothing."""
    return str(record.get("build_error") or record.get("load_error") or "")


def _reduce_rank(record: Record) -> dict[str, Any]:
    buffers = [buffer for buffer in record["buffers"] if not buffer["name"].endswith(VIEWS_OF_PARAMETERS)]
    changed = [buffer["name"] for buffer in buffers if buffer["changed_by_load"]]
    assert not changed, f"the engine loads into buffers, which goldens do not hold: {changed}"
    return {
        **_layout(record),
        "pp_layers": record["pp_layers"],
        "aliases": record["aliases"],
        "params": [_reduce_tensor(tensor) for tensor in record["params"]],
        "extra": [_reduce_tensor(tensor) for tensor in record["extra"]],
    }


def _reduce_tensor(tensor: Record) -> dict[str, Any]:
    reduced = {key: tensor[key] for key in ("name", "shape", "dtype", "sha256")}
    if tensor.get("untouched_fraction"):
        reduced |= {key: tensor[key] for key in UNTOUCHED_FIELDS}
    return reduced


def _layout(record: Record) -> dict[str, Any]:
    named = {key: record.get(key) for key in LAYOUT_FIELDS}
    return named | {key: record[key] for key, default in DEFAULTS.items() if record.get(key, default) != default}


def write_lines(lines: Iterable[Record], path: Path) -> None:
    """Write `lines` as gzipped JSON lines, the same bytes each time."""
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    path.write_bytes(gzip.compress(text.encode(), compresslevel=9, mtime=0))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file of JSON lines, gzipped or not."""
    data = path.read_bytes()
    text = gzip.decompress(data) if path.suffix == ".gz" else data
    return [json.loads(line) for line in text.splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recorded", type=Path)
    parser.add_argument("golden", type=Path)
    arguments = parser.parse_args()
    lines = reduce_family(read_lines(arguments.recorded))
    write_lines(lines, arguments.golden)
    num_params = sum(len(line["params"]) for line in lines[1:])
    print(f"{arguments.golden}: {lines[0]['num_ranks']} ranks, {num_params} parameters, {len(lines[0]['failed'])} failed ranks")


if __name__ == "__main__":
    main()
