"""Tensors or parameters that were left out without a word: incomplete checkpoints, extra slots, mixed precision."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mapper.checkpoint import Checkpoint
from mapper.diagnostics import MapperError
from mapper.layout import Layout
from mapper.load import Loader
from mapper.testing.files import write_checkpoint
from tests.bugs.harness import Case, case, load, read_case, refusal, tensors
from tests.loads import Tensors, all_raw, told
from tests.safetensors_writer import write_index

BLOCK_FP8 = """
formats:
  linear:
    - when: quant_method == 'fp8' and block_out > 1
      leaves:
        weight: {dims: [out, in], dtype: float8_e4m3fn}
        weight_scale_inv: {dims: [out / block_out, in / block_in], source: scale, dtype: float32}
        k_scale: {dims: [], optional: true}
index: {layer: {count: 1}}
runtimes:
  own:
    rules:
      - {target: "layers.{layer}.attn.wo_a.{leaf}", dims: {out: 128, in: 128}}
"""


class Quantized(nn.Module):
    """A module with a hook that runs after the load, as a quantisation method has one."""

    def process_weights_after_loading(self) -> None:
        """Repack the weight."""


def names_thought_loaded(loaded: set[str], modules: Mapping[str, nn.Module], targets: Tensors) -> set[str]:
    """Return what the peer took as loaded: all parameters of a module with the hook, whatever was loaded."""
    hooked = tuple(f"{name}." for name, each in modules.items() if hasattr(each, "process_weights_after_loading"))
    return loaded | {name for name in targets if name.startswith(hooked)}


@case("sk-03")
def test_quantised_module_is_not_exempt_from_completeness(bug: Case, tmp_path: Path) -> None:
    sources, targets = bug.sources("in the file"), bug.targets()
    thought = names_thought_loaded(set(sources), {"layers.0.attn.wo_a": Quantized()}, targets)
    assert thought == set(targets)  # though nothing wrote the scale

    program = bug.program(tmp_path, BLOCK_FP8)
    findings = refusal(program, tmp_path, sources, targets)
    assert told(findings) == [("M501", "layers.0.attn.wo_a.scale")]
    listed = write_checkpoint(sources, tmp_path / "listed", num_files=1)
    (file,) = listed.glob("*.safetensors")
    write_index(listed / "model.safetensors.index.json", dict.fromkeys(bug["checkpoint"]["in the index"], file.name))
    with pytest.raises(MapperError) as caught:
        Checkpoint.open(listed)
    assert [each.code for each in caught.value.diagnostics] == ["M423"]
    assert "'layers.0.attn.wo_a.scale'" in str(caught.value)

    whole = bug.sources("in the index")
    load(program, tmp_path, whole, targets)  # the optional k_scale may be absent
    expected = {name.replace("scale", "weight_scale_inv"): raw for name, raw in all_raw(whole).items()}
    assert all_raw(targets) == expected


LAYERS = """
config: {required: [num_hidden_layers]}
index: {layer: {count: num_hidden_layers}}
runtimes: {own: {rules: [{copy: ["model.layers.{layer}.w"]}]}}
"""


@case("sk-04")
def test_layer_that_only_the_config_has_is_an_error(bug: Case, tmp_path: Path) -> None:
    sources, targets, wrong = bug.sources(), bug.targets(), bug.targets()
    walk_the_checkpoint(sources, wrong)
    assert all_raw(wrong)["model.layers.1.w"] == all_raw(targets)["model.layers.1.w"]

    program = bug.program(tmp_path, LAYERS)
    assert told(refusal(program, tmp_path, sources, targets)) == [("M501", "model.layers.1.w")]
    # With a config of one layer, it is the model that has one too many.
    shorter = bug.program(tmp_path, LAYERS, config={"num_hidden_layers": 1})
    assert told(refusal(shorter, tmp_path, sources, targets)) == [("M530", "model.layers.1.w")]


def walk_the_checkpoint(sources: Tensors, targets: Tensors) -> None:
    """Load as the peer did: what the checkpoint has, and nothing asks for the rest."""
    for name, tensor in sources.items():
        targets[name].copy_(tensor)


def shared_slots(prefix: str) -> str:
    """Return a spec of fused routed experts, and a shared one in the slot behind them where the option says so."""
    return f"""
config: {{required: [n_experts], optional: {{fuse_shared: false}}}}
runtimes:
  own:
    mesh: vllm
    rules:
      - at: "{prefix}"
        rules:
          - target: experts.w13_weight
            source: experts.gate_up_proj
            dims: {{expert: n_experts, out: [3, 3], in: 4}}
            shard: {{expert: ep}}
          - target: experts.w13_weight
            sources: [shared_expert.gate_proj.weight, shared_expert.up_proj.weight]
            when: fuse_shared
            append: expert
            dims: {{expert: 1, out: [3, 3], in: 4}}
            stored: {{out: (expert out)}}
"""


DOWN = """
          - target: experts.w2_weight
            source: experts.down_proj
            dims: {expert: n_experts, out: 4, in: 3}
            shard: {expert: ep}
          - target: experts.w2_weight
            source: shared_expert.down_proj.weight
            when: fuse_shared
            append: expert
            dims: {expert: 1, out: 4, in: 3}
            stored: {out: (expert out)}
"""


def load_routed_only(sources: Tensors, targets: Tensors) -> list[str]:
    """Load as the peer did: a table for the routed experts; what is not in it is warned about. Return the warnings."""
    table = {"mlp.experts.gate_up_proj": "mlp.experts.w13_weight", "mlp.experts.down_proj": "mlp.experts.w2_weight"}
    for name in sources.keys() & table.keys():
        targets[table[name]][: len(sources[name])] = sources[name]
    return sorted(sources.keys() - table.keys())


@case("sk-06")
def test_shared_expert_fills_the_slot_behind_the_routed_ones(bug: Case, tmp_path: Path) -> None:
    sources, targets, wrong = bug.sources(), bug.targets(), bug.targets()
    assert load_routed_only(sources, wrong) == sorted(name for name in sources if ".shared_expert." in name)
    unset = bug.targets()
    for name in targets:
        assert all_raw({name: wrong[name][2]}) == all_raw({name: unset[name][2]})

    program = bug.program(tmp_path, shared_slots("mlp") + DOWN)
    load(program, tmp_path, sources, targets)
    gate, up, down = (sources[f"mlp.shared_expert.{part}_proj.weight"] for part in ("gate", "up", "down"))
    assert all_raw(targets) == all_raw(
        {
            "mlp.experts.w13_weight": torch.cat([sources["mlp.experts.gate_up_proj"], torch.cat([gate, up])[None]]),
            "mlp.experts.w2_weight": torch.cat([sources["mlp.experts.down_proj"], down[None]]),
        }
    )
    for lost in (name for name in sources if ".shared_expert." in name):
        rest = {name: tensor for name, tensor in sources.items() if name != lost}
        assert told(refusal(program, tmp_path, rest, bug.targets())) == [("M501", lost)]
    # A spec that does not know of the extra slot: its sources are unknown, and the slot is not covered.
    unaware = bug.program(tmp_path, shared_slots("mlp") + DOWN, config={"n_experts": 2})
    routed = {name: tensor for name, tensor in sources.items() if ".shared_expert." not in name}
    two = {name: tensor[:2].clone() for name, tensor in bug.targets().items()}
    assert [code for code, _ in told(refusal(unaware, tmp_path, sources, two))] == ["M502"] * 3
    assert told(refusal(unaware, tmp_path, routed, bug.targets())) == [("M532", name) for name in targets]


def load_with_a_table_that_flips(sources: Tensors, targets: Tensors) -> None:
    """Load as the peer did: the first fused tensor replaces the table by that of fused tensors, for good."""
    table = {"shared_expert.gate_proj.weight": (2, 0), "shared_expert.up_proj.weight": (2, 3)}
    (target,) = targets.values()
    for name, tensor in sources.items():
        if name == "experts.gate_up_proj":
            table = {}
            target[: len(tensor)] = tensor
        elif name in table:
            slot, row = table[name]
            target[slot, row : row + 3] = tensor


@case("sk-07")
def test_order_of_fused_and_separate_tensors_does_not_matter(bug: Case, tmp_path: Path) -> None:
    sources = bug.sources("order A")
    orders = [{name: sources[name] for name in bug["checkpoint"][order]} for order in ("order A", "order B")]
    wrong = [bug.targets(), bug.targets()]
    for order, targets in zip(orders, wrong, strict=True):
        load_with_a_table_that_flips(order, targets)
    assert all_raw(wrong[0]) != all_raw(wrong[1])

    program = bug.program(tmp_path, shared_slots(""))
    for order in orders:
        targets = bug.targets()
        load(program, tmp_path, order, targets)
        assert all_raw(targets) == all_raw(wrong[1])


@given(data=st.data(), num_files=st.integers(1, 5), layout=st.sampled_from(["", "tp=2", "tp=2,ep=2"]), rank=st.integers(0, 1))
@settings(max_examples=20, deadline=None)
def test_any_order_files_and_layout_fill_the_same_slots(
    data: st.DataObject, num_files: int, layout: str, rank: int, shared: Path
) -> None:
    bug = read_case("sk-06")
    sources = bug.sources()
    shuffled = dict(data.draw(st.permutations(list(sources.items()))))
    rank = rank if layout else 0
    program = bug.program(shared, shared_slots("mlp") + DOWN, layout=Layout.parse(layout), rank=rank)
    routed = slice(rank, rank + 1) if "ep" in layout else slice(None)
    gate, up, down = (sources[f"mlp.shared_expert.{part}_proj.weight"] for part in ("gate", "up", "down"))
    expected = {
        "mlp.experts.w13_weight": torch.cat([sources["mlp.experts.gate_up_proj"][routed], torch.cat([gate, up])[None]]),
        "mlp.experts.w2_weight": torch.cat([sources["mlp.experts.down_proj"][routed], down[None]]),
    }
    from_files, streamed = ({name: torch.zeros_like(each) for name, each in expected.items()} for _ in range(2))
    folder = write_checkpoint(shuffled, Path(mkdtemp(dir=shared)), num_files=num_files)
    Loader(program, from_files).load(Checkpoint.open(folder))
    with Loader(program, streamed).update() as session:
        session.feed_all(shuffled.items())
    assert all_raw(from_files) == all_raw(streamed) == all_raw(expected)


def test_optional_shared_expert_decides_how_many_slots_there_are(tmp_path: Path) -> None:
    bug = read_case("sk-07")
    sources = bug.sources("order A")
    program = bug.program(tmp_path, shared_slots("") + "            optional: true\n")
    load(program, tmp_path, sources, bug.targets())
    routed = {"experts.gate_up_proj": sources["experts.gate_up_proj"]}
    (name,) = bug.targets()
    two = {name: torch.empty(2, 6, 4, dtype=torch.bfloat16)}
    load(program, tmp_path, routed, two)
    assert all_raw(two) == {name: all_raw(routed)["experts.gate_up_proj"]}
    assert told(refusal(program, tmp_path, routed, bug.targets())) == [("M532", name)]
    assert told(refusal(program, tmp_path, sources, two)) == [("M532", name)]


SLOTS = """
config: {required: [n_routed_experts, n_shared_experts]}
options: {fuse_shared: {default: true}}
index: {layer: {count: 1}, expert: {count: n_routed_experts, axis: ep}}
runtimes:
  own:
    mesh: vllm
    rules:
      - at: layers.{layer}.ffn
        rules:
          - target: experts.w13_weight
            sources: ["experts.{expert}.w1.weight", "experts.{expert}.w3.weight"]
            stack: expert
            dims: {out: [128, 128], in: 128}
          - target: experts.w13_weight
            sources: [shared_experts.w1.weight, shared_experts.w3.weight]
            when: fuse_shared
            append: expert
            dims: {expert: n_shared_experts, out: [128, 128], in: 128}
            stored: {out: (expert out)}
"""


def load_by_a_table_of_experts(sources: Tensors, targets: Tensors, num_experts: int) -> list[str]:
    """Load as the peer did: the shared expert becomes the next number, and the table ends before it. Return what is lost."""
    (target,) = targets.values()
    lost = []
    table = {f"experts.{expert}.{part}.weight": (expert, part) for expert in range(num_experts) for part in ("w1", "w3")}
    for name, tensor in sources.items():
        renamed = name.replace("shared_experts", f"experts.{num_experts}").removeprefix("layers.0.ffn.")
        if renamed not in table:
            lost.append(name)
            continue
        expert, part = table[renamed]
        row = 128 * (part == "w3")
        target[expert, row : row + 128] = tensor
    return lost


@case("sk-08")
def test_two_opinions_on_the_number_of_slots_are_an_error(bug: Case, tmp_path: Path) -> None:
    sources, targets = bug.sources(), bug.targets()
    shared = [name for name in sources if "shared_experts" in name]
    assert load_by_a_table_of_experts(sources, bug.targets(), bug["config"]["n_routed_experts"]) == shared

    (name,) = targets
    fused, separate = (bug.program(tmp_path, SLOTS, options={"fuse_shared": each}) for each in (True, False))
    findings = refusal(fused, tmp_path, sources, targets)
    assert told(findings) == [("M532", name)]
    assert "[2, 256, 128] in the model, and the rule gives [3, 256, 128]" in findings[0].message
    assert told(refusal(separate, tmp_path, sources, targets)) == [("M502", each) for each in shared]

    three = tensors({name: "F8_E4M3[3,256,128]"})
    load(fused, tmp_path, sources, three)
    parts = [
        [sources[f"layers.0.ffn.{each}.{part}.weight"] for part in ("w1", "w3")]
        for each in ("experts.0", "experts.1", "shared_experts")
    ]
    assert all_raw(three) == {name: b"".join(raw for each in parts for raw in all_raw(dict(enumerate(each))).values())}


SCALES = """
config: {required: [n_experts]}
options: {reads_input_scale: {default: true, note: whether the kernel reads it}}
index: {expert: {count: n_experts, axis: ep}}
runtimes:
  own:
    mesh: vllm
    skip: [{source: "experts.{expert}.down_proj.input_scale", why: the kernel does not read it, when: not reads_input_scale}]
    rules:
      - target: experts.w2_input_scale
        source: experts.{expert}.down_proj.input_scale
        when: reads_input_scale
        stack: expert
        dims: {}
      - target: experts.w2_weight_scale_2
        source: experts.{expert}.down_proj.weight_scale_2
        stack: expert
        dims: {}
"""


def load_into_zeros(sources: Tensors, targets: Tensors) -> None:
    """Load as the peer did: storage starts as zeros, slots are filled as their tensors come, and then inverted."""
    for tensor in targets.values():
        tensor.zero_()
    for name, tensor in sources.items():
        _, expert, _, leaf = name.split(".")
        targets[f"experts.w2_{leaf}"][int(expert)] = tensor
    targets["experts.w2_input_scale"].reciprocal_()


@case("sk-11")
def test_scale_that_one_expert_lacks_is_an_error(bug: Case, tmp_path: Path) -> None:
    sources, targets, wrong = bug.sources(), bug.targets(), bug.targets()
    load_into_zeros(sources, wrong)
    assert wrong["experts.w2_input_scale"].tolist() == [2.0, float("inf")]

    program = bug.program(tmp_path, SCALES)
    findings = refusal(program, tmp_path, sources, targets)
    assert told(findings) == [("M501", "experts.1.down_proj.input_scale")]
    load(program, tmp_path, sources | tensors({"experts.1.down_proj.input_scale": "F32[] all 0.25"}), targets)
    assert targets["experts.w2_input_scale"].tolist() == [0.5, 0.25]

    unread = bug.program(tmp_path, SCALES, options={"reads_input_scale": False})
    without = {name: tensor for name, tensor in bug.targets().items() if name != "experts.w2_input_scale"}
    report = load(unread, tmp_path, sources, without)
    assert (report.loaded, sum(report.skipped_by.values())) == (2, 1)


MIXED = """
config: {required: [packed_layers]}
index: {layer: {count: 2}}
formats:
  packed:
    - leaves:
        weight_packed: {dims: [out, in / 2], dtype: uint8}
        weight_scale: {dims: [out, in / 4], dtype: float8_e4m3fn}
runtimes:
  own:
    rules:
      - at: "layers.{layer}.linear_attn"
        rules:
          - target: in_proj.{leaf}
            sources: ["in_proj_qkv.{leaf}", "in_proj_b.{leaf}"]
            dims: {out: [6, 2], in: 4}
            WHEN
"""
UNFUSED = """
          - {target: "in_proj_qkv.{leaf}", dims: {out: 6, in: 4}, format: packed, when: layer in packed_layers}
          - {target: "in_proj_b.{leaf}", dims: {out: 2, in: 4}, when: layer in packed_layers}
"""


def load_fused_in_all_layers(sources: Tensors, targets: Tensors, packed_layers: list[int]) -> list[str]:
    """Load as the peer did: fuse in every layer unless every layer is packed; warn of what has no target, and return it."""
    layers = {int(name.split(".")[1]) for name in sources}
    assert not layers <= set(packed_layers)
    rows = {"in_proj_qkv": slice(0, 6), "in_proj_b": slice(6, 8)}
    lost = []
    for name, tensor in sources.items():
        part = name.split(".")[-2]
        target = targets.get(name.replace(part, "in_proj"))
        if target is None:
            lost.append(name)
        else:
            target[rows[part]] = tensor
    return lost


@case("sk-12")
def test_parts_of_two_precisions_are_not_fused(bug: Case, tmp_path: Path) -> None:
    sources = bug.sources()
    other = tensors(
        {f"layers.1.linear_attn.in_proj_{part}.weight": text for part, text in {"qkv": "BF16[6,4]", "b": "BF16[2,4]"}.items()}
    )
    checkpoint = sources | other
    targets, wrong = ({**bug.targets(), **tensors({"layers.1.linear_attn.in_proj.weight": "BF16[8,4]"})} for _ in range(2))
    packed = [f"layers.0.linear_attn.in_proj_qkv.{leaf}" for leaf in ("weight_packed", "weight_scale")]
    assert load_fused_in_all_layers(checkpoint, wrong, bug["config"]["packed_layers"]) == packed
    unset = [{"": each["layers.0.linear_attn.in_proj.weight"][:6]} for each in (wrong, targets)]
    assert all_raw(unset[0]) == all_raw(unset[1])

    findings = refusal(bug.program(tmp_path, MIXED.replace("WHEN", "")), tmp_path, checkpoint, targets)
    missing = ("M501", "layers.0.linear_attn.in_proj_qkv.weight")
    assert sorted(told(findings)) == [missing, *(("M502", name) for name in packed)]
    formats = MIXED.replace('"in_proj_qkv.{leaf}"', '{source: "in_proj_qkv.{leaf}", format: packed}').replace("WHEN", "")
    formats = formats.replace('"in_proj_b.{leaf}"', '{source: "in_proj_b.{leaf}", format: plain}')
    with pytest.raises(MapperError) as caught:
        bug.program(tmp_path, formats)
    assert [each.code for each in caught.value.diagnostics] == ["M218"]
    assert "the formats 'packed' and 'plain' of one rule never have the same target leaves" in str(caught.value)

    per_layer = bug.program(tmp_path, MIXED.replace("WHEN", "when: layer not in packed_layers") + UNFUSED)
    model = {name: torch.empty_like(tensor) for name, tensor in sources.items()}
    model["layers.1.linear_attn.in_proj.weight"] = torch.empty(8, 4, dtype=torch.bfloat16)
    load(per_layer, tmp_path, checkpoint, model)
    assert all_raw(model) == all_raw(sources | {"layers.1.linear_attn.in_proj.weight": torch.cat(list(other.values()))})
