"""The architecture of a config whose files do not state one, or state the name that a release has for it.

transformers takes the class of the model type, whatever ``architectures`` says. Here a name of a release is
taken for it only if it is that name in other letters, or is made of the model type: PhiMoE, InternLM3, EXAONE
3. Others may be of models that state the model type of another one and compute something else (SantaCoder).
"""

from __future__ import annotations

from typing import Any

from aioinfer.checkpoint.libraries import importing_transformers
from aioinfer.errors import ConfigError, shown
from aioinfer.model.multimodal import WRAPPERS
from aioinfer.model.registry import MODEL_TYPES

__all__ = ["named_architecture", "own_fields"]

_CAUSAL = "ForCausalLM"


def named_architecture(config: Any, name: str) -> str:
    """The architecture of the config of the checkpoint ``name``. Raises ConfigError if it names none and its
    model type has none, or if it names one that nobody knows."""
    with importing_transformers():
        from transformers.models.auto import modeling_auto as auto

    kind, stated = config.model_type, config.architectures
    causal = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
    if not stated:
        wrapper = auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(kind)
        found = wrapper if wrapper in WRAPPERS else causal
        if found is None:
            raise ConfigError(
                f"model: the config of {name} names no architecture, and there is none for the model type "
                f"{shown(kind)}: add architectures to config.json"
            )
        return str(found)
    if not isinstance(stated, list) or not isinstance(stated[0], str):
        raise ConfigError(f"model: architectures of the config of {name} must be names, got {shown(stated)}")
    first = stated[0]
    if causal is not None and first != causal and _plain(first) in (_plain(causal), _plain(kind + _CAUSAL)):
        return str(causal)
    return first


def own_fields(model_type: object) -> frozenset[str]:
    """The fields of the configs of a model type; none if all of its models are transformers' affair."""
    with importing_transformers():
        from transformers import CONFIG_MAPPING

        from aioinfer.model.configs import OWN_CONFIGS

    if not isinstance(model_type, str) or model_type not in MODEL_TYPES:
        return frozenset()
    kind = OWN_CONFIGS.get(model_type) or CONFIG_MAPPING[model_type]
    return frozenset(dir(kind)).union(kind.attribute_map, {"head_dim"})  # which not all classes declare


def _plain(name: str) -> str:
    return name.replace("_", "").lower()
