"""Tiny dense decoders of Transformers: a config with sizes of its own for each, and the checkpoint that follows from it.

The names and shapes of a checkpoint are those of the model's own parameters, but for the few that Transformers renames when
it reads and writes. A parameter that is shared under two names is stored once.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.oracle.families import Config, Family
from tests.oracle.tensors import Header

# No two sizes of a tensor alike. Heads of 10 rows, so that queries (60) and keys (20) are no part of the hidden size.
LLAMA: Config = {
    "vocab_size": 149,
    "hidden_size": 48,
    "intermediate_size": 74,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 64,
}
# For models that compute the size of a head: 14 rows.
PLAIN: Config = {**{key: value for key, value in LLAMA.items() if key != "head_dim"}, "hidden_size": 84}
MLA: Config = {"qk_nope_head_dim": 11, "qk_rope_head_dim": 6, "v_head_dim": 13}
TOKENS: Config = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
RENAMED = {("gpt_neox", "lm_head.weight"): "embed_out.weight"}
GPT: Config = {"vocab_size": 149, "n_embd": 48, "n_head": 6, "n_layer": 3, "n_positions": 64, "n_inner": 74}


def dense_headers(config: Config) -> Iterator[Header]:
    """Yield the headers of the checkpoint that belongs to a config of Transformers."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        yield Header(RENAMED.get((config["model_type"], name), name), tuple(parameter.shape), parameter.dtype)


def _dense(entry: str, model_type: str, sizes: Config, **changes: object) -> tuple[str, Family]:
    """Return a checkpoint for an architecture, or for `ARCHITECTURE@variant`."""
    named = {"model_type": model_type, "dtype": "bfloat16", "architectures": [entry.partition("@")[0]]}
    return entry, Family({**sizes, **TOKENS, **changes, **named}, dense_headers)


DENSE: dict[str, Family] = dict(
    [
        _dense("ArceeForCausalLM", "arcee", LLAMA),
        _dense("CwmForCausalLM", "cwm", LLAMA),
        _dense("Ernie4_5ForCausalLM", "ernie4_5", LLAMA),
        _dense("GPT2LMHeadModel", "gpt2", GPT),
        _dense("GPTBigCodeForCausalLM", "gpt_bigcode", GPT),
        _dense("GPTBigCodeForCausalLM@mha", "gpt_bigcode", GPT, multi_query=False),
        _dense("GPTJForCausalLM", "gptj", GPT, rotary_dim=4),
        _dense("GPTNeoXForCausalLM", "gpt_neox", PLAIN),
        _dense("Gemma2ForCausalLM", "gemma2", LLAMA),
        _dense("Gemma3ForCausalLM", "gemma3_text", LLAMA),
        _dense("GemmaForCausalLM", "gemma", LLAMA),
        _dense("Glm4ForCausalLM", "glm4", {**LLAMA, "head_dim": 16}, attention_bias=True),
        _dense("GlmForCausalLM", "glm", {**LLAMA, "head_dim": 16}, attention_bias=True),
        _dense("GraniteSWAForCausalLM", "granite_swa", PLAIN),
        _dense("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", LLAMA),
        _dense("HyperCLOVAXForCausalLM", "hyperclovax", LLAMA, use_post_norm=True),
        _dense("Jais2ForCausalLM", "jais2", LLAMA),
        _dense("LlamaForCausalLM", "llama", LLAMA),
        _dense("MiniCPM3ForCausalLM", "minicpm3", {**LLAMA, "num_key_value_heads": 6}, q_lora_rank=26, kv_lora_rank=34, **MLA),
        _dense("Ministral3ForCausalLM", "ministral3", LLAMA),
        _dense("MistralForCausalLM", "mistral", LLAMA),
        _dense("NemotronForCausalLM", "nemotron", LLAMA),
        _dense("NemotronForCausalLM@bias", "nemotron", LLAMA, attention_bias=True, mlp_bias=True),
        _dense("OPTForCausalLM", "opt", PLAIN, ffn_dim=74, word_embed_proj_dim=30),
        _dense("Olmo2ForCausalLM", "olmo2", PLAIN),
        _dense("Olmo3ForCausalLM", "olmo3", PLAIN),
        _dense("OlmoForCausalLM", "olmo", PLAIN),
        _dense("Phi3ForCausalLM", "phi3", PLAIN),
        _dense("Qwen2ForCausalLM", "qwen2", PLAIN),
        _dense("Qwen2ForCausalLM@tied", "qwen2", PLAIN, tie_word_embeddings=True),
        _dense("Qwen3ForCausalLM", "qwen3", LLAMA),
        _dense("SeedOssForCausalLM", "seed_oss", LLAMA),
        _dense("SmolLM3ForCausalLM", "smollm3", PLAIN),
        _dense("Starcoder2ForCausalLM", "starcoder2", PLAIN),
        _dense("VaultGemmaForCausalLM", "vaultgemma", LLAMA),
    ]
)
