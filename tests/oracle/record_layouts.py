"""Records how vLLM splits layers over stages and experts over ranks; run it in an environment that has vLLM.

python tests/oracle/record_layouts.py tests/oracle/vllm_layouts.json.gz
"""

import gzip
import json
import sys


def main(path: str) -> None:
    import vllm
    from vllm.distributed.utils import get_pp_indices
    from vllm.model_executor.layers.fused_moe.expert_map_manager import determine_expert_map

    stages = {}
    for num_layers in range(1, 65):
        for pp in range(1, min(num_layers, 16) + 1):
            ranges = [get_pp_indices(num_layers, stage, pp) for stage in range(pp)]
            stages[f"{num_layers}/{pp}"] = [stop - start for start, stop in ranges]
    experts = {}
    for num_experts in range(1, 49):
        for ep in range(1, min(num_experts, 16) + 1):
            for placement in ("linear", "round_robin"):
                slots = []
                for rank in range(ep):
                    _, table, *_ = determine_expert_map(ep, rank, num_experts, placement)
                    positions = list(range(num_experts)) if table is None else table.tolist()
                    held = sorted((position, expert) for expert, position in enumerate(positions) if position >= 0)
                    slots.append([expert for _, expert in held])
                experts[f"{num_experts}/{ep}/{placement}"] = slots
    record = {"vllm": vllm.__version__, "stages": stages, "experts": experts}
    with open(path, "wb") as file, gzip.GzipFile(fileobj=file, mode="wb", mtime=0, filename="") as packed:
        packed.write(json.dumps(record, separators=(",", ":"), sort_keys=True).encode())


if __name__ == "__main__":
    main(sys.argv[1])
