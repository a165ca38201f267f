"""The engine's guarantees, each as a function that checks it on one example and raises AssertionError where it is broken.

A guarantee whose machinery this version does not have raises `NotBuilt` with the reason.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import nn

import mapper
from mapper import Checkpoint, Diagnostic, Layout, MapperError, Plan, Program
from mapper.export import export
from mapper.load import Loader
from mapper.plan import Step
from mapper.testing.example import Example
from mapper.testing.files import duplicate_tensor, truncate_file, write_checkpoint
from mapper.testing.reference import ReferenceResult, reference_load
from mapper.testing.reference.arrays import are_same, bits_of, tensor_of
from mapper.testing.strategies.fault import Fault
from mapper.testing.strategies.stream import Stream
from mapper.testing.strategies.values import sentinel, unique_values
from mapper.transfer.files import CheckpointFiles

MOUNT = "language_model"
KEPT_SHAPE = (3,)
UNSUPPORTED = "M310"
NOT_INVERTIBLE = {"M701", "M702", "M707", "M708", "M709"}


class NotBuilt(Exception):
    """What a guarantee is about does not exist in this version, or the spec uses what the engine refuses by name."""


def check_coverage(example: Example) -> None:
    """Guarantee 1: every element of every target is what the reference has; what is kept, and nothing else, is untouched."""
    program = program_of(example)
    with checkpoint_of(example) as checkpoint:
        for rank in example.ranks:
            expected = example.reference(rank)
            model = empty_model(expected)
            Loader(program.at_rank(rank), model).load(checkpoint)
            require_equal(model, expected, f"rank {rank} of {example.layout}")


def check_conservation(example: Example) -> None:
    """Guarantee 2: every source is loaded, elsewhere or skipped, as the reference says; none is unknown to only one of them."""
    program = program_of(example)
    with checkpoint_of(example) as checkpoint:
        for rank in example.ranks:
            expected = example.reference(rank)
            plan = program.at_rank(rank).plan(checkpoint)
            loaded = _sources_of(plan)
            skipped, unknown = set(plan.matching.skipped), set(plan.matching.unknown)
            elsewhere = set(example.tensors) - loaded - skipped - unknown
            found = {"loaded": loaded, "elsewhere": elsewhere, "skipped": skipped, "unknown": unknown}
            for word, names in found.items():
                wanted: frozenset[str] = getattr(expected, word)
                assert names == wanted, f"rank {rank}: {word} are {_difference(names, wanted)}"
            report = Loader(program.at_rank(rank), empty_model(expected)).load(checkpoint)
            counts = {"loaded": report.loaded, "elsewhere": report.elsewhere, "skipped": report.skipped}
            assert counts == {word: len(found[word]) for word in counts}, f"rank {rank}: the report counts {counts}"


def check_layout_independence(example: Example) -> None:
    """Guarantee 3: the shares of all ranks, put together, are what one rank on its own loads."""
    program = program_of(example)
    alone = example.reference_alone()
    with checkpoint_of(example) as checkpoint:
        single = empty_model(alone)
        Loader(program_of(example, Layout()), single).load(checkpoint)
        shares: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        wholes: dict[str, torch.Tensor] = {}
        for rank in range(example.layout.num_ranks):
            expected = example.reference(rank)
            model = empty_model(expected)
            Loader(program.at_rank(rank), model).load(checkpoint)
            wholes.update(expected.wholes)
            for name in expected.targets:
                shares.setdefault(name, []).append((model[name], expected.positions[name]))
    assert shares.keys() == alone.targets.keys(), f"targets are {_difference(shares.keys(), alone.targets.keys())}"
    for name, parts in shares.items():
        gathered = _gathered(parts, wholes[name], name)
        one = _gathered([(single[name], alone.positions[name])], alone.wholes[name], name)
        # A grid that is refined for the layout has another shape; then the reference's own whole is what there is to compare.
        expected_whole = one if one.shape == gathered.shape else wholes[name]
        assert are_same(gathered, expected_whole), f"{name} put together from {example.layout} differs from a single rank's"


def check_order(example: Example, stream: Stream) -> None:
    """Guarantee 4: tensors in any order and in any number of calls leave what a load from files leaves."""
    program = program_of(example)
    for rank in example.ranks:
        expected = example.reference(rank)
        model = empty_model(expected)
        loader = Loader(program.at_rank(rank), model)
        with loader.update(scope="all") as session:
            for bucket in stream:
                session.feed_all(bucket)
            report = session.finish()
        require_equal(model, expected, f"rank {rank} of {example.layout}, fed as a stream")
        assert report.loaded == len(expected.loaded), f"the report counts {report.loaded} loaded, not {len(expected.loaded)}"


def check_rerooting(example: Example) -> None:
    """Guarantee 5: under a longer prefix, and below a prefix, the same happens to the same tensors."""
    program = program_of(example)
    for rank in example.ranks:
        expected = example.reference(rank)
        mounted = {f"{MOUNT}.{name}": tensor for name, tensor in example.tensors.items()}
        _require_rerooted(program.at_rank(rank).mounted(MOUNT), mounted, expected, lambda name: f"{MOUNT}.{name}", "mounted")
        back = program.at_rank(rank).mounted(MOUNT).scoped(MOUNT)
        _require_rerooted(back, example.tensors, expected, lambda name: name, "mounted and scoped back")
        for prefix in _first_segments(example.tensors):
            scoped = _scoped(program.at_rank(rank), prefix)
            if scoped is None:
                continue
            inside = {
                _below(name, prefix=prefix): each for name, each in example.tensors.items() if name.startswith(f"{prefix}.")
            }
            _require_rerooted(scoped, inside, _restricted(expected, prefix), partial(_below, prefix=prefix), f"below {prefix}")


def check_round_trip(example: Example) -> None:
    """Guarantee 6: what all ranks hold, exported, is the checkpoint again, tensor by tensor.

    Where values were multiplied by scales, or a cast lost digits, the export is refused by name and nothing is written.
    """
    program = program_of(example)
    with checkpoint_of(example) as checkpoint, tempfile.TemporaryDirectory() as scratch:
        plans = []
        for rank in range(example.layout.num_ranks):
            own = program.at_rank(rank)
            model = empty_model(example.reference(rank))
            Loader(own, model).load(checkpoint)
            plans.append((own.plan(checkpoint), model))
        folder = Path(scratch) / "out"
        refused = _refused_export(plans, folder, checkpoint)
        if refused:
            codes = {each.code for each in refused}
            assert codes <= NOT_INVERTIBLE, f"the export is refused with {codes}: {refused[0].message}"
            assert not folder.exists(), "a refused export has left files"
            lossy = {step.source for plan, _ in plans for step in plan.steps() if step.scale or changes_values(step)}
            assert {each.subject for each in refused} <= lossy, "a tensor that nothing was done to is refused"
            return
        again = Checkpoint.open(str(folder))
        assert again.tensors.keys() == example.tensors.keys(), _difference(again.tensors.keys(), example.tensors.keys())
        with CheckpointFiles(again) as files:
            for name, tensor in example.tensors.items():
                assert are_same(files.tensor(again.tensors[name]), tensor), f"{name} comes back changed from {example.layout}"


def _refused_export(
    plans: list[tuple[Plan, dict[str, torch.Tensor]]], folder: Path, base: Checkpoint
) -> tuple[Diagnostic, ...]:
    try:
        export(plans, folder, base=base)
    except MapperError as error:
        return error.diagnostics
    return ()


def changes_values(step: Step) -> bool:
    """Return whether the step casts values or computes with them."""
    reading = step.reading
    if reading is None:
        return False
    return bool(reading.values) or (reading.conversion is not None and reading.conversion.by == "cast")


def check_in_place(example: Example) -> None:
    """Guarantee 7: a second load with other values keeps every address and alias, and what the rules do not name."""
    program = program_of(example)
    others = _other_values(example)
    rank = example.ranks[-1]
    expected = example.reference(rank)
    after = reference_load(
        example.spec,
        config=example.config,
        runtime=example.runtime,
        layout=example.layout,
        rank=rank,
        tensors=others,
        options=example.options,
    )
    module = module_of(empty_model(expected))
    untouched = torch.arange(7, dtype=torch.float32)
    module.register_buffer("unlisted", untouched.clone(), persistent=False)
    twin = next(module.parameters())
    module.register_parameter("alias", twin)
    loader = Loader(program.at_rank(rank), module)
    addresses = {name: each.data_ptr() for name, each in module.state_dict(keep_vars=True).items()}
    for tensors, wanted in ((example.tensors, expected), (others, after), (example.tensors, expected)):
        with _written(tensors, example.config) as checkpoint:
            loader.load(checkpoint)
        held = dict(module.state_dict(keep_vars=True))
        assert {name: each.data_ptr() for name, each in held.items()} == addresses, "a parameter has moved"
        assert module.get_parameter("alias") is twin, "an alias has come off"
        assert are_same(module.get_buffer("unlisted"), untouched), "a buffer that no rule names has changed"
        require_equal({name: held[name].detach() for name in wanted.targets}, wanted, "a second load")


def check_fault(example: Example, fault: Fault) -> None:
    """Guarantee 8: exactly the fault is reported, and nothing is written before."""
    program = program_of(example)
    for rank in example.ranks:
        model = empty_model(example.reference(rank))
        found = _fault_in_files(program.at_rank(rank), model, example, fault)
        names, codes = {each.subject for each in found}, {each.code for each in found}
        label = f"{fault.kind} of {fault.name!r} on rank {rank} of {example.layout}"
        if not found and fault.any_will_do and fault.name not in example.reference(rank).loaded:
            continue  # only a model that holds the target knows its dtype
        assert found, f"{label}: nothing is reported"
        if fault.codes:
            assert codes <= fault.codes, f"{label}: reported as {codes}, expected {set(fault.codes)}"
        if fault.any_will_do:
            assert names <= fault.reported, f"{label}: reported {names - fault.reported}"
        elif fault.kind == "duplicate":
            assert any(fault.name in each.message for each in found), f"{label}: {[each.message for each in found]}"
        elif fault.kind != "truncate":
            assert names == fault.reported, f"{label}: reported {_difference(names, fault.reported)}"
        _require_untouched(model, label)
        _check_fault_in_stream(program.at_rank(rank), example, fault, rank)


def check_ranks_agree(example: Example) -> None:
    """Guarantee 9, as far as it can be seen without running ranks: one digest, and the same rules, skips and keeps."""
    programs = [
        mapper.compile(
            example.spec,
            config=example.config,
            runtime=example.runtime,
            layout=example.layout,
            rank=rank,
            options=example.options,
        )
        for rank in range(example.layout.num_ranks)
    ]
    first = programs[0]
    for rank, program in enumerate(programs):
        assert program.digests == first.digests, f"rank {rank} has another digest than rank 0"
        for word in ("families", "skips", "keeps", "domains", "placed"):
            assert repr(getattr(program, word)) == repr(getattr(first, word)), f"rank {rank} has other {word} than rank 0"


def program_of(example: Example, layout: Layout | None = None) -> Program:
    """Return the compiled program on rank 0; raises NotBuilt where the engine refuses what it does not execute yet."""
    try:
        return mapper.compile(
            example.spec,
            config=example.config,
            runtime=example.runtime,
            layout=layout or example.layout,
            rank=0,
            options=example.options,
        )
    except MapperError as error:
        if {each.code for each in error.diagnostics} == {UNSUPPORTED}:
            raise NotBuilt(f"{example.spec.id} {example.runtime}: {error.diagnostics[0].message}") from error
        raise


@contextmanager
def checkpoint_of(example: Example) -> Iterator[Checkpoint]:
    """Write the example's tensors to a folder that lives as long as the block, and open it."""
    with _written(example.tensors, example.config) as checkpoint:
        yield checkpoint


def empty_model(expected: ReferenceResult) -> dict[str, torch.Tensor]:
    """Return a tensor of sentinel bytes for each target of a rank; tied ones are one tensor, kept ones are there too."""
    model = {name: sentinel(tensor.shape, tensor.dtype) for name, tensor in expected.targets.items()}
    model.update({name: model[twin] for name, twin in expected.tied.items() if twin in model})
    kept = [name for name in expected.kept if "*" not in name]
    return {**model, **{name: sentinel(KEPT_SHAPE, torch.float32) for name in kept}}


def require_equal(model: Mapping[str, torch.Tensor], expected: ReferenceResult, label: str) -> None:
    """Raise AssertionError naming the first element of a target that differs from the reference."""
    for name, tensor in expected.targets.items():
        found = model[name]
        assert found.dtype == tensor.dtype, f"{label}: {name} is {found.dtype}, expected {tensor.dtype}"
        assert found.shape == tensor.shape, f"{label}: {name} is {tuple(found.shape)}, expected {tuple(tensor.shape)}"
        if not are_same(found, tensor):
            differs = torch.from_numpy(bits_of(found) != bits_of(tensor))
            place = tuple(differs.nonzero()[0].tolist())
            padding = " in its padding" if bool(expected.padding(name)[place]) else ""
            raise AssertionError(
                f"{label}: {int(differs.sum())} of {tensor.numel()} elements of {name} {tuple(tensor.shape)} differ, the first "
                f"at {place}{padding}: {found[place].float().item()}, expected {tensor[place].float().item()}"
            )
    for name in expected.kept:
        if name in model:
            untouched = sentinel(model[name].shape, model[name].dtype)
            assert are_same(model[name], untouched), f"{label}: {name} is kept, and has changed"


def module_of(tensors: Mapping[str, torch.Tensor]) -> nn.Module:
    """Return a module with these parameters, in submodules as their names say; equal tensors are one parameter."""
    root = nn.Module()
    known: dict[int, nn.Parameter] = {}
    for name, tensor in tensors.items():
        *path, last = name.split(".")
        place = root
        for step in path:
            if step not in place._modules:
                place.add_module(step, nn.Module())
            place = place.get_submodule(step)
        parameter = known.setdefault(id(tensor), nn.Parameter(tensor, requires_grad=False))
        place.register_parameter(last, parameter)
    return root


@contextmanager
def _written(tensors: Mapping[str, torch.Tensor], config: Mapping[str, object]) -> Iterator[Checkpoint]:
    with tempfile.TemporaryDirectory() as folder:
        yield Checkpoint.open(str(write_checkpoint(tensors, Path(folder), config=config)))


def _sources_of(plan: Plan) -> set[str]:
    """Return every tensor that a plan reads, scales included."""
    return {name for step in plan.steps() for name in (step.source, step.scale) if name is not None}


def _gathered(parts: Iterable[tuple[torch.Tensor, torch.Tensor]], whole: torch.Tensor, name: str) -> torch.Tensor:
    """Put shares where they lie in their whole; each element must come from some rank, and be the same on all that have it."""
    bits = bits_of(whole).reshape(-1)
    bits[:] = 0
    is_there = torch.zeros(whole.numel(), dtype=torch.bool).numpy()
    for tensor, positions in parts:
        share, places = bits_of(tensor).reshape(-1), positions.reshape(-1).numpy()
        share, places = share[places >= 0], places[places >= 0]
        again = is_there[places]
        assert (bits[places[again]] == share[again]).all(), f"{name}: two ranks hold different values of one element"
        bits[places] = share
        is_there[places] = True
    assert is_there.all(), f"{name}: {int((~is_there).sum())} elements are on no rank"
    return tensor_of(bits.reshape(tuple(whole.shape)), whole.dtype)


def _require_rerooted(
    program: Program,
    tensors: Mapping[str, torch.Tensor],
    expected: ReferenceResult,
    renamed: Callable[[str], str],
    label: str,
) -> None:
    model = empty_model(expected)
    targets = {renamed(name): tensor for name, tensor in model.items()}
    with _written(tensors, {}) as checkpoint:
        plan = program.plan(checkpoint)
        Loader(program, targets).load(checkpoint)
    require_equal(model, expected, label)
    skipped = {renamed(name) for name in expected.skipped}
    assert set(plan.matching.skipped) == skipped, f"{label}: skipped are {_difference(plan.matching.skipped, skipped)}"
    loaded = {renamed(name) for name in expected.loaded}
    found = _sources_of(plan)
    assert found == loaded, f"{label}: loaded are {_difference(found, loaded)}"


def _scoped(program: Program, prefix: str) -> Program | None:
    """Return the program below a prefix, or None where a rule has one side inside and one outside."""
    try:
        return program.scoped(prefix)
    except MapperError as error:
        if {each.code for each in error.diagnostics} == {"M317"}:
            return None
        raise


def _restricted(expected: ReferenceResult, prefix: str) -> ReferenceResult:
    """Return the part of a result whose names begin with a prefix."""
    inside = f"{prefix}."
    return ReferenceResult(
        targets={name: each for name, each in expected.targets.items() if name.startswith(inside)},
        wholes=expected.wholes,
        positions=expected.positions,
        tied={name: twin for name, twin in expected.tied.items() if name.startswith(inside)},
        kept={name: why for name, why in expected.kept.items() if name.startswith(inside)},
        loaded=frozenset(name for name in expected.loaded if name.startswith(inside)),
        elsewhere=frozenset(name for name in expected.elsewhere if name.startswith(inside)),
        skipped=frozenset(name for name in expected.skipped if name.startswith(inside)),
        unknown=frozenset(name for name in expected.unknown if name.startswith(inside)),
        missing=(),
        missing_elsewhere=(),
    )


def _first_segments(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(name.split(".")[0] for name in names if "." in name))


def _below(name: str, *, prefix: str) -> str:
    assert name.startswith(f"{prefix}."), f"{name!r} is not below {prefix!r}"
    return name[len(prefix) + 1 :]


def _other_values(example: Example) -> dict[str, torch.Tensor]:
    """Return other values for every tensor; what is a copy stays one."""
    others: dict[str, torch.Tensor] = {}
    start = 1_000_003
    for name, tensor in example.tensors.items():
        others[name] = unique_values(tensor.shape, tensor.dtype, start)
        start += tensor.numel()
    return {**others, **{name: others[original].clone() for name, original in example.copies().items()}}


def _fault_in_files(
    program: Program, model: dict[str, torch.Tensor], example: Example, fault: Fault
) -> tuple[mapper.Diagnostic, ...]:
    """Return what a load of the broken files reports."""
    with tempfile.TemporaryDirectory() as place:
        folder = write_checkpoint(fault.tensors, Path(place), config=example.config)
        if fault.kind == "duplicate":
            duplicate_tensor(folder, fault.tensors, fault.name)
        if fault.kind == "truncate":
            truncate_file(folder, fault.name)
        try:
            Loader(program, model).load(Checkpoint.open(str(folder)))
        except MapperError as error:
            return error.diagnostics
    return ()


def _check_fault_in_stream(program: Program, example: Example, fault: Fault, rank: int) -> None:
    """A stream has no manifest: the tensor at fault is refused when it comes, what is missing when the session ends."""
    if fault.kind == "truncate":
        return
    expected = example.reference(rank)
    model = empty_model(expected)
    session = Loader(program, model).update(scope="all")
    items = list(fault.tensors.items())
    if fault.kind == "duplicate":
        items.append((fault.name, fault.tensors[fault.name]))
    found: list[mapper.Diagnostic] = []
    for name, tensor in items:
        before = {key: each.clone() for key, each in model.items()} if name == fault.name else {}
        try:
            session.feed(name, tensor)
        except MapperError as error:
            found += error.diagnostics
            changed = [key for key, each in before.items() if not are_same(each, model[key])]
            assert not changed, f"{fault.kind} of {name!r}: {changed} were written before the error"
    try:
        session.finish()
    except MapperError as error:
        found += error.diagnostics
    is_of_this_rank = fault.name in expected.loaded or fault.kind in ("add", "duplicate")
    assert found or not is_of_this_rank, f"{fault.kind} of {fault.name!r} in a stream: nothing is reported"
    if fault.kind in ("drop", "add", "rename"):
        extra = {each.subject for each in found} - fault.reported
        assert not extra, f"{fault.kind} of {fault.name!r} in a stream: reported {extra}"


def _require_untouched(model: Mapping[str, torch.Tensor], label: str) -> None:
    written = [name for name, tensor in model.items() if not are_same(tensor, sentinel(tensor.shape, tensor.dtype))]
    assert not written, f"{label}: {written} were written before the error"


def _difference(found: Iterable[str], wanted: Iterable[str]) -> str:
    extra, lacking = sorted(set(found) - set(wanted)), sorted(set(wanted) - set(found))
    return f"{len(extra)} too many {extra[:3]} and {len(lacking)} too few {lacking[:3]}"


__all__ = [
    "NotBuilt",
    "check_conservation",
    "check_coverage",
    "check_fault",
    "check_in_place",
    "check_layout_independence",
    "check_order",
    "check_ranks_agree",
    "check_rerooting",
    "check_round_trip",
    "program_of",
]
