"""Values that a narrower dtype cannot tell apart."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.bugs.harness import Case, case, load, refusal
from tests.loads import told

BIAS = "gate.e_score_correction_bias"


def router(cast: str) -> str:
    return f"""
runtimes:
  own:
    rules:
      - {{target: {BIAS}, dims: {{expert: 3}}{cast}}}
"""


@case("dt-01")
def test_a_bias_is_narrowed_only_where_the_rule_says_so(bug: Case, tmp_path: Path) -> None:
    sources = {name: torch.tensor(bug["config"]["values"]) for name in bug.sources()}
    wide, narrow = bug.targets("B"), bug.targets("A")
    load(bug.program(tmp_path, router(""), config={}), tmp_path, sources, wide)
    assert torch.equal(wide[BIAS], sources[BIAS])
    assert told(refusal(bug.program(tmp_path, router(""), config={}), tmp_path, sources, narrow)) == [("M533", BIAS)]
    fault = sources[BIAS].bfloat16()
    assert fault.unique().numel() == 1, "all three are one number in bfloat16"
    load(bug.program(tmp_path, router(", cast: bfloat16"), config={}), tmp_path, sources, narrow)
    assert torch.equal(narrow[BIAS], fault)
