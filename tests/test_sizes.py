"""What a rule is at one set of index values: sizes, cuts, formats, dtypes, and what is refused of them."""

import pytest

from mapper.checkpoint import TensorHeader
from mapper.compiler.sizes import require_size
from mapper.diagnostics import Place
from tests.small import headers, lines_of, plan_of, program_of, refused, rules

PLACE = Place("spec.yaml", 7, 3)


def targets_of(text, tensors, **where):
    """Return {target: (dtype, shape)} of the plan."""
    plan = plan_of(program_of(text, **where), tensors)
    assert plan.findings == ()
    return {name: (each.dtype, each.shape) for name, each in plan.targets.items()}


@pytest.mark.parametrize("value", [0, -1, True, 2.0, "2", None])
def test_size_is_a_whole_number_of_at_least_one(value):
    with pytest.raises(Exception, match="a thing is") as caught:
        require_size(value, "a thing", PLACE)
    (found,) = caught.value.diagnostics
    assert (found.code, found.place) == ("M304", PLACE)
    assert found.message == f"a thing is {value!r}, expected a whole number of at least 1"


def test_size_may_be_as_small_as_is_asked():
    assert require_size(1, "a thing", PLACE) == 1
    assert require_size(0, "a thing", PLACE, least=0) == 0


def cut(more):
    return f"{{target: a.x, dims: {{out: 4}}, shard: {{out: {{axis: tp, {more}}}}}}}"


def cut_parts(shard):
    return f"{{target: a.x, sources: [a.y, a.z], dims: {{out: [4, 4]}}, shard: {{out: {{{shard}}}}}}}"


REFUSED_SIZES = [
    ("{target: a.x, dims: {out: 4 - 4}}", "M304", "the size of 'out' (4 - 4) is 0, expected a whole number of at least 1"),
    (cut("units: 1 - 1"), "M304", "units is 0, expected a whole number of at least 1"),
    (cut("pad: 0"), "M304", "pad is 0, expected a whole number of at least 1"),
    (
        cut("pad_rank: 0"), "M304",
        "pad_rank is 0, expected a whole number of at least 1",
    ),
    (cut("pad: 8, fill: true"), "M304", "fill is True, expected a number"),
    (cut("pad: 8, fill: first"), "M304", "fill is 'first', expected a number"),
    ("{target: a.x, stage: 1 + 1}", "M304", "stage is 2, expected one of first, last, both, all"),
    ("{target: a.x, stage: bfloat16}", "M304", "stage is 'bfloat16', expected one of first, last, both, all"),
    ("{target: a.x, dtype: 7}", "M304", "dtype is 7, expected a dtype such as bfloat16"),
    ("{target: a.x, cast: first}", "M304", "dtype is 'first', expected a dtype such as bfloat16"),
    (
        "{target: 'a.{leaf}', format: own, dims: {out: 4, in: 4}}", "M304",
        "the divisor of 'in' (0) is 0, expected a whole number of at least 1",
    ),
    (
        cut_parts("axis: tp, pad: 8"), "M316",
        "'out' has parts, and `pad` rounds up a whole dim",
    ),
    (
        cut_parts("axis: [tp, null], joined: true"), "M316",
        "'out' is cut as one, expected one axis, one number of units and one target",
    ),
    (
        cut_parts("axis: tp, units: [4, 4], joined: true"), "M316",
        "'out' is cut as one, expected one axis, one number of units and one target",
    ),
    (
        "{targets: [a.x, a.w], source: a.y, dims: {out: [4, 4]}, shard: {out: {axis: tp, joined: true}}}", "M316",
        "'out' is cut as one, expected one axis, one number of units and one target",
    ),
    (
        "{target: 'a.{leaf}', dims: {out: 4}}", "M316",
        "the format needs the dim 'in', and the rule has 'out'",
    ),
    (
        "{target: 'a.{leaf}', format: dequantized}", "M316",
        "a rule that dequantizes needs `dims`",
    ),
    (
        "{target: 'a.{leaf}', format: never, dims: {out: 4}}", "M316",
        "no alternative of the format 'never' holds for this config",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "code", "message"), REFUSED_SIZES, ids=[each[2][:40] for each in REFUSED_SIZES])
def test_rule_is_refused_at_its_place(rule, code, message):
    formats = "formats: {own: [{leaves: {weight: [out, in / 0]}}], never: [{when: false, leaves: {weight: [out]}}]}"
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [2, 2]}} if "dequantized" in rule else {}
    found = refused(rules(rule, before=formats), config=config)
    assert (found.code, found.message) == (code, message)
    assert found.place is not None
    assert found.place.line == (6 if "divisor" in message else 11)


def test_stage_of_a_rule_may_depend_on_an_index():
    text = rules(
        "{target: 'a.{layer}.x', stage: first if layer == 0 else last}",
        before="index: {layer: {count: 2}}",
    )
    tensors = headers(a__0__x=(3,), a__1__x=(3,))
    assert targets_of(text, tensors, layout="pp=3", rank=0) == {"a.0.x": ("F32", (3,))}
    assert targets_of(text, tensors, layout="pp=3", rank=1) == {}
    assert targets_of(text, tensors, layout="pp=3", rank=2) == {"a.1.x": ("F32", (3,))}


def test_dims_that_a_format_does_not_know_lead():
    text = rules("{target: 'a.{leaf}', dims: {group: 3, out: 4, in: 6}, shard: {in: tp}}")
    plan = plan_of(program_of(text, layout="tp=2", rank=1), headers(a__weight=(3, 4, 6)))
    assert lines_of(plan) == ["a.weight[0:3, 0:4, 3:6] -> a.weight[0:3, 0:4, 0:3]"]


def test_a_leaf_is_named_by_its_format_on_each_side():
    before = "formats: {own: [{leaves: {weight: {dims: [out], source: w, target: kernel}}}]}"
    plan = plan_of(program_of(rules("{target: 'a.{leaf}', format: own, dims: {out: 4}}", before=before)), headers(a__w=(4,)))
    assert lines_of(plan) == ["a.w[0:4] -> a.kernel[0:4]"]


def test_the_first_alternative_of_a_format_that_holds_counts():
    before = "formats: {own: [{when: quant_method == 'fp8', leaves: {q: [out]}}, {leaves: {w: [out]}}, {leaves: {v: [out]}}]}"
    text = rules("{target: 'a.{leaf}', format: own, dims: {out: 4}}", before=before)
    assert [str(each.target) for each in program_of(text).families] == ["a.w"]
    quantized = {"quantization_config": {"quant_method": "fp8"}}
    assert [str(each.target) for each in program_of(text, config=quantized).families] == ["a.q"]


@pytest.mark.parametrize(
    ("rule", "formats"),
    [
        ("source: 'b.{leaf}', format: own", "own"),
        ("sources: [{source: 'b.{leaf}', format: own}], format: plain", "own"),
        ("any_of: [{source: 'b.{leaf}', format: own}], format: plain", "own"),
        ("any_of: [{sources: [{source: 'b.{leaf}', format: own}], format: plain}], format: norm", "own"),
    ],
)
def test_format_of_a_source_goes_before_that_of_its_way_and_of_the_rule(rule, formats):
    before = "formats: {own: [{leaves: {weight: {dims: [out], dtype: float16}}}]}"
    program = program_of(rules(f"{{target: 'a.{{leaf}}', {rule}, dims: {{out: 4}}}}", before=before))
    assert program.families[0].alternatives[0][0].dtypes == {"F16"}


def test_dtype_of_the_rule_goes_before_that_of_its_format():
    before = "config: {required: [kind]}\nformats: {own: [{leaves: {weight: {dims: [out], dtype: float16, cast: float64}}}]}"

    def family(more=""):
        text = rules(f"{{target: 'a.{{leaf}}', format: own, dims: {{out: 4}}{more}}}", before=before)
        return program_of(text, config={"kind": "none"}).families[0]

    assert family().alternatives[0][0].dtypes == {"F16"}
    assert family(", dtype: bfloat16").alternatives[0][0].dtypes == {"BF16"}
    assert (family().conversion.dtype, family().conversion.by) == ("F64", "cast")
    assert (family(", cast: float32").conversion.dtype, family(", cast: float32").conversion.by) == ("F32", "cast")
    assert family(", cast: null").conversion is None
    assert family(", cast: kind").conversion is None
    own = program_of(rules("{target: a.x, bitcast: int8}")).families[0].conversion
    assert (own.dtype, own.by) == ("I8", "bitcast")


def test_optional_is_a_leaf_of_an_optional_rule_or_one_that_its_format_says():
    before = "formats: {own: [{leaves: {weight: [out], bias: {dims: [out], optional: true}}}]}"

    def optional(more=""):
        text = rules(f"{{target: 'a.{{leaf}}', format: own, dims: {{out: 4}}{more}}}", before=before)
        return [each.optional for each in program_of(text).families]

    assert optional() == [False, True]
    assert optional(", optional: true") == [True, True]


def test_a_fixed_axis_of_a_format_is_an_axis_of_the_target_and_of_the_disk():
    before = "formats: {own: [{leaves: {weight: {dims: [out, 3]}}}]}"
    text = rules("{target: 'a.{leaf}', format: own, dims: {out: 4}, shard: {out: tp}}", before=before)
    plan = plan_of(program_of(text, layout="tp=2", rank=1), headers(a__weight=(4, 3)))
    assert lines_of(plan) == ["a.weight[2:4, 0:3] -> a.weight[0:2, 0:3]"]
    assert plan.findings == ()


def test_units_of_an_uneven_cut_are_the_blocks_that_all_leaves_share():
    before = "formats: {own: [{leaves: {weight: [out], s: [out / 4], t: {dims: [out], stored: [out / 6]}}}]}"
    text = rules("{target: 'a.{leaf}', format: own, dims: {out: 36}, shard: {out: {axis: tp, uneven: short}}}", before=before)
    program = program_of(text, layout="tp=2")
    assert {each.axes[0].cut.units for each in program.families} == {(3,)}
    assert lines_of(plan_of(program, headers(a__weight=(36,), a__s=(9,), a__t=(6,)))) == [
        "a.weight[0:24] -> a.weight[0:24]",
        "a.s[0:6] -> a.s[0:6]",
        "a.t[0:4] -> a.t[0:24]",
    ]


def test_axis_and_units_are_given_once_or_for_each_part():
    def cut(more):
        text = rules(f"{{target: a.x, sources: [q, k], dims: {{out: [8, 4]}}, shard: {{out: {{{more}}}}}}}")
        found = program_of(text).families[0].axes[0].cut
        return found.axes, found.units

    assert cut("axis: tp") == (("tp", "tp"), (8, 4))
    assert cut("axis: [tp, null], units: 2") == (("tp", None), (2, 2))
    assert cut("axis: tp, units: [4, 2]") == (("tp", "tp"), (4, 2))
    assert cut("axis: tp, joined: true") == (("tp", "tp"), (12, 12))


def test_padding_holds_what_fill_says():
    text = rules("{target: a.x, dims: {vocab: 5, in: 2}, shard: {vocab: {axis: tp, pad: 8, fill: -1.5}}}")
    plan = plan_of(program_of(text, layout="tp=2", rank=1), headers(a__x=(5, 2)))
    assert lines_of(plan) == ["a.x[4, 0:2] -> a.x[0, 0:2]", "-1.5 -> a.x[1:4, 0:2]"]
    assert plan.findings == ()


NEUTRAL = """
let: {one: 4 // 4}
formats:
  own:
    - leaves:
        weight: {dims: [out, in], dtype: float32}
        scale: {dims: [out / 2, in / 3], dtype: float8_e8m0fnu, bitcast: uint8, neutral: 126 + one}
        factor: {dims: [in], neutral: -1.5}
"""


def test_padding_holds_the_neutral_value_of_its_leaf_where_the_cut_says_none():
    def padding(more="", in_shard=""):
        shard = f"{{out: {{axis: tp, pad: 8{more}}}{in_shard}}}"
        rule = f"{{target: 'a.{{leaf}}', format: own, dims: {{out: 4, in: 6}}, shard: {shard}}}"
        tensors = headers(a__weight=(4, 6), a__factor=(6,))
        tensors["a.scale"] = TensorHeader("F8_E8M0", (2, 2), "f", 0, 0)
        plan = plan_of(program_of(rules(rule, before=NEUTRAL), layout="tp=2", rank=1), tensors)
        assert plan.findings == ()
        return [line for line in lines_of(plan) if not line.startswith("a.")]

    assert padding() == ["0 -> a.weight[0:4, 0:6]", "127 -> a.scale[0:2, 0:2]"]
    assert padding(", fill: 3") == ["3 -> a.weight[0:4, 0:6]", "3 -> a.scale[0:2, 0:2]"]
    assert padding(", fill: 0") == ["0 -> a.weight[0:4, 0:6]", "0 -> a.scale[0:2, 0:2]"]
    both = ", in: {axis: tp, pad: 12}"
    assert padding(in_shard=both)[1:] == ["127 -> a.scale[0:2, 0:2]", "-1.5 -> a.factor[0:6]"]


@pytest.mark.parametrize(
    ("leaf", "problem"),
    [
        ("neutral: true", "True, expected a number"),
        ("neutral: first", "'first', expected a number"),
        ("dtype: uint8, neutral: 0.5", "0.5, expected a number that uint8 holds"),
        ("dtype: float8_e8m0fnu, bitcast: uint8, neutral: 256", "256, expected a number that uint8 holds"),
        ("dtype: int8, neutral: -129", "-129, expected a number that int8 holds"),
        ("dtype: float8_e8m0fnu, neutral: 0", "0, expected a number that float8_e8m0fnu holds"),
        ("dtype: float8_e8m0fnu, neutral: 3", "3, expected a number that float8_e8m0fnu holds"),
    ],
)
def test_neutral_value_is_a_number_that_the_target_holds(leaf, problem):
    before = f"formats: {{own: [{{leaves: {{x: {{dims: [out], {leaf}}}}}}}]}}"
    found = refused(rules("{target: 'a.{leaf}', format: own, dims: {out: 4}}", before=before))
    assert (found.code, found.message) == ("M304", f"the neutral value of 'x' is {problem}")
    assert (found.place.line, found.place.column) == (6, 27)


def test_two_dims_on_one_axis_of_the_disk():
    text = rules("{target: a.x, dims: {expert: 2, out: 3, in: 5}, stored: {out: (expert out)}, shard: {out: {axis: tp}}}")
    plan = plan_of(program_of(text, layout="tp=3", rank=1), headers(a__x=(6, 5)))
    assert lines_of(plan) == ["a.x[0:2, 1, 0:5] ([6, 5] as [2, 3, 5] in order [0, 1, 2]) -> a.x[0:2, 0, 0:5]"]


def test_rule_that_depends_on_what_only_a_format_names_makes_families_by_it():
    before = (
        "index: {layer: {count: 4}}\n"
        "formats: {own: [{leaves: {weight: {dims: [out], dtype: \"float16 if quant_method == 'x' else float32\"}}}]}"
    )
    program = program_of(rules("{target: 'a.{layer}.{leaf}', format: own, dims: {out: 4 + layer // 2}}", before=before))
    assert [(each.axes[0].parts, each.domains) for each in program.families] == [
        ((4,), {"layer": (0, 1)}),
        ((5,), {"layer": (2, 3)}),
    ]
