import json
import string
import textwrap
from pathlib import Path

import jsonschema
import pytest
import yaml
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from mapper.diagnostics import Diagnostic, Place
from mapper.schema import SCHEMA_FILE, load_schema, validate
from mapper.yaml_source import Entry, Mapping, Node, Scalar, Sequence, parse_text, plain

SPECS = {path.stem: path.read_text() for path in sorted((Path(__file__).parents[1] / "specs").glob("*.yaml"))}
SMALL = ("deepseek_v32", "llama", "gpt_oss")
PEER = jsonschema.Draft7Validator(json.loads(SCHEMA_FILE.read_text()))
HEAD = "spec: 1\nid: tiny\ntitle: Tiny\nversion: 1.0.0\narchitectures: [TinyForCausalLM]\n"

# Under these keys stand names of the author's own.
NAMED = {"optional", "options", "let", "index", "formats", "blocks", "runtimes", "leaves", "dims", "stored", "shard",
         "rename", "maps", "stack", "dequantize", "mesh"}  # fmt: skip


def property_names(schema: object) -> set[str]:
    if isinstance(schema, list):
        return {name for each in schema for name in property_names(each)}
    if not isinstance(schema, dict):
        return set()
    own = set(schema["properties"]) if isinstance(schema.get("properties"), dict) else set()
    return own | {name for each in schema.values() for name in property_names(each)}


PROPERTY_NAMES = property_names(load_schema())


def findings_of(text: str) -> tuple[Diagnostic, ...]:
    return validate(parse_text(text, file="x.yaml"))


def fixed_keys(node: Node, parent: str = "") -> list[Scalar]:
    """Return the keys that the schema names, in order."""
    if isinstance(node, Scalar):
        return []
    if isinstance(node, Sequence):
        return [key for item in node.items for key in fixed_keys(item)]
    own = [entry.key for entry in node.entries if parent not in NAMED and entry.name in PROPERTY_NAMES]
    return own + [key for entry in node.entries for key in fixed_keys(entry.value, entry.name if parent not in NAMED else "")]


def replaced(text: str, key: Scalar, name: str) -> str:
    lines = text.split("\n")
    line, start = lines[key.place.line - 1], key.place.column - 1
    assert line[start : start + len(key.text)] == key.text
    lines[key.place.line - 1] = line[:start] + name + line[start + len(key.text) :]
    return "\n".join(lines)


# --- properties -----------------------------------------------------------------------------------------------------


@given(st.sampled_from(sorted(SPECS)), st.data())
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_one_misspelt_key_is_one_finding_at_that_key(name, data):
    text = SPECS[name]
    key = data.draw(st.sampled_from(fixed_keys(parse_text(text, file="x"))))
    misspell = data.draw(st.sampled_from(("append", "drop", "swap", "replace")))
    misspelt = {
        "append": key.text + "x",
        "drop": key.text[:-1],
        "swap": key.text[1:2] + key.text[:1] + key.text[2:],
        "replace": "zzz",
    }[misspell]
    assume(misspelt and misspelt != key.text and misspelt not in PROPERTY_NAMES)
    (found,) = findings_of(replaced(text, key, misspelt))
    assert found.code == "M120"
    assert found.message.startswith(f"unknown key {misspelt!r} in ")
    assert found.place is not None
    assert (found.place.line, found.place.column) == (key.place.line, key.place.column)
    if misspell == "append" and len(key.text) > 3:
        assert found.hint == f"did you mean {key.text!r}?"


def node_of(value: object) -> Node:
    place = Place("x", 1, 1)
    if isinstance(value, dict):
        return Mapping(tuple(Entry(Scalar(key, key, place), node_of(each)) for key, each in value.items()), place)
    if isinstance(value, list):
        return Sequence(tuple(node_of(each) for each in value), place)
    assert value is None or isinstance(value, bool | int | float | str)
    return Scalar(value, "" if value is None else str(value), place)


def paths_of(value: object, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    steps = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(each for key, inner in steps for each in paths_of(inner, (*path, key)))]


def changed(value: object, path: tuple[str | int, ...], change) -> object:
    """Return a copy with the mapping or list entry at `path` changed; `change` takes its container and key."""
    copy = dict(value) if isinstance(value, dict) else list(value)  # type: ignore[call-overload]
    if len(path) == 1:
        change(copy, path[0])
    else:
        copy[path[0]] = changed(copy[path[0]], path[1:], change)
    return copy


VALUES = st.sampled_from(
    [None, True, 0, -1, 2.5, "", "yes", "None", "a", "a b", "a.b", "x(y)", "all", [], ["a"], [1], {}, {"a": "b"}]
)
KEYS = st.sampled_from(sorted(PROPERTY_NAMES | {"zzz"}))


@st.composite
def mutated_specs(draw):
    value = yaml.safe_load(SPECS[draw(st.sampled_from(SMALL))])
    for _ in range(draw(st.integers(1, 2))):
        path = draw(st.sampled_from([path for path in paths_of(value) if path]))
        kind = draw(st.sampled_from(["value", "remove", "rename", "add"]))

        def change(container, key, kind=kind):
            if kind == "value" or isinstance(container, list):
                container[key] = draw(VALUES)
            elif kind == "remove":
                del container[key]
            elif kind == "rename":
                container[draw(KEYS)] = container.pop(key)
            else:
                container[draw(KEYS)] = draw(VALUES)

        value = changed(value, path, change)
    return value


@given(mutated_specs())
@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_the_check_accepts_exactly_what_jsonschema_accepts(value):
    assert (validate(node_of(value)) == ()) == PEER.is_valid(value)


@pytest.mark.parametrize("name", SPECS)
def test_real_specs_pass_both_checks(name):
    node = parse_text(SPECS[name], file="x")
    assert validate(node) == ()
    assert list(PEER.iter_errors(plain(node))) == []


# --- the schema itself ----------------------------------------------------------------------------------------------


def test_the_schema_is_valid_draft_7():
    jsonschema.Draft7Validator.check_schema(load_schema())


def test_every_key_has_a_description():
    def undescribed(schema: object, where: str) -> list[str]:
        if isinstance(schema, list):
            return [each for item in schema for each in undescribed(item, where)]
        if not isinstance(schema, dict):
            return []
        missing = []
        for name, each in schema.get("properties", {}).items() if isinstance(schema.get("properties"), dict) else ():
            target = each
            while "description" not in target and "$ref" in target:
                target = load_schema()["definitions"][target["$ref"].rsplit("/", 1)[1]]
            if len(target.get("description", "")) < 10:
                missing.append(f"{where}.{name}")
        return missing + [found for key, each in schema.items() for found in undescribed(each, f"{where}.{key}")]

    assert undescribed(load_schema(), "") == []


def test_every_mapping_says_what_else_it_takes():
    def loose(schema: object, where: str) -> list[str]:
        if not isinstance(schema, dict):
            return [each for item in schema for each in loose(item, where)] if isinstance(schema, list) else []
        own = [where] if schema.get("type") == "object" and "additionalProperties" not in schema else []
        return own + [found for key, each in schema.items() for found in loose(each, f"{where}.{key}")]

    assert loose(load_schema(), "") == [".definitions.case.properties.config.anyOf"]  # a config is the model's own


def test_every_reference_leads_somewhere():
    def references(schema: object) -> set[str]:
        if isinstance(schema, dict):
            own = {schema["$ref"]} if isinstance(schema.get("$ref"), str) else set()
            return own | {each for value in schema.values() for each in references(value)}
        return {each for value in schema for each in references(value)} if isinstance(schema, list) else set()

    definitions = {f"#/definitions/{name}" for name in load_schema()["definitions"]}
    assert references(load_schema()) == definitions - {"#/definitions/builtin"}


# --- messages -------------------------------------------------------------------------------------------------------

RULES = HEAD + "runtimes:\n  vllm:\n    rules:\n"

MESSAGES = {
    "M120": (
        RULES + "      - tagret: a\n        shrad: {a: tp}\n",
        """
        x.yaml:9:9: M120 unknown key 'tagret' in a rule
          9 |       - tagret: a
            |         ^
          hint: did you mean 'target'?
        x.yaml:10:9: M120 unknown key 'shrad' in a rule
          10 |         shrad: {a: tp}
             |         ^
          hint: did you mean 'shard'?
        """,
    ),
    "M121": (
        RULES + "      - dims: {a: 1}\n",
        """
        x.yaml:9:9: M121 a rule needs 'target' or 'targets'
          9 |       - dims: {a: 1}
            |         ^
        """,
    ),
    "M122": (
        RULES + "      - target: [a]\n        dims: {a: {b: 1}}\n",
        """
        x.yaml:9:17: M122 expected a pattern, found a list
          9 |       - target: [a]
            |                 ^
        x.yaml:10:19: M122 expected an expression or a list of expressions, one a part, found a mapping
          10 |         dims: {a: {b: 1}}
             |                   ^
        """,
    ),
    "M123": (
        HEAD + "status: verifeid\n",
        """
        x.yaml:6:9: M123 expected 'draft', 'checked' or 'verified', found the text 'verifeid'
          6 | status: verifeid
            |         ^
          hint: did you mean 'verified'?
        """,
    ),
    "M124": (
        HEAD + "config: {optional: {a: none}}\nblocks: {b: [{target: a, optional: yes, when: off}]}\n",
        """
        x.yaml:6:24: M124 'none' is a text here; write null
          6 | config: {optional: {a: none}}
            |                        ^
        x.yaml:7:36: M124 'yes' is a text here; write true
          7 | blocks: {b: [{target: a, optional: yes, when: off}]}
            |                                    ^
        x.yaml:7:47: M124 'off' is a text here; write false
          7 | blocks: {b: [{target: a, optional: yes, when: off}]}
            |                                               ^
        """,
    ),
    "M125": (
        HEAD + "let: {a b: 1}\nindex: {x: {count: 1, axis: p-p}}\n",
        """
        x.yaml:6:7: M125 expected a name or name(parameter), found 'a b'
          6 | let: {a b: 1}
            |       ^
        x.yaml:7:29: M125 expected a name of letters, digits and '_', found 'p-p'
          7 | index: {x: {count: 1, axis: p-p}}
            |                             ^
        """,
    ),
    "M126": (
        HEAD + "blocks: {a: [{copy: []}]}\nformats: {f: [{leaves: {w: {dims: [o], dequantize: {a: {dims: [o]}}}}}]}\n",
        """
        x.yaml:6:21: M126 a list of patterns has no items, expected at least 1
          6 | blocks: {a: [{copy: []}]}
            |                     ^
        x.yaml:7:52: M126 a mapping of two leaves has 1 key, expected exactly 2
          7 | formats: {f: [{leaves: {w: {dims: [o], dequantize: {a: {dims: [o]}}}}}]}
            |                                                    ^
        """,
    ),
    "M127": (
        RULES + "      - target: a\n        source: b\n        sources: [c]\n",
        """
        x.yaml:10:9: M127 'source' and 'sources' exclude each other in a rule
          10 |         source: b
             |         ^
          the other: x.yaml:11:9
          11 |         sources: [c]
             |         ^
        """,
    ),
    "M128": (
        HEAD.replace("spec: 1", "spec: 2"),
        """
        x.yaml:1:7: M128 language version 2; this mapper reads version 1
          1 | spec: 2
            |       ^
        """,
    ),
}


@pytest.mark.parametrize("code", MESSAGES)
def test_a_finding_says_where_what_and_what_instead(code):
    text, expected = MESSAGES[code]
    assert "\n".join(map(str, findings_of(text))) == textwrap.dedent(expected).strip()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("spec: 1\nid: x\n", "a spec needs 'title', 'version' and 'architectures'"),
        ("spec: 1\nid: x\nextends: y\n", None),
        (RULES + "      - {target: a, others: skip}\n", "a rule with 'others' needs 'any_of'"),
        (HEAD + "runtimes: {vllm: {skip: [{source: a}]}}\n", "a skip needs 'why'"),
        (HEAD + "runtimes: {vllm: {keep: [{target: a}]}}\n", "a keep needs 'why'"),
        (HEAD + "index: {a: {first: 1}}\n", "an index needs 'count' or 'values'"),
        (HEAD + "cases: [{config: a, runtime: b}]\n", "a case needs 'maps', 'skips' or 'unknown'"),
        (
            HEAD + "cases: [{config: a, runtime: b, rank: -1, skips: [x]}]\n",
            "expected a rank of at least 0, found the number -1",
        ),
        (RULES + "      - {when: a, ruls: []}\n", "unknown key 'ruls' in a group"),
        (RULES + "      - {when: a, coyp: []}\n", "unknown key 'coyp' in a copy"),
        (RULES + "      - a\n", "expected a rule, a group, a copy, a rename or a drop, found the text 'a'"),
        (HEAD + "blocks: {a: [{target: ''}]}\n", "expected a pattern, found ''"),
        (HEAD + "let: {a: ''}\n", "expected an expression, found ''"),
        (HEAD.replace("1.0.0", "1.0"), "expected a version such as 1.0.0, found the number 1.0"),
    ],
)
def test_corners(text, message):
    assert [each.message for each in findings_of(text)] == ([] if message is None else [message])


@pytest.mark.parametrize("word", ["yes", "no", "on", "off", "Yes", "OFF", "none", "None", "True", "False"])
def test_every_word_that_looks_like_a_constant_has_its_spelling(word):
    instead = {"y": "true", "o": "true" if word.lower() == "on" else "false", "t": "true", "f": "false"}
    expected = "null" if word.lower() == "none" else "false" if word == "no" else instead[word[0].lower()]
    (found,) = findings_of(HEAD + f"let: {{a: '{word}'}}\n")
    assert found.message == f"{word!r} is a text here; write {expected}"


def test_findings_come_in_file_order():
    text = RULES + "".join(f"      - {{tagret: {letter}, optional: yes}}\n" for letter in string.ascii_lowercase)
    places = [(each.place.line, each.place.column) for each in findings_of(text) if each.place]
    assert len(places) == 52
    assert places == sorted(places)
