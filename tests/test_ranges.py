"""Runs of bytes, family by family, against the elements that the family's steps copy."""

from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest

from mapper.checkpoint import TensorHeader
from mapper.compiler import compile
from mapper.layout import Layout
from mapper.ops.dtypes import BITS, num_bytes
from mapper.plan import Plan
from mapper.plan.plan import LocalFamily, iter_steps
from mapper.plan.ranges import byte_ranges
from mapper.spec import load_spec
from tests.oracle.families import FAMILIES
from tests.small import plan_of, program_of, rules

DTYPES = {"bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float32": "F32", "int8": "I8", "uint8": "U8"}
CASES = [
    ("deepseek_v3_fp8_mtp", "vllm", "tp=1"),
    ("deepseek_v3_fp8_mtp", "vllm-mtp", "tp=2"),
    ("deepseek_v3_mtp", "vllm", "tp=4,ep=4,placement=round_robin"),
    ("deepseek_v3_fp8", "vllm", "tp=2,pp=2,ep=2,redundant_experts=4"),
    ("deepseek_v3_fp8_odd", "vllm", "tp=2"),
    ("qwen3_moe", "transformers", "tp=1"),
    ("gpt_oss_bf16", "vllm", "tp=2"),
    ("llama", "vllm", "tp=4"),
]


@cache
def headers_of(family: str) -> dict[str, TensorHeader]:
    """Return headers that lie one behind the other in two files."""
    tensors, ends = {}, [8, 16]
    for number, header in enumerate(FAMILIES[family].headers(FAMILIES[family].config)):
        dtype = DTYPES[str(header.dtype).removeprefix("torch.")]
        file, size = number % 2, num_bytes(dtype, header.shape)
        tensors[header.name] = TensorHeader(dtype, header.shape, file, ends[file], ends[file] + size)
        ends[file] += size
    return tensors


def plans_of(family: str, runtime: str, layout: str) -> Iterator[Plan]:
    config = FAMILIES[family].config
    spec = load_spec(str(config["architectures"][0]))
    program = compile(spec, config=config, runtime=runtime, layout=Layout.parse(layout))
    for rank in range(program.layout.num_ranks):
        yield plan_of(program.at_rank(rank), headers_of(family))


Origins = dict[str, np.ndarray]
"""Per target, where the first byte of every element comes from; -1 where nothing is copied."""

FILE = 1 << 40


def numbers_of(shape: tuple[int, ...]) -> np.ndarray:
    return np.arange(int(np.prod(shape, dtype=np.int64))).reshape(shape)


def origins_of_steps(plan: Plan, local: LocalFamily) -> Origins:
    found: Origins = {}
    for source, source_box, target, target_box, *_ in iter_steps(local):
        header = plan.tensors[source]
        read = numbers_of(header.shape)[tuple(slice(*each) for each in source_box)] * (BITS[header.dtype] // 8)
        into = found.setdefault(target, np.full(plan.targets[target].shape, -1))[tuple(slice(*each) for each in target_box)]
        into[...] = (read + header.start + header.file * FILE).reshape(into.shape)
    return found


def origins_of_ranges(plan: Plan, local: LocalFamily) -> Origins | None:
    ranges = byte_ranges(local)
    if ranges is None:
        return None
    found: Origins = {}
    for file, start, size, target, offset in ranges:
        width = BITS[plan.targets[target].dtype] // 8
        assert (offset % width, size % width) == (0, 0)
        into = found.setdefault(target, np.full(plan.targets[target].shape, -1)).reshape(-1)
        into[offset // width : (offset + size) // width] = file * FILE + start + np.arange(0, size, width)
    return found


@pytest.mark.parametrize(("family", "runtime", "layout"), CASES)
def test_ranges_are_the_bytes_of_the_steps(family: str, runtime: str, layout: str) -> None:
    as_ranges = as_steps = 0
    for plan in plans_of(family, runtime, layout):
        for local in plan.families:
            found = origins_of_ranges(plan, local)
            if found is None:
                as_steps += 1
                continue
            as_ranges += 1
            expected = origins_of_steps(plan, local)
            assert found.keys() == expected.keys()
            for name, origins in expected.items():
                assert (found[name] == origins).all(), name
    assert as_ranges
    assert as_steps or layout == "tp=1" or "ep=" in layout


FORMATS = """
formats:
  cast: [{leaves: {weight: {dims: [a, b], cast: float32}}}]
  bits: [{leaves: {weight: {dims: [a, b], bitcast: uint8}}}]
  turned: [{leaves: {weight: {stored: [b, a], dims: [a, b]}}}]
"""


@pytest.mark.parametrize(
    ("rule", "dtype", "is_range"),
    [
        ("{target: x.weight, dims: {a: 4, b: 6}}", "F32", True),
        ("{target: x.weight, dims: {a: 4, b: 6}}", "F4", False),
        ("{target: 'x.{leaf}', format: cast, dims: {a: 4, b: 6}}", "F32", True),
        ("{target: 'x.{leaf}', format: cast, dims: {a: 4, b: 6}}", "BF16", False),
        ("{target: 'x.{leaf}', format: bits, dims: {a: 4, b: 6}}", "I8", True),
        ("{target: 'x.{leaf}', format: turned, dims: {a: 4, b: 6}}", "F32", False),
        ("{target: x.weight}", "F32", True),
        ("{target: x.weight, cast: float32}", "BF16", False),
    ],
)
def test_what_changes_a_byte_is_no_range(rule: str, dtype: str, is_range: bool) -> None:
    program = program_of(rules(rule, before=FORMATS))
    shape = (6, 4) if "turned" in rule else (4, 6)
    size = num_bytes(dtype, shape)
    plan = plan_of(program, {"x.weight": TensorHeader(dtype, shape, 3, 100, 100 + size)})
    (local,) = plan.families
    assert byte_ranges(local) == ([(3, 100, size, "x.weight", 0)] if is_range else None)


def test_optional_tensors_that_are_absent_have_no_ranges() -> None:
    before = "index: {i: {values: [p, q, r]}}"
    rule = "{target: 'x.{i}.weight', dims: {a: 4}, optional: true}"
    plan = plan_of(
        program_of(rules(rule, before=before)), {f"x.{i}.weight": TensorHeader("F32", (4,), 0, 16, 32) for i in "pr"}
    )
    (local,) = plan.families
    assert byte_ranges(local) == [(0, 16, 16, "x.p.weight", 0), (0, 16, 16, "x.r.weight", 0)]
    plan = plan_of(
        program_of(rules("{target: 'x.{i}.weight', optional: true}", before=before)),
        {f"x.{i}.weight": TensorHeader("F32", (4,), 0, 16, 32) for i in "pr"},
    )
    (local,) = plan.families
    assert byte_ranges(local) == [(0, 16, 16, "x.p.weight", 0), (0, 16, 16, "x.r.weight", 0)]
