"""`evidence/vllm.json`: what real engines answered, each scenario with a hash of all that could change the answer."""

from __future__ import annotations

import json
import os
from typing import Any

from tests.deep.core import ROOT, digest_of_files
from tests.vllm.scenarios import SCENARIOS

EVIDENCE = ROOT / "evidence" / "vllm.json"
ABOUT = (
    "mapper/**/*.py",
    "mapper/**/*.yaml",
    "specs/*.yaml",
    "tests/vllm/*.py",
    "tests/oracle/deepseek_v3.py",
    "tests/oracle/families.py",
    "tests/oracle/grouped_query.py",
)


def digest() -> str:
    """Return a hash of mapper, the specs and the scenarios as they are here."""
    return digest_of_files(ABOUT)


def read() -> dict[str, Any]:
    """Return what is known, by scenario."""
    known: dict[str, Any] = json.loads(EVIDENCE.read_text(encoding="utf-8")) if EVIDENCE.exists() else {}
    return known


def note(name: str, found: dict[str, Any]) -> None:
    """Write what became of one scenario."""
    known = {**read(), name: found}
    kept = {each.name: known[each.name] for each in SCENARIOS if each.name in known}
    EVIDENCE.parent.mkdir(exist_ok=True)
    scratch = EVIDENCE.with_suffix(".tmp")
    scratch.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    os.replace(scratch, EVIDENCE)


def stale() -> list[str]:
    """Return the scenarios that were never asked, or not of what is here."""
    known, now = read(), digest()
    return [each.name for each in SCENARIOS if known.get(each.name, {}).get("valid_for") != now]
