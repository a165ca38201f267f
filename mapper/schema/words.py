"""How a schema is put into words."""

from __future__ import annotations

from typing import Any

# What is written in place of words that are texts under YAML 1.2.
INSTEAD = {
    **dict.fromkeys(("yes", "Yes", "YES", "on", "On", "ON", "True"), "true"),
    **dict.fromkeys(("no", "No", "NO", "off", "Off", "OFF", "False"), "false"),
    **dict.fromkeys(("none", "None", "NONE"), "null"),
}


def in_words(schema: dict[str, Any]) -> str:
    """Return what a schema describes, with an article.

    >>> in_words({'title': 'Expression'})
    'an expression'
    """
    title = schema.get("title")
    if title is None:
        return join_words([repr(each) for each in schema.get("enum", [schema.get("const")])], "or")
    lowered = title[0].lower() + title[1:]
    if lowered.startswith("true"):
        return str(lowered)
    return f"an {lowered}" if lowered[0] in "aeio" else f"a {lowered}"


def expected_in_words(schemas: list[dict[str, Any]]) -> str:
    """Return what any of the schemas describes."""
    return join_words(list(dict.fromkeys(in_words(schema) for schema in schemas)), "or")


def join_words(words: list[str], last: str) -> str:
    """Return the words as a list in a sentence.

    >>> join_words(['a', 'b', 'c'], 'or')
    'a, b or c'
    """
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"
