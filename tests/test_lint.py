"""A spec that lints clean, and for each finding the smallest spec that has it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from mapper.diagnostics import Diagnostic, finding, render_github, render_text
from mapper.lint import lint
from mapper.lint.programs import attempt_all
from mapper.schema import validate
from mapper.spec import load_spec
from mapper.spec.bundled import bundled_ids, read_builtin
from mapper.spec.check import check_spec
from mapper.spec.inherit import merge
from mapper.spec.model import Spec
from mapper.spec.parse import parse_spec
from mapper.yaml_source import parse_text

CONFIG = {
    "architectures": ["TinyForCausalLM"], "num_layers": 2, "num_heads": 8, "num_groups": 8, "head_dim": 4, "inner": 16,
    "mlp_bias": False, "fuse": True,
}  # fmt: skip
HEAD = """\
spec: 1
id: tiny
title: Tiny
version: 1.0.0
architectures: [TinyForCausalLM]
config:
  required: [num_layers, num_heads, num_groups, head_dim, inner, fuse]
let:
  q_size: num_heads * head_dim
  has_many: num_layers > 5
  is_odd: fuse and is_flipped
  num_blocks_groups: max(num_groups, 1)
options:
  is_flipped: {default: false}
index:
  layer: {count: num_layers, axis: pp}
  none: {first: 9, count: num_layers - 2}
runtimes:
  vllm:
    mesh: vllm
    rules:
      - copy:
          - norm.weight
"""
CASE = "cases:\n  - config: {config}\n    runtime: {runtime}\n    unknown:\n      - no.such.weight\n"


def spec_of(rules="", *, section="", config=None, case=None):
    """Return a spec with these rules (and sections beside them) in its runtime, and one case with the config."""
    case = CASE.format(config=json.dumps({**CONFIG, **(config or {})}), runtime="vllm") if case is None else case
    node = parse_text(HEAD.replace("    rules:\n", section + "    rules:\n") + rules + case, file="tiny.yaml")
    assert not validate(node)
    spec = parse_spec(merge(None, node), builtin=read_builtin())
    assert not check_spec(spec)
    return spec


def only_finding(*arguments, **keywords):
    (found,) = lint(spec_of(*arguments, **keywords))
    return found


def place_text(diagnostic):
    return diagnostic.place.text[diagnostic.place.column - 1 :]


# --- the bundled specs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(bundled_ids()))
def test_every_bundled_spec_lints_clean(name):
    assert lint(load_spec(name)) == ()


def asked_for(spec: Spec) -> list[Diagnostic]:
    """Return the cases that a spec without any is asked for; rules that its own cases alone reach are other findings."""
    found = lint(replace(spec, cases=()))
    assert {each.code for each in found} <= {"M810", "M814", "M815"}
    return [each for each in found if each.code == "M810"]


def test_a_bundled_spec_without_its_cases_lacks_them_for_every_runtime():
    spec = load_spec("deepseek_v2")
    found = asked_for(spec)
    assert {each.severity for each in found} == {"warning"}
    assert sorted(each.subject.removeprefix("model.layers.{layer}.") for each in found) == [
        "mlp.experts.gate_up_proj{leaf}",
        "mlp.experts.routed_experts.w13_{leaf}",
        "mlp.gate_up_proj.{leaf}",
        "mlp.shared_experts.gate_up_proj.{leaf}",
        "mtp_block.mlp.experts.routed_experts.w13_{leaf}",
        "mtp_block.mlp.shared_experts.gate_up_proj.{leaf}",
    ]


def test_the_case_to_add_is_for_the_config_with_most_leaves():
    spec = load_spec("deepseek_v2")
    found = asked_for(replace(spec, runtimes={"vllm": spec.runtimes["vllm"]}))
    assert [each.hint.count("config: DeepSeek-V3\n") for each in found] == [1, 1, 1]
    assert [each.hint.count("weight_scale_inv: ") for each in found] == [2, 2, 2]


def test_the_lines_that_lint_asks_for_silence_it():
    spec = load_spec("deepseek_v2")
    text = "".join(each.hint.removeprefix("add under `cases`:\n") + "\n" for each in asked_for(spec))
    rules, cases = bundled_ids()["deepseek_v2"].read_text().split("\ncases:")
    small = cases[cases.index("  # Experts in int4") :]
    node = parse_text(f"{rules}\ncases:\n{text}{small}", file="x.yaml")
    assert not validate(node)
    assert lint(parse_spec(merge(None, node), builtin=read_builtin())) == ()


def test_every_runtime_is_compiled_with_every_config_on_many_layouts():
    attempts = attempt_all(load_spec("deepseek_v2"))
    compiled = {(attempt.config, attempt.runtime) for attempt, _ in attempts.programs if not attempt.config.startswith("{")}
    assert compiled == {
        ("DeepSeek-V3", "vllm"), ("DeepSeek-V3", "vllm-mtp"), ("DeepSeek-V3", "transformers"),
        ("DeepSeek-V2-Lite-Chat", "vllm"), ("DeepSeek-V2-Lite-Chat", "transformers"),
    }  # fmt: skip
    layouts = {attempt.layout for attempt, _ in attempts.programs if attempt.runtime == "vllm"}
    assert len(layouts) == 12
    assert {axis: max(getattr(layout, axis) for layout in layouts) for axis in ("tp", "pp", "dp", "ep")} == {
        "tp": 8, "pp": 2, "dp": 2, "ep": 8,
    }  # fmt: skip


# --- what compiling finds -------------------------------------------------------------------------------------------


def test_a_tiny_spec_lints_clean():
    assert lint(spec_of()) == ()


def test_an_overlap_is_reported_once_with_its_witness_and_where_it_was_found():
    source, target = lint(spec_of("      - target: norm.weight\n"))
    assert (source.code, source.message, source.severity) == ("M311", "two rules map the source 'norm.weight'", "error")
    assert (target.code, target.message, target.severity) == ("M312", "two rules write the target 'norm.weight'", "error")
    assert source.hint == target.hint == "found with the config of a case, vllm, tp=1,pp=1,dp=1,ep=1 and 13 more"


def test_an_overlap_on_some_layouts_only_is_found():
    rules = "      - target: layers.{layer}.weight\n      - target: layers.1.weight\n        when: tp == 4 and ep == 1\n"
    found = [each for each in lint(spec_of(rules)) if each.code == "M311"]
    assert [(each.subject, each.hint) for each in found] == [
        ("layers.1.weight", "found with the config of a case, vllm, tp=4,pp=1,dp=1,ep=1")
    ]


def test_an_overlap_under_an_option_only_is_found():
    rules = "      - target: layers.{layer}.weight\n      - target: layers.1.weight\n        when: is_odd\n"
    found = [each for each in lint(spec_of(rules)) if each.code == "M311"]
    assert [each.hint for each in found] == [
        "found with the config of a case, vllm, tp=1,pp=1,dp=1,ep=1, is_flipped=true and 1 more"
    ]


def test_a_wide_skip_is_found():
    found = only_finding(section="    skip:\n      - source: norm.*\n        why: test\n")
    assert (found.code, found.message) == ("M313", "a skip also matches 'norm.weight', which a rule loads")


def test_a_layout_that_a_config_cannot_take_is_no_finding():
    rules = "      - target: w.weight\n        dims: {out: 7, in: 3}\n        shard: {out: tp}\n"
    assert lint(spec_of(rules)) == ()


def test_a_failing_case_is_found_once():
    case = CASE.format(config=json.dumps(CONFIG), runtime="vllm").replace("no.such", "norm")
    found = only_finding(case=case)
    assert (found.code, found.severity, place_text(found)) == ("M801", "error", "norm.weight")


# --- parts of equal size --------------------------------------------------------------------------------------------

FUSED = """\
      - target: layers.{layer}.kv.weight
        sources:
          - layers.{layer}.q.weight
          - layers.{layer}.k.weight
          - layers.{layer}.v.weight
        dims: {out: [6, 3, 3], in: 5}
"""


def test_parts_of_equal_size_need_a_case():
    found = only_finding(FUSED)
    assert (found.code, found.severity, place_text(found)) == ("M810", "warning", "layers.{layer}.kv.weight")
    assert found.message == (
        "no case of the runtime 'vllm' pins parts 1 and 2 of the rule for 'layers.{layer}.kv.weight', "
        "which has parts of equal size"
    )
    assert found.hint.splitlines()[0] == "add under `cases`:"
    assert yaml.safe_load(found.hint.split("\n", 1)[1]) == [
        {
            "config": CONFIG,
            "runtime": "vllm",
            "maps": {
                "layers.0.k.weight": "layers.0.kv.weight[6:9]",
                "layers.0.v.weight": "layers.0.kv.weight[9:12]",
            },
        }
    ]


def pinned(*lines):
    maps = "".join(f"      {line}\n" for line in lines)
    return CASE.format(config=json.dumps(CONFIG), runtime="vllm") + "    maps:\n" + maps


def test_each_equal_part_must_be_pinned():
    one = "layers.1.k.weight: layers.1.kv.weight[6:9]"
    assert lint(spec_of(FUSED, case=pinned(one, "layers.0.v.weight: layers.0.kv.weight[9:12]"))) == ()
    found = only_finding(FUSED, case=pinned(one))
    assert found.message.startswith("no case of the runtime 'vllm' pins part 2 of the rule for")
    assert "layers.0.k.weight" not in found.hint


def test_a_line_that_fails_pins_nothing():
    wrong = ("layers.1.k.weight: layers.1.kv.weight[9:12]", "layers.1.v.weight: layers.1.kv.weight[6:9]")
    assert [each.code for each in lint(spec_of(FUSED, case=pinned(*wrong)))] == ["M810", "M802", "M802"]


def test_parts_of_distinct_sizes_and_one_source_for_all_need_no_case():
    distinct = FUSED.replace("[6, 3, 3]", "[6, 3, 2]")
    fused = "      - target: layers.{layer}.qkv.weight\n        dims: {out: [6, 3, 3], in: 5}\n"
    assert lint(spec_of(distinct)) == lint(spec_of(fused)) == ()


# --- cuts and padding -----------------------------------------------------------------------------------------------


def cut(size, shard="tp"):
    return f"      - target: q.weight\n        dims: {{out: {size}, in: 5}}\n        shard: {{out: {shard}}}\n"


@pytest.mark.parametrize(
    ("size", "factor", "units"),
    [
        ("num_heads * head_dim", "num_heads", "`units: num_heads`"),
        ("q_size", "num_heads", "`units: num_heads`"),
        ("2 * q_size", "num_heads", "`units: num_heads`"),
        ("num_heads * (head_dim + 3)", "num_heads", "`units: num_heads`"),
        ("q_size if fuse else inner", "num_heads", "`units: num_heads`"),
        ("q_size // 2", "num_heads", "`units: num_heads`"),
        ("4 * num_blocks_groups", "num_blocks_groups", "`units: num_blocks_groups`"),
        ("8 * head_dim", "head_dim", "the number of heads as `units`"),
        ("8 * (head_dim + head_dim)", "head_dim + head_dim", "the number of heads as `units`"),
        ("[q_size, inner]", "num_heads", "`units: num_heads`"),
    ],
)
def test_a_cut_of_heads_needs_units(size, factor, units):
    found = only_finding(cut(size))
    text = size[1:].split(",")[0] if size.startswith("[") else size
    assert (found.code, found.severity, place_text(found)) == ("M811", "warning", "out: tp}")
    assert (
        found.message
        == f"the dim 'out' of the rule for 'q.weight' is cut without `units`, and its size has the factor {factor!r}"
    )
    assert found.hint == f"write {units}, or `units: {text}` to insist"


@pytest.mark.parametrize(
    "rules",
    [
        cut("q_size", "{axis: tp, units: num_heads}"),
        cut("q_size", "{axis: tp, units: q_size}"),
        cut("num_heads"),
        cut("inner * 2"),
        cut("num_heads + inner"),
        cut("[q_size, inner]", "{axis: [tp, null], units: [num_heads, inner]}"),
    ],
)
def test_a_cut_that_cannot_part_a_head_or_says_its_units_is_no_finding(rules):
    assert lint(spec_of(rules)) == ()


def pad(how, *, target="sink"):
    return f"      - target: {target}\n        dims: {{out: num_heads}}\n        shard: {{out: {{axis: tp, {how}}}}}\n"


@pytest.mark.parametrize(("how", "key"), [("pad_rank: 64", "pad_rank"), ("units: 4, uneven: pad", "uneven")])
def test_padding_of_a_bare_tensor_needs_a_fill(how, key):
    (found,) = (each for each in lint(spec_of(pad(how))) if each.severity == "warning")
    assert (found.code, found.message) == ("M812", f"the dim 'out' of the rule for 'sink' is padded by `{key}` without `fill`")


@pytest.mark.parametrize(
    "rules", [pad("pad_rank: 64, fill: -inf"), pad("pad_rank: 64, fill: 0"), pad("units: 4, uneven: short")]
)
def test_padding_with_a_fill_is_no_advice(rules):
    assert [each for each in lint(spec_of(rules)) if each.severity == "warning"] == []


def test_a_rule_in_two_runtimes_is_doubted_once():
    spec = spec_of(cut("q_size"))
    twice = replace(spec, runtimes={**spec.runtimes, "other": replace(spec.runtimes["vllm"], name="other")})
    assert [each.code for each in lint(twice)] == ["M811"]


ROW_CUT = """\
      - target: layers.{layer}.mlp.down.{leaf}
        dims: {out: 3, in: inner}
        shard: {in: tp}
"""


def test_a_bias_beside_a_cut_inner_dim_is_doubted_where_the_config_has_one():
    found = only_finding(ROW_CUT, config={"mlp_bias": True})
    assert (found.code, found.severity, place_text(found)) == ("M813", "warning", "layers.{layer}.mlp.down.{leaf}")
    assert found.message == (
        "the rule for 'layers.{layer}.mlp.down.{leaf}' cuts 'in' and does not say which ranks hold the bias, "
        "which the config of a case has"
    )


def test_a_bias_that_the_config_does_not_speak_of_is_no_finding():
    assert lint(spec_of(ROW_CUT)) == lint(spec_of(ROW_CUT, config={"attention_bias": True})) == ()


# --- reach ----------------------------------------------------------------------------------------------------------


def test_a_rule_that_no_config_reaches_is_advice():
    found = only_finding("      - target: far.weight\n        when: has_many\n")
    assert (found.code, found.message, found.severity, place_text(found)) == (
        "M814", "no config reaches the rule for 'far.weight'", "warning", "far.weight"
    )  # fmt: skip


def test_a_rule_over_an_empty_index_is_not_reached():
    assert [each.message for each in lint(spec_of("      - target: x.{none}.weight\n"))] == [
        "no config reaches the rule for 'x.{none}.weight'"
    ]


def test_a_rule_under_an_option_is_reached_by_turning_it_over():
    assert lint(spec_of("      - target: odd.weight\n        when: is_odd\n")) == ()


def test_a_rule_under_two_options_is_reached_by_a_case_that_pins_both():
    rules, case = (
        "      - target: odd.weight\n        when: is_odd and is_red\n",
        CASE.format(config=json.dumps(CONFIG), runtime="vllm"),
    )
    head = HEAD.replace("  is_flipped:", "  is_red: {default: false}\n  is_flipped:")
    both = case + "    options: {is_flipped: true, is_red: true}\n"
    found = []
    for pinned in (case, both):
        node = parse_text(head + rules + pinned, file="tiny.yaml")
        found.append([each.code for each in lint(parse_spec(merge(None, node), builtin=read_builtin()))])
    assert found == [["M814"], []]


def test_a_rule_under_an_option_that_is_not_executed_yet_is_no_finding():
    rules = (
        "      - target: odd.weight\n        when: is_odd\n        cast: float32\n"
        "      - target: even.weight\n        when: is_odd\n"
    )
    assert lint(spec_of(rules)) == ()


def test_a_skip_and_a_keep_that_no_config_reaches_are_advice():
    section = (
        "    skip:\n      - source: x.{none}.**\n        why: test\n"
        "      - source: y\n        why: test\n        when: has_many\n"
        "      - source: '**.inv_freq'\n        why: test\n"
        "    keep:\n      - target: z.{none}\n        why: test\n"
    )
    assert [(each.code, each.message) for each in lint(spec_of(section=section))] == [
        ("M815", "no config reaches the skip 'x.{none}.**'"),
        ("M815", "no config reaches the skip 'y'"),
        ("M815", "no config reaches the keep 'z.{none}'"),
    ]


def test_what_a_spec_inherits_is_judged_where_it_is_written(tmp_path):
    skip = "    skip: [{{source: {}, why: test, when: has_many}}]\n    rules:\n"
    rule = "      - {{target: {}.weight, when: has_many}}\n"
    parent = HEAD.replace("    rules:\n", skip.format("a")) + rule.format("far")
    case = CASE.format(config=json.dumps(CONFIG), runtime="vllm")
    (tmp_path / "tiny.yaml").write_text(parent + case)
    child = "spec: 1\nid: child\nextends: tiny\nruntimes:\n  vllm:\n"
    (tmp_path / "child.yaml").write_text(child + skip.format("b") + rule.format("near") + case)
    assert [each.subject for each in lint(load_spec(tmp_path / "tiny.yaml"))] == ["a", "far.weight"]
    assert [each.subject for each in lint(load_spec(tmp_path / "child.yaml"))] == ["b", "near.weight"]


def test_a_spec_without_a_config_says_that_only_its_text_was_checked():
    found = only_finding(cut("inner"), case="")
    assert (found.code, found.severity) == ("M816", "warning")
    assert found.message == "no config names the architectures of the spec 'tiny', so its rules were not compiled"


def test_a_runtime_whose_requirements_no_config_meets_is_advice():
    found = only_finding(section="    requires:\n      - that: has_many\n        why: test\n", case=OTHER_RUNTIME)
    assert (found.code, found.severity, place_text(found)) == ("M817", "warning", "vllm:")
    assert found.message == "no config meets what the runtime 'vllm' requires, so its rules were not compiled"


OTHER_RUNTIME = f"""\
  plain:
    rules:
      - copy:
          - norm.weight
cases:
  - config: {json.dumps(CONFIG)}
    runtime: plain
    unknown:
      - x
"""


# --- severity -------------------------------------------------------------------------------------------------------


def test_a_warning_says_so_in_text_and_for_github():
    advice = finding("M814", severity="warning", rule="x")
    assert render_text(advice) == "warning M814 no config reaches the rule for 'x'"
    assert render_github(advice) == "::warning title=M814::no config reaches the rule for 'x'"
    error = finding("M814", rule="x")
    assert render_text(error) == "M814 no config reaches the rule for 'x'"
    assert render_github(error) == "::error title=M814::no config reaches the rule for 'x'"


def test_findings_come_in_file_order():
    rules = cut("q_size") + FUSED + "      - target: far.weight\n        when: has_many\n"
    found = lint(spec_of(rules))
    assert [each.code for each in found] == ["M811", "M810", "M814"]
    assert [each.place.line for each in found] == sorted(each.place.line for each in found)


def test_lint_of_a_file_uses_the_configs_beside_it(tmp_path: Path):
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "tiny.json").write_text(json.dumps(CONFIG))
    (tmp_path / "tiny.yaml").write_text(HEAD + FUSED)
    (found,) = lint(load_spec(tmp_path / "tiny.yaml"))
    assert "  - config: tiny\n    runtime: vllm\n    maps:\n" in found.hint
