"""Whatever passes the schema is a spec or findings; nothing else escapes."""

from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mapper.diagnostics import MapperError
from mapper.schema import validate
from mapper.spec.bundled import read_builtin
from mapper.spec.check import check_spec
from mapper.spec.inherit import merge
from mapper.spec.parse import parse_spec
from mapper.yaml_source import parse_text

SPECS = {path.stem: path.read_text() for path in sorted((Path(__file__).parents[1] / "specs").glob("*.yaml"))}
WORDS = [
    "",
    "null",
    "[]",
    "{}",
    "a",
    "a.b",
    "(a b)",
    "{layer}",
    "'{leaf}'",
    "x + 1",
    "f(x)",
    "- a",
    "[a, 1]",
    "tp",
    "1",
    ":",
    "**",
    "'",
    '"',
]


def outcome(text: str) -> str:
    """Return the codes that a text leads to; anything but findings is raised."""
    try:
        node = parse_text(text, file="x")
        findings = validate(node)
        if findings:
            raise MapperError(findings)
        findings = check_spec(parse_spec(merge(None, node), builtin=read_builtin()))
    except MapperError as error:
        findings = error.diagnostics
    for each in findings:
        assert str(each)
    return " ".join(each.code for each in findings)


@given(st.sampled_from(sorted(SPECS)), st.data())
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_spec_with_a_damaged_line_gives_findings_or_loads(name, data):
    lines = SPECS[name].split("\n")
    for _ in range(data.draw(st.integers(1, 3))):
        number = data.draw(st.integers(0, len(lines) - 1))
        line = lines[number]
        start = data.draw(st.integers(0, len(line)))
        stop = data.draw(st.integers(start, len(line)))
        lines[number] = line[:start] + data.draw(st.sampled_from(WORDS)) + line[stop:]
    outcome("\n".join(lines))


@given(st.text(max_size=40) | st.text("abc:-[]{}'\"&*!|>%@#,?\n ~1.<", max_size=40))
@settings(max_examples=300, deadline=None)
def test_any_text_gives_findings(text):
    assert outcome(text)


@pytest.mark.parametrize("name", [name for name, text in SPECS.items() if "\nextends: " not in text])
def test_a_spec_in_flow_style_is_the_same_spec(name):
    value = yaml.safe_load(SPECS[name])
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False)
    block = parse_spec(merge(None, parse_text(SPECS[name], file="x")), builtin=read_builtin())
    flow = parse_spec(merge(None, parse_text(text, file="x")), builtin=read_builtin())
    for section in ("config", "let", "runtimes", "blocks"):
        assert list(getattr(flow, section)) == list(getattr(block, section))
    assert outcome(text) == outcome(SPECS[name])
