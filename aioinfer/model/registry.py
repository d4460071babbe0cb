"""Registry: the architectures with a built-in implementation."""

from __future__ import annotations

from typing import Any

from aioinfer.errors import ConfigError
from aioinfer.model.blocks import Blocks
from aioinfer.model.families.base import Family
from aioinfer.model.families.diffusion_gemma import DiffusionGemma
from aioinfer.model.families.gemma import FOUR_NORMS, Gemma
from aioinfer.model.families.gemma4 import Gemma4
from aioinfer.model.families.gpt2 import GPT2
from aioinfer.model.families.gpt_oss import GptOss
from aioinfer.model.families.hybrid import Bamba, FalconH1, GraniteHybrid
from aioinfer.model.families.lfm2 import Lfm2
from aioinfer.model.families.llada2 import LLaDA2
from aioinfer.model.families.llama import POST_NORMS, SANDWICH_NORMS, LlamaLike
from aioinfer.model.families.mixtral import Mixtral
from aioinfer.model.families.nemotron_h import NemotronH
from aioinfer.model.families.qwen3_5 import Qwen3Next

__all__ = ["LANGUAGE_MODELS", "MODEL_TYPES", "own_implementation", "why_not_own"]

_SDAR = Blocks(4, 151669)
#: architecture -> (the model types whose configs it accepts, its family)
_OWN: dict[str, tuple[frozenset[str], Family]] = {
    "LlamaForCausalLM": (
        frozenset({"llama", "internlm3", "iquestcoder"}),
        LlamaLike("config", mlp_bias=True),
    ),
    "MistralForCausalLM": (frozenset({"mistral"}), LlamaLike(windows="all")),
    "MixtralForCausalLM": (frozenset({"mixtral"}), Mixtral(windows="all")),
    "Phi3ForCausalLM": (
        frozenset({"phi3"}),
        LlamaLike(windows="all", fused_qkv=True, fused_mlp=True, partial_rotary=True),
    ),
    "Qwen2ForCausalLM": (frozenset({"qwen2"}), LlamaLike("qkv", windows="config")),
    "Qwen3ForCausalLM": (frozenset({"qwen3"}), LlamaLike("config", qk_norm="heads", windows="config")),
    "Qwen3MoeForCausalLM": (
        frozenset({"qwen3_moe"}),
        LlamaLike("config", qk_norm="heads", windows="all", experts="config"),
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
        LlamaLike("config", mlp_bias=True, windows="config"),
    ),
    "Olmo2ForCausalLM": (
        frozenset({"olmo2"}),
        LlamaLike("config", qk_norm="whole", norm_weight="exact", norms=POST_NORMS),
    ),
    "Olmo3ForCausalLM": (
        frozenset({"olmo3"}),
        LlamaLike("config", qk_norm="whole", norm_weight="exact", norms=POST_NORMS, windows="config"),
    ),
    "Glm4ForCausalLM": (
        frozenset({"glm4"}),
        LlamaLike(
            "qkv-config",
            norms=SANDWICH_NORMS,
            fused_mlp=True,
            partial_rotary=True,
            interleaved_rotary=True,
        ),
    ),
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
    "GraniteForCausalLM": (frozenset({"granite"}), LlamaLike("config", mlp_bias=True)),
    "GptOssForCausalLM": (frozenset({"gpt_oss"}), GptOss("config", windows="config")),
    "GPT2LMHeadModel": (frozenset({"gpt2"}), GPT2()),
    "SDARForCausalLM": (
        frozenset({"sdar"}),
        LlamaLike("config", qk_norm="heads", windows="config", blocks=_SDAR),
    ),
    "SDARMoeForCausalLM": (
        frozenset({"sdar_moe"}),
        LlamaLike("config", qk_norm="heads", windows="all", experts="config", blocks=_SDAR),
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
    or of a model with recurrent state, which its code keeps to itself.
    """
    architecture = config.architectures[0]
    model_types, family = _OWN.get(architecture, (frozenset(), None))
    if family is None or config.model_type not in model_types:
        return None
    unsupported_reason = family.unsupported_reason(config)
    if unsupported_reason is None:
        return family
    if family.blocks is not None or family.recurrent(config):
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
