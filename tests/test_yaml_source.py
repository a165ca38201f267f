import math
import string
import textwrap
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from mapper.diagnostics import MapperError, Place
from mapper.yaml_source import MAX_DEPTH, Mapping, Node, Scalar, Sequence, parse_text, place_at, plain, read_file, resolve

LOADERS = [yaml.SafeLoader, *([yaml.CSafeLoader] if hasattr(yaml, "CSafeLoader") else [])]
SPECS = sorted((Path(__file__).parents[1] / "specs").glob("*.yaml"))


# --- scalars --------------------------------------------------------------------------------------------------------


def reference_resolve(text: str) -> object:
    """YAML 1.2 core, rule by rule, without regular expressions."""
    if text in ("", "~", "null", "Null", "NULL"):
        return None
    if text in ("true", "True", "TRUE"):
        return True
    if text in ("false", "False", "FALSE"):
        return False
    if text[:2] == "0o" and text[2:] and set(text[2:]) <= set("01234567"):
        return int(text, 8)
    if text[:2] == "0x" and text[2:] and set(text[2:]) <= set(string.hexdigits):
        return int(text, 16)
    unsigned = text[1:] if text[0] in "+-" else text
    if unsigned and set(unsigned) <= set(string.digits):
        return int(text)
    if unsigned in (".inf", ".Inf", ".INF"):
        return -math.inf if text[0] == "-" else math.inf
    if text in (".nan", ".NaN", ".NAN"):
        return math.nan
    number, e, exponent = unsigned.replace("E", "e").partition("e")
    if e:
        digits = exponent[1:] if exponent[:1] in ("+", "-") else exponent
        if not digits or not set(digits) <= set(string.digits):
            return text
    whole, dot, fraction = number.partition(".")
    if not set(whole + fraction) <= set(string.digits) or not (whole or (dot and fraction)):
        return text
    return float(text)


@given(st.text("0123456789+-.eEox_:", min_size=1, max_size=7) | st.sampled_from([".inf", "-.Inf", ".NAN", "nUll", "TRUE", "~"]))
@example("1e3")
@example("0o14")
@example("012")
@example("1_000")
@example("1:30")
@example("2020-01-01")
@example(".")
@example("1.")
@example("+.5E-3")
def test_plain_scalars_follow_yaml_1_2_core(text):
    value, expected = resolve(text), reference_resolve(text)
    assert type(value) is type(expected)
    assert value == expected or (value != value and expected != expected)


@pytest.mark.parametrize("word", ["yes", "no", "on", "off", "Yes", "NO", "y", "0b11", "1_000", "1:30", "2020-01-01", "none"])
def test_words_of_yaml_1_1_are_texts(word):
    assert plain(parse_text(f"a: {word}\n", file="x")) == {"a": word}


@pytest.mark.parametrize("written", ["'12'", '"true"', "'null'", '"~"', "'.inf'", "''"])
def test_quoted_scalars_are_texts(written):
    assert plain(parse_text(f"a: {written}\n", file="x")) == {"a": written[1:-1]}


# --- places ---------------------------------------------------------------------------------------------------------

NAMES = st.text(string.ascii_lowercase, min_size=1, max_size=6).map(lambda name: f"k{name}")
TREES = st.recursive(
    st.integers(-99, 99) | NAMES | st.none() | st.booleans(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=12,
)


def keys_of(node: Node) -> list[Scalar]:
    if isinstance(node, Scalar):
        return []
    if isinstance(node, Sequence):
        return [key for item in node.items for key in keys_of(item)]
    return [key for entry in node.entries for key in (entry.key, *keys_of(entry.value))]


@given(st.dictionaries(NAMES, TREES, min_size=1, max_size=4), st.sampled_from([None, True, False]), st.integers(2, 4))
def test_every_key_of_a_random_tree_stands_where_its_place_says(tree, flow, indent):
    text = yaml.safe_dump(tree, default_flow_style=flow, indent=indent, sort_keys=False)
    node = parse_text(text, file="x.yaml")
    assert plain(node) == tree
    keys = keys_of(node)
    assert len({(key.place.line, key.place.column) for key in keys}) == len(keys)
    for key in keys:
        assert key.place.text == text.split("\n")[key.place.line - 1]
        assert key.place.text[key.place.column - 1 :].startswith(key.text)


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_both_loaders_of_pyyaml_give_the_same_tree(path):
    trees = [parse_text(path.read_text(), file="x", loader=loader) for loader in LOADERS]
    assert trees[0] == trees[-1]


@given(st.dictionaries(NAMES, TREES, min_size=1, max_size=4), st.sampled_from([None, True, False]))
def test_both_loaders_of_pyyaml_give_the_same_random_tree(tree, flow):
    text = yaml.safe_dump(tree, default_flow_style=flow, allow_unicode=True)
    trees = [parse_text(text, file="x", loader=loader) for loader in LOADERS]
    assert trees[0] == trees[-1]


def test_there_are_two_loaders_to_compare():
    assert len(LOADERS) == 2


@pytest.mark.parametrize(
    ("line", "offset", "column"),
    [
        ("a: bcd", 2, 6),
        ("a: 'bcd'", 2, 7),
        ("a: 'b''cd'", 2, 8),
        ('a: "bcd"', 2, 7),
        ('a: "b\\tcd"', 3, 4),
        ("ä: bcd", 2, 6),
    ],
)
def test_a_column_inside_a_scalar_minds_its_quotes(line, offset, column):
    scalar = parse_text(line + "\n", file="x").entries[0].value
    assert isinstance(scalar, Scalar)
    assert place_at(scalar, offset) == Place("x", 1, column, line)


def test_a_column_inside_a_folded_scalar_is_its_start():
    scalar = parse_text("a: >\n  bcd\n  efg\n", file="x").entries[0].value
    assert isinstance(scalar, Scalar)
    assert place_at(scalar, 5) == scalar.place == Place("x", 1, 4, "a: >")


def test_lines_end_as_yaml_says():
    node = parse_text("a: 1\r\nb: 2\r\n", file="x")
    assert [entry.key.place for entry in node.entries] == [Place("x", 1, 1, "a: 1"), Place("x", 2, 1, "b: 2")]


# --- errors ---------------------------------------------------------------------------------------------------------


def rendered(text: str, loader=None) -> str:
    with pytest.raises(MapperError) as raised:
        parse_text(text, file="x.yaml", loader=loader)
    return str(raised.value)


ERRORS = {
    "M101": (
        "let: [a\nb: 1\n",
        """
        x.yaml:2:2: M101 not YAML: did not find expected ',' or ']'
          2 | b: 1
            |  ^
          while parsing a flow sequence: x.yaml:1:6
          1 | let: [a
            |      ^
        """,
    ),
    "M102": (
        "a: 1\nb: 2\n'a': 3\n",
        """
        x.yaml:3:1: M102 the key 'a' is given twice
          3 | 'a': 3
            | ^
          first given here: x.yaml:1:1
          1 | a: 1
            | ^
        """,
    ),
    "M103": (
        "a: &x 1\nb: *x\n",
        """
        x.yaml:1:4: M103 '&x': anchors and aliases are not part of the language
          1 | a: &x 1
            |    ^
        x.yaml:2:4: M103 '*x': anchors and aliases are not part of the language
          2 | b: *x
            |    ^
        """,
    ),
    "M104": (
        "a: !!str 1\n",
        """
        x.yaml:1:4: M104 the tag 'tag:yaml.org,2002:str' is not part of the language
          1 | a: !!str 1
            |    ^
        """,
    ),
    "M105": (
        "<<: {a: 1}\n",
        """
        x.yaml:1:1: M105 the merge key '<<' is not part of the language
          1 | <<: {a: 1}
            | ^
        """,
    ),
    "M106": (
        "3: a\n~: b\n[c]: d\n",
        """
        x.yaml:1:1: M106 a key is a text, found the number 3
          1 | 3: a
            | ^
        x.yaml:2:1: M106 a key is a text, found null
          2 | ~: b
            | ^
        x.yaml:3:1: M106 a key is a text, found a list
          3 | [c]: d
            | ^
        """,
    ),
    "M107": (
        "a:\n\tb: 1\nc: 'd\te'\n",
        """
        x.yaml:2:1: M107 a tab; indent and separate with spaces
          2 | \tb: 1
            | ^
        x.yaml:3:6: M107 a tab; indent and separate with spaces
          3 | c: 'd\te'
            |      ^
        """,
    ),
    "M108": (
        "a: 1\n---\nb: 2\n",
        """
        x.yaml:2:1: M108 a second document starts here
          2 | ---
            | ^
        """,
    ),
    "M109": (
        "# nothing\n",
        """
        x.yaml:1:1: M109 the file is empty
          1 | # nothing
            | ^
        """,
    ),
    "M112": (
        "- a\n",
        """
        x.yaml:1:1: M112 a spec is a mapping of keys to values, found a list
          1 | - a
            | ^
        """,
    ),
    "M113": (
        "a: " + "[" * MAX_DEPTH + "]" * MAX_DEPTH + "\n",
        f"""
        x.yaml:1:{MAX_DEPTH + 3}: M113 nested deeper than 64 levels
          1 | a: {"[" * MAX_DEPTH + "]" * MAX_DEPTH}
            | {" " * (MAX_DEPTH + 2)}^
        """,
    ),
}


@pytest.mark.parametrize("code", ERRORS)
def test_what_is_no_plain_yaml_is_an_error_with_its_place(code):
    text, expected = ERRORS[code]
    assert rendered(text) == textwrap.dedent(expected).strip()


@pytest.mark.parametrize("code", ERRORS)
def test_both_loaders_of_pyyaml_find_the_same(code):
    findings = []
    for loader in LOADERS:
        with pytest.raises(MapperError) as raised:
            parse_text(ERRORS[code][0], file="x.yaml", loader=loader)
        findings.append([(each.code, each.place) for each in raised.value.diagnostics])
    assert findings[0] == findings[-1]
    assert {found for found, _ in findings[0]} == {code}


def test_all_findings_are_collected():
    text = "a: &x 1\na: !!int 2\n5: {<<: 1}\n"
    with pytest.raises(MapperError) as raised:
        parse_text(text, file="x")
    assert [each.code for each in raised.value.diagnostics] == ["M103", "M104", "M102", "M105", "M106"]


@pytest.mark.parametrize(
    ("text", "line", "column", "problem"),
    [
        ("a: \x01\n", 1, 4, "the character U+0001 cannot stand in YAML"),
        ("a:\n  b: " + "9" * 5000 + "\n", 2, 6, "the number has too many digits"),
    ],
)
def test_what_yaml_cannot_hold_is_an_error(text, line, column, problem):
    with pytest.raises(MapperError) as raised:
        parse_text(text, file="x")
    (found,) = raised.value.diagnostics
    assert found.message == f"not YAML: {problem}"
    assert found.place is not None
    assert (found.place.line, found.place.column) == (line, column)


def test_unquoted_braces_inside_braces_get_a_hint():
    assert rendered("a: {b: c.{i}}\n") == (
        "x.yaml:1:10: M101 not YAML: did not find expected ',' or '}'\n"
        "  1 | a: {b: c.{i}}\n"
        "    |          ^\n"
        "  while parsing a flow mapping: x.yaml:1:4\n"
        "  1 | a: {b: c.{i}}\n"
        "    |    ^\n"
        "  hint: inside { } and [ ], quote a name that has braces"
    )


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(MapperError) as raised:
        read_file(tmp_path / "a.yaml")
    assert str(raised.value) == f"M110 cannot read {tmp_path / 'a.yaml'}: No such file or directory"


def test_a_folder_is_an_error(tmp_path):
    with pytest.raises(MapperError) as raised:
        read_file(tmp_path)
    assert str(raised.value) == f"M110 cannot read {tmp_path}: Is a directory"


def test_bytes_that_are_no_utf_8_are_placed(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_bytes("a: 1\nbä: ".encode() + b"\xff\n")
    with pytest.raises(MapperError) as raised:
        read_file(path)
    assert str(raised.value) == f"{path}:2:5: M111 byte 0xff is not UTF-8"


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: 1\n")
    node, _ = read_file(path)
    assert isinstance(node, Mapping)
    assert node.entries[0].key == Scalar("a", "a", Place(str(path), 1, 1, "a: 1"))
