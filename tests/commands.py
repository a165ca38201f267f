"""What the tests of the command line share: the checkpoints they name, and readers of reports."""

from __future__ import annotations

import json

from mapper import yaml_source
from mapper.spec.bundled import bundled_ids
from tests.manifests import V2_LITE, V3

SPEC = bundled_ids()["deepseek_v2"]
V3_LAYOUT = "tp=8,pp=2,dp=2,ep=16"
V3_CHECK = ["check", "deepseek_v2", "--checkpoint", str(V3), "--runtime", "vllm", "--layout", V3_LAYOUT]
LITE_CHECK = ["check", "deepseek_v2", "--checkpoint", str(V2_LITE), "--runtime", "vllm"]
LOST = "model.layers.17.mlp.experts.33.up_proj.weight"


def codes(report):
    return [each["code"] for each in report["findings"]]


def subjects(report, code):
    return [each["subject"] for each in report["findings"] if each["code"] == code]


def removed(tensors):
    del tensors[LOST]


def spec_tree():
    return yaml_source.plain(yaml_source.read_file(SPEC)[0])


def write_spec(tree, folder):
    """Write a changed spec; JSON is YAML."""
    path = folder / "changed.yaml"
    path.write_text(json.dumps({**tree, "cases": []}))
    return path
