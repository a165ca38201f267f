"""Bad input through the whole loader: one clear error each, told by name, before a byte of any parameter changes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from mapper.checkpoint import Checkpoint
from mapper.compiler import Program, compile
from mapper.diagnostics import MapperError
from mapper.layout import Layout
from mapper.load import Loader
from mapper.messages import CATALOGUE
from mapper.spec import load_spec
from tests.loads import Tensors, all_raw, prefilled
from tests.oracle.families import FAMILIES, write_family

FIRST, LAST = "model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"
INDEX = "model.safetensors.index.json"
NORM = "model.layers.1.input_layernorm.weight"
Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("good")
    return {family: write_family(family, root / family) for family in ("deepseek_v2", "deepseek_v3_fp8", "deepseek_v3_mtp")}


def change_json(name: str, change: Callable[[dict[str, Any]], object]) -> Damage:
    def damage(folder: Path) -> None:
        value = json.loads((folder / name).read_text())
        change(value)
        (folder / name).write_text(json.dumps(value))

    return damage


def change_tensors(change: Callable[[Tensors], object], file: str = FIRST) -> Damage:
    """Write a shard again with other tensors, and an index that names them."""

    def damage(folder: Path) -> None:
        with safe_open(folder / file, "pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (no mapping)
        before = set(tensors)
        change(tensors)
        save_file(tensors, folder / file)
        index = json.loads((folder / INDEX).read_text())
        named = {name: each for name, each in index["weight_map"].items() if name not in before}
        index["weight_map"] = named | dict.fromkeys(tensors, file)
        (folder / INDEX).write_text(json.dumps(index))

    return damage


def truncate(folder: Path) -> None:
    data = (folder / LAST).read_bytes()
    (folder / LAST).write_bytes(data[:-1])


def lengthen_header(folder: Path) -> None:
    data = (folder / LAST).read_bytes()
    (folder / LAST).write_bytes((len(data)).to_bytes(8, "little") + data[8:])


def point_outside(folder: Path) -> None:
    change_json(INDEX, lambda index: index["weight_map"].update({NORM: "../outside.safetensors"}))(folder)
    shutil.copy(folder / LAST, folder.parent / "outside.safetensors")


EMBED = "model.embed_tokens.weight"
Q_A = "model.layers.0.self_attn.q_a_proj.weight"


@dataclass(frozen=True)
class Fault:
    """One thing wrong: the files or the call, the only code it gives, and words that its text has."""

    code: str
    words: tuple[str, ...]
    damage: Damage = field(default=lambda folder: None)
    family: str = "deepseek_v2"
    call: Mapping[str, Any] = field(default_factory=dict)


FAULTS = {
    "shard file missing": Fault(
        "M420", (LAST, "1 file that the index names", "hint: download the missing files"), lambda path: (path / LAST).unlink()
    ),
    "file truncated": Fault("M443", (LAST, "is truncated: expected", "hint: download the file again"), truncate),
    "header longer than the file": Fault("M432", (LAST, "is truncated within its header", "hint: "), lengthen_header),
    "index names a file outside the folder": Fault(
        "M421", ("'../outside.safetensors'", "outside its folder", "hint: move the files into the folder"), point_outside
    ),
    "tensor unknown": Fault(
        "M502",
        ("no rule names the checkpoint's tensor 'model.layers.0.extra.weight'",),
        change_tensors(lambda tensors: tensors.update({"model.layers.0.extra.weight": torch.zeros(3)})),
    ),
    "tensor missing": Fault(
        "M501",
        (f"the checkpoint has no tensor {EMBED!r}", "specs/deepseek_v2.yaml:"),
        change_tensors(lambda tensors: tensors.pop(EMBED)),
    ),
    "tensor renamed": Fault(
        "M501 M502",
        (f"hint: the checkpoint has '{EMBED}s', which no rule names", f"hint: a rule expects {EMBED!r}"),
        change_tensors(lambda tensors: tensors.update({f"{EMBED}s": tensors.pop(EMBED)})),
    ),
    "shape wrong": Fault(
        "M503",
        (f"{EMBED!r} has the shape [299, 128], expected [300, 128] (vocab = 300, hidden = 128)",),
        change_tensors(lambda tensors: tensors.update({EMBED: tensors[EMBED][1:].clone()})),
    ),
    "dtype not the format's": Fault(
        "M504",
        (f"{Q_A!r} has the dtype BF16, expected F8_E4M3 (float8_e4m3fn)",),
        change_tensors(lambda tensors: tensors.update({Q_A: tensors[Q_A].to(torch.bfloat16)})),
        "deepseek_v3_fp8",
    ),
    "dtype not the other part's": Fault(
        "M507",
        (f"{Q_A!r} has the dtype F32, and another source of the same target has BF16", "kv_a_proj_with_mqa.weight'"),
        change_tensors(lambda tensors: tensors.update({Q_A: tensors[Q_A].float()})),
    ),
    "dtype not the model's": Fault(
        "M533",
        (f"{EMBED!r} has the dtype bfloat16 in the model, and its source gives float32",),
        change_tensors(lambda tensors: tensors.update({EMBED: tensors[EMBED].float()})),
    ),
    "config without a key": Fault(
        "M301",
        ("the config has no key 'kv_lora_rank', which the spec 'deepseek_v2' requires",),
        change_json("config.json", lambda config: config.pop("kv_lora_rank")),
    ),
    "config of another architecture": Fault(
        "M307",
        ("this config names the architecture LlamaForCausalLM", "DeepseekV3ForCausalLM"),
        change_json("config.json", lambda config: config.update(architectures=["LlamaForCausalLM"])),
    ),
    "config of another size": Fault(
        "M503",
        ("'lm_head.weight' has the shape [300, 128], expected [301, 128]", EMBED),
        change_json("config.json", lambda config: config.update(vocab_size=301)),
    ),
    "tp that cuts heads apart": Fault(
        "M329", ("q_b_proj.weight has 8 units, which tp=16 does not divide", "hint: sizes of tp that work: 1, 2, 4, 8\n"),
        call={"layout": "tp=16"}
    ),
    "tp that cuts a block of scales": Fault(
        "M330",
        (
            "mlp.gate_up_proj.weight_scale_inv is cut by tp=8 into 64 elements, which is not a whole number of blocks of 128",
            "hint: sizes of tp that work: 1, 2, 4\n",
        ),
        family="deepseek_v3_fp8",
        call={"layout": "tp=8,ep=8"},
    ),
    "ep that is neither 1 nor all ranks": Fault(
        "M321", ("ep is 3, expected 1 or tp * dp = 2 * 1 = 2",), call={"layout": "tp=2,ep=3"}
    ),
    "axis of size 0": Fault("M320", ("the layout's tp is 0, expected a whole number",), call={"layout": "tp=0"}),
    "rank outside the layout": Fault(
        "M327",
        ("rank 2 does not exist in the layout tp=2,pp=1,dp=1,ep=1, which has ranks 0 to 1",),
        call={"layout": "tp=2", "rank": 2},
    ),
    "runtime unknown": Fault(
        "M305", ("has no runtime 'sglang'; it has vllm, vllm-mtp, transformers",), call={"runtime": "sglang"}
    ),
    "option unknown": Fault(
        "M306", ("has no option 'fuse'; it has fuse_shared_experts",), call={"options": {"fuse": True}}
    ),
    "draft of a checkpoint that has none": Fault("M302", ("the checkpoint has no draft layer",), call={"runtime": "vllm-mtp"}),
    "ranks of a runtime without any": Fault(
        "M328", ("'transformers' has no parallel axes",), call={"runtime": "transformers", "layout": "tp=2"}
    ),
}  # fmt: skip


def program_of(family: str, config: Mapping[str, object], call: Mapping[str, Any]) -> Program:
    return compile(
        load_spec("deepseek_v2"),
        config=config,
        runtime=call.get("runtime", "vllm"),
        layout=Layout.parse(call.get("layout", "")),
        rank=call.get("rank", 0),
        options=call.get("options", {}),
    )


def load(folder: Path, tensors: Tensors, fault: Fault) -> None:
    checkpoint = Checkpoint.open(folder)
    Loader(program_of(fault.family, checkpoint.config or {}, fault.call), tensors).load(checkpoint)


def refusal(folder: Path, tensors: Tensors, fault: Fault) -> MapperError:
    with pytest.raises(MapperError) as caught:
        load(folder, tensors, fault)
    return caught.value


@pytest.mark.parametrize("name", FAULTS)
def test_one_clear_error_before_any_write(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    fault = FAULTS[name]
    folder = tmp_path / "folder"
    shutil.copytree(folders[fault.family], folder)
    program = program_of(fault.family, FAMILIES[fault.family].config, {})
    tensors = prefilled(program.plan(Checkpoint.open(folder)))
    before = all_raw(tensors)
    fault.damage(folder)
    error = refusal(folder, tensors, fault)
    assert all_raw(tensors) == before
    assert sorted({each.code for each in error.diagnostics}) == fault.code.split()
    for words in fault.words:
        assert words in str(error)
    for each in error.diagnostics:
        assert each.hint or CATALOGUE[each.code].fix


def test_every_folder_loads_while_nothing_is_wrong(folders: dict[str, Path]) -> None:
    for family, folder in folders.items():
        program = program_of(family, FAMILIES[family].config, {})
        tensors = prefilled(program.plan(Checkpoint.open(folder)))
        before = all_raw(tensors)
        load(folder, tensors, Fault("", (), family=family))
        after = all_raw(tensors)
        assert [name for name in after if after[name] == before[name]] == []


def test_manifest_is_planned_and_not_loaded(folders: dict[str, Path], tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(folders["deepseek_v2"])
    manifest = {name: {"dtype": header.dtype, "shape": header.shape} for name, header in checkpoint.tensors.items()}
    (tmp_path / "m.header.json").write_text(json.dumps(manifest))
    program = program_of("deepseek_v2", FAMILIES["deepseek_v2"].config, {})
    opened = Checkpoint.open(tmp_path / "m.header.json")
    tensors = prefilled(program.plan(opened))
    before = all_raw(tensors)
    with pytest.raises(MapperError) as caught:
        Loader(program, tensors).load(opened)
    assert [each.code for each in caught.value.diagnostics] == ["M651"]
    assert all_raw(tensors) == before
