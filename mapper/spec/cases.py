"""`cases`: facts that a spec pins about itself."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Mapping as Values

from mapper.spec.model import Case, Literals, Located
from mapper.spec.names import literal_of
from mapper.spec.scalars import Findings, items_of, located, require_mapping, require_scalar, text_of
from mapper.yaml_source import Mapping, Node, Sequence, plain


def parse_cases(node: Node | None, findings: Findings) -> tuple[Case, ...]:
    """Return the cases of a spec, in order."""
    return tuple(_case(require_mapping(each), findings) for each in items_of(node))


def _case(node: Mapping, findings: Findings) -> Case:
    config, rank = node.get("config"), node.get("rank")
    assert config is not None, "the schema requires config"
    value = 0 if rank is None else require_scalar(rank).value
    assert isinstance(value, int), "the schema lets only integers through"
    return Case(
        config=_config(config),
        runtime=text_of(node.get("runtime")),
        layout=text_of(node.get("layout")),
        rank=value,
        options=_options(node.get("options")),
        maps=tuple(_iter_maps(node.get("maps"), findings)),
        skips=tuple(located(each, findings) for each in items_of(node.get("skips"))),
        unknown=tuple(located(each, findings) for each in items_of(node.get("unknown"))),
        place=node.place,
    )


def _config(node: Node) -> str | Values[str, object]:
    if isinstance(node, Mapping):
        value = plain(node)
        assert isinstance(value, dict), "a mapping is a dict"
        return value
    return require_scalar(node).text


def _options(node: Node | None) -> dict[str, Literals]:
    return {} if node is None else {entry.name: literal_of(entry.value) for entry in require_mapping(node).entries}


def _iter_maps(node: Node | None, findings: Findings) -> Iterator[tuple[Located, Located]]:
    """Yield one pair a source and target; a source that two rules read has a list of targets."""
    if node is None:
        return
    for entry in require_mapping(node).entries:
        source = located(entry.key, findings)
        for each in entry.value.items if isinstance(entry.value, Sequence) else (entry.value,):
            yield source, located(each, findings)
