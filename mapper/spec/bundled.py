"""Where specs lie: bundled with mapper, found by id or architecture, or a file of the user's."""

from __future__ import annotations

import hashlib
import re
from functools import cache
from pathlib import Path

from mapper import schema
from mapper.diagnostics import Diagnostic, MapperError, finding
from mapper.messages.suggest import nearest
from mapper.spec.check import check_spec
from mapper.spec.inherit import merge
from mapper.spec.model import Spec
from mapper.spec.parse import Builtin, parse_builtin, parse_spec
from mapper.spec.scalars import text_of
from mapper.yaml_source import Mapping, Node, read_file

PACKAGE = Path(__file__).resolve().parents[1]
BUILTIN_FILE = PACKAGE / "spec" / "builtin.yaml"
# In a wheel the specs lie inside the package, in a checkout beside it.
FOLDERS = (PACKAGE / "specs", PACKAGE.parent / "specs")
SUFFIXES = (".yaml", ".yml")

# The value of the top-level key `architectures`, in flow or block style, to be read without parsing the file.
_ARCHITECTURES = re.compile(r"^architectures:[ ]*(?:#.*)?(\s*\[[^\]]*\]|(?:\n[ ]*(?:#.*|-[ ]+.*)?)+)", re.MULTILINE)
_COMMENT = re.compile(r"#.*")
_WORD = re.compile(r"\w+")


def load_spec(name_or_path: str | Path) -> Spec:
    """Return a checked spec by bundled id, architecture name, or path; raises `MapperError` with every finding.

    >>> load_spec('DeepseekV3ForCausalLM').id
    'deepseek_v2'
    """
    spec = read_spec(find_spec(name_or_path))
    findings = check_spec(spec)
    if findings:
        raise MapperError(findings)
    return spec


def read_spec(path: Path) -> Spec:
    """Return the spec in a file, its parents merged in, its meaning not yet checked."""
    texts: list[str] = [builtin_text()]
    node = _read_merged(path, texts, {})
    return parse_spec(node, builtin=read_builtin(), digest=_digest(texts))


def find_spec(name_or_path: str | Path) -> Path:
    """Return the file of a spec by bundled id, architecture name, or path; raises `MapperError` when there is none."""
    if isinstance(name_or_path, Path) or _looks_like_path(name_or_path):
        return Path(name_or_path)
    ids = bundled_ids()
    if name_or_path in ids:
        return ids[name_or_path]
    found = [path for path in ids.values() if name_or_path in architectures_in(path)]
    if len(found) == 1:
        return found[0]
    if found:
        raise MapperError([finding("M145", subject=name_or_path, name=name_or_path, ids=", ".join(p.stem for p in found))])
    raise MapperError([finding("M140", subject=name_or_path, hint=_hint(name_or_path, ids), name=name_or_path)])


def bundled_ids() -> dict[str, Path]:
    """Return the files of the bundled specs by id, in order."""
    return {path.stem: path for path in sorted(_folder().glob("*.yaml"))}


def architectures_in(path: Path) -> tuple[str, ...]:
    """Return the architectures that a spec's file names, without parsing it (0.1 ms instead of 20)."""
    match = _ARCHITECTURES.search(path.read_text(encoding="utf-8"))
    return tuple(_WORD.findall(_COMMENT.sub("", match.group(1)))) if match else ()


@cache
def read_builtin() -> Builtin:
    """Return what every spec gets without saying it."""
    node, _ = read_file(BUILTIN_FILE)
    _require_valid(node, "builtin")
    return parse_builtin(node)


@cache
def builtin_text() -> str:
    return BUILTIN_FILE.read_text(encoding="utf-8")


def _read_merged(path: Path, texts: list[str], children: dict[Path, Node]) -> Mapping:
    """Read a spec and merge it over its parents; `children` are the `extends` values that led here, by file."""
    node, text = read_file(path)
    texts.append(text)
    _require_valid(node, None)
    extends = node.get("extends")
    if extends is None:
        return merge(None, node)
    children = {**children, path.resolve(): extends}
    parent = _find_parent(path, extends)
    if parent.resolve() in children:
        chain = " -> ".join([*(each.stem for each in children), parent.stem])
        raise MapperError([finding("M143", place=extends.place, chain=chain)])
    return merge(_read_merged(parent, texts, children), node)


def _find_parent(path: Path, extends: Node) -> Path:
    """Return the file of a parent: beside the child, or bundled."""
    name = text_of(extends)
    beside = path.parent / f"{name}.yaml"
    if beside.is_file() and beside.resolve() != path.resolve():
        return beside
    ids = bundled_ids()
    if name in ids:
        return ids[name]
    raise MapperError([finding("M142", place=extends.place, hint=_hint(name, ids), name=name, folder=str(path.parent))])


def _require_valid(node: Mapping, definition: str | None) -> None:
    findings: tuple[Diagnostic, ...] = schema.validate(node, definition=definition)
    if findings:
        raise MapperError(findings)


def _folder() -> Path:
    return next((folder for folder in FOLDERS if folder.is_dir()), FOLDERS[0])


def _looks_like_path(name: str) -> bool:
    return name.endswith(SUFFIXES) or "/" in name or "\\" in name


def _hint(name: str, ids: dict[str, Path]) -> str:
    architectures = [each for path in ids.values() for each in architectures_in(path)]
    near = nearest(name, [*ids, *architectures])
    start = f"did you mean {near!r}? " if near else ""
    return f"{start}bundled: {', '.join(ids)}"


def _digest(texts: list[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        data = text.encode()
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()
