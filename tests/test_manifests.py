"""Every bundled spec against the headers of published checkpoints: exact numbers of what is loaded and skipped."""

from pathlib import Path

import pytest

from mapper.checkpoint import Checkpoint
from mapper.compiler import compile
from mapper.layout import Layout
from mapper.report import check
from mapper.spec import load_spec
from mapper.spec.bundled import bundled_ids

CHECKPOINTS = Path(__file__).with_name("data") / "checkpoints"
SINGLE = "tp=1"

# (checkpoint, runtime, layout): (sources, skipped by rule, targets)
V3_LAYERS, BASE_LAYERS = "model.layers.{nextn}.**", "model.layers.{base}.**"
EXPECTED = {
    ("DeepSeek-V2-Lite-Chat", "vllm", SINGLE): (5291, {}, 325),
    ("DeepSeek-V2-Lite-Chat", "vllm", "tp=4,pp=2,dp=2,ep=8"): (5291, {}, 2632),
    ("DeepSeek-V2-Lite-Chat", "transformers", SINGLE): (5291, {}, 403),
    ("DeepSeek-V3", "vllm", SINGLE): (91991, {V3_LAYERS: 1564}, 1327),
}
