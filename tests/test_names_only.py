"""A check of names alone: every name is claimed, skipped or unknown, and what is not judged is said."""

import gzip
import json
import re
from pathlib import Path

import pytest

from mapper.checkpoint import read_names
from mapper.cli import FINDINGS, FINE, USAGE
from mapper.diagnostics import MapperError
from tests.commands import codes, subjects

DEVSTRAL = Path(__file__).with_name("data") / "indexes" / "devstral.index.json.gz"
NAMES = ["--runtime", "vllm", "--names-only"]
NOT_JUDGED = "shapes, dtypes and the coverage of parameters are not judged"


def write_index(folder, change=None, *, name="model.safetensors.index.json", config="config.json"):
    """Write Devstral's index and config, changed by `change`; return the path of the index."""
    index = json.loads(gzip.decompress(DEVSTRAL.read_bytes()))
    if change is not None:
        change(index["weight_map"])
    (folder / name).write_text(json.dumps(index))
    (folder / config).write_text(DEVSTRAL.with_name("devstral.config.json").read_text())
    return folder / name


def test_the_report_says_what_was_judged_and_what_not(run, run_json):
    code, out, err = run("check", "--checkpoint", DEVSTRAL, *NAMES)
    assert (code, err) == (FINE, "")
    assert out.splitlines() == [
        "mistral vllm on tp=1,pp=1,dp=1,ep=1: names only",
        "  sources  363: 363 claimed, 0 skipped, 0 unknown",
        f"  ok: every name is accounted for; {NOT_JUDGED}",
    ]
    code, report = run_json("check", "--checkpoint", DEVSTRAL, *NAMES)
    assert code == FINE
    assert report["sources"] == {"total": 363, "loaded": 363, "elsewhere": 0, "skipped": 0, "unknown": 0}
    assert (report["ok"], report["targets"], report["bytes_per_rank"], report["findings"]) == (True, None, None, [])
    assert report["evidence"] == f"names: each is claimed, skipped or unknown; {NOT_JUDGED}"


def test_a_name_that_no_rule_names_and_one_that_is_not_there_are_findings(run_json, run, tmp_path):
    def change(names):
        names["model.layers.7.mlp.up_proj.wieght"] = names.pop("model.layers.7.mlp.up_proj.weight")

    index = write_index(tmp_path, change)
    code, report = run_json("check", "--checkpoint", index, *NAMES)
    assert code == FINDINGS
    assert report["sources"] == {"total": 363, "loaded": 362, "elsewhere": 0, "skipped": 0, "unknown": 1}
    assert codes(report) == ["M501", "M502"]
    assert subjects(report, "M501") == ["model.layers.7.mlp.up_proj.weight"]
    assert subjects(report, "M502") == ["model.layers.7.mlp.up_proj.wieght"]
    assert run("check", "--checkpoint", index, *NAMES)[1].splitlines()[-1] == f"  2 findings; {NOT_JUDGED}"


def test_a_skip_from_the_command_line_is_counted_by_name(run_json, tmp_path):
    index = write_index(tmp_path, lambda names: names.update({"vision.a": "x.safetensors", "vision.b": "x.safetensors"}))
    code, report = run_json("check", "--checkpoint", index, *NAMES, "--skip", "vision.*", "--why", "text only")
    assert code == FINE
    assert report["skipped_by"]["vision.* (command line)"] == report["sources"]["skipped"] == 2


def test_a_folder_is_read_by_its_index(run_json, tmp_path):
    write_index(tmp_path)
    assert run_json("check", "--checkpoint", tmp_path, *NAMES)[1]["sources"]["loaded"] == 363


def test_the_config_of_its_own_name_comes_before_config_json(tmp_path):
    index = write_index(tmp_path, name="devstral.index.json", config="devstral.config.json")
    (tmp_path / "config.json").write_text("{}")
    assert read_names(index).config["num_hidden_layers"] == 40
    (tmp_path / "devstral.config.json").unlink()
    assert read_names(index).config == {}
    (tmp_path / "config.json").unlink()
    assert read_names(index).config is None


def test_a_layout_is_compiled_and_may_be_refused(run):
    assert run("check", "--checkpoint", DEVSTRAL, *NAMES, "--layout", "tp=4,pp=2")[0] == FINE
    code, _, err = run("check", "--checkpoint", DEVSTRAL, *NAMES, "--layout", "tp=3")
    assert code == FINDINGS
    assert "M329 the dim 'out' of model.layers.{layer: 0...39}.self_attn.qkv_proj.weight has 32 units" in err


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda names: names.update({"lm_head.weight": "../other/model.safetensors"}), "M421"),
        (lambda names: names.update({"lm_head.weight": None}), "M422"),
        (lambda names: names.clear(), "M414"),
    ],
)
def test_an_index_that_is_wrong_is_one_error(tmp_path, change, code):
    with pytest.raises(MapperError) as raised:
        read_names(write_index(tmp_path, change))
    assert [each.code for each in raised.value.diagnostics] == [code]


def test_a_manifest_is_no_index(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"a": {"dtype": "F32", "shape": [1]}}')
    with pytest.raises(MapperError, match=re.escape("an object with a 'weight_map' of {tensor: file}")):
        read_names(path)


def test_an_absent_index_and_a_folder_without_one_are_errors(tmp_path):
    for path, code in ((tmp_path / "none.index.json", "M401"), (tmp_path, "M402")):
        with pytest.raises(MapperError) as raised:
            read_names(path)
        assert [each.code for each in raised.value.diagnostics] == [code]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--names-only", "--rank", "0"], "argument --names-only: not allowed with --rank"),
        (["--names-only", "--targets", "t.json"], "argument --names-only: not allowed with --targets"),
        (["--names-only", "--all-layouts", "2"], "argument --all-layouts: not allowed with --names-only"),
    ],
)
def test_arguments_that_ask_for_more_than_names_are_refused(run, words, problem):
    code, out, err = run("check", "--checkpoint", DEVSTRAL, "--runtime", "vllm", *words)
    assert code == USAGE
    assert problem in out + err
