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
    (LAYER + r"(embed_tokens|enorm|hnorm|eh_proj|shared_head\.(norm|head))\.weight", "", "nowhere", ""),  # of draft layers only
)


def expect(name: str, config: dict[str, Any], pp: int) -> tuple[str, str, int, int]:
    """Return the parameter a tensor lies in, how ranks share it, on which stage, and its expert; "nowhere" in draft layers."""
    num_layers = config["num_hidden_layers"]
    sizes = [num_layers // pp + (pp - 1 - num_layers % pp <= stage < pp - 1) for stage in range(pp)]  # the last gets no extra
    ((match, parameter, kind, stage),) = [(m, *row[1:]) for row in TABLE if (m := re.fullmatch(row[0], name))]
    layer, expert = (int(match.groupdict().get(index) or 0) for index in ("layer", "expert"))
    if layer >= num_layers:
        return "", "nowhere", -1, 0
    stages = {"first": 0, "last": pp - 1, "": np.repeat(range(pp), sizes)[layer]}
    return match.expand(parameter), kind, int(stages[stage]), expert


def mark_share(mask: np.ndarray, kind: str, owner: int | None, num_parts: int, part: int) -> int:
    """Set `mask` to 1 where part `part` of `num_parts` holds a tensor; return how many zeros pad its share."""
    if kind == "vocabulary":  # padded to whole 64 rows
        num_rows = -(-len(mask) // 64) * 64 // num_parts
        mask[part * num_rows : (part + 1) * num_rows] = 1
        return int(num_rows * mask.shape[1] - mask.sum())
    if kind == "whole" or owner is not None:
        mask[:] = owner in (None, part)
    else:
        np.split(mask, num_parts, axis=int(kind.endswith("columns")))[part][:] = 1  # a view; unequal parts raise
    return 0


def count(ranks_folder: Path, checkpoint_folder: Path) -> tuple[list[str], list[str]]:
    """Return the errors, and a line per kind of tensor that says how often its elements are held on all ranks together."""
    config = json.loads((checkpoint_folder / "config.json").read_text())
    layout = json.loads((ranks_folder / "layout.json").read_text())
    tp, pp, dp, ep = (layout[axis] for axis in ("tp", "pp", "dp", "ep"))
    owners = [rank for rank, each in enumerate(np.array_split(range(config["n_routed_experts"]), ep)) for _ in each]
    read = {name: each for file in checkpoint_folder.glob("*.safetensors") for name, each in load_file(file).items()}
    # The order in which tensors stand in a parameter: q_a before kv_a, gate before up, experts by number.
    order = {name: re.sub(r"\d+", lambda digits: digits[0].zfill(9), name.replace("q_a_proj", "a_q_proj")) for name in read}
    tensors = {name: read[name] for name in sorted(read, key=order.__getitem__)}
    expected = {name: expect(name, config, pp) for name in tensors}
    sizes = [tensor.size for tensor in tensors.values()]
    spans = {name: slice(end - size, end) for name, size, end in zip(tensors, sizes, np.cumsum(sizes), strict=True)}
    values = np.concatenate([tensor.ravel() for tensor in tensors.values()])
    by_value = np.argsort(values)
    unique = values[by_value]
    assert (np.diff(unique) > 0).all() & values.all(), "two elements of the checkpoint are alike, or one is zero"
    parameters = [*dict.fromkeys(parameter for parameter, *_ in expected.values()), "no parameter"]
    home = np.repeat([*(parameters.index(parameter) for parameter, *_ in expected.values()), len(parameters) - 1], [*sizes, 1])
    errors, copies, num_zeros = [], np.zeros_like(home), 0
    for rank in range(tp * pp * dp):
        tp_rank, stage, dp_rank = rank % tp, rank // tp % pp, rank // (tp * pp)
        held, zeros = np.zeros_like(home), Counter[str]()
        for parameter, tensor in load_file(ranks_folder / f"rank{rank}.safetensors").items():
            flat, at = tensor.ravel(), f"rank {rank}: {parameter}: at"
            places = np.searchsorted(unique, flat).clip(max=values.size - 1)
            numbers = np.where(unique[places] == flat, by_value[places], values.size)  # the last is of no element
            np.add.at(held, numbers, 1)
            zeros[parameter] = int((flat == 0).sum())
            own = parameters.index(parameter) if parameter in parameters else -1
            strange = np.flatnonzero((home[numbers] != own) & (flat != 0))[:1]
            errors += [f"{at} {i} is {flat[i]}, which belongs in {parameters[home[numbers[i]]]}" for i in strange]
            errors += [f"{at} {i + 1} the order of elements breaks" for i in np.flatnonzero(np.diff(numbers) < 0)[:1]]
        num_zeros += zeros.total()
        for name, (parameter, kind, its_stage, expert) in expected.items():
            found, mask = held[spans[name]].reshape(tensors[name].shape), np.zeros(tensors[name].shape, dtype=int)
            if stage == its_stage and kind.startswith("expert"):
                mark_share(mask, kind, owners[expert] if ep > 1 else None, tp * dp, dp_rank * tp + tp_rank)
            elif stage == its_stage:
                zeros[parameter] -= mark_share(mask, kind, None, tp, tp_rank)
            for i in map(tuple, (wrong := np.argwhere(found != mask).tolist())[:1]):
                errors.append(f"rank {rank}: {name}{list(i)} is held {found[i]} times, not {mask[i]}; {len(wrong)} are wrong")
        errors += [f"rank {rank}: {parameter} has {number:+} zeros" for parameter, number in zeros.items() if number]
        copies += held
    report = [f"{values.size:,} elements; {copies[:-1].sum():,} held on {tp * pp * dp} ranks, and {num_zeros:,} zeros"]
    for kind, num_tensors in Counter(kind for _, kind, *_ in expected.values()).items():
        times = np.concatenate([copies[spans[name]] for name, each in expected.items() if each[1] == kind])
        report.append(f"{kind:14} {num_tensors:4} tensors, {times.size:9,} elements, each {times.min()} to {times.max()} times")
    return errors, report


if __name__ == "__main__":
    found_errors, lines = count(Path(sys.argv[1]), Path(sys.argv[2]))
    print(*lines, *found_errors[:20], f"{len(found_errors)} errors", sep="\n")
    sys.exit(1 if found_errors else 0)
