"""Properties first: what the engine does passes as a case, and any single change of a passing case fails by its kind."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mapper.cases import CaseReport, run_cases
from mapper.cases.effect import Side, effects
from mapper.checkpoint import Checkpoint
from mapper.compiler import compile
from mapper.diagnostics import Place
from mapper.layout import Layout
from mapper.report.check import check
from mapper.schema import validate
from mapper.spec import load_spec
from mapper.spec.bundled import bundled_ids, read_builtin
from mapper.spec.cases import parse_cases
from mapper.spec.check import check_spec
from mapper.spec.configs import bundled_config, configs_for
from mapper.spec.inherit import merge
from mapper.spec.model import Case, Group, Located
from mapper.spec.parse import parse_spec
from mapper.yaml_source import parse_text

DATA = Path(__file__).parent / "data"
NOWHERE = Place("x.yaml", 1, 1)
SETTINGS = [("DeepSeek-V3", "vllm", layout) for layout in ("", "tp=2", "tp=8", "tp=2,pp=2", "tp=2,dp=2,ep=4")]
SETTINGS += [("DeepSeek-V3", "vllm-mtp", "tp=2"), ("DeepSeek-V3", "transformers", "")]
SETTINGS += [("DeepSeek-V2-Lite-Chat", "vllm", layout) for layout in ("", "tp=4", "tp=2,pp=2,ep=2")]
QUICK = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])

TINY = """\
spec: 1
id: tiny
title: Tiny
version: 1.0.0
architectures: [TinyForCausalLM]
config:
  required: [num_layers, num_experts]
index:
  layer: {count: num_layers, axis: pp}
  expert: {count: num_experts, axis: ep}
runtimes:
  vllm:
    mesh: vllm
    skip:
      - source: '**.inv_freq'
        why: recomputed
    rules:
      - target: embed.weight
        dims: {vocab: 14, hidden: 3}
        shard: {vocab: tp}
        stage: first
      - target: layers.{layer}.gate_up.weight
        sources:
          - layers.{layer}.gate.weight
          - layers.{layer}.up.weight
        dims: {out: [10, 10], in: 3}
        shard: {out: tp}
      - target: layers.{layer}.w2
        source: layers.{layer}.experts.{expert}.w2
        stack: expert
        dims: {out: 3, in: 10}
      - target: layers.{layer}.qkv
        dims: {out: [4, 2, 2], in: 3}
        shard: {out: tp}
      - copy:
          - norm.weight
cases:
  - config: {architectures: [TinyForCausalLM], num_layers: 2, num_experts: 4}
    runtime: vllm
"""


def spec_of(text, *, file="tiny.yaml"):
    node = parse_text(text, file=file)
    assert not validate(node)
    spec = parse_spec(merge(None, node), builtin=read_builtin())
    assert not check_spec(spec)
    return spec


def tiny_report(lines):
    return run_cases(spec_of(TINY + lines))


def only_failure(lines):
    (failure,) = tiny_report(lines).failures
    return failure


def place_text(diagnostic):
    return diagnostic.place.text[diagnostic.place.column - 1 :]


@cache
def deepseek():
    return load_spec("deepseek_v2")


@cache
def program_of(config, runtime, layout):
    return compile(deepseek(), config=bundled_config(config), runtime=runtime, layout=Layout.parse(layout))


def located(side: Side) -> Located:
    """Return the side as a reader of its YAML text would see it."""
    (case,) = parse_cases(parse_text(f'cases:\n  - config: x\n    skips:\n      - "{side}"\n', file="x.yaml").get("cases"), [])
    return replace(case.skips[0], place=NOWHERE)


def report_of(config, runtime, layout, rank, **pinned) -> CaseReport:
    lists = (pinned.get(key, ()) for key in ("maps", "skips", "unknown"))
    case = Case(config, runtime, layout, rank, {}, *lists, NOWHERE)
    return run_cases(replace(deepseek(), cases=(case,)))


@st.composite
def engine_lines(draw):
    """Draw a setting, a rank, and what the engine does there with one source that the rank reads."""
    setting = draw(st.sampled_from(SETTINGS))
    program = program_of(*setting)
    program = program.at_rank(draw(st.integers(0, program.layout.num_ranks - 1)))
    held = [family for family in program.families if family.alternatives and program.share.holds(family.stage)]
    family = draw(st.sampled_from(held))
    source = draw(st.sampled_from([each for alternative in family.alternatives for each in alternative]))
    values = {index: program.share.owned(index, source.domains[index]) for index in source.template.indices}
    if not all(values.values()):
        return draw(engine_lines())
    name = source.template.name({index: draw(st.sampled_from(own)) for index, own in values.items()})
    return setting, program.rank, name, [(each.source, each.target) for each in effects(program, name)]


# --- properties -----------------------------------------------------------------------------------------------------


@QUICK
@given(engine_lines())
def test_what_the_engine_does_passes_as_a_case(drawn):
    setting, rank, _, found = drawn
    lines = tuple((located(source), located(target)) for source, target in found)
    report = report_of(*setting, rank, maps=lines)
    assert (report.failures, report.passed, report.lines) == ((), len(lines), len(lines))


MUTATIONS = ("shift", "shrink", "other target", "no box", "other box first", "other source")


@QUICK
@given(engine_lines(), st.sampled_from(MUTATIONS), st.data())
def test_any_single_change_of_a_passing_line_is_misrouted(drawn, mutation, data):
    setting, rank, name, found = drawn
    lines = [(located(source), located(target)) for source, target in found]
    position = data.draw(st.integers(0, len(lines) - 1))
    side = data.draw(st.sampled_from((0, 1)))
    line = list(lines[position])
    box = line[side].box
    if mutation == "other target":
        line[1] = replace(line[1], name=line[1].name + "x")
    elif mutation == "other source":
        line[0] = replace(line[0], name=f"x.{name}")
    elif mutation == "other box first":
        line[side] = replace(line[side], box=((1, 2), *(box or ())[1:]))
        if line[side].box == box:
            return
    elif box is None:
        return
    elif mutation == "no box":
        line[side] = replace(line[side], box=None)
    else:
        axis = data.draw(st.integers(0, len(box) - 1))
        start, stop = box[axis]
        moved = (start + 1, stop + 1) if mutation == "shift" else (start, stop - 1)
        line[side] = replace(line[side], box=(*box[:axis], moved, *box[axis + 1 :]))
    lines[position] = (line[0], line[1])
    report = report_of(*setting, rank, maps=tuple(lines))
    if mutation == "other source":
        # the name of the line is read by nothing, and the right source has lost a line
        assert [each.code for each in report.failures if each.subject != name] == ["M800"]
        assert [each.code for each in report.failures if each.subject == name] == ["M802"] * (len(lines) > 1)
    else:
        assert [(each.code, each.subject) for each in report.failures] == [("M802", name)]
    assert report.passed < report.lines


@QUICK
@given(engine_lines())
def test_a_source_that_is_read_is_grabbed_where_a_case_says_it_is_not(drawn):
    setting, rank, name, _ = drawn
    line = (Located(name, None, NOWHERE),)
    report = report_of(*setting, rank, skips=line, unknown=line)
    assert ([each.code for each in report.failures], report.grabbed, report.passed) == (["M801", "M801"], 2, 0)


@pytest.mark.parametrize(
    ("setting", "rank", "prefix"),
    [
        (SETTINGS[0], 0, "model.layers.0.mlp"),
        (SETTINGS[2], 5, "model.layers.3.mlp.shared_experts"),
        (SETTINGS[2], 7, "model.layers.60.mlp.experts.255"),
        (SETTINGS[4], 3, "model.layers.3.mlp.experts.200"),
        (("DeepSeek-V3", "vllm-mtp", "tp=2"), 1, "model.layers.61.mlp.experts.9"),
        (("DeepSeek-V3", "transformers", ""), 0, "model.layers.3.mlp.experts.9"),
        (("DeepSeek-V2-Lite-Chat", "vllm", "tp=4"), 2, "model.layers.0.mlp"),
    ],
)
def test_swapped_halves_are_misrouted(setting, rank, prefix):
    program = program_of(*setting).at_rank(rank)
    leaf = "weight_scale_inv" if setting[0] == "DeepSeek-V3" else "weight"
    gate, up = (f"{prefix}.{part}_proj.{leaf}" for part in ("gate", "up"))
    ((first,), (second,)) = (effects(program, name) for name in (gate, up))
    right = [(located(each.source), located(each.target)) for each in (first, second)]
    assert report_of(*setting, rank, maps=right).ok
    swapped = [(right[0][0], right[1][1]), (right[1][0], right[0][1])]
    report = report_of(*setting, rank, maps=swapped)
    assert [(each.code, each.subject) for each in report.failures] == [("M802", gate), ("M802", up)]


@pytest.mark.parametrize(
    ("config", "runtime", "layout", "rank"),
    [
        ("DeepSeek-V2-Lite-Chat", "vllm", "tp=4", 1),
        ("DeepSeek-V2-Lite-Chat", "vllm", "tp=2,pp=2,dp=2,ep=4", 7),
        ("DeepSeek-V2-Lite-Chat", "transformers", "", 0),
    ],
)
def test_effects_of_single_names_are_the_plan(config, runtime, layout, rank):
    checkpoint = Checkpoint.open(str(DATA / "checkpoints" / f"{config}.header.json.gz"))
    program = program_of(config, runtime, layout).at_rank(rank)
    planned = {}
    for step in program.plan(checkpoint).steps():
        planned.setdefault(step.source, set()).add((step.target, step.source_box, step.target_box))
    for name in list(checkpoint.tensors)[::7]:
        sides = {(each.target.name, each.source, each.target) for each in effects(program, name)}
        known = {
            (target, source.box if source.shape is not None else full, box.box if box.shape is not None else full)
            for target, source, box in sides
            for full in [tuple((0, size) for size in checkpoint.tensors[name].shape)]
        }
        assert known == planned.get(name, set()), name


# --- kinds of failure, word for word --------------------------------------------------------------------------------


def test_a_spec_without_cases_has_an_empty_report():
    report = run_cases(spec_of(TINY[: TINY.index("cases:")]))
    assert (report.ok, report.cases, report.lines, report.to_text()) == (
        True, 0, 0, "tiny: 0 cases, 0 lines: 0 passed\n  evidence: pinned cases"
    )  # fmt: skip


def test_lines_with_boxes_on_either_side_and_full_axes_left_out_hold():
    report = tiny_report(
        """\
    maps:
      embed.weight: embed.weight
      layers.1.gate.weight: layers.1.gate_up.weight[0:10]
      layers.1.up.weight[0:10]: layers.1.gate_up.weight[10:20, 0:3]
      layers.0.experts.3.w2: layers.0.w2[3]
      norm.weight: norm.weight
    skips:
      - layers.0.inv_freq
    unknown:
      - layers.2.gate.weight
"""
    )
    assert (report.failures, report.passed) == ((), 7)


def test_a_name_that_no_rule_reads_is_missed_at_its_line():
    failure = only_failure("    maps:\n      layers.2.gate.weight: layers.2.gate_up.weight[0:10]\n")
    assert (failure.code, failure.subject) == ("M800", "layers.2.gate.weight")
    assert failure.message == (
        "missed: 'layers.2.gate.weight' should go to layers.2.gate_up.weight[0:10], and no rule names it"
    )
    assert place_text(failure) == "layers.2.gate.weight: layers.2.gate_up.weight[0:10]"


def test_a_name_that_a_skip_leaves_out_is_missed():
    failure = only_failure("    maps:\n      a.inv_freq: a.inv_freq\n")
    assert failure.message == "missed: 'a.inv_freq' should go to a.inv_freq, and the skip '**.inv_freq' leaves it out"


def test_a_name_that_other_ranks_read_is_missed_with_their_numbers():
    failure = only_failure("    layout: tp=2,pp=2\n    rank: 3\n    maps:\n      embed.weight[0:7]: embed.weight\n")
    assert failure.message == (
        "missed: 'embed.weight' should go to embed.weight, and rank 3 reads nothing of it (ranks 0, 1 would)"
    )


def test_a_name_that_no_skip_names_is_missed():
    failure = only_failure("    skips:\n      - b.weight\n")
    assert failure.message == "missed: 'b.weight' should be skipped, and no skip names it"
    assert (failure.code, place_text(failure)) == ("M800", "b.weight")


def test_a_skipped_name_that_a_rule_reads_is_grabbed():
    failure = only_failure("    skips:\n      - layers.1.up.weight\n")
    assert failure.message == (
        "grabbed: 'layers.1.up.weight' should be skipped, and the rule for 'layers.{layer}.gate_up.weight' reads it"
    )
    assert [label for label, _ in failure.related] == ["the rule"]


def test_an_unknown_name_that_a_rule_or_a_skip_takes_is_grabbed():
    report = tiny_report("    unknown:\n      - norm.weight\n      - a.inv_freq\n")
    assert [each.message for each in report.failures] == [
        "grabbed: 'norm.weight' should be unknown, and the rule for 'norm.weight' reads it",
        "grabbed: 'a.inv_freq' should be unknown, and the skip '**.inv_freq' leaves it out",
    ]
    assert [each.related[0][0] for each in report.failures] == ["the rule", "the skip"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "layers.1.up.weight: layers.1.gate_up.weight[0:10]",
            "misrouted: 'layers.1.up.weight' should go to layers.1.gate_up.weight[0:10], "
            "and goes to layers.1.gate_up.weight[10:20]",
        ),
        (
            "layers.1.up.weight[0:5]: layers.1.gate_up.weight[10:20]",
            "misrouted: 'layers.1.up.weight' should go to layers.1.gate_up.weight[10:20] from [0:5], "
            "and goes to layers.1.gate_up.weight[10:20]",
        ),
        (
            "layers.1.up.weight: layers.1.gate_up.weight",
            "misrouted: 'layers.1.up.weight' should go to layers.1.gate_up.weight, "
            "and goes to layers.1.gate_up.weight[10:20]",
        ),
        (
            "layers.0.experts.3.w2: layers.0.w2[2]",
            "misrouted: 'layers.0.experts.3.w2' should go to layers.0.w2[2], and goes to layers.0.w2[3]",
        ),
        ("norm.weight: norm.bias", "misrouted: 'norm.weight' should go to norm.bias, and goes to norm.weight"),
        ("norm.weight: norm.weight[0:3]", "misrouted: 'norm.weight' should go to norm.weight[0:3], and goes to norm.weight"),
        ("embed.weight[0:7]: embed.weight[0:7, 0:3, 0:1]", "misrouted: 'embed.weight' should go to "
         "embed.weight[0:7, 0:3, 0] from [0:7], and goes to embed.weight"),
    ],
)  # fmt: skip
def test_a_name_that_goes_elsewhere_is_misrouted_at_its_target(line, message):
    failure = only_failure(f"    maps:\n      {line}\n")
    assert (failure.code, failure.message, place_text(failure)) == ("M802", message, line.split(": ")[1])


def test_the_slice_that_a_rank_reads_must_be_written():
    lines = "    layout: tp=2\n    rank: 1\n    maps:\n      layers.0.gate.weight{}: layers.0.gate_up.weight[0:5]\n"
    assert tiny_report(lines.format("[5:10]")).ok
    assert only_failure(lines.format("")).message == (
        "misrouted: 'layers.0.gate.weight' should go to layers.0.gate_up.weight[0:5], "
        "and goes to layers.0.gate_up.weight[0:5] from [5:10]"
    )


def test_the_lines_of_a_source_say_all_that_the_rank_does_with_it():
    lines = "    layout: tp=2\n    rank: 1\n    maps:\n"
    pieces = [
        "layers.0.qkv[2:4]: layers.0.qkv[0:2]",
        "layers.0.qkv[5]: layers.0.qkv[2]",
        "layers.0.qkv[7]: layers.0.qkv[3]",
    ]
    assert tiny_report(lines + "".join(f"      {each}\n" for each in pieces)).ok
    failure = only_failure(lines + "".join(f"      {each}\n" for each in pieces[:2]))
    assert failure.message == (
        "misrouted: 'layers.0.qkv' should go to layers.0.qkv[0:2] and layers.0.qkv[2] only, "
        "and goes also to layers.0.qkv[3] from [7]"
    )


def test_a_line_that_is_said_twice_is_misrouted():
    failure = only_failure("    maps:\n      norm.weight:\n        - norm.weight\n        - norm.weight\n")
    assert failure.message == "misrouted: 'norm.weight' should go to norm.weight, and goes only to norm.weight"


def test_an_unknown_config_is_reported_at_its_case():
    text = TINY.replace("{architectures: [TinyForCausalLM], num_layers: 2, num_experts: 4}", "DeepSeek-V33")
    spec = spec_of(text + "    unknown:\n      - a\n")
    report = run_cases(spec)
    (failure,) = report.failures
    assert (failure.code, failure.message) == ("M803", "there is no config 'DeepSeek-V33'")
    assert (failure.hint, failure.place) == ("did you mean 'DeepSeek-V3'?", spec.cases[0].place)
    assert (report.lines, report.passed, report.not_run) == (1, 0, 1)


def test_a_case_that_does_not_compile_says_which_case():
    report = tiny_report("    layout: tp=3\n    unknown:\n      - a\n")
    assert {each.code for each in report.failures} == {"M329"}
    assert {each.related[-1][0] for each in report.failures} == {"in the case"}
    assert report.not_run == 1


def test_a_layout_that_cannot_be_read_is_reported_at_its_case():
    (failure,) = tiny_report("    layout: tpp=3\n    unknown:\n      - a\n").failures
    assert (failure.code, failure.place.line) == ("M324", TINY.count("\n") - 1)


# --- reports --------------------------------------------------------------------------------------------------------


def test_the_report_counts_and_names_its_evidence():
    report = tiny_report(
        "    maps:\n      norm.weight: norm.bias\n    skips:\n      - b.weight\n    unknown:\n      - c\n      - norm.weight\n"
    )
    text = report.to_text()
    assert text.endswith("tiny: 1 case, 4 lines: 1 passed, 1 missed, 1 grabbed, 1 misrouted\n  evidence: pinned cases")
    assert "proved" not in text
    plain = report.to_json()
    failures = plain.pop("failures")
    assert plain == {
        "ok": False, "spec": "tiny", "cases": 1, "lines": 4, "passed": 1, "missed": 1, "grabbed": 1, "misrouted": 1,
        "not_run": 0, "evidence": "pinned cases",
    }  # fmt: skip
    assert [each["code"] for each in failures] == ["M802", "M800", "M801"]


@pytest.mark.parametrize("name", sorted(bundled_ids()))
def test_the_cases_of_every_bundled_spec_hold(name):
    report = run_cases(load_spec(name))
    assert report.failures == ()
    assert report.passed == report.lines > 0


def swapped_rules(items):
    """Yield `items` with the first two sources of one rule swapped that have the same size, for each such rule in turn."""
    for position, item in enumerate(items):
        before, after = items[:position], items[position + 1 :]
        if isinstance(item, Group):
            yield from ((*before, replace(item, items=inner), *after) for inner in swapped_rules(item.items))
            continue
        sources = item.alternatives[0].sources if item.alternatives else ()
        sizes = next((dim.sizes for dim in (item.dims or {}).values() if dim.has_parts), ())
        if item.append is None and len(sources) == 2 and sizes[0].text == sizes[1].text:
            yield (*before, replace(item, alternatives=(replace(item.alternatives[0], sources=sources[::-1]),)), *after)


def test_swapping_any_two_sources_of_equal_size_in_deepseek_v2_fails_a_case():
    spec = deepseek()
    layers = swapped_rules(spec.blocks["vllm_layer"])
    swapped = [replace(spec, blocks={**spec.blocks, "vllm_layer": items}) for items in layers]
    for name, runtime in spec.runtimes.items():
        rules = swapped_rules(runtime.rules)
        swapped += [replace(spec, runtimes={**spec.runtimes, name: replace(runtime, rules=items)}) for items in rules]
    assert len(swapped) == 4
    for each in swapped:
        report = run_cases(each)
        assert report.misrouted == len(report.failures) >= 4


# --- configs and status ---------------------------------------------------------------------------------------------


def test_the_configs_of_a_spec_name_its_architectures():
    assert list(configs_for(load_spec("deepseek_v2"))) == ["DeepSeek-V2-Lite-Chat", "DeepSeek-V3"]


def test_a_config_is_fresh_each_time():
    bundled_config("DeepSeek-V3")["num_hidden_layers"] = 1
    assert bundled_config("DeepSeek-V3")["num_hidden_layers"] == 61


def test_configs_beside_a_spec_are_found(tmp_path):
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "tiny-1.json").write_text(
        '{"architectures": ["TinyForCausalLM"], "num_layers": 1, "num_experts": 2}'
    )
    inline = "{architectures: [TinyForCausalLM], num_layers: 2, num_experts: 4}"
    (tmp_path / "tiny.yaml").write_text(TINY.replace(inline, "tiny-1") + "    unknown:\n      - layers.1.gate.weight\n")
    spec = load_spec(tmp_path / "tiny.yaml")
    assert list(configs_for(spec)) == ["tiny-1"]
    assert run_cases(spec).ok


CHECKED = [
    (config, runtime, layout)
    for config in ("DeepSeek-V3", "DeepSeek-V2-Lite-Chat")
    for runtime, layouts in (("vllm", ("", "tp=4,pp=2")), ("vllm-mtp", ("tp=2,pp=2",)), ("transformers", ("",)))
    for layout in layouts
    if (config, runtime) != ("DeepSeek-V2-Lite-Chat", "vllm-mtp")
]


@pytest.mark.parametrize(("config", "runtime", "layout"), CHECKED)
def test_deepseek_v2_has_earned_its_status_on_real_manifests(config, runtime, layout):
    assert load_spec("deepseek_v2").status == "checked"
    checkpoint = Checkpoint.open(str(DATA / "checkpoints" / f"{config}.header.json.gz"))
    report = check(program_of(config, runtime, layout), checkpoint)
    assert report.findings == ()
    assert (report.targets.incomplete, report.sources.unknown) == (0, 0)


def test_the_draft_model_lives_on_the_last_stage():
    checkpoint = Checkpoint.open(str(DATA / "checkpoints" / "DeepSeek-V3.header.json.gz"))
    program = program_of("DeepSeek-V3", "vllm-mtp", "tp=2,pp=2")
    matching = program.match(checkpoint)
    plans = [program.at_rank(rank).assemble(matching, checkpoint.tensors) for rank in range(4)]
    names = [set(plan.targets) for plan in plans]
    assert [len(each) for each in names] == [0, 0, 28, 28]
    whole = program_of("DeepSeek-V3", "vllm-mtp", "").plan(checkpoint)
    assert names[2] == names[3] == set(whole.targets)
    assert [plan.findings for plan in plans] == [(), (), (), ()]
