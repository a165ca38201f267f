"""`evidence/deep.json`: what the deep runs found, each part with a hash of what it is about, so that staleness shows.

Each module of the core is judged on its own, and so are the guarantees: a change makes only that part stale that it can
change, and a run judges again only what is stale. Every part is written as soon as it is known.
"""

from __future__ import annotations

import json
import os
from typing import Any

from tests.deep.core import CORE, EVIDENCE, digest_of, digest_of_guarantees, paths_of

LEAST_SCORE = 0.95
GUARANTEES = "guarantees"


def read() -> dict[str, Any]:
    """Return what is known: `modules` by path, and `guarantees`."""
    known: dict[str, Any] = json.loads(EVIDENCE.read_text(encoding="utf-8")) if EVIDENCE.exists() else {}
    return {"modules": known.get("modules", {}), GUARANTEES: known.get(GUARANTEES, {})}


def note_module(path: str, found: dict[str, Any]) -> None:
    """Write what became of the mutants of one module."""
    known = read()
    known["modules"][path] = found
    _write(known)


def note_guarantees(found: dict[str, Any]) -> None:
    """Write how the guarantees were checked."""
    _write({**read(), GUARANTEES: found})


def stale_modules() -> list[str]:
    """Return the modules of the core that have changed, or their judges, since they were judged; those that were never."""
    known = read()["modules"]
    return [path for path in paths_of(CORE) if known.get(path, {}).get("valid_for") != digest_of(path)]


def are_guarantees_stale() -> bool:
    """Return whether the engine, a spec or a test of the guarantees has changed since they were checked."""
    return bool(read()[GUARANTEES].get("valid_for") != digest_of_guarantees())


def score_of(found: dict[str, Any]) -> float:
    """Return the share of a module's mutants that some judge noticed."""
    return float(found["killed"] / found["mutants"]) if found["mutants"] else 1.0


def _write(known: dict[str, Any]) -> None:
    present = set(paths_of(CORE))
    known["modules"] = {path: found for path, found in sorted(known["modules"].items()) if path in present}
    total = {word: sum(found[word] for found in known["modules"].values()) for word in ("mutants", "killed", "survived")}
    EVIDENCE.parent.mkdir(exist_ok=True)
    scratch = EVIDENCE.with_suffix(".tmp")
    scratch.write_text(
        json.dumps({"total": {**total, "score": round(score_of(total), 4)}, **known}, indent=1) + "\n", encoding="utf-8"
    )
    os.replace(scratch, EVIDENCE)
