"""Checksums of source tensors, added up from the parameters of all ranks: the same for every layout and for a whole tensor."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mapper
from mapper.checkpoint import Checkpoint
from mapper.compiler import compile
from mapper.diagnostics import MapperError
from mapper.layout import Layout
from mapper.load import Loader, allocate, digest_tensors
from mapper.plan.digest import Digest
from mapper.spec import load_spec
from mapper.testing.guarantees import NotBuilt, changes_values, checkpoint_of, empty_model
from mapper.testing.guarantees import program_of as program_of_example
from mapper.testing.strategies import examples, specs
from mapper.testing.strategies.spec import RUNTIME
from mapper.transfer.digest import digest_part, digest_tensor
from tests.loads import Tensors, told, write
from tests.oracle.families import FAMILIES, family_tensors, write_family
from tests.small import program_of, rules

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8, torch.bool]


def counted(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def whole_digest(tensors: Tensors) -> dict[str, int]:
    return mapper.combine_digests([digest_tensors(tensors)])


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_of_a_tensor_add_up_to_the_whole(dtype: torch.dtype) -> None:
    tensor, places = counted((7, 5, 3), dtype), torch.empty(7, 5, 3, device="meta")
    whole = digest_tensor(tensor)
    for dim, at in ((0, 4), (1, 1), (2, 2)):
        first, second = (
            digest_part(tensor.narrow(dim, start, size), places.narrow(dim, start, size))
            for start, size in ((0, at), (at, tensor.shape[dim] - at))
        )
        assert (first + second) % 2**64 == whole
        assert first not in (0, whole)
    turned = digest_part(tensor.permute(2, 0, 1).contiguous(), places.permute(2, 0, 1))
    assert turned == whole
    assert digest_tensor(tensor.T.contiguous().T if tensor.dim() == 2 else tensor.clone()) == whole


def test_one_element_or_one_swap_changes_the_checksum() -> None:
    tensor = torch.arange(24.0).view(4, 6)
    found = {digest_tensor(tensor), digest_tensor(tensor.T.contiguous()), digest_tensor(tensor.view(6, 4))}
    assert len(found) == 2  # the shape alone changes nothing: it is compared before
    for row in range(4):
        for column in range(6):
            other = tensor.clone()
            other[row, column] += 0.5
            found.add(digest_tensor(other))
            other = tensor.clone()
            other[row, column], other[3 - row, column] = tensor[3 - row, column], tensor[row, column]
            found.add(digest_tensor(other))
    assert len(found) == 2 + 24 + 12
    assert digest_tensor(torch.zeros(3)) != digest_tensor(torch.zeros(4))
    assert digest_tensor(torch.tensor(1.5)) != digest_tensor(torch.tensor(2.5))
    assert digest_tensor(torch.zeros(0)) == 0


def test_large_tensors_are_added_up_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = counted((40, 11), torch.float32)
    expected = digest_tensor(tensor)
    for chunk in (1, 12, 100):
        monkeypatch.setattr("mapper.transfer.digest.CHUNK", chunk)
        assert digest_tensor(tensor) == expected


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_digests_of_all_ranks_are_those_of_the_checkpoint(data: st.DataObject) -> None:
    drawn = data.draw(specs())
    example = data.draw(examples(drawn.spec, RUNTIME, config=drawn.config, max_ranks=6))
    try:
        program = program_of_example(example)
    except NotBuilt:
        return
    digests = []
    with checkpoint_of(example) as checkpoint:
        lossy = set()
        for rank in range(example.layout.num_ranks):
            loader = Loader(program.at_rank(rank), empty_model(example.reference(rank)))
            report = loader.load(checkpoint, digest=True)
            assert report.digest is not None
            assert report.digest == loader.digest() == loader.digest(checkpoint)
            digests.append(pickle.loads(pickle.dumps(report.digest)))
            lossy |= {
                step.source for step in program.at_rank(rank).plan(checkpoint).steps() if step.scale or changes_values(step)
            }
        found = mapper.combine_digests(digests)
        read = {name for each in digests for name in (*each.parts, *each.unknown)}
    assert found == {name: digest for name, digest in whole_digest(dict(example.tensors)).items() if name in found}
    assert read - found.keys() <= lossy


@pytest.mark.parametrize("family", ["deepseek_v3_mtp", "deepseek_v4_fp4", "gpt_oss_mxfp4"])
def test_layouts_agree_with_the_trainers_tensors(family: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_family(family, tmp_path / family))
    config = FAMILIES[family].config
    spec = load_spec(str(config["architectures"][0]))
    trainer = whole_digest({name: each.clone() for name, each in family_tensors(family).items()})
    found = []
    for layout in ("tp=1", "tp=2", "tp=4,ep=4", "tp=2,pp=2,dp=2,ep=4"):
        program = compile(spec, config=config, runtime="vllm", layout=Layout.parse(layout))
        digests = []
        for rank in range(program.layout.num_ranks):
            plan = program.at_rank(rank).plan(checkpoint)
            digests.append(Loader(program.at_rank(rank), allocate(plan)).load(checkpoint, digest=True).digest)
        assert None not in digests
        found.append(mapper.combine_digests([each for each in digests if each is not None]))
        assert found[-1] == {name: digest for name, digest in trainer.items() if name in found[-1]}
    common = set.intersection(*(set(each) for each in found))
    assert len(common) > 0.8 * len(found[0])


SPEC = rules("{target: w, dims: {out: 6, in: 4}, shard: {out: tp}}", "{copy: [norm]}")
SOURCES = {"w": torch.arange(24.0).view(6, 4) + 1, "norm": torch.arange(3.0) + 50}


def ranks(tmp_path: Path) -> list[tuple[Loader, Tensors]]:
    checkpoint = write(tmp_path / "own", SOURCES, {})
    loaders = []
    for rank in range(2):
        model = {"w": torch.zeros(3, 4), "norm": torch.zeros(3)}
        loader = Loader(program_of(SPEC, layout="tp=2", rank=rank), model)
        loader.load(checkpoint)
        loaders.append((loader, model))
    return loaders


def test_replicas_that_differ_and_ranks_that_are_missing_are_named(tmp_path: Path) -> None:
    (first, model), (second, _) = ranks(tmp_path)
    assert mapper.combine_digests([first.digest(), second.digest()]) == whole_digest(SOURCES)
    with pytest.raises(MapperError) as caught:
        mapper.combine_digests([first.digest()])
    assert "M713 'w'[3:6, 0:4] is on none of the ranks whose digests are combined" in str(caught.value)
    model["norm"][1] = 0
    with pytest.raises(MapperError) as caught:
        mapper.combine_digests([first.digest(), second.digest()])
    assert "M712 two copies of 'norm'[0:3] differ" in str(caught.value)
    assert told(caught.value.diagnostics) == [("M712", "norm")]


def test_a_changed_parameter_is_seen(tmp_path: Path) -> None:
    (first, model), (second, _) = ranks(tmp_path)
    model["w"][2, 3] += 1
    found, expected = mapper.combine_digests([first.digest(), second.digest()]), whole_digest(SOURCES)
    assert {name for name in found if found[name] != expected[name]} == {"w"}


def test_digest_follows_an_update_of_the_whole_model(tmp_path: Path) -> None:
    loader, _ = ranks(tmp_path)[0]
    new = {name: each * 2 for name, each in SOURCES.items()}
    with loader.update() as session:
        session.feed_all(new.items())
    assert loader.digest().parts["norm"] == digest_tensors(new).parts["norm"]
    fresh = Loader(program_of(SPEC), {"w": torch.zeros(6, 4), "norm": torch.zeros(3)})
    with pytest.raises(MapperError, match="M714 there is nothing yet to digest"):
        fresh.digest()
    with fresh.update() as session:
        session.feed_all(new.items())
    assert mapper.combine_digests([fresh.digest()]) == whole_digest(new)


def test_copies_on_one_rank_that_differ_are_found() -> None:
    text = rules("{target: a, source: x, dims: {n: 3}}", "{target: b, source: x, dims: {n: 3}, reuse: true}")
    model = {"a": torch.zeros(3), "b": torch.zeros(3)}
    loader = Loader(program_of(text), model)
    with loader.update() as session:
        session.feed("x", torch.ones(3))
    assert mapper.combine_digests([loader.digest()]) == whole_digest({"x": torch.ones(3)})
    model["b"][0] = 5
    with pytest.raises(MapperError, match=r"M712 two copies of 'x'\[0:3\] differ"):
        loader.digest()


def test_source_that_lost_digits_is_unknown_with_the_reason() -> None:
    loader = Loader(program_of(rules("{target: a, dims: {n: 3}, cast: bfloat16}", "{copy: [b]}")), models := {
        "a": torch.zeros(3, dtype=torch.bfloat16), "b": torch.zeros(3),
    })  # fmt: skip
    with loader.update() as session:
        session.feed_all([("a", torch.tensor([1.001, 2.0, 3.0])), ("b", torch.ones(3))])
    found = loader.digest()
    assert list(found.unknown) == ["a"]
    assert "lost digits" in found.unknown["a"]
    assert set(mapper.combine_digests([found])) == {"b"}
    assert models["a"].dtype == torch.bfloat16


def test_two_cuts_of_one_tensor_count_it_once() -> None:
    shapes = {"x": (4, 2)}
    halves = Digest(shapes, {"x": {((0, 2), (0, 2)): 5, ((2, 4), (0, 2)): 7}})
    columns = Digest(shapes, {"x": {((0, 4), (0, 1)): 1, ((0, 2), (0, 2)): 5}})
    assert mapper.combine_digests([halves, columns]) == {"x": 12}


def test_report_has_the_digest_where_it_was_asked_for(tmp_path: Path) -> None:
    checkpoint = write(tmp_path / "own", SOURCES, {})
    loader = Loader(program_of(SPEC), {"w": torch.zeros(6, 4), "norm": torch.zeros(3)})
    assert loader.load(checkpoint).to_json()["digest"] is None
    told_ = json.loads(json.dumps(loader.load(checkpoint, digest=True).to_json()))["digest"]
    assert told_["shapes"] == {"w": [6, 4], "norm": [3]}
    assert told_["parts"]["norm"] == {"[0:3]": f"{digest_tensor(SOURCES['norm']):016x}"}
