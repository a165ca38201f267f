"""The command line: what each command prints, in which format, and with which exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import mapper.cli.check
from mapper.cli import COMMANDS, FINDINGS, FINE, INTERNAL, USAGE
from mapper.spec.bundled import bundled_ids
from tests.commands import LITE_CHECK, LOST, SPEC, V3_CHECK, V3_LAYOUT, codes, removed, spec_tree, subjects, write_spec
from tests.manifests import V2_LITE, write_changed, write_family
from tests.oracle.families import FAMILIES
from tests.oracle.families import write_family as write_files
from tests.oracle.goldens import compare, unwritten_mask

# --- use ------------------------------------------------------------------------------------------------------------

MISUSES = {
    "unknown command": (["chekc"], "M901"),
    "no checkpoint": (["check", "deepseek_v2"], "M902"),
    "unknown argument": ([*LITE_CHECK, "--layuot", "tp=2"], "M902"),
    "abbreviated argument": (["check", "--check", str(V2_LITE)], "M902"),
    "argument without value": ([*LITE_CHECK, "--layout"], "M902"),
    "surplus word": ([*LITE_CHECK, "surplus"], "M902"),
    "rank is no number": ([*LITE_CHECK, "--rank", "first"], "M902"),
    "unknown format": ([*LITE_CHECK, "--format", "xml"], "M902"),
    "all layouts and a layout": (["check", "--config", "DeepSeek-V3", "--all-layouts", "2", "--layout", "tp=2"], "M902"),
    "all layouts and a rank": (["check", "--config", "DeepSeek-V3", "--all-layouts", "2", "--rank", "0"], "M902"),
    "no layouts": (["check", "--config", "DeepSeek-V3", "--all-layouts", "0"], "M902"),
    "several runtimes": (["check", "--checkpoint", str(V2_LITE)], "M905"),
    "unknown runtime": (["check", "--checkpoint", str(V2_LITE), "--runtime", "sglang"], "M305"),
    "unknown spec": (["check", "deepseek_v9", "--checkpoint", str(V2_LITE), "--runtime", "vllm"], "M140"),
    "spec file is not there": (["check", "none.yaml", "--checkpoint", str(V2_LITE), "--runtime", "vllm"], "M110"),
    "checkpoint is not there": (["check", "--checkpoint", "nowhere", "--runtime", "vllm"], "M401"),
    "unknown config": (["explain", "a", "--config", "DeepSeek-V9", "--runtime", "vllm"], "M803"),
    "layout key": ([*LITE_CHECK, "--layout", "tp=2,qp=3"], "M324"),
    "layout value": ([*LITE_CHECK, "--layout", "tp=two"], "M325"),
    "layout twice": ([*LITE_CHECK, "--layout", "tp=2,tp=3"], "M326"),
    "layout of no ranks": ([*LITE_CHECK, "--layout", "tp=0"], "M320"),
    "ep is neither": ([*LITE_CHECK, "--layout", "tp=4,ep=2"], "M321"),
    "rank outside": ([*LITE_CHECK, "--layout", "tp=2", "--rank", "2"], "M327"),
    "negative rank": ([*LITE_CHECK, "--rank", "-1"], "M327"),
    "single runtime, parallel": (
        ["check", "--checkpoint", str(V2_LITE), "--runtime", "transformers", "--layout", "tp=2"],
        "M328",
    ),
    "option without value": ([*LITE_CHECK, "--option", "fuse_shared_experts"], "M906"),
    "option twice": ([*LITE_CHECK, "--option", "a=1", "--option", "a=2"], "M907"),
    "unknown option": ([*LITE_CHECK, "--option", "fuse=true"], "M306"),
    "skip without why": ([*LITE_CHECK, "--skip", "a.**"], "M908"),
    "why without skip": ([*LITE_CHECK, "--why", "because"], "M908"),
    "empty why": ([*LITE_CHECK, "--skip", "a.**", "--why", " "], "M909"),
    "empty skip": ([*LITE_CHECK, "--skip", "", "--why", "because"], "M909"),
    "no config": (["explain", "a", "deepseek_v2", "--runtime", "vllm"], "M904"),
    "unknown code": (["explain", "M299"], "M915"),
    "load without a model": (["load", "--checkpoint", str(V2_LITE)], "M902"),
    "load of an unknown dtype": (["load", "--checkpoint", str(V2_LITE), "--model", "a:b", "--dtype", "bf16"], "M902"),
    "unknown spec to lint": (["lint", "deepseek_v9"], "M140"),
    "spec file to lint is not there": (["lint", "none.yaml"], "M110"),
}


@pytest.mark.parametrize(("words", "code"), MISUSES.values(), ids=MISUSES)
def test_wrong_use_is_told_in_the_chosen_format(run, words, code):
    exit_code, out, err = run(*words)
    assert exit_code == USAGE
    assert out == ""
    assert code in err
    if "--format" not in words:
        exit_code, out, err = run(*words, "--format=json")
        if words != [*LITE_CHECK, "--layout"]:
            assert (exit_code, err) == (USAGE, "")
            assert json.loads(out)["ok"] is False
            assert codes(json.loads(out)) == [code]
        exit_code, out, _ = run(words[0], "--format", "github", *words[1:])
        assert exit_code == USAGE
        assert f"title={code}::" in out


def test_a_near_command_and_a_near_spec_are_suggested(run):
    assert "hint: did you mean 'check'?" in run("chekc")[2]
    assert "did you mean 'deepseek_v2'?" in run("lint", "deepsek_v2")[2]


def test_the_runtimes_to_choose_from_are_listed(run):
    told = run("check", "--checkpoint", V2_LITE)[2]
    assert "the spec 'deepseek_v2' has the runtimes vllm, vllm-mtp, transformers, and none is chosen" in told


def test_a_config_without_an_architecture_needs_a_spec(run_json, tmp_path):
    config = tmp_path / "config.json"
    config.write_text("{}")
    code, report = run_json("check", "--checkpoint", V2_LITE, "--config", config, "--runtime", "vllm")
    assert (code, codes(report)) == (USAGE, ["M903"])
    config.write_text("[]")
    assert codes(run_json("check", "--checkpoint", V2_LITE, "--config", config, "--runtime", "vllm")[1]) == ["M414"]


def test_a_checkpoint_without_a_config_takes_one_from_a_file(run_json, tmp_path):
    manifest = tmp_path / "copy.header.json.gz"
    manifest.write_bytes(V2_LITE.read_bytes())
    words = ["check", "deepseek_v2", "--checkpoint", manifest, "--runtime", "vllm"]
    assert codes(run_json(*words)[1]) == ["M904"]
    assert run_json(*words, "--config", str(V2_LITE).replace(".header.json.gz", ".config.json"))[0] == FINE
    assert run_json(*words, "--config", "DeepSeek-V2-Lite-Chat")[0] == FINE


def test_the_only_runtime_of_a_spec_needs_no_choice(run_json, tmp_path):
    tree = spec_tree()
    tree["runtimes"] = {"vllm": tree["runtimes"]["vllm"]}
    code, report = run_json("check", write_spec(tree, tmp_path), "--checkpoint", V2_LITE)
    assert (code, report["runtime"]) == (FINE, "vllm")


# --- help and errors of mapper's own --------------------------------------------------------------------------------


def test_help_lists_the_commands_and_succeeds(run):
    code, out, err = run("--help")
    assert (code, err) == (FINE, "")
    assert all(f"  {name} " in out for name in COMMANDS)
    assert (run("-h")[1], run()[::2]) == (out, (USAGE, out))
    assert run("--version")[1].startswith("mapper 0")


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_has_an_example_and_the_exit_codes(run, command):
    code, out, _ = run(command, "--help")
    assert code == FINE
    assert f"  mapper {command}" in out
    assert "exit codes: 0 fine, 1 findings, 2 wrong use, 3" in out


def test_an_error_of_mappers_own_is_told_as_a_bug(run, monkeypatch):
    def fail(*_, **__):
        raise ZeroDivisionError("a slip")

    monkeypatch.setattr(mapper.cli.check, "check", fail)
    code, out, err = run(*LITE_CHECK)
    assert (code, out) == (INTERNAL, "")
    assert "Traceback" in err
    assert "ZeroDivisionError: a slip" in err
    assert "This is a bug in mapper" in err
    code, out, err = run(*LITE_CHECK, "--format", "json")
    report = json.loads(out)
    assert code == INTERNAL
    assert (report["ok"], codes(report)) == (False, ["M990"])
    assert "a slip" in report["internal_error"]
    assert "Traceback" in err


def process(*words, **arguments):
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=60, check=False, **arguments)


def test_python_m_mapper_runs_and_returns_the_exit_code():
    done = process("-m", "mapper", *LITE_CHECK, "--layout", "tp=2", "--format", "json")
    assert (done.returncode, done.stderr) == (FINE, "")
    assert json.loads(done.stdout)["ok"] is True
    assert process("-m", "mapper", "chekc").returncode == USAGE


def imported_by(*words):
    program = "import sys; from mapper.cli import main; main(sys.argv[1:]); print(*sorted(sys.modules), file=sys.stderr)"
    return set(process("-c", program, *map(str, words)).stderr.split())


def test_help_imports_no_command_and_no_command_but_load_imports_torch():
    heavy = {"torch", "numpy", "yaml", "mapper.spec", "mapper.compiler", "mapper.checkpoint", "mapper.report"}
    assert not heavy & imported_by("--help")
    for words in (
        LITE_CHECK,
        ["plan", *LITE_CHECK[1:]],
        ["explain", "lm_head.weight", *LITE_CHECK[1:]],
        ["test", "--examples", "0"],
    ):
        assert not {"torch", "numpy", "transformers"} & imported_by(*words)


def test_a_reader_that_stops_early_is_no_error():
    words = [sys.executable, "-m", "mapper", "plan", *LITE_CHECK[1:], "--steps"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout.readline().startswith("deepseek_v2 vllm")
        running.stdout.close()
        assert running.stderr.read() == ""
        assert running.wait(timeout=60) == FINE


def test_a_name_that_the_terminal_cannot_show_is_escaped(tmp_path):
    changed = write_changed(V2_LITE, tmp_path, lambda tensors: tensors.update({"wéight": {"dtype": "F32", "shape": [1]}}))
    done = process(
        "-m", "mapper", "check", "--checkpoint", str(changed), "--runtime", "vllm", env={"PYTHONIOENCODING": "ascii"}
    )
    assert done.returncode == FINDINGS
    assert "w\\xe9ight" in done.stdout


# --- plan -----------------------------------------------------------------------------------------------------------


def test_a_plan_is_told_rule_by_rule(run_json):
    code, report = run_json("plan", *V3_CHECK[1:], "--rank", "17")
    assert code == FINE
    (rule,) = [each for each in report["rules"] if each["targets"][0].endswith("w13_weight")]
    assert rule["targets"] == ["model.layers.{3...30}.mlp.experts.routed_experts.w13_weight"]
    assert (rule["num_targets"], rule["num_slots"]) == (28, 16)
    assert (rule["dtype"], rule["shape"]) == ("F8_E4M3", [16, 4096, 7168])
    assert rule["bytes"] == rule["bytes_read"] == 28 * 16 * 4096 * 7168
    gate, up = rule["sources"]
    assert gate["names"] == ["model.layers.{3...30}.mlp.experts.{144...159}.gate_proj.weight"]
    assert gate["count"] == up["count"] == 28 * 16
    assert up["boxes"] == [{"source": [[0, 2048], [0, 7168]], "target": [[2048, 4096], [0, 7168]]}]


def test_a_plans_totals_are_those_of_the_check(run_json):
    _, checked = run_json(*V3_CHECK)
    for rank in (17, 31):
        _, planned = run_json("plan", *V3_CHECK[1:], "--rank", rank)
        assert planned["totals"]["bytes"] == checked["bytes_per_rank"][rank]
        assert sum(rule["bytes"] for rule in planned["rules"]) == planned["totals"]["bytes"]
        assert sum(each["count"] for rule in planned["rules"] for each in rule["sources"]) == planned["totals"]["loaded"]


def test_steps_are_every_copy(run, run_json, tmp_path):
    manifest = write_family("deepseek_v3_fp8", tmp_path)
    words = ["plan", "--checkpoint", manifest, "--runtime", "vllm", "--layout", "tp=2,pp=2", "--rank", "1"]
    _, report = run_json(*words, "--steps")
    assert "steps" not in run_json(*words)[1]
    first = report["steps"][0]
    assert first == {
        "source": "model.embed_tokens.weight",
        "source_box": [[160, 300], [0, 256]],
        "target": "model.embed_tokens.weight",
        "target_box": [[0, 140], [0, 256]],
    }
    assert len({each["source"] for each in report["steps"]}) == report["totals"]["loaded"]
    lines = run(*words, "--steps")[1].splitlines()
    assert "  model.embed_tokens.weight[160:300, 0:256] -> model.embed_tokens.weight[0:140, 0:256]" in lines
    assert "    padding [140:160, 0:256]" in lines


def test_a_plan_with_findings_names_them_and_fails(run_json, tmp_path):
    changed = write_changed(V2_LITE, tmp_path, removed)
    code, report = run_json("plan", "--checkpoint", changed, "--runtime", "vllm")
    assert code == FINDINGS
    assert [(each["code"], each["subject"]) for each in report["findings"]] == [("M501", LOST)]


def test_targets_of_several_dtypes_are_told_apart(run_json, tmp_path):
    def change(tensors):
        tensors["model.layers.1.input_layernorm.weight"]["dtype"] = "F32"

    manifest = write_family("deepseek_v2_lite", tmp_path, change=change)
    _, report = run_json("plan", "--checkpoint", manifest, "--runtime", "vllm")
    norms = [each for each in report["rules"] if each["targets"][0].endswith("input_layernorm.weight")]
    assert [(each["targets"], each["dtype"], each["bytes"]) for each in norms] == [
        (["model.layers.{0, 2}.input_layernorm.weight"], "BF16", 512),
        (["model.layers.1.input_layernorm.weight"], "F32", 512),
    ]
    assert [each["sources"][0]["names"] for each in norms] == [each["targets"] for each in norms]


# --- explain --------------------------------------------------------------------------------------------------------


def test_a_name_is_explained_with_a_checkpoint_and_with_a_config(run, run_json):
    name = "model.layers.3.mlp.experts.7.gate_proj.weight"
    code, report = run_json("explain", name, *V3_CHECK[1:])
    assert code == FINE
    assert report["source"]["outcome"] == "loaded"
    assert report["source"]["dtype"] == "F8_E4M3"
    assert report["source"]["rules"][0]["copies"] == [
        {
            "ranks": [0],
            "source": name,
            "source_box": [[0, 2048], [0, 7168]],
            "target": "model.layers.3.mlp.experts.routed_experts.w13_weight",
            "target_box": [[7, 8], [0, 2048], [0, 7168]],
        }
    ]
    code, out, _ = run("explain", name, "--config", "DeepSeek-V3", "--runtime", "vllm", "--layout", V3_LAYOUT, "--rank", "0")
    assert code == FINE
    assert f"{name}[0:2048, 0:7168] -> model.layers.3.mlp.experts.routed_experts.w13_weight[7, 0:2048, 0:7168]" in out


def test_an_unknown_name_fails_with_what_is_near(run, run_json):
    words = ["explain", "model.layers.61.mlp.gate.weight", "--config", "DeepSeek-V3", "--runtime", "vllm"]
    assert run_json(*words)[1]["source"]["outcome"] == "skipped"
    words[1] = "model.layers.62.mlp.gate.weight"
    code, report = run_json(*words)
    assert (code, report["ok"]) == (FINDINGS, False)
    assert report["source"]["near"][0]["differences"] == [
        {"found": "62", "expected": "3...60", "why": "layer 62 is outside 3...60"}
    ]
    code, out, _ = run(*words, "--format", "github")
    assert code == FINDINGS
    assert out.startswith("::error title=M916::'model.layers.62.mlp.gate.weight' is no source and no target")


@pytest.mark.parametrize("code", ["M305", "m305"])
def test_a_code_is_explained_with_why_and_fix(run, run_json, code):
    exit_code, out, _ = run("explain", code)
    assert exit_code == FINE
    assert out.splitlines() == [
        "M305: the spec {spec} has no runtime {runtime}; it has {known}",
        "  why  A runtime names whose module layout the rules describe.",
        "  fix  Choose one of the runtimes listed.",
    ]
    assert run_json("explain", code)[1]["code"] == "M305"


# --- lint and test --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [["lint"], ["test", "--examples", "0"]])
def test_the_bundled_specs_are_fine(run_json, command):
    code, report = run_json(*command)
    assert (code, report["ok"]) == (FINE, True)
    assert [each["spec"] for each in report["specs"]] == list(bundled_ids())


@pytest.mark.parametrize("command", ["lint", "test"])
def test_a_spec_that_cannot_be_read_is_a_finding_of_its_own(run, run_json, tmp_path, command):
    path, other = tmp_path / "broken.yaml", tmp_path / "other.yaml"
    path.write_text(SPEC.read_text().replace("\nruntimes:\n", "\nruntymes:\n", 1))
    other.write_text("- a list")
    code, report = run_json(command, path, other)
    assert code == FINDINGS
    assert [(each["spec"], each["ok"]) for each in report["specs"]] == [(str(path), False), (str(other), False)]
    assert {each["place"]["file"] for each in report["findings"]} == {str(path), str(other)}
    assert all(each["code"].startswith("M1") for each in report["findings"])
    assert f"{path}:" in run(command, path)[1]


def test_a_wrong_case_is_a_finding(run, run_json, tmp_path):
    path = tmp_path / "wrong.yaml"
    path.write_text(SPEC.read_text().replace("w13_weight[7, 2048:4096]", "w13_weight[8, 2048:4096]", 1))
    code, report = run_json("test", path, "--examples", "0")
    assert (code, codes(report)) == (FINDINGS, ["M802"])
    assert report["specs"][0]["misrouted"] == 1
    assert run("test", path, "--examples", "0")[1].splitlines()[-1].startswith(f"{path}: ")


def test_synthetic_loads_are_counted_and_a_broken_guarantee_is_a_finding(run_json, monkeypatch):
    code, report = run_json("test", SPEC, "--examples", "1")
    assert (code, report["ok"]) == (FINE, True)
    loads = report["specs"][0]["loads"]
    assert len(loads) == 27
    assert set(loads.values()) == {1}
    monkeypatch.setattr("mapper.transfer.copy.copy_box", lambda *arguments: None)
    monkeypatch.setattr("mapper.load.loader.copy_box", lambda *arguments: None)
    code, report = run_json("test", SPEC, "--examples", "1")
    assert (code, set(codes(report))) == (FINDINGS, {"M830"})
    assert "breaks the guarantee 'coverage': rank" in report["findings"][0]["message"]


def test_advice_of_lint_does_not_fail(run_json, monkeypatch):
    import mapper.cli.lint
    from mapper.diagnostics import Diagnostic

    for severity, expected in (("warning", FINE), ("error", FINDINGS)):
        monkeypatch.setattr(mapper.cli.lint, "lint", lambda _, severity=severity: (Diagnostic("M810", "x", severity=severity),))
        code, report = run_json("lint", "deepseek_v2")
        assert (code, report["ok"]) == (expected, expected == FINE)
        assert (report["specs"][0]["errors"], report["specs"][0]["warnings"]) == ((0, 1) if expected == FINE else (1, 0))


# --- load -----------------------------------------------------------------------------------------------------------

FACTORY = """
import json
from tests.oracle.goldens import iter_ranks, layout_text, sentinel_tensors

MADE = {}

def build(layout, rank):
    (golden,) = [
        each for each in iter_ranks("deepseek_v2_lite")
        if (each.tp, each.pp, each.rank, each.ep, each.redundant) == (layout.tp, layout.pp, rank, False, 0)
        and each.placement == "linear"
    ]
    MADE["golden"], MADE["tensors"] = golden, sentinel_tensors(golden)
    return MADE["tensors"]

def fail():
    raise RuntimeError("no memory")
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_files("deepseek_v2_lite", tmp_path_factory.mktemp("files"))


@pytest.fixture
def factory(tmp_path, monkeypatch):
    (tmp_path / "a_factory.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield "a_factory:build"
    sys.modules.pop("a_factory", None)


def test_a_factorys_rank_is_loaded_byte_for_byte(run_json, files, factory):
    words = ["load", "--checkpoint", files, "--model", factory, "--runtime", "vllm", "--layout", "tp=2,pp=2", "--rank", "3"]
    code, report = run_json(*words)
    assert (code, report["ok"], report["rank"]) == (FINE, True, 3)
    made = sys.modules["a_factory"].MADE
    assert compare(made["golden"], made["tensors"]) == []
    assert report["targets"] == len(made["golden"].params)


def test_progress_goes_to_stderr_when_asked_for(run, files, factory):
    words = ["load", "--checkpoint", files, "--model", factory, "--runtime", "vllm"]
    code, out, err = run(*words)
    assert (code, err) == (FINE, "")
    assert out.startswith("deepseek_v2 vllm, rank 0 of tp=1,pp=1,dp=1,ep=1\n")
    code, _, err = run(*words, "--progress")
    assert code == FINE
    assert "100%" in err


def test_a_transformers_class_is_built_on_meta_and_loaded(run_json, tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    lite = FAMILIES["deepseek_v2_lite"]
    # All layers dense: Transformers keeps a router in float32, whatever the checkpoint holds.
    monkeypatch.setitem(FAMILIES, "dense", replace(lite, config={**lite.config, "first_k_dense_replace": 3}))
    files = write_files("dense", tmp_path / "dense")
    code, report = run_json("load", "--checkpoint", files, "--model", "DeepseekV2ForCausalLM", "--dtype", "bfloat16")
    assert report["findings"] == []
    assert (code, report["runtime"]) == (FINE, "transformers")
    assert report["loaded"] == report["sources"] > 0


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        ("no_such_package.models:build", "ModuleNotFoundError"),
        ("a_factory:nothing", "AttributeError"),
        ("a_factory:fail", "RuntimeError: no memory"),
        ("a_factory:MADE", "TypeError"),
        ("NoSuchModel", "NoSuchModel"),
    ],
)
def test_a_model_that_cannot_be_built_is_told_with_its_reason(run_json, files, factory, model, problem):
    code, report = run_json("load", "--checkpoint", files, "--model", model, "--runtime", "vllm")
    assert code == USAGE
    (found,) = report["findings"]
    assert found["code"] == "M912"
    assert problem in found["message"]
    assert found["hint"].startswith("raised at ")


def test_a_model_that_does_not_fit_is_told_and_left_alone(run_json, files, factory, tmp_path):
    (tmp_path / "a_factory.py").write_text(FACTORY.replace("tensors(golden)", "tensors(golden) | {'extra': torch.zeros(3)}"))
    (tmp_path / "a_factory.py").write_text("import torch\n" + (tmp_path / "a_factory.py").read_text())
    code, report = run_json("load", "--checkpoint", files, "--model", factory, "--runtime", "vllm")
    assert (code, codes(report), subjects(report, "M530")) == (FINDINGS, ["M530"], ["extra"])
    made = sys.modules["a_factory"].MADE
    assert all(unwritten_mask(made["tensors"][each.name]).all() for each in made["golden"].params)


def test_a_manifest_cannot_be_loaded(run_json, factory):
    code, report = run_json("load", "--checkpoint", V2_LITE, "--model", factory, "--runtime", "vllm")
    assert (code, codes(report)) == (FINDINGS, ["M651"])


def test_the_paths_of_findings_are_files_that_exist(run_json, tmp_path):
    changed = write_changed(V2_LITE, tmp_path, removed)
    _, report = run_json("check", "--checkpoint", changed, "--runtime", "vllm")
    assert all(Path(each["place"]["file"]).is_file() for each in report["findings"])
