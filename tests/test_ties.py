"""Tied parameters: one storage under two names, or two that hold the same; a stored copy of the twin is skipped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from mapper.checkpoint import Checkpoint
from mapper.compiler import Program, compile
from mapper.diagnostics import MapperError
from mapper.layout import Layout
from mapper.load import Loader, LoadReport
from mapper.report import check
from mapper.spec import load_spec
from tests.loads import Tensors, all_raw, fill, prefilled, spec_of, told, write

SPEC = Path(__file__).parents[1] / "specs" / "llama.yaml"
VOCAB, HIDDEN = 67, 12
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 10,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
HEAD, EMBED, NORM = "lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"


def sources(*, has_head: bool) -> Tensors:
    shapes = {EMBED: (VOCAB, HIDDEN), NORM: (HIDDEN,)} | ({HEAD: (VOCAB, HIDDEN)} if has_head else {})
    for layer in range(3):
        prefix = f"model.layers.{layer}"
        shapes |= {f"{prefix}.{norm}.weight": (HIDDEN,) for norm in ("input_layernorm", "post_attention_layernorm")}
        rows = {"q": 12, "k": 6, "v": 6, "o": 12}
        shapes |= {f"{prefix}.self_attn.{part}_proj.weight": (size, HIDDEN) for part, size in rows.items()}
        shapes |= {f"{prefix}.mlp.{part}_proj.weight": (10, HIDDEN) for part in ("gate", "up")}
        shapes |= {f"{prefix}.mlp.down_proj.weight": (HIDDEN, 10)}
    return {
        name: (torch.arange(torch.Size(shape).numel(), dtype=torch.float32) + 1000 * number + 1).reshape(shape)
        for number, (name, shape) in enumerate(shapes.items())
    }


def program_of(*, is_tied: bool, layout: str = "", runtime: str = "vllm") -> Program:
    config = {**CONFIG, "tie_word_embeddings": is_tied}
    return compile(load_spec(SPEC), config=config, runtime=runtime, layout=Layout.parse(layout))


@pytest.fixture(scope="module")
def with_head(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return write(tmp_path_factory.mktemp("head"), sources(has_head=True), CONFIG)


@pytest.fixture(scope="module")
def without_head(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return write(tmp_path_factory.mktemp("no-head"), sources(has_head=False), CONFIG)


def separate(tensors: Tensors) -> Tensors:
    """Return the same parameters, each with storage of its own."""
    own = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    fill(own)
    return own


def load(program: Program, tensors: Tensors, checkpoint: Checkpoint, *, is_stream: bool) -> LoadReport:
    if not is_stream:
        return Loader(program, tensors).load(checkpoint)
    stream = sources(has_head=HEAD in checkpoint.tensors)
    with Loader(program, tensors).update() as session:
        session.feed_all(reversed(stream.items()))
        return session.finish()


def rows_of(tensor: torch.Tensor, tp: int, rank: int) -> torch.Tensor:
    """Return the rows of one rank, written down by hand: 67 rows padded to 128, then cut."""
    return torch.cat([tensor, torch.zeros(128 - VOCAB, HIDDEN)]).chunk(tp)[rank]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("layout", ["tp=1,pp=1", "tp=1,pp=2", "tp=2,pp=1", "tp=2,pp=2"])
@pytest.mark.parametrize("storage", ["shared", "separate"])
def test_tied_head_holds_the_embedding_on_every_rank_that_has_it(
    storage: str, layout: str, is_stream: bool, without_head: Checkpoint
) -> None:
    whole = program_of(is_tied=True, layout=layout)
    tp, pp = whole.layout.tp, whole.layout.pp
    for rank in range(whole.layout.num_ranks):
        program = whole.at_rank(rank)
        plan = program.plan(without_head)
        tensors = prefilled(plan)
        if storage == "separate":
            tensors = separate(tensors)
        report = load(program, tensors, without_head, is_stream=is_stream)
        is_first, is_last = rank < tp, rank >= tp * (pp - 1)
        embedding = rows_of(sources(has_head=False)[EMBED], tp, rank % tp)
        assert (EMBED in tensors, HEAD in tensors) == (is_first or is_last, is_last)
        if EMBED in tensors:
            assert torch.equal(tensors[EMBED], embedding)
        if HEAD in tensors:
            assert torch.equal(tensors[HEAD], embedding)
            assert (tensors[HEAD].data_ptr() == tensors[EMBED].data_ptr()) is (storage == "shared")
        assert report.tied == is_last
        assert report.targets == len(tensors)
        copied = tensors[HEAD].nbytes if is_last and storage == "separate" else 0
        assert report.bytes_written == report.bytes_read + copied


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("layout", ["tp=1,pp=1", "tp=1,pp=2"])
def test_head_of_its_own_is_loaded_where_nothing_is_tied(layout: str, is_stream: bool, with_head: Checkpoint) -> None:
    whole = program_of(is_tied=False, layout=layout)
    last = whole.layout.num_ranks - 1
    for rank in range(whole.layout.num_ranks):
        program = whole.at_rank(rank)
        tensors = prefilled(program.plan(with_head))
        report = load(program, tensors, with_head, is_stream=is_stream)
        assert (EMBED in tensors, HEAD in tensors) == (rank == 0, rank == last)
        for name in tensors.keys() & {EMBED, HEAD}:
            assert torch.equal(tensors[name], rows_of(sources(has_head=True)[name], 1, 0)), name
        assert (report.tied, report.skipped) == (0, 0)


@pytest.mark.parametrize("is_stream", [False, True])
def test_stored_copy_of_a_tied_head_is_skipped_by_name(
    is_stream: bool, with_head: Checkpoint, without_head: Checkpoint
) -> None:
    program = program_of(is_tied=True, layout="tp=1,pp=2").at_rank(1)
    with_copy, plain = (prefilled(program.plan(each)) for each in (with_head, without_head))
    report = load(program, with_copy, with_head, is_stream=is_stream)
    load(program, plain, without_head, is_stream=is_stream)
    assert report.skipped_by == {"**.rotary_emb.inv_freq": 0, "lm_head.weight": 1}
    assert torch.equal(with_copy[HEAD], with_copy[EMBED])
    assert with_copy[EMBED].sum() == sources(has_head=True)[EMBED].sum()
    assert {name: each for name, each in all_raw(with_copy).items() if name in (HEAD, NORM)} == {
        name: each for name, each in all_raw(plain).items() if name in (HEAD, NORM)
    }


def test_config_that_denies_the_tie_needs_a_head_of_its_own(with_head: Checkpoint, without_head: Checkpoint) -> None:
    program = program_of(is_tied=False)
    tensors = prefilled(program.plan(with_head))
    before = all_raw(tensors)
    with pytest.raises(MapperError) as caught:
        Loader(program, tensors).load(without_head)
    assert told(caught.value.diagnostics) == [("M501", HEAD)]
    assert all_raw(tensors) == before
    # A model that shares the storage is not what this config says: both rules would write it.
    tensors[HEAD] = tensors[EMBED]
    with pytest.raises(MapperError) as caught:
        Loader(program, tensors).load(with_head)
    assert {each.code for each in caught.value.diagnostics} == {"M601"}
    assert {each.subject for each in caught.value.diagnostics} <= {HEAD, EMBED}


def test_tied_head_need_not_be_a_parameter(without_head: Checkpoint) -> None:
    program = program_of(is_tied=True)
    tensors = prefilled(program.plan(without_head))
    del tensors[HEAD]
    Loader(program, tensors).load(without_head)
    assert torch.equal(tensors[EMBED], rows_of(sources(has_head=False)[EMBED], 1, 0))


def test_reload_keeps_an_alias_one(without_head: Checkpoint, with_head: Checkpoint) -> None:
    program = program_of(is_tied=True)
    plan = program.plan(without_head)
    model = nn.Module()
    for name, tensor in prefilled(plan).items():
        model.register_parameter(name.replace(".", "_"), nn.Parameter(tensor))
    named = {name: model.get_parameter(name.replace(".", "_")) for name in plan.targets}
    named[HEAD] = named[EMBED]
    loader = Loader(program, named)
    loader.load(without_head)
    addresses = {name: each.data_ptr() for name, each in named.items()}
    loader.load(with_head)
    assert {name: each.data_ptr() for name, each in named.items()} == addresses
    assert torch.equal(named[HEAD][:VOCAB], sources(has_head=True)[EMBED])


def test_transformers_names_are_tied_too(with_head: Checkpoint) -> None:
    program = program_of(is_tied=True, runtime="transformers")
    tensors = prefilled(program.plan(with_head))
    report = Loader(program, tensors).load(with_head)
    assert tensors[HEAD] is tensors[EMBED]
    assert torch.equal(tensors[HEAD], sources(has_head=True)[EMBED])
    assert (report.tied, report.skipped_by["lm_head.weight"]) == (1, 1)


def test_twin_that_lives_on_another_rank_is_refused(tmp_path: Path) -> None:
    text = (
        "runtimes:\n  own:\n    mesh: vllm\n    rules:\n      - {target: a, dims: {n: 3}, stage: first}\n"
        "      - {target: b, tie: a, stage: last}\n"
    )
    program = compile(spec_of(tmp_path, text), config={}, runtime="own", layout=Layout(pp=2))
    checkpoint = write(tmp_path / "checkpoint", {"a": torch.arange(3.0)}, {})
    report = check(program, checkpoint)
    assert told(report.findings) == [("M508", "b")]
    assert "'b' is tied to 'a', which is not on rank 1" in str(report.findings[0])


def test_twin_of_another_shape_or_dtype_is_refused(without_head: Checkpoint) -> None:
    program = program_of(is_tied=True)
    for wrong, code in ((torch.empty(VOCAB, HIDDEN), "M532"), (torch.empty(128, HIDDEN, dtype=torch.bfloat16), "M533")):
        tensors = prefilled(program.plan(without_head))
        tensors[HEAD] = wrong
        before = all_raw(tensors)
        with pytest.raises(MapperError) as caught:
            Loader(program, tensors).load(without_head)
        assert told(caught.value.diagnostics) == [(code, HEAD)]
        assert all_raw(tensors) == before
