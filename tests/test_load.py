"""Loads onto real modules and mappings: what is filled, what is left alone, what is refused before anything is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

from mapper.checkpoint import Checkpoint
from mapper.compiler import Program, compile
from mapper.diagnostics import MapperError
from mapper.layout import Layout
from mapper.load import Loader
from mapper.messages import CATALOGUE
from tests.loads import Tensors, all_raw, fill, spec_of, told, write

HIDDEN, INNER, VOCAB = 6, 10, 67
CONFIG = {"hidden": HIDDEN, "inner": INNER, "vocab": VOCAB}
SPEC = """
config: {required: [hidden, inner, vocab]}
runtimes:
  own:
    mesh: vllm
    keep:
      - {target: '**.kept', why: computed by the module}
    rules:
      - target: embed.weight
        dims: {vocab: vocab, hidden: hidden}
        shard: {vocab: {axis: tp, pad: 64}}
      - target: gate_up.{leaf}
        sources: ['gate.{leaf}', 'up.{leaf}']
        dims: {out: [inner, inner], in: hidden}
        shard: {out: tp}
      - target: down.{leaf}
        dims: {out: hidden, in: inner}
        shard: {in: tp}
      - copy: [norm.weight]
"""


class Model(nn.Module):
    """One rank of the model that the spec describes."""

    def __init__(self, tp: int = 1, *, has_bias: bool = False, padded_vocab: int = 128) -> None:
        super().__init__()
        self.embed = nn.Embedding(padded_vocab // tp, HIDDEN)
        self.gate_up = nn.Linear(HIDDEN, 2 * INNER // tp, bias=has_bias)
        self.down = nn.Linear(INNER // tp, HIDDEN, bias=False)
        self.norm = nn.RMSNorm(HIDDEN)
        self.norm.weight.requires_grad_(False)
        self.norm.register_buffer("cache", torch.arange(3.0), persistent=False)


def values(number: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    size = torch.Size(shape).numel()
    return (torch.arange(size, dtype=torch.float32) + 1000 * number + 1).reshape(shape).to(dtype)


def sources(*, has_bias: bool = False) -> Tensors:
    tensors = {
        "embed.weight": values(1, VOCAB, HIDDEN),
        "gate.weight": values(2, INNER, HIDDEN),
        "up.weight": values(3, INNER, HIDDEN),
        "down.weight": values(4, HIDDEN, INNER),
        "norm.weight": values(5, HIDDEN),
    }
    return tensors | ({"gate.bias": values(6, INNER), "up.bias": values(7, INNER)} if has_bias else {})


def expected(tensors: Mapping[str, torch.Tensor], tp: int = 1, rank: int = 0) -> Tensors:
    """Return what one rank holds, written down by hand."""
    rows, inner = 128 // tp, INNER // tp
    embed = torch.cat([tensors["embed.weight"], torch.zeros(128 - VOCAB, HIDDEN)])
    own = slice(rank * inner, (rank + 1) * inner)
    return {
        "embed.weight": embed[rank * rows : (rank + 1) * rows],
        "down.weight": tensors["down.weight"][:, own],
        "norm.weight": tensors["norm.weight"],
    } | {
        f"gate_up.{leaf}": torch.cat([tensors[f"gate.{leaf}"][own], tensors[f"up.{leaf}"][own]])
        for leaf in ("weight", "bias")
        if f"gate.{leaf}" in tensors
    }


@pytest.fixture
def compiled(tmp_path: Path) -> Callable[..., Program]:
    def of(tp: int = 1, rank: int = 0, text: str = SPEC, runtime: str = "own") -> Program:
        return compile(spec_of(tmp_path, text), config=CONFIG, runtime=runtime, layout=Layout(tp=tp), rank=rank)

    return of


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return write(tmp_path / "checkpoint", sources(), CONFIG)


def refused(program: Program, model: nn.Module | Tensors, checkpoint: Checkpoint) -> MapperError:
    """Return the error of a load, after making sure that nothing was written."""
    real = {
        name: each for name, each in (model.state_dict() if isinstance(model, nn.Module) else model).items() if not each.is_meta
    }
    fill(real)
    before = all_raw(real)
    with pytest.raises(MapperError) as caught:
        Loader(program, model).load(checkpoint)
    assert all_raw(real) == before
    assert all(CATALOGUE[each.code].fix for each in caught.value.diagnostics)
    return caught.value


def codes(error: MapperError) -> list[tuple[str, str]]:
    return told(error.diagnostics)


@pytest.mark.parametrize(("tp", "rank"), [(1, 0), (2, 0), (2, 1)])
@pytest.mark.parametrize("on_meta", [False, True])
def test_module_is_filled_where_it_is_or_on_meta(
    tp: int, rank: int, on_meta: bool, compiled: Callable[..., Program], checkpoint: Checkpoint
) -> None:
    model = Model(tp)
    if on_meta:
        for module in (model.embed, model.gate_up, model.down, model.norm):
            module.weight = nn.Parameter(module.weight.to("meta"), requires_grad=module.weight.requires_grad)
        model.down.weight.mark = "kept"
    before = {name: id(each) for name, each in model.named_parameters()}
    report = Loader(compiled(tp, rank), model).load(checkpoint)
    assert all_raw(dict(model.named_parameters())) == all_raw(expected(sources(), tp, rank))
    assert [name for name, each in model.named_parameters() if not each.requires_grad] == ["norm.weight"]
    assert ({name: id(each) for name, each in model.named_parameters()} == before) is not on_meta
    assert getattr(model.down.weight, "mark", None) == ("kept" if on_meta else None)
    assert model.norm.cache.tolist() == [0.0, 1.0, 2.0]
    assert report.targets == 4
    # Rank 1 of 2 holds rows 64 to 127, of which 67 to 127 are padding.
    assert report.bytes_padded == 4 * HIDDEN * (0 if (tp, rank) == (2, 0) else 61)


def test_device_says_where_meta_goes_and_moves_nothing_else(compiled: Callable[..., Program], checkpoint: Checkpoint) -> None:
    model = Model()
    model.down.weight = nn.Parameter(model.down.weight.to("meta"))
    addresses = {name: each.data_ptr() for name, each in model.named_parameters() if not each.is_meta}
    loader = Loader(compiled(), model, device="meta")
    assert model.down.weight.is_meta
    with pytest.raises(MapperError) as caught:
        loader.load(checkpoint)
    assert codes(caught.value) == [("M602", "down.weight")]
    Loader(compiled(), model, device=torch.device("cpu")).load(checkpoint)
    assert {name: each.data_ptr() for name, each in model.named_parameters() if name in addresses} == addresses
    assert all_raw(dict(model.named_parameters())) == all_raw(expected(sources()))


def test_rank_of_padding_alone_is_zero_and_reads_no_row(compiled: Callable[..., Program], tmp_path: Path) -> None:
    text = (
        "config: {required: [vocab, hidden]}\nruntimes:\n  own:\n    mesh: vllm\n    rules:\n"
        + SPEC.split("    rules:\n")[1].split("      - target: gate_up")[0]
    )
    checkpoint = write(tmp_path / "embed", {"embed.weight": sources()["embed.weight"]}, CONFIG)
    model = {"embed.weight": torch.full((32, HIDDEN), 7.0)}
    report = Loader(compiled(4, 3, text), model).load(checkpoint)
    assert not model["embed.weight"].any()
    assert (report.loaded, report.elsewhere, report.bytes_read, report.bytes_padded) == (0, 1, 0, 32 * HIDDEN * 4)


def test_reload_is_in_place_and_leaves_other_tensors_alone(
    compiled: Callable[..., Program], checkpoint: Checkpoint, tmp_path: Path
) -> None:
    model = Model()
    model.down.register_buffer("kept", torch.full((2,), 5.0))
    loader = Loader(compiled(), model)
    first = loader.load(checkpoint)
    addresses = {name: (id(each), each.data_ptr()) for name, each in model.state_dict(keep_vars=True).items()}
    alias = model.gate_up.weight[3]
    later = {name: -each for name, each in sources().items()}
    second = loader.load(write(tmp_path / "later", later, CONFIG))
    assert {name: (id(each), each.data_ptr()) for name, each in model.state_dict(keep_vars=True).items()} == addresses
    assert all_raw(dict(model.named_parameters())) == all_raw(expected(later))
    assert alias.tolist() == later["gate.weight"][3].tolist()
    assert (model.down.kept.tolist(), model.norm.cache.tolist()) == ([5.0, 5.0], [0.0, 1.0, 2.0])
    assert first.kept == second.kept == {"down.kept": "**.kept"}
    assert (first.bytes_read, first.bytes_written) == (second.bytes_read, second.bytes_written)


def test_targets_that_are_not_contiguous_are_filled(compiled: Callable[..., Program], checkpoint: Checkpoint) -> None:
    wide = torch.full((2 * INNER, 3 * HIDDEN), 7.0)
    model = {
        "embed.weight": torch.empty(HIDDEN, 128).T,
        "gate_up.weight": wide[:, HIDDEN : 2 * HIDDEN],
        "down.weight": torch.empty(INNER, HIDDEN).T,
        "norm.weight": torch.empty(2 * HIDDEN)[::2],
    }
    assert not any(each.is_contiguous() for each in model.values())
    Loader(compiled(), model).load(checkpoint)
    assert all_raw(model) == all_raw(expected(sources()))
    assert set(wide[:, :HIDDEN].flatten().tolist()) == set(wide[:, 2 * HIDDEN :].flatten().tolist()) == {7.0}


@pytest.mark.parametrize("as_mapping", [False, True])
def test_parameter_of_two_names_is_filled_through_either(
    as_mapping: bool, compiled: Callable[..., Program], checkpoint: Checkpoint
) -> None:
    model = Model()
    model.before = model.down
    model.zlast = model.norm
    Loader(compiled(), dict(model.state_dict()) if as_mapping else model).load(checkpoint)
    assert model.before.weight is model.down.weight
    assert all_raw(dict(model.named_parameters())) == all_raw(expected(sources()))


def test_tied_parameters_stay_one_object_when_they_leave_meta(compiled: Callable[..., Program], checkpoint: Checkpoint) -> None:
    with torch.device("meta"):
        model = Model()
    model.norm.cache = torch.arange(3.0)
    model.head = nn.Linear(HIDDEN, 128, bias=False)
    model.head.weight = model.embed.weight
    text = SPEC + "      - {target: head.weight, tie: embed.weight}\n"
    report = Loader(compiled(text=text), model).load(checkpoint)
    assert model.head.weight is model.embed.weight
    assert (report.targets, report.tied) == (5, 1)
    assert all_raw(dict(model.named_parameters())) == all_raw(expected(sources()))


def test_two_rules_for_one_parameter_are_refused(compiled: Callable[..., Program], tmp_path: Path) -> None:
    text = SPEC + "      - copy: [second.weight]\n"
    two = write(tmp_path / "two", sources() | {"second.weight": values(9, HIDDEN)}, CONFIG)
    model = Model()
    model.second = model.norm
    assert codes(refused(compiled(text=text), model, two)) == [("M601", "second.weight")]
    # `state_dict` gives each name a tensor object of its own, over the same memory.
    error = refused(compiled(text=text), dict(model.state_dict()), two)
    assert codes(error) == [("M601", "second.weight")]
    assert "'second.weight' and 'norm.weight' are one parameter" in str(error)


def test_buffer_on_meta_that_no_checkpoint_holds_is_refused(compiled: Callable[..., Program], checkpoint: Checkpoint) -> None:
    model = Model()
    model.norm.cache = torch.empty(3, device="meta")
    error = refused(compiled(), model, checkpoint)
    assert codes(error) == [("M603", "norm.cache")]


def test_mapping_on_meta_is_refused(compiled: Callable[..., Program], checkpoint: Checkpoint) -> None:
    model = expected(sources())
    model["down.weight"] = model["down.weight"].to("meta")
    assert codes(refused(compiled(), {name: each.clone() for name, each in model.items()}, checkpoint)) == [
        ("M602", "down.weight")
    ]


MISFITS: dict[str, tuple[Callable[[Model], object], list[tuple[str, str]], str]] = {
    "shape": (
        lambda model: setattr(model, "down", nn.Linear(INNER, HIDDEN + 1, bias=False)),
        [("M532", "down.weight")],
        "'down.weight' has the shape [7, 10] in the model, and the rule gives [6, 10]",
    ),
    "dtype": (
        lambda model: model.down.to(torch.bfloat16),
        [("M533", "down.weight")],
        "'down.weight' has the dtype bfloat16 in the model, and its source gives float32",
    ),
    "a parameter without a rule": (
        lambda model: model.register_parameter("nrom", nn.Parameter(torch.zeros(2))),
        [("M530", "nrom")],
        "the model has the parameter 'nrom' [2], which no rule fills",
    ),
    "a persistent buffer without a rule": (
        lambda model: model.norm.register_buffer("weigh", torch.zeros(2)),
        [("M530", "norm.weigh")],
        "hint: a rule fills 'norm.weight'",
    ),
    "a rule without a parameter": (
        lambda model: (setattr(model, "norms", model.norm), delattr(model, "norm")),
        [("M531", "norm.weight"), ("M530", "norms.weight")],
        "hint: the model has 'norms.weight'",
    ),
    "a bias without a source": (
        lambda model: setattr(model, "gate_up", nn.Linear(HIDDEN, 2 * INNER)),
        [("M530", "gate_up.bias")],
        "the model has the parameter 'gate_up.bias' [20]",
    ),
    "three things at once": (
        lambda model: (
            model.down.to(torch.bfloat16),
            setattr(model, "norm", nn.RMSNorm(3)),
            setattr(model, "x", nn.RMSNorm(3)),
        ),
        [("M533", "down.weight"), ("M532", "norm.weight"), ("M530", "x.weight")],
        "'norm.weight' has the shape [3] in the model, and the rule gives [6]",
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_what_does_not_fit_is_told_before_any_write(
    name: str, compiled: Callable[..., Program], checkpoint: Checkpoint
) -> None:
    change, findings, text = MISFITS[name]
    model = Model()
    change(model)
    error = refused(compiled(), model, checkpoint)
    assert codes(error) == findings
    assert text in str(error)


def test_keep_holds_under_any_name_of_a_parameter(compiled: Callable[..., Program], checkpoint: Checkpoint) -> None:
    model = Model()
    scale = nn.Parameter(torch.full((2,), 5.0))
    model.norm.register_parameter("also", scale)
    model.norm.register_parameter("kept", scale)
    report = Loader(compiled(), model).load(checkpoint)
    assert report.kept == {"norm.also": "**.kept"}
    assert scale.tolist() == [5.0, 5.0]


def test_bias_is_loaded_where_the_checkpoint_and_the_model_have_it(compiled: Callable[..., Program], tmp_path: Path) -> None:
    checkpoint = write(tmp_path / "with", sources(has_bias=True), CONFIG)
    for rank in range(2):
        model = Model(2, has_bias=True)
        Loader(compiled(2, rank), model).load(checkpoint)
        assert all_raw(dict(model.named_parameters())) == all_raw(expected(sources(has_bias=True), 2, rank))
    assert codes(refused(compiled(), Model(), checkpoint)) == [("M531", "gate_up.bias")]
    half = write(tmp_path / "half", {n: t for n, t in sources(has_bias=True).items() if n != "up.bias"}, CONFIG)
    assert codes(refused(compiled(), Model(has_bias=True), half)) == [("M501", "up.bias")]


def test_bias_beside_a_weight_cut_by_its_inner_dim_is_refused(compiled: Callable[..., Program], tmp_path: Path) -> None:
    checkpoint = write(tmp_path / "bias", sources() | {"down.bias": values(8, HIDDEN)}, CONFIG)
    error = refused(compiled(2), Model(2), checkpoint)
    assert codes(error) == [("M506", "down.bias")]
    assert "the rule cuts 'in' and does not say which ranks hold the bias" in str(error)
    model = Model()
    model.down = nn.Linear(INNER, HIDDEN)
    Loader(compiled(), model).load(checkpoint)
    assert model.down.bias.tolist() == values(8, HIDDEN).tolist()


@pytest.mark.parametrize("name", ["gate.weight", "up.weight"])
def test_two_dtypes_in_one_parameter_are_refused(name: str, compiled: Callable[..., Program], tmp_path: Path) -> None:
    tensors = sources()
    tensors[name] = tensors[name].to(torch.bfloat16)
    error = refused(compiled(), Model(), write(tmp_path / "mixed", tensors, CONFIG))
    assert [each.code for each in error.diagnostics] == ["M507"]
    assert "BF16" in str(error)
    assert "F32" in str(error)
    assert "'gate.weight'" in str(error)
    assert "'up.weight'" in str(error)
