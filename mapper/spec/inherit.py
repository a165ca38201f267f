"""`extends`: a spec's tree merged over its parent's, so that every value keeps the place where it was written.

Mappings merge key by key. Lists of rules, skip, keep, requires, counts and finalize append. An item with an inherited `id`
replaces the inherited one where it stands, groups included; `drop: [id]` removes. What a name defines (a `let`, an index,
an option, a format) is replaced as a whole. A runtime that is null is removed. Cases are not inherited.
"""

from __future__ import annotations

from mapper.diagnostics import MapperError, finding
from mapper.messages.suggest import did_you_mean
from mapper.spec.scalars import Findings, items_of, require_mapping, require_scalar, text_of
from mapper.yaml_source import Entry, Mapping, Node, Scalar, Sequence

# Sections in which a child's list follows its parent's.
_LISTS = frozenset({"rules", "skip", "keep", "requires", "counts", "finalize"})
# Sections that map names to definitions.
_NAMED = frozenset({"options", "let", "index", "formats", "versions"})
_NOT_INHERITED = frozenset({"cases", "status", "id", "extends"})


def merge(parent: Mapping | None, child: Mapping) -> Mapping:
    """Return `child` over `parent`, without `drop` items; raises `MapperError` when one drops what is not there."""
    findings: Findings = []
    merged = _merge_sections(_inheritable(parent), child, "", findings)
    if findings:
        raise MapperError(findings)
    return merged


def _inheritable(parent: Mapping | None) -> Mapping | None:
    if parent is None:
        return None
    return Mapping(tuple(entry for entry in parent.entries if entry.name not in _NOT_INHERITED), parent.place)


def _merge_sections(parent: Mapping | None, child: Mapping, section: str, findings: Findings) -> Mapping:
    entries = {} if parent is None else {entry.name: entry for entry in parent.entries}
    for entry in child.entries:
        inherited = entries.get(entry.name)
        if section == "runtimes" and isinstance(entry.value, Scalar):
            _remove_runtime(entries, entry, findings)
            continue
        value = _merge_value(None if inherited is None else inherited.value, entry, section, findings)
        entries[entry.name] = Entry(entry.key, value)
    return Mapping(tuple(entries.values()), child.place)


def _remove_runtime(entries: dict[str, Entry], entry: Entry, findings: Findings) -> None:
    if entries.pop(entry.name, None) is None:
        hint = did_you_mean(entry.name, entries)
        findings.append(finding("M144", place=entry.value.place, hint=hint, id=entry.name))


def _merge_value(inherited: Node | None, entry: Entry, section: str, findings: Findings) -> Node:
    name, value = entry.name, entry.value
    if section == "blocks" or (section == "runtime" and name in _LISTS):
        return _merge_lists(items_of(inherited), value, findings)
    if section == "" and name == "config":
        return _merge_config(inherited, require_mapping(value))
    if name in _NAMED:
        return _merge_names(inherited, require_mapping(value))
    if section == "" and name in ("blocks", "runtimes"):
        parent = None if inherited is None else require_mapping(inherited)
        return _merge_sections(parent, require_mapping(value), name, findings)
    if section == "runtimes":
        parent = None if inherited is None else require_mapping(inherited)
        return _merge_sections(parent, require_mapping(value), "runtime", findings)
    return value


def _merge_names(inherited: Node | None, value: Mapping) -> Mapping:
    """Replace definitions by name; `is_moe(layer)` and `is_moe` are one name."""
    entries = {} if inherited is None else {_defined(entry): entry for entry in require_mapping(inherited).entries}
    entries |= {_defined(entry): entry for entry in value.entries}
    return Mapping(tuple(entries.values()), value.place)


def _defined(entry: Entry) -> str:
    return entry.name.partition("(")[0].strip()


def _merge_config(inherited: Node | None, value: Mapping) -> Mapping:
    """Append required keys, merge optional ones; a key that the child lists on one side leaves the other."""
    if inherited is None:
        return value
    parent = require_mapping(inherited)
    own_required, own_optional = items_of(value.get("required")), _entries(value.get("optional"))
    own = {require_scalar(each).text for each in own_required} | {entry.name for entry in own_optional}
    required = [each for each in items_of(parent.get("required")) if require_scalar(each).text not in own]
    optional = [entry for entry in _entries(parent.get("optional")) if entry.name not in own]
    place = value.place
    return Mapping(
        (
            Entry(Scalar("required", "required", place), Sequence((*required, *own_required), place)),
            Entry(Scalar("optional", "optional", place), Mapping((*optional, *own_optional), place)),
        ),
        place,
    )


def _entries(node: Node | None) -> tuple[Entry, ...]:
    return () if node is None else require_mapping(node).entries


# --- lists ----------------------------------------------------------------------------------------------------------


def _merge_lists(inherited: tuple[Node, ...], value: Node, findings: Findings) -> Sequence:
    kept, own = inherited, []
    for item in items_of(value):
        mapping = require_mapping(item)
        dropped = mapping.get("drop")
        if dropped is not None:
            for each in items_of(dropped):
                kept = _drop(kept, require_scalar(each), findings)
            continue
        _refuse_drops(mapping, findings)
        replaced = _replace(kept, text_of(mapping.get("id")), item)
        if replaced is None:
            own.append(item)
        else:
            kept = replaced
    merged = Sequence((*kept, *own), value.place)
    _report_repeated(merged.items, findings)
    return merged


def _report_repeated(items: tuple[Node, ...], findings: Findings) -> None:
    first: dict[str, Scalar] = {}
    for id in _ids(items):
        if first.setdefault(id.text, id) is not id:
            related = [("first given here", first[id.text].place)]
            findings.append(finding("M220", place=id.place, related=related, id=id.text))


def _drop(items: tuple[Node, ...], id: Scalar, findings: Findings) -> tuple[Node, ...]:
    rest = _replace(items, id.text, None)
    if rest is None:
        hint = did_you_mean(id.text, {each.text for each in _ids(items)})
        findings.append(finding("M144", place=id.place, hint=hint, id=id.text))
        return items
    return rest


def _replace(items: tuple[Node, ...], id: str, replacement: Node | None) -> tuple[Node, ...] | None:
    """Return the items with the one called `id` replaced, in groups too (None: removed); None when there is none."""
    if not id:
        return None
    for position, item in enumerate(items):
        mapping = require_mapping(item)
        before, after = items[:position], items[position + 1 :]
        if text_of(mapping.get("id")) == id:
            return (*before, *(() if replacement is None else (replacement,)), *after)
        inner = _replace(_rules(mapping), id, replacement)
        if inner is not None:
            return (*before, _with_rules(mapping, inner), *after)
    return None


def _refuse_drops(group: Mapping, findings: Findings) -> None:
    """Report a `drop` inside a group: the group is the child's own, and holds nothing inherited."""
    for item in _rules(group):
        mapping = require_mapping(item)
        for each in items_of(mapping.get("drop")):
            findings.append(finding("M144", place=each.place, id=text_of(each)))
        _refuse_drops(mapping, findings)


def _rules(item: Mapping) -> tuple[Node, ...]:
    return items_of(item.get("rules"))


def _with_rules(group: Mapping, rules: tuple[Node, ...]) -> Mapping:
    entries = tuple(
        Entry(entry.key, Sequence(rules, entry.value.place)) if entry.name == "rules" else entry for entry in group.entries
    )
    return Mapping(entries, group.place)


def _ids(items: tuple[Node, ...]) -> list[Scalar]:
    found: list[Scalar] = []
    for item in items:
        mapping = require_mapping(item)
        id = mapping.get("id")
        found += [] if id is None else [require_scalar(id)]
        found += _ids(_rules(mapping))
    return found
