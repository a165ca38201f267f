"""What is found in a spec before any config is known."""

import re
import textwrap
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mapper.diagnostics import Diagnostic, MapperError
from mapper.messages import spec as spec_messages
from mapper.messages import text as text_messages
from mapper.spec import load_spec
from mapper.spec.bundled import read_builtin, read_spec
from mapper.spec.check import check_spec
from mapper.spec.inherit import merge
from mapper.spec.parse import parse_spec
from mapper.yaml_source import parse_text

DATA = Path(__file__).parents[1] / "specs"
HEAD = """\
spec: 1
id: tiny
title: Tiny
version: 1.0.0
architectures: [TinyForCausalLM]
config: {required: [size, heads]}
index: {layer: {count: 2, axis: pp}, expert: {count: 4, axis: ep}}
"""


def findings_of(text: str) -> tuple[Diagnostic, ...]:
    node = parse_text(HEAD + textwrap.dedent(text), file="x.yaml")
    return check_spec(parse_spec(merge(None, node), builtin=read_builtin()))


def codes_of(text: str) -> list[str]:
    return [each.code for each in findings_of(text)]


def in_runtime(*rules: str, before: str = "") -> str:
    return before + "runtimes:\n  r:\n    mesh: vllm\n    rules:\n" + "".join(f"      - {rule}\n" for rule in rules)


# --- properties -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(DATA.glob("*.yaml")), ids=lambda path: path.stem)
def test_real_specs_are_clean(path):
    assert check_spec(read_spec(path)) == ()


@given(st.sampled_from(["deepseek_v2", "deepseek_v4", "gpt_oss", "llama"]), st.data())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_taking_a_config_key_away_is_found_at_every_use(name, data):
    text = (DATA / f"{name}.yaml").read_text()
    spec = parse_spec(merge(None, parse_text(text, file="x")), builtin=read_builtin())
    key = data.draw(st.sampled_from([key for key in spec.config.values() if key.default is None]))
    lines = text.split("\n")
    line = lines[key.place.line - 1]
    start = key.place.column - 1
    lines[key.place.line - 1] = f"{line[:start]}renamed{line[start + len(key.name) :]}"
    findings = check_spec(parse_spec(merge(None, parse_text("\n".join(lines), file="x")), builtin=read_builtin()))
    assert {each.message for each in findings} <= {f"unknown name {key.name!r}"}
    places = [each.place for each in findings]
    assert len(set(places)) == len(places)
    for place in places:
        assert place is not None
        assert place.text[place.column - 1 :].startswith(key.name)
    used_in = {n for n, each in enumerate(lines, 1) if key.name in each.replace("_" + key.name, "").split("#")[0]}
    assert {place.line for place in places if place is not None} <= used_in
    assert findings or not used_in


@given(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=6), st.data())
@settings(deadline=None)
def test_lets_are_in_a_circle_exactly_when_no_order_defines_them(names, data):
    names = list(dict.fromkeys(names))
    refers = {name: data.draw(st.lists(st.sampled_from(names), unique=True, max_size=2)) for name in names}
    lets = "".join(f"  {name}: {' + '.join(refers[name]) or 1}\n" for name in names)
    defined: set[str] = set()
    for _ in names:
        defined |= {name for name in names if defined.issuperset(refers[name])}
    assert ("M206" in codes_of(f"let:\n{lets}")) == (len(defined) < len(names))


def test_findings_come_once_and_in_file_order():
    block = "blocks: {b: [{target: b1, when: one}, {target: b2, when: two}]}\n"
    findings = findings_of(in_runtime("use: b", "use: b", "{at: c, use: b}", before=block))
    assert [each.message for each in findings] == ["unknown name 'one'", "unknown name 'two'"]


def test_load_spec_raises_them(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(HEAD + "let: {a: b, c: d}\n")
    with pytest.raises(MapperError) as raised:
        load_spec(path)
    assert [each.message for each in raised.value.diagnostics] == ["unknown name 'b'", "unknown name 'd'"]


# --- what is known where --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "let: {a: size + tp * pp * dp * ep}\n",
        "let: {a: block_out if quant_method is null else group_size, b: block_in}\n",
        "let: {f(x): x + size, a: f(2)}\nblocks: {b: []}\n",
        in_runtime("{target: a, when: layer > moe_tp}"),
        in_runtime("{at: a, let: {w: size}, rules: [{target: b, dims: {x: w}}]}"),
        in_runtime("{at: a, let: {w: size}, use: b}", before="blocks: {b: [{target: c, dims: {x: w}}]}\n"),
        in_runtime("{at: a, let: {f(i): i + size}, rules: [{target: b, dims: {x: f(1)}}]}"),
        "blocks: {unused: [{target: c, dims: {x: w}}], other: [{at: a, let: {w: 1}, use: unused}]}\n",
        in_runtime("{target: 'a.{layer}', source: 'b.{layer + 1}.{size}'}"),
        in_runtime("{target: 'a.{expert}', source: a}"),
        in_runtime("{target: a, source: 'b.{expert}', stack: {expert: out}, dims: {out: size}}"),
        in_runtime("{target: a, stack: expert, any_of: [{source: 'b.{expert}'}, {source: b}]}"),
        in_runtime("{target: 'a.{leaf}', shard: {out: tp}, dims: {out: size, in: size}}"),
        in_runtime("{target: 'a.{leaf}', shard: {in: tp}}"),
        in_runtime("{target: a, source: 'b.{expert}', stack: expert, shard: {expert: ep}}"),
        in_runtime("{target: a, dims: {x: [1, 2]}, sources: [b, c], shard: {x: {axis: [tp, null], units: [1, 1]}}}"),
        in_runtime("{target: a, dims: {x: [1, 2]}, shard: {x: {axis: tp, units: 2}}}"),
        in_runtime("{targets: [a, b], source: c, dims: {x: [1, 2]}}"),
        in_runtime("{copy: [a, b], id: both}"),
        "runtimes: {r: {let: {b: 1}, rules: [{target: a, dims: {x: b}}]}}\n",
        "let: {wide: extra * 2}\nruntimes: {r: {mesh: {extra: 1}}}\n",
        "runtimes: {r: {index: {layer: {count: 3}}}}\n",
    ],
)
def test_what_is_right_is_not_reported(text):
    assert findings_of(text) == ()


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("let: {f(x): x, a: x}\n", ["unknown name 'x'"]),
        (in_runtime("{at: a, let: {w: size}, rules: []}", "{target: b, dims: {x: w}}"), ["unknown name 'w'"]),
        ("runtimes: {r: {let: {b: 1}}, s: {rules: [{target: a, dims: {x: b}}]}}\n", ["unknown name 'b'"]),
        ("runtimes: {r: {mesh: {extra: 1}}, s: {rules: [{target: a, when: extra}]}}\n", ["unknown name 'extra'"]),
        (in_runtime("{at: 'a.{lyer}', rules: []}"), ["unknown name 'lyer'"]),
        (in_runtime("{at: {source: 'a.{x1}', target: 'b.{x2}'}, rules: []}"), ["unknown name 'x1'", "unknown name 'x2'"]),
        (in_runtime("{target: a, tie: 'b.{x1}'}"), ["unknown name 'x1'"]),
        (in_runtime("{target: a, dtype: flot32, stage: frist}"), ["unknown name 'flot32'", "unknown name 'frist'"]),
        (in_runtime("{target: a, dims: {x: 4}, do: [{view: (a b) -> (b a), a: x1}, {add: x2}]}"),
         ["unknown name 'x1'", "unknown name 'x2'"]),
        (in_runtime("{target: a, dims: {x: 1}, shard: {x: {axis: tp, pad: x1, pad_rank: x2, fill: x3, units: x4}}}"),
         ["unknown name 'x1'", "unknown name 'x2'", "unknown name 'x3'", "unknown name 'x4'"]),
        ("formats: {f: [{when: x1, leaves: {w: {dims: [o / x2], stored: [o / x3], cast: x4, neutral: x5}}}]}\n",
         ["unknown name 'x1'", "unknown name 'x2'", "unknown name 'x3'", "unknown name 'x4'", "unknown name 'x5'"]),
        ("formats: {f: [{leaves: {w: {dims: [o], dequantize: {a: {dims: [o / x1], dtype: x2}, b: {dims: [o]}}}}}]}\n",
         ["unknown name 'x1'", "unknown name 'x2'"]),
        ("runtimes: {r: {skip: [{source: 'a.{x1}', why: w, when: x2}], keep: [{target: 'a.{x3}', why: w}]}}\n",
         ["unknown name 'x1'", "unknown name 'x2'", "unknown name 'x3'"]),
        ("runtimes: {r: {requires: [{that: x1, why: w}], mesh: {like: vllm, more: x2, round_robin: x3}}}\n",
         ["unknown name 'x1'", "unknown name 'x2'", "unknown name 'x3'"]),
        ("runtimes: {r: {finalize: [{id: f, inputs: ['a.{x1}'], output: 'b.{x2}', do: [{sum: a b -> a, b: x3}], when: x4}]}}\n",
         ["unknown name 'x1'", "unknown name 'x2'", "unknown name 'x3'", "unknown name 'x4'"]),
        ("blocks: {unused: [{target: a, when: x1}]}\n", ["unknown name 'x1'"]),
        (in_runtime("{at: a, let: {size: 1}, rules: []}"), ["'size' is a let and also a config key"]),
        (in_runtime("{at: a, let: {p: q, q: p}, rules: []}"), ["definitions refer to each other in a circle: p -> q -> p"]),
        ("let: {f(x): f(x)}\n", ["definitions refer to each other in a circle: f -> f"]),
        ("runtimes: {r: {let: {p: q, q: p}}}\n", ["definitions refer to each other in a circle: p -> q -> p"]),
        (in_runtime("{target: a, source: b.c}", "{at: {source: 'e.{expert}', target: f}, rules: [{target: g}]}"),
         ["the index 'expert' stands in the source, but neither in the target nor in `stack`"]),
        ("let: {slot: expert + 1}\n" + in_runtime("{target: a, source: 'b.{slot}'}"),
         ["the index 'expert' stands in the source, but neither in the target nor in `stack`"]),
        (in_runtime("{target: a, sources: ['b.{expert}', c], stack: expert, dims: {x: [1, 1]}}"),
         ["the index 'expert' is stacked, but stands in no source"]),
        (in_runtime("{target: a, dims: {x: 1}, stored: {x: (y x)}, append: z}"),
         ["unknown dim 'y' in `stored`", "unknown dim 'z' in `append`"]),
        (in_runtime("{target: a, source: 'b.{expert}', stack: {expert: out}}"), ["unknown dim 'out' in `stack`"]),
    ],
)  # fmt: skip
def test_what_is_wrong_is_reported(text, messages):
    assert sorted(each.message for each in findings_of(text)) == messages


@pytest.mark.parametrize(
    ("do", "code", "problem"),
    [
        ("[{view: in out -> in out}]", "M227", "the axis 'in' stands where the dim 'out' is"),
        ("[{view: (a b) -> (b a), a: 2}]", "M227", "1 axes on the left and 1 on the right, expected 2 on each side: out, in"),
        ("[{view: (a b) in -> (b c) in, a: 2}]", "M227", "the factor 'a' of 'out' is on one side only"),
        ("[{view: (a a) in -> (a a) in, a: 2}]", "M227", "the factor 'a' stands twice on one side"),
        ("[{view: (a b) in -> (b a b) in, a: 2}]", "M227", "a factor of 'out' stands twice on one side"),
        ("[{view: (a b) inn -> (b a) inn, a: 2}]", "M227", "the axis 'inn' stands where the dim 'in' is"),
        ("[{repeat: (a b) in -> (a k) in, a: 2}]", "M227", "the factor 'b' of 'out' is lost"),
        ("[{view: (a part) in -> (part a) in, part: 2}]", "M227",
         "the size of 'part' is given, which follows from the parts of the dim"),
        ("[{view: (a b) in -> (b a) in, a: 2, parts: [2]}]", "M228", "there is no part 2, the dims of the rule have 1"),
        ("[{add: 1, head: 2}]", "M228", "'head' is for 'view' and 'repeat'"),
        ("[{add: 1, parts: [1]}]", "M228", "'parts' is for 'view' and 'repeat'"),
        ("{weight: [neg_exp]}", "M228", "the rule has no leaf 'weight', for its target has no {leaf}"),
        ("[{fill: 1}]", "M228", "it reads nothing, so the rule needs `dims` and `cast`, and no other operation"),
    ],
)  # fmt: skip
def test_an_operation_that_cannot_be_done_is_found_without_a_config(do, code, problem):
    found, *others = findings_of(in_runtime(f"{{target: a, dims: {{out: 12, in: 3}}, do: {do}}}"))
    assert {each.code for each in (found, *others)} == {code}
    assert found.message.endswith(f": {problem}")
    assert found.place is not None
    assert (found.place.line, found.place.column) == (12, 50 if do.startswith("[") else 59)


@pytest.mark.parametrize(
    ("rule", "problem"),
    [
        ("{target: a, do: [{view: (a b) -> (b a), a: 2}]}", "the rule needs `dims`"),
        ("{target: a, tie: b, do: [neg_exp]}", "a tied target is its twin, nothing is read"),
        ("{target: 'a.{leaf}', dims: {out: 12, in: 3}, do: {wieght: [neg_exp]}}", "the rule has no leaf 'wieght'"),
    ],
)
def test_an_operation_needs_what_it_is_done_to(rule, problem):
    (found,) = findings_of(in_runtime(rule))
    assert (found.code, found.message.partition(": ")[2]) == ("M228", problem)


# --- messages -------------------------------------------------------------------------------------------------------

MESSAGES = {
    "M124": (
        "let: {a: size if heads is not none else 1}\n",
        """
        x.yaml:8:31: M124 'none' is a text here; write null
          8 | let: {a: size if heads is not none else 1}
            |                               ^
        """,
    ),
    "M201": (
        "let: {a: 2 * siz}\n",
        """
        x.yaml:8:14: M201 unknown name 'siz'
          8 | let: {a: 2 * siz}
            |              ^
          hint: did you mean 'size'?
        """,
    ),
    "M202": (
        "let: {a: size + cell_div(size)}\n",
        """
        x.yaml:8:17: M202 unknown function 'cell_div'
          8 | let: {a: size + cell_div(size)}
            |                 ^
          hint: did you mean 'ceil_div'?
        """,
    ),
    "M203": (
        "let: {f(x): x, a: f + 1, b: size(1), c: a(1)}\n",
        """
        x.yaml:8:19: M203 'f' needs an argument: f(x)
          8 | let: {f(x): x, a: f + 1, b: size(1), c: a(1)}
            |                   ^
        x.yaml:8:29: M203 'size' is a value, not a function
          8 | let: {f(x): x, a: f + 1, b: size(1), c: a(1)}
            |                             ^
        x.yaml:8:41: M203 'a' takes no argument
          8 | let: {f(x): x, a: f + 1, b: size(1), c: a(1)}
            |                                         ^
        """,
    ),
    "M204": (
        "let: {size: 1, tp: 2}\n",
        """
        x.yaml:8:7: M204 'size' is a let and also a config key
          8 | let: {size: 1, tp: 2}
            |       ^
          the other: x.yaml:6:21
          6 | config: {required: [size, heads]}
            |                     ^
        x.yaml:8:16: M204 'tp' is a let and also a mesh axis
          8 | let: {size: 1, tp: 2}
            |                ^
        """,
    ),
    "M206": (
        "let: {a: b, b: a + 1}\n",
        """
        x.yaml:8:7: M206 definitions refer to each other in a circle: a -> b -> a
          8 | let: {a: b, b: a + 1}
            |       ^
        """,
    ),
    "M207": (
        in_runtime("{target: a, stack: expret}"),
        """
        x.yaml:12:18: M207 unknown index 'expret'
          12 |       - {target: a, stack: expret}
             |                  ^
          hint: did you mean 'expert'?
        """,
    ),
    "M208": (
        in_runtime("{target: 'a.{leaf}', format: lineal}"),
        """
        x.yaml:12:18: M208 unknown format 'lineal'
          12 |       - {target: 'a.{leaf}', format: lineal}
             |                  ^
          hint: did you mean 'linear'?
        """,
    ),
    "M209": (
        in_runtime("use: bock", before="blocks: {block: []}\n"),
        """
        x.yaml:13:14: M209 unknown block 'bock'
          13 |       - use: bock
             |              ^
          hint: did you mean 'block'?
        """,
    ),
    "M210": (
        in_runtime("{target: a, dims: {x: 1}, shard: {x: moe_pt}}"),
        """
        x.yaml:12:43: M210 unknown axis 'moe_pt'
          12 |       - {target: a, dims: {x: 1}, shard: {x: moe_pt}}
             |                                           ^
          hint: did you mean 'moe_tp'?
        """,
    ),
    "M211": (
        in_runtime("{target: a, dims: {vocab: 1}, shard: {vocal: tp}}"),
        """
        x.yaml:12:47: M211 unknown dim 'vocal' in `shard`
          12 |       - {target: a, dims: {vocab: 1}, shard: {vocal: tp}}
             |                                               ^
          hint: did you mean 'vocab'?
        """,
    ),
    "M212": (
        "let: {int8: 1}\n",
        """
        x.yaml:8:7: M212 'int8' is a word of the language and cannot be a let
          8 | let: {int8: 1}
            |       ^
        """,
    ),
    "M213": (
        in_runtime("{target: a, source: 'b.{leaf}'}", "{target: 'a.{leaf}', source: b}"),
        """
        x.yaml:12:30: M213 the source has {leaf}, the target has not
          12 |       - {target: a, source: 'b.{leaf}'}
             |                              ^
        x.yaml:13:38: M213 the target has {leaf}, the source has not
          13 |       - {target: 'a.{leaf}', source: b}
             |                                      ^
        """,
    ),
    "M214": (
        in_runtime("{target: a, stack: expert}"),
        """
        x.yaml:12:18: M214 the index 'expert' is stacked, but stands in no source
          12 |       - {target: a, stack: expert}
             |                  ^
        """,
    ),
    "M215": (
        in_runtime("{target: a, source: 'b.{expert}'}"),
        """
        x.yaml:12:30: M215 the index 'expert' stands in the source, but neither in the target nor in `stack`
          12 |       - {target: a, source: 'b.{expert}'}
             |                              ^
        """,
    ),
    "M216": (
        in_runtime("{target: a, dims: {x: [1, 2], y: [1, 2]}}"),
        """
        x.yaml:12:39: M216 dims 'x' and 'y' both have parts
          12 |       - {target: a, dims: {x: [1, 2], y: [1, 2]}}
             |                                       ^
          the other: x.yaml:12:28
          12 |       - {target: a, dims: {x: [1, 2], y: [1, 2]}}
             |                            ^
        """,
    ),
    "M217": (
        in_runtime(
            "{target: a, dims: {x: [1, 2]}, sources: [b, c, d], shard: {x: {units: [1, 1, 1]}}}",
            "{target: a, dims: {y: 1}, shard: {y: {axis: [tp, tp]}}}",
            "{targets: [a, b], source: c}",
        ),
        """
        x.yaml:12:9: M217 3 sources, but dim 'x' has 2 parts
          12 |       - {target: a, dims: {x: [1, 2]}, sources: [b, c, d], shard: {x: {units: [1, 1, 1]}}}
             |         ^
        x.yaml:12:68: M217 3 units, but dim 'x' has 2 parts
          12 |       - {target: a, dims: {x: [1, 2]}, sources: [b, c, d], shard: {x: {units: [1, 1, 1]}}}
             |                                                                    ^
        x.yaml:13:43: M217 2 axes, but dim 'y' has no parts
          13 |       - {target: a, dims: {y: 1}, shard: {y: {axis: [tp, tp]}}}
             |                                           ^
        x.yaml:14:20: M217 2 targets, but no dim has parts
          14 |       - {targets: [a, b], source: c}
             |                    ^
        """,
    ),
    "M218": (
        in_runtime(
            "{target: 'a.{leaf}', any_of: [{source: 'b.{leaf}', format: f}, {source: 'c.{leaf}', format: norm}]}",
            before="formats: {f: [{leaves: {wait: [out]}}]}\n",
        ),
        """
        x.yaml:13:18: M218 the formats 'f' and 'norm' of one rule never have the same target leaves: (wait) and (weight)
          13 |       - {target: 'a.{leaf}', any_of: [{source: 'b.{leaf}', format: f}, {source: 'c.{leaf}', format: norm}]}
             |                  ^
        """,
    ),
    "M219": (
        in_runtime("use: a", before="blocks: {a: [{use: b}], b: [{use: a}]}\n"),
        """
        x.yaml:8:35: M219 the block 'a' uses itself: a -> b -> a
          8 | blocks: {a: [{use: b}], b: [{use: a}]}
            |                                   ^
        """,
    ),
    "M221": (
        "runtimes: {vllm: {}}\ncases: [{config: c, runtime: vlm, skips: [a]}]\n",
        """
        x.yaml:9:9: M221 the case is about an unknown runtime 'vlm'
          9 | cases: [{config: c, runtime: vlm, skips: [a]}]
            |         ^
          hint: did you mean 'vllm'?
        """,
    ),
    "M222": (
        "options: {mega: {default: 1}}\nruntimes: {r: {}}\ncases: [{config: c, runtime: r, options: {maga: 2}, skips: [a]}]\n",
        """
        x.yaml:10:9: M222 the case sets an unknown option 'maga'
          10 | cases: [{config: c, runtime: r, options: {maga: 2}, skips: [a]}]
             |         ^
          hint: did you mean 'mega'?
        """,
    ),
    "M226": (
        """
        options: {extra: {default: 1}}
        runtimes:
          r:
            counts:
              - {index: layer, source: 'a.{layer}.{expert}', config: sizes, option: extr, why: w}
              - {index: laye, source: 'a.**', config: size, why: w}
            rules: [{target: a}]
        """,
        """
        x.yaml:13:9: M226 the count of 'layer' names 'a.{layer}.{expert}', which does not have that index and no other
          13 |       - {index: layer, source: 'a.{layer}.{expert}', config: sizes, option: extr, why: w}
             |         ^
        x.yaml:13:9: M201 unknown name 'sizes'
          13 |       - {index: layer, source: 'a.{layer}.{expert}', config: sizes, option: extr, why: w}
             |         ^
          hint: did you mean 'size'?
        x.yaml:13:9: M201 unknown name 'extr'
          13 |       - {index: layer, source: 'a.{layer}.{expert}', config: sizes, option: extr, why: w}
             |         ^
          hint: did you mean 'extra'?
        x.yaml:14:9: M207 unknown index 'laye'
          14 |       - {index: laye, source: 'a.**', config: size, why: w}
             |         ^
          hint: did you mean 'layer'?
        """,
    ),
    "M225": (
        """
        runtimes:
          r:
            versions: {vllm: '>=0.32 <0.34', torch: '>=2.6'}
            rules: [{target: a}]
        """,
        """
        x.yaml:11:22: M225 the versions of 'vllm' are '>=0.32 <0.34', which is no PEP 440 specifier
          11 |     versions: {vllm: '>=0.32 <0.34', torch: '>=2.6'}
             |                      ^
        """,
    ),
    "M224": (
        in_runtime("{target: 'a.{expert}', source: 'b.{expert}', stack: expert}"),
        """
        x.yaml:12:18: M224 the index 'expert' is stacked, and stands in the target too
          12 |       - {target: 'a.{expert}', source: 'b.{expert}', stack: expert}
             |                  ^
        """,
    ),
    "M227": (
        in_runtime("{target: a, dims: {out: 6}, do: [{view: (a b) -> (b a), a: 2, hed: 3}]}"),
        """
        x.yaml:12:42: M227 in the view '(a b) -> (b a)': the size of 'hed' is given, which is no factor of the view
          12 |       - {target: a, dims: {out: 6}, do: [{view: (a b) -> (b a), a: 2, hed: 3}]}
             |                                          ^
          hint: known: a, b
        """,
    ),
    "M228": (
        in_runtime("{target: a, dims: {out: 6}, do: [{subtract_mean: ou}]}"),
        """
        x.yaml:12:42: M228 `subtract_mean ou`: the rule has no dim 'ou'
          12 |       - {target: a, dims: {out: 6}, do: [{subtract_mean: ou}]}
             |                                          ^
          hint: did you mean 'out'?
        """,
    ),
}


@pytest.mark.parametrize("code", MESSAGES)
def test_a_finding_says_where_what_and_what_instead(code):
    text, expected = MESSAGES[code]
    assert "\n".join(map(str, findings_of(text))) == textwrap.dedent(expected).strip()


def test_every_code_of_this_stage_has_its_text_in_a_test():
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    codes = [*text_messages.MESSAGES, *spec_messages.MESSAGES]
    assert [code for code in codes if re.search(rf"(: |\"|'){code} \S", tests) is None] == []


def test_every_message_says_why_and_how_to_fix_it():
    for code, message in {**text_messages.MESSAGES, **spec_messages.MESSAGES}.items():
        assert message.why.endswith("."), code
        assert message.fix.endswith("."), code
