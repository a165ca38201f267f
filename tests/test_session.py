"""Update sessions: any order and any split equal the load from files; what is wrong is told before its own write."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mapper.checkpoint import Checkpoint
from mapper.compiler import Program, compile
from mapper.diagnostics import MapperError
from mapper.layout import Layout
from mapper.load import Loader, UpdateSession
from mapper.session import session as session_module
from mapper.spec import load_spec
from tests.loads import Tensors, all_raw, prefilled, spec_of, told, write
from tests.oracle.families import FAMILIES, family_tensors, write_family

PROGRAMS = [
    ("deepseek_v3_mtp", "vllm", "tp=2,pp=2,ep=2"),
    ("deepseek_v3_mtp", "vllm-mtp", "tp=2"),
    ("deepseek_v3_fp8_mtp", "vllm", "tp=4,pp=2"),
    ("deepseek_v2_lite", "vllm", "tp=1,pp=3,dp=2,ep=2"),
]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    folder = tmp_path_factory.mktemp("families")
    return {family: Checkpoint.open(write_family(family, folder / family)) for family in {each[0] for each in PROGRAMS}}


def program_of(family: str, runtime: str = "vllm", layout: str = "", rank: int = 0) -> Program:
    config = FAMILIES[family].config
    return compile(load_spec("deepseek_v2"), config=config, runtime=runtime, layout=Layout.parse(layout), rank=rank)


STREAMS = {family: family_tensors(family) for family, _, _ in PROGRAMS}


@given(st.sampled_from(PROGRAMS), st.randoms(use_true_random=False), st.data())
@settings(max_examples=25, deadline=None)
def test_any_order_and_any_split_give_the_bytes_and_counts_of_a_file_load(
    checkpoints: dict[str, Checkpoint], chosen: tuple[str, str, str], shuffler: random.Random, data: st.DataObject
) -> None:
    family, runtime, layout = chosen
    checkpoint = checkpoints[family]
    whole = program_of(family, runtime, layout)
    program = whole.at_rank(data.draw(st.integers(0, whole.layout.num_ranks - 1)))
    plan = program.plan(checkpoint)
    from_files, from_stream = prefilled(plan), prefilled(plan)
    report = Loader(program, from_files).load(checkpoint)
    stream = list(STREAMS[family].items())
    shuffler.shuffle(stream)
    with Loader(program, from_stream).update() as session:
        while stream:
            size = shuffler.randint(1, len(stream))
            session.feed_all(iter(stream[:size]))
            del stream[:size]
        streamed = session.finish()
    assert all_raw(from_stream) == all_raw(from_files)
    for name in ("sources", "loaded", "elsewhere", "skipped_by", "targets", "tied", "kept", "bytes_padded", "layout", "rank"):
        assert getattr(streamed, name) == getattr(report, name), name


@given(st.sampled_from(PROGRAMS), st.data())
@settings(max_examples=25, deadline=None)
def test_what_was_not_fed_is_named_at_finish_and_can_be_fed_then(
    checkpoints: dict[str, Checkpoint], chosen: tuple[str, str, str], data: st.DataObject
) -> None:
    family, runtime, layout = chosen
    whole = program_of(family, runtime, layout)
    program = whole.at_rank(data.draw(st.integers(0, whole.layout.num_ranks - 1)))
    plan = program.plan(checkpoints[family])
    loaded = {step.source for step in plan.steps()}
    lost = data.draw(st.sets(st.sampled_from(sorted(STREAMS[family])), min_size=1, max_size=5))
    if runtime == "vllm-mtp":  # the draft would take the other embedding
        lost = {name for name in lost if not name.endswith("embed_tokens.weight")}
    session = Loader(program, prefilled(plan)).update()
    session.feed_all((name, tensor) for name, tensor in STREAMS[family].items() if name not in lost)
    missing = sorted(lost & loaded)
    if missing:
        with pytest.raises(MapperError) as caught:
            session.finish()
        assert sorted(told(caught.value.diagnostics)) == [("M501", name) for name in missing]
        session.feed_all((name, STREAMS[family][name]) for name in missing)
    assert session.finish().loaded == len(loaded)


SPEC = """
runtimes:
  own:
    mesh: vllm
    skip: [{source: skipped, why: not wanted}]
    rules:
      - target: w
        dims: {out: 6, in: 5}
        shard: {out: tp}
      - target: fused
        sources: [a, b]
        dims: {out: [4, 2], in: 3}
      - copy: [free]
"""
STREAM = {
    "w": torch.arange(30.0).reshape(6, 5) + 1,
    "a": torch.arange(12.0).reshape(4, 3) + 100,
    "b": torch.arange(6.0).reshape(2, 3) + 200,
    "free": torch.arange(7.0) + 300,
    "skipped": torch.arange(2.0),
}
Compiled = Callable[..., Program]


@pytest.fixture
def compiled(tmp_path: Path) -> Compiled:
    def of(text: str = SPEC, layout: str = "tp=2", rank: int = 1) -> Program:
        return compile(spec_of(tmp_path, text), config={}, runtime="own", layout=Layout.parse(layout), rank=rank)

    return of


def model_of(**changed: torch.Tensor) -> Tensors:
    model = {"w": torch.empty(3, 5), "fused": torch.empty(6, 3), "free": torch.empty(7)} | changed
    for tensor in model.values():
        tensor.fill_(7)
    return model


def refused(session: UpdateSession, name: str, tensor: torch.Tensor, model: Tensors) -> list[tuple[str, str]]:
    """Return the findings of one feed, after making sure that it wrote nothing."""
    before = all_raw({name: each for name, each in model.items() if not each.is_meta})
    with pytest.raises(MapperError) as caught:
        session.feed(name, tensor)
    assert all_raw({name: each for name, each in model.items() if not each.is_meta}) == before
    return told(caught.value.diagnostics)


WRONG: dict[str, tuple[str, torch.Tensor, list[tuple[str, str]]]] = {
    "unknown name": ("x", torch.zeros(3), [("M502", "x")]),
    "wrong shape": ("w", torch.zeros(5, 6), [("M503", "w")]),
    "local shape": ("w", torch.zeros(3, 5), [("M503", "w")]),
    "wrong shape of a part": ("b", torch.zeros(4, 3), [("M503", "b")]),
    "wrong shape that no dims state": ("free", torch.zeros(6), [("M532", "free")]),
    "wrong dtype": ("a", torch.zeros(4, 3, dtype=torch.bfloat16), [("M533", "fused")]),
    "wrong shape and dtype": ("w", torch.zeros(7, dtype=torch.int8), [("M503", "w"), ("M533", "w")]),
    "dtype that no file has": ("w", torch.empty(6, 5, dtype=torch.bits8), [("M611", "w")]),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_tensor_is_refused_before_its_write_and_the_right_one_is_taken_after(case: str, compiled: Compiled) -> None:
    name, tensor, findings = WRONG[case]
    model = model_of()
    with Loader(compiled(), model).update() as session:
        assert refused(session, name, tensor, model) == findings
        session.feed_all(STREAM.items())
    assert torch.equal(model["w"], STREAM["w"][3:])
    assert torch.equal(model["fused"], torch.cat([STREAM["a"], STREAM["b"]]))
    assert torch.equal(model["free"], STREAM["free"])


MODELS: dict[str, tuple[Callable[[], Tensors], str, list[tuple[str, str]]]] = {
    "too small": (lambda: model_of(w=torch.empty(2, 5)), "w", [("M532", "w")]),
    "too large": (lambda: model_of(w=torch.empty(6, 5)), "w", [("M532", "w")]),
    "on meta": (lambda: model_of(w=torch.empty(3, 5, device="meta")), "w", [("M602", "w")]),
    "absent": (lambda: {name: each for name, each in model_of().items() if name != "w"}, "w", [("M531", "w")]),
}


@pytest.mark.parametrize("case", MODELS)
def test_parameter_that_does_not_fit_is_told_before_its_write(case: str, compiled: Compiled) -> None:
    build, name, findings = MODELS[case]
    model = build()
    session = Loader(compiled(), model).update()
    assert refused(session, name, STREAM[name], model) == findings
    session.feed("free", STREAM["free"])


def test_dtype_that_the_rule_states_counts_even_where_the_model_has_another(compiled: Compiled) -> None:
    model = {"typed": torch.zeros(2, dtype=torch.bfloat16)}
    text = "runtimes:\n  own:\n    rules:\n      - {target: typed, dims: {n: 2}, dtype: float32}\n"
    session = Loader(compiled(text, "", 0), model).update()
    assert refused(session, "typed", torch.ones(2, dtype=torch.bfloat16), model) == [("M504", "typed")]


def test_two_rules_for_one_parameter_are_told_at_the_second(compiled: Compiled) -> None:
    program = compiled(SPEC + "      - copy: [free2]\n")
    model = model_of()
    model["free2"] = model["free"][:]
    session = Loader(program, model).update()
    session.feed("free", STREAM["free"])
    assert refused(session, "free2", STREAM["free"] + 1, model) == [("M601", "free2")]


@pytest.mark.parametrize("name", STREAM)
def test_tensor_fed_twice_is_refused(name: str, compiled: Compiled) -> None:
    model = model_of()
    session = Loader(compiled(), model).update()
    session.feed(name, STREAM[name])
    assert refused(session, name, STREAM[name] + 1, model) == [("M610", name)]


def test_tensor_of_another_rank_is_taken_counted_and_not_written(checkpoints: dict[str, Checkpoint]) -> None:
    program = program_of("deepseek_v3_mtp", layout="pp=2", rank=1)
    model = prefilled(program.plan(checkpoints["deepseek_v3_mtp"]))
    before = all_raw(model)
    session = Loader(program, model).update()
    name = "model.embed_tokens.weight"
    session.feed(name, STREAMS["deepseek_v3_mtp"][name])
    assert all_raw(model) == before
    assert refused(session, name, STREAMS["deepseek_v3_mtp"][name], model) == [("M610", name)]
    session.feed_all((other, tensor) for other, tensor in STREAMS["deepseek_v3_mtp"].items() if other != name)
    assert session.finish().elsewhere == sum(
        program.resolve(each).outcome == "elsewhere" for each in STREAMS["deepseek_v3_mtp"]
    )


def test_preferred_spelling_wins_in_either_order(checkpoints: dict[str, Checkpoint]) -> None:
    family = "deepseek_v3_mtp"
    program = program_of(family, "vllm-mtp", "tp=2", rank=1)
    own, other = "model.layers.3.embed_tokens.weight", "model.embed_tokens.weight"
    others = {name: tensor for name, tensor in STREAMS[family].items() if name not in (own, other)}
    plan = program.plan(checkpoints[family])
    results = []
    for names in ([own, other], [other, own], [own], [other]):
        model = prefilled(plan)
        with Loader(program, model).update() as session:
            session.feed_all((name, STREAMS[family][name]) for name in names)
            session.feed_all(others.items())
            report = session.finish()
        rows = torch.cat([STREAMS[family][names[0] if len(names) == 1 else own], torch.zeros(20, 128, dtype=torch.bfloat16)])
        assert torch.equal(model["model.embed_tokens.weight"], rows[160:]), names
        skipped = sum(count for rule, count in report.skipped_by.items() if rule.startswith("others of"))
        assert (skipped, report.sources) == (len(names) - 1, len(others) + len(names))
        results.append(all_raw(model))
    assert results[0] == results[1] == results[2] != results[3]


def test_wrong_tensor_of_a_preferred_spelling_decides_nothing(checkpoints: dict[str, Checkpoint]) -> None:
    family = "deepseek_v3_mtp"
    program = program_of(family, "vllm-mtp")
    own, other = "model.layers.3.embed_tokens.weight", "model.embed_tokens.weight"
    model = prefilled(program.plan(checkpoints[family]))
    session = Loader(program, model).update()
    assert refused(session, own, STREAMS[family][own][1:], model) == [("M503", own)]
    session.feed(other, STREAMS[family][other])
    assert torch.equal(model["model.embed_tokens.weight"][:300], STREAMS[family][other])


ONE_SPELLING = """
index: {layer: {count: 2, axis: pp}}
runtimes:
  own:
    mesh: vllm
    rules:
      - {target: 'm.{layer}', any_of: [{source: 'a.{layer}'}, {source: 'b.{layer}'}], dims: {n: 3}}
"""


@pytest.mark.parametrize("names", [["a.0", "b.1"], ["b.1", "a.0"]])
def test_spelling_counts_for_all_layers_on_every_rank(names: list[str], compiled: Compiled, tmp_path: Path) -> None:
    checkpoint = write(tmp_path / "two", {name: torch.arange(3.0) for name in names}, {})
    for rank in range(2):
        program = compiled(ONE_SPELLING, "pp=2", rank)
        with pytest.raises(MapperError) as caught:
            program.plan(checkpoint)
        assert told(caught.value.diagnostics) == [("M501", "a.1"), ("M502", "b.1")]
        codes: list[tuple[str, str]] = []
        session = Loader(program, {f"m.{rank}": torch.empty(3)}).update()
        try:
            session.feed_all((name, torch.arange(3.0)) for name in names)
            session.finish()
        except MapperError as error:
            codes = told(error.diagnostics)
        # Rank 1 lacks a.1; b.1 is unknown once a.0 has decided the spelling, wherever a.0 lives.
        own = [("M501", "a.1"), ("M502", "b.1")] if rank == 1 else []
        assert codes == (own if names[0] == "b.1" else [("M502", "b.1")])


def test_block_left_without_finish_is_judged(compiled: Compiled) -> None:
    with pytest.raises(MapperError) as caught, Loader(compiled(), model_of()).update() as session:
        session.feed("w", STREAM["w"])
    assert told(caught.value.diagnostics) == [("M501", "a"), ("M501", "b"), ("M501", "free")]
    with Loader(compiled(), model_of()).update() as session:
        session.feed_all(STREAM.items())
    assert session.finish().loaded == 4
    assert session.finish() is session.finish()


def test_error_inside_the_block_comes_out_and_closes_the_session(compiled: Compiled) -> None:
    model = model_of()

    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        yield "w", STREAM["w"]
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"), Loader(compiled(), model).update() as session:
        session.feed_all(failing())
    assert torch.equal(model["w"], STREAM["w"][3:])
    assert set(model["free"].tolist()) == {7.0}
    with pytest.raises(MapperError, match="M612 the session is closed"):
        session.feed("free", STREAM["free"])
    with pytest.raises(MapperError, match="M612 the session is closed"):
        session.finish()


def test_feed_after_finish_is_our_mistake(compiled: Compiled) -> None:
    session = Loader(compiled(), model_of()).update()
    session.feed_all(STREAM.items())
    session.finish()
    with pytest.raises(MapperError, match="M612 the session is closed"):
        session.feed("w", STREAM["w"])


def test_sources_of_any_stride_and_parameters_that_need_a_gradient_are_taken(compiled: Compiled) -> None:
    model = nn.ParameterDict(model_of())
    strided = {name: each.repeat_interleave(2, -1)[..., ::2].requires_grad_() for name, each in STREAM.items()}
    with Loader(compiled(), model).update() as session:
        session.feed_all(strided.items())
    assert torch.equal(model["w"], STREAM["w"][3:])
    assert all(each.requires_grad and each.grad_fn is None for each in model.values())


def test_feed_of_right_tensors_runs_no_matcher(
    compiled: Compiled, checkpoints: dict[str, Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    matcher = session_module.match

    def counted(*arguments: Any, **named: Any) -> Any:
        calls.append(1)
        return matcher(*arguments, **named)

    monkeypatch.setattr(session_module, "match", counted)
    program = program_of("deepseek_v3_mtp", layout="tp=2")
    session = Loader(program, prefilled(program.plan(checkpoints["deepseek_v3_mtp"]))).update()
    session.feed_all(STREAMS["deepseek_v3_mtp"].items())
    assert calls == []
    session.finish()
    assert calls == [1]
