import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from demo.checkpoint import CONFIG, element_spans, element_values, write_tiny_deepseek_v3
from demo.count import count

SCRIPT = Path(__file__).parents[1] / "demo" / "count.py"
NUM_LAYERS, NUM_EXPERTS = CONFIG["num_hidden_layers"], CONFIG["n_routed_experts"]
MOE = "model.layers.2.mlp.experts.routed_experts"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_tiny_deepseek_v3(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def tensors(checkpoint):
    return {name: tensor for file in checkpoint.glob("*.safetensors") for name, tensor in load_file(file).items()}


def slice_rank(tensors, *, tp, pp, dp, ep, rank):
    """The parameters of one rank of vLLM, sliced by hand."""
    tp_rank, stage, dp_rank = rank % tp, rank // tp % pp, rank // tp // pp
    assert pp in (1, 2)
    layers = {1: [range(NUM_LAYERS)], 2: [range(3), range(3, 5)]}[pp][stage]

    def rows(name, num=tp, part=tp_rank):
        return tensors[name].chunk(num, dim=0)[part]

    def columns(name, num=tp, part=tp_rank):
        return tensors[name].chunk(num, dim=1)[part]

    def vocabulary(name):
        tensor = tensors[name]
        padded = torch.cat([tensor, torch.zeros(-len(tensor) % 64, tensor.shape[1])])
        return padded.chunk(tp)[tp_rank]

    params = {}
    if stage == 0:
        params["model.embed_tokens.weight"] = vocabulary("model.embed_tokens.weight")
    if stage == pp - 1:
        params["model.norm.weight"] = tensors["model.norm.weight"]
        params["lm_head.weight"] = vocabulary("lm_head.weight")
    for layer in layers:
        at = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm", "self_attn.q_a_layernorm", "self_attn.kv_a_layernorm"):
            params[f"{at}{name}.weight"] = tensors[f"{at}{name}.weight"]
        latents = [tensors[f"{at}self_attn.{name}.weight"] for name in ("q_a_proj", "kv_a_proj_with_mqa")]
        params[f"{at}self_attn.fused_qkv_a_proj.weight"] = torch.cat(latents)
        for name in ("q_b_proj", "kv_b_proj"):
            params[f"{at}self_attn.{name}.weight"] = rows(f"{at}self_attn.{name}.weight")
        params[f"{at}self_attn.o_proj.weight"] = columns(f"{at}self_attn.o_proj.weight")
        mlp = f"{at}mlp." if layer < 2 else f"{at}mlp.shared_experts."
        params[f"{mlp}gate_up_proj.weight"] = torch.cat([rows(f"{mlp}gate_proj.weight"), rows(f"{mlp}up_proj.weight")])
        params[f"{mlp}down_proj.weight"] = columns(f"{mlp}down_proj.weight")
        if layer < 2:
            continue
        for name in ("gate.weight", "gate.e_score_correction_bias"):
            params[f"{at}mlp.{name}"] = tensors[f"{at}mlp.{name}"]
        part, parts = dp_rank * tp + tp_rank, tp * dp
        owned = [expert for expert in range(NUM_EXPERTS) if ep == 1 or expert_owner(expert, ep) == part]
        cut = {"num": parts if ep == 1 else 1, "part": part if ep == 1 else 0}
        w13, w2 = [], []
        for expert in owned:
            one = f"{at}mlp.experts.{expert}."
            w13.append(torch.cat([rows(f"{one}gate_proj.weight", **cut), rows(f"{one}up_proj.weight", **cut)]))
            w2.append(columns(f"{one}down_proj.weight", **cut))
        params[f"{at}mlp.experts.routed_experts.w13_weight"] = torch.stack(w13)
        params[f"{at}mlp.experts.routed_experts.w2_weight"] = torch.stack(w2)
    return params


def expert_owner(expert, ep):
    """6 experts over 4 ranks are 2, 2, 1, 1."""
    return {1: [0] * 6, 2: [0, 0, 0, 1, 1, 1], 4: [0, 0, 1, 1, 2, 3]}[ep][expert]


def slice_ranks(tensors, *, tp, pp, dp, ep):
    return [slice_rank(tensors, tp=tp, pp=pp, dp=dp, ep=ep, rank=rank) for rank in range(tp * pp * dp)]


def write_ranks(folder, ranks, layout):
    (folder / "layout.json").write_text(json.dumps(layout))
    for number, params in enumerate(ranks):
        save_file({name: tensor.contiguous().clone() for name, tensor in params.items()}, folder / f"rank{number}.safetensors")
    return folder


def run_script(*arguments):
    done = subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, check=False)
    assert not done.stderr
    return done.returncode, done.stdout.splitlines()


LAYOUT = {"tp": 2, "pp": 2, "dp": 1, "ep": 2}
LAYOUTS = [
    LAYOUT,
    {"tp": 2, "pp": 2, "dp": 1, "ep": 1},
    {"tp": 4, "pp": 1, "dp": 1, "ep": 4},
    {"tp": 2, "pp": 1, "dp": 2, "ep": 4},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_correct_ranks_pass(layout, checkpoint, tensors, tmp_path):
    errors, _ = count(write_ranks(tmp_path, slice_ranks(tensors, **layout), layout), checkpoint)
    assert errors == []


def test_the_script_exits_with_0_and_reports_how_often_each_kind_is_held(checkpoint, tensors, tmp_path):
    code, lines = run_script(write_ranks(tmp_path, slice_ranks(tensors, **LAYOUT), LAYOUT), checkpoint)
    assert (code, lines[-1]) == (0, "0 errors")
    words = [line.split() for line in lines]
    times = {" ".join(each[: each.index("tensors,") - 1]): each[-4:] for each in words if "tensors," in each}
    assert times == {
        "vocabulary": ["1", "to", "1", "times"],
        "whole": ["2", "to", "2", "times"],
        "rows": ["1", "to", "1", "times"],
        "columns": ["1", "to", "1", "times"],
        "expert rows": ["1", "to", "1", "times"],
        "expert columns": ["1", "to", "1", "times"],
        "nowhere": ["0", "to", "0", "times"],
    }
    num_elements = sum(tensor.numel() for tensor in tensors.values())
    num_held = sum(tensor.numel() for params in slice_ranks(tensors, **LAYOUT) for tensor in params.values())
    num_zeros = 2 * (576 - 521) * CONFIG["hidden_size"]  # embedding and head
    assert lines[0] == f"{num_elements:,} elements; {num_held - num_zeros:,} held on 4 ranks, and {num_zeros:,} zeros"


def swap_between_ranks(name):
    def damage(ranks):
        ranks[0][name], ranks[1][name] = ranks[1][name], ranks[0][name]

    return damage


def change(name, function, rank=0):
    def damage(ranks):
        changed = ranks[rank][name].clone()
        ranks[rank][name] = function(changed)

    return damage


def put(index, value):
    def function(tensor):
        tensor[index] = value(tensor) if callable(value) else value
        return tensor

    return function


def swap_halves(tensor):
    return torch.cat(tensor.chunk(2)[::-1])


def drop_parameter(ranks):
    del ranks[3]["model.norm.weight"]


def hold_a_draft_tensor(ranks):
    span = element_spans()["model.layers.5.enorm.weight"]
    ranks[3]["model.layers.5.enorm.weight"] = element_values(torch.arange(span.first, span.first + span.shape[0]))


def rename_parameter(ranks):
    ranks[0]["model.layers.0.mlp.up_gate_proj.weight"] = ranks[0].pop("model.layers.0.mlp.gate_up_proj.weight")


def swap_two_norms(ranks):
    one, other = (f"model.layers.{layer}.input_layernorm.weight" for layer in (0, 1))
    ranks[0][one], ranks[0][other] = ranks[0][other], ranks[0][one]


Q_B, GATE_UP = "model.layers.0.self_attn.q_b_proj.weight", "model.layers.1.mlp.gate_up_proj.weight"
W13 = f"{MOE}.w13_weight"
DAMAGES = {
    "slices of two ranks swapped": (
        swap_between_ranks(Q_B),
        "rank 0: model.layers.0.self_attn.q_b_proj.weight[0, 0] is held 0 times, not 1; 10600 are wrong",
    ),
    "columns of two ranks swapped": (
        swap_between_ranks("model.layers.0.self_attn.o_proj.weight"),
        "rank 0: model.layers.0.self_attn.o_proj.weight[0, 0] is held 0 times, not 1; 9568 are wrong",
    ),
    "experts of two ranks swapped": (
        swap_between_ranks(W13),
        "rank 0: model.layers.2.mlp.experts.0.gate_proj.weight[0, 0] is held 0 times, not 1; 6992 are wrong",
    ),
    "gate and up swapped": (change(GATE_UP, swap_halves), f"rank 0: {GATE_UP}: at 9752 the order of elements breaks"),
    "gate and up of an expert swapped": (
        change(W13, lambda tensor: torch.stack([tensor[0], swap_halves(tensor[1]), tensor[2]])),
        f"rank 0: {W13}: at 20976 the order of elements breaks",
    ),
    "two experts swapped": (
        change(W13, lambda tensor: tensor[[1, 0, 2]]),
        f"rank 0: {W13}: at 13984 the order of elements breaks",
    ),
    "an expert dropped": (
        change(W13, lambda tensor: tensor[:2]),
        "rank 0: model.layers.2.mlp.experts.2.gate_proj.weight[0, 0] is held 0 times, not 1; 6992 are wrong",
    ),
    "an expert duplicated": (
        change(W13, lambda tensor: tensor[[0, 1, 1]]),
        "rank 0: model.layers.2.mlp.experts.1.gate_proj.weight[0, 0] is held 2 times, not 1; 6992 are wrong",
    ),
    "a row shifted": (
        change(Q_B, lambda tensor: tensor.roll(1, dims=0)),
        f"rank 0: {Q_B}: at 53 the order of elements breaks",
    ),
    "a cut one row late": (
        lambda ranks: change(Q_B, lambda tensor: torch.cat([tensor[1:], ranks[1][Q_B][:1]]))(ranks),
        f"rank 0: {Q_B}[0, 0] is held 0 times, not 1; 106 are wrong",
    ),
    "a transposed matrix": (
        change("model.layers.0.mlp.down_proj.weight", lambda tensor: tensor.T),
        "rank 0: model.layers.0.mlp.down_proj.weight: at 92 the order of elements breaks",
    ),
    "one element wrong": (
        change("model.norm.weight", put(7, 0.125), rank=2),
        "rank 2: model.norm.weight[7] is held 0 times, not 1; 1 are wrong",
    ),
    "one element not a number": (
        change("model.norm.weight", put(7, float("nan")), rank=2),
        "rank 2: model.norm.weight: at 7 is nan, which belongs in no parameter",
    ),
    "one element zero": (change("model.norm.weight", put(7, 0.0), rank=2), "rank 2: model.norm.weight has +1 zeros"),
    "padding not zero": (
        change("lm_head.weight", put((-1, -1), 1.0), rank=3),
        "rank 3: lm_head.weight has -1 zeros",
    ),
    "padding missing": (
        change("lm_head.weight", lambda tensor: tensor[:-55], rank=3),
        "rank 3: lm_head.weight has -5060 zeros",
    ),
    "a parameter missing": (drop_parameter, "rank 3: model.norm.weight[0] is held 0 times, not 1; 92 are wrong"),
    "a draft tensor held": (
        hold_a_draft_tensor,
        "rank 3: model.layers.5.enorm.weight[0] is held 1 times, not 0; 92 are wrong",
    ),
    "a parameter under another name": (
        rename_parameter,
        "rank 0: model.layers.0.mlp.up_gate_proj.weight: at 0 is -0.12523400783538818, "
        "which belongs in model.layers.0.mlp.gate_up_proj.weight",
    ),
    "two norms swapped": (
        swap_two_norms,
        "rank 0: model.layers.0.input_layernorm.weight: at 0 is -0.31555724143981934, "
        "which belongs in model.layers.1.input_layernorm.weight",
    ),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_damaged_ranks_fail_and_the_first_offending_elements_are_named(what, checkpoint, tensors, tmp_path):
    damage, expected = DAMAGES[what]
    ranks = slice_ranks(tensors, **LAYOUT)
    damage(ranks)
    errors, _ = count(write_ranks(tmp_path, ranks, LAYOUT), checkpoint)
    assert expected in errors, "\n".join(errors)


def test_the_script_exits_with_1_and_prints_the_errors(checkpoint, tensors, tmp_path):
    ranks = slice_ranks(tensors, **LAYOUT)
    drop_parameter(ranks)
    code, lines = run_script(write_ranks(tmp_path, ranks, LAYOUT), checkpoint)
    assert (code, lines[-1]) == (1, "1 errors")
    assert lines[-2] == "rank 3: model.norm.weight[0] is held 0 times, not 1; 92 are wrong"
