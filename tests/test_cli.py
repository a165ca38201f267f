"""The command line: what each command prints, in which format, and with which exit code."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import mapper.cli.check
from mapper import yaml_source
from mapper.cli import COMMANDS, FINDINGS, FINE, INTERNAL, USAGE, main
from mapper.spec.bundled import bundled_ids
from tests.manifests import V2_LITE, V3, targets_of, write_changed, write_family
from tests.oracle.families import FAMILIES
from tests.oracle.families import write_family as write_files
from tests.oracle.goldens import compare, family_names, iter_ranks, layout_text, unwritten_mask

SPEC = bundled_ids()["deepseek_v2"]
V3_LAYOUT = "tp=8,pp=2,dp=2,ep=16"
V3_CHECK = ["check", "deepseek_v2", "--checkpoint", str(V3), "--runtime", "vllm", "--layout", V3_LAYOUT]
LITE_CHECK = ["check", "deepseek_v2", "--checkpoint", str(V2_LITE), "--runtime", "vllm"]


@pytest.fixture
def run(capsys):
    """Run a command in process; return its exit code and what it printed on stdout and stderr."""

    def run(*words):
        capsys.readouterr()
        code = main(list(map(str, words)))
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


@pytest.fixture
def run_json(run):
    """Run a command with --format json; return its exit code and the one object it printed."""

    def run_json(*words):
        code, out, _ = run(*words, "--format", "json")
        return code, json.loads(out)

    return run_json


def codes(report):
    return [each["code"] for each in report["findings"]]


def subjects(report, code):
    return [each["subject"] for each in report["findings"] if each["code"] == code]


# --- check: what holds ----------------------------------------------------------------------------------------------


def test_v3_is_proved_on_32_ranks(run_json):
    code, report = run_json(*V3_CHECK)
    assert code == FINE
    assert report["ok"] is True
    assert report["ranks"] == 32
    assert report["sources"] == {"total": 91_991, "loaded": 90_427, "elsewhere": 0, "skipped": 1_564, "unknown": 0}
    assert {rule: count for rule, count in report["skipped_by"].items() if count} == {"model.layers.{nextn}.**": 1_564}
    assert report["targets"]["complete"] == report["targets"]["total"] > 0
    assert (report["targets"]["kept"], report["targets"]["incomplete"]) == (0, 0)
    assert report["targets_declared_by"] == "spec"
    assert len(report["bytes_per_rank"]) == 32
    assert report["findings"] == []


def test_v3_text_says_what_was_proved_and_what_not(run):
    code, out, err = run(*V3_CHECK)
    assert (code, err) == (FINE, "")
    assert out.splitlines()[:3] == [
        f"deepseek_v2 vllm on {V3_LAYOUT}: 32 ranks",
        "  sources  91,991: 90,427 loaded, 1,564 skipped, 0 unknown",
        "           1,564 skipped by model.layers.{nextn}.**",
    ]
    assert out.splitlines()[-1] == "  ok: the structure is proved; what the values mean is not judged here"


@pytest.mark.parametrize("layout", ["tp=2", "tp=4,pp=2"])
def test_v2_lite_is_proved(run_json, layout):
    code, report = run_json(*LITE_CHECK, "--layout", layout)
    assert code == FINE
    assert report["sources"] == {"total": 5_291, "loaded": 5_291, "elsewhere": 0, "skipped": 0, "unknown": 0}


def test_the_spec_is_found_by_the_checkpoints_architecture(run_json):
    words = ["--checkpoint", V2_LITE, "--runtime", "vllm"]
    assert run_json("check", *words) == run_json("check", "deepseek_v2", *words)
    assert run_json("check", *words) == run_json("check", "DeepseekV2ForCausalLM", *words)
    assert run_json("check", *words)[1]["spec"] == "deepseek_v2"


def test_one_rank_counts_what_lives_elsewhere(run_json):
    code, report = run_json(*LITE_CHECK, "--layout", "tp=4,pp=2", "--rank", "5")
    assert code == FINE
    assert report["ranks"] == 1
    assert report["sources"]["loaded"] + report["sources"]["elsewhere"] == 5_291
    assert report["sources"]["elsewhere"] > 0


def test_all_layouts_of_a_config_are_proved_without_a_checkpoint(run_json):
    words = ["check", "deepseek_v2", "--config", "DeepSeek-V2-Lite-Chat", "--runtime", "vllm"]
    code, report = run_json(*words, "--all-layouts", "2")
    assert code == FINE
    assert report["layouts"] == 6
    assert report["counterexample"] is None


@pytest.mark.parametrize("prefix", ["--scope", "--mount"])
def test_a_rerooted_check_is_about_the_rerooted_names(run_json, tmp_path, prefix):
    def change(tensors):
        for name in list(tensors):
            entry = tensors.pop(name)
            if prefix == "--mount":
                tensors[f"language.{name}"] = entry
            elif name.startswith("model."):
                tensors[name.removeprefix("model.")] = entry

    manifest = write_family("deepseek_v2_lite", tmp_path, change=change)
    root = "language" if prefix == "--mount" else "model"
    words = ["check", "--checkpoint", manifest, "--runtime", "vllm"]
    assert run_json(*words)[0] == FINDINGS
    code, report = run_json(*words, prefix, root)
    assert code == FINE
    assert report["sources"]["loaded"] == report["sources"]["total"] > 0


# --- check: what fails ----------------------------------------------------------------------------------------------

LOST = "model.layers.17.mlp.experts.33.up_proj.weight"


def removed(tensors):
    del tensors[LOST]


def added(tensors):
    tensors["model.layers.60.self_attn.g_proj.weight"] = {"dtype": "BF16", "shape": [8, 8]}


def reshaped(tensors):
    tensors[LOST]["shape"] = tensors[LOST]["shape"][::-1]


@pytest.mark.parametrize(
    ("change", "code", "subject"),
    [(removed, "M501", LOST), (added, "M502", "model.layers.60.self_attn.g_proj.weight"), (reshaped, "M503", LOST)],
)
@pytest.mark.parametrize("manifest", [V3, V2_LITE], ids=["v3", "v2-lite"])
def test_one_changed_tensor_is_exactly_one_finding(run_json, tmp_path, manifest, change, code, subject):
    changed = write_changed(manifest, tmp_path, change)
    exit_code, report = run_json("check", "--checkpoint", changed, "--runtime", "vllm", "--layout", "tp=2")
    assert exit_code == FINDINGS
    assert report["ok"] is False
    assert [(each["code"], each["subject"]) for each in report["findings"]] == [(code, subject)]


def test_a_lost_layer_is_one_folded_line_in_text_and_all_names_in_json(run, run_json, tmp_path):
    def change(tensors):
        for name in list(tensors):
            if name.startswith("model.layers.9.mlp.experts."):
                del tensors[name]

    changed = write_changed(V2_LITE, tmp_path, change)
    words = ["check", "--checkpoint", changed, "--runtime", "vllm"]
    assert len(run_json(*words)[1]["findings"]) == 3 * 64
    code, out, _ = run(*words)
    assert code == FINDINGS
    lines = [line for line in out.splitlines() if "M501" in line]
    assert len(lines) == 3
    assert all("model.layers.9.mlp.experts.{0...63}." in line and line.endswith("(64 findings)") for line in lines)


def test_github_annotations_point_at_the_rule(run, tmp_path):
    changed = write_changed(V2_LITE, tmp_path, removed)
    code, out, _ = run("check", "--checkpoint", changed, "--runtime", "vllm", "--format", "github")
    assert code == FINDINGS
    (line,) = out.splitlines()
    assert re.fullmatch(rf"::error file={re.escape(str(SPEC))},line=\d+,col=\d+,title=M501::.*{re.escape(LOST)}.*", line)


def test_a_layout_that_cuts_heads_is_a_finding(run_json):
    code, report = run_json(*LITE_CHECK, "--layout", "tp=5")
    assert code == FINDINGS
    assert "M329" in codes(report)


# --- check: skips of the command line -------------------------------------------------------------------------------


def test_a_skip_lets_an_extra_tensor_through_and_is_named(run_json, tmp_path):
    changed = write_changed(V2_LITE, tmp_path, lambda tensors: tensors.update({"vision.a": {"dtype": "F32", "shape": [1]}}))
    words = ["check", "--checkpoint", changed, "--runtime", "vllm"]
    assert codes(run_json(*words)[1]) == ["M502"]
    code, report = run_json(*words, "--skip", "vision.**", "--why", "text only")
    assert code == FINE
    assert report["skipped_by"]["vision.** (command line)"] == 1
    assert {"rule": "vision.** (command line)", "why": "text only", "place": None, "count": 1} in report["skips"]


def test_several_skips_have_a_reason_each(run_json, tmp_path):
    def change(tensors):
        tensors["vision.a"] = tensors["model.layers.99.b"] = {"dtype": "F32", "shape": [1]}

    changed = write_changed(V2_LITE, tmp_path, change)
    words = ["--skip", "vision.*", "--why", "text only", "--skip", "model.layers.{num_hidden_layers + 72}.**", "--why", "b"]
    code, report = run_json("check", "--checkpoint", changed, "--runtime", "vllm", *words)
    assert code == FINE
    assert [(each["why"], each["count"]) for each in report["skips"][-2:]] == [("text only", 1), ("b", 1)]


def test_a_skip_that_hides_what_a_rule_loads_is_refused(run_json):
    code, report = run_json(*LITE_CHECK, "--skip", "lm_head.*", "--why", "no")
    assert code == FINDINGS
    (found,) = report["findings"]
    assert (found["code"], found["subject"]) == ("M313", "lm_head.weight")
    assert found["hint"] == "the skip is lm_head.* (command line)"


@pytest.mark.parametrize("pattern", ["a..b", "{layer", "{stranger}.a", "a*b"])
def test_a_skip_that_is_no_pattern_is_a_finding(run_json, pattern):
    code, report = run_json(*LITE_CHECK, "--skip", pattern, "--why", "no")
    assert code == FINDINGS
    assert codes(report)[0] in ("M131", "M303", "M315")


# --- check: changed specs -------------------------------------------------------------------------------------------


def spec_tree():
    return yaml_source.plain(yaml_source.read_file(SPEC)[0])


def write_spec(tree, folder):
    """Write a changed spec; JSON is YAML."""
    path = folder / "changed.yaml"
    path.write_text(json.dumps({**tree, "cases": []}))
    return path


def iter_rules(items, path):
    """Yield (path to the item, name in its `copy` or None, the rule), groups unfolded."""
    for number, item in enumerate(items):
        here = (*path, number)
        if "rules" in item:
            yield from iter_rules(item["rules"], (*here, "rules"))
        elif "copy" in item:
            yield from ((here, name, item) for name in item["copy"])
        elif "use" not in item:
            yield here, None, item


def vllm_rules():
    tree = spec_tree()
    yield from iter_rules(tree["blocks"]["vllm_layer"], ("blocks", "vllm_layer"))
    yield from iter_rules(tree["runtimes"]["vllm"]["rules"], ("runtimes", "vllm", "rules"))


def at(tree, path):
    for key in path:
        tree = tree[key]
    return tree


def source_patterns(rule, copied):
    if copied is not None:
        return [copied]
    if "any_of" in rule:
        return [each["source"] for each in rule["any_of"]]
    return rule.get("sources") or [rule.get("source", rule["target"])]


def spells(pattern, name):
    text = re.sub(r"\\\{.*?\\\}", "[^.]+", re.escape(pattern))
    return re.search(rf"(^|\.){text}$", name) is not None


def id_of(parameter):
    path, copied, rule = parameter
    return f"{path[1]}:{copied or rule['target']}" + ("(fused)" if "append" in rule else "")


def with_scales(tensors):
    """Add what only checkpoints with a quantised key-value cache have."""
    for kv in "kv":
        tensors[f"model.layers.0.self_attn.{kv}_scale"] = {"dtype": "F32", "shape": []}


@pytest.mark.parametrize("parameter", list(vllm_rules()), ids=id_of)
def test_a_deleted_rule_leaves_its_tensors_unknown(run_json, tmp_path, parameter):
    path, copied, rule = parameter
    options = ["--option", "fuse_shared_experts=true"] if "append" in rule else []
    tree = spec_tree()
    items = at(tree, path[:-1])
    if copied is not None and len(rule["copy"]) > 1:
        items[path[-1]]["copy"].remove(copied)
    else:
        del items[path[-1]]
    changed = write_spec(tree, tmp_path)
    found = []
    for family in ("deepseek_v3", "deepseek_v2_lite"):
        manifest = write_family(family, tmp_path, change=with_scales)
        words = ["--checkpoint", manifest, "--runtime", "vllm", "--layout", "tp=2", *options]
        code, whole = run_json("check", "deepseek_v2", *words)
        if options and codes(whole) == ["M310"] * len(whole["findings"]) != []:
            pytest.skip("the rule is not executed by this version")
        assert code == FINE
        code, report = run_json("check", changed, *words)
        unknown = subjects(report, "M502")
        assert code == (FINDINGS if unknown else FINE)
        assert report["sources"]["unknown"] == len(unknown)
        found += unknown
    assert found
    assert all(any(spells(pattern, name) for pattern in source_patterns(rule, copied)) for name in found)


def test_every_rule_of_the_runtime_was_deleted():
    rules = list(vllm_rules())
    assert len(rules) == len({(path, copied) for path, copied, _ in rules}) == 24


@pytest.mark.parametrize("position", [0, 1])
def test_a_skip_widened_to_everything_is_refused(run_json, tmp_path, position):
    tree = spec_tree()
    tree["runtimes"]["vllm"]["skip"][position]["source"] = "**"
    manifest = write_family("deepseek_v3", tmp_path)
    code, report = run_json("check", write_spec(tree, tmp_path), "--checkpoint", manifest, "--runtime", "vllm")
    assert code == FINDINGS
    assert set(codes(report)) == {"M313"}


def sharded_rules():
    return [(path, dim, rule) for path, copied, rule in vllm_rules() for dim in rule.get("shard", {}) if "append" not in rule]


@pytest.fixture(scope="module")
def golden_targets(tmp_path_factory):
    """Return a file with the parameters that vLLM has on both ranks of tp=2, per family."""
    folder = tmp_path_factory.mktemp("targets")
    files = {}
    for family in ("deepseek_v3", "deepseek_v2_lite"):
        ranks = [each for each in iter_ranks(family) if layout_text(each) == "tp=2,pp=1,dp=1,ep=1" and not each.mtp]
        assert [each.rank for each in ranks] == [0, 1]
        files[family] = folder / f"{family}.json"
        files[family].write_text(json.dumps([targets_of(each) for each in ranks]))
    return files


@pytest.mark.parametrize("parameter", sharded_rules(), ids=lambda each: f"{each[2]['target']}-{each[1]}")
def test_a_cut_moved_to_another_dim_does_not_fit_the_model(run_json, tmp_path, golden_targets, parameter):
    path, dim, rule = parameter
    tree = spec_tree()
    moved = at(tree, path)
    (other,) = moved["dims"].keys() - {dim}
    moved["shard"] = {other: "tp" if rule["shard"][dim] != "moe_tp" else "moe_tp"}
    changed = write_spec(tree, tmp_path)
    found = []
    for family, targets in golden_targets.items():
        manifest = write_family(family, tmp_path)
        words = ["--checkpoint", manifest, "--runtime", "vllm", "--layout", "tp=2", "--targets", targets]
        code, whole = run_json("check", "deepseek_v2", *words)
        assert (code, whole["targets_declared_by"]) == (FINE, "model")
        code, report = run_json("check", changed, *words)
        wrong = subjects(report, "M532")
        assert code == (FINDINGS if wrong else FINE)
        found += wrong
    assert found
    assert all(spells(rule["target"], name) for name in found)


# --- check: the model's own parameters ------------------------------------------------------------------------------


@pytest.mark.parametrize("family", family_names())
def test_the_goldens_of_every_family_fit(run_json, tmp_path, family):
    manifest = write_family(family, tmp_path)
    by_layout = {}
    for rank in iter_ranks(family):
        if not rank.redundant and rank.placement == "linear":
            by_layout.setdefault((layout_text(rank), rank.runtime), []).append(rank)
    for (layout, runtime), ranks in by_layout.items():
        words = ["check", "--checkpoint", manifest, "--runtime", runtime, "--layout", layout]
        file = tmp_path / "targets.json"
        is_whole = len(ranks) == ranks[0].tp * ranks[0].pp  # a draft model lives on the last stage alone
        for chosen in [ranks] if is_whole else [[rank] for rank in ranks]:
            file.write_text(json.dumps([targets_of(rank) for rank in chosen]))
            one = [] if is_whole else ["--rank", chosen[0].rank]
            code, report = run_json(*words, *one, "--targets", file)
            assert (code, report["findings"]) == (FINE, []), f"{layout} {runtime}"
            assert report["ranks"] == len(chosen)


def lite_targets(layout="tp=1,pp=1", rank=0):
    ranks = iter_ranks("deepseek_v2_lite")
    (found,) = [each for each in ranks if layout_text(each) == f"{layout},dp=1,ep=1" and each.rank == rank]
    return targets_of(found)


@pytest.fixture
def check_targets(run_json, tmp_path):
    """Check the tiny V2-Lite family against targets as JSON values, one file each."""
    manifest = write_family("deepseek_v2_lite", tmp_path)

    def check_targets(*values, layout="tp=1"):
        files = []
        for number, value in enumerate(values):
            files.append(tmp_path / f"targets{number}.json")
            files[-1].write_text(value if isinstance(value, str) else json.dumps(value))
        return run_json(
            "check", "--checkpoint", manifest, "--runtime", "vllm", "--layout", layout, "--targets", *map(str, files)
        )

    return check_targets


def test_targets_come_as_one_object_a_list_ranks_or_files(check_targets):
    one = lite_targets()
    for values in ([one], [[one]], [{"ranks": [one]}]):
        assert check_targets(*values)[0] == FINE
    first, second = lite_targets(layout="tp=1,pp=2"), lite_targets(layout="tp=1,pp=2", rank=1)
    for values in ([[first, second]], [{"ranks": [first, second]}], [first, second]):
        assert check_targets(*values, layout="pp=2")[0] == FINE
    assert check_targets(second, first, layout="pp=2")[0] == FINDINGS
    assert check_targets(lite_targets(layout="tp=2,pp=1"), layout="tp=2")[0] == FINE


def test_dtypes_are_read_in_both_spellings(check_targets):
    targets = lite_targets()
    for spelling in ("BF16", "bfloat16", "torch.bfloat16"):
        targets["lm_head.weight"]["dtype"] = spelling
        assert check_targets(targets)[0] == FINE
    targets["lm_head.weight"]["dtype"] = "F32"
    code, report = check_targets(targets)
    assert code == FINDINGS
    assert [(each["code"], each["subject"]) for each in report["findings"]] == [("M533", "lm_head.weight")]


def test_a_parameter_that_no_rule_fills_and_one_that_the_model_lacks_are_found(check_targets):
    targets = lite_targets()
    targets["model.extra"] = {"shape": [3], "dtype": "BF16"}
    del targets["model.norm.weight"]
    code, report = check_targets(targets)
    assert code == FINDINGS
    assert subjects(report, "M530") == ["model.extra"]
    assert subjects(report, "M531") == ["model.norm.weight"]


def test_targets_for_another_number_of_ranks_are_found(check_targets):
    code, report = check_targets([lite_targets()] * 3, layout="dp=2")
    assert code == FINDINGS
    assert codes(report) == ["M534"]


GOOD = {"shape": [3], "dtype": "BF16"}


@pytest.mark.parametrize(
    ("value", "code"),
    [
        ("[", "M412"),
        ('{"a": 1, "a": 2}', "M413"),
        (3, "M910"),
        ([], "M910"),
        ({"ranks": [4]}, "M910"),
        ({"a": GOOD, "aliases": 5}, "M910"),
        ({"a": [3]}, "M911"),
        ({"a": {"shape": [3]}}, "M911"),
        ({"a": {"shape": [-3], "dtype": "BF16"}}, "M911"),
        ({"a": {"shape": [True], "dtype": "BF16"}}, "M911"),
        ({"a": {"shape": [3], "dtype": "bf16"}}, "M911"),
        ({"a": {"shape": [3], "dtype": 16}}, "M911"),
        ({"a": GOOD, "aliases": {"b": "c"}}, "M911"),
        ({"a": GOOD, "b": GOOD, "aliases": {"b": "a"}}, "M911"),
    ],
)
def test_targets_that_are_none_are_told(check_targets, value, code):
    exit_code, report = check_targets(value)
    assert exit_code in (FINDINGS, USAGE)
    assert set(codes(report)) == {code}


def test_a_parameter_may_be_called_aliases(check_targets):
    assert subjects(check_targets({**lite_targets(), "aliases": GOOD})[1], "M530") == ["aliases"]


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
    assert "did you mean 'deepseek_v2'?" in run("lint", "deepseek_v3")[2]


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
    plain = set(process("-c", "import sys, mapper; print(*sorted(sys.modules))").stdout.split())
    added = {name for name in imported_by("--help") - plain if name.startswith("mapper")}
    assert added == {"mapper.cli", "mapper.cli.output", "mapper.cli.parser"}
    for words in (LITE_CHECK, ["plan", *LITE_CHECK[1:]], ["explain", "lm_head.weight", *LITE_CHECK[1:]], ["test"]):
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


@pytest.mark.parametrize("command", ["lint", "test"])
def test_the_bundled_specs_are_fine(run_json, command):
    code, report = run_json(command)
    assert (code, report["ok"]) == (FINE, True)
    assert [each["spec"] for each in report["specs"]] == list(bundled_ids())


@pytest.mark.parametrize("command", ["lint", "test"])
def test_a_spec_that_cannot_be_read_is_a_finding_of_its_own(run, run_json, tmp_path, command):
    path, other = tmp_path / "broken.yaml", tmp_path / "other.yaml"
    path.write_text(SPEC.read_text().replace("mesh: vllm\n", "mesch: vllm\n", 1))
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
    code, report = run_json("test", path)
    assert (code, codes(report)) == (FINDINGS, ["M802"])
    assert report["specs"][0]["misrouted"] == 1
    assert run("test", path)[1].splitlines()[-1].startswith(f"{path}: ")


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
