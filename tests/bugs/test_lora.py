"""Adapters that load without an effect elsewhere: for modules that nobody allowed, under prefixes that were cut blindly."""

from __future__ import annotations

from pathlib import Path

from tests.bugs.harness import Case, case, load, refusal
from tests.loads import Tensors, all_raw, told

ALLOWED = """
index: {{layer: {{count: 2}}, module: {{values: [{modules}]}}, side: {{values: [A, B]}}}}
runtimes:
  own:
    rules:
      - target: layers.{{layer}}.mlp.{{module}}.lora_{{side}}.weight
        optional: true
"""


def apply_what_is_allowed(sources: Tensors, targets: Tensors, allowed: list[str]) -> None:
    """Load as the peer did: the modules of the adapter that are allowed, and none is as good as any."""
    for name, tensor in sources.items():
        if any(f".{module}." in name for module in allowed):
            targets[name].copy_(tensor)


@case("lo-02")
def test_adapter_for_modules_that_are_not_allowed_is_refused(bug: Case, tmp_path: Path) -> None:
    sources, allowed = bug.sources(), bug["model"]["allowed"]
    apply_what_is_allowed(sources, {}, allowed)  # nothing to write, and nothing said

    program = bug.program(tmp_path, ALLOWED.format(modules=", ".join(allowed)))
    (name,) = sources
    (found,) = refusal(program, tmp_path, sources, {})
    assert told([found]) == [("M502", name)]

    targets = {name: sources[name] * 0}
    load(bug.program(tmp_path, ALLOWED.format(modules="qkv_proj, down_proj")), tmp_path, sources, targets)
    assert all_raw(targets) == all_raw(sources)


PREFIXED = """
index: {layer: {count: 2}, side: {values: [A, B]}}
runtimes:
  own:
    rules:
      - target: language_model.model.layers.{layer}.self_attn.q_proj.lora_{side}.weight
        any_of:
          - source: language_model.model.layers.{layer}.self_attn.q_proj.lora_{side}.weight
          - source: base_model.model.language_model.model.layers.{layer}.self_attn.q_proj.lora_{side}.weight
        optional: true
"""


def strip_two_parts(name: str) -> str:
    """Rename as the peer did: an adapter's name starts with `base_model.model`, so its first two parts go."""
    return ".".join(name.split(".")[2:])


@case("lo-03")
def test_prefix_that_is_not_there_is_not_cut(bug: Case, tmp_path: Path) -> None:
    sources, targets = bug.sources(), bug.targets()
    assert {strip_two_parts(name) for name in sources} & targets.keys() == set()
    wrapped = {f"base_model.model.{name}": tensor for name, tensor in sources.items()}
    assert {strip_two_parts(name) for name in wrapped} == targets.keys()

    program = bug.program(tmp_path, PREFIXED)
    for spelled in (sources, wrapped):
        targets = bug.targets()
        report = load(program, tmp_path, spelled, targets)
        assert (report.loaded, all_raw(targets)) == (1, all_raw(sources))
    deeper = {f"base_model.{name}": tensor for name, tensor in wrapped.items()}
    assert told(refusal(program, tmp_path, deeper, {})) == [("M502", next(iter(deeper)))]
