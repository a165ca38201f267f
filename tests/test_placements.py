"""Where experts live: redundant slots, round robin and tables, and what is refused about them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mapper.compiler import Program, compile
from mapper.diagnostics import MapperError
from mapper.layout import Layout, Placement, expert_slots
from mapper.load import Loader
from tests.loads import spec_of, write

SPEC = """
config: {required: [experts]}
index:
  expert: {count: experts, axis: ep}
runtimes:
  vllm:
    mesh: MESH
    rules:
      - target: w
        source: "{expert}.w"
        stack: expert
        dims: {out: 3}
"""


def program(folder: Path, layout: Layout, *, experts: int = 4, mesh: str = "vllm", rank: int = 0) -> Program:
    spec = spec_of(folder, SPEC.replace("MESH", mesh))
    return compile(spec, config={"experts": experts}, runtime="vllm", layout=layout, rank=rank)


def refused(folder: Path, layout: Layout, *, mesh: str = "vllm") -> list[str]:
    with pytest.raises(MapperError) as error:
        program(folder, layout, mesh=mesh)
    return [f"{each.code} {each.message}" for each in error.value.diagnostics]


ROUND_ROBIN = "{like: vllm, round_robin: redundant_experts == 0}"


@pytest.mark.parametrize(
    ("redundant", "placement", "mesh", "slots"),
    [
        (0, "linear", "vllm", [[0, 1], [2, 3]]),
        (2, "linear", "vllm", [[0, 1, 2], [3, 0, 1]]),
        (6, "linear", "vllm", [[0, 1, 2, 3, 0], [1, 2, 3, 0, 1]]),
        (0, "round_robin", ROUND_ROBIN, [[0, 2], [1, 3]]),
        (2, (0, 1, 2, 2, 3, 0), "vllm", [[0, 1, 2], [2, 3, 0]]),
        (2, (0, 1, 1, 2, 3, 0), "vllm", [[0, 1, 1], [2, 3, 0]]),
    ],
)
def test_every_slot_holds_its_logical_expert(
    redundant: int, placement: Placement, mesh: str, slots: list[list[int]], tmp_path: Path
) -> None:
    tensors = {f"{expert}.w": torch.arange(3.0) + 10 * expert for expert in range(4)}
    checkpoint = write(tmp_path / "in", tensors, {"experts": 4})
    layout = Layout(tp=2, ep=2, redundant_experts=redundant, placement=placement)
    for rank, held in enumerate(slots):
        own = program(tmp_path, layout, mesh=mesh, rank=rank)
        from_files, from_stream = (torch.full((len(held), 3), -1.0) for _ in range(2))
        report = Loader(own, {"w": from_files}).load(checkpoint)
        with Loader(own, {"w": from_stream}).update() as session:
            session.feed_all(reversed(tensors.items()))
        expected = torch.stack([tensors[f"{expert}.w"] for expert in held])
        assert torch.equal(from_files, expected)
        assert torch.equal(from_stream, expected)
        assert report.loaded == len(set(held))


def test_slots_of_all_ranks_are_the_table_in_order() -> None:
    table = (3, 1, 0, 2, 2, 1)
    assert [expert_slots(4, 3, rank, redundant=2, placement=table) for rank in range(3)] == [(3, 1), (0, 2), (2, 1)]


def test_what_a_layout_asks_for_and_the_runtime_does_not_have_is_refused(tmp_path: Path) -> None:
    fixed = "{like: vllm, redundant_experts: 0}"
    asked = Layout(tp=2, ep=2, redundant_experts=2)
    text = "M332 the layout asks for 2 redundant experts, and the runtime 'vllm' has 0"
    assert refused(tmp_path, asked, mesh=fixed) == [text]
    assert refused(tmp_path, Layout(tp=2, ep=2, placement="round_robin")) == [
        "M333 the layout asks for placement round_robin, which the runtime 'vllm' does not have for this config"
    ]


def test_slots_that_ranks_cannot_share_are_refused(tmp_path: Path) -> None:
    assert refused(tmp_path, Layout(tp=2, ep=2, redundant_experts=1)) == [
        "M334 5 physical expert slots cannot be shared equally by ep=2 ranks"
    ]


def test_table_of_another_length_is_refused(tmp_path: Path) -> None:
    assert refused(tmp_path, Layout(tp=2, ep=2, placement=(0, 1, 2, 3, 0, 1))) == [
        "M335 the placement table has 6 slots, expected 4 (4 experts and 0 redundant)"
    ]


@pytest.mark.parametrize(("table", "problem"), [((0, 1, 2, 2), "has no slot for [3]"), ((0, 1, 2, 3, 3, 4), "names [4]")])
def test_table_without_an_expert_or_with_a_stranger_is_refused(table: tuple[int, ...], problem: str, tmp_path: Path) -> None:
    layout = Layout(tp=2, ep=2, placement=table, redundant_experts=len(table) - 4)
    assert refused(tmp_path, layout) == [f"M336 the placement table {problem}; experts are 0 to 3"]


WHERE = """
config: {required: [layers]}
index:
  layer: {count: layers, axis: pp, where: layer >= 2}
runtimes:
  vllm:
    mesh: vllm
    rules:
      - copy: ["l.{layer}"]
"""


def test_layers_are_dealt_by_number_whichever_of_them_count(tmp_path: Path) -> None:
    checkpoint = write(tmp_path / "in", {f"l.{layer}": torch.full((2,), float(layer)) for layer in (2, 3)}, {"layers": 4})
    own = compile(spec_of(tmp_path, WHERE), config={"layers": 4}, runtime="vllm", layout=Layout(pp=2))
    assert [list(own.at_rank(rank).plan(checkpoint).targets) for rank in range(2)] == [[], ["l.2", "l.3"]]


def test_rank_without_an_expert_holds_an_empty_target(tmp_path: Path) -> None:
    tensors = {"0.w": torch.ones(3)}
    own = program(tmp_path, Layout(tp=2, ep=2), experts=1, rank=1)
    from_files, from_stream = torch.empty(0, 3), torch.empty(0, 3)
    report = Loader(own, {"w": from_files}).load(write(tmp_path / "in", tensors, {"experts": 1}))
    with Loader(own, {"w": from_stream}).update() as session:
        session.feed_all(tensors.items())
        assert session.finish().loaded == report.loaded == 0
