"""Updates of a part of a model: scopes, threads, duplicates, deltas, pairs, staging, and what an aborted one leaves behind."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mapper
from mapper.checkpoint import Checkpoint, TensorHeader
from mapper.diagnostics import MapperError
from mapper.integrations.transformers import build
from mapper.load import Loader, LoadReport, digest_tensors
from mapper.report.load import Finalized
from mapper.testing.guarantees import NotBuilt, empty_model, require_equal
from mapper.testing.guarantees import program_of as program_of_example
from mapper.testing.reference import reference_load
from mapper.testing.strategies import examples, specs, streams
from mapper.testing.strategies.spec import RUNTIME
from mapper.testing.strategies.values import unique_values
from tests.loads import Tensors, all_raw, told, write
from tests.oracle.families import family_tensors, tensors_of, write_family
from tests.oracle.goldens import iter_ranks, sentinel_tensors, sha256
from tests.oracle.transformers_models import MODELS, make_model
from tests.small import program_of, rules
from tests.test_vllm_goldens import program_of as golden_program

# --- any order, split, threads and duplicates; random specs, configs and layouts -----------------------------------------


def other_values(tensors: Tensors) -> Tensors:
    return {name: unique_values(each.shape, each.dtype, 7 + number) for number, (name, each) in enumerate(tensors.items())}


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_updates_in_any_order_by_any_threads_leave_the_values_of_the_last(data: st.DataObject) -> None:
    drawn = data.draw(specs())
    example = data.draw(examples(drawn.spec, RUNTIME, config=drawn.config, max_ranks=6))
    rank = example.ranks[-1]
    try:
        program = program_of_example(example).at_rank(rank)
    except NotBuilt:
        return
    others = other_values(dict(example.tensors))
    common: dict[str, Any] = {"config": example.config, "runtime": example.runtime, "layout": example.layout, "rank": rank}
    expected = example.reference(rank)
    after = reference_load(example.spec, tensors=others, options=example.options, **common)
    model = empty_model(expected)
    loader = Loader(program, model)
    addresses = {name: each.data_ptr() for name, each in model.items()}
    is_staged, num_threads = data.draw(st.booleans()), data.draw(st.sampled_from((1, 2, 5)))
    first = data.draw(streams(example.tensors))
    with loader.update(staged=is_staged) as session:
        for bucket in first:
            session.feed_all(bucket)
    require_equal(model, expected, "the first update")
    session = loader.update(duplicates="overwrite", staged=is_staged, version=2)
    twice = data.draw(st.booleans()) and not loader.groups()  # a pair that was written waits for both halves again
    for tensors in ([example.tensors] if twice else []) + [others]:
        for bucket in data.draw(streams(tensors)):
            with ThreadPoolExecutor(num_threads) as pool:
                list(pool.map(lambda each: session.feed(*each), bucket))
    report = session.finish()
    require_equal(model, after, "the second update")
    assert {name: model[name].data_ptr() for name in addresses} == addresses
    assert (session.waiting, session.held_bytes, report.version) == ((), 0, 2)
    assert report.loaded == len(after.loaded)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_dropped_tensor_is_named_with_the_region_that_lacks_it(data: st.DataObject) -> None:
    drawn = data.draw(specs())
    example = data.draw(examples(drawn.spec, RUNTIME, config=drawn.config, max_ranks=4))
    rank = example.ranks[-1]
    expected = example.reference(rank)
    try:
        program = program_of_example(example).at_rank(rank)
    except NotBuilt:
        return
    loader = Loader(program, empty_model(expected))
    needed = sorted(name for name in expected.loaded if not is_optional(program, name))
    if not needed:
        return
    dropped = data.draw(st.sampled_from(needed))
    session = loader.update()
    session.feed_all((name, each) for name, each in example.tensors.items() if name != dropped)
    with pytest.raises(MapperError) as caught:
        session.finish()
    assert ("M501", dropped) in told(caught.value.diagnostics)
    assert {each.code for each in caught.value.diagnostics} == {"M501"}
    (found,) = [each for each in caught.value.diagnostics if each.subject == dropped]
    assert " lacks it in [" in found.hint
    session.abort()
    assert session.waiting == ()


def is_optional(program: mapper.Program, name: str) -> bool:
    return any(claim.family.optional or len(claim.family.alternatives) > 1 for claim in program.resolve(name).claims)


# --- the fused projection of DeepSeek, as SGLang's loader meets it --------------------------------------------------------

FUSED = """
index: {layer: {count: 2, axis: pp}}
runtimes:
  own:
    mesh: vllm
    rules:
      - target: layers.{layer}.fused_qkv_a_proj_with_mqa.weight
        sources: ["layers.{layer}.q_a_proj.weight", "layers.{layer}.kv_a_proj_with_mqa.weight"]
        dims: {out: [4, 3], in: 5}
      - {target: "layers.{layer}.norm.weight", dims: {n: 5}}
    finalize:
      - id: total
        inputs: ["layers.{layer}.fused_qkv_a_proj_with_mqa.weight"]
        output: layers.{layer}.total
        do: [{sum: out in -> in}]
"""
Q, KV, NORM = "layers.0.q_a_proj.weight", "layers.0.kv_a_proj_with_mqa.weight", "layers.0.norm.weight"
TARGET = "layers.0.fused_qkv_a_proj_with_mqa.weight"


def fused_sources(seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for layer in range(2):
        for name, shape in ((Q, (4, 5)), (KV, (3, 5)), (NORM, (5,))):
            found[name.replace("0", str(layer), 1)] = torch.randn(shape, generator=generator)
    return found


def fused_model() -> Tensors:
    return {
        f"layers.{layer}.{name}": torch.full(shape, 7.0)
        for layer in range(2)
        for name, shape in (("fused_qkv_a_proj_with_mqa.weight", (7, 5)), ("norm.weight", (5,)))
    }


@pytest.fixture
def fused() -> tuple[Loader, Tensors]:
    model = fused_model()
    loader = Loader(program_of(FUSED), model)
    with loader.update() as session:
        session.feed_all(fused_sources(0).items())
    return loader, model


def both(sources: Tensors, layer: int = 0) -> torch.Tensor:
    return torch.cat([sources[name.replace("0", str(layer), 1)] for name in (Q, KV)])


def test_halves_of_a_fused_parameter_may_come_in_two_calls(fused: tuple[Loader, Tensors]) -> None:
    loader, model = fused
    new = fused_sources(1)
    session = loader.update(scope=["layers.0.fused_qkv_a_proj_with_mqa"])
    session.feed_all([(Q, new[Q])])
    assert session.waiting == ()
    session.feed_all([(KV, new[KV])])
    report = session.finish()
    assert torch.equal(model[TARGET], both(new))
    assert torch.equal(model["layers.0.total"], both(new).sum(0))
    assert torch.equal(model[TARGET.replace("0", "1")], both(fused_sources(0), 1))
    assert report.finalized == (Finalized("total", "layers.0.total"),)
    assert (report.scope, report.targets, report.loaded) == ("layers.0.fused_qkv_a_proj_with_mqa", 1, 2)


def test_one_half_alone_is_an_update_where_it_is_declared_and_an_error_where_it_is_not(fused: tuple[Loader, Tensors]) -> None:
    loader, model = fused
    old, new = fused_sources(0), fused_sources(1)
    with loader.update(scope={Q}) as session:
        session.feed(Q, new[Q])
    assert torch.equal(model[TARGET], torch.cat([new[Q], old[KV]]))
    assert torch.equal(model["layers.0.total"], model[TARGET].sum(0))

    session = loader.update(scope=["layers.0"])
    session.feed(Q, old[Q])
    session.feed(NORM, old[NORM])
    with pytest.raises(MapperError) as caught:
        session.finish()
    (found,) = caught.value.diagnostics
    assert told([found]) == [("M501", KV)]
    assert found.hint == f"{TARGET!r} lacks it in [4:7, 0:5]"
    session.feed(KV, old[KV])
    session.finish()
    assert torch.equal(model[TARGET], both(old))


def test_aborted_update_is_remembered_until_its_targets_are_written_again(fused: tuple[Loader, Tensors]) -> None:
    loader, model = fused
    old, new = fused_sources(0), fused_sources(1)
    with pytest.raises(KeyError), loader.update(version=1) as session:
        session.feed_all(breaking_off((Q, new[Q])))
    assert torch.equal(model[TARGET], torch.cat([new[Q], old[KV]]))
    before = all_raw(model)
    for attempt in (loader.finalize, lambda: loader.update(scope=["layers.1"]), lambda: loader.update(scope={Q})):
        with pytest.raises(MapperError) as caught:
            attempt()
        assert told(caught.value.diagnostics) == [("M614", TARGET)]
        assert "M614 'layers.0.fused_qkv_a_proj_with_mqa.weight' was left incomplete by another update" in str(caught.value)
    assert all_raw(model) == before
    report = one_update(loader, "layers.0", new)
    assert torch.equal(model[TARGET], both(new))
    assert report.finalized == (Finalized("total", "layers.0.total"),)
    assert loader.finalize().finalized == ()


def breaking_off(*sent: tuple[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what was sent before the sender failed."""
    yield from sent
    raise KeyError("the sender")


def one_update(loader: Loader, module: str, sources: Tensors) -> LoadReport:
    """Update a whole module."""
    with loader.update(scope=[module]) as session:
        session.feed_all((name, tensor) for name, tensor in sources.items() if name.startswith(f"{module}."))
        return session.finish()


def test_session_that_was_forgotten_counts_as_one_that_did_not_end_well(fused: tuple[Loader, Tensors]) -> None:
    loader, _ = fused
    loader.update().feed(NORM, torch.ones(5))
    with pytest.raises(MapperError) as caught:
        loader.finalize()
    assert told(caught.value.diagnostics) == [("M614", NORM)]
    loader.finalize(changed=[NORM])  # the caller vouches for it
    assert loader.finalize().finalized == ()


def test_load_that_fails_on_the_way_leaves_its_targets_incomplete(fused: tuple[Loader, Tensors], tmp_path: Path) -> None:
    loader, _ = fused
    checkpoint = write(tmp_path / "new", fused_sources(1), {})

    def failing(done: int, total: int) -> None:
        raise KeyError(f"{done} of {total}")

    with pytest.raises(KeyError):
        loader.load(checkpoint, progress=failing)
    with pytest.raises(MapperError, match="M614"):
        loader.finalize()
    assert len(loader.load(checkpoint).finalized) == 2
    loader.finalize()


def test_steps_whose_other_input_is_nowhere_are_refused_before_the_first_write() -> None:
    text = rules("{copy: [a, b]}", "{target: c, dims: {n: 3}}")
    steps = "    finalize: [{id: s, inputs: [a, c], output: d, do: [{call: 'torch:add'}]}]\n"
    model = {name: torch.zeros(3) for name in "abc"}
    loader = Loader(program_of(text + steps), model)
    with pytest.raises(MapperError) as caught:
        loader.update(scope=["a"])
    assert told(caught.value.diagnostics) == [("M633", "c")]
    with loader.update(scope={"a", "c"}) as session:
        session.feed_all([("a", torch.ones(3)), ("c", torch.ones(3))])
    assert model["d"].tolist() == [2.0] * 3
    with loader.update(scope=["a"]) as session:
        session.feed("a", torch.full((3,), 5.0))
    assert model["d"].tolist() == [6.0] * 3


# --- scopes --------------------------------------------------------------------------------------------------------------

BAD_SCOPES: dict[str, tuple[Any, list[tuple[str, str]], str]] = {
    "text": ("layers.0", [("M616", "layers.0")], "'layers.0' is no scope: it is one text"),
    "nothing": ([], [("M616", "")], "'[]' is no scope: it is empty"),
    "no target": (["layers.2"], [("M616", "layers.2")], "'layers.2' is no scope: it names no target"),
    "pattern": (["layers.{"], [("M131", "layers.{")], "in the pattern 'layers.{'"),
    "index": (["layers.{nothing}"], [("M303", "")], "'nothing' is not known here"),
    "unknown source": ({"x"}, [("M502", "x")], "no rule names 'x'"),
    "wrong header": ({Q: TensorHeader("F32", (5, 4), -1, 0, 0)}, [("M503", Q)], "has the shape [5, 4]"),
    "wrong dtype": ({NORM: TensorHeader("BF16", (5,), -1, 0, 0)}, [("M533", NORM)], "bfloat16"),
}


@pytest.mark.parametrize("case", BAD_SCOPES)
def test_scope_that_cannot_be_finished_is_refused_when_it_is_declared(case: str, fused: tuple[Loader, Tensors]) -> None:
    scope, findings, text = BAD_SCOPES[case]
    with pytest.raises(MapperError) as caught:
        fused[0].update(scope=scope)
    assert told(caught.value.diagnostics) == findings
    assert text in str(caught.value) or case in ("unknown source", "wrong header", "wrong dtype")


@pytest.mark.parametrize("scope", [["layers.0"], ["layers.0.**"], ["*.0.norm.weight", TARGET], {Q, KV, NORM}])
def test_source_outside_of_the_scope_is_refused(scope: Any, fused: tuple[Loader, Tensors]) -> None:
    loader, model = fused
    new = fused_sources(1)
    before = all_raw(model)
    session = loader.update(scope=scope)
    with pytest.raises(MapperError) as caught:
        session.feed("layers.1.norm.weight", new["layers.1.norm.weight"])
    (found,) = caught.value.diagnostics
    text = "3 tensors" if isinstance(scope, set) else ", ".join(scope)
    assert found.message == f"'layers.1.norm.weight' is outside of the scope of the update: {text}"
    assert all_raw(model) == before
    session.feed_all((name, new[name]) for name in (Q, KV, NORM))
    assert session.finish().sources == 3
    assert torch.equal(model[TARGET], both(new))


def test_manifest_may_be_a_checkpoint_or_headers(fused: tuple[Loader, Tensors], tmp_path: Path) -> None:
    loader, model = fused
    new = fused_sources(1)
    part = {name: new[name] for name in (Q, NORM)}
    checkpoint = write(tmp_path / "part", part, {})
    for scope in (checkpoint, checkpoint.tensors, dict.fromkeys(part)):
        session = loader.update(scope=scope)
        session.feed(Q, new[Q])
        with pytest.raises(MapperError) as caught:
            session.finish()
        assert told(caught.value.diagnostics) == [("M501", NORM)]
        session.feed(NORM, new[NORM])
        assert session.finish().loaded == 2
    assert torch.equal(model[NORM], new[NORM])


def test_scope_holds_on_the_ranks_that_have_nothing_of_it() -> None:
    new = fused_sources(1)
    whole = program_of(FUSED, layout="pp=2")
    for rank in range(2):
        model = {name: each for name, each in fused_model().items() if name.startswith(f"layers.{rank}.")}
        loader = Loader(whole.at_rank(rank), model)
        loader.finalize()
        with loader.update(scope=["layers.0"]) as session:
            session.feed_all((name, new[name]) for name in (Q, KV, NORM))
            report = session.finish()
            assert (report.loaded, report.elsewhere) == ((3, 0) if rank == 0 else (0, 3))
        assert (rank == 0) == bool(report.finalized)


def test_two_readers_of_a_source_are_written_as_the_scope_says() -> None:
    text = rules("{target: first, source: a, dims: {n: 3}}", "{target: second, source: a, dims: {n: 3}, reuse: true}")
    model = {"first": torch.zeros(3), "second": torch.zeros(3)}
    loader = Loader(program_of(text), model)
    loader.finalize()
    for scope, written in (
        (["second"], {"second"}),
        (["first"], {"first"}),
        ({"a"}, {"first", "second"}),
        ("all", {"first", "second"}),
    ):
        for each in model.values():
            each.zero_()
        with loader.update(scope=scope) as session:
            session.feed("a", torch.ones(3))
        assert {name for name, each in model.items() if each.all()} == written


# --- duplicates, versions, deltas ----------------------------------------------------------------------------------------


def test_source_that_comes_twice_is_refused_or_written_again(fused: tuple[Loader, Tensors]) -> None:
    loader, model = fused
    session = loader.update(scope={NORM})
    session.feed(NORM, torch.ones(5))
    with pytest.raises(MapperError, match=r"M610 'layers.0.norm.weight' was fed twice in one session"):
        session.feed(NORM, torch.zeros(5))
    session.finish()
    with loader.update(scope={NORM}, duplicates="overwrite") as session:
        session.feed(NORM, torch.ones(5))
        session.feed(NORM, torch.full((5,), 3.0))
    assert model[NORM].tolist() == [3.0] * 5


def test_tensor_of_another_version_is_refused(fused: tuple[Loader, Tensors]) -> None:
    loader, model = fused
    before = all_raw(model)
    session = loader.update(scope={NORM}, version="step 8")
    with pytest.raises(MapperError) as caught:
        session.feed(NORM, torch.ones(5), version="step 7")
    assert "M617 'layers.0.norm.weight' is of the version 'step 7', and the update of 'step 8'" in str(caught.value)
    assert all_raw(model) == before
    session.feed(NORM, torch.ones(5), version="step 8")
    assert session.finish().version == "step 8"


def test_nan_is_a_value_unless_a_delta_says_that_it_means_unchanged(fused: tuple[Loader, Tensors]) -> None:
    loader, model = fused
    nan = float("nan")
    delta = torch.tensor([nan, 5.0, nan, 2.0, nan])
    before = model[NORM].clone()
    with loader.update(scope={NORM}) as session:
        session.feed(NORM, delta, nan_means_unchanged=True)
    assert torch.equal(model[NORM], torch.where(delta.isnan(), before, delta))
    with loader.update(scope={NORM}) as session:
        session.feed(NORM, torch.full((5,), 9.0), only_where=torch.tensor([True, False, False, False, True]))
    assert model[NORM].tolist() == [9.0, 5.0, before[2], 2.0, 9.0]
    with loader.update(scope={NORM}) as session:
        session.feed(NORM, delta)
    assert torch.equal(model[NORM].isnan(), delta.isnan())


@pytest.mark.parametrize("staged", [False, True])
def test_delta_goes_through_the_same_views_as_the_tensor(staged: bool) -> None:
    text = """
formats:
  turned: [{leaves: {weight: {dims: [out, in], stored: [in, out], cast: bfloat16}, scale: {dims: [out], stored: [out / 2]}}}]
index: {e: {count: 3}}
runtimes:
  own:
    mesh: vllm
    rules:
      - {target: 'w.{leaf}', source: 'w.{e}.{leaf}', stack: e, format: turned, dims: {out: 4, in: 3}, shard: {out: tp}}
"""
    program = program_of(text, layout="tp=2", rank=1)
    model: Tensors = {"w.weight": torch.zeros(3, 2, 3, dtype=torch.bfloat16), "w.scale": torch.zeros(3, 2)}
    loader = Loader(program, model)
    loader.finalize()
    full = torch.arange(12.0).view(3, 4) + 1
    mask = torch.arange(12).view(3, 4) % 3 == 0
    with loader.update(scope={"w.1.weight", "w.2.scale"}, staged=staged) as session:
        session.feed("w.1.weight", full, only_where=mask)
        session.feed("w.2.scale", torch.tensor([4.0, float("nan")]), nan_means_unchanged=True)
    expected = torch.zeros(3, 2, 3)
    expected[1] = torch.where(mask, full, torch.zeros(3, 4)).T[2:]
    assert torch.equal(model["w.weight"].float(), expected)
    assert not model["w.scale"].any()
    with loader.update(scope={"w.2.scale"}, staged=staged) as session:
        session.feed("w.2.scale", torch.tensor([float("nan"), 6.0]), nan_means_unchanged=True)
    assert model["w.scale"].tolist() == [[0, 0], [0, 0], [6, 6]]


def test_delta_of_what_is_not_complete_or_not_stored_is_refused() -> None:
    model = fused_model()
    loader = Loader(program_of(FUSED), model)
    session = loader.update(duplicates="overwrite")
    with pytest.raises(MapperError) as caught:
        session.feed(Q, torch.zeros(4, 5), nan_means_unchanged=True)
    assert f"M619 {Q!r} cannot be taken as a delta: {TARGET!r} is not complete" in str(caught.value)
    session.feed(Q, torch.ones(4, 5))
    session.feed(Q, torch.full((4, 5), float("nan")), nan_means_unchanged=True)
    assert model[TARGET][:4].tolist() == [[1.0] * 5] * 4
    for mask in (torch.zeros(5, 4, dtype=torch.bool), torch.zeros(4, 5)):
        with pytest.raises(MapperError, match=r"M619 .* the mask is torch"):
            session.feed(Q, torch.zeros(4, 5), only_where=mask)


# --- staged updates ------------------------------------------------------------------------------------------------------


def test_staged_update_writes_nothing_before_it_is_found_right(fused: tuple[Loader, Tensors]) -> None:
    loader, model = fused
    new = fused_sources(1)
    before = all_raw(model)
    session = loader.update(staged=True)
    session.feed_all((name, each) for name, each in new.items() if name != KV)
    assert session.staged_bytes == 2 * (7 * 5 + 5) * 4
    with pytest.raises(MapperError, match="M501"):
        session.finish()
    with pytest.raises(MapperError, match="M503"):
        session.feed(KV, new[KV].T)
    assert all_raw(model) == before
    session.feed(KV, new[KV])
    assert all_raw(model) == before
    report = session.finish()
    assert torch.equal(model[TARGET], both(new))
    assert torch.equal(model["layers.1.total"], both(new, 1).sum(0))
    assert report.staged_bytes == 2 * (7 * 5 + 5) * 4
    assert len(report.finalized) == 2


def test_staged_update_that_is_aborted_leaves_everything_as_it_was(fused: tuple[Loader, Tensors]) -> None:
    loader, model = fused
    before = all_raw(model)
    with pytest.raises(KeyError), loader.update(staged=True) as session:
        session.feed_all(breaking_off(*fused_sources(1).items()))
    assert all_raw(model) == before
    assert session._staging is not None
    assert session._staging._shadows == {}
    assert loader.finalize().finalized == ()


def test_staged_shadows_are_of_the_scope_and_keep_what_is_not_written(fused: tuple[Loader, Tensors]) -> None:
    loader, model = fused
    old, new = fused_sources(0), fused_sources(1)
    with loader.update(scope={Q}, staged=True) as session:
        session.feed(Q, new[Q])
        assert torch.equal(model[TARGET], both(old))
        assert session.finish().staged_bytes == 7 * 5 * 4
    assert torch.equal(model[TARGET], torch.cat([new[Q], old[KV]]))


def test_tensor_with_another_digest_than_its_sender_says_is_refused(fused: tuple[Loader, Tensors]) -> None:
    loader, model = fused
    new = fused_sources(1)
    expected = mapper.combine_digests([digest_tensors(new)])
    before = all_raw(model)
    session = loader.update(staged=True, digests=expected)
    wrong = new[Q].clone()
    wrong[3, 4] += 1
    with pytest.raises(
        MapperError, match=r"M623 'layers.0.q_a_proj.weight' has the digest [0-9a-f]{16}, expected [0-9a-f]{16}"
    ):
        session.feed(Q, wrong)
    assert all_raw(model) == before
    session.feed_all(new.items())
    session.finish()
    assert torch.equal(model[TARGET], both(new))


# --- steps that destroy their inputs --------------------------------------------------------------------------------------


def pack(weight: torch.Tensor) -> torch.Tensor:
    """Return the packed weight, and leave nothing of it behind."""
    packed = weight.flip(0)
    weight.fill_(-1)
    return packed


def unpack(packed: torch.Tensor, weight: torch.Tensor) -> None:
    weight.copy_(packed.flip(0))


@pytest.mark.parametrize("restore", ["", ", restore: 'tests.test_updates:unpack'"])
def test_what_a_step_consumed_is_loaded_again_only_where_it_can_be_restored(restore: str, tmp_path: Path) -> None:
    step = f"{{id: pack, inputs: [w], output: packed, consumes: true{restore}, do: [{{call: 'tests.test_updates:pack'}}]}}"
    program = program_of(rules("{target: w, dims: {n: 4}}", "{copy: [other]}") + f"    finalize:\n      - {step}\n")
    model = {"w": torch.zeros(4), "other": torch.zeros(2)}
    loader = Loader(program, model)
    first, second = ({"w": torch.arange(4.0) + start, "other": torch.ones(2) * start} for start in (1, 10))
    checkpoints = [write(tmp_path / str(number), each, {}) for number, each in enumerate((first, second))]
    assert loader.load(checkpoints[0]).finalized == (Finalized("pack", "packed"),)
    held = model["packed"].data_ptr()
    assert model["packed"].tolist() == [4, 3, 2, 1]
    before = all_raw(model)
    attempts: list[Callable[[], Any]] = [
        lambda: loader.load(checkpoints[1]),
        loader.update,
        lambda: loader.update(scope=["w"]),
        lambda: loader.update(scope={"w"}),
    ]
    if not restore:
        attempts.append(lambda: loader.update(staged=True))
    for attempt in attempts:
        with pytest.raises(MapperError) as caught:
            attempt()
        assert "M624 'w' was consumed by the step 'pack': nothing can be loaded into it" in str(caught.value)
        assert told(caught.value.diagnostics) == [("M624", "w")]
    assert all_raw(model) == before
    with loader.update(scope=["other"]) as session:
        session.feed("other", second["other"])
        assert session.finish().finalized == ()
    if restore:
        with loader.update(scope={"w"}, staged=True) as session:
            session.feed("w", torch.tensor([float("nan"), 8.0, float("nan"), float("nan")]))
            session.abort()
        assert model["packed"].tolist() == [4, 3, 2, 1]
        with loader.update(staged=True) as session:
            session.feed_all(second.items())
        assert model["packed"].tolist() == [13, 12, 11, 10]
        assert model["packed"].data_ptr() == held
        assert model["w"].tolist() == [-1] * 4


# --- the same model with other tensors -----------------------------------------------------------------------------------


def test_model_whose_tensors_were_replaced_is_filled_under_the_same_names(fused: tuple[Loader, Tensors]) -> None:
    loader, model = fused
    old = model[NORM]
    model[NORM] = torch.zeros(5)
    with loader.update(scope={NORM}) as session:
        session.feed(NORM, torch.ones(5))
    assert model[NORM].tolist() == [1.0] * 5
    assert torch.equal(old, fused_sources(0)[NORM])


# --- real models -----------------------------------------------------------------------------------------------------------


def test_transformers_model_updated_in_seven_buckets_has_the_logits_of_the_new_checkpoint(tmp_path: Path) -> None:
    made = make_model("deepseek_v3", tmp_path / "new")
    new = tensors_of(MODELS["deepseek_v3"])
    generator = torch.Generator().manual_seed(1)
    old = {name: (torch.rand(each.shape, generator=generator) / 8).to(each.dtype) for name, each in new.items()}
    checkpoint = Checkpoint.open(made.folder)
    assert checkpoint.config is not None
    program = mapper.compile(mapper.load_spec("deepseek_v2"), config=checkpoint.config, runtime="transformers")
    model = build(made.folder)
    loader = Loader(program, model)
    with loader.update(version=1) as session:
        session.feed_all(old.items())
    prompt = torch.arange(24).view(1, 24)
    with torch.no_grad():
        expected = made.reference(prompt).logits
        assert not torch.equal(model(prompt).logits, expected)
    names = sorted(new)
    random.Random(7).shuffle(names)
    cuts = sorted(random.Random(8).sample(range(1, len(names)), 6))
    with loader.update(version=2) as session:
        for start, stop in zip([0, *cuts], [*cuts, len(names)], strict=True):
            session.feed_all((name, new[name]) for name in names[start:stop])
    with torch.no_grad():
        assert torch.equal(model(prompt).logits, expected)


@pytest.mark.parametrize("family", ["deepseek_v4_bf16", "deepseek_v4_fp4"])
def test_steps_are_the_same_on_all_four_paths(family: str, tmp_path: Path) -> None:
    """First load, dummy load, reload and an update of the input alone, on the first rank that derives anything."""
    checkpoint = Checkpoint.open(write_family(family, tmp_path / family))
    rank = next(each for each in iter_ranks(family) if each.extra and each.tp == 2)
    program = golden_program(rank).at_rank(rank.rank)
    sources = family_tensors(family)
    traces = []
    for path in ("load", "dummy", "update"):
        tensors = sentinel_tensors(rank)
        tensors |= {alias: tensors[name] for alias, name in rank.aliases}
        loader = Loader(program, tensors)
        if path == "load":
            traces += [loader.load(checkpoint).finalized, loader.load(checkpoint).finalized]
        elif path == "dummy":
            traces.append(loader.finalize().finalized)
        else:
            loader.finalize()
            with loader.update(scope=["model.layers.0.hc_attn_fn"]) as session:
                session.feed("layers.0.hc_attn_fn", sources["layers.0.hc_attn_fn"])
                traces.append(session.finish().finalized)
        if path != "dummy":
            assert {each.name: sha256(tensors[each.name]) for each in rank.extra} == {e.name: e.sha256 for e in rank.extra}
    assert len(set(traces)) == 1
    assert traces[0] == (Finalized("mhc_broadcast", "model.layers.0.hc_attn_fn_broadcast"),)
