"""Rows that are put in another order, values that are computed, and tensors that are computed and not stored."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import nn

from mapper.diagnostics import MapperError
from mapper.load import Loader
from tests.bugs.harness import Case, case, load, refusal, save
from tests.loads import all_raw, told


def rotary(heads: str) -> str:
    return f"""
config: {{required: [num_attention_heads, num_key_value_heads]}}
runtimes:
  own:
    rules:
      - target: k_proj.weight
        dims: {{out: 8, in: 1}}
        do:
          - view: (head half row) in -> (head row half) in
            head: {heads}
            half: 2
"""


@case("vt-02")
def test_keys_are_put_in_order_by_their_own_heads(bug: Case, tmp_path: Path) -> None:
    right, wrong = bug.targets(), bug.targets()
    load(bug.program(tmp_path, rotary("num_key_value_heads")), tmp_path, bug.sources(), right)
    load(bug.program(tmp_path, rotary("num_attention_heads")), tmp_path, bug.sources(), wrong)
    assert right["k_proj.weight"].flatten().tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert wrong["k_proj.weight"].flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


NORMS = """
runtimes:
  own:
    rules:
      - {target: input_layernorm.weight, do: [{add: 1}]}
      - copy: [linear_attn.norm.weight]
"""


@case("vt-05")
def test_one_norm_is_an_offset_from_one_and_the_other_is_not(bug: Case, tmp_path: Path) -> None:
    targets, sources = bug.targets(), bug.sources()
    load(bug.program(tmp_path, NORMS, config=bug["config"]), tmp_path, sources, targets)
    assert {name: each.unique().tolist() for name, each in targets.items()} == {name: [1.0] for name in targets}
    everywhere = {name: (each + 1).unique().tolist() for name, each in sources.items()}
    assert everywhere == {"input_layernorm.weight": [1.0], "linear_attn.norm.weight": [2.0]}


OFFSET = """
config: {required: [runs]}
runtimes:
  own:
    rules:
      - {target: q_norm.weight, dims: {head: 4}, do: [{add: 1}]}
      - target: qkv
        sources: [q, k, v]
        dims: {out: [4, 2, 2], in: 2}
        do: [{view: (head row) in -> (row head) in, row: 2, parts: [1]}]
"""


@case("vt-06")
def test_an_operation_is_done_once_in_any_order_and_any_number_of_loads(bug: Case, tmp_path: Path) -> None:
    sources, targets = bug.sources(), bug.targets()
    program = bug.program(tmp_path, OFFSET)
    load(program, tmp_path, sources, targets)
    expected = all_raw(targets)
    assert torch.equal(targets["q_norm.weight"], sources["q_norm.weight"] + 1)
    assert torch.equal(targets["qkv"], torch.cat([sources["q"][[0, 2, 1, 3]], sources["k"], sources["v"]]))
    shuffled = list(sources.items())
    for seed in range(bug["config"]["runs"]):
        random.Random(seed).shuffle(shuffled)
        with Loader(program, targets).update() as session:
            session.feed_all(shuffled)
        assert all_raw(targets) == expected, f"run {seed}"
    twice = sources["q_norm.weight"] + 2
    assert not torch.equal(targets["q_norm.weight"], twice)


COMPUTED = """
runtimes:
  own:
    KEEP
    rules:
      - copy: [linear.weight]
"""
KEEP = "keep: [{target: rotary.inv_freq, why: computed by the constructor}]"


def rope(is_persistent: bool) -> nn.Module:
    """Return a module whose frequencies no file holds, computed by its constructor on meta."""
    module = nn.Module()
    with torch.device("meta"):
        module.linear = nn.Linear(2, 3, bias=False)
        module.rotary = nn.Module()
        module.rotary.register_buffer("inv_freq", torch.ones(2), persistent=is_persistent)
    return module


@case("vt-07")
def test_a_buffer_without_a_source_is_named(bug: Case, tmp_path: Path) -> None:
    checkpoint, shape = save(tmp_path, bug.sources()), bug.targets()["rotary.inv_freq"].shape
    bare, kept = (bug.program(tmp_path, COMPUTED.replace("KEEP", each), config=bug["config"]) for each in ("", KEEP))
    for program, is_persistent, code in ((bare, True, "M530"), (bare, False, "M603"), (kept, False, "M603")):
        with pytest.raises(MapperError) as caught:
            Loader(program, rope(is_persistent)).load(checkpoint)
        assert told(caught.value.diagnostics) == [(code, "rotary.inv_freq")]
    targets = bug.targets()
    targets["rotary.inv_freq"].fill_(5)
    report = Loader(kept, targets).load(checkpoint)
    assert set(report.kept) == {"rotary.inv_freq"}
    assert targets["rotary.inv_freq"].tolist() == [5.0] * shape[0]


CACHED = """
runtimes:
  own:
    skip:
      - {source: '**.rotary_emb.inv_freq', why: computed}
      - {source: '**.rotary_emb.cos_cached', why: computed}
      - {source: '**.rotary_emb.sin_cached', why: computed}
    rules:
      - copy: [layers.0.weight]
"""


@case("vt-08")
def test_cached_tables_are_skipped_by_name_and_counted(bug: Case, tmp_path: Path) -> None:
    sources, targets = bug.sources(), bug.targets()
    program = bug.program(tmp_path, CACHED, config={})
    report = load(program, tmp_path, sources, targets)
    assert torch.equal(targets["layers.0.weight"], sources["layers.0.weight"])
    assert report.skipped_by == {f"**.rotary_emb.{leaf}": 1 for leaf in ("inv_freq", "cos_cached", "sin_cached")}
    typo = bug["config"]["typo"]
    misspelt = {typo: sources.pop("layers.0.rotary_emb.inv_freq"), **sources}
    assert told(refusal(program, tmp_path, misspelt, targets)) == [("M502", typo)]
