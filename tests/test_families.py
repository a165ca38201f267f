"""Rules become families: which index values go together, which sources fill which targets, and what does not fit."""

import pytest

from mapper.compiler.families import as_products
from tests.small import headers, lines_of, plan_of, program_of, refused, rules

LAYERS = "index: {layer: {count: 4, axis: pp}, expert: {count: 3, axis: ep}, part: {values: [k, v]}}"


def families_of(*lines, before=LAYERS, **where):
    return program_of(rules(*lines, before=before), **where).families


# --- index values -------------------------------------------------------------------------------------------------------


def test_index_values_with_equal_sizes_are_one_family():
    first, second = families_of("{target: 'a.{layer}.x', dims: {out: '3 if layer in [0, 3] else 5'}}")
    assert (first.domains, first.axes[0].parts, first.number) == ({"layer": (0, 3)}, (3,), 0)
    assert (second.domains, second.axes[0].parts, second.number) == ({"layer": (1, 2)}, (5,), 1)
    assert first.rule is not None
    assert first.rule.number == second.rule.number == 0


def test_index_values_at_which_the_condition_fails_have_no_family():
    (family,) = families_of("{target: 'a.{layer}.x', when: layer % 2 == 1}")
    assert family.domains == {"layer": (1, 3)}
    assert families_of("{target: 'a.{layer}.x', when: layer > 9}") == ()
    assert families_of("{target: a.x, when: 1 > 2}") == ()


def test_rule_without_any_index_value_has_no_family():
    assert families_of("{target: 'a.{layer}.x'}", before="index: {layer: {count: 0}}") == ()


def test_condition_on_two_indices_is_cut_into_products():
    found = families_of("{target: 'a.{layer}.{expert}.x', when: layer == expert or layer == 3}")
    held = {(layer, expert) for each in found for layer in each.domains["layer"] for expert in each.domains["expert"]}
    assert held == {(0, 0), (1, 1), (2, 2), (3, 0), (3, 1), (3, 2)}
    assert len(found) == 4


@pytest.mark.parametrize(
    ("members", "products"),
    [
        ([()], [{}]),
        ([(0, 1), (0, 2), (3, 1), (3, 2)], [{"i": (0, 3), "j": (1, 2)}]),
        ([(0, 1), (3, 1), (3, 2)], [{"i": (0,), "j": (1,)}, {"i": (3,), "j": (1, 2)}]),
    ],
)
def test_products_hold_exactly_the_members(members, products):
    assert list(as_products(["i", "j"][: len(members[0])], members)) == products


def test_index_that_no_pattern_holds_is_told():
    found = refused(rules("{target: 'a.{layer}.x', dims: {out: 2 + expert}, dtype: part}", before=LAYERS))
    assert (found.code, found.message) == ("M316", "the rule depends on 'expert', 'part', which is in none of its patterns")


def test_index_of_the_source_or_the_twin_alone_is_an_index_of_the_rule():
    (family,) = families_of("{target: a.x, source: 'b.{expert}', stack: expert, dims: {out: 2}}")
    assert family.domains == {"expert": (0, 1, 2)}
    (tied,) = families_of("{target: 'a.{layer}.x', tie: 'b.{layer}.{part}'}")
    assert tied.domains == {"layer": (0, 1, 2, 3), "part": ("k", "v")}


# --- what a family is -------------------------------------------------------------------------------------------------------


def test_family_says_what_its_rule_says():
    (family,) = families_of(
        "{target: 'a.{layer}.x', source: 'b.{layer}', id: one, note: because, stage: last, optional: true, reuse: true}"
    )
    assert (family.rule.text, family.rule.note, str(family.rule.place).split(":")[-2:]) == ("one", "because", ["11", "18"])
    assert (family.stage, family.optional, family.reuses, family.skips_others, family.tie) == ("last", True, True, False, None)
    assert (family.stack, family.stack_axis, family.append_axis, family.only_first) == (None, None, None, ())
    assert (family.leaf, family.refusal, family.conversion, family.axes) == ("", "", None, None)
    assert family.placed == {"layer": "pp", "expert": "ep"}


def test_rule_is_named_by_its_target_with_the_prefixes_around_it():
    text = rules(
        "{at: model, rules: [{target: 'a.{layer}.x'}, {targets: [b, c], source: d, dims: {out: [2, 3]}}, {target: e, tie: f}]}",
        before=LAYERS,
    )
    assert [each.rule.text for each in program_of(text).families] == ["model.a.{layer}.x", "model.b", "model.c", "model.e"]
    assert [each.rule.number for each in program_of(text).families] == [0, 1, 1, 2]
    assert [str(each.target) for each in program_of(text).families][1:] == ["model.b", "model.c", "model.e"]


def test_tied_family_has_its_twin_and_no_source():
    (family,) = families_of("{target: 'a.{layer}.x', tie: 'b.{layer}', stage: first, optional: true, note: because}")
    assert family.tie is not None
    assert (str(family.target), str(family.tie)) == ("a.{layer: 0...3}.x", "b.{layer: 0...3}")
    assert (family.alternatives, family.axes, family.stage, family.optional, family.skips_others) == (
        (),
        None,
        "first",
        True,
        False,
    )
    assert (family.rule.note, family.leaf, family.stack, family.number, family.placed) == (
        "because", "", None, 0, {"layer": "pp", "expert": "ep"},
    )  # fmt: skip


def test_placeholder_may_be_a_let_of_an_index():
    before = f"{LAYERS}\nlet: {{shifted: layer + 2, 'twice(n)': 2 * n}}"
    (family,) = families_of("{target: 'a.{shifted}.x', source: 'b.{twice(layer)}.x'}", before=before)
    assert str(family.target) == "a.{layer: 2...5}.x"
    assert str(family.alternatives[0][0].template) == "b.{layer: 0...6}.x"


def test_placeholder_that_spells_one_name_for_two_values_is_told():
    found = refused(rules("{target: 'a.{layer // 2}.x', source: b}", before=LAYERS))
    assert (found.code, found.subject) == ("M315", "a.{layer // 2}.x")
    assert found.message == "in 'a.{layer // 2}.x': (0,) and (1,) of layer both spell '0'"
    assert found.place is not None
    assert found.place.line == 11


def test_findings_of_all_rules_are_told_at_once_and_each_once():
    text = rules(
        "{target: a.x, dims: {out: 0}}", "{target: b.x, dims: {out: 5}, shard: {out: tp}}", "{target: c.x, dims: {out: 0}}"
    )
    with pytest.raises(Exception, match="M304") as caught:
        program_of(text, layout="tp=2")
    assert [each.code for each in caught.value.diagnostics] == ["M304", "M329", "M304"]


# --- parts, targets and sources ---------------------------------------------------------------------------------------------


def test_one_source_for_each_part_or_one_that_holds_all():
    each = rules("{target: a.x, sources: [q, k], dims: {out: [4, 2]}, shard: {out: tp}}")
    tensors = headers(q=(4,), k=(2,))
    assert lines_of(plan_of(program_of(each, layout="tp=2", rank=1), tensors)) == ["q[2:4] -> a.x[0:2]", "k[1] -> a.x[2]"]
    whole = rules("{target: a.x, source: qk, dims: {out: [4, 2]}, shard: {out: tp}}")
    plan = plan_of(program_of(whole, layout="tp=2", rank=1), headers(qk=(6,)))
    assert lines_of(plan) == ["qk[2:4] -> a.x[0:2]", "qk[5] -> a.x[2]"]
    assert plan.findings == ()


def test_one_target_for_each_part_from_one_source_or_from_as_many():
    split = rules("{targets: [a, b], source: ab, dims: {out: [4, 2], in: 3}, shard: {out: tp}}")
    plan = plan_of(program_of(split, layout="tp=2", rank=1), headers(ab=(6, 3)))
    assert lines_of(plan) == ["ab[2:4, 0:3] -> a[0:2, 0:3]", "ab[5, 0:3] -> b[0, 0:3]"]
    assert plan.findings == ()
    renamed = rules("{targets: [a, b], sources: [c, d], dims: {out: [4, 2]}, shard: {out: tp}}")
    plan = plan_of(program_of(renamed, layout="tp=2", rank=1), headers(c=(4,), d=(2,)))
    assert lines_of(plan) == ["c[2:4] -> a[0:2]", "d[1] -> b[0]"]
    assert plan.findings == ()


def test_each_way_to_spell_the_sources_may_be_of_another_shape():
    text = rules("{target: a.x, any_of: [{sources: [q, k]}, {source: qk}], others: skip, dims: {out: [4, 2]}}")
    program = program_of(text)
    assert program.families[0].skips_others
    assert lines_of(plan_of(program, headers(q=(4,), k=(2,)))) == ["q[0:4] -> a.x[0:4]", "k[0:2] -> a.x[4:6]"]
    assert lines_of(plan_of(program, headers(qk=(6,)))) == ["qk[0:4] -> a.x[0:4]", "qk[4:6] -> a.x[4:6]"]


def mixed(first, second, dims):
    """Return a rule whose two sources are in two formats."""
    sources = f"[{{source: 'b.{{leaf}}', format: {first}}}, {{source: 'c.{{leaf}}', format: {second}}}]"
    return f"{{target: 'a.{{leaf}}', sources: {sources}, dims: {dims}}}"


REFUSED = [
    (
        mixed("one", "two", "{out: [2, 3]}"),
        "the format of 'c.{leaf}' has no leaf 'scale', which the rule's first source has",
    ),
    (
        mixed("two", "three", "{out: [2, 3], in: 5}"),
        "the format of 'c.{leaf}' has other axes for the leaf 'weight' than the rule's first source",
    ),
    (
        mixed("half", "full", "{out: [2, 3]}"),
        "the format of 'c.{leaf}' gives the leaf 'weight' another dtype than the rule's first source",
    ),
    (
        mixed("two", "ones", "{out: [2, 3]}"),
        "the format of 'c.{leaf}' gives the leaf 'weight' another neutral value than the rule's first source",
    ),
    ("{target: a.x, stack: expert, source: 'b.{expert}'}", "a rule that stacks needs `dims`"),
    ("{target: 'a.{leaf}', append: in, dims: {out: 3, in: 4}}", "the rule's dims have no 'in'"),
    (
        "{target: 'a.{leaf}', stack: {expert: in}, source: 'b.{expert}.{leaf}', dims: {out: 3, in: 4}}",
        "the rule's dims have no 'in'",
    ),
]
FORMATS = """
formats:
  one: [{leaves: {weight: [out], scale: {dims: [out], optional: true}}}]
  two: [{leaves: {weight: [out]}}]
  three: [{leaves: {weight: [out, in]}}]
  half: [{leaves: {weight: {dims: [out], cast: float16}}}]
  full: [{leaves: {weight: {dims: [out], cast: float32}}}]
  in: [{leaves: {weight: [in]}}]
  ones: [{leaves: {weight: {dims: [out], neutral: 1}}}]
"""


@pytest.mark.parametrize(("rule", "message"), REFUSED, ids=[each[1][:50] for each in REFUSED])
def test_what_does_not_fit_together_is_told(rule, message):
    found = refused(rules(rule, before=LAYERS + FORMATS))
    assert (found.code, found.message) == ("M316", message)
    assert found.place is not None
    assert found.place.line == 20


def test_sources_in_several_formats_share_one_conversion():
    before = (
        "formats: {full: [{leaves: {weight: [out]}}], "
        "half: [{leaves: {weight: {dims: [out], dtype: float8_e4m3fn, cast: float16}}}]}"
    )
    (family,) = families_of(mixed("full", "half", "{out: [2, 3]}"), before=before)
    assert (family.conversion.dtype, family.conversion.by) == ("F16", "cast")
    # A source that is not converted must lie on disk in the dtype that the others become.
    assert [each.dtypes for each in family.alternatives[0]] == [{"F16"}, {"F8_E4M3"}]


# --- stacks -----------------------------------------------------------------------------------------------------------------


def test_stacked_index_leads_and_is_dealt_to_expert_ranks():
    text = rules("{target: a.x, source: 'b.{expert}', stack: expert, dims: {out: 2}}", before=LAYERS)
    tensors = headers(b__0=(2,), b__1=(2,), b__2=(2,))
    first, second = (plan_of(program_of(text, layout="tp=2,ep=2", rank=rank), tensors) for rank in (0, 1))
    assert lines_of(first) == ["b.0[0:2] -> a.x[0, 0:2]", "b.1[0:2] -> a.x[1, 0:2]"]
    assert lines_of(second) == ["b.2[0:2] -> a.x[0, 0:2]"]
    assert (first.targets["a.x"].shape, second.targets["a.x"].shape) == ((2, 2), (1, 2))


def test_stack_along_a_dim_lays_slots_end_to_end():
    text = rules(
        "{target: a.x, source: 'b.{part}', stack: {part: in}, dims: {out: 2, in: 3}, shard: {in: {axis: tp, pad: 4, fill: 7}}}",
        before=LAYERS,
    )
    plan = plan_of(program_of(text, layout="tp=2", rank=1), headers(b__k=(2, 3), b__v=(2, 3)))
    assert lines_of(plan) == [
        "b.k[0:2, 2] -> a.x[0:2, 0]",
        "b.v[0:2, 2] -> a.x[0:2, 2]",
        "7 -> a.x[0:2, 1]",
        "7 -> a.x[0:2, 3]",
    ]
    assert plan.targets["a.x"].shape == (2, 4)
    assert plan.findings == ()


def test_tensor_that_holds_the_stack_is_read_at_the_positions_of_the_slots():
    text = rules("{target: a.x, any_of: [{source: 'b.{expert}'}, {source: all}], stack: expert, dims: {out: 2}}", before=LAYERS)
    program = program_of(text, layout="tp=2,ep=2", rank=1)
    plan = plan_of(program, headers(all=(3, 2)))
    assert lines_of(plan) == ["all[2, 0:2] -> a.x[0, 0:2]"]
    assert plan.findings == ()


# --- biases -----------------------------------------------------------------------------------------------------------------

BIAS = "{{target: 'a.{{leaf}}', dims: {{out: 2, in: 4}}, shard: {{in: {{axis: tp{}}}}}}}"


def bias_of(more="", layout="tp=2", rank=0):
    return plan_of(program_of(rules(BIAS.format(more)), layout=layout, rank=rank), headers(a__weight=(2, 4), a__bias=(2,)))


def test_bias_beside_a_cut_inner_dim_says_which_ranks_hold_it():
    (found,) = bias_of().findings
    assert (found.code, found.subject) == ("M506", "a.bias")
    assert found.message == (
        "the checkpoint has 'a.bias', but the rule cuts 'in' and does not say which ranks hold the bias "
        "(`bias: all` or `bias: first`)"
    )
    assert bias_of(layout="tp=1").findings == ()
    for rank in (0, 1):
        assert lines_of(bias_of(", bias: all", rank=rank))[1:] == ["a.bias[0:2] -> a.bias[0:2]"]


def test_bias_of_the_first_rank_is_zero_on_the_others():
    assert lines_of(bias_of(", bias: first", rank=0))[1:] == ["a.bias[0:2] -> a.bias[0:2]"]
    assert lines_of(bias_of(", bias: first", rank=1))[1:] == ["0 -> a.bias[0:2]"]
    assert bias_of(", bias: first", rank=1).findings == ()


def test_only_a_bias_with_known_dims_and_without_the_cut_dim_is_asked_about():
    for rule in (
        "{target: 'a.{leaf}', shard: {in: {axis: tp, bias: first}}}",
        "{target: 'a.{leaf}', dims: {out: 2, in: 4}, shard: {out: tp}}",
        "{target: 'a.{leaf}', dims: {out: 2, in: 4}, shard: {in: {axis: [null]}}}",
    ):
        found = families_of(rule, before="", layout="tp=2")
        assert {(each.refusal, each.only_first) for each in found} == {("", ())}
    first, second = families_of(
        "{target: 'a.{leaf}', dims: {out: 2, in: 4}, shard: {in: {axis: [tp], bias: first}}}", layout="tp=2"
    )
    assert (first.only_first, second.only_first) == ((), ("tp",))


# --- appended slots ---------------------------------------------------------------------------------------------------------


def test_appended_slots_follow_those_of_every_rule_before():
    text = rules(
        "{target: a.x, source: b, dims: {slot: 2, in: 3}}",
        "{target: a.x, source: c, dims: {slot: 1, in: 3}, append: slot}",
        "{target: other, dims: {slot: 9}}",
        "{target: a.x, source: d, dims: {slot: 4, in: 3}, append: slot}",
    )
    plan = plan_of(program_of(text), headers(b=(2, 3), c=(1, 3), d=(4, 3), other=(9,)))
    assert lines_of(plan) == [
        "b[0:2, 0:3] -> a.x[0:2, 0:3]",
        "c[0, 0:3] -> a.x[2, 0:3]",
        "other[0:9] -> other[0:9]",
        "d[0:4, 0:3] -> a.x[3:7, 0:3]",
    ]
    assert (plan.targets["a.x"].shape, plan.targets["a.x"].rules) == ((7, 3), (0, 1, 3))
    assert plan.findings == ()


def test_rule_that_appends_to_nothing_is_refused():
    found = refused(
        rules("{target: a.y, source: b, dims: {slot: 2}}", "{target: a.x, source: c, dims: {slot: 1}, append: slot}")
    )
    assert (found.code, found.message) == ("M316", "the rule appends to a.x, which no rule before it writes")
    assert found.place is not None
    assert found.place.line == 12


def test_appended_slots_without_those_before_them_are_refused():
    first = "{target: 'x.{leaf}', source: 'a.{leaf}', dims: {out: 2, in: 3}}"
    second = "{target: 'x.{leaf}', source: 'b.{leaf}', append: out, dims: {out: 4, in: 3}}"
    program = program_of(rules(first, second))
    both = headers(a__weight=(2, 3), b__weight=(4, 3))
    assert plan_of(program, both | headers(a__bias=(2,), b__bias=(4,))).findings == ()
    assert plan_of(program, both).findings == ()
    (found,) = plan_of(program, both | headers(b__bias=(4,))).findings
    assert (found.code, found.subject) == ("M524", "x.bias")
    assert plan_of(program, both | headers(a__bias=(2,))).targets["x.bias"].shape == (2,)
