"""Counts, from element values alone, on which ranks every element of a checkpoint is held.

    python demo/count.py RANKS_FOLDER CHECKPOINT_FOLDER

No two elements of the checkpoint are alike and none is zero, so a value read out of a rank's memory says which element it
is. RANKS_FOLDER holds `layout.json` ({tp, pp, dp, ep}) and `rank{r}.safetensors` per rank (parameter name -> tensor). What
is expected is written by hand from the names of DeepSeek-V3's tensors and of vLLM's parameters; nothing comes from a spec.
"""

import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

LAYER = r"(model\.layers\.(?P<layer>\d+)\.)"
EXPERT = LAYER + r"mlp\.experts\.(?P<expert>\d+)\."
TABLE = (  # tensor of the checkpoint, the parameter it lies in, how the ranks of a stage share it, its stage if not its layer's
    (r"model\.embed_tokens\.weight", r"\g<0>", "vocabulary", "first"),
    (r"model\.norm\.weight", r"\g<0>", "whole", "last"),
    (r"lm_head\.weight", r"\g<0>", "vocabulary", "last"),
    (LAYER + r"(input|post_attention)_layernorm\.weight", r"\g<0>", "whole", ""),
    (LAYER + r"self_attn\.(q_a_proj|kv_a_proj_with_mqa)\.weight", r"\1self_attn.fused_qkv_a_proj.weight", "whole", ""),
    (LAYER + r"self_attn\.(q|kv)_a_layernorm\.weight", r"\g<0>", "whole", ""),
    (LAYER + r"self_attn\.(q|kv)_b_proj\.weight", r"\g<0>", "rows", ""),
    (LAYER + r"self_attn\.o_proj\.weight", r"\g<0>", "columns", ""),
    (LAYER + r"mlp\.gate\.(weight|e_score_correction_bias)", r"\g<0>", "whole", ""),
    (LAYER + r"(mlp\.(shared_experts\.)?)(gate|up)_proj\.weight", r"\1\3gate_up_proj.weight", "rows", ""),
    (LAYER + r"mlp\.(shared_experts\.)?down_proj\.weight", r"\g<0>", "columns", ""),
    (EXPERT + r"(gate|up)_proj\.weight", r"\1mlp.experts.routed_experts.w13_weight", "expert rows", ""),
    (EXPERT + r"down_proj\.weight", r"\1mlp.experts.routed_experts.w2_weight", "expert columns", ""),
)


def expect(name: str, config: dict[str, Any], pp: int) -> tuple[str, str, int, int]:
    """Return the parameter a tensor lies in, how ranks share it, on which stage, and its expert; "nowhere" in draft layers."""
    num_layers = config["num_hidden_layers"]
    sizes = [num_layers // pp + (pp - 1 - num_layers % pp <= stage < pp - 1) for stage in range(pp)]  # the last gets no extra
    stages = np.repeat(range(pp), sizes).tolist()
    ((match, parameter, kind, stage),) = ((m, *rest) for pattern, *rest in TABLE if (m := re.fullmatch(pattern, name)))
    layer = int(match.groupdict().get("layer") or 0)
    if layer >= num_layers:
        return "", "nowhere", -1, 0
    expert = int(match.groupdict().get("expert") or 0)
    return match.expand(parameter), kind, {"first": 0, "last": pp - 1}.get(stage, stages[layer]), expert


def share(shape: tuple[int, ...], kind: str, owner: int | None, num_parts: int, part: int) -> tuple[np.ndarray, int]:
    """Return how often part `part` of `num_parts` holds each element of a tensor, and how many zeros pad its share."""
    mask = np.zeros(shape, dtype=np.int64)
    if kind == "vocabulary":  # padded to whole 64 rows
        num_rows = -(-shape[0] // 64) * 64 // num_parts
        mask[part * num_rows : (part + 1) * num_rows] = 1
        return mask, num_rows * shape[1] - int(mask.sum())
    if kind == "whole" or owner is not None:
        mask[:] = owner in (None, part)
    else:
        np.split(mask, num_parts, axis=int(kind.endswith("columns")))[part][:] = 1  # a view; unequal parts raise
    return mask, 0


def position(name: str) -> list[int | str]:
    """Return a sort key for the order in which tensors stand in a parameter: q_a before kv_a, gate before up, by number."""
    return [int(part) if part.isdigit() else part for part in name.replace("q_a_proj", "a_q_proj").split(".")]


def count(ranks_folder: Path, checkpoint_folder: Path) -> tuple[list[str], list[str]]:
    """Return the errors, and a line per kind of tensor that says on how many ranks its elements are held."""
    config = json.loads((checkpoint_folder / "config.json").read_text())
    layout = json.loads((ranks_folder / "layout.json").read_text())
    tp, pp, dp, ep = (layout[axis] for axis in ("tp", "pp", "dp", "ep"))
    owners = [rank for rank, each in enumerate(np.array_split(range(config["n_routed_experts"]), ep)) for _ in each]
    read = {name: tensor for file in checkpoint_folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    tensors = {name: read[name] for name in sorted(read, key=position)}
    ends = np.cumsum([tensor.size for tensor in tensors.values()])
    spans = {name: slice(end - tensor.size, end) for (name, tensor), end in zip(tensors.items(), ends, strict=True)}
    values = np.concatenate([tensor.ravel() for tensor in tensors.values()])
    by_value = np.argsort(values)
    unique = values[by_value]
    assert (np.diff(unique) > 0).all(), "two elements of the checkpoint are alike"
    assert values.all(), "an element of the checkpoint is zero"
    expected = {name: expect(name, config, pp) for name in tensors}
    home = np.repeat([each[0] for each in expected.values()], [tensor.size for tensor in tensors.values()])
    errors, copies, num_zeros = [], np.zeros(values.size, dtype=np.int64), 0
    for rank in range(tp * pp * dp):
        tp_rank, stage, dp_rank = rank % tp, rank // tp % pp, rank // (tp * pp)
        held, zeros = np.zeros(values.size, dtype=np.int64), Counter()
        for parameter, tensor in load_file(ranks_folder / f"rank{rank}.safetensors").items():
            flat = tensor.ravel()
            places = np.searchsorted(unique, flat).clip(max=values.size - 1)
            found = unique[places] == flat
            numbers = by_value[places[found]]
            np.add.at(held, numbers, 1)
            zeros[parameter] = int((flat == 0).sum())
            at = f"rank {rank}: {parameter}: at"
            errors += [f"{at} {i} is {flat[i]!r}, no element" for i in np.flatnonzero(~found & (flat != 0))[:1]]
            errors += [
                f"{at} {i} is an element of {home[numbers[i]]!r}" for i in np.flatnonzero(home[numbers] != parameter)[:1]
            ]
            in_order = np.diff(np.where(found, by_value[places], values.size)) >= 0  # padding comes last
            errors += [f"{at} {i + 1} the order of elements breaks" for i in np.flatnonzero(~in_order)[:1]]
        num_zeros += zeros.total()
        for name, (parameter, kind, its_stage, expert) in expected.items():
            mask, found = np.zeros(tensors[name].shape, dtype=np.int64), held[spans[name]].reshape(tensors[name].shape)
            if stage == its_stage:
                of_expert = kind.startswith("expert")
                num_parts, part = (tp * dp, dp_rank * tp + tp_rank) if of_expert else (tp, tp_rank)
                mask, num_padding = share(mask.shape, kind, owners[expert] if of_expert and ep > 1 else None, num_parts, part)
                zeros[parameter] -= num_padding
            wrong = np.argwhere(found != mask)
            for i in map(tuple, wrong[:1].tolist()):
                errors.append(
                    f"rank {rank}: {name}{list(i)} is held {found[i]} times, not {mask[i]} ({len(wrong)} such elements)"
                )
        errors += [f"rank {rank}: {parameter} has {number:+} zeros" for parameter, number in zeros.items() if number]
        copies += held
    report = []
    for kind in dict.fromkeys(each[1] for each in expected.values()):
        names = [name for name in tensors if expected[name][1] == kind]
        times = np.concatenate([copies[spans[name]] for name in names])
        report.append(
            f"{kind:14} {len(names):4} tensors, {times.size:9,} elements, each held {times.min()} to {times.max()} times"
        )
    return errors, [
        *report,
        f"{values.size:,} elements; {copies.sum():,} held on {tp * pp * dp} ranks, and {num_zeros:,} zeros",
    ]


if __name__ == "__main__":
    found_errors, report = count(Path(sys.argv[1]), Path(sys.argv[2]))
    print(*report, *found_errors[:20], f"{len(found_errors)} errors", sep="\n")
    sys.exit(1 if found_errors else 0)
