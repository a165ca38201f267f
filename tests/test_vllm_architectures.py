"""What vLLM's own loaders left in every parameter of many architectures, against a load from files.

`COMPARED` is the list: the entry, the spec that loads it, and how many ranks, parameters and kept parameters it has.
"""

from collections.abc import Mapping

import pytest

from mapper.checkpoint import Checkpoint
from mapper.compiler import compile
from mapper.layout import Layout
from mapper.load import Loader
from mapper.spec import load_spec
from tests.oracle.architectures import FOLDER, entry_family
from tests.oracle.families import write_checkpoint
from tests.oracle.goldens import GoldenRank, Untouched, compare, family_names, iter_ranks, layout_text, sentinel_tensors

COMPARED = {
    "AXK1ForCausalLM": ("axk1", 39, 1534, 26),
    "AfmoeForCausalLM": ("afmoe", 39, 1534, 0),
    "ArceeForCausalLM": ("arcee", 21, 378, 0),
    "BloomForCausalLM": ("bloom", 21, 777, 0),
    "Cohere2MoeForCausalLM": ("cohere2_moe", 39, 702, 0),
    "CwmForCausalLM": ("llama", 21, 378, 0),
    "DeepseekForCausalLM": ("deepseek_moe", 39, 936, 0),
    "DeepseekV2ForCausalLM": ("deepseek_v2", 39, 1352, 0),
    "DeepseekV3ForCausalLM": ("deepseek_v2", 39, 1430, 0),
    "DeepseekV3ForCausalLM@l5": ("deepseek_v2", 39, 1586, 0),
    "Ernie4_5ForCausalLM": ("smollm3", 21, 371, 0),
    "Ernie4_5_MoeForCausalLM@untied": ("ernie4_5_moe", 39, 1014, 0),
    "ExaoneMoEForCausalLM": ("exaone_moe", 39, 1222, 0),
    "ExaoneMoeForCausalLM": ("exaone_moe", 39, 1222, 0),
    "FalconForCausalLM": ("falcon", 21, 511, 0),
    "FalconMambaForCausalLM": ("mamba", 21, 602, 0),
    "GPT2LMHeadModel": ("gpt2", 21, 756, 0),
    "GPTBigCodeForCausalLM": ("gpt_bigcode", 21, 742, 0),
    "GPTBigCodeForCausalLM@mha": ("gpt_bigcode", 21, 742, 0),
    "GPTJForCausalLM": ("gptj", 21, 553, 0),
    "GPTNeoXForCausalLM": ("gpt_neox", 21, 728, 0),
    "Gemma2ForCausalLM": ("gemma2", 21, 490, 0),
    "Gemma3ForCausalLM": ("gemma3", 21, 602, 0),
    "GemmaForCausalLM": ("gemma", 21, 378, 0),
    "Glm4ForCausalLM": ("glm4", 21, 546, 0),
    "Glm4MoeForCausalLM": ("glm4_moe", 39, 1222, 0),
    "Glm4MoeLiteForCausalLM": ("glm4_moe_lite", 39, 1430, 0),
    "GlmForCausalLM": ("glm", 21, 434, 0),
    "GlmMoeDsaForCausalLM": ("glm_moe_dsa", 39, 1846, 0),
    "GptOssForCausalLM": ("gpt_oss", 39, 1469, 0),
    "GraniteMoeSharedForCausalLM": ("granitemoeshared", 39, 1053, 0),
    "GraniteSWAForCausalLM": ("granite_swa", 21, 427, 0),
    "HunYuanDenseV1ForCausalLM": ("hunyuan_dense", 21, 490, 0),
    "HyperCLOVAXForCausalLM": ("hyperclovax", 21, 490, 0),
    "IQuestCoderForCausalLM": ("llama", 21, 378, 0),
    "IQuestLoopCoderForCausalLM": ("iquest_loopcoder", 7, 245, 0),
    "InternLM3ForCausalLM": ("llama", 21, 378, 0),
    "Jais2ForCausalLM": ("nemotron", 21, 728, 0),
    "LLaMAForCausalLM": ("llama", 21, 378, 0),
    "LlamaForCausalLM": ("llama", 21, 378, 0),
    "Mamba2ForCausalLM@g1": ("mamba2", 7, 273, 0),
    "Mamba2ForCausalLM@g2": ("mamba2", 3, 117, 0),
    "MambaForCausalLM": ("mamba", 21, 602, 0),
    "MiMoForCausalLM": ("mimo", 21, 434, 0),
    "MiMoV2FlashForCausalLM": ("mimo_v2_flash", 39, 910, 0),
    "MiniCPM3ForCausalLM": ("minicpm3", 21, 658, 0),
    "MiniMaxM2ForCausalLM": ("minimax_m2", 39, 1118, 0),
    "Ministral3ForCausalLM": ("mistral", 21, 378, 0),
    "MistralForCausalLM": ("mistral", 21, 378, 0),
    "MixtralForCausalLM": ("mixtral", 39, 845, 0),
    "NemotronForCausalLM": ("nemotron", 21, 504, 0),
    "NemotronForCausalLM@bias": ("nemotron", 21, 728, 0),
    "OPTForCausalLM": ("opt", 21, 756, 0),
    "Olmo2ForCausalLM@kv4": ("olmo2", 21, 490, 0),
    "Olmo3ForCausalLM": ("olmo2", 21, 490, 0),
    "OlmoForCausalLM": ("olmo", 21, 252, 0),
    "OlmoeForCausalLM": ("olmoe", 39, 1053, 0),
    "PanguProMoEV2ForCausalLM": ("pangu_pro_moe_v2", 39, 1144, 0),
    "Phi3ForCausalLM": ("phi3", 21, 378, 0),
    "Qwen2ForCausalLM": ("qwen2", 21, 434, 0),
    "Qwen2ForCausalLM@tied": ("qwen2", 21, 427, 0),
    "Qwen2MoeForCausalLM": ("qwen2_moe", 39, 1261, 0),
    "Qwen2MoeForCausalLM@e6": ("qwen2_moe", 39, 1261, 0),
    "Qwen3ForCausalLM": ("qwen3", 21, 490, 0),
    "Qwen3ForCausalLM@tied": ("qwen3", 21, 483, 0),
    "Qwen3MoeForCausalLM": ("qwen3_moe", 39, 1053, 0),
    "Qwen3MoeForCausalLM@dense1": ("qwen3_moe", 39, 1027, 0),
    "Qwen3NextForCausalLM": ("qwen3_next", 39, 1586, 0),
    "SeedOssForCausalLM": ("qwen2", 21, 434, 0),
    "SmolLM3ForCausalLM": ("smollm3", 21, 371, 0),
    "Starcoder2ForCausalLM": ("starcoder2", 21, 721, 0),
    "TeleChat2ForCausalLM": ("telechat2", 21, 490, 0),
    "TeleFLMForCausalLM": ("llama", 21, 378, 0),
    "VaultGemmaForCausalLM": ("vaultgemma", 21, 371, 0),
}
# Parameters (the last segments of their names) whose bytes differ from vLLM's on purpose: (entry, suffix) -> why.
EXPONENTIAL = "of 4,096 exponentials, some differ in the last bit with the processor that they are computed on"
DIFFERENT: Mapping[tuple[str, str], str] = {
    ("FalconMambaForCausalLM", ".mixer.A"): EXPONENTIAL,
    ("MambaForCausalLM", ".mixer.A"): EXPONENTIAL,
}


def ranks_of(entry: str) -> list[GoldenRank]:
    return list(iter_ranks(entry, FOLDER))


@pytest.mark.parametrize("entry", COMPARED)
def test_files_leave_the_bytes_that_vllm_left(entry: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    spec_id, *counts = COMPARED[entry]
    family = entry_family(entry)
    checkpoint = Checkpoint.open(write_checkpoint(family, tmp_path_factory.mktemp("entry")))
    spec = load_spec(str(family.config["architectures"][0]))
    assert spec.id == spec_id
    programs = {}
    num_parameters = num_kept = 0
    different: set[tuple[str, str]] = set()
    for rank in (ranks := ranks_of(entry)):
        layout = layout_text(rank)
        if layout not in programs:
            programs[layout] = compile(spec, config=family.config, runtime="vllm", layout=Layout.parse(layout))
        tensors = sentinel_tensors(rank)
        tensors |= {alias: tensors[name] for alias, name in rank.aliases}
        report = Loader(programs[layout].at_rank(rank.rank), tensors).load(checkpoint)
        modes: dict[str, Untouched] = {param.name: "sentinel" if param.name in report.kept else "init" for param in rank.params}
        found = compare(rank, tensors, untouched=modes)
        explained = {key for key in DIFFERENT if key[0] == entry and any(_name(each).endswith(key[1]) for each in found)}
        assert [each for each in found if not any(_name(each).endswith(suffix) for _, suffix in explained)] == [], str(rank)
        assert report.sources == len(checkpoint.tensors)
        different |= explained
        num_parameters += len(rank.params)
        num_kept += len(report.kept)
    assert [len(ranks), num_parameters, num_kept] == counts
    assert different == {key for key in DIFFERENT if key[0] == entry}, "an exemption that is not needed has to go"


def _name(difference: str) -> str:
    return difference.partition(":")[0]


def test_every_entry_is_compared() -> None:
    assert sorted(COMPARED) == family_names(FOLDER)
    assert {entry for entry, _ in DIFFERENT} <= set(COMPARED)
