"""Coverage and conservation are decided on the boxes themselves: an engine or a spec that gets them wrong is found out."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from mapper.checkpoint import Checkpoint
from mapper.compiler import Program, compile
from mapper.diagnostics import Diagnostic, MapperError
from mapper.layout import Layout
from mapper.plan.geometry import Piece
from mapper.report import check, check_layouts
from tests.loads import spec_of

SPEC = """
config: {required: [layers, experts]}
index:
  layer: {count: layers, axis: pp}
  expert: {count: experts, axis: ep}
runtimes:
  vllm:
    mesh: vllm
    rules:
      - target: layers.{layer}.w
        sources:
          - layers.{layer}.a
          - layers.{layer}.b
        dims: {out: [6, 4], in: 3}
        shard: {out: tp}
        STAGE
      - target: layers.{layer}.e
        source: layers.{layer}.{expert}.e
        stack: expert
        dims: {out: 2}
        WHEN
"""
CONFIG = {"layers": 2, "experts": 4}
TENSORS = {f"layers.{layer}.{part}": (rows, 3) for layer in range(2) for part, rows in (("a", 6), ("b", 4))} | {
    f"layers.{layer}.{expert}.e": (2,) for layer in range(2) for expert in range(4)
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    path = tmp_path / "own.header.json"
    path.write_text(json.dumps({name: {"dtype": "F32", "shape": shape} for name, shape in TENSORS.items()}))
    return Checkpoint.open(path)


def told(findings: Iterable[Diagnostic]) -> list[str]:
    return [f"{each.code} {each.message}" for each in findings]


def program(folder: Path, layout: Layout, *, stage: str = "", when: str = "") -> Program:
    text = SPEC.replace("STAGE", stage).replace("WHEN", when)
    return compile(spec_of(folder, text), config=CONFIG, runtime="vllm", layout=layout)


def findings(own: Program, checkpoint: Checkpoint) -> list[str]:
    report = check(own, checkpoint)
    assert report.ok == (not report.findings)
    return told(report.findings)


def test_right_boxes_have_no_findings(checkpoint: Checkpoint, tmp_path: Path) -> None:
    assert findings(program(tmp_path, Layout(tp=2, pp=1, ep=2)), checkpoint) == []


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (
            lambda found: found[:-1],
            "M520 [0:3, 0:3] of layers.{layer: 0...1}.w (shape [5, 3] on rank 0) is written by no source",
        ),
        (
            lambda found: (*found, found[0]),
            "M521 [0:3, 0:3] of layers.{layer: 0...1}.w (shape [5, 3] on rank 0) is written twice",
        ),
        (
            lambda found: (replace(found[0], target=((4, 7), (0, 3))),),
            "M522 [4:7, 0:3] lies outside of layers.{layer: 0...1}.w (shape [5, 3] on rank 0)",
        ),
    ],
)
def test_wrong_boxes_are_named_with_their_region(
    damage: Callable[[tuple[Piece, ...]], tuple[Piece, ...]],
    expected: str,
    checkpoint: Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from mapper.plan import local

    right = local.pieces

    def wrong(axes: object, part: int | None, parts_axis: int | None) -> tuple[Piece, ...]:
        found = right(axes, part, parts_axis)  # type: ignore[arg-type]
        return damage(found) if part == 0 and parts_axis == 0 else found

    monkeypatch.setattr(local, "pieces", wrong)
    own = program(tmp_path, Layout(tp=2))
    assert expected in findings(own, checkpoint)
    with pytest.raises(MapperError) as error:
        own.plan(checkpoint)
    assert expected in told(error.value.diagnostics)


def test_slot_without_a_source_is_named(checkpoint: Checkpoint, tmp_path: Path) -> None:
    own = program(tmp_path, Layout(), when="when: expert < 3")
    found = findings(own, checkpoint)
    assert "M523 slot 3 of layers.{layer: 0...1}.e on rank 0 belongs to expert 3, for which the rule has no source" in found


def test_tail_that_no_rank_reads_is_named(checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mapper.plan import geometry

    right = geometry._shares

    def floored(*arguments: object) -> object:
        runs, share = right(*arguments)  # type: ignore[arg-type]
        return [replace(run, stop=run.stop - 1) for run in runs], share - 1

    monkeypatch.setattr(geometry, "_shares", floored)
    found = findings(program(tmp_path, Layout(tp=2)), checkpoint)
    assert "M535 [2, 0:3] of the source layers.{layer: 0...1}.a is read by no rank" in found


def test_layers_that_no_stage_holds_are_named(checkpoint: Checkpoint, tmp_path: Path) -> None:
    own = program(tmp_path, Layout(pp=2), stage="stage: first")
    expected = "M536 layers.{layer: 0...1}.w is held by no rank for layer in [1]"
    assert findings(own, checkpoint) == [expected]
    report = check_layouts(lambda layout: program(tmp_path, layout, stage="stage: first"), max_ranks=2)
    assert report.counterexample is not None
    assert report.counterexample.layout == "tp=1,pp=2,dp=1,ep=1"
    assert told(report.counterexample.findings) == [expected]
    assert not report.ok
    assert "smallest counterexample: tp=1,pp=2,dp=1,ep=1" in report.to_text()


def test_target_on_no_rank_is_named(checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = program(tmp_path, Layout())
    monkeypatch.setattr("mapper.plan.share.on_stage", lambda *arguments: False)
    found: list[Diagnostic] = list(check(own, checkpoint).findings)
    assert told(found)[0] == "M537 layers.{layer: 0...1}.w is held by no rank, though the checkpoint has its sources"
