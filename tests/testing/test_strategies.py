"""What the strategies draw: legal, different in every element, and often enough parallel and quantised."""

from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mapper
from mapper import Layout
from mapper.spec.bundled import bundled_ids
from mapper.spec.configs import configs_for
from mapper.testing.reference import layout_fault, reference_load
from mapper.testing.reference.arrays import bits_of
from mapper.testing.strategies import (
    chosen_profile,
    configs,
    examples,
    faults,
    sentinel,
    specs,
    streams,
    unique_values,
)
from mapper.testing.strategies.spec import RUNTIME

SPECS = {name: mapper.load_spec(name) for name in bundled_ids()}
PARALLEL = [
    (name, runtime)
    for name, spec in SPECS.items()
    for runtime, section in spec.runtimes.items()
    if section.mesh.like != "single" and (chosen_profile() != "dev" or (name, runtime) == ("deepseek_v2", "vllm"))
]
ENOUGH = settings(max_examples=60, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize(("name", "runtime"), PARALLEL)
def test_examples_are_parallel_and_quantised_often_enough(name, runtime):
    seen = Counter()

    @ENOUGH
    @given(examples(SPECS[name], runtime))
    def run(example):
        layout = example.layout
        seen["all"] += 1
        seen["tp"] += layout.tp > 1
        seen["ep"] += layout.ep > 1
        seen["pp_layers"] += layout.pp_layers is not None
        seen["fp8"] += any(tensor.dtype == torch.float8_e4m3fn for tensor in example.tensors.values())
        assert layout.num_ranks <= 16
        assert layout_fault(SPECS[name], config=example.config, runtime=runtime, layout=layout, options=example.options) is None

    run()
    assert seen["tp"] >= 0.3 * seen["all"], seen
    placed = {index.axis for index in {**SPECS[name].index, **SPECS[name].runtimes[runtime].index}.values()}
    assert seen["ep"] >= 0.2 * seen["all"] or "ep" not in placed, seen
    assert seen["pp_layers"] > 0 or "pp" not in placed, seen
    sections = [config.get("quantization_config", {}) for config in configs_for(SPECS[name]).values()]
    assert seen["fp8"] >= 0.1 * seen["all"] or not any(each.get("quant_method") == "fp8" for each in sections), seen


def test_configs_vary_what_may_be_null_and_which_layers_are_dense():
    seen = {"ranks": set(), "dense": set(), "drafts": set()}

    @ENOUGH
    @given(configs(SPECS["deepseek_v2"], "vllm"))
    def run(config):
        seen["ranks"].add(config["q_lora_rank"] is None)
        seen["dense"].add(min(config["first_k_dense_replace"], config["num_hidden_layers"]) / config["num_hidden_layers"])
        seen["drafts"].add(config["num_nextn_predict_layers"])
        assert config["num_hidden_layers"] <= 4
        assert config["hidden_size"] < 64

    run()
    assert seen["ranks"] == {True, False}
    assert {0.0, 1.0} < seen["dense"]
    assert seen["drafts"] == {0, 1, 2}


@settings(max_examples=15)
@given(st.data())
def test_a_drawn_checkpoint_is_complete_and_has_nothing_unknown(data):
    name, runtime = data.draw(st.sampled_from([(name, runtime) for name, spec in SPECS.items() for runtime in spec.runtimes]))
    alone = data.draw(examples(SPECS[name], runtime)).reference_alone()
    assert (alone.missing, alone.missing_elsewhere, alone.unknown) == ((), (), set())
    assert alone.loaded


@settings(max_examples=15)
@given(specs())
def test_a_drawn_spec_fits_its_config(drawn):
    assert layout_fault(drawn.spec, config=drawn.config, runtime=RUNTIME, layout=Layout()) is None


DTYPES = [
    torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu,
    torch.int8, torch.uint8, torch.int32, torch.int64,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_elements_differ_as_far_as_the_dtype_has_values(dtype):
    shape = (11, 13) if dtype.itemsize == 1 else (37, 41)
    tensor = unique_values(shape, dtype, 1234)
    assert len(set(bits_of(tensor).reshape(-1).tolist())) == tensor.numel()
    assert not (bits_of(tensor) == bits_of(sentinel((1,), dtype))).any()
    assert torch.isfinite(tensor.double() if dtype.itemsize > 1 else tensor.float()).all()
    other = unique_values(shape, dtype, 1235)
    assert not (bits_of(tensor) == bits_of(other)).all()


def test_rows_of_a_tensor_larger_than_its_dtype_differ():
    rows = bits_of(unique_values((300, 256), torch.float8_e4m3fn, 5))
    assert len({row.tobytes() for row in rows}) > 200


@settings(max_examples=20)
@given(st.data())
def test_a_stream_has_every_tensor_once(data):
    tensors = {f"t.{number}": torch.full((2, 3), float(number)) for number in range(data.draw(st.integers(1, 20)))}
    stream = data.draw(streams(tensors))
    fed = [name for bucket in stream for name, _ in bucket]
    assert sorted(fed) == sorted(tensors)
    assert all(torch.equal(tensor, tensors[name]) for bucket in stream for name, tensor in bucket)


@settings(max_examples=8)
@given(st.data())
def test_a_fault_changes_one_tensor_and_says_what_is_wrong(data):
    example = data.draw(examples(SPECS["deepseek_v2"], "vllm"))
    fault = data.draw(faults(example))
    before, after = example.tensors, fault.tensors
    changed = [name for name in before.keys() | after.keys() if before.get(name) is not after.get(name)]
    assert len(changed) == {"rename": 2, "duplicate": 0, "truncate": 0}.get(fault.kind, 1)
    if fault.kind in ("drop", "add", "rename"):
        broken = reference_load(
            example.spec, config=example.config, runtime="vllm", layout=Layout(), rank=0, tensors=fault.tensors,
            options=example.options,
        )  # fmt: skip
        assert fault.reported == {*broken.missing, *broken.missing_elsewhere, *broken.unknown}
        assert fault.reported
