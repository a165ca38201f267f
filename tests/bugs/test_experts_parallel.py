"""Experts dealt over ranks: counts of the wrong model, redundant copies, two slots for one expert, probing for a number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mapper.diagnostics import MapperError
from mapper.layout import Layout
from tests.bugs.harness import Case, case, load, refusal
from tests.loads import Tensors, all_raw, raw, told

TWO_MODELS = """
config: {required: [n_routed_experts, draft_n_routed_experts]}
index:
  expert: {count: n_routed_experts, axis: ep}
  draft_expert: {count: draft_n_routed_experts, axis: ep}
runtimes:
  own:
    mesh: vllm
    rules:
      - {target: main.w1, source: "layers.0.ffn.experts.{expert}.w1.weight", stack: expert, dims: {out: 3, in: 2}}
      - {target: draft.w1, source: "mtp.0.ffn.experts.{draft_expert}.w1.weight", stack: draft_expert, dims: {out: 3, in: 2}}
"""


def read_by_one_window(sources: Tensors, num_experts: int, num_ranks: int, rank: int) -> Tensors:
    """Filter as the peer did, before anything is read: one window of numbers, from the experts of the main model."""
    share = num_experts // num_ranks
    return {name: each for name, each in sources.items() if int(name.split(".")[-3]) // share == rank}


@case("ep-01")
def test_each_models_experts_are_dealt_by_its_own_number(bug: Case, tmp_path: Path) -> None:
    sources, layout = bug.sources(), Layout(**bug["layout"])
    drafts = [name for rank in (1, 2, 3) for name in read_by_one_window(sources, 8, layout.ep, rank) if "mtp" in name]
    assert drafts == ["mtp.0.ffn.experts.2.w1.weight", "mtp.0.ffn.experts.3.w1.weight"]  # ranks 2 and 3 get none

    loaded = set()
    for rank in range(layout.num_ranks):
        targets = bug.targets()
        report = load(bug.program(tmp_path, TWO_MODELS, layout=layout, rank=rank), tmp_path, sources, targets)
        main = torch.stack([sources[f"layers.0.ffn.experts.{each}.w1.weight"] for each in (2 * rank, 2 * rank + 1)])
        draft = sources[f"mtp.0.ffn.experts.{rank}.w1.weight"][None]
        assert all_raw(targets) == all_raw({"main.w1": main, "draft.w1": draft})
        assert (report.sources, report.loaded, report.elsewhere) == (12, 3, 9)  # what is not read is in the account
        loaded.add(raw(draft))
    assert len(loaded) == 4


EXPERTS = """
config: {required: [n_experts]}
index: {expert: {count: n_experts, axis: ep}}
runtimes:
  own:
    mesh: vllm
    rules:
      - {target: w1, source: "experts.{expert}.w1.weight", stack: expert, dims: {out: 2, in: 3}}
"""


def slots_of(sources: Tensors, experts: list[int]) -> Tensors:
    return {"w1": torch.stack([sources[f"experts.{each}.w1.weight"] for each in experts])}


def load_own_experts(sources: Tensors, slots: list[int], own: range) -> list[int]:
    """Load as the peer did: only what the rank owns without redundancy is read. Return the slots that nothing filled."""
    read = {each for each in range(len(sources)) if each in own}
    return [slot for slot, expert in enumerate(slots) if expert not in read]


@case("ep-02")
def test_a_rank_reads_the_experts_of_its_redundant_slots_too(bug: Case, tmp_path: Path) -> None:
    sources, table = bug.sources(), bug["config"]["phy2log"]
    layout = replace(Layout(**bug["layout"]), placement=tuple(table))
    assert [load_own_experts(sources, table[3 * rank :][:3], range(2 * rank, 2 * rank + 2)) for rank in (0, 1)] == [[2], [2]]

    for rank in range(2):
        targets = bug.targets()
        report = load(bug.program(tmp_path, EXPERTS, layout=layout, rank=rank), tmp_path, sources, targets)
        assert all_raw(targets) == all_raw(slots_of(sources, [[0, 1, 2], [2, 3, 0]][rank]))
        assert report.loaded == 3
    # Without a table the slots behind the last expert repeat the first ones.
    targets = bug.targets()
    load(bug.program(tmp_path, EXPERTS, rank=1), tmp_path, sources, targets)
    assert all_raw(targets) == all_raw(slots_of(sources, [3, 0, 1]))


def load_by_a_table_without_redundancy(sources: Tensors, targets: Tensors, num_experts: int) -> None:
    """Load as the peer did: the parameter has room for the redundant experts, the table has no line for them."""
    for expert in range(num_experts):
        targets["w1"][expert] = sources[f"experts.{expert}.w1.weight"]


@case("ep-03")
def test_slots_that_only_the_model_has_are_an_error(bug: Case, tmp_path: Path) -> None:
    sources, targets, wrong = bug.sources(), bug.targets(), bug.targets()
    redundant = bug["config"]["redundant"]
    load_by_a_table_without_redundancy(sources, wrong, 4)
    assert raw(wrong["w1"][4:]) == raw(targets["w1"][4:])  # untouched

    layouts = [Layout(**bug["layout"], redundant_experts=redundant[each]) for each in ("mapped", "allocated")]
    mapped, allocated = (bug.program(tmp_path, EXPERTS, layout=each) for each in layouts)
    findings = refusal(mapped, tmp_path, sources, targets)
    assert told(findings) == [("M532", "w1")]
    assert "[6, 2, 3] in the model, and the rule gives [4, 2, 3]" in findings[0].message
    load(allocated, tmp_path, sources, targets)
    assert all_raw(targets) == all_raw(slots_of(sources, [0, 1, 2, 3, 0, 1]))


def load_one_slot_an_expert(sources: Tensors, targets: Tensors, slots: list[int]) -> None:
    """Load as peers did: a dictionary from the expert to its slot, which keeps one slot of two."""
    for expert, slot in {expert: slot for slot, expert in enumerate(slots)}.items():
        targets["w1"][slot] = sources[f"experts.{expert}.w1.weight"]


@case("ep-05")
def test_two_slots_of_one_rank_may_hold_one_expert(bug: Case, tmp_path: Path) -> None:
    sources, targets, wrong = bug.sources(), bug.targets(), bug.targets()
    table = bug["config"]["phy2log"]
    load_one_slot_an_expert(sources, wrong, table[:3])
    assert raw(wrong["w1"][1]) == raw(targets["w1"][1])  # untouched

    layout = replace(Layout(**bug["layout"]), placement=tuple(table))
    load(bug.program(tmp_path, EXPERTS, layout=layout), tmp_path, sources, targets)
    assert all_raw(targets) == all_raw(slots_of(sources, [0, 1, 1]))
    # An expert without any slot would be lost.
    with pytest.raises(MapperError, match="M336") as caught:
        bug.program(tmp_path, EXPERTS, layout=replace(layout, placement=(0, 1, 1, 2, 2, 0)))
    assert "has no slot for [3]" in str(caught.value)


def has_experts(names: Mapping[str, object]) -> bool:
    """Answer as the peer did: the highest number found is above 0."""
    return max((int(name.split(".")[1]) for name in names if name.startswith("experts.")), default=0) > 0


@case("ep-06")
def test_the_number_of_experts_is_said_and_not_probed_for(bug: Case, tmp_path: Path) -> None:
    numbers = bug["config"]["n_experts"]
    assert not has_experts(bug.sources("one expert"))
    programs = {form: bug.program(tmp_path, EXPERTS, config={"n_experts": number}) for form, number in numbers.items()}
    targets = bug.targets("one expert")
    load(programs["one expert"], tmp_path, bug.sources("one expert"), targets)
    assert all_raw(targets) == all_raw(slots_of(bug.sources("one expert"), [0]))

    for form, missing in {"no expert": [0, 1], "a gap": [1]}.items():
        found = told(refusal(programs[form], tmp_path, bug.sources(form), bug.targets(form)))
        lost = [("M501", f"experts.{each}.w1.weight") for each in missing]
        assert found == lost + [("M502", name) for name in bug.sources(form) if not name.startswith("experts.")]
