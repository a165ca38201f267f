"""`mapper check`: what is proved, and what each fault in a checkpoint, a spec or a model is told as."""

from __future__ import annotations

import json
import re

import pytest

from mapper.cli import FINDINGS, FINE, USAGE
from tests.commands import LITE_CHECK, LOST, SPEC, V3_CHECK, V3_LAYOUT, codes, removed, spec_tree, subjects, write_spec
from tests.manifests import V2_LITE, V3, targets_of, write_changed, write_family
from tests.oracle.families import PLAIN_V3
from tests.oracle.goldens import iter_ranks, layout_text

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
    lines = [line for line in out.splitlines() if "M501 the" in line]
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
    for block in ("vllm_layer", "vllm_model"):
        yield from iter_rules(tree["blocks"][block], ("blocks", block))
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
    is_of_int4 = "weight_shape" in rule.get("target", "")
    for family in ("deepseek_v3_int4",) if is_of_int4 else ("deepseek_v3", "deepseek_v2_lite"):
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
    assert len(rules) == len({(path, copied) for path, copied, _ in rules}) == 26


@pytest.mark.parametrize("position", [0, 2])
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


@pytest.mark.parametrize("family", PLAIN_V3)
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


def test_a_parameter_may_be_filled_through_another_of_its_names(check_targets):
    targets = lite_targets()
    targets["head.weight"] = targets.pop("lm_head.weight")
    assert check_targets(targets)[0] == FINDINGS
    targets["aliases"] = {**targets["aliases"], "lm_head.weight": "head.weight"}
    assert check_targets(targets)[0] == FINE


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
