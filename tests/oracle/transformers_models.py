"""Tiny checkpoints that Transformers can load, and the model that its `from_pretrained` makes of each.

What a loader has to know about these models (Transformers 5.24), each held by a test:

- The experts of a layer are two parameters: `mlp.experts.gate_up_proj` [expert, gate rows then up rows, hidden] and
  `mlp.experts.down_proj` [expert, hidden, width]. On disk, also after `save_pretrained`, they are a tensor per expert.
- `mlp.gate.weight` is float32 in a bfloat16 model, whether the file has it as bfloat16 (as published checkpoints do) or as
  float32 (as `save_pretrained` writes it). Norms are bfloat16.
- `mlp.gate.e_score_correction_bias` of V3 is no parameter but a persistent buffer, float32. It is in the state dict.
- `rotary_emb.inv_freq` and `rotary_emb.original_inv_freq` are buffers outside the state dict; the constructor fills them.
- The tensors of multi-token-prediction layers have no place in the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from demo.reference import quiet_transformers
from tests.oracle.families import ONE_DRAFT_LAYER, V2, V3, Config, Family, deepseek_headers, write_checkpoint

# No two sizes of a tensor alike. A hidden size and an expert width of whole 16 bytes are what grouped products ask for.
SIZES: Config = {
    "vocab_size": 149,
    "hidden_size": 104,
    "intermediate_size": 136,
    "moe_intermediate_size": 56,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 45,
    "kv_lora_rank": 27,
    "qk_nope_head_dim": 11,
    "qk_rope_head_dim": 6,
    "v_head_dim": 13,
    "n_routed_experts": 6,
}

MODELS: dict[str, Family] = {
    "deepseek_v2": Family({**V2, **SIZES}, deepseek_headers),
    "deepseek_v2_lite": Family({**V2, **SIZES, "q_lora_rank": None}, deepseek_headers),
    "deepseek_v3": Family({**V3, **SIZES}, deepseek_headers),
    "deepseek_v3_mtp": Family({**V3, **SIZES, **ONE_DRAFT_LAYER}, deepseek_headers),
}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A checkpoint's folder and the model that Transformers reads from it; `unread` are the tensors it had no place for."""

    folder: Path
    reference: PreTrainedModel
    unread: frozenset[str]


def make_model(name: str, folder: Path) -> LoadedModel:
    """Write the checkpoint `name` of `MODELS` into `folder`, with the names and dtypes of a published one, and load it."""
    return load_model(write_checkpoint(MODELS[name], folder))


def load_model(folder: Path) -> LoadedModel:
    """Return the model that `from_pretrained` reads from `folder`, in the dtype of its config and in evaluation mode.

    Asserts that every parameter was read from the folder.
    """
    with quiet_transformers():
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    model, found = loaded
    assert not found["missing_keys"], f"from_pretrained found no tensor for {sorted(found['missing_keys'])}"
    assert not found["mismatched_keys"], f"from_pretrained found other shapes for {sorted(found['mismatched_keys'])}"
    return LoadedModel(folder, model.eval(), frozenset(found["unexpected_keys"]))


def save_model(model: LoadedModel, folder: Path) -> Path:
    """Write the reference model into `folder` as `save_pretrained` does, and return `folder`."""
    with quiet_transformers():
        model.reference.save_pretrained(folder)
    return folder


def loaded_tensors(model: LoadedModel) -> dict[str, torch.Tensor]:
    """Return what a loader has to fill, by name: the parameters and the persistent buffers."""
    return dict(model.reference.state_dict())
