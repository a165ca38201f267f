"""Text -> Spec: what each key becomes, and what is wrong inside scalars."""

import pickle
import textwrap
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mapper.diagnostics import MapperError, Place
from mapper.expressions import Expression
from mapper.pattern import Pattern
from mapper.spec import load_spec
from mapper.spec.bundled import read_builtin
from mapper.spec.inherit import merge
from mapper.spec.model import Group, PlacedExpression, PlacedPattern, Rule, Spec, StepFormula
from mapper.spec.parse import parse_spec
from mapper.yaml_source import parse_text

DATA = Path(__file__).parents[1] / "specs"
SPECS = sorted(path.stem for path in DATA.glob("*.yaml"))
HEAD = "spec: 1\nid: tiny\ntitle: Tiny\nversion: 1.0.0\narchitectures: [TinyForCausalLM]\n"


class Scope:
    """Names with values, for evaluating what was parsed."""

    def __init__(self, **values: object) -> None:
        self.values = values

    def value(self, name: str) -> object:
        return self.values[name]

    def call(self, name: str, argument: object) -> object:
        raise AssertionError(name)


def spec_of(text: str) -> Spec:
    return parse_spec(merge(None, parse_text(HEAD + textwrap.dedent(text), file="x.yaml")), builtin=read_builtin())


def rules_of(text: str) -> tuple[Rule | Group, ...]:
    return spec_of(f"runtimes: {{r: {{rules: [{text}]}}}}\n").runtimes["r"].rules


def rule_of(text: str) -> Rule:
    (rule,) = rules_of(text)
    assert isinstance(rule, Rule)
    return rule


def rendered(text: str) -> str:
    with pytest.raises(MapperError) as raised:
        spec_of(text)
    return str(raised.value)


def walk(value: object):
    yield value
    if isinstance(value, dict):
        for each in value.values():
            yield from walk(each)
    elif isinstance(value, tuple):
        for each in value:
            yield from walk(each)
    elif hasattr(value, "__dataclass_fields__") and not isinstance(value, Expression | Pattern | Place):
        for name in value.__dataclass_fields__:
            yield from walk(getattr(value, name))


# --- real specs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SPECS)
def test_real_specs_load_clean(name):
    spec = load_spec(DATA / f"{name}.yaml")
    assert spec.id == name
    assert spec.runtimes


@pytest.mark.parametrize("name", SPECS)
def test_every_place_points_at_what_was_written(name):
    spec = load_spec(DATA / f"{name}.yaml")
    placed = [each for each in walk(spec) if isinstance(each, PlacedExpression | PlacedPattern)]
    assert len(placed) > 30
    for each in placed:
        line = each.place.text[each.place.column - 1 :]
        # Numbers, booleans and strings of config defaults are respelled; everything else stands there letter by letter.
        assert line.startswith(each.text) or line.startswith(each.text.lower()) or each.text.startswith(("'", "["))


@pytest.mark.parametrize("name", SPECS)
def test_a_spec_pickles(name):
    spec = load_spec(DATA / f"{name}.yaml")
    again = pickle.loads(pickle.dumps(spec))
    assert again == spec
    places = [[each.place for each in walk(one) if isinstance(each, PlacedExpression)] for one in (spec, again)]
    assert places[0] == places[1]


def test_equal_texts_have_equal_digests_and_others_do_not(tmp_path):
    path = tmp_path / "llama.yaml"
    text = (DATA / "llama.yaml").read_text()
    path.write_text(text)
    assert load_spec(path).digest == load_spec(DATA / "llama.yaml").digest
    path.write_text(text + "# more\n")
    assert load_spec(path).digest != load_spec(DATA / "llama.yaml").digest


# --- what keys become -----------------------------------------------------------------------------------------------


def test_absent_keys_have_their_defaults():
    spec = spec_of("runtimes: {r: {}}\nindex: {a: {count: 2}}\noptions: {o: {default: 1}}\n")
    runtime = spec.runtimes["r"]
    assert (spec.status, spec.extends, spec.cases, spec.digest) == ("draft", None, (), "")
    assert (runtime.mesh.like, runtime.rules, runtime.skip, runtime.keep, runtime.finalize) == ("single", (), (), (), ())
    assert runtime.mesh.axes["moe_tp"].evaluate(Scope()) == 1
    first = spec.index["a"].first
    assert first is not None
    assert first.evaluate(Scope()) == 0
    assert spec.options["o"].note == ""
    assert {"linear", "plain", "dequantized", "norm"} <= spec.formats.keys()


def test_config_keys_are_required_derived_renamed_or_defaulted():
    keys = spec_of(
        """
        config:
          required: [a]
          optional: {b: null, c: {default: a // 2}, d: {default: 3, path: t.d}, e: {path: t.e}, f: [1, x], g: fp4, h: true}
        """
    ).config
    assert [(key.name, key.path) for key in keys.values()] == [
        ("a", "a"), ("b", "b"), ("c", "c"), ("d", "t.d"), ("e", "t.e"), ("f", "f"), ("g", "g"), ("h", "h"),
    ]  # fmt: skip
    defaults = {key.name: key.default.evaluate(Scope(a=8)) for key in keys.values() if key.default is not None}
    assert defaults == {"b": None, "c": 4, "d": 3, "f": [1, "x"], "g": "fp4", "h": True}


def test_lets_have_at_most_one_parameter():
    lets = spec_of("let: {a: 1, f(x): x + 1}\n").let
    assert [(let.name, let.parameter, let.expression.text) for let in lets.values()] == [("a", None, "1"), ("f", "x", "x + 1")]


def test_an_index_is_a_range_or_values():
    indices = spec_of("index: {a: {first: n, count: m, axis: pp, where: a > 1}, b: {values: [k, 3]}}\n").index
    a, b = indices["a"], indices["b"]
    assert (a.first and a.first.text, a.count and a.count.text, a.axis, a.where and a.where.text, a.values) == (
        "n", "m", "pp", "a > 1", None,
    )  # fmt: skip
    assert (b.first, b.count, b.axis, b.where, b.values) == (None, None, None, None, ("k", 3))


def test_a_leaf_is_dims_or_a_mapping():
    spec = spec_of(
        """
        formats:
          f:
            - when: x
              leaves:
                a: [out, in / 32, 16]
                b: {source: '', target: _t, stored: [in, out / n], dims: [out], dtype: int8, bitcast: uint8, optional: true}
                c: {dims: [out], cast: float32, neutral: -1, dequantize: {w: {dims: [out], dtype: int8}, s: {dims: [out / 2]}}}
        """
    )
    (alternative,) = spec.formats["f"].alternatives
    a, b, c = alternative.leaves
    assert alternative.when is not None
    assert [(axis.dim, axis.divisor and axis.divisor.text, axis.size) for axis in a.dims] == [
        ("out", None, None), ("in", "32", None), (None, None, 16),
    ]  # fmt: skip
    assert (a.source, a.target, a.stored, a.optional) == ("a", "a", None, False)
    assert b.stored is not None
    assert [axis.dim for axis in b.stored] == ["in", "out"]
    assert (b.source, b.target, b.dtype and b.dtype.text, b.bitcast and b.bitcast.text, b.optional) == (
        "", "_t", "int8", "uint8", True,
    )  # fmt: skip
    assert (a.neutral, b.neutral, c.neutral and c.neutral.text) == (None, None, "-1")
    assert c.dequantize is not None
    assert [(half.name, half.dtype and half.dtype.text) for half in c.dequantize] == [("w", "int8"), ("s", None)]


def test_the_source_of_a_rule_is_its_target():
    rule = rule_of("{target: a.b}")
    assert [str(pattern) for pattern in rule.targets] == ["a.b"]
    assert [[str(source.pattern) for source in each.sources] for each in rule.alternatives] == [["a.b"]]
    assert (rule.dims, rule.shard, rule.stack, rule.append, rule.others, rule.optional, rule.do) == (
        None, {}, (), None, "error", False, {},
    )  # fmt: skip


def test_every_target_is_a_source_when_there_are_none():
    rule = rule_of("{targets: [a, b]}")
    assert [str(source.pattern) for source in rule.alternatives[0].sources] == ["a", "b"]


def test_a_tie_reads_nothing():
    rule = rule_of("{target: a, tie: b}")
    assert rule.alternatives == ()
    assert str(rule.tie) == "b"


def test_sources_alternatives_and_their_formats():
    rule = rule_of("{target: a, any_of: [{sources: [b, {source: c, format: f}]}, {source: d, format: g}], others: skip}")
    assert rule.others == "skip"
    assert [(each.format, [(str(s.pattern), s.format) for s in each.sources]) for each in rule.alternatives] == [
        (None, [("b", None), ("c", "f")]), ("g", [("d", None)]),
    ]  # fmt: skip


def test_copy_and_rename_are_one_rule_a_name_with_the_keys_beside():
    rules = rules_of("{copy: [a, b], dims: {x: n}, stage: last}, {rename: {c: d, e: f}, when: w, cast: int32}")
    assert all(isinstance(rule, Rule) for rule in rules)
    names = [(str(rule.alternatives[0].sources[0].pattern), str(rule.targets[0])) for rule in rules if isinstance(rule, Rule)]
    assert names == [("a", "a"), ("b", "b"), ("c", "d"), ("e", "f")]
    copied, renamed = rules[1], rules[3]
    assert isinstance(copied, Rule)
    assert isinstance(renamed, Rule)
    assert copied.dims is not None
    assert [size.text for size in copied.dims["x"].sizes] == ["n"]
    assert (copied.stage and copied.stage.text, renamed.when and renamed.when.text) == ("last", "w")
    assert copied.place.text[copied.place.column - 1] == "b"
    assert renamed.place.text[renamed.place.column - 1] == "e"


def test_empty_dims_are_a_scalar_and_absent_dims_are_unknown():
    assert rule_of("{target: a, dims: {}}").dims == {}
    assert rule_of("{target: a}").dims is None


def test_dims_have_parts_where_sizes_are_listed():
    dims = rule_of("{target: a, dims: {x: [n, m], y: 3, z: [k]}}").dims
    assert dims is not None
    assert [(dim.name, [size.text for size in dim.sizes], dim.has_parts) for dim in dims.values()] == [
        ("x", ["n", "m"], True), ("y", ["3"], False), ("z", ["k"], True),
    ]  # fmt: skip


def test_a_shard_is_an_axis_or_a_mapping_with_entries_a_part():
    shard = rule_of(
        "{target: a, shard: {x: tp, y: {axis: [tp, null], units: [h, 2], uneven: short, pad: 4, pad_rank: 8, fill: -inf, "
        "bias: first}, z: {pad: 64}, w: {axis: tp, replicate: true, joined: true}}}"
    ).shard
    x, y, z = shard["x"], shard["y"], shard["z"]
    assert [(shard[name].replicate, shard[name].joined) for name in "xyzw"] == [(False, False)] * 3 + [(True, True)]
    assert (x.axis, x.units, x.pad, x.uneven, x.pad_rank, x.fill, x.bias) == (("tp",), (), None, None, None, None, None)
    assert (y.axis, [each.text for each in y.units], y.uneven, y.bias) == (("tp", None), ["h", "2"], "short", "first")
    assert [each and each.evaluate(Scope()) for each in (y.pad, y.pad_rank, y.fill)] == [4, 8, float("-inf")]
    assert (z.axis, z.pad and z.pad.text) == ((), "64")


def test_stack_append_and_stored():
    assert rule_of("{target: a, stack: e}").stack == (("e", None),)
    assert rule_of("{target: a, stack: {e: out}}").stack == (("e", "out"),)
    rule = rule_of("{target: a, append: e, stored: {out: (e out), in: in}}")
    assert (rule.append, rule.stored) == ("e", {"out": ("e", "out"), "in": ("in",)})


def test_operations_are_for_all_leaves_or_one():
    do = rule_of(
        "{target: 'a.{leaf}', dims: {o: 6}, do: {weight: [{view: (a b) -> (b a), a: 2, b: [n, 3], parts: [2, 1]}]}}"
    ).do
    (operation,) = do["weight"]
    assert (operation.name, operation.text, operation.parts) == ("view", "view (a b) -> (b a)", (2, 1))
    assert operation.formula is not None
    assert (operation.formula.left, operation.formula.right, operation.formula.bare) == ((("a", "b"),), (("b", "a"),), (False,))
    assert {name: [size.text for size in sizes] for name, sizes in operation.sizes.items()} == {"a": ["2"], "b": ["n", "3"]}
    everywhere = rule_of("{target: a, dims: {x: 1}, do: [neg_exp, {add: n}, {multiply: 2}, {subtract_mean: x}]}").do
    assert [(each.name, each.value and each.value.text, each.dim) for each in everywhere[""]] == [
        ("neg_exp", None, ""), ("add", "n", ""), ("multiply", "2", ""), ("subtract_mean", None, "x"),
    ]  # fmt: skip


def test_groups_have_prefixes_conditions_lets_and_rules_or_a_block():
    at, sides, use = rules_of(
        "{at: 'a.{i}', rules: [{target: b}]}, "
        "{at: {source: s}, when: w, stage: last, let: {x: 1, f(y): y}, rules: []}, "
        "{use: blk}"
    )
    assert isinstance(at, Group)
    assert isinstance(sides, Group)
    assert isinstance(use, Group)
    assert (str(at.source), str(at.target), len(at.items), at.use) == ("a.{i}", "a.{i}", 1, None)
    assert (str(sides.source), str(sides.target)) == ("s", "")
    assert (sides.when and sides.when.text, sides.stage and sides.stage.text) == ("w", "last")
    assert {name: let.parameter for name, let in sides.let.items()} == {"x": None, "f": "y"}
    assert (use.use, use.items, str(use.source)) == ("blk", (), "")


def test_a_mesh_has_the_axes_of_its_preset_and_its_own():
    runtimes = spec_of(
        """
        runtimes:
          a: {mesh: vllm}
          b: {mesh: {like: vllm, shared_tp: 1, redundant_experts: 0, round_robin: n > 1}}
          c: {mesh: {extra: tp}}
        """
    ).runtimes
    a, b, c = (runtimes[name].mesh for name in "abc")
    assert (a.like, {name: size.text for name, size in a.axes.items()}) == ("vllm", {"moe_tp": "1 if ep > 1 else tp * dp"})
    assert {name: size.text for name, size in b.axes.items()} == {"moe_tp": "1 if ep > 1 else tp * dp", "shared_tp": "1"}
    assert (b.redundant_experts and b.redundant_experts.text, b.round_robin and b.round_robin.text) == ("0", "n > 1")
    assert (c.like, {name: size.text for name, size in c.axes.items()}) == ("single", {"moe_tp": "1", "extra": "tp"})


def test_the_rest_of_a_runtime():
    runtime = spec_of(
        """
        runtimes:
          r:
            requires: [{that: n > 1, why: because}]
            skip: [{source: '**.x', why: unused, when: w, id: s}]
            keep: [{target: 'a.*', why: computed}]
            let: {z: 1}
            index: {l: {count: 1}}
            formats: {f: [{leaves: {w: [out]}}]}
            finalize: [{id: step, inputs: [a, b], output: c, kind: buffer, do: [{call: f}, {sum: a b -> a}], when: w}]
        """
    ).runtimes["r"]
    (requirement,), (skip,), (keep,), (step,) = runtime.requires, runtime.skip, runtime.keep, runtime.finalize
    assert (requirement.that.text, requirement.why) == ("n > 1", "because")
    assert (str(skip.pattern), skip.why, skip.when and skip.when.text, skip.id) == ("**.x", "unused", "w", "s")
    assert (str(keep.pattern), keep.why, keep.when, keep.id) == ("a.*", "computed", None, "")
    assert (list(runtime.let), list(runtime.index), list(runtime.formats)) == (["z"], ["l"], ["f"])
    assert (step.id, [str(each) for each in step.inputs], str(step.output), step.kind) == ("step", ["a", "b"], "c", "buffer")
    called, summed = step.do
    assert (called.name, called.function, called.formula) == ("call", "f", None)
    assert (summed.name, summed.formula) == ("sum", StepFormula((("a",), ("b",)), (("a",),)))
    assert (step.consumes, step.restore) == (False, "")


def test_cases_pin_boxes_skips_and_unknown_names():
    named, literal = spec_of(
        """
        cases:
          - config: V3
            runtime: r
            layout: tp=4
            rank: 3
            options: {o: true}
            maps: {"a.b[9, 0:2048]": c, d: ["e[1:2]", f]}
            skips: [g]
            unknown: [h]
          - {config: {n: 2}, runtime: r, skips: [a]}
        """
    ).cases
    assert (named.config, named.runtime, named.layout, named.rank, named.options) == ("V3", "r", "tp=4", 3, {"o": True})
    assert [(s.name, s.box, t.name, t.box) for s, t in named.maps] == [
        ("a.b", ((9, 10), (0, 2048)), "c", None), ("d", None, "e", ((1, 2),)), ("d", None, "f", None),
    ]  # fmt: skip
    assert [each.name for each in named.skips + named.unknown] == ["g", "h"]
    assert (literal.config, literal.layout, literal.rank) == ({"n": 2}, "", 0)


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(1, 99)), min_size=1, max_size=4), st.booleans())
@settings(deadline=None)
def test_a_box_is_read_as_it_is_written(pairs, spaced):
    box = [(start, start + size) for start, size in pairs]
    parts = [str(start) if stop == start + 1 else f"{start}:{stop}" for start, stop in box]
    text = f"a.b[{(', ' if spaced else ',').join(parts)}]"
    (case,) = spec_of(f'cases: [{{config: c, runtime: r, skips: ["{text}"]}}]\n').cases
    assert case.skips[0].name == "a.b"
    assert case.skips[0].box == tuple(box)


# --- what is wrong inside scalars -----------------------------------------------------------------------------------

MESSAGES = {
    "M124": (
        "let: {a: x == 'none'}\n",
        """
        x.yaml:6:15: M124 'none' is a text here; write null
          6 | let: {a: x == 'none'}
            |               ^
        """,
    ),
    "M130": (
        "let:\n  a: x.y\n  b: 'len(''s'') + x.y'\n  c: None if x else 1\n  d:\n  e: >\n    1\n    + x.y\n  f: a / b\n",
        """
        x.yaml:7:6: M130 attributes such as '.y' are not part of the language
          7 |   a: x.y
            |      ^
        x.yaml:8:20: M130 attributes such as '.y' are not part of the language
          8 |   b: 'len(''s'') + x.y'
            |                    ^
        x.yaml:9:6: M130 None is written 'null' here
          9 |   c: None if x else 1
            |      ^
        x.yaml:10:5: M130 expected an expression, found nothing
          10 |   d:
             |     ^
        x.yaml:11:6: M130 attributes such as '.y' are not part of the language
          11 |   e: >
             |      ^
        x.yaml:14:6: M130 '/' stands in dims only; use '//' or ceil_div
          14 |   f: a / b
             |      ^
        """,
    ),
    "M131": (
        "blocks: {b: [{target: a..b}, {target: 'a.{i'}, {source: a.b*, target: c}]}\n",
        """
        x.yaml:6:25: M131 in the pattern 'a..b': a segment between two dots is empty
          6 | blocks: {b: [{target: a..b}, {target: 'a.{i'}, {source: a.b*, target: c}]}
            |                         ^
        x.yaml:6:42: M131 in the pattern 'a.{i': '{' is never closed
          6 | blocks: {b: [{target: a..b}, {target: 'a.{i'}, {source: a.b*, target: c}]}
            |                                          ^
        x.yaml:6:60: M131 in the pattern 'a.b*': '*' stands for a whole segment, not for a part of one
          6 | blocks: {b: [{target: a..b}, {target: 'a.{i'}, {source: a.b*, target: c}]}
            |                                                            ^
        """,
    ),
    "M132": (
        "blocks: {b: [{target: a.*.b}]}\n",
        """
        x.yaml:6:25: M132 'a.*.b' has a wildcard; '*' and '**' stand in skip and keep only
          6 | blocks: {b: [{target: a.*.b}]}
            |                         ^
        """,
    ),
    "M133": (
        "formats: {f: [{leaves: {w: [out, 2 out]}}]}\n",
        """
        x.yaml:6:34: M133 '2 out' is no axis; expected `dim`, `dim / EXPR` or an integer
          6 | formats: {f: [{leaves: {w: [out, 2 out]}}]}
            |                                  ^
        """,
    ),
    "M134": (
        "blocks: {b: [{target: a, stored: {x: (y-z)}}]}\n",
        """
        x.yaml:6:38: M134 '(y-z)' is no order of dims; expected `(outer inner)`
          6 | blocks: {b: [{target: a, stored: {x: (y-z)}}]}
            |                                      ^
        """,
    ),
    "M137": (
        "blocks: {b: [{target: a, do: [{view: (x y -> y}]}]}\n",
        """
        x.yaml:6:38: M137 '(x y -> y' is no view; expected `AXES -> AXES`, each axis a dim or its factors in parentheses
          6 | blocks: {b: [{target: a, do: [{view: (x y -> y}]}]}
            |                                      ^
        """,
    ),
    "M135": (
        "cases: [{config: c, runtime: r, skips: ['a]b']}]\n",
        """
        x.yaml:6:41: M135 'a]b' is no tensor name with a box; expected `name` or `name[0:4, 2]`
          6 | cases: [{config: c, runtime: r, skips: ['a]b']}]
            |                                         ^
        """,
    ),
    "M136": (
        "cases: [{config: c, runtime: r, skips: ['a[0:2,3:3]']}]\n",
        """
        x.yaml:6:48: M136 '3:3' is no range; expected `start:stop` with start < stop, or one integer
          6 | cases: [{config: c, runtime: r, skips: ['a[0:2,3:3]']}]
            |                                                ^
        """,
    ),
    "M205": (
        "runtimes: {r: {mesh: vlm}}\n",
        """
        x.yaml:6:22: M205 unknown mesh preset 'vlm'
          6 | runtimes: {r: {mesh: vlm}}
            |                      ^
          hint: did you mean 'vllm'?
        """,
    ),
    "M223": (
        "runtimes: {r: {mesh: {lik: vllm}}}\n",
        """
        x.yaml:6:23: M223 the axis 'lik' is almost the key 'like'
          6 | runtimes: {r: {mesh: {lik: vllm}}}
            |                       ^
        """,
    ),
}


@pytest.mark.parametrize("code", MESSAGES)
def test_a_finding_stands_at_its_column(code):
    text, expected = MESSAGES[code]
    assert rendered(text) == textwrap.dedent(expected).strip()


def test_an_error_inside_a_divisor_stands_at_its_column():
    with pytest.raises(MapperError) as raised:
        spec_of("formats: {f: [{leaves: {w: [out / x.y]}}]}\n")
    (found,) = raised.value.diagnostics
    assert found.place == Place("x.yaml", 6, 35, "formats: {f: [{leaves: {w: [out / x.y]}}]}")
