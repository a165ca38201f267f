"""The mutants that may live, each with the reason: `survivors.toml` lists them, and the run holds it to that list."""

from __future__ import annotations

import tomllib
from pathlib import Path

LIST = Path(__file__).with_name("survivors.toml")
Key = tuple[str, str, str, str]


def listed() -> dict[Key, str]:
    """Return why each listed mutant may live, by (path, where, before, after)."""
    found: dict[Key, str] = {}
    for entry in tomllib.loads(LIST.read_text(encoding="utf-8")).get("survivor", []):
        assert set(entry) == {"path", "where", "before", "after", "why"}, f"{LIST.name}: {entry}"
        key = (entry["path"], entry["where"], entry["before"], entry["after"])
        assert key not in found, f"{LIST.name} has {key} twice"
        assert entry["why"], f"{LIST.name} does not say why {key} may live"
        found[key] = entry["why"]
    return found


def spell(key: Key) -> str:
    """Return the entry that lists a mutant, its reason left open."""
    words = zip(("path", "where", "before", "after", "why"), (*key, ""), strict=True)
    return "\n".join(["[[survivor]]", *(f"{word} = {_quoted(text)}" for word, text in words)])


def _quoted(text: str) -> str:
    if "'" not in text:
        return f"'{text}'"
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
