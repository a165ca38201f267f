"""What a config counts against what the headers hold: one finding that names both, and an option that decides."""

from collections import Counter
from pathlib import Path

import pytest

from mapper.checkpoint import Checkpoint
from mapper.compiler import compile
from mapper.compiler.counts import with_counts
from mapper.diagnostics import Diagnostic, MapperError
from mapper.layout import Layout
from mapper.plan.matching import match
from mapper.report import check
from mapper.spec import load_spec
from tests.manifests import V3, Tensors, write_changed, write_v4_flash_0731
from tests.small import Headers, headers, program_of

DRAFTS = """
config: {required: [num_layers, num_drafts]}
options: {drafts: {default: null}}
let: {blocks: num_drafts if drafts is null else drafts}
index: {draft: {first: num_layers, count: blocks}}
runtimes:
  own:
    counts:
      - {index: draft, source: 'mtp.{draft - num_layers}.**', config: num_drafts, option: drafts, why: the draft has blocks}
    rules:
      - {copy: ['mtp.{draft - num_layers}.a', 'mtp.{draft - num_layers}.b', w]}
"""


def findings_of(tensors: Headers, num_drafts: int, prefix: str = "", **options: object) -> list[Diagnostic]:
    program = program_of(DRAFTS, config={"num_layers": 7, "num_drafts": num_drafts}, **options)
    if prefix:
        program = program.mounted(prefix).scoped(prefix.partition(".")[0])
    return list(with_counts(match(program.families, program.skips, tensors), program.counts, tensors).findings)


def drafts(number: int, prefix: str = "mtp") -> Headers:
    return headers(w=(1,)) | {
        f"{prefix}.{draft}.{leaf}": each for draft in range(number) for leaf, each in headers(a=(1,), b=(1,)).items()
    }


@pytest.mark.parametrize(
    ("said", "held", "message", "believed"),
    [
        (1, 3, "num_drafts of the config is 1, and the checkpoint has 3: mtp.{0...2}.**", 3),
        (3, 1, "num_drafts of the config is 3, and the checkpoint has 1: mtp.0.**", 1),
        (0, 2, "num_drafts of the config is 0, and the checkpoint has 2: mtp.{0, 1}.**", 2),
    ],
)
def test_a_wrong_count_is_one_finding_with_both_sides(said: int, held: int, message: str, believed: int) -> None:
    (found,) = findings_of(drafts(held), said)
    assert (found.code, found.message) == ("M510", message)
    assert found.hint == f"the draft has blocks; with the option drafts={believed} the checkpoint is believed"
    assert findings_of(drafts(held), said, drafts=believed) == []


def test_an_option_that_is_wrong_is_named_itself() -> None:
    (found,) = findings_of(drafts(3), 3, drafts=2)
    assert found.message == "the option drafts is 2, and the checkpoint has 3: mtp.{0...2}.**"
    assert found.hint == "the draft has blocks"


def test_a_checkpoint_without_any_says_so() -> None:
    (found,) = findings_of(headers(w=(1,)), 1)
    assert found.message.startswith("num_drafts of the config is 1, and the checkpoint has none like mtp.")


def test_one_tensor_more_or_less_is_told_by_its_name() -> None:
    lacking = {name: each for name, each in drafts(2).items() if name != "mtp.1.b"}
    assert [(each.code, each.subject) for each in findings_of(lacking, 2)] == [("M501", "mtp.1.b")]
    assert [(each.code, each.subject) for each in findings_of({**drafts(2), "mtp.1.c": lacking["w"]}, 2)] == [
        ("M502", "mtp.1.c")
    ]
    # A number behind a gap is no count.
    assert [(each.code, each.subject) for each in findings_of({**drafts(2), "mtp.5.a": lacking["w"]}, 2)] == [
        ("M502", "mtp.5.a")
    ]


def test_what_has_nothing_to_do_with_the_count_is_told_as_well() -> None:
    tensors = {name: each for name, each in drafts(3).items() if name != "w"}
    assert [(each.code, each.subject) for each in findings_of(tensors, 1)][1:] == [("M501", "w")]


def test_a_rerooted_program_counts_names_under_its_prefix() -> None:
    tensors = {f"inner.{name}": each for name, each in drafts(3).items()}
    (found,) = findings_of(tensors, 1, prefix="outer.inner")
    assert found.message == "num_drafts of the config is 1, and the checkpoint has 3: inner.mtp.{0...2}.**"


@pytest.mark.parametrize("runtime", ["vllm-mtp", "vllm-dspark"])
def test_v4_flash_0731_has_three_blocks_where_its_config_says_one(runtime: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_v4_flash_0731(tmp_path))
    assert (len(checkpoint.tensors), sum(each.stop - each.start for each in checkpoint.tensors.values())) == (
        72_317,
        166_878_536_440,  # those of the published checkpoint
    )
    with pytest.raises(MapperError) as caught:
        compile(load_spec("deepseek_v4"), config=checkpoint.config, runtime=runtime).plan(checkpoint)
    (found,) = caught.value.diagnostics
    assert found.message == "num_nextn_predict_layers of the config is 1, and the checkpoint has 3: mtp.{0...2}.**"
    assert found.hint.endswith("with the option draft_blocks=3 the checkpoint is believed")


def test_v4_flash_0731_is_whole_where_the_checkpoint_is_believed(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_v4_flash_0731(tmp_path))
    spec, layout = load_spec("deepseek_v4"), Layout.parse("tp=8,pp=4,dp=8,ep=64,redundant_experts=64")
    options = {"draft_blocks": 3}
    program = compile(spec, config=checkpoint.config, runtime="vllm-dspark", layout=layout, options=options)
    report = check(program, checkpoint)
    assert report.findings == ()
    assert (report.sources.loaded, report.sources.skipped, report.targets.complete) == (4_705, 67_612, 6_336)
    with pytest.raises(MapperError, match="more than one block is a DSpark drafter, use vllm-dspark"):
        compile(spec, config=checkpoint.config, runtime="vllm-mtp", options=options)
    assert check(compile(spec, config=checkpoint.config, runtime="vllm"), checkpoint).ok  # the target model has no drafts


def test_draft_layers_that_the_config_of_v3_does_not_know_are_one_finding(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(V3)
    config = {**checkpoint.config, "num_nextn_predict_layers": 0}
    for runtime in ("vllm", "transformers"):
        program = compile(load_spec("deepseek_v2"), config=config, runtime=runtime)
        (found,) = program.match(checkpoint).findings
        assert found.message == "num_nextn_predict_layers of the config is 0, and the checkpoint has 1: model.layers.61.**"
    believed = compile(load_spec("deepseek_v2"), config=config, runtime="vllm", options={"draft_layers": 1})
    assert Counter(believed.match(checkpoint).skipped_by)["model.layers.{nextn}.**"] == 1_564


def test_a_checkpoint_without_the_draft_loads_into_the_target_model(tmp_path: Path) -> None:
    def without_draft(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith("model.layers.61.")]:
            del tensors[name]

    checkpoint = Checkpoint.open(write_changed(V3, tmp_path, without_draft))
    assert not compile(load_spec("deepseek_v2"), config=checkpoint.config, runtime="vllm").match(checkpoint).findings
    draft = compile(load_spec("deepseek_v2"), config=checkpoint.config, runtime="vllm-mtp").match(checkpoint)
    assert [each.code for each in draft.findings] == ["M510"]
