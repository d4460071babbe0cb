"""Registry: the architectures with a built-in implementation."""

from __future__ import annotations

from typing import Any

from aioinfer.errors import ConfigError
from aioinfer.model.blocks import Blocks
from aioinfer.model.families.base import Family
from aioinfer.model.families.deepseek import DeepSeek
from aioinfer.model.families.diffusion_gemma import DiffusionGemma
from aioinfer.model.families.gemma import FOUR_NORMS, Gemma
from aioinfer.model.families.gemma4 import Gemma4
from aioinfer.model.families.gpt2 import GPT2
from aioinfer.model.families.gpt_neox import GPTNeoX
from aioinfer.model.families.gpt_oss import GptOss
from aioinfer.model.families.hybrid import Bamba, FalconH1, GraniteHybrid
from aioinfer.model.families.lfm2 import Lfm2
from aioinfer.model.families.llada2 import LLaDA2
from aioinfer.model.families.llama import POST_NORMS, SANDWICH_NORMS, LayerNorms, LlamaLike
from aioinfer.model.families.mixture import Mixture
from aioinfer.model.families.nemotron_h import NemotronH
from aioinfer.model.families.opt import OPT
from aioinfer.model.families.qwen3_5 import Qwen3Next
from aioinfer.model.moe.sparse import TOGETHER

__all__ = ["LANGUAGE_MODELS", "MODEL_TYPES", "own_implementation", "why_not_own"]

_SDAR = Blocks(4, 151669)
_UP_DOWN = ("up_proj", "down_proj")
#: gate, up and down of an expert in Mixtral
_W = ("w1", "w3", "w2")
#: experts as those of DeepSeek-V3
_DEEPSEEK: dict[str, Any] = {
    "routing": "sigmoid",
    "bias": "gate.e_score_correction_bias",
    "shared": "mlp.shared_experts",
}
_GRANITE: dict[str, Any] = {
    "module": "block_sparse_moe",
    "router": "router.layer",
    "expert_module": "",
    "together": ("input_linear.weight", "output_linear.weight"),
}
_COHERE: dict[str, Any] = {
    "layer_norm": "plain",
    "norms": LayerNorms(mlp=None),
    "parallel": "all",
    "interleaved_rotary": True,
}
#: architecture -> (the model types whose configs it accepts, its family)
_OWN: dict[str, tuple[frozenset[str], Family]] = {
    "LlamaForCausalLM": (
        frozenset({"llama", "internlm3", "iquestcoder"}),
        LlamaLike("config", mlp_bias="config"),
    ),
    "MistralForCausalLM": (frozenset({"mistral"}), LlamaLike(windows="all")),
    "Ministral3ForCausalLM": (frozenset({"ministral3"}), LlamaLike(windows="all", growing=True)),
    "MixtralForCausalLM": (
        frozenset({"mixtral"}),
        Mixture(windows="all", module="block_sparse_moe", expert_names=_W),
    ),
    "MiniMaxM2ForCausalLM": (
        frozenset({"minimax_m2"}),
        Mixture(
            qk_norm="whole",
            partial_rotary=True,
            routing="sigmoid",
            module="block_sparse_moe",
            bias="e_score_correction_bias",
            expert_names=_W,
        ),
    ),
    "Phi3ForCausalLM": (
        frozenset({"phi3"}),
        LlamaLike(windows="all", fused_qkv=True, gated_names=TOGETHER, partial_rotary=True),
    ),
    "PhiForCausalLM": (
        frozenset({"phi"}),
        LlamaLike(
            "all",
            mlp_bias="all",
            layer_norm="biased",
            parallel="all",
            plain_names=("fc1", "fc2"),
            partial_rotary=True,
            out_name="dense",
            last_norm="final_layernorm",
            biased_head=True,
        ),
    ),
    "Qwen2ForCausalLM": (frozenset({"qwen2"}), LlamaLike("qkv", windows="config")),
    "Qwen2MoeForCausalLM": (
        frozenset({"qwen2_moe"}),
        Mixture("qkv-config", windows="config", experts="config", shared="mlp.shared_expert"),
    ),
    "Qwen3ForCausalLM": (frozenset({"qwen3"}), LlamaLike("config", qk_norm="heads", windows="config")),
    "Qwen3MoeForCausalLM": (
        frozenset({"qwen3_moe"}),
        Mixture("config", qk_norm="heads", windows="all", experts="config"),
    ),
    "Qwen3NextForCausalLM": (
        frozenset({"qwen3_next"}),
        Qwen3Next(experts="config", by_key_head=True),
    ),
    "Qwen3_5ForCausalLM": (frozenset({"qwen3_5_text"}), Qwen3Next()),
    "Qwen3_5MoeForCausalLM": (frozenset({"qwen3_5_moe_text"}), Qwen3Next(experts="all")),
    "Lfm2ForCausalLM": (frozenset({"lfm2"}), Lfm2()),
    "BambaForCausalLM": (frozenset({"bamba"}), Bamba("config")),
    "FalconH1ForCausalLM": (frozenset({"falcon_h1"}), FalconH1()),
    "GraniteMoeHybridForCausalLM": (frozenset({"granitemoehybrid"}), GraniteHybrid("config")),
    "Lfm2MoeForCausalLM": (frozenset({"lfm2_moe"}), Lfm2(experts=True)),
    "NemotronHForCausalLM": (frozenset({"nemotron_h"}), NemotronH()),
    "SmolLM3ForCausalLM": (
        frozenset({"smollm3"}),
        LlamaLike("config", mlp_bias="config", windows="config"),
    ),
    "Olmo2ForCausalLM": (
        frozenset({"olmo2"}),
        LlamaLike("config", qk_norm="whole", norm_weight="exact", norms=POST_NORMS),
    ),
    "Olmo3ForCausalLM": (
        frozenset({"olmo3"}),
        LlamaLike("config", qk_norm="whole", norm_weight="exact", norms=POST_NORMS, windows="config"),
    ),
    "OlmoeForCausalLM": (frozenset({"olmoe"}), Mixture("config", qk_norm="whole")),
    "GlmForCausalLM": (
        frozenset({"glm"}),
        LlamaLike("qkv-config", gated_names=TOGETHER, partial_rotary=True, interleaved_rotary=True),
    ),
    "Glm4ForCausalLM": (
        frozenset({"glm4"}),
        LlamaLike(
            "qkv-config",
            norms=SANDWICH_NORMS,
            gated_names=TOGETHER,
            partial_rotary=True,
            interleaved_rotary=True,
        ),
    ),
    "Glm4MoeForCausalLM": (
        frozenset({"glm4_moe"}),
        Mixture("qkv-config", qk_norm="config", partial_rotary=True, **_DEEPSEEK),
    ),
    "Dots1ForCausalLM": (
        frozenset({"dots1"}),
        Mixture("config", qk_norm="heads", windows="config", **_DEEPSEEK),
    ),
    "SolarOpenForCausalLM": (frozenset({"solar_open"}), Mixture("qkv-config", **_DEEPSEEK)),
    "Exaone4ForCausalLM": (
        frozenset({"exaone4"}),
        LlamaLike(qk_norm="heads", norms=POST_NORMS, windows="config", local_rotary=True),
    ),
    "ExaoneMoeForCausalLM": (
        frozenset({"exaone_moe"}),
        Mixture(
            qk_norm="heads",
            windows="config",
            local_rotary=True,
            **_DEEPSEEK | {"bias": "e_score_correction_bias"},
        ),
    ),
    "MellumForCausalLM": (
        frozenset({"mellum"}),
        Mixture("config", qk_norm="heads", windows="config"),
    ),
    "CohereForCausalLM": (frozenset({"cohere"}), LlamaLike("config", **_COHERE)),
    "Cohere2ForCausalLM": (
        frozenset({"cohere2"}),
        LlamaLike("config", windows="config", local_rotary=True, **_COHERE),
    ),
    "Ernie4_5ForCausalLM": (frozenset({"ernie4_5"}), LlamaLike(interleaved_rotary=True)),
    "Ernie4_5_MoeForCausalLM": (
        frozenset({"ernie4_5_moe"}),
        Mixture(
            interleaved_rotary=True, bias="moe_statics.e_score_correction_bias", shared="mlp.shared_experts"
        ),
    ),
    "SeedOssForCausalLM": (frozenset({"seed_oss"}), LlamaLike("qkv-config", mlp_bias="config")),
    "HunYuanDenseV1ForCausalLM": (
        frozenset({"hunyuan_v1_dense"}),
        LlamaLike("config", qk_norm="rotated"),
    ),
    "HunYuanMoEV1ForCausalLM": (
        frozenset({"hunyuan_v1_moe"}),
        Mixture("config", qk_norm="rotated", router="gate.wg", shared="mlp.shared_mlp"),
    ),
    "GraniteForCausalLM": (frozenset({"granite"}), LlamaLike("config", mlp_bias="config")),
    "GraniteMoeForCausalLM": (frozenset({"granitemoe"}), Mixture("config", **_GRANITE)),
    "GraniteMoeSharedForCausalLM": (
        frozenset({"granitemoeshared"}),
        Mixture("config", shared="shared_mlp", shared_names=("input_linear", "output_linear"), **_GRANITE),
    ),
    "HyperCLOVAXForCausalLM": (
        frozenset({"hyperclovax"}),
        LlamaLike(
            "config",
            mlp_bias="config",
            norms=LayerNorms("input_layernorm", "post_norm1", "post_attention_layernorm", "post_norm2"),
            multiplied_logits=True,
        ),
    ),
    "HeliumForCausalLM": (frozenset({"helium"}), LlamaLike("qkv-config", interleaved_rotary=True)),
    "CwmForCausalLM": (frozenset({"cwm"}), LlamaLike(windows="config")),
    "ArceeForCausalLM": (
        frozenset({"arcee"}),
        LlamaLike("config", mlp_bias="config", plain_names=_UP_DOWN),
    ),
    "Jais2ForCausalLM": (
        frozenset({"jais2"}),
        LlamaLike("config", mlp_bias="config", layer_norm="biased", plain_names=_UP_DOWN),
    ),
    "NemotronForCausalLM": (
        frozenset({"nemotron"}),
        LlamaLike(
            "config",
            mlp_bias="config",
            layer_norm="biased",
            norm_weight="offset",
            plain_names=_UP_DOWN,
            partial_rotary=True,
        ),
    ),
    "StableLmForCausalLM": (
        frozenset({"stablelm"}),
        LlamaLike("qkv-config", layer_norm="biased", parallel="config", partial_rotary=True),
    ),
    "Starcoder2ForCausalLM": (
        frozenset({"starcoder2"}),
        LlamaLike(
            "config",
            mlp_bias="config",
            layer_norm="biased",
            windows="all",
            plain_names=("c_fc", "c_proj"),
        ),
    ),
    "GPTNeoXForCausalLM": (frozenset({"gpt_neox"}), GPTNeoX()),
    "OPTForCausalLM": (frozenset({"opt"}), OPT()),
    "GemmaForCausalLM": (frozenset({"gemma"}), Gemma("config")),
    "Gemma2ForCausalLM": (
        frozenset({"gemma2"}),
        Gemma("config", norms=FOUR_NORMS, windows="config", capped=True),
    ),
    "Gemma3ForCausalLM": (
        frozenset({"gemma3_text"}),
        Gemma("config", qk_norm="heads", norms=FOUR_NORMS, windows="config", spans=True),
    ),
    "Gemma4ForCausalLM": (frozenset({"gemma4_text"}), Gemma4()),
    "Gemma4UnifiedForCausalLM": (frozenset({"gemma4_unified_text"}), Gemma4()),
    "DeepseekV2ForCausalLM": (frozenset({"deepseek_v2"}), DeepSeek("softmax", interleaved=True)),
    "DeepseekV3ForCausalLM": (frozenset({"deepseek_v3", "kimi_k2"}), DeepSeek()),
    "Glm4MoeLiteForCausalLM": (frozenset({"glm4_moe_lite"}), DeepSeek()),
    "MiniCPM3ForCausalLM": (frozenset({"minicpm3"}), DeepSeek("none", interleaved=False)),
    "YoutuForCausalLM": (frozenset({"youtu"}), DeepSeek("none")),
    "GptOssForCausalLM": (frozenset({"gpt_oss"}), GptOss("config", windows="config")),
    "GPT2LMHeadModel": (frozenset({"gpt2"}), GPT2()),
    "SDARForCausalLM": (
        frozenset({"sdar"}),
        LlamaLike("config", qk_norm="heads", windows="config", blocks=_SDAR),
    ),
    "SDARMoeForCausalLM": (
        frozenset({"sdar_moe"}),
        Mixture("config", qk_norm="heads", windows="all", experts="config", blocks=_SDAR),
    ),
    "DiffusionGemmaForBlockDiffusion": (frozenset({"diffusion_gemma_text"}), DiffusionGemma()),
    "LLaDA2MoeModelLM": (frozenset({"llada2_moe", "llada2_moe_veomni"}), LLaDA2()),
}


#: model types that may have an own implementation
MODEL_TYPES = frozenset[str]().union(*(types for types, _ in _OWN.values()))
#: architectures that generate token by token
LANGUAGE_MODELS = frozenset(name for name, (_, family) in _OWN.items() if family.blocks is None)


def own_implementation(config: Any) -> Family | None:
    """The built-in family that implements a config; None if there is none, or if it lacks the config's
    variant. Then transformers computes the model.

    Raises ConfigError for an unsupported variant of a block diffusion model, which transformers lacks, too,
    of a model with recurrent state, which its code keeps to itself, or of one with latents, which it expands.
    """
    architecture = config.architectures[0]
    model_types, family = _OWN.get(architecture, (frozenset(), None))
    if family is None or config.model_type not in model_types:
        return None
    unsupported_reason = family.unsupported_reason(config)
    if unsupported_reason is None:
        return family
    if family.blocks is not None or family.recurrent(config) or isinstance(family, DeepSeek):
        raise ConfigError(f"model: {architecture} with {unsupported_reason} is not supported")
    return None


def why_not_own(config: Any) -> str:
    """Reason why :func:`own_implementation` has none for a config."""
    architecture = config.architectures[0]
    model_types, family = _OWN.get(architecture, (frozenset(), None))
    if family is None:
        return f"there is no own code for {architecture}"
    if config.model_type not in model_types:
        return f"the model type of {architecture} is {config.model_type}"
    return f"{architecture} has {family.unsupported_reason(config)}"
