"""Files and the index: stale copies, two splits, stray files, files that are missing or cut off, tensors in no index."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from mapper.checkpoint import Checkpoint
from mapper.diagnostics import MapperError
from mapper.export import export
from mapper.load import Loader
from tests.bugs.harness import Case, case, counted, read_case, save, tensors
from tests.loads import Tensors, all_raw, told

INDEX = "model.safetensors.index.json"
Files = Mapping[str, Tensors]


def copied(names: Iterable[str]) -> str:
    return f"runtimes: {{own: {{rules: [{{copy: [{', '.join(names)}]}}]}}}}\n"


def files_of(bug: Case) -> dict[str, Tensors]:
    """Return the tensors of every file of the scenario."""
    return {file: tensors(texts) for file, texts in bug["checkpoint"]["files"].items()}


def written(folder: Path, files: Files, index: Mapping[str, str] | None) -> Path:
    """Write the files and, where there is one, the index to a new folder."""
    path = Path(mkdtemp(dir=folder))
    for file, contents in files.items():
        (path / file).parent.mkdir(exist_ok=True)
        save_file(dict(contents), path / file)
    if index is not None:
        (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return path


def read_files(paths: Iterable[Path], targets: Tensors) -> None:
    """Load as the peers did: every tensor of every file, whichever file the index gives it to."""
    for path in paths:
        for name, tensor in load_file(path).items():
            targets[name].copy_(tensor)


def open_refused(path: Path | list[Path]) -> MapperError:
    with pytest.raises(MapperError) as caught:
        Checkpoint.open(path)
    return caught.value


# --- fi-01 --------------------------------------------------------------------------------------------------------------


@case("fi-01")
def test_stale_tensor_of_a_reused_file_is_not_read(bug: Case, tmp_path: Path) -> None:
    files, index = files_of(bug), bug["checkpoint"]["index"]
    folder = written(tmp_path, files, index)
    wrong = [bug.targets(), bug.targets()]
    read_files([folder / file for file in files], wrong[0])
    read_files([folder / file for file in reversed(files)], wrong[1])
    assert [each["experts.0.w1"].unique().tolist() for each in wrong] == [[5], [99]]  # the order of the files decides

    targets, checkpoint = bug.targets(), Checkpoint.open(folder)
    Loader(bug.program(tmp_path, copied(targets)), targets).load(checkpoint)
    assert all_raw(targets) == all_raw({name: files[index[name]][name] for name in targets})
    assert checkpoint.ignored == ("a.safetensors: 1 tensor that the index gives to b.safetensors: 'experts.0.w1'",)

    files["b.safetensors"]["gone"] = torch.zeros(2)  # in no index: told, and not loaded
    checkpoint = Checkpoint.open(written(tmp_path, files, index))
    assert "b.safetensors: 1 tensor that the index does not name: 'gone'" in checkpoint.ignored
    assert checkpoint.tensors.keys() == index.keys()


@settings(deadline=None, max_examples=25)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xyz")), min_size=1, unique=True))
def test_index_decides_among_any_copies(shared: Path, copies: list[tuple[str, str]]) -> None:
    """`copies` are the pairs of tensor and file that exist."""
    files: dict[str, Tensors] = {}
    for number, (name, file) in enumerate(copies):
        files.setdefault(f"{file}.safetensors", {})[name] = counted(10 * number, (2, 3), torch.float32)
    index = {name: f"{file}.safetensors" for name, file in copies}  # the last copy of each
    checkpoint = Checkpoint.open(written(shared, files, index))
    targets = {name: torch.full((2, 3), -1.0) for name in index}
    program = read_case("fi-01").program(shared, copied(targets), config={})
    Loader(program, targets).load(checkpoint)
    assert all_raw(targets) == all_raw({name: files[file][name] for name, file in index.items()})
    noted = {note.partition(": ")[0] for note in checkpoint.ignored}
    for file, contents in files.items():
        stale = [name for name in contents if index[name] != file]
        assert (file in noted) == bool(stale or file not in index.values())


# --- fi-02 --------------------------------------------------------------------------------------------------------------


@case("fi-02")
def test_index_decides_between_two_splits_in_one_folder(bug: Case, tmp_path: Path) -> None:
    files, index = files_of(bug), bug["checkpoint"]["index"]
    folder = written(tmp_path, files, index)
    with pytest.raises(KeyError, match="twice"):
        names_of(sorted(folder.glob("*.safetensors")))

    targets, checkpoint = bug.targets(), Checkpoint.open(folder)
    Loader(bug.program(tmp_path, copied(targets)), targets).load(checkpoint)
    assert all_raw(targets) == all_raw({name: files[index[name]][name] for name in targets})
    assert checkpoint.ignored == ("x-00001-of-00001.safetensors: not named by model.safetensors.index.json",)

    (folder / INDEX).unlink()
    error = open_refused(folder)
    first = "x-00001-of-00001.safetensors"
    assert told(error.diagnostics) == [("M450", str(folder / file)) for file in index.values()]
    assert all(repr(str(folder / file)) in str(error) for file in (first, *index.values()))


def names_of(paths: Iterable[Path]) -> list[str]:
    """List the tensors as the peer did: those of every file that lies there."""
    names: list[str] = []
    for path in paths:
        for name in load_file(path):
            if name in names:
                raise KeyError(f"{name} lies there twice")
            names.append(name)
    return names


# --- fi-04 --------------------------------------------------------------------------------------------------------------


@case("fi-04")
def test_stray_file_and_subfolder_are_named_and_not_read(bug: Case, tmp_path: Path) -> None:
    files, index = files_of(bug), bug["checkpoint"]["index"]
    folder = written(tmp_path, files, index)
    every = sorted(folder.rglob("*.safetensors"))
    with pytest.raises(RuntimeError, match="size of tensor"):
        read_files(every, bug.targets())
    assert sum(path.stat().st_size for path in every) > 2 * (folder / index["w"]).stat().st_size  # and a double read

    targets, checkpoint = bug.targets(), Checkpoint.open(folder)
    report = Loader(bug.program(tmp_path, copied(targets)), targets).load(checkpoint)
    assert all_raw(targets) == all_raw(files[index["w"]])
    assert report.bytes_read == targets["w"].nbytes
    assert checkpoint.ignored == (
        "model.safetensors: not named by model.safetensors.index.json",
        "original/: a subfolder with 1 .safetensors file",
    )


# --- fi-05 --------------------------------------------------------------------------------------------------------------


@case("fi-05")
def test_file_that_the_index_names_and_nobody_has_is_an_error(bug: Case, tmp_path: Path) -> None:
    files, index = files_of(bug), bug["checkpoint"]["index"]
    folder = written(tmp_path, files, index)
    wrong = bug.targets()
    read_files([path for path in folder.glob("*.safetensors") if path.name in index.values()], wrong)
    assert all_raw(wrong)["b.w"] == all_raw(bug.targets())["b.w"]  # never written, and never missed

    error = open_refused(folder)
    assert told(error.diagnostics) == [("M420", str(folder / INDEX))]
    assert "missing 1 file that the index names: 's2.safetensors', with 1 of 2 tensors: 'b.w'" in str(error)
    save_file({"b.w": tensors(bug["model"])["b.w"]}, folder / "s2.safetensors")
    targets = bug.targets()
    Loader(bug.program(tmp_path, copied(targets)), targets).load(Checkpoint.open(folder))
    assert all_raw(targets) == all_raw(tensors(bug["model"]))


@settings(deadline=None, max_examples=15)
@given(st.sets(st.integers(0, 3)))
def test_every_missing_file_is_named_with_its_tensors(shared: Path, present: set[int]) -> None:
    index = {f"t{number}": f"s{number}.safetensors" for number in range(4)}
    folder = written(shared, {f"s{number}.safetensors": {f"t{number}": torch.ones(2)} for number in present}, index)
    missing = [number for number in range(4) if number not in present]
    if not missing:
        assert Checkpoint.open(folder).tensors.keys() == index.keys()
        return
    (finding,) = open_refused(folder).diagnostics
    assert finding.code == "M420"
    assert f"with {len(missing)} of 4 tensors" in finding.message
    assert all((f"'s{number}.safetensors'" in finding.message) == (number in missing) for number in range(4))


# --- fi-08 --------------------------------------------------------------------------------------------------------------


@case("fi-08")
def test_file_that_is_cut_off_is_named_before_anything_is_written(bug: Case, tmp_path: Path) -> None:
    files = files_of(bug)
    folder = written(tmp_path, files, {name: file for file, contents in files.items() for name in contents})
    ((file, sizes),) = bug["checkpoint"]["bytes"].items()
    (name,) = files[file]
    whole = (folder / file).read_bytes()
    assert files[file][name].nbytes == sizes["said"]
    (folder / file).write_bytes(whole[: len(whole) - sizes["said"] + sizes["present"]])

    half = bug.targets()
    with pytest.raises(SafetensorError) as without_a_name:
        read_files(sorted(folder.glob("*.safetensors")), half)
    assert file not in str(without_a_name.value)
    assert all_raw(half)["v"] == all_raw(files["s1.safetensors"])["v"]  # one file is in, the model is half filled

    (finding,) = open_refused(folder).diagnostics
    path, expected, found = str(folder / file), len(whole), len(whole) - 4
    assert (finding.code, finding.subject) == ("M443", path)
    past = "past the end 1 tensor, first 'w'"
    assert finding.message == f"{path!r} is truncated: expected {expected} bytes, found {found}; {past}"

    (folder / file).write_bytes(whole)
    targets, checkpoint = bug.targets(), Checkpoint.open(folder)
    (folder / file).write_bytes(whole[:-4])  # and after it was opened
    before = all_raw(targets)
    with pytest.raises(MapperError) as caught:
        Loader(bug.program(tmp_path, copied(targets)), targets).load(checkpoint)
    assert told(caught.value.diagnostics) == [("M650", path)]
    assert all_raw(targets) == before


def test_file_cut_off_anywhere_is_named(tmp_path: Path) -> None:
    files = files_of(read_case("fi-08"))
    folder = written(tmp_path, files, {name: file for file, contents in files.items() for name in contents})
    path = folder / "s2.safetensors"
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        (finding,) = open_refused(folder).diagnostics
        assert (finding.code in {"M430", "M432", "M443"}, finding.subject) == (True, str(path)), size


# --- fi-10 --------------------------------------------------------------------------------------------------------------

TIED = """
config: {optional: {tie_word_embeddings: false}}
runtimes:
  own:
    skip: [{source: lm_head.weight, why: the head is the embedding, when: tie_word_embeddings}]
    rules:
      - copy: [embed.weight]
      - {copy: [lm_head.weight], when: not tie_word_embeddings}
      - {target: lm_head.weight, tie: embed.weight, when: tie_word_embeddings}
"""


def listed(folder: Path) -> dict[str, str]:
    names: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
    return names


def held(folder: Path) -> dict[str, str]:
    """Return the file of every tensor that lies in the folder's files."""
    return {name: path.name for path in folder.glob("*.safetensors") for name in load_file(path)}


@case("fi-10")
def test_exported_index_and_files_name_the_same_tensors(bug: Case, tmp_path: Path) -> None:
    sources = bug.sources()
    wrong = written(tmp_path, {"one.safetensors": sources}, {"embed.weight": "one.safetensors"})  # an index from before
    assert held(wrong).keys() - listed(wrong).keys() == {"lm_head.weight"}
    note = "one.safetensors: 1 tensor that the index does not name: 'lm_head.weight'"
    assert Checkpoint.open(wrong).ignored == (note,)

    base = save(tmp_path, sources)
    for config in (bug["config"], {"tie_word_embeddings": False}):
        targets = bug.targets()
        if config["tie_word_embeddings"]:
            targets["lm_head.weight"] = targets["embed.weight"]
        program = bug.program(tmp_path, TIED, config=config)
        Loader(program, targets).load(base)
        own = {"embed.weight"} if config["tie_word_embeddings"] else sources.keys()
        for skipped_from, names in ((base, sources.keys()), (None, own)):
            out = Path(mkdtemp(dir=tmp_path)) / "out"
            report = export([(program.plan(base), targets)], out, base=skipped_from, max_shard_bytes=1)
            assert held(out).keys() == names
            if report.files > 1:
                assert listed(out) == held(out)
                total = json.loads((out / INDEX).read_text())["metadata"]["total_size"]
                assert total == report.num_bytes == sum(sources[name].nbytes for name in names)
            assert Checkpoint.open(out).ignored == ()


@settings(deadline=None, max_examples=15)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 60))
def test_index_of_an_export_equals_the_union_of_its_files(shared: Path, sizes: list[int], limit: int) -> None:
    sources = {f"t{number}": counted(100 * number, (size,), torch.float32) for number, size in enumerate(sizes)}
    base, targets = save(shared, sources), {name: each.clone() for name, each in sources.items()}
    program = read_case("fi-10").program(shared, copied(sources), config={})
    out = Path(mkdtemp(dir=shared)) / "out"
    report = export([(program.plan(base), targets)], out, max_shard_bytes=limit)
    again = Checkpoint.open(out)
    assert (again.ignored, again.tensors.keys()) == ((), sources.keys())
    if report.files > 1:
        assert listed(out) == held(out)
        assert json.loads((out / INDEX).read_text())["metadata"]["total_size"] == again.total_bytes == 4 * sum(sizes)
