import re

import pytest
import torch

from tests.oracle.families import FAMILIES, PLAIN_V3, family_tensors
from tests.oracle.goldens import (
    compare,
    failed_ranks,
    family_names,
    iter_ranks,
    layout_text,
    sentinel_tensors,
    sha256,
    unwritten_mask,
)
from tests.oracle.reduce import read_lines, reduce_family, write_lines

# Per family: the ranks with a golden, and those that vLLM could not build or load.
NUM_RANKS = {
    "deepseek_v2": (55, 0),
    "deepseek_v2_lite": (55, 0),
    "deepseek_v3": (55, 0),
    "deepseek_v32": (72, 0),
    "deepseek_v32_fp8": (72, 0),
    "deepseek_v3_fp8": (55, 0),
    "deepseek_v3_fp8_mis": (0, 55),
    "deepseek_v3_fp8_mis2": (55, 0),
    "deepseek_v3_fp8_mtp": (72, 0),
    "deepseek_v3_fp8_odd": (23, 0),
    "deepseek_v3_int4": (45, 10),
    "deepseek_v3_mtp": (72, 0),
    "deepseek_v4_bf16": (72, 0),
    "deepseek_v4_dspark": (70, 0),
    "deepseek_v4_fp4": (91, 0),
    "deepseek_v4_fp4_odd": (47, 0),
    "deepseek_v4_fp8": (72, 0),
    "gemma3": (21, 0),
    "gpt_oss_bf16": (55, 0),
    "gpt_oss_mxfp4": (54, 10),
    "llama": (21, 0),
    "glm4_moe": (72, 0),
    "mixtral": (55, 0),
    "qwen2_moe": (55, 0),
    "llama_awq": (21, 0),
    "llama_fp8_channel": (21, 0),
    "llama_fp8_tensor": (21, 0),
    "llama_fp8_tensor_of_one": (21, 0),
    "llama_gptq": (21, 0),
    "llama_int4": (21, 0),
    "llama_nvfp4": (21, 0),
    "phi3": (21, 0),
    "qwen3_fp8": (21, 0),
    "qwen3_fp8_halfblock": (3, 18),
    "qwen3_moe": (55, 0),
    "qwen3_moe_fp8": (55, 0),
}
EXPERT = re.compile(r"(.*\.experts)\.\d+\.(gate_proj|up_proj|down_proj)\.(\w+)")


def load_single_rank(family, *, mtp):
    """What vLLM's model holds at tp = pp = 1, written down from its parameter names."""
    config = FAMILIES[family].config
    sources = family_tensors(family)
    draft = f"model.layers.{config['num_hidden_layers']}."
    embed, head = sources[f"{draft}embed_tokens.weight" if mtp else "model.embed_tokens.weight"], sources["lm_head.weight"]
    params = {"model.embed_tokens.weight": pad_rows(embed)}
    if not mtp:
        params |= {"lm_head.weight": pad_rows(head), "model.norm.weight": sources["model.norm.weight"]}
    for name, tensor in sources.items():
        if not name.startswith("model.layers.") or name.startswith(draft) != mtp or name == f"{draft}embed_tokens.weight":
            continue
        target = name
        if mtp and any(part in name for part in (".self_attn.", ".mlp.", "_layernorm.")):
            target = name.replace(draft, f"{draft}mtp_block.", 1)
        if name.endswith("shared_head.head.weight"):
            tensor = pad_rows(tensor)
        if match := EXPERT.fullmatch(name):
            prefix, part, leaf = match.groups()
            experts = [f"{prefix}.{expert}" for expert in range(config["n_routed_experts"])]
            target = (
                target[: target.index(".experts.")] + f".experts.routed_experts.{'w2' if part == 'down_proj' else 'w13'}_{leaf}"
            )
            parts = ("down_proj",) if part == "down_proj" else ("gate_proj", "up_proj")
            if target not in params:
                params[target] = torch.stack([torch.cat([sources[f"{e}.{p}.{leaf}"] for p in parts]) for e in experts])
            continue
        for first, second, fused in (
            ("gate_proj", "up_proj", "gate_up_proj"),
            ("q_a_proj", "kv_a_proj_with_mqa", "fused_qkv_a_proj"),
        ):
            if f".{first}." in name:
                tensor = torch.cat([tensor, sources[name.replace(first, second)]])
                target = target.replace(first, fused)
            elif f".{second}." in name and name.replace(second, first) in sources:
                target = ""
        if target:
            params[target] = tensor
    return params


def pad_rows(tensor):
    return torch.cat([tensor, tensor.new_zeros(-len(tensor) % 64, tensor.shape[1])])


def rank_of(family, text, number, *, mtp=False):
    (rank,) = [each for each in iter_ranks(family) if (layout_text(each), each.rank, each.mtp) == (text, number, mtp)]
    return rank


@pytest.fixture(scope="module")
def single():
    return rank_of("deepseek_v3", "tp=1,pp=1,dp=1,ep=1", 0)


@pytest.fixture(scope="module")
def loaded():
    return load_single_rank("deepseek_v3", mtp=False)


@pytest.fixture
def tensors(loaded):
    return {name: tensor.clone() for name, tensor in loaded.items()}


def test_every_family_has_its_goldens_or_says_why_not():
    found = {family: (len(list(iter_ranks(family))), len(failed_ranks(family))) for family in family_names()}
    assert found == NUM_RANKS
    assert set(FAMILIES) == set(NUM_RANKS)
    assert {(each.text, each.error) for each in failed_ranks("gpt_oss_mxfp4")} == {
        (
            f"tp={tp},pp={pp},dp=1,ep={tp},redundant_experts=4",
            "NotImplementedError: EPLB is not supported GptOssMxfp4MoEMethod.",
        )
        for tp, pp in ((2, 1), (2, 2), (4, 1))
    }
    assert {each.error for each in failed_ranks("deepseek_v3_fp8_mis")} == {
        "RuntimeError: start (2) + length (2) exceeds dimension size (3)."
    }


@pytest.mark.parametrize(
    ("family", "mtp"), [(family, mtp) for family in PLAIN_V3 for mtp in (False, True) if not mtp or family.endswith("mtp")]
)
def test_a_hand_written_single_rank_load_equals_the_golden(family, mtp):
    rank = rank_of(family, "tp=1,pp=1,dp=1,ep=1", 0, mtp=mtp)
    assert compare(rank, load_single_rank(family, mtp=mtp)) == []


def test_each_layout_lists_all_its_ranks_once():
    for family in NUM_RANKS:
        seen = {}
        for rank in iter_ranks(family):
            seen.setdefault((rank.setting, rank.runtime == "vllm", rank.pp, rank.tp), []).append(rank.rank)
        for (setting, is_target, pp, tp), numbers in seen.items():
            first = 0 if is_target else (pp - 1) * tp  # a draft lives on the last stage
            assert sorted(numbers) == list(range(first, pp * tp)), setting


def test_layout_text_spells_redundancy_and_placement():
    texts = {layout_text(rank) for rank in iter_ranks("deepseek_v3")}
    assert {
        "tp=2,pp=2,dp=1,ep=2,redundant_experts=4",
        "tp=4,pp=1,dp=1,ep=4,placement=round_robin",
        "tp=1,pp=2,dp=1,ep=1",
    } <= texts


def test_one_flipped_bit_is_reported_and_nothing_else(single, tensors):
    name = "model.layers.1.mlp.experts.routed_experts.w13_weight"
    tensors[name].view(torch.uint8)[5, 7, 11] ^= 1
    (difference,) = compare(single, tensors)
    assert difference.startswith(f"{name}: bytes differ (sha256 {sha256(tensors[name])[:12]}, expected ")
    assert difference.endswith(f"; 0 of {tensors[name].numel()} elements unwritten)")


def test_swapped_rows_are_reported(single, tensors):
    name = "model.layers.0.self_attn.q_b_proj.weight"
    tensors[name][[0, 1]] = tensors[name][[1, 0]]
    assert [each.partition(" (")[0] for each in compare(single, tensors)] == [f"{name}: bytes differ"]


def test_a_wrong_shape_and_a_wrong_dtype_are_reported_together(single, tensors):
    name = "model.layers.0.self_attn.o_proj.weight"
    tensors[name] = tensors[name].T.float()
    assert compare(single, tensors) == [
        f"{name}: shape is (256, 128), expected (128, 256)",
        f"{name}: dtype is torch.float32, expected torch.bfloat16",
    ]


def test_a_renamed_parameter_is_missing_under_the_one_name_and_unknown_under_the_other(single, tensors):
    tensors["model.final_norm.weight"] = tensors.pop("model.norm.weight")
    assert compare(single, tensors) == ["model.norm.weight: missing", "model.final_norm.weight: not a parameter of this rank"]


def test_an_alias_is_compared_as_the_parameter_it_names(single, tensors):
    alias, name = single.aliases[0]
    assert alias != name
    tensors[alias] = tensors[name]
    assert compare(single, tensors) == []
    tensors[alias] = tensors[name] + 1
    assert [each.partition(" (")[0] for each in compare(single, tensors)] == [f"{alias}: bytes differ"]


def test_a_strided_view_is_compared_by_its_elements(single, tensors):
    name = "model.layers.0.self_attn.kv_b_proj.weight"
    tensors[name] = tensors[name].T.contiguous().T
    assert compare(single, tensors) == []


def test_sentinel_tensors_are_wholly_unwritten_and_differ_everywhere(single):
    filled = sentinel_tensors(single)
    assert all(unwritten_mask(tensor).all() for tensor in filled.values())
    assert len(compare(single, filled)) == len(single.params)


# vLLM 0.32 leaves the replicas of redundant experts in a draft model unloaded: 4 of the last rank's 6 slots.
REPLICAS = "tp=2,pp=1,dp=1,ep=2,redundant_experts=4"


@pytest.mark.parametrize("family", ["deepseek_v3_mtp", "deepseek_v3_fp8_mtp"])
def test_a_partly_untouched_parameter_is_compared_in_three_ways(family):
    rank = rank_of(family, REPLICAS, 1, mtp=True)
    params = [param for param in rank.params if param.untouched]
    assert {param.untouched.box[0] for param in params} == {(2, 6)}
    full = load_single_rank(family, mtp=True)
    for param in params:
        tensor = sentinel_tensors(rank)[param.name]
        others = {each.name for each in rank.params} - {param.name}

        def differences(untouched, name=param.name, tensor=tensor, others=others):
            found = compare(rank, {name: tensor}, untouched=untouched)
            return [each for each in found if each.partition(":")[0] not in others]

        tensor[:2] = full[param.name][6:8]  # physical experts 6 to 11 are on this rank, 0 to 7 are loaded
        assert differences("sentinel") == []
        assert differences("any") == []
        init = torch.tensor(list(bytes.fromhex(param.untouched.init[0])), dtype=torch.uint8).flip(0)
        tensor[2:].view(torch.uint8).copy_(init.repeat(tensor[2:].numel()).reshape(tensor[2:].view(torch.uint8).shape))
        assert differences("init") == []
        assert len(param.untouched.init) == 1
        tensor[2:] = full[param.name][:4]  # what the replicas should hold
        assert differences("any") == []
        assert len(differences("sentinel")) == len(differences("init")) == 1
        tensor[0] = full[param.name][5]
        assert len(differences("any")) == 1


def test_every_region_that_vllm_leaves_alone_in_v2_and_v3_is_of_replicas():
    partly = {
        (str(rank), param.name)
        for family in PLAIN_V3
        for rank in iter_ranks(family)
        for param in rank.params
        if param.untouched
    }
    assert {rank for rank, _ in partly} == {
        f"{family} vllm-mtp {REPLICAS} rank 1" for family in ("deepseek_v3_mtp", "deepseek_v3_fp8_mtp")
    }
    assert len(partly) == 2 + 4


def test_what_vllm_leaves_alone_elsewhere_is_padding_replicas_or_kept():
    regions = {
        (param.name.rpartition(".")[2], param.untouched.init)
        for family in set(NUM_RANKS) - set(PLAIN_V3)
        for rank in iter_ranks(family)
        if not rank.redundant and not rank.mtp
        for param in rank.params
        if param.untouched
    }
    assert regions == {
        ("attn_sink", ("ff800000",)),  # slots of heads that a rank does not have: minus infinity
        *((name, ("00",)) for name in ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale")),
        ("w13_bias", ("0000",)),
        *((f"{name}_scale", ("bf80",)) for name in ("q", "k", "v", "prob")),  # -1: not measured
        *((f"{name}_scale", ("3f800000",)) for name in ("q", "k", "v")),  # for compressed-tensors 1
        *((f"{name}_zero_point", ("0000",)) for name in ("q", "k", "v")),
        ("weight", ("7fc0",)),  # a DSpark draft's embedding and head
    }


def test_settings_tell_apart_what_shares_a_layout():
    settings = {rank.setting for rank in iter_ranks("deepseek_v4_fp4") if layout_text(rank) == "tp=2,pp=1,dp=1,ep=2"}
    assert settings == {
        "deepseek_v4_fp4 vllm tp=2,pp=1,dp=1,ep=2",
        "deepseek_v4_fp4 vllm tp=2,pp=1,dp=1,ep=2 sm10.0",
        "deepseek_v4_fp4 vllm tp=2,pp=1,dp=1,ep=2 mega_moe sm10.0",
        "deepseek_v4_fp4 vllm-mtp tp=2,pp=1,dp=1,ep=2",
        "deepseek_v4_fp4 vllm-mtp tp=2,pp=1,dp=1,ep=2 mega_moe sm10.0",
    }


def test_what_is_expected_in_an_untouched_part_may_differ_by_parameter():
    rank = next(each for each in iter_ranks("deepseek_v4_dspark") if each.dspark)
    kept = ["model.embed_tokens.weight", "lm_head.weight"]  # vLLM writes nothing of these
    for number, name in enumerate(kept):
        modes = {name: "init", kept[1 - number]: "sentinel"}
        found = {each.partition(":")[0] for each in compare(rank, sentinel_tensors(rank), untouched=modes)}
        assert found & set(kept) == {name}


def test_reduction_lists_failed_ranks_and_writes_the_same_bytes_each_time(tmp_path):
    tensor = {"name": "a", "shape": [2], "dtype": "float32", "sha256": "00", "untouched_fraction": 0.0}
    rank = {
        "family": "f",
        "vllm": "0",
        "platform": "cuda",
        "tp": 2,
        "pp": 1,
        "ep": False,
        "redundant": 0,
        "placement": "linear",
    }
    rank |= {"mtp": False, "pp_layers": [0, 1], "aliases": [], "params": [tensor], "extra": [], "buffers": []}
    mega = rank | {"rank": 2, "mega": True, "dspark": False, "cap": "10.0"}
    lines = reduce_family([rank | {"rank": 0, "cap": "9.0"}, rank | {"rank": 1, "load_error": "RuntimeError: no"}, mega])
    assert [line.get("rank") for line in lines] == [None, 0, 2]
    assert [{"mega", "dspark", "cap"} & set(line) for line in lines] == [set(), set(), {"mega", "cap"}]
    assert lines[0]["failed"] == [
        {
            "tp": 2,
            "pp": 1,
            "ep": False,
            "redundant": 0,
            "placement": "linear",
            "mtp": False,
            "rank": 1,
            "error": "RuntimeError: no",
        }
    ]
    for name in ("one.gz", "two.gz"):
        write_lines(lines, tmp_path / name)
    assert (tmp_path / "one.gz").read_bytes() == (tmp_path / "two.gz").read_bytes()
    assert read_lines(tmp_path / "one.gz") == lines
