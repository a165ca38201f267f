"""A program against headers: which spelling is taken, what is missing, unknown, skipped or of another kind."""

import pytest

from mapper.checkpoint import TensorHeader
from mapper.plan.matching import MAX_SUGGESTIONS, match, source_names
from tests.small import headers, lines_of, plan_of, program_of, rules

LAYERS = "index: {layer: {count: 3}, expert: {count: 2}}"


def matched(text, tensors, **more):
    program = program_of(text)
    return match(program.families, program.skips, tensors, **more)


def told(matching):
    return [(each.code, each.subject, each.hint) for each in matching.findings]


def retyped(tensors, **dtypes):
    return {name: each._replace(dtype=dtypes.get(name.replace(".", "__"), each.dtype)) for name, each in tensors.items()}


# --- names --------------------------------------------------------------------------------------------------------------


def test_names_of_a_source_run_over_its_last_index_fastest():
    text = rules("{target: 'a.{layer}.x', source: 'b.{layer}.{expert}', stack: expert, dims: {out: 2}}", before=LAYERS)
    (source,) = program_of(text).families[0].alternatives[0]
    assert source_names(source) == [f"b.{layer}.{expert}" for layer in range(3) for expert in range(2)]
    assert source.num_sources == 6


def test_every_tensor_is_accounted_for():
    text = rules("{copy: [a, b]}", "{target: c, tie: a}", runtime="skip: [{source: 's.*', why: s}]")
    found = matched(text, headers(a=(1,), b=(2,), s__1=(3,), s__2=(3,), z=(4,)))
    assert (found.num_sources, found.num_claimed, found.skipped_by, found.unknown) == (5, 2, {"s.*": 2}, ("z",))
    assert {name: rule.text for name, rule in found.skipped.items()} == {"s.1": "s.*", "s.2": "s.*"}
    assert told(found) == [("M502", "z", "")]
    assert found.findings[0].message == "no rule names the checkpoint's tensor 'z'"
    tied = found.families[2]
    assert (tied.sources, tied.absent, tied.incomplete, tied.headers) == ((), frozenset(), frozenset(), {})


def test_missing_and_unknown_name_each_other_where_they_are_near():
    text = rules("{copy: [model.embed_tokens.weight, model.norm.weight]}", "{copy: [other]}")
    found = matched(text, headers(model__embed_token__weight=(1,), model__norm__weight=(1,), zzz=(1,), other=(1,)))
    assert told(found) == [
        ("M501", "model.embed_tokens.weight", "the checkpoint has 'model.embed_token.weight', which no rule names"),
        ("M502", "model.embed_token.weight", "a rule expects 'model.embed_tokens.weight'"),
        ("M502", "zzz", ""),
    ]
    assert found.findings[0].message == (
        "the checkpoint has no tensor 'model.embed_tokens.weight', which the rule for 'model.embed_tokens.weight' needs"
    )
    assert found.findings[0].place is not None
    assert found.findings[0].place.line == 11


def test_near_names_are_not_searched_for_thousands_of_findings():
    before = f"index: {{layer: {{count: {MAX_SUGGESTIONS + 1}}}}}"
    text = rules("{target: 'model.layers.{layer}.x'}", before=before)
    few = headers(model__layer__0__x=(1,))
    assert [hint for _, _, hint in told(matched(text, few))] == [""] * (MAX_SUGGESTIONS + 1) + [
        "a rule expects 'model.layers.0.x'"
    ]
    text = rules("{target: model.layers.0.x}")
    many = {f"model.layer.{number}.x": TensorHeader("F32", (1,), "f", 0, 0) for number in range(MAX_SUGGESTIONS + 1)}
    assert [hint for _, _, hint in told(matched(text, many))] == [
        "the checkpoint has 'model.layer.0.x', which no rule names", *[""] * (MAX_SUGGESTIONS + 1),
    ]  # fmt: skip
    exactly = dict(list(many.items())[:MAX_SUGGESTIONS])
    assert all(hint for _, _, hint in told(matched(text, exactly)))
    text = rules("{target: 'model.layers.{layer}.x'}", before=f"index: {{layer: {{count: {MAX_SUGGESTIONS}}}}}")
    assert all(hint for _, _, hint in told(matched(text, few)))


# --- spellings ----------------------------------------------------------------------------------------------------------

SPELLED = "{{target: 'a.{{layer}}.x', any_of: [{{source: 'b.{{layer}}'}}, {{source: 'c.{{layer}}'}}, {{source: d}}]{}}}"


def spelled(tensors, more="", **given):
    found = matched(rules(SPELLED.format(more), before=LAYERS), tensors, **given)
    return [str(source.template) for source in found.families[0].sources], [each.subject for each in found.findings]


def test_first_spelling_of_which_any_tensor_is_there_is_taken():
    c = headers(c__0=(1,), c__1=(1,), c__2=(1,))
    assert spelled(c) == (["c.{layer: 0...2}"], [])
    assert spelled(headers(d=(1,))) == (["d"], [])
    assert spelled({}) == (["b.{layer: 0...2}"], ["b.0", "b.1", "b.2"])
    assert spelled({**c, **headers(b__1=(1,))}) == (["b.{layer: 0...2}"], ["b.0", "b.2", "c.0", "c.1", "c.2"])


def test_spelling_is_taken_for_a_whole_rule():
    text = rules(
        "{target: 'a.{layer}.x', any_of: [{source: 'b.{layer}'}, {source: 'c.{layer}'}], dims: {out: 2 + layer}}",
        before="index: {layer: {count: 3}}",
    )
    tensors = headers(c__0=(2,), b__1=(3,), b__2=(4,))
    found = matched(text, tensors)
    assert [str(each.sources[0].template) for each in found.families] == ["b.0", "b.1", "b.2"]
    assert told(found)[0][:2] == ("M501", "b.0")


def test_spelling_may_be_given_by_the_caller():
    assert spelled(headers(c__0=(1,), c__1=(1,), c__2=(1,)), chosen={0: 2})[0] == ["d"]


def test_tensors_of_other_spellings_are_skipped_where_the_rule_says_so():
    both = headers(b__0=(1,), b__1=(1,), b__2=(1,), c__1=(1,), d=(1,))
    assert spelled(both)[1] == ["c.1", "d"]
    found = matched(rules(SPELLED.format(", others: skip"), before=LAYERS), both)
    assert told(found) == []
    assert found.skipped_by == {"others of a.{layer}.x": 2}
    rule = found.skipped["c.1"]
    assert (rule.number, rule.why, rule.templates) == (-1, "another spelling of the same tensors was taken", ())
    assert rule.place == program_place(found)


def program_place(found):
    """The place of the only rule, whose file is a temporary one."""
    return found.families[0].family.rule.place


# --- optional, incomplete -----------------------------------------------------------------------------------------------


def test_optional_target_is_absent_as_a_whole_or_incomplete():
    text = rules(
        "{target: 'a.{layer}', sources: ['b.{layer}', 'c.{layer}'], dims: {out: [2, 3]}, optional: true}", before=LAYERS
    )
    found = matched(text, headers(b__0=(2,), c__0=(3,), b__2=(2,)))
    assert (found.families[0].absent, found.families[0].incomplete) == ({(1,)}, {(2,)})
    assert [(code, subject) for code, subject, _ in told(found)] == [("M501", "c.2")]
    assert found.num_claimed == 3
    plan = plan_of(program_of(text), headers(b__0=(2,), c__0=(3,)))
    assert list(plan.targets) == ["a.0"]
    assert lines_of(plan) == ["b.0[0:2] -> a.0[0:2]", "c.0[0:3] -> a.0[2:5]"]


def test_required_target_is_never_absent():
    found = matched(rules("{target: 'a.{layer}'}", before=LAYERS), headers(a__0=(2,), a__2=(3,)))
    assert (found.families[0].absent, found.families[0].incomplete) == (frozenset(), {(1,)})
    assert [(code, subject) for code, subject, _ in told(found)] == [("M501", "a.1")]


def test_source_of_several_targets_is_missing_once():
    text = rules("{target: 'a.{layer}', source: b}", before=LAYERS)
    assert [(code, subject) for code, subject, _ in told(matched(text, {}))] == [("M501", "b")]
    assert matched(text, headers(b=(2,))).findings == ()


def test_optional_rule_without_any_source_has_no_target():
    text = rules("{target: a, optional: true}", "{target: b, optional: true, dims: {out: 2}}", "{copy: [c]}")
    plan = plan_of(program_of(text), headers(c=(1,)))
    assert (list(plan.targets), plan.findings) == (["c"], ())


def test_incomplete_target_is_in_the_plan_and_has_no_step():
    text = rules("{target: 'a.{layer}', dims: {out: 2}}", before=LAYERS)
    plan = plan_of(program_of(text), headers(a__0=(2,), a__2=(2,)))
    assert lines_of(plan) == ["a.0[0:2] -> a.0[0:2]", "a.2[0:2] -> a.2[0:2]"]
    assert list(plan.targets) == ["a.0", "a.1", "a.2"]
    assert [each.code for each in plan.findings] == ["M501"]


# --- second readers -----------------------------------------------------------------------------------------------------

REUSED = rules("{copy: [a]}", "{target: b, source: a, reuse: true}", "{target: c, source: d, reuse: true}")


def test_second_reader_needs_a_rule_that_owns_the_tensor():
    found = matched(REUSED, headers(a=(1,), d=(1,)))
    assert [(code, subject) for code, subject, _ in told(found)] == [("M502", "d"), ("M509", "d")]
    assert [each.message for each in found.findings if each.code == "M509"] == [
        "'d' is read by a rule marked `reuse`, and by no other"
    ]
    assert found.num_claimed == 1


def test_second_reader_may_be_owned_by_a_rule_that_is_not_here():
    found = matched(REUSED, headers(a=(1,), d=(1,)), owned={"d", "e"})
    assert (told(found), found.num_claimed) == ([], 2)


# --- shapes and dtypes --------------------------------------------------------------------------------------------------


def test_other_shape_is_told_with_the_dims():
    before = "formats: {own: [{leaves: {w: [out, in / 2, 3], t: {dims: [out, in], stored: [in, out]}}}]}"
    text = rules("{target: 'a.{leaf}', format: own, dims: {out: 5, in: 4}}", before=before)
    found = matched(text, headers(a__w=(5, 2), a__t=(5, 4)))
    assert [(each.code, each.subject, each.message) for each in found.findings] == [
        ("M503", "a.w", "'a.w' has the shape [5, 2], expected [5, 2, 3] (out = 5, in / 2 = 2, 3)"),
        ("M503", "a.t", "'a.t' has the shape [5, 4], expected [4, 5] (as the format stores it)"),
    ]
    assert {each.place.line for each in found.findings if each.place} == {11}


def test_stack_on_disk_is_told_as_stored():
    text = rules("{target: a, any_of: [{source: 'b.{layer}'}, {source: b}], stack: layer, dims: {out: 5}}", before=LAYERS)
    found = matched(text, headers(b=(2, 5)))
    assert [each.message for each in found.findings] == ["'b' has the shape [2, 5], expected [3, 5] (as the format stores it)"]


def test_dtype_that_the_format_does_not_allow_is_told():
    before = "formats: {own: [{leaves: {w: {dims: [out], dtype: float8_e4m3fn}}}]}"
    found = matched(rules("{target: 'a.{leaf}', format: own, dims: {out: 2}}", before=before), headers(a__w=(2,)))
    assert [(each.code, each.subject, each.message) for each in found.findings] == [
        ("M504", "a.w", "'a.w' has the dtype F32, expected F8_E4M3 (float8_e4m3fn)")
    ]
    assert found.findings[0].place is not None
    assert found.findings[0].place.line == 11


PARTS = "{{target: 'a.{{layer}}', sources: ['p.{{layer}}', 'q.{{layer}}', 'r.{{layer}}'], dims: {{out: [1, 1, 1]}}{}}}"
SOURCES = headers(**{f"{part}__{layer}": (1,) for part in "pqr" for layer in range(3)})


def test_sources_of_one_target_have_one_dtype_that_most_of_them_have():
    found = matched(rules(PARTS.format(""), before=LAYERS), retyped(SOURCES, q__1="BF16"))
    assert [(each.code, each.subject, each.message, each.hint) for each in found.findings] == [
        ("M507", "q.1", "'q.1' has the dtype BF16, and another source of the same target has F32", "the other is 'p.1'")
    ]
    assert found.findings[0].place is not None
    assert found.findings[0].place.line == 11
    assert found.families[0].header((1,)).dtype == "F32"


def test_targets_of_one_family_may_differ_in_dtype():
    found = matched(rules(PARTS.format(""), before=LAYERS), retyped(SOURCES, p__1="F16", q__1="F16", r__1="F16"))
    assert told(found) == []
    assert [found.families[0].header((layer,)).dtype for layer in range(3)] == ["F32", "F16", "F32"]


def test_where_a_target_is_undecided_the_dtype_of_its_family_is_the_usual_one():
    two = rules("{target: 'a.{layer}', sources: ['p.{layer}', 'q.{layer}'], dims: {out: [1, 1]}}", before=LAYERS)
    sources = {name: each for name, each in SOURCES.items() if name[0] != "r"}
    found = matched(two, retyped(sources, p__1="F16"))
    assert [(each.code, each.subject, each.hint) for each in found.findings] == [("M507", "p.1", "the other is 'q.1'")]


def test_dtype_that_is_not_allowed_does_not_count_among_the_others():
    before = LAYERS + "\nformats: {own: [{leaves: {w: {dims: [out], dtype: float32}}}], any: [{leaves: {w: [out]}}]}"
    text = rules(
        "{target: 'a.{leaf}', sources: ['p.{leaf}', 'q.{leaf}', {source: 'r.{leaf}', format: any}], format: own, "
        "dims: {out: [1, 1, 1]}}",
        before=before,
    )
    tensors = retyped(headers(p__w=(1,), q__w=(1,), r__w=(1,)), p__w="F16", q__w="F16")
    found = matched(text, tensors)
    assert [(each.code, each.subject) for each in found.findings] == [("M504", "p.w"), ("M504", "q.w")]
    assert found.families[0].header(()).dtype == "F32"


def test_cast_makes_one_dtype_of_many():
    found = matched(rules(PARTS.format(", cast: bfloat16"), before=LAYERS), retyped(SOURCES, q__1="F16"))
    assert told(found) == []
    plan = plan_of(program_of(rules(PARTS.format(", cast: bfloat16"), before=LAYERS)), retyped(SOURCES, q__1="F16"))
    assert {each.dtype for each in plan.targets.values()} == {"BF16"}
    for dtype, code in (("I32", "M507"), ("F16", "M512")):
        found = matched(rules(PARTS.format(", bitcast: int32"), before=LAYERS), retyped(SOURCES, q__1=dtype))
        assert [(each.code, each.subject) for each in found.findings] == [(code, "q.1")]


def test_header_of_each_target_decides_where_no_dims_are_stated():
    text = rules("{target: 'a.{layer}', source: 'b.{layer}'}", before=LAYERS)
    plan = plan_of(program_of(text), retyped(headers(b__0=(2,), b__1=(3, 5), b__2=()), b__1="F16"))
    assert lines_of(plan) == ["b.0[0:2] -> a.0[0:2]", "b.1[0:3, 0:5] -> a.1[0:3, 0:5]", "b.2[] -> a.2[]"]
    assert {name: (each.shape, each.dtype) for name, each in plan.targets.items()} == {
        "a.0": ((2,), "F32"), "a.1": ((3, 5), "F16"), "a.2": ((), "F32"),
    }  # fmt: skip
    assert plan.num_bytes == 8 + 30 + 4


@pytest.mark.parametrize("dtype", ["F8_E4M3", "I8"])
def test_scales_do_not_count_among_the_dtypes_of_a_target(dtype):
    before = (
        "formats: {own: [{leaves: {w: {dims: [out], dequantize: {q: {dims: [out]}, s: {dims: [out / 2]}}, cast: bfloat16}}}]}"
    )
    text = rules("{target: 'a.{leaf}', format: own, dims: {out: 4}}", before=before)
    plan = plan_of(program_of(text), retyped(headers(a__q=(4,), a__s=(2,)), a__q=dtype))
    assert plan.findings == ()
    assert lines_of(plan) == ["a.q[0:4] (times a.s[0:2], cast to BF16) -> a.w[0:4]"]
    assert plan.targets["a.w"].dtype == "BF16"
