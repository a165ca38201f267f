"""Updates while a model is in use: split pairs, deltas, stale caches, derived tensors, and parameters that were replaced."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mapper.diagnostics import MapperError
from mapper.load import Loader
from tests.bugs.harness import Case, case, load, refusal, save, tensors
from tests.loads import Tensors, all_raw, raw, told

FUSED = """
runtimes:
  own:
    mesh: vllm
    rules: [{target: fused, sources: [q_a_proj, kv_a], dims: {out: [4, 3]}}]
"""


def merge_halves(calls: list[Tensors], targets: Tensors) -> None:
    """Load as the peer did: the halves wait for each other, and the one that comes again takes the place of the first."""
    pending: Tensors = {}
    for call in calls:
        pending |= call
        if len(pending) == 2:
            targets["fused"].copy_(torch.cat([pending["q_a_proj"], pending["kv_a"]]))


@case("ou-02")
def test_delta_of_a_half_changes_what_it_says_and_nothing_else(bug: Case, tmp_path: Path) -> None:
    first, second, third = (bug.sources(f"call {number}") for number in (1, 2, 3))
    delta = torch.full((4,), float("nan"))
    delta[bug["config"]["changed"]] = second["q_a_proj"][bug["config"]["changed"]]
    wrong = bug.targets()
    merge_halves([first, {"q_a_proj": delta}, third], wrong)
    assert int(wrong["fused"].isnan().sum()) == 3

    targets = bug.targets()
    with Loader(bug.program(tmp_path, FUSED), targets).update(duplicates="overwrite") as session:
        session.feed("q_a_proj", first["q_a_proj"])
        session.feed("q_a_proj", delta, nan_means_unchanged=True)
        session.feed("kv_a", third["kv_a"])
    assert targets["fused"].tolist() == [1, 5, 1, 1, 2, 2, 2]
    with Loader(bug.program(tmp_path, FUSED), targets).update() as session:
        session.feed("q_a_proj", delta)
        session.feed("kv_a", third["kv_a"])
    assert torch.equal(targets["fused"][:4].isnan(), delta.isnan())  # without the word, NaN is a value


PAIR = """
runtimes:
  own:
    mesh: vllm
    rules:
      - {target: "layers.0.self_attn.qkv_proj.{leaf}", format: dequantized, dims: {out: 8, in: 4}}
      - {target: layers.0.norm.weight, dims: {n: 4}}
"""


def pair_in_call(calls: list[Tensors], targets: Tensors) -> None:
    """Load as the peer did: weight and scale are paired among the tensors of one call."""
    for call in calls:
        for name, tensor in call.items():
            if f"{name}_scale_inv" in call:
                targets[name].copy_(tensor.float() * call[f"{name}_scale_inv"].repeat_interleave(4, 0))


@case("ou-03")
def test_pair_is_written_whatever_lies_between_its_halves(bug: Case, tmp_path: Path) -> None:
    groups = [bug.sources(form) for form in ("group 1", "between", "group 2")]
    name, scale = next(iter(groups[0])), next(iter(groups[2]))
    wrong = bug.targets()
    pair_in_call(groups, wrong)
    assert raw(wrong[name]) == raw(bug.targets()[name])

    together = {key: each for group in groups for key, each in group.items()}
    program = bug.program(tmp_path, PAIR)
    expected = bug.targets()
    load(program, tmp_path, together, expected)
    dense = groups[0][name].float() * groups[2][scale].repeat_interleave(4, 0)
    assert raw(expected[name]) == raw(dense.bfloat16())
    for order in permutations(groups):
        targets = bug.targets()
        with Loader(program, targets).update() as session:
            for group in order:
                session.feed_all(group.items())
        assert all_raw(targets) == all_raw(expected)
    for lost in (name, scale):
        findings = refusal(program, tmp_path, {key: each for key, each in together.items() if key != lost}, bug.targets())
        assert told(findings) == [("M501", lost)]


STAGES = """
index: {layer: {count: 2, axis: pp}}
runtimes:
  own:
    mesh: vllm
    rules: [{target: "layers.{layer}.w", dims: {out: 2, in: 3}}]
"""


@case("ou-04")
def test_second_sync_after_the_parameters_moved_leaves_its_values(bug: Case, tmp_path: Path) -> None:
    for stage in range(bug["layout"]["pp"]):
        targets = bug.targets(f"stage {stage}")
        name = f"layers.{stage}.w"
        loader = Loader(bug.program(tmp_path, STAGES, rank=stage), targets)
        cached = targets[name][:]  # what the peer's tasks kept
        for sync in ("sync 1", "sync 2"):
            sources = bug.sources(sync)
            with loader.update(version=sync) as session:
                session.feed_all(sources.items())
            assert torch.equal(targets[name], sources[name])
            targets[name] = torch.empty_like(targets[name])  # offloaded and brought back elsewhere
        assert torch.equal(cached, bug.sources("sync 1")[name])
        report = loader.load(save(tmp_path, bug.sources("sync 2")))
        assert torch.equal(targets[name], bug.sources("sync 2")[name])
        assert (report.loaded, report.elsewhere) == (1, 1)


MIXER = """
runtimes:
  own:
    mesh: vllm
    rules: [{copy: [mixer.A_log, mixer.dt_bias, mixer.D], dims: {n: 2}}]
    finalize: [{id: decay, inputs: [mixer.A_log], output: mixer.A, do: [{call: 'tests.bugs.test_online_update:decay'}]}]
"""


def decay(logarithm: torch.Tensor) -> torch.Tensor:
    return -torch.exp(logarithm)


def count_elements(stream: list[tuple[str, torch.Tensor]], targets: Tensors) -> list[str]:
    """Load as the peer did: the layer is done once as many elements were copied as it has; return what came too late."""
    left = sum(each.numel() for each in targets.values())
    late = []
    for name, tensor in stream:
        if left <= 0:
            late.append(name)
            continue
        targets[name].copy_(tensor)
        left -= tensor.numel() * (2 if name.endswith("A_log") else 1)  # copied, then computed in place
    return late


@case("ou-05")
def test_layer_is_complete_by_what_was_written_not_by_how_much(bug: Case, tmp_path: Path) -> None:
    assert bug["config"]["reload"]
    sources = {name: each / 10 for name, each in bug.sources().items()}
    assert count_elements(list(sources.items()), bug.targets()) == ["mixer.D"]

    targets = bug.targets()
    loader = Loader(bug.program(tmp_path, MIXER), targets)
    for _ in range(2):
        with loader.update() as session:
            session.feed_all(sources.items())
            assert [each.step for each in session.finish().finalized] == ["decay"]
        assert torch.equal(targets["mixer.A"], -torch.exp(sources["mixer.A_log"]))
        assert all(torch.equal(targets[name], each) for name, each in sources.items())
    session = loader.update()
    session.feed("mixer.A_log", sources["mixer.A_log"])
    with pytest.raises(MapperError, match="M610"):
        session.feed("mixer.A_log", sources["mixer.A_log"])
    session.feed("mixer.dt_bias", sources["mixer.dt_bias"])
    with pytest.raises(MapperError) as caught:
        session.finish()
    assert told(caught.value.diagnostics) == [("M501", "mixer.D")]


def module_of(parameters: Tensors, buffers: Tensors) -> nn.Module:
    root = nn.Module()
    for name, tensor in (*parameters.items(), *buffers.items()):
        *path, last = name.split(".")
        place = root
        for part in path:
            if part not in place._modules:
                place.add_module(part, nn.Module())
            place = place.get_submodule(part)
        if name in buffers:
            place.register_buffer(last, tensor, persistent=False)
        else:
            place.register_parameter(last, nn.Parameter(tensor, requires_grad=False))
    return root


@case("ou-07")
def test_buffer_that_no_rule_names_keeps_its_bits_and_its_address(bug: Case, tmp_path: Path) -> None:
    assert bug["config"]["reload"]
    buffers = tensors(bug["model"]["buffers"])
    (buffer,) = buffers.values()
    module = module_of(bug.targets("parameters"), buffers)
    program = bug.program(tmp_path, "runtimes: {own: {mesh: vllm, rules: [{copy: [router.proj.weight]}]}}\n")
    loader = Loader(program, module)
    for number in range(3):
        sources = {name: each + number for name, each in bug.sources().items()}
        with loader.update() as session:
            session.feed_all(sources.items())
        assert raw(module.get_parameter("router.proj.weight")) == raw(sources["router.proj.weight"])
        held = module.get_buffer("router.root_size")
        assert (held.data_ptr(), raw(held)) == (buffer.data_ptr(), raw(torch.full((1,), 0.0188)))


MLA = """
config: {required: [heads, nope, value]}
runtimes:
  own:
    mesh: vllm
    rules: [{copy: [kv_b_proj.weight, sinks]}]
    finalize:
      - id: W_UK_T
        inputs: [kv_b_proj.weight]
        output: W_UK_T
        do: [{view: (h w) c -> h w c, h: heads}, {take: {w: [0, nope]}}]
      - id: W_UV
        inputs: [kv_b_proj.weight]
        output: W_UV
        do: [{view: (h w) c -> h c w, h: heads}, {take: {w: [nope, nope + value]}}]
      - {id: sinks_fp32, inputs: [sinks], output: sinks_fp32, do: [{cast: float32}]}
"""


@case("ou-09")
def test_derived_tensors_follow_an_update_at_the_same_address(bug: Case, tmp_path: Path) -> None:
    config = bug["config"]
    targets = bug.targets()
    loader = Loader(bug.program(tmp_path, MLA), targets)
    captured: dict[str, Any] = {}
    rebound: dict[str, Any] = {}
    for update in ("update A", "update B"):
        sources = bug.sources(update)
        with loader.update(version=update) as session:
            session.feed_all(sources.items())
        split = sources["kv_b_proj.weight"].view(config["heads"], config["nope"] + config["value"], 3)
        right = {
            "W_UK_T": split[:, : config["nope"]],
            "W_UV": split[:, config["nope"] :].transpose(1, 2),
            "sinks_fp32": sources["sinks"].float(),
        }
        assert all(torch.equal(targets[name], each) for name, each in right.items())
        captured = captured or {name: targets[name].data_ptr() for name in right}
        rebound = rebound or dict(right)  # what a graph reads that was captured over the peer's first tensors
        assert {name: targets[name].data_ptr() for name in right} == captured
    assert not any(torch.equal(rebound[name], each) for name, each in right.items())
    targets["sinks_fp32"] = torch.zeros(2, dtype=torch.bfloat16)
    with pytest.raises(MapperError, match=r"M635 the step 'sinks_fp32' would change 'sinks_fp32': expected torch.bfloat16"):
        loader.finalize(changed="all")


@case("ou-11")
def test_parameter_that_was_replaced_is_loaded_by_its_name(bug: Case, tmp_path: Path) -> None:
    assert bug["config"]["reload"]
    sources, module = bug.sources(), module_of(bug.targets(), {})
    module.w.weight_loader = torch.Tensor.copy_
    loader = Loader(bug.program(tmp_path, "runtimes: {own: {mesh: vllm, rules: [{copy: [w]}]}}\n"), module)
    loader.load(save(tmp_path, sources))
    module.w = nn.Parameter(torch.zeros(4, 3), requires_grad=False)  # what the post-load step does
    with pytest.raises(AttributeError, match="weight_loader"):
        _ = module.w.weight_loader
    with loader.update() as session:
        session.feed_all(sources.items())
    assert torch.equal(module.get_parameter("w"), sources["w"])
    module.w = nn.Parameter(torch.zeros(4, 3), requires_grad=False)
    loader.load(save(tmp_path, sources))
    assert torch.equal(module.get_parameter("w"), sources["w"])


EXPERTS = """
index: {expert: {count: 2, axis: ep}}
runtimes:
  own:
    mesh: vllm
    rules:
      - target: layers.0.mlp.experts.w13_weight
        sources: ["layers.0.mlp.experts.{expert}.gate_proj.weight", "layers.0.mlp.experts.{expert}.up_proj.weight"]
        stack: expert
        dims: {out: [3, 3], in: 4}
"""


@case("ou-12")
def test_experts_are_synced_and_a_name_that_nobody_knows_is_an_error(bug: Case, tmp_path: Path) -> None:
    assert bug["config"]["sync"]
    sources, targets = bug.sources(), bug.targets()
    skipped = [name for name in sources if name not in targets]  # the peer's rule
    assert len(skipped) == len(sources) == 4

    loader = Loader(bug.program(tmp_path, EXPERTS), targets)
    with loader.update() as session:
        session.feed_all(sources.items())
        report = session.finish()
    name = "layers.0.mlp.experts.0.gate_proj.weight"
    expected = torch.stack(
        [torch.cat([sources[name.replace("0.g", f"{e}.g")], sources[name.replace("0.gate", f"{e}.up")]]) for e in (0, 1)]
    )
    (found,) = targets.values()
    assert torch.equal(found, expected)
    assert (report.loaded, report.bytes_written, report.skipped) == (4, expected.numel() * 4, 0)

    new = sources[name] + 100
    with loader.update(scope={name}) as session:
        session.feed(name, new)
        with pytest.raises(MapperError) as caught:
            session.feed("layers.0.mlp.experts.2.gate_proj.weight", new)
    assert {each.code for each in caught.value.diagnostics} <= {"M502", "M615"}
    expected[0, :3] = new
    assert torch.equal(found, expected)


PREFIXED = """
runtimes:
  own:
    mesh: vllm
    rules:
      - target: language_model.model.layers.0.mlp.gate_up_proj.weight
        any_of:
          - sources: [language_model.model.layers.0.mlp.gate_proj.weight, language_model.model.layers.0.mlp.up_proj.weight]
          - sources: [model.layers.0.mlp.gate_proj.weight, model.layers.0.mlp.up_proj.weight]
        dims: {out: [3, 3], in: 4}
"""


@case("ou-13")
def test_trainers_names_are_taken_one_tensor_a_call(bug: Case, tmp_path: Path) -> None:
    assert bug["config"]["sync"]
    sources, targets = bug.sources(), bug.targets()
    assert not sources.keys() & targets.keys()
    program = bug.program(tmp_path, PREFIXED)
    load(program, tmp_path, sources, targets)
    expected = all_raw({next(iter(targets)): torch.cat(list(sources.values()))})
    assert all_raw(targets) == expected
    loader = Loader(program, bug.targets())
    for prefix in ("", "language_model."):
        with loader.update() as session:
            for name, tensor in reversed(sources.items()):
                session.feed(f"{prefix}{name}", tensor)
        assert all_raw(dict(loader.model)) == expected
    session = loader.update()
    session.feed("model.layers.0.mlp.gate_proj.weight", sources["model.layers.0.mlp.gate_proj.weight"])
    with pytest.raises(MapperError) as caught:
        session.finish()
    assert told(caught.value.diagnostics) == [("M501", "model.layers.0.mlp.up_proj.weight")]
