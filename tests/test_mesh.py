"""The mesh of a runtime on a layout: axes that it adds, redundant experts, placement."""

import pytest

from tests.small import program_of, refused, rules

EXPERTS = "config: {required: [experts]}\nindex: {expert: {count: experts, axis: ep}}"
RULE = "{target: a.x, source: 'b.{expert}', stack: expert, dims: {out: 2}}"


def mesh_of(mesh, layout="", *, before="", **where):
    return program_of(rules("{copy: [a]}", before=before, runtime=f"mesh: {mesh}"), layout=layout, **where).mesh


@pytest.mark.parametrize(
    ("layout", "moe_tp"), [("", 1), ("tp=3", 3), ("tp=3,dp=2", 6), ("tp=3,dp=2,ep=6", 1), ("pp=2,tp=3", 3)]
)
def test_vllm_cuts_experts_over_all_ranks_of_a_stage_or_deals_them(layout, moe_tp):
    mesh = mesh_of("vllm", layout)
    assert mesh.sizes == {axis: getattr(mesh.layout, axis) for axis in ("tp", "pp", "dp", "ep")} | {"moe_tp": moe_tp}


def test_mesh_adds_axes_whose_sizes_are_computed():
    before = "let: {doubled: tp * 2}\noptions: {wide: {default: false, note: w}}"
    mesh = "{like: vllm, shared_tp: doubled // 2 if wide else 1}"
    assert mesh_of(mesh, "tp=3", before=before).sizes["shared_tp"] == 1
    assert mesh_of(mesh, "tp=3", before=before, wide=True).sizes["shared_tp"] == 3
    assert mesh_of("{like: vllm, own: redundant_experts}", "tp=3,redundant_experts=3").sizes["own"] == 3


def test_size_of_an_added_axis_may_stand_in_the_rules():
    text = rules("{target: a, dims: {out: own * 5}}", runtime="mesh: {like: vllm, own: tp}")
    assert program_of(text, layout="tp=3").families[0].axes[0].parts == (15,)


@pytest.mark.parametrize("size", ["2", "0", "true", "tp * 2"])
def test_added_axis_of_another_size_is_told(size):
    found = refused(rules("{copy: [a]}", runtime=f"mesh: {{like: vllm, own: {size}}}"), layout="tp=3")
    value = {"true": "True", "tp * 2": "6"}.get(size, size)
    assert (found.code, found.place is not None and found.place.line) == ("M304", 9)
    assert found.message == f"the size of the axis 'own' is {value}, expected 1, or a product of tp and dp"


def test_runtime_without_parallel_axes_refuses_ranks():
    assert mesh_of("single").sizes["moe_tp"] == 1
    found = refused(rules("{copy: [a]}", runtime="mesh: single"), layout="dp=2")
    assert (found.code, found.place is not None and found.place.line) == ("M328", 9)
    assert found.message == "the runtime 'own' has no parallel axes, and the layout is tp=1,pp=1,dp=2,ep=1"


# --- redundant experts --------------------------------------------------------------------------------------------------


def experts_of(mesh, layout, rank=0, experts=6):
    program = program_of(
        rules(RULE, before=EXPERTS, runtime=f"mesh: {mesh}"), layout=layout, rank=rank, config={"experts": experts}
    )
    return program.share.slots("expert")


def test_redundant_experts_are_those_of_the_layout_where_the_runtime_says_nothing():
    assert [experts_of("vllm", "tp=4,ep=4,redundant_experts=2", rank) for rank in range(4)] == [(0, 1), (2, 3), (4, 5), (0, 1)]
    assert [experts_of("vllm", "tp=4,ep=4", rank) for rank in range(4)] == [(0, 1), (2, 3), (4,), (5,)]


def test_runtime_without_redundant_experts_refuses_them():
    text = rules(RULE, before=EXPERTS, runtime="mesh: {like: vllm, redundant_experts: 1 - 1}")
    assert program_of(text, layout="tp=2,ep=2", config={"experts": 6}).mesh.redundant_experts == 0
    found = refused(text, layout="tp=2,ep=2,redundant_experts=2", config={"experts": 6})
    assert (found.code, found.place is not None and found.place.line) == ("M332", 10)
    assert found.message == "the layout asks for 2 redundant experts, and the runtime 'own' has 0"
    text = rules(RULE, before=EXPERTS, runtime="mesh: {like: vllm, redundant_experts: 2}")
    assert program_of(text, layout="tp=2,ep=2,redundant_experts=2", config={"experts": 6}).mesh.redundant_experts == 2


def test_number_of_redundant_experts_is_no_less_than_zero():
    found = refused(rules(RULE, before=EXPERTS, runtime="mesh: {like: vllm, redundant_experts: -1}"), config={"experts": 6})
    assert (found.code, found.message) == ("M304", "redundant_experts is -1, expected a whole number of at least 0")
    assert found.place is not None
    assert found.place.line == 10


# --- placement ----------------------------------------------------------------------------------------------------------


def test_round_robin_is_dealt_where_the_runtime_has_it_for_this_config():
    mesh = "{like: vllm, round_robin: experts > 5}"
    assert experts_of(mesh, "tp=4,ep=4,placement=round_robin", 1) == (1, 5)
    for text in (mesh, "vllm"):
        found = refused(
            rules(RULE, before=EXPERTS, runtime=f"mesh: {text}"),
            layout="tp=4,ep=4,placement=round_robin",
            config={"experts": 5},
        )
        assert (found.code, found.place is not None and found.place.line) == ("M333", 10)
        assert (
            found.message == "the layout asks for placement round_robin, which the runtime 'own' does not have for this config"
        )
    assert experts_of("vllm", "tp=2,ep=2,placement=linear") == (0, 1, 2)


def test_placement_table_is_the_runtimes_whatever_it_says_of_round_robin():
    assert experts_of("vllm", "tp=2,ep=2,placement=5+4+3+2+1+0", 1) == (2, 1, 0)


@pytest.mark.parametrize(
    ("layout", "code", "message"),
    [
        ("redundant_experts=1", "M334", "7 physical expert slots cannot be shared equally by ep=2 ranks"),
        (
            "placement=0+1+2+3+4+5+0+1", "M335",
            "the placement table has 8 slots, expected 6 (6 experts and 0 redundant)",
        ),
        ("placement=0+1+2+3+4+6", "M336", "the placement table has no slot for [5]; experts are 0 to 5"),
        (
            "redundant_experts=2,placement=0+1+2+3+4+5+6+7", "M336",
            "the placement table names [6, 7]; experts are 0 to 5",
        ),
    ],
)  # fmt: skip
def test_experts_that_cannot_be_placed_so_are_told(layout, code, message):
    found = refused(rules(RULE, before=EXPERTS), layout=f"tp=2,ep=2,{layout}", config={"experts": 6})
    assert (found.code, found.message) == (code, message)


def test_only_an_index_of_expert_ranks_is_asked_about_placement():
    text = rules("{target: 'a.{layer}'}", before="index: {layer: {count: 3, axis: pp}}")
    assert program_of(text, layout="tp=2,pp=2,ep=2,redundant_experts=2").placed == {"layer": "pp"}
