"""Reading a JSON file that may be a git-LFS pointer, hold a conflict marker, or name a key twice."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from pathlib import Path
from typing import Any

import orjson

from mapper.diagnostics import Diagnostic, Place, finding

LFS_POINTER = b"version https://git-lfs.github.com/spec/"

_GZIP = b"\x1f\x8b"
_CONFLICT_MARKER = re.compile(r"^(?:<{7} .*|={7}|>{7} .*)\r?$", re.MULTILINE)
_MAX_SHOWN = 120
_TOO_DEEP = "it is nested too deep"


def require_text(path: str, *, what: str, findings: list[Diagnostic]) -> str | None:
    """Return the text of `path`, unpacked where it is gzipped; on failure append to `findings` and return None."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        findings.append(unreadable(path, error))
        return None
    if data.startswith(LFS_POINTER):
        findings.append(lfs_pointer(path))
        return None
    try:
        return (gzip.decompress(data) if data.startswith(_GZIP) else data).decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        findings.append(not_json(path, what=what, reason=str(error)))
        return None


def loads(text: str) -> Any:
    """Return the value of the JSON `text`; every failure is a ValueError.

    orjson takes a third of the time; what it refuses goes to the standard library, which takes more and says more.
    """
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        pass
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error


def parse_text(text: str, *, path: str, what: str, findings: list[Diagnostic]) -> Any:
    """Return the value of the JSON `text`; on failure append to `findings` and return None."""
    try:
        return loads(text)
    except ValueError as error:
        marker = _CONFLICT_MARKER.search(text)
        if marker:
            place = Place(path, text.count("\n", 0, marker.start()) + 1, 1, marker[0].rstrip()[:_MAX_SHOWN])
            hint = "keep one side of the conflict, or download the file again"
            findings.append(finding("M411", place=place, subject=path, hint=hint, what=what, marker=marker[0].rstrip()))
            return None
        findings.append(not_json(path, what=what, reason=str(error)))
        return None


def is_suspicious(text: str, *, num_strings: int, num_minus_zeros: int = 0) -> bool:
    """True where `text` may say more than its value of `num_strings` strings: a key given twice, an escape, a number `-0`.

    Without a backslash every quote opens or closes a string, so the count shows a key that was lost. It is far cheaper than
    a hook for each object. `num_minus_zeros` of the `-0` are in strings, such as `model-00001-of-00008.safetensors`.
    """
    return "\\" in text or text.count("-0") != num_minus_zeros or text.count('"') != 2 * num_strings


def count_strings(value: Any) -> int:
    """Return how many strings, keys included, the JSON `value` is written with."""
    count, pending = 0, [[value]]
    while pending:
        items = pending.pop()
        count += sum(isinstance(each, str) for each in items)
        for each in items:
            if isinstance(each, list):
                pending.append(each)
            elif isinstance(each, dict):
                count += len(each)
                pending.append(list(each.values()))
    return count


def parse_carefully(text: str) -> tuple[Any, list[str]]:
    """Return the value of `text`, which `loads` accepts, and the keys that one object gives twice.

    As other JSON parsers do, it takes `-0` for no integer, and raises ValueError where an escape is half of a surrogate pair.
    """
    repeated: dict[str, None] = {}

    def as_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) != len(pairs):
            seen: set[str] = set()
            for key, _ in pairs:
                if key in seen:
                    repeated[key] = None
                seen.add(key)
        return value

    try:
        value = json.loads(text, object_pairs_hook=as_dict, parse_int=lambda digits: -0.0 if digits == "-0" else int(digits))
        json.dumps([value, list(repeated)], ensure_ascii=False).encode("utf-8")
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error
    except UnicodeEncodeError as error:
        near = error.object[max(error.start - 20, 0) : error.start]
        raise ValueError(f"an escape after {near!r} is half of a surrogate pair") from error
    return value, list(repeated)


def repeated_keys(keys: list[str], *, path: str) -> Diagnostic:
    """Return the finding that one object of the file gives each of `keys` twice."""
    hint = "only one entry can be meant: remove the other, or write the file again"
    return finding("M413", subject=path, hint=hint, path=path, keys=shortened(keys))


def kind_of(value: Any) -> str:
    """Return what `value` is, in the words of JSON.

    >>> kind_of({}), kind_of('a'), kind_of(None)
    ('an object', 'a text', 'null')
    """
    names = {dict: "an object", list: "an array", str: "a text", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null")


def not_json(path: str, *, what: str, reason: str) -> Diagnostic:
    """Return the finding that the text of `path` is not JSON."""
    return finding("M412", subject=path, hint="download or write the file again", path=path, what=what, reason=reason)


def lfs_pointer(path: str) -> Diagnostic:
    """Return the finding that `path` is a git-LFS pointer."""
    return finding("M410", subject=path, hint="run `git lfs pull` in the folder, or download the file itself", path=path)


def absent(path: str) -> Diagnostic:
    """Return the finding that there is nothing at `path`."""
    return finding("M401", subject=path, hint="check the path; a link may point to a file that was removed", path=path)


def unreadable(path: str, error: OSError) -> Diagnostic:
    """Return the finding that the system refuses to read `path`."""
    return finding("M406", subject=path, path=path, reason=error.strerror or str(error))


def plural(count: int, noun: str) -> str:
    """Return the count with its noun.

    >>> plural(1, 'file'), plural(2, 'file')
    ('1 file', '2 files')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def shortened(names: list[str], *, num_shown: int = 3) -> str:
    """Return the first names, quoted, and how many more there are.

    >>> shortened(['a', 'b', 'c', 'd', 'e'])
    "'a', 'b', 'c' and 2 more"
    """
    shown = ", ".join(repr(each) for each in names[:num_shown])
    return shown if len(names) <= num_shown else f"{shown} and {len(names) - num_shown} more"
