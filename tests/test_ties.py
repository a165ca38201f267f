"""Tied parameters: one storage under two names, or two that hold the same; what is skipped as a stored copy has to be one."""

from __future__ import annotations

import re
import textwrap
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


def copied() -> Tensors:
    """Return a checkpoint in which the head is stored, and is the embedding."""
    stored = sources(has_head=True)
    return {**stored, HEAD: stored[EMBED].clone()}


def program_of(*, is_tied: bool, layout: str = "", runtime: str = "vllm") -> Program:
    config = {**CONFIG, "tie_word_embeddings": is_tied}
    return compile(load_spec(SPEC), config=config, runtime=runtime, layout=Layout.parse(layout))


@pytest.fixture(scope="module")
def with_head(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return write(tmp_path_factory.mktemp("head"), sources(has_head=True), CONFIG)


@pytest.fixture(scope="module")
def with_copy(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return write(tmp_path_factory.mktemp("copy"), copied(), CONFIG)


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
    if program.config["tie_word_embeddings"] and HEAD in stream:
        stream = copied()
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
def test_parameters_that_require_grad_are_padded_and_tied_too(is_stream: bool, without_head: Checkpoint) -> None:
    program = program_of(is_tied=True)
    tensors: Tensors = {name: nn.Parameter(each) for name, each in separate(prefilled(program.plan(without_head))).items()}
    load(program, tensors, without_head, is_stream=is_stream)
    embedding = rows_of(sources(has_head=False)[EMBED], 1, 0)
    assert torch.equal(tensors[EMBED], embedding)
    assert torch.equal(tensors[HEAD], embedding)


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
    is_stream: bool, with_copy: Checkpoint, without_head: Checkpoint
) -> None:
    program = program_of(is_tied=True, layout="tp=1,pp=2").at_rank(1)
    tensors, plain = (prefilled(program.plan(each)) for each in (with_copy, without_head))
    report = load(program, tensors, with_copy, is_stream=is_stream)
    load(program, plain, without_head, is_stream=is_stream)
    assert report.skipped_by == {"**.rotary_emb.inv_freq": 0, "lm_head.weight": 1}
    assert torch.equal(tensors[HEAD], tensors[EMBED])
    assert tensors[EMBED].sum() == sources(has_head=True)[EMBED].sum()
    assert {name: each for name, each in all_raw(tensors).items() if name in (HEAD, NORM)} == {
        name: each for name, each in all_raw(plain).items() if name in (HEAD, NORM)
    }


def refused(program: Program, checkpoint: Checkpoint) -> str:
    """Return why the load is refused, after making sure that it wrote nothing."""
    tensors = prefilled(program.plan(checkpoint))
    before = all_raw(tensors)
    with pytest.raises(MapperError) as caught:
        Loader(program, tensors).load(checkpoint)
    assert all_raw(tensors) == before
    (found,) = caught.value.diagnostics
    assert (found.code, found.subject) == ("M511", HEAD)
    return found.message


def test_stored_head_of_other_values_is_no_copy_of_the_embedding(with_head: Checkpoint) -> None:
    program = program_of(is_tied=True)
    assert refused(program, with_head) == (
        "'lm_head.weight' is skipped as a copy of 'model.embed_tokens.weight', and 804 of 804 elements differ"
    )
    assert check(program, with_head).ok  # headers do not tell values


def test_one_element_off_is_seen(tmp_path: Path) -> None:
    stored = copied()
    stored[HEAD][VOCAB - 1, HIDDEN - 1] += 1
    assert refused(program_of(is_tied=True), write(tmp_path, stored, CONFIG)).endswith("and 1 of 804 elements differ")


@pytest.mark.parametrize(
    ("head", "problem"),
    [
        (torch.zeros(VOCAB, HIDDEN - 1), "is F32 [67, 11], the other F32 [67, 12]"),
        (torch.zeros(VOCAB, HIDDEN, dtype=torch.bfloat16), "is BF16 [67, 12], the other F32 [67, 12]"),
    ],
)
def test_stored_head_of_another_shape_or_dtype_is_no_copy_of_the_embedding(
    head: torch.Tensor, problem: str, tmp_path: Path
) -> None:
    checkpoint = write(tmp_path, {**copied(), HEAD: head}, CONFIG)
    report = check(program_of(is_tied=True), checkpoint)
    assert [each.message for each in report.findings] == [
        f"'lm_head.weight' is skipped as a copy of 'model.embed_tokens.weight', and {problem}"
    ]


def test_an_embedding_that_is_wrong_itself_is_the_only_finding(tmp_path: Path) -> None:
    checkpoint = write(tmp_path, {**copied(), EMBED: torch.zeros(VOCAB + 1, HIDDEN)}, CONFIG)
    assert told(check(program_of(is_tied=True), checkpoint).findings) == [("M503", EMBED)]


def test_stored_head_without_elements_is_as_good_as_none(tmp_path: Path) -> None:
    checkpoint = write(tmp_path, {**copied(), HEAD: torch.zeros(0)}, CONFIG)
    program = program_of(is_tied=True)
    tensors = prefilled(program.plan(checkpoint))
    Loader(program, tensors).load(checkpoint)
    assert torch.equal(tensors[HEAD], tensors[EMBED])
    assert told(check(program_of(is_tied=False), checkpoint).findings) == [("M503", HEAD)]


def test_a_skip_of_the_users_own_compares_nothing(with_head: Checkpoint) -> None:
    program = program_of(is_tied=True).with_skips([(HEAD, "the head is trained again")], origin="test")
    tensors = prefilled(program.plan(with_head))
    report = Loader(program, tensors).load(with_head)
    assert report.skipped_by == {"**.rotary_emb.inv_freq": 0, "lm_head.weight": 0, "lm_head.weight (test)": 1}
    assert torch.equal(tensors[HEAD], tensors[EMBED])


def test_only_ranks_that_hold_the_embedding_compare(with_head: Checkpoint) -> None:
    program = program_of(is_tied=True, layout="tp=1,pp=3")
    Loader(program.at_rank(1), prefilled(program.at_rank(1).plan(with_head))).load(with_head)
    for rank in (0, 2):
        with pytest.raises(MapperError, match="M511"):
            Loader(program.at_rank(rank), prefilled(program.at_rank(rank).plan(with_head))).load(with_head)


def test_a_mounted_program_compares_under_the_longer_prefix(tmp_path: Path) -> None:
    mounted = program_of(is_tied=True).mounted("language")
    good, wrong = ({f"language.{name}": each for name, each in stored.items()} for stored in (copied(), sources(has_head=True)))
    checkpoint = write(tmp_path / "good", good, CONFIG)
    tensors = prefilled(mounted.plan(checkpoint))
    Loader(mounted, tensors).load(checkpoint)
    expected = "'language.lm_head.weight' is skipped as a copy of 'language.model.embed_tokens.weight'"
    with pytest.raises(MapperError, match=re.escape(expected)):
        Loader(mounted, tensors).load(write(tmp_path / "wrong", wrong, CONFIG))


COPIES = """
    index: {{layer: {{count: 2}}, other: {{count: 2}}}}
    runtimes:
      own:
        skip: [{{source: {source}, copy_of: {original}, why: the same}}]
        rules: [{{target: "a.{{layer}}", dims: {{n: 3}}}}, {{target: "b.{{other}}", dims: {{n: 3}}}}]
"""


def test_copies_are_told_by_index(tmp_path: Path) -> None:
    text = textwrap.dedent(COPIES.format(source="'{layer}.copy'", original="'a.{layer}'"))
    program = compile(spec_of(tmp_path, text), config={}, runtime="own")
    stored = {f"{name}.{number}": torch.arange(3.0) + 3 * number for name in "ab" for number in range(2)}
    stored |= {"0.copy": stored["a.0"].clone(), "1.copy": stored["a.1"].clone()}
    good = write(tmp_path / "good", stored, {})
    Loader(program, prefilled(program.plan(good))).load(good)
    stored["1.copy"] = stored["a.0"].clone()
    with pytest.raises(MapperError, match=re.escape("'1.copy' is skipped as a copy of 'a.1'")):
        Loader(program, prefilled(program.plan(good))).load(write(tmp_path / "wrong", stored, {}))


@pytest.mark.parametrize(
    ("source", "original", "problem"),
    [
        ("'{layer}.copy'", "'b.{other}'", "'b.{other}' has the index 'other', which '{layer}.copy' does not have"),
        ("'{layer}.copy'", "'a.{lyaer}'", "lyaer"),
        ("'**.copy'", "a.0", "**"),
        ("a.copy", "'a.*'", "*"),
    ],
)
def test_a_copy_of_what_cannot_be_named_is_an_error(source: str, original: str, problem: str, tmp_path: Path) -> None:
    text = textwrap.dedent(COPIES.format(source=source, original=original))
    with pytest.raises(MapperError, match=re.escape(problem)):
        compile(spec_of(tmp_path, text), config={}, runtime="own")


def test_config_that_denies_the_tie_needs_a_head_of_its_own(with_head: Checkpoint, without_head: Checkpoint) -> None:
    program = program_of(is_tied=False)
    tensors = prefilled(program.plan(with_head))
    before = all_raw(tensors)
    with pytest.raises(MapperError) as caught:
        Loader(program, tensors).load(without_head)
    assert told(caught.value.diagnostics) == [("M501", HEAD)]
    (found,) = caught.value.diagnostics
    assert found.hint == "the rule is in force because `not is_tied` (tie_word_embeddings is false)"
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


def test_reload_keeps_an_alias_one(without_head: Checkpoint, with_copy: Checkpoint) -> None:
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
    loader.load(with_copy)
    assert {name: each.data_ptr() for name, each in named.items()} == addresses
    assert torch.equal(named[HEAD][:VOCAB], sources(has_head=True)[EMBED])


def test_transformers_names_are_tied_too(with_copy: Checkpoint) -> None:
    program = program_of(is_tied=True, runtime="transformers")
    tensors = prefilled(program.plan(with_copy))
    report = Loader(program, tensors).load(with_copy)
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
