"""The `do` of a rule, from the spec to parameters and back: what it needs, what it reads, and where it is refused."""

from __future__ import annotations

from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mapper.cases import run_cases
from mapper.checkpoint import Checkpoint
from mapper.compiler import Program, compile
from mapper.diagnostics import MapperError
from mapper.explain import explain_name
from mapper.export import export
from mapper.layout import Layout
from mapper.load import Loader, allocate
from mapper.plan.family import ValueOp
from mapper.report.plan import describe_plan
from mapper.transfer.compute import computed, undone
from mapper.transfer.files import CheckpointFiles
from tests.loads import Tensors, all_raw, spec_of, told, write

OPS = (ValueOp("neg_exp"), ValueOp("add", 1.5), ValueOp("multiply", -0.3))


def program_of(folder: Path, *rules: str, layout: str = "tp=1", before: str = "") -> Program:
    text = before + "runtimes:\n  own:\n    mesh: vllm\n    rules:\n" + "".join(f"      - {rule}\n" for rule in rules)
    spec = spec_of(Path(mkdtemp(dir=folder)), text)
    return compile(spec, config={}, runtime="own", layout=Layout.parse(layout))


def held(program: Program, checkpoint: Checkpoint, tensors: Tensors) -> list[Tensors]:
    """Return what every rank holds after a load from files, after making sure that a stream leaves the same."""
    found = []
    for rank in range(program.layout.num_ranks):
        own = program.at_rank(rank)
        targets = allocate(own.plan(checkpoint))
        Loader(own, targets).load(checkpoint)
        streamed = allocate(own.plan(checkpoint))
        with Loader(own, streamed).update() as session:
            session.feed_all(reversed(tensors.items()))
        assert all_raw(streamed) == all_raw(targets)
        found.append(targets)
    return found


def exported(program: Program, checkpoint: Checkpoint, ranks: list[Tensors], folder: Path) -> Tensors:
    """Return the tensors that the ranks are written back as."""
    export([(program.at_rank(rank).plan(checkpoint), each) for rank, each in enumerate(ranks)], folder, base=checkpoint)
    again = Checkpoint.open(folder)
    with CheckpointFiles(again) as files:
        return {name: files.tensor(header).clone() for name, header in again.tensors.items()}


# --- views --------------------------------------------------------------------------------------------------------------


def test_parts_that_lie_head_by_head_are_cut_each_by_itself_and_come_back(tmp_path: Path) -> None:
    rule = """{target: qkv, dims: {out: [8, 4, 4], in: 3}, shard: {out: {axis: tp, units: [4, 2, 2]}},
         do: [{view: (group part slot width) in -> (part group slot width) in, width: 2, slot: [2, 1, 1]}]}"""
    tensors = {"qkv": torch.arange(48.0).reshape(16, 3)}
    program, checkpoint = program_of(tmp_path, rule, layout="tp=2"), write(tmp_path / "c", tensors, {})
    ranks = held(program, checkpoint, tensors)
    group = tensors["qkv"].reshape(2, 8, 3)
    for rank in range(2):
        assert torch.equal(ranks[rank]["qkv"], group[rank])  # one group a rank: its queries, its key, its value
    alone = held(program_of(tmp_path, rule), checkpoint, tensors)
    parts = [group[:, rows].reshape(-1, 3) for rows in (slice(0, 4), slice(4, 6), slice(6, 8))]
    assert torch.equal(alone[0]["qkv"], torch.cat(parts))
    assert all_raw(exported(program, checkpoint, ranks, tmp_path / "out")) == all_raw(tensors)


def test_a_rank_that_is_missing_leaves_a_gap_between_rows(tmp_path: Path) -> None:
    rule = "{target: w, dims: {out: 6, in: 2}, shard: {out: tp}, do: [{view: (a b) in -> (b a) in, a: 2}]}"
    tensors = {"w": torch.arange(12.0).reshape(6, 2)}
    program, checkpoint = program_of(tmp_path, rule, layout="tp=3"), write(tmp_path / "c", tensors, {})
    ranks = held(program, checkpoint, tensors)
    assert [each["w"][:, 0].tolist() for each in ranks] == [[0, 6], [2, 8], [4, 10]]
    with pytest.raises(MapperError) as caught:
        exported(program, checkpoint, ranks[:2], tmp_path / "out")
    assert told(caught.value.diagnostics) == [("M703", "w")]


def test_a_view_keeps_scales_with_their_rows(tmp_path: Path) -> None:
    """Rows are moved in whole blocks; a format's grid of scales is moved with them."""
    before = "formats: {blocks: [{leaves: {weight: [out, in], scale: [out / 2, in]}}]}\n"
    rule = "{target: 'w.{leaf}', format: blocks, dims: {out: 8, in: 1}, do: [{view: (a b c) in -> (b a c) in, a: 2, c: CC}]}"
    tensors = {"w.weight": torch.arange(8.0).reshape(8, 1), "w.scale": torch.arange(0.0, 8.0, 2.0).reshape(4, 1)}
    checkpoint = write(tmp_path / "c", tensors, {})
    (found,) = held(program_of(tmp_path, rule.replace("CC", "2"), before=before), checkpoint, tensors)
    assert found["w.weight"].flatten().tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    assert found["w.scale"].flatten().tolist() == [0, 4, 2, 6]
    with pytest.raises(MapperError) as caught:
        program_of(tmp_path, rule.replace("CC", "1"), before=before)
    assert caught.value.diagnostics[0].message == (
        "in the view '(a b c) in -> (b a c) in' of 'out': it moves elements within a block of 2; the last factor has to be "
        "whole blocks"
    )


@pytest.mark.parametrize(
    ("dims", "do", "code", "message"),
    [
        ("{out: 12, in: 2}", "view: (a b) in -> (b a) in, a: 5", "M340",
         "in the view '(a b) in -> (b a) in' of 'out': the dim has 12 elements, which a 5 does not divide"),
        ("{out: 12, in: 2}", "view: (a b) in -> (b a) in, a: 3, b: 5", "M340",
         "in the view '(a b) in -> (b a) in' of 'out': the dim has 12 elements, which a 3 * b 5 is not"),
        ("{out: 12, in: 2}", "view: (a b c) in -> (b a c) in, a: 3", "M340",
         "in the view '(a b c) in -> (b a c) in' of 'out': the sizes of 'b' and 'c' are not given, and only one follows"),
        ("{out: [6, 4, 2], in: 2}", "view: (a part b) in -> (part a b) in, a: 2", "M340",
         "in the view '(a part b) in -> (part a b) in' of 'out': factors other than 'part' are as long in every part"),
        ("{out: [6, 6], in: 2}", "view: (a part b) in -> (b a part) in, a: 2", "M340",
         "in the view '(a part b) in -> (b a part) in' of 'out': 'part' is first on one side: there the parts lie end to end"),
        ("{out: [6, 6], in: 2}", "view: (a b) in -> (b a) in, a: [2, 3, 4]", "M340",
         "in the view '(a b) in -> (b a) in' of 'out': 'a' has 3 sizes, and the dim 2 parts"),
        ("{out: [6, 6], in: 2}", "repeat: (out) in -> (out k) in, k: 2", "M340",
         "in the view '(out) in -> (out k) in' of 'out': only a dim without parts is repeated"),
        ("{out: 12, in: 2}", "add: null", "M304", "`add` is None, expected a number"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_fit_are_found_when_the_spec_is_compiled(
    dims: str, do: str, code: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(MapperError) as caught:
        program_of(tmp_path, f"{{target: w, dims: {dims}, do: [{{{do}}}]}}")
    (found,) = caught.value.diagnostics
    assert (found.code, found.message) == (code, message)
    assert found.place is not None
    assert found.place.line == 10


def test_a_cut_through_interleaved_parts_is_refused(tmp_path: Path) -> None:
    rule = """{target: w, sources: [a, b], dims: {out: [6, 6]}, shard: {out: CUT},
         do: [{view: (part row) -> (row part)}]}"""
    for cut, problem in (
        ("tp", "the parts are cut each on its own, or padded"),
        ("{axis: tp, joined: true}", "a rank holds 3 elements"),
    ):
        with pytest.raises(MapperError) as caught:
            program_of(tmp_path, rule.replace("CUT", cut), layout="tp=4" if "joined" in cut else "tp=2")
        (found,) = caught.value.diagnostics
        text = f"the dim 'out' of w is interleaved from its parts in blocks of 2 elements, and {problem}"
        assert (found.code, found.message) == ("M341", text)
    tensors = {"a": torch.arange(6.0), "b": torch.arange(10.0, 16.0)}
    program = program_of(tmp_path, rule.replace("CUT", "{axis: tp, joined: true, units: 6}"), layout="tp=3")
    checkpoint = write(tmp_path / "c", tensors, {})
    ranks = held(program, checkpoint, tensors)
    assert [each["w"].tolist() for each in ranks] == [[0, 10, 1, 11], [2, 12, 3, 13], [4, 14, 5, 15]]
    assert all_raw(exported(program, checkpoint, ranks, tmp_path / "out")) == all_raw(tensors)


def test_parts_with_sources_of_their_own_cannot_lie_interleaved(tmp_path: Path) -> None:
    rule = "{target: w, sources: [a, b], dims: {out: [6, 6]}, do: [{view: (row part) -> (part row)}]}"
    with pytest.raises(MapperError) as caught:
        program_of(tmp_path, rule)
    (found,) = caught.value.diagnostics
    assert found.code == "M340"
    assert found.message.endswith("it needs one source that holds all parts, and each part has its own")


# --- values -------------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.data(), st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64]))
def test_a_slice_of_computed_values_is_computed_from_the_slice(data: st.DataObject, dtype: torch.dtype) -> None:
    ops = data.draw(st.lists(st.sampled_from(OPS), min_size=1, max_size=3))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 10**6)))
    values = torch.randn(7, 11, generator=generator).to(dtype)
    rows, columns = (slice(*sorted(data.draw(st.tuples(st.integers(0, size), st.integers(0, size))))) for size in values.shape)
    is_turned = data.draw(st.booleans())
    whole, part = computed(values, ops, dtype)[rows, columns], values[rows, columns]
    if is_turned:
        whole, part = whole.T, part.T
    assert torch.equal(computed(part, ops, dtype), whole)


@settings(max_examples=60)
@given(st.data(), st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
def test_what_is_undone_is_the_only_value_that_gives_the_result(data: st.DataObject, dtype: torch.dtype) -> None:
    ops = data.draw(st.lists(st.sampled_from(OPS), min_size=1, max_size=2))
    stored = torch.tensor(data.draw(st.lists(st.floats(-4, 4, width=16), min_size=1, max_size=5))).to(dtype)
    found, unknown = undone(computed(stored, ops, torch.float32), ops, dtype)
    if unknown is None:
        assert all_raw({"": found}) == all_raw({"": stored})


def test_an_exponential_is_within_a_bit_of_the_exact_one(tmp_path: Path) -> None:
    tensors = {"a_log": torch.linspace(-4, 4, 4096).bfloat16()}
    program = program_of(tmp_path, "{target: a, source: a_log, dims: {x: 4096}, cast: float32, do: [neg_exp]}")
    (found,) = held(program, write(tmp_path / "c", tensors, {}), tensors)
    exact = -torch.exp(tensors["a_log"].double())
    assert found["a"].dtype == torch.float32
    assert bool(((found["a"].double() - exact).abs() <= exact.abs() * 2**-23).all())


def test_values_come_back_only_where_one_number_gives_them(tmp_path: Path) -> None:
    rules = (
        "{target: twice, dims: {x: 4}, do: [{multiply: 2}]}",
        "{target: near, dims: {x: 4}, shard: {x: tp}, do: [{add: 1}]}",
    )
    program = program_of(tmp_path, *rules, layout="tp=2")
    tensors = {"twice": torch.tensor([1.0, -2.5, 3e-9, 0.0]), "near": torch.tensor([5.0, 5.5, 6.0, 6.5])}
    checkpoint = write(tmp_path / "c", tensors, {})
    assert all_raw(exported(program, checkpoint, held(program, checkpoint, tensors), tmp_path / "out")) == all_raw(tensors)
    tensors["near"][2] = 1e-9
    checkpoint = write(tmp_path / "d", tensors, {})
    with pytest.raises(MapperError) as caught:
        exported(program, checkpoint, held(program, checkpoint, tensors), tmp_path / "refused")
    assert str(caught.value) == (
        "M709 'near' cannot be written back: 'near' holds 1.0 at [0], and `add` makes that of no one value of float32"
    )


def test_a_mean_is_of_the_whole_tensor_and_the_plan_says_what_is_read(tmp_path: Path) -> None:
    rule = "{target: bias, dims: {expert: 8}, shard: {expert: tp}, do: [{subtract_mean: expert}]}"
    tensors = {"bias": torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8])}
    program, checkpoint = program_of(tmp_path, rule, layout="tp=2"), write(tmp_path / "c", tensors, {})
    ranks = held(program, checkpoint, tensors)
    assert [each["bias"].tolist() for each in ranks] == [[-3.5, -2.5, -1.5, -0.5], [0.5, 1.5, 2.5, 3.5]]
    report = Loader(program, allocate(program.plan(checkpoint))).load(checkpoint)
    assert (report.bytes_read, report.bytes_written) == (32, 16)
    described = describe_plan(program, checkpoint)
    assert described.to_text().splitlines()[2:5] == [
        "    bias[0:4] -> [0:4]", "    do subtract_mean expert", "    reads every source whole: 32 bytes",
    ]  # fmt: skip
    assert described.totals.bytes_read == 32
    with pytest.raises(MapperError) as caught:
        exported(program, checkpoint, ranks, tmp_path / "out")
    (found,) = caught.value.diagnostics
    assert str(found) == ("M708 'bias' cannot be written back: `subtract_mean` has no inverse, 'bias' holds only its result")


def test_a_mean_over_parts_of_several_sources_and_whole_numbers_are_refused(tmp_path: Path) -> None:
    for rule, message in (
        ("{target: w, sources: [a, b], dims: {x: [2, 2]}, do: [{subtract_mean: x}]}",
         "`subtract_mean x`: the mean runs over parts that have sources of their own"),
        ("{target: w, dims: {x: 4}, cast: int32, do: [{add: 1}]}",
         "`add 1`: the target is int32, expected float16, bfloat16, float32 or float64"),
    ):  # fmt: skip
        with pytest.raises(MapperError) as caught:
            program_of(tmp_path, rule)
        (found,) = caught.value.diagnostics
        assert (found.code, found.message) == ("M342", message)


def test_values_that_cannot_be_computed_with_are_found_in_files_and_in_a_stream(tmp_path: Path) -> None:
    program, tensors = program_of(tmp_path, "{target: w, dims: {x: 4}, do: [{add: 1}]}"), {"w": torch.arange(4)}
    targets = {"w": torch.zeros(4, dtype=torch.int64)}
    with pytest.raises(MapperError) as caught:
        Loader(program, targets).load(write(tmp_path / "c", tensors, {}))
    assert told(caught.value.diagnostics) == [("M505", "w")]
    with pytest.raises(MapperError) as streamed:
        Loader(program, targets).update().feed("w", tensors["w"])
    assert told(streamed.value.diagnostics) == [("M505", "w")]
    assert targets["w"].tolist() == [0, 0, 0, 0]


def test_a_filled_parameter_reads_nothing(tmp_path: Path) -> None:
    rules = ("{target: scale, dims: {x: 4}, shard: {x: tp}, cast: bfloat16, do: [{fill: 1.5}]}", "{copy: [w]}")
    program, tensors = program_of(tmp_path, *rules, layout="tp=2"), {"w": torch.ones(2)}
    ranks = held(program, write(tmp_path / "c", tensors, {}), tensors)
    assert [each["scale"].tolist() for each in ranks] == [[1.5, 1.5]] * 2
    assert ranks[0]["scale"].dtype == torch.bfloat16


# --- what is said of it -------------------------------------------------------------------------------------------------


def test_explanations_name_the_operations_and_the_rows_that_are_read(tmp_path: Path) -> None:
    rule = """{target: qkv, dims: {out: [4, 4, 4], in: 2}, shard: {out: {axis: tp, units: 2}},
         do: [{view: (head part width) in -> (part head width) in, head: 4}]}"""
    program = program_of(tmp_path, rule, layout="tp=2")
    explained = explain_name(program, "qkv").source
    assert explained is not None
    assert explained.to_text().splitlines()[3:] == [
        "    do: view (head part width) in -> (part head width) in",
        "    rank 0: qkv[0:4, 0:2] -> qkv[0:2, 0:2] (in 2 runs)",
        "    rank 0: qkv[1:5, 0:2] -> qkv[2:4, 0:2] (in 2 runs)",
        "    rank 0: qkv[2:6, 0:2] -> qkv[4:6, 0:2] (in 2 runs)",
        "    rank 1: qkv[6:10, 0:2] -> qkv[0:2, 0:2] (in 2 runs)",
        "    rank 1: qkv[7:11, 0:2] -> qkv[2:4, 0:2] (in 2 runs)",
        "    rank 1: qkv[8:12, 0:2] -> qkv[4:6, 0:2] (in 2 runs)",
    ]


def test_a_cast_that_would_wrap_a_number_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    program = program_of(tmp_path, "{target: ids, dims: {x: 4}, shard: {x: tp}, cast: int32}", "{copy: [w]}", layout="tp=2")
    tensors = {"w": torch.ones(2), "ids": torch.tensor([1, 2**31, 3, -4])}
    checkpoint = write(tmp_path / "c", tensors, {})
    message = "'ids' holds 2147483648, which int32 cannot hold: -2147483648 to 2147483647"
    targets = {"ids": torch.zeros(2, dtype=torch.int32), "w": torch.zeros(2)}
    with pytest.raises(MapperError) as caught:
        Loader(program, targets).load(checkpoint)
    assert [(each.code, each.message) for each in caught.value.diagnostics] == [("M613", message)]
    session = Loader(program, targets).update()
    with pytest.raises(MapperError) as streamed:
        session.feed("ids", tensors["ids"])
    assert [(each.code, each.message) for each in streamed.value.diagnostics] == [("M613", message)]
    assert targets["w"].tolist() == targets["ids"].tolist() == [0, 0]
    Loader(program.at_rank(1), targets).load(checkpoint)  # its half fits
    assert targets["ids"].tolist() == [3, -4]


def test_scales_are_explained_with_the_values_they_belong_to(tmp_path: Path) -> None:
    before = """
formats:
  scaled: [{leaves: {weight: {dims: [out, in], cast: bfloat16, dequantize: {weight: {dims: [out, in], dtype: float8_e4m3fn},
            scale: {dims: [out / 2, in]}}}}}]
cases:
  - {config: {}, runtime: own, layout: tp=2, rank: 1, maps: {'w.scale[1:2]': w.weight, 'w.weight[2:4]': w.weight}}
"""
    rule = "{target: 'w.{leaf}', format: scaled, dims: {out: 4, in: 3}, shard: {out: tp}}"
    program = program_of(tmp_path, rule, layout="tp=2", before=before)
    explained = explain_name(program, "w.scale").source
    assert explained is not None
    assert explained.to_text().splitlines()[-2:] == [
        "    rank 0: w.scale[0, 0:3] -> w.weight[0:2, 0:3] (scales)",
        "    rank 1: w.scale[1, 0:3] -> w.weight[0:2, 0:3] (scales)",
    ]
    assert run_cases(program.spec).passed == 2
