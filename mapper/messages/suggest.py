"""What a misspelt name may have been meant to be."""

from __future__ import annotations

from collections.abc import Iterable

MAX_LISTED = 12


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is near `name`, or None.

    >>> nearest('hiden_size', ['hidden_size', 'vocab_size'])
    'hidden_size'
    """
    from difflib import get_close_matches  # lazily: only errors need it

    found = get_close_matches(name, sorted(known), n=1, cutoff=0.7)
    return found[0] if found else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a hint: the near name, or what is known when that is a short list."""
    names = sorted(known)
    near = nearest(name, names)
    if near is not None:
        return f"did you mean {near!r}?"
    return f"known: {', '.join(names)}" if 0 < len(names) <= MAX_LISTED else ""
