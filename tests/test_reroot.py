"""A program under another prefix is the same program: same bytes, same skips, on every rank.

The skip of the draft layers follows the prefix too; vLLM's did not (https://github.com/vllm-project/vllm/issues/16450).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from mapper.checkpoint import Checkpoint
from mapper.compiler import Program, compile
from mapper.diagnostics import MapperError
from mapper.layout import Layout
from mapper.load import Loader
from mapper.spec import load_spec
from mapper.spec.configs import bundled_config
from tests.loads import Tensors, all_raw, prefilled, spec_of, told, write
from tests.oracle.families import FAMILIES, Header, family_tensors, tensor_values

CONFIG = FAMILIES["deepseek_v3_mtp"].config
SOURCES = family_tensors("deepseek_v3_mtp") | {
    name: tensor_values(Header(name, (5,), torch.float32))
    for name in ("model.layers.0.self_attn.rotary_emb.inv_freq", "model.layers.2.self_attn.rotary_emb.inv_freq")
}
LAYOUT = Layout(tp=1, pp=2)
NUM_DRAFT = sum(name.startswith(f"model.layers.{CONFIG['num_hidden_layers']}.") for name in SOURCES)
SKIPPED = {"**.rotary_emb.inv_freq": 2, "model.layers.{nextn}.**": NUM_DRAFT}
LONG = "language_model"


@dataclass(frozen=True)
class Root:
    """One way to root the program, and the name that a name of the checkpoint has there (None: it is not there)."""

    of: Callable[[Program], Program]
    name: Callable[[str], str | None]


def stripped(name: str) -> str | None:
    return name.removeprefix("model.") if name.startswith("model.") else None


ROOTS = {
    "absolute": Root(lambda program: program, lambda name: name),
    "scoped": Root(lambda program: program.scoped("model"), stripped),
    "mounted": Root(lambda program: program.mounted(LONG), lambda name: f"{LONG}.{name}"),
    "mounted twice": Root(lambda program: program.mounted("b").mounted("a"), lambda name: f"a.b.{name}"),
    "mounted below a dotted prefix": Root(lambda program: program.mounted("a.b"), lambda name: f"a.b.{name}"),
    "scoped again": Root(lambda program: program.mounted(LONG).scoped(LONG), lambda name: name),
    "scoped below a dotted prefix": Root(lambda program: program.mounted(LONG).scoped(f"{LONG}.model"), stripped),
    "no prefix": Root(lambda program: program.scoped("").mounted(""), lambda name: name),
}


@pytest.fixture(scope="module")
def program() -> Program:
    return compile(load_spec("deepseek_v2"), config=CONFIG, runtime="vllm", layout=LAYOUT)


def renamed(tensors: Tensors, root: Root) -> Tensors:
    return {new: tensor for name, tensor in tensors.items() if (new := root.name(name)) is not None}


def checkpoint_of(folder: Path, root: Root) -> Checkpoint:
    return write(folder, renamed(SOURCES, root), CONFIG)


@pytest.fixture(scope="module")
def absolute(program: Program, tmp_path_factory: pytest.TempPathFactory) -> list[Tensors]:
    checkpoint = write(tmp_path_factory.mktemp("absolute"), SOURCES, CONFIG)
    loaded = []
    for rank in range(LAYOUT.num_ranks):
        tensors = prefilled(program.at_rank(rank).plan(checkpoint))
        Loader(program.at_rank(rank), tensors).load(checkpoint)
        loaded.append(tensors)
    assert loaded[0].keys() | loaded[1].keys() > {"lm_head.weight", "model.embed_tokens.weight"}
    return loaded


@pytest.mark.parametrize("name", ROOTS)
def test_same_bytes_and_same_skips_on_every_rank(name: str, program: Program, absolute: list[Tensors], tmp_path: Path) -> None:
    root = ROOTS[name]
    checkpoint = checkpoint_of(tmp_path, root)
    for rank in range(LAYOUT.num_ranks):
        rooted = root.of(program.at_rank(rank))
        plan = rooted.plan(checkpoint)
        from_files, from_stream = prefilled(plan), prefilled(plan)
        report = Loader(rooted, from_files).load(checkpoint)
        with Loader(rooted, from_stream).update() as session:
            session.feed_all(renamed(SOURCES, root).items())
            streamed = session.finish()
        expected = all_raw(renamed(absolute[rank], root))
        assert all_raw(from_files) == expected
        assert all_raw(from_stream) == expected
        assert report.skipped_by == streamed.skipped_by == SKIPPED
        assert report.sources == streamed.sources == len(checkpoint.tensors)
        assert (report.loaded, report.elsewhere) == (streamed.loaded, streamed.elsewhere)
        assert report.loaded + report.elsewhere + report.skipped == report.sources


@pytest.mark.parametrize("name", ["absolute", "mounted", "scoped again"])
def test_every_name_has_the_outcome_of_the_whole_program(name: str, program: Program) -> None:
    root = ROOTS[name]
    for rank in range(LAYOUT.num_ranks):
        at_rank = program.at_rank(rank)
        rooted = root.of(at_rank)
        for source in SOURCES:
            assert rooted.resolve(str(root.name(source))).outcome == at_rank.resolve(source).outcome, source


def test_what_lies_outside_of_a_scope_is_unknown_to_it(program: Program, tmp_path: Path) -> None:
    scoped = program.at_rank(1).scoped("model")
    assert program.at_rank(1).resolve("lm_head.weight").outcome == "loaded"
    for name in ("lm_head.weight", "model.norm.weight", "model.layers.3.enorm.weight"):
        assert scoped.resolve(name).outcome == "unknown", name
    assert scoped.resolve("norm.weight").outcome == "loaded"
    assert scoped.resolve("layers.3.enorm.weight").outcome == "skipped"
    checkpoint = write(tmp_path, renamed(SOURCES, ROOTS["scoped"]) | {"lm_head.weight": SOURCES["lm_head.weight"]}, CONFIG)
    with pytest.raises(MapperError) as caught:
        scoped.plan(checkpoint)
    assert told(caught.value.diagnostics) == [("M502", "lm_head.weight")]


def test_scope_that_nothing_lies_in_knows_no_name(program: Program) -> None:
    scoped = program.scoped("modle")
    assert (scoped.families, scoped.skips[1:]) == ((), ())
    assert scoped.resolve("embed_tokens.weight").outcome == "unknown"


def test_mounting_and_scoping_again_gives_the_same_plan(program: Program, tmp_path: Path) -> None:
    checkpoint = write(tmp_path, SOURCES, CONFIG)
    for rank in range(LAYOUT.num_ranks):
        at_rank = program.at_rank(rank)
        assert at_rank.mounted(LONG).scoped(LONG).plan(checkpoint) == at_rank.plan(checkpoint)
        assert at_rank.mounted(LONG).plan(checkpoint_of(tmp_path / str(rank), ROOTS["mounted"])) != at_rank.plan(checkpoint)


def test_kept_parameters_follow_the_prefix(tmp_path: Path) -> None:
    spec = spec_of(
        tmp_path,
        "runtimes:\n  own:\n    keep: [{target: model.scale, why: computed}]\n    rules:\n      - copy: [model.w]\n",
    )
    program = compile(spec, config={}, runtime="own")
    for root in ("absolute", "scoped", "mounted"):
        at = ROOTS[root]
        names = {name: str(at.name(name)) for name in ("model.w", "model.scale")}
        model = {names["model.w"]: torch.zeros(3), names["model.scale"]: torch.full((2,), 7.0)}
        checkpoint = write(tmp_path / root, {names["model.w"]: torch.arange(3.0)}, {})
        report = Loader(at.of(program), model).load(checkpoint)
        assert report.kept == {names["model.scale"]: "model.scale"}
        assert model[names["model.w"]].tolist() == [0.0, 1.0, 2.0]
        assert model[names["model.scale"]].tolist() == [7.0, 7.0]


HALF_OUTSIDE = {
    "target": "- rename: {model.a: b}",
    "source": "- rename: {a: model.b}",
    "one of two sources": "- {target: model.b, sources: [model.x, y], dims: {out: [3, 2]}}",
    "one of two spellings": "- {target: model.b, any_of: [{source: model.x}, {source: y}]}",
    "twin": "- copy: [a]\n      - {target: model.b, tie: a}",
}


@pytest.mark.parametrize("name", HALF_OUTSIDE)
def test_rule_with_one_side_outside_is_refused(name: str, tmp_path: Path) -> None:
    program = compile(
        spec_of(tmp_path, f"runtimes:\n  own:\n    rules:\n      {HALF_OUTSIDE[name]}\n"), config={}, runtime="own"
    )
    with pytest.raises(MapperError) as caught:
        program.scoped("model")
    assert {each.code for each in caught.value.diagnostics} == {"M317"}
    assert "has one side inside the prefix 'model' and one side outside" in str(caught.value)
    assert "own.yaml:" in str(caught.value)
    assert program.mounted("model").scoped("model").families == program.families


def test_prefix_that_spells_a_layer_is_refused() -> None:
    config = bundled_config("DeepSeek-V3")
    program = compile(load_spec("deepseek_v2"), config=config, runtime="vllm", layout=Layout(pp=2))
    with pytest.raises(MapperError) as error:
        program.scoped("model.layers.3")
    texts = {f"{each.code} {each.message}" for each in error.value.diagnostics}
    assert texts == {"M318 the prefix 'model.layers.3' spells a value of 'layer', which is dealt over the axis 'pp'"}
