"""A compiled program: what is asked of its inputs, the ranges of its indices, its skips and keeps, and re-rooting."""

import pytest

from mapper import compile
from mapper.diagnostics import MapperError
from mapper.layout import Layout
from mapper.plan.matching import match
from mapper.testing.specs import spec_from
from tests.small import headers, lines_of, plan_of, program_of, refused, rules

ONE = rules("{copy: [a.x]}")


def findings_of(run):
    with pytest.raises(MapperError) as caught:
        run()
    return [(each.code, each.message) for each in caught.value.diagnostics]


# --- inputs -------------------------------------------------------------------------------------------------------------


def test_unknown_runtime_is_told_with_those_there_are():
    spec = spec_from("runtimes: {one: {rules: [{copy: [a]}]}, two: {rules: [{copy: [a]}]}}")
    with pytest.raises(MapperError) as caught:
        compile(spec, config={}, runtime="three")
    (found,) = caught.value.diagnostics
    assert (found.code, found.place) == ("M305", spec.place)
    assert found.message == "the spec 'tested' has no runtime 'three'; it has one, two"


def test_layout_and_rank_and_options_have_defaults():
    program = compile(spec_from("options: {wide: {default: 7, note: w}}\n" + ONE), config={}, runtime="own")
    assert (program.layout, program.rank, program.options, program.runtime) == (Layout(), 0, {"wide": 7}, "own")
    assert program.root == ""


@pytest.mark.parametrize("rank", [-1, 2])
def test_rank_outside_of_the_layout_is_told(rank):
    message = f"rank {rank} does not exist in the layout tp=2,pp=1,dp=1,ep=1, which has ranks 0 to 1"
    assert findings_of(lambda: program_of(ONE, layout="tp=2", rank=rank)) == [("M327", message)]
    program = program_of(ONE, layout="tp=2")
    assert findings_of(lambda: program.at_rank(rank)) == [("M327", message)]
    assert [program.at_rank(each).rank for each in (0, 1)] == [0, 1]


def test_unknown_options_are_all_told():
    text = "options: {wide: {default: 7, note: w}, deep: {default: 8, note: d}}\n" + ONE
    assert findings_of(lambda: program_of(text, narrow=1, wide=2, flat=3)) == [
        ("M306", f"the spec 'tested' has no option {name!r}; it has wide, deep") for name in ("narrow", "flat")
    ]
    assert findings_of(lambda: program_of(ONE, narrow=1)) == [("M306", "the spec 'tested' has no option 'narrow'; it has none")]
    assert program_of(text, wide=2).options == {"wide": 2, "deep": 8}


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"architectures": None},
        {"architectures": []},
        {"architectures": "Other"},
        {"architectures": ["Other", "Tested"]},
        {"architectures": ["Other"], "text_config": {}},
    ],
)
def test_config_may_name_this_architecture_none_or_a_composite(config):
    assert program_of(ONE, config=config).config == config


@pytest.mark.parametrize("more", [{}, {"text_config": None}])
def test_config_of_another_architecture_is_told(more):
    found = refused(ONE, config={"architectures": ["Other", "More"], **more})
    assert found.code == "M307"
    assert found.message == "this config names the architecture Other, More, and the spec 'tested' is for Tested"
    assert found.place is not None
    assert found.place.line == 1


def test_what_a_runtime_requires_and_does_not_get_is_all_told():
    text = rules(
        "{copy: [a]}",
        before="config: {optional: {size: 3}}",
        runtime="requires: [{that: size == 4, why: four}, {that: tp == 1, why: one}, {that: size > 4, why: more}]",
    )
    assert findings_of(lambda: program_of(text)) == [
        ("M302", "the runtime 'own' requires `size == 4`: four"),
        ("M302", "the runtime 'own' requires `size > 4`: more"),
    ]
    found = refused(text, config={"size": 4})
    assert found.place is not None
    assert found.place.line == 9


def test_runtime_goes_before_the_spec_in_lets_indices_and_formats():
    before = (
        "let: {size: 3, other: 5}\nindex: {layer: {count: 2}, head: {count: 2}}\n"
        "formats: {own: [{leaves: {w: [out]}}], both: [{leaves: {w: [out]}}]}"
    )
    runtime = "let: {size: 4}\n    index: {layer: {count: 3}}\n    formats: {own: [{leaves: {v: [out]}}]}"
    lines = (
        "{target: 'a.{layer}.{leaf}', format: own, dims: {out: size}}",
        "{target: 'b.{head}.{leaf}', format: both, dims: {out: other}}",
    )
    first, second = program_of(rules(*lines, before=before, runtime=runtime)).families
    assert (str(first.target), first.axes[0].parts) == ("a.{layer: 0...2}.v", (4,))
    assert (str(second.target), second.axes[0].parts) == ("b.{head: 0...1}.w", (5,))


def test_features_that_are_not_executed_are_refused_where_a_rule_uses_them():
    layers = "index: {layer: {count: 2}, part: {count: 2}}"
    stacked = "source: 'b.{layer}.{part}', stack: {layer: out, part: out}, dims: {out: 2}"
    active = f"{{target: a.x, {stacked}, when: WHEN}}"
    found = findings_of(lambda: program_of(rules(active.replace("WHEN", "1 < 2"), before=layers)))
    assert found == [
        ("M310", "`stack of several indices` is part of the language, but this version of mapper does not execute it yet")
    ]
    assert program_of(rules(active.replace("WHEN", "1 > 2"), before=layers)).families == ()


# --- indices ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("index", "values"),
    [
        ("{count: 3}", (0, 1, 2)),
        ("{count: 0}", ()),
        ("{count: 2, first: 3}", (3, 4)),
        ("{count: 2, first: 0}", (0, 1)),
        ("{count: 5, where: i % 2 == 1}", (1, 3)),
        ("{count: size, first: size + 1, where: i != size + 2}", (3,)),
        ("{values: [q, k, 7]}", ("q", "k", 7)),
    ],
)
def test_index_runs_over(index, values):
    program = program_of(rules("{copy: [a]}", before=f"let: {{size: 2}}\nindex: {{i: {index}}}"))
    assert program.domains == {"i": values}


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{count: -1}", "the count of 'i' is -1, expected a whole number of at least 0"),
        ("{count: 1, first: -1}", "the first 'i' is -1, expected a whole number of at least 0"),
    ],
)
def test_count_and_first_are_no_less_than_zero(index, message):
    found = refused(rules("{copy: [a]}", before=f"index: {{i: {index}}}"))
    assert (found.code, found.message) == ("M304", message)
    assert found.place is not None
    assert found.place.line == 6


# --- skips and keeps ----------------------------------------------------------------------------------------------------

SKIPPED = rules(
    "{copy: [a.x]}",
    before="index: {layer: {count: 2}}\nconfig: {optional: {old: false}}",
    runtime="mesh: vllm\n"
    "    skip: [{source: 'b.{layer}', why: one}, {source: c, why: two, when: old, id: named}, {source: d.*, why: three}]\n"
    "    keep: [{target: k.**, why: four}, {target: l, why: five, when: old}]",
)


def test_skips_and_keeps_that_hold_have_names_and_places():
    program = program_of(SKIPPED)
    assert [(each.number, each.text, each.why) for each in program.skips] == [(0, "b.{layer}", "one"), (2, "d.*", "three")]
    assert [(each.number, each.text, each.why) for each in program.keeps] == [(0, "k.**", "four")]
    assert [each.place.line for each in (*program.skips, *program.keeps) if each.place] == [11, 11, 12]
    plan = plan_of(program, headers(a__x=(1,), b__1=(2,), d__z=(3,)))
    assert plan.matching.skipped_by == {"b.{layer}": 1, "d.*": 1}
    assert plan.findings == ()
    with_old = program_of(SKIPPED, config={"old": True})
    assert [each.text for each in with_old.skips] == ["b.{layer}", "named", "d.*"]
    assert [each.text for each in with_old.keeps] == ["k.**", "l"]


def test_skip_of_the_caller_is_one_more_rule():
    program = program_of(SKIPPED).with_skips([("e.{layer}", "five"), ("f.**", "six")], origin="--skip")
    assert [(each.number, each.text, each.why, each.place) for each in program.skips[2:]] == [
        (2, "e.{layer} (--skip)", "five", None),
        (3, "f.** (--skip)", "six", None),
    ]
    plan = plan_of(program, headers(a__x=(1,), e__0=(2,), f__g__h=(2,), d__a=(1,)))
    assert plan.matching.skipped_by == {"b.{layer}": 0, "d.*": 1, "e.{layer} (--skip)": 1, "f.** (--skip)": 1}
    assert plan.findings == ()


def test_skip_of_the_caller_that_is_no_pattern_or_hides_a_rule_is_told():
    program = program_of(SKIPPED)
    given = [("a..b", "one"), ("{other}", "two"), ("a.*", "three"), ("fine", "four")]
    with pytest.raises(MapperError) as caught:
        program.with_skips(given, origin="--skip")
    found = caught.value.diagnostics
    assert [each.code for each in found] == ["M131", "M303", "M313"]
    assert found[0].subject == "a..b"
    assert "a segment between two dots is empty" in found[0].message
    assert (found[2].subject, found[2].hint) == ("a.x", "the skip is a.* (--skip)")


# --- digests ------------------------------------------------------------------------------------------------------------


def test_digest_of_each_input_changes_with_it_alone():
    base = program_of(SKIPPED, config={"z": 1, "a": 2}, layout="tp=2")
    assert all(len(each) == 16 for each in base.digests.values())
    assert base.at_rank(1).digests == base.digests
    assert program_of(SKIPPED, config={"a": 2, "z": 1}, layout="tp=2").digests == base.digests
    changed = {
        "spec": program_of(SKIPPED.replace("three", "other"), config=base.config, layout="tp=2"),
        "config": program_of(SKIPPED, config={"z": 1, "a": 3}, layout="tp=2"),
        "layout": program_of(SKIPPED, config=base.config, layout="tp=2,pp=2"),
        "runtime": base.mounted("m"),
    }
    for what, program in changed.items():
        differs = {key for key, value in program.digests.items() if value != base.digests[key]}
        assert differs == ({what, "skips"} if what == "spec" else {what})
    assert base.mounted("m").digests != base.mounted("n").digests
    assert base.with_skips([("q", "r")], origin="o").digests["skips"] != base.digests["skips"]


def test_options_are_among_the_inputs():
    text = "options: {wide: {default: 7, note: w}}\n" + ONE
    one, other = program_of(text, wide=2), program_of(text, wide=3)
    assert {key for key, value in one.digests.items() if value != other.digests[key]} == {"options"}


# --- re-rooting ---------------------------------------------------------------------------------------------------------

NESTED = rules(
    "{target: m.a.x, source: m.b.x, dims: {out: 4}, shard: {out: tp}}",
    "{target: m.t, tie: m.a.x}",
    "{target: n.c}",
    runtime="mesh: vllm\n"
    "    skip: [{source: m.s.**, why: s}, {source: n.s, why: s}]\n"
    "    keep: [{target: m.k, why: k}, {target: n.k, why: k}]",
)


def test_scoped_program_has_what_lies_below_the_prefix_without_it():
    program = program_of(NESTED, layout="tp=2", rank=1)
    assert program.scoped("") is program
    inner = program.scoped("m")
    assert [(each.number, str(each.target)) for each in inner.families] == [(0, "a.x"), (1, "t")]
    assert [each.text for each in (*inner.skips, *inner.keeps)] == ["m.s.**", "m.k"]
    assert (str(inner.skips[0].templates[0]), str(inner.keeps[0].templates[0])) == ("s.**", "k")
    plan = plan_of(inner, headers(b__x=(4,), s__q=(1,)))
    assert lines_of(plan) == ["b.x[2:4] -> a.x[0:2]", "b.x[2:4] -> t[0:2]"]
    assert plan.findings == ()
    assert inner.root == "-m"


def test_mounted_program_has_everything_below_the_prefix():
    outer = program_of(NESTED, layout="tp=2", rank=1).mounted("p.q")
    assert [(each.number, str(each.target)) for each in outer.families] == [(0, "p.q.m.a.x"), (1, "p.q.m.t"), (2, "p.q.n.c")]
    assert [str(each.templates[0]) for each in (*outer.skips, *outer.keeps)] == ["p.q.m.s.**", "p.q.n.s", "p.q.m.k", "p.q.n.k"]
    plan = plan_of(outer, {f"p.q.{name}": each for name, each in headers(m__b__x=(4,), n__c=(1,), n__s=(1,)).items()})
    assert lines_of(plan) == [
        "p.q.m.b.x[2:4] -> p.q.m.a.x[0:2]", "p.q.n.c[0] -> p.q.n.c[0]", "p.q.m.b.x[2:4] -> p.q.m.t[0:2]",
    ]  # fmt: skip
    assert plan.findings == ()
    assert (outer.root, outer.scoped("p").root, outer.scoped("p").mounted("r").root) == ("+p.q", "+p.q-p", "+p.q-p+r")
    assert lines_of(plan_of(outer.scoped("p.q"), headers(m__b__x=(4,), n__c=(1,))))[:1] == ["m.b.x[2:4] -> m.a.x[0:2]"]


def test_alternatives_of_a_skip_or_keep_stay_all_below_a_prefix():
    program = program_of(
        rules("{copy: [m.a]}", runtime="skip: [{source: '**.s', why: s}]\n    keep: [{target: '**.k', why: s}]")
    )
    inner = program.scoped("m")
    assert len(inner.skips[0].templates) == len(inner.keeps[0].templates) == len(inner.scoped("m").skips[0].templates)
    assert [rule.matches(name) for rule, name in ((inner.skips[0], "s"), (inner.skips[0], "x.s"), (inner.keeps[0], "k"))] == [
        True
    ] * 3
    outer = inner.mounted("z")
    assert [rule.matches(name) for rule, name in ((outer.skips[0], "z.s"), (outer.skips[0], "s"), (outer.keeps[0], "z.k"))] == [
        True,
        False,
        True,
    ]


@pytest.mark.parametrize(
    "rule",
    [
        "{target: m.a, source: n.b}",
        "{target: n.a, source: m.b}",
        "{target: m.a, sources: [m.b, n.c], dims: {out: [2, 3]}}",
        "{target: m.a, any_of: [{source: m.b}, {source: n.b}]}",
        "{target: m.a, tie: n.b}",
        "{target: n.a, tie: m.b}",
    ],
)
def test_rule_with_one_side_outside_of_the_prefix_is_told(rule):
    with pytest.raises(MapperError) as caught:
        program_of(rules(rule)).scoped("m")
    (found,) = caught.value.diagnostics
    target = rule.split(",")[0].removeprefix("{target: ")
    assert (found.code, found.subject) == ("M317", target)
    assert found.message == f"the rule for {target!r} has one side inside the prefix 'm' and one side outside"
    assert found.place is not None
    assert found.place.line == 11


def test_prefix_that_spells_a_dealt_index_is_told_and_that_of_another_kept():
    before = "index: {layer: {count: 2, axis: pp}, part: {count: 2}}"
    with pytest.raises(MapperError) as caught:
        program_of(rules("{target: 'm.{layer}.x'}", before=before)).scoped("m.1")
    (found,) = caught.value.diagnostics
    assert (found.code, found.subject) == ("M318", "m.1")
    assert found.message == "the prefix 'm.1' spells a value of 'layer', which is dealt over the axis 'pp'"
    assert found.place is not None
    assert found.place.line == 11
    (family,) = program_of(rules("{target: 'm.{part}.x'}", before=before)).scoped("m.1").families
    assert str(family.target) == "x"


# --- checkpoint ---------------------------------------------------------------------------------------------------------


class Headers:
    """A checkpoint as far as a plan sees it."""

    def __init__(self, tensors):
        self.tensors = tensors


def test_plan_is_raised_with_all_its_findings_or_returned():
    program = program_of(ONE)
    plan = program.plan(Headers(headers(a__x=(3,))))
    assert plan.targets["a.x"].shape == (3,)
    assert program.match(Headers(headers(a__x=(3,)))) == match(program.families, program.skips, headers(a__x=(3,)))
    assert [code for code, _ in findings_of(lambda: program.plan(Headers(headers(b=(3,), c=(1,)))))] == ["M501", "M502", "M502"]


def test_name_is_resolved_for_the_programs_rank():
    program = program_of(rules("{target: 'm.{layer}.x'}", before="index: {layer: {count: 2, axis: pp}}"), layout="pp=2")
    assert [program.at_rank(rank).resolve("m.1.x").outcome for rank in (0, 1)] == ["elsewhere", "loaded"]
