import gzip
import json
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mapper.compiler import compile
from mapper.diagnostics import MapperError
from mapper.layout import (
    BASE_AXES,
    Layout,
    Mesh,
    Placement,
    Stage,
    expert_slots,
    is_axis_size,
    on_stage,
    positions,
    rank_at,
    stage_layers,
    stage_sizes,
)
from mapper.spec import load_spec

RECORDED = json.loads(gzip.decompress((Path(__file__).parent / "oracle" / "vllm_layouts.json.gz").read_bytes()))
SIZES = st.integers(1, 5)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    tp, pp, dp = draw(SIZES), draw(SIZES), draw(SIZES)
    tables = st.lists(st.integers(0, 9), min_size=1, max_size=4).map(tuple)
    placements: st.SearchStrategy[Placement] = st.one_of(st.just("linear"), st.just("round_robin"), tables)
    return Layout(
        tp=tp,
        pp=pp,
        dp=dp,
        ep=draw(st.sampled_from([1, tp * dp])),
        redundant_experts=draw(st.integers(0, 4)),
        placement=draw(placements),
        pp_layers=draw(st.none() | st.tuples(*[st.integers(0, 9)] * pp)),
    )


def mesh_of(layout: Layout, **added: int) -> Mesh:
    return Mesh(layout, {**{axis: getattr(layout, axis) for axis in BASE_AXES}, **added})


# --- against vLLM -------------------------------------------------------------------------------------------------------


def test_record_covers_even_uneven_and_short_splits() -> None:
    assert len(RECORDED["stages"]) > 500
    assert len(RECORDED["experts"]) > 500
    assert {"61/4", "27/2", "10/10"} <= RECORDED["stages"].keys()
    assert {"6/4/linear", "48/16/linear", "17/16/linear"} <= RECORDED["experts"].keys()


def test_stage_sizes_are_those_of_vllm() -> None:
    for key, sizes in RECORDED["stages"].items():
        num_layers, pp = map(int, key.split("/"))
        assert stage_sizes(num_layers, Layout(pp=pp)) == tuple(sizes), key


def test_expert_slots_are_those_of_vllm_under_linear_placement() -> None:
    for key, slots in RECORDED["experts"].items():
        num_experts, ep, placement = key.split("/")
        if placement == "linear":
            found = [list(expert_slots(int(num_experts), int(ep), rank)) for rank in range(int(ep))]
            assert found == slots, key


# --- ranks --------------------------------------------------------------------------------------------------------------


@given(layouts())
def test_ranks_and_positions_are_a_bijection_with_tp_fastest_then_pp_then_dp(layout: Layout) -> None:
    nested = [(tp, pp, dp) for dp in range(layout.dp) for pp in range(layout.pp) for tp in range(layout.tp)]
    assert [positions(layout, rank) for rank in range(layout.num_ranks)] == nested
    assert [rank_at(layout, tp=tp, pp=pp, dp=dp) for tp, pp, dp in nested] == list(range(layout.num_ranks))


@given(layouts())
def test_coordinate_of_every_axis_equals_a_nested_loop(layout: Layout) -> None:
    tp_size, pp_size, dp_size = layout.tp, layout.pp, layout.dp
    mesh = mesh_of(layout, one=1, like_tp=tp_size, like_dp=dp_size, both=tp_size * dp_size)
    ranks = iter(range(layout.num_ranks))
    for dp, pp, tp in product(range(dp_size), range(pp_size), range(tp_size)):
        rank = next(ranks)
        both = dp * tp_size + tp
        expected = {"tp": tp, "pp": pp, "dp": dp, "one": 0, "like_tp": tp, "both": both}
        expected["ep"] = both if layout.ep > 1 else 0
        expected["like_dp"] = tp if dp_size == tp_size else dp  # an added axis of a size that both have follows tp
        assert {axis: mesh.coordinate(axis, rank) for axis in mesh.sizes} == expected


@given(layouts(), st.integers(0, 30))
def test_axis_may_have_the_sizes_that_have_a_position(layout: Layout, size: int) -> None:
    assert is_axis_size(layout, size) == (size in {1, layout.tp, layout.dp, layout.tp * layout.dp})
    if is_axis_size(layout, size):
        found = {mesh_of(layout, added=size).coordinate("added", rank) for rank in range(layout.num_ranks)}
        assert found == set(range(size))


@pytest.mark.parametrize("size", [True, 2.0, "2", None])
def test_axis_size_is_an_integer(size: object) -> None:
    assert not is_axis_size(Layout(tp=2), size)


@given(layouts(), st.integers(0, 40))
def test_stages_hold_every_layer_once_and_in_order(layout: Layout, num_layers: int) -> None:
    if layout.pp_layers is not None:
        num_layers = sum(layout.pp_layers)
    held = [stage_layers(num_layers, layout, stage) for stage in range(layout.pp)]
    assert [layer for stage in held for layer in stage] == list(range(num_layers))
    assert tuple(map(len, held)) == (layout.pp_layers or stage_sizes(num_layers, layout))


@given(st.integers(0, 60), st.integers(1, 20))
def test_ranks_hold_every_expert_once_and_in_order(num_experts: int, num_ranks: int) -> None:
    slots = [expert_slots(num_experts, num_ranks, position) for position in range(num_ranks)]
    assert [expert for rank in slots for expert in rank] == list(range(num_experts))


@pytest.mark.parametrize(
    ("pp", "stage", "held"),
    [
        (3, "all", [1, 1, 1]),
        (3, "first", [1, 0, 0]),
        (3, "last", [0, 0, 1]),
        (3, "both", [1, 0, 1]),
        (1, "first", [1]),
        (1, "last", [1]),
        (1, "both", [1]),
    ],
)
def test_stage_words(pp: int, stage: Stage, held: list[int]) -> None:
    layout = Layout(tp=2, pp=pp, dp=3)
    ranks = [rank for rank in range(layout.num_ranks) if on_stage(stage, layout, rank)]
    assert ranks == [rank for rank in range(layout.num_ranks) if held[rank // 2 % pp]]


# --- texts --------------------------------------------------------------------------------------------------------------


@given(layouts())
def test_layout_reads_back_from_its_text(layout: Layout) -> None:
    assert Layout.parse(str(layout)) == layout


def test_text_leaves_out_what_is_not_said_and_bears_spaces() -> None:
    assert Layout.parse("") == Layout()
    assert Layout.parse(" pp = 2 , tp=4,") == Layout(tp=4, pp=2)
    assert Layout.parse("pp=2,pp_layers=31+30,placement=3+0+1") == Layout(pp=2, pp_layers=(31, 30), placement=(3, 0, 1))
    assert str(Layout()) == "tp=1,pp=1,dp=1,ep=1"


KNOWN = "tp, pp, dp, ep, redundant_experts, placement, pp_layers"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp=0", "M320 the layout's tp is 0, expected a whole number of at least 1"),
        ("dp=-2", "M320 the layout's dp is -2, expected a whole number of at least 1"),
        ("tp=2,dp=3,ep=2", "M321 the layout's ep is 2, expected 1 or tp * dp = 2 * 3 = 6"),
        ("pp=2,pp_layers=3", "M322 pp_layers is 3, expected one number of layers for each of the 2 stages"),
        ("pp=2,pp_layers=5+-1", "M322 pp_layers is 5+-1, expected one number of layers for each of the 2 stages"),
        ("tp=2,np=2", f"M324 in the layout 'tp=2,np=2': unknown key 'np'; known are {KNOWN}"),
        ("tp", "M325 in the layout 'tp': tp is '', expected a whole number"),
        ("tp=two", "M325 in the layout 'tp=two': tp is 'two', expected a whole number"),
        ("tp=1_0", "M325 in the layout 'tp=1_0': tp is '1_0', expected a whole number"),
        ("tp=1+2", "M325 in the layout 'tp=1+2': tp is '1+2', expected a whole number"),
        ("tp=2.0", "M325 in the layout 'tp=2.0': tp is '2.0', expected a whole number"),
        ("pp=2,pp_layers=3+", "M325 in the layout 'pp=2,pp_layers=3+': pp_layers is '3+', expected a whole number"),
        ("placement=random", "M325 in the layout 'placement=random': placement is 'random', expected a whole number"),
        ("tp=2,tp=2", "M326 in the layout 'tp=2,tp=2': tp is given twice"),
    ],
)
def test_text_that_is_no_layout_is_refused(text: str, message: str) -> None:
    with pytest.raises(MapperError) as caught:
        Layout.parse(text)
    assert str(caught.value) == message


@pytest.mark.parametrize("size", [True, 2.0, "2", None])
def test_axis_that_is_no_whole_number_is_refused(size: int) -> None:
    with pytest.raises(MapperError) as caught:
        Layout(pp=size)
    assert str(caught.value) == f"M320 the layout's pp is {size!r}, expected a whole number of at least 1"


def test_all_faults_are_reported_at_once() -> None:
    with pytest.raises(MapperError) as caught:
        Layout(tp=0, dp=-1)
    assert [(each.code, each.message.split()[2]) for each in caught.value.diagnostics] == [("M320", "tp"), ("M320", "dp")]
    with pytest.raises(MapperError) as caught:
        Layout(tp=2, ep=3, pp_layers=(1, 2))
    assert [each.code for each in caught.value.diagnostics] == ["M321", "M322"]


@pytest.mark.parametrize("redundant", [-1, "2", 1.5, True])
def test_redundant_experts_that_are_no_count_are_refused(redundant: int) -> None:
    with pytest.raises(MapperError) as caught:
        Layout(redundant_experts=redundant)
    assert [each.code for each in caught.value.diagnostics] == ["M320"]


@pytest.mark.parametrize("placement", ["roundrobin", "Linear", [0, 1], (0, "1"), (-1, 0), (), 3])
def test_placement_that_is_none_is_refused(placement: Placement) -> None:
    with pytest.raises(MapperError) as caught:
        Layout(placement=placement)
    assert [each.code for each in caught.value.diagnostics] == ["M325"]


@pytest.mark.parametrize("layers", [(), (1.5,), ("1",), (True,)])
def test_layers_that_are_no_counts_are_refused(layers: tuple[int, ...]) -> None:
    with pytest.raises(MapperError) as caught:
        Layout(pp_layers=layers)
    assert [each.code for each in caught.value.diagnostics] == ["M322"]


def test_layers_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(MapperError) as caught:
        stage_sizes(27, Layout(pp=2, pp_layers=(13, 13)))
    assert str(caught.value) == "M323 pp_layers 13+13 adds up to 26, expected the model's 27 layers"


@pytest.mark.parametrize("rank", [-1, 4])
def test_rank_that_the_layout_has_not_is_refused(rank: int) -> None:
    with pytest.raises(MapperError) as caught:
        compile(load_spec("deepseek_v2"), config={}, runtime="vllm", layout=Layout(tp=2, pp=2), rank=rank)
    message = f"M327 rank {rank} does not exist in the layout tp=2,pp=2,dp=1,ep=1, which has ranks 0 to 3"
    assert str(caught.value) == message


def test_rank_beyond_the_layout_has_no_position() -> None:
    with pytest.raises(AssertionError, match=r"^rank 4 is not in tp=2,pp=2,dp=1,ep=1"):
        positions(Layout(tp=2, pp=2), 4)
