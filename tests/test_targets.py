"""A rank's plan: coverage of every target, steps, padding, ties, and how it fits the parameters that a model has."""

from dataclasses import replace

import pytest

from mapper.plan.geometry import Piece
from mapper.plan.local import LocalShape, coverage_findings
from mapper.plan.share import Share
from mapper.plan.targets import DeclaredTarget, fit
from tests.small import headers, lines_of, plan_of, program_of, rules

LAYERS = "index: {layer: {count: 3, axis: pp}, expert: {count: 3, axis: ep}}"


# --- coverage -----------------------------------------------------------------------------------------------------------


def test_what_is_not_covered_exactly_once_is_told():
    (family,) = program_of(rules("{target: a, dims: {out: 6, in: 2}}")).families
    shape = LocalShape((6, 2), (6, 2), (6, 2), 0, None, None, (((((4, 5), (0, 2))), 0.0),))
    pieces = [
        tuple(Piece(box, box) for box in (((0, 2), (0, 2)), ((1, 3), (0, 2)))),
        (Piece(((5, 7), (0, 2)), ((5, 7), (0, 2))),),
    ]
    found = list(coverage_findings(family, shape, pieces, 3))
    assert [(each.code, each.message) for each in found] == [
        ("M520", "[3, 0:2] of a (shape [6, 2] on rank 3) is written by no source"),
        ("M521", "[1, 0:2] of a (shape [6, 2] on rank 3) is written twice"),
        ("M522", "[5:7, 0:2] lies outside of a (shape [6, 2] on rank 3)"),
    ]
    assert {(each.subject, each.place) for each in found} == {("a", family.rule.place)}


def test_slot_without_a_source_is_told():
    text = rules("{target: a, source: 'b.{expert}', stack: expert, dims: {out: 2}, when: expert != 1}", before=LAYERS)
    plan = plan_of(program_of(text, layout="tp=2,ep=2", rank=0), headers(b__0=(2,), b__2=(2,)))
    assert [(each.code, each.subject, each.message) for each in plan.findings if each.code == "M523"] == [
        ("M523", "a", "slot 1 of a on rank 0 belongs to expert 1, for which the rule has no source")
    ]
    assert plan.findings[-1].place is not None
    assert plan.findings[-1].place.line == 11


# --- plan ---------------------------------------------------------------------------------------------------------------


def test_rank_holds_its_layers_and_no_others():
    text = rules(
        "{target: 'a.{layer}', dims: {out: 2}}",
        "{target: f, stage: first}",
        "{target: l, stage: last}",
        "{copy: [w]}",
        before=LAYERS,
    )
    tensors = headers(a__0=(2,), a__1=(2,), a__2=(2,), f=(1,), l=(1,), w=(1,))
    held = [list(plan_of(program_of(text, layout="pp=3", rank=rank), tensors).targets) for rank in range(3)]
    assert held == [["a.0", "f", "w"], ["a.1", "w"], ["a.2", "l", "w"]]
    assert [plan_of(program_of(text, layout="pp=3", rank=rank), tensors).num_loaded for rank in range(3)] == [3, 2, 3]


def test_rank_without_any_layer_of_a_family_has_none():
    text = rules("{target: 'a.{layer}', when: layer == 2}", before=LAYERS)
    plan = plan_of(program_of(text, layout="pp=3", rank=1), headers(a__2=(2,)))
    assert (plan.families, plan.targets, lines_of(plan), plan.findings) == ((), {}, [], ())


def test_target_in_several_layouts_of_its_family_is_planned_once_with_its_rules():
    text = rules("{target: a, dims: {out: 2}}", "{target: 'b.{layer}', source: 'c.{layer}', optional: true}", before=LAYERS)
    plan = plan_of(program_of(text), headers(a=(2,), c__0=(5,)))
    (a, b) = plan.targets.values()
    assert (a.name, a.shape, a.dtype, a.rules, a.tied_to, a.is_optional) == ("a", (2,), "F32", (0,), None, False)
    assert (b.name, b.shape, b.dtype, b.rules, b.tied_to, b.is_optional) == ("b.0", (5,), "F32", (1,), None, True)
    assert (plan.rank, plan.keeps, plan.num_bytes, plan.num_loaded) == (0, (), 28, 2)


TIED = rules(
    "{target: 'a.{layer}', dims: {out: 2}, optional: true}",
    "{target: 'b.{layer}', tie: 'a.{layer}', optional: true}",
    "{target: c, dims: {out: 3}, stage: first}",
    "{target: d, tie: c, stage: STAGE}",
    before=LAYERS,
)
TENSORS = headers(a__0=(2,), a__1=(2,), a__2=(2,), c=(3,))


def test_tied_target_is_filled_as_its_twin_and_counts_once():
    plan = plan_of(program_of(TIED.replace("STAGE", "first")), TENSORS)
    tied = {name: (each.tied_to, each.shape, each.dtype, each.rules, each.is_optional) for name, each in plan.targets.items()}
    assert tied["b.1"] == ("a.1", (2,), "F32", (1,), True)
    assert tied["d"] == ("c", (3,), "F32", (3,), False)
    assert lines_of(plan)[4:] == ["a.0[0:2] -> b.0[0:2]", "a.1[0:2] -> b.1[0:2]", "a.2[0:2] -> b.2[0:2]", "c[0:3] -> d[0:3]"]
    assert [step.target for step in plan.steps_to("b.1")] == ["b.1"]
    assert (plan.num_bytes, plan.num_loaded, plan.findings) == (36, 4, ())


def test_twin_on_another_rank_is_told_and_the_other_ties_are_not_touched():
    program = program_of(TIED.replace("STAGE", "all"), layout="pp=2", rank=1)
    plan = plan_of(program, TENSORS)
    assert [(each.code, each.subject, each.message) for each in plan.findings] == [
        ("M508", "d", "'d' is tied to 'c', which is not on rank 1")
    ]
    assert plan.findings[0].place is not None
    assert plan.findings[0].place.line == 14
    assert list(plan.targets) == ["a.2", "b.2"]
    assert plan_of(program_of(TIED.replace("STAGE", "first"), layout="pp=2", rank=1), TENSORS).findings == ()


def test_one_missing_twin_does_not_hide_the_next_tie():
    text = rules(
        "{target: a, stage: first}", "{target: b}", "{target: 't.{expert}', tie: a}", "{target: z, tie: b}", before=LAYERS
    )
    plan = plan_of(program_of(text, layout="pp=2", rank=1), headers(a=(1,), b=(1,)))
    assert [each.subject for each in plan.findings] == ["t.0", "t.1", "t.2"]
    assert "z" in plan.targets


def test_padding_in_two_dims_is_told_once_for_each_element():
    text = rules(
        "{target: a, dims: {out: 3, in: 5}, "
        "shard: {out: {axis: tp, pad: 4, fill: 1}, in: {axis: [null], pad_rank: 4, fill: 2}}}"
    )
    plan = plan_of(program_of(text, layout="tp=2", rank=1), headers(a=(3, 5)))
    assert lines_of(plan) == ["a[2, 0:5] -> a[0, 0:5]", "1 -> a[1, 0:8]", "2 -> a[0, 5:8]"]
    assert plan.findings == ()


def test_padding_of_stacked_slots_is_one_box_or_one_for_each_slot():
    leading = rules(
        "{target: a, source: 'b.{expert}', stack: expert, dims: {out: 3}, shard: {out: {axis: [null], pad_rank: 4}}}",
        before=LAYERS,
    )
    tensors = headers(b__0=(3,), b__1=(3,), b__2=(3,))
    plan = plan_of(program_of(leading), tensors)
    assert lines_of(plan)[3:] == ["0 -> a[0:3, 3]"]
    assert plan.findings == ()
    appended = rules(
        "{target: a, source: c, dims: {out: 2}}",
        "{target: a, source: d, dims: {out: 3}, shard: {out: {axis: [null], pad_rank: 4}}, append: out}",
    )
    plan = plan_of(program_of(appended), headers(c=(2,), d=(3,)))
    assert lines_of(plan) == ["c[0:2] -> a[0:2]", "d[0:3] -> a[2:5]", "0 -> a[5]"]
    assert (plan.targets["a"].shape, plan.findings) == ((6,), ())


def test_rank_without_slots_has_no_padding():
    text = rules(
        "{target: a, source: 'b.{expert}', stack: expert, dims: {out: 3}, shard: {out: {axis: [null], pad_rank: 4}}}",
        before=LAYERS,
    )
    plan = plan_of(program_of(text, layout="tp=4,ep=4", rank=3), headers(b__0=(3,), b__1=(3,), b__2=(3,)))
    assert (lines_of(plan), plan.targets["a"].shape, plan.findings) == ([], (0, 4), ())


def test_families_appended_along_the_second_dim_are_shifted_there():
    text = rules(
        "{target: a, source: b, dims: {out: 2, in: 3}, shard: {in: tp}}",
        "{target: a, source: c, dims: {out: 2, in: 6}, shard: {in: tp}, append: in}",
    )
    plan = plan_of(program_of(text, layout="tp=3", rank=1), headers(b=(2, 3), c=(2, 6)))
    assert lines_of(plan) == ["b[0:2, 1] -> a[0:2, 0]", "c[0:2, 2:4] -> a[0:2, 1:3]"]
    assert (plan.targets["a"].shape, plan.findings) == ((2, 3), ())


def test_split_index_lies_on_its_own_slots_of_a_stacked_dim():
    text = rules("{target: a, source: 'b.{expert}', stack: {expert: out}, dims: {out: 2, in: 3}}", before=LAYERS)
    plan = plan_of(program_of(text, layout="tp=2,ep=2", rank=0), headers(b__0=(2, 3), b__1=(2, 3), b__2=(2, 3)))
    assert lines_of(plan) == ["b.0[0:2, 0:3] -> a[0:2, 0:3]", "b.1[0:2, 0:3] -> a[2:4, 0:3]"]
    assert (plan.targets["a"].shape, plan.findings) == ((4, 3), ())


# --- share --------------------------------------------------------------------------------------------------------------


def test_share_holds_slots_of_placed_indices_and_all_of_others():
    program = program_of(
        rules("{copy: [a]}", before=LAYERS + "\n", runtime="mesh: {like: vllm, round_robin: true}"),
        layout="tp=2,pp=2,ep=2,placement=round_robin",
        rank=3,
    )
    share = program.share
    assert (share.slots("layer"), share.slots("expert")) == ((2,), (1,))
    assert share.position == ((2, 1), (2, 1), (1, 0), (2, 1), (1, 0))
    assert [share.holds(stage) for stage in ("first", "last", "both", "all")] == [False, True, True, True]
    assert (share.held_slots(5), share.held_slots(3), share.held_slots(5)) == ((1, 3), (1,), (1, 3))
    assert share.coordinate("tp") == (2, 1)


def test_owned_values_are_each_value_once_and_only_those_asked_for():
    share = program_of(rules("{copy: [a]}", before=LAYERS), layout="tp=2,ep=2,redundant_experts=1").share
    assert share.slots("expert") == (0, 1)
    repeated = Share(replace(share.mesh, redundant_experts=3, placement=(2, 2, 0, 1)), 0, share.domains, share.placed)
    assert (repeated.slots("expert"), repeated.owned("expert", (0, 1, 2))) == ((2, 2), (2,))
    assert repeated.owned("expert", (0, 1)) == ()
    assert share.owned("expert", (1, 2)) == (1,)
    assert share.owned("other", (5, 6)) == (5, 6)


# --- the model ----------------------------------------------------------------------------------------------------------

FIT = rules(
    "{target: a.weight, dims: {out: 2}}", "{target: b.weight, dims: {out: 3}}", "{target: t.weight, tie: a.weight}",
    runtime="keep: [{target: k.*, why: k}, {target: k.**, why: l}]",
)  # fmt: skip


def fit_of(declared, tensors=None):
    plan = plan_of(program_of(FIT), headers(a__weight=(2,), b__weight=(3,)) if tensors is None else tensors)
    return fit(plan, {name: DeclaredTarget(shape, dtype, storage) for name, (shape, dtype, storage) in declared.items()})


FITTING = {
    "a.weight": ((2,), "float32", "a.weight"),
    "b.weight": ((3,), "float32", "b.weight"),
    "t.weight": ((2,), "float32", "a.weight"),
    "k.x": ((1,), "float32", "k.x"),
    "k.y.z": ((1,), "float32", "k.y.z"),
}


def test_model_that_fits_has_every_target_or_keeps_it():
    found = fit_of(FITTING)
    assert (found.findings, dict(found.kept)) == ((), {"k.x": "k.*", "k.y.z": "k.**"})
    own = {**FITTING, "t.weight": ((2,), "float32", "t.weight")}
    assert fit_of(own).findings == ()
    assert fit_of({name: each for name, each in FITTING.items() if name != "t.weight"}).findings == ()


def told(found):
    return [(each.code, each.subject, each.message, each.hint, each.place and each.place.line) for each in found.findings]


def test_target_that_the_model_lacks_is_told_with_a_near_name():
    without = {name: each for name, each in FITTING.items() if name != "b.weight"}
    without["b_.weight"] = ((2,), "float32", "a.weight")
    assert told(fit_of(without)) == [
        (
            "M531",
            "b.weight",
            "the rule for 'b.weight' fills 'b.weight', which the model does not have",
            "the model has 'b_.weight'",
            12,
        )
    ]
    none = {name: each for name, each in FITTING.items() if name[0] == "k"}
    assert [(each[0], each[1], each[3]) for each in told(fit_of(none))] == [
        ("M531", "a.weight", ""), ("M531", "b.weight", ""), ("M531", "t.weight", ""),
    ]  # fmt: skip


def test_parameter_that_nothing_fills_is_told_with_a_near_name():
    more = {**FITTING, "b.weights": ((5,), "float32", "b.weights"), "far": ((1, 2), "float32", "far")}
    assert told(fit_of(more)) == [
        (
            "M530",
            "b.weights",
            "the model has the parameter 'b.weights' [5], which no rule fills and no `keep` names",
            "a rule fills 'b.weight'",
            None,
        ),
        ("M530", "far", "the model has the parameter 'far' [1, 2], which no rule fills and no `keep` names", "", None),
    ]


def test_parameter_of_two_names_is_one_storage():
    shared = {**FITTING, "other": ((3,), "float32", "b.weight"), "x": ((1,), "float32", "k.x")}
    assert (fit_of(shared).findings, fit_of(shared).kept["k.x"]) == ((), "k.*")
    by_its_second_name = {**FITTING, "x": ((1,), "float32", "x"), "k.w": ((1,), "float32", "x")}
    assert (fit_of(by_its_second_name).findings, fit_of(by_its_second_name).kept["x"]) == ((), "k.*")


def test_other_shape_and_other_dtype_are_both_told():
    other = {**FITTING, "a.weight": ((4,), "float16", "a.weight"), "t.weight": ((4,), "float16", "a.weight")}
    messages = [
        ("M532", "{} has the shape [4] in the model, and the rule gives [2]"),
        ("M533", "{} has the dtype float16 in the model, and its source gives float32"),
    ]
    assert told(fit_of(other)) == [
        (code, name, message.format(repr(name)), "", line)
        for name, line in (("a.weight", 11), ("t.weight", 13))
        for code, message in messages
    ]


def test_target_without_a_source_is_told_for_that_alone():
    found = fit_of({**FITTING, "b.weight": ((9,), "int8", "b.weight")}, headers(a__weight=(2,)))
    assert found.findings == ()


@pytest.mark.parametrize("name", ["a.weight", "b.weight"])
def test_only_the_differing_target_is_told(name):
    shape, _, storage = FITTING[name]
    found = fit_of({**FITTING, name: ((7, *shape), "float32", storage)})
    assert [(each.code, each.subject) for each in found.findings] == [("M532", name)]
