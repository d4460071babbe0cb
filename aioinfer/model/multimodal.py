"""Multimodal models, of which the causal language model inside is loaded, and an encoder beside it.

Their config has the text model's as a part, and among their tensors are the text model's under a prefix.
:func:`text_part` makes of both a checkpoint of the text model alone; later code knows no wrappers. Tensors
of other parts are told by their prefixes, and are read by encoders alone (:mod:`aioinfer.model.vision.part`).
Any other tensor belongs to the text model, which must know it.

In a text all three sections of M-RoPE (Qwen-VL) have the same positions, so it is the plain rotation, and the
text model's config has them only for images, beside the rotation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from aioinfer.checkpoint.files import Checkpoint, Directory, GGUFCheckpoint
from aioinfer.checkpoint.libraries import importing_transformers
from aioinfer.checkpoint.tensors import SafetensorsTensors, Tensors
from aioinfer.errors import ConfigError, shown
from aioinfer.model.renamed_tensors import RenamedTensors

if TYPE_CHECKING:
    import torch

__all__ = ["WRAPPERS", "TextPart", "other_tensors", "text_part"]


class Wrapper(NamedTuple):
    """The facts about one architecture."""

    #: prefixes of the tensors of the other parts, with or without "model." in front
    unread: tuple[str, ...] = ()
    #: the model type that computes the same from text alone; None: the text model has one of its own
    model_type: str | None = None
    #: fields of the text model's config that its class does not have, because they are always the same
    fields: Mapping[str, Any] = MappingProxyType({})
    #: the text model is no causal one of transformers, and goes by the name of the wrapper
    own: bool = False


_VISUAL = ("visual.",)
#: and the layers that predict further tokens
_VISUAL_AND_FURTHER = ("visual.", "mtp.")
_TOWER = ("vision_tower.", "multi_modal_projector.")
_CONNECTED = ("vision_model.", "connector.")
_EMBED = ("embed_vision.", "embed_audio.")
#: facts by architecture
WRAPPERS = {
    # Both of its passes have the same weights; of the encoder, files have the scales of layers alone.
    "DiffusionGemmaForBlockDiffusion": Wrapper(
        ("encoder.vision_tower.", "encoder.embed_vision."),
        None,
        {
            "enable_moe_block": True,
            "attention_k_eq_v": True,
            "use_double_wide_mlp": False,
            "num_kv_shared_layers": 0,
        },
        own=True,
    ),
    "Gemma3ForConditionalGeneration": Wrapper(_TOWER),
    "Gemma4ForConditionalGeneration": Wrapper(("vision_tower.", "audio_tower.", *_EMBED)),
    "Gemma4UnifiedForConditionalGeneration": Wrapper(("vision_embedder.", *_EMBED)),
    "Idefics3ForConditionalGeneration": Wrapper(_CONNECTED),
    "InternVLForConditionalGeneration": Wrapper(_TOWER),
    "Lfm2VlForConditionalGeneration": Wrapper(_TOWER),
    "Mistral3ForConditionalGeneration": Wrapper(_TOWER),
    "Qwen2VLForConditionalGeneration": Wrapper(_VISUAL, "qwen2"),
    "Qwen2_5_VLForConditionalGeneration": Wrapper(_VISUAL, "qwen2"),
    "Qwen3VLForConditionalGeneration": Wrapper(_VISUAL, "qwen3"),
    "Qwen3VLMoeForConditionalGeneration": Wrapper(_VISUAL, "qwen3_moe", {"norm_topk_prob": True}),
    "Qwen3_5ForConditionalGeneration": Wrapper(_VISUAL_AND_FURTHER),
    "Qwen3_5MoeForConditionalGeneration": Wrapper(_VISUAL_AND_FURTHER),
    "SmolVLMForConditionalGeneration": Wrapper(_CONNECTED),
}

#: where checkpoints have the tensors of the text model, and what they are called without a wrapper; the first
#: prefix that fits counts
_PREFIXES = (
    ("model.language_model.", "model."),
    ("model.text_model.", "model."),
    ("model.decoder.", "model."),
    ("model.encoder.language_model.", "model.encoder."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
#: fields of rotary positions that matter to images only, and the old name of "rope_type"
_MROPE = frozenset({"mrope_section", "mrope_interleaved", "type"})


def text_part(checkpoint: Checkpoint, config: Any, *, stored: bool) -> tuple[Checkpoint, Any]:
    """The text model in a wrapper, as a checkpoint and its config; any other model as it is.

    ``stored``: its weights are to be read. Raises ConfigError if the text model cannot be loaded.
    """
    architecture = config.architectures[0]
    wrapper = WRAPPERS.get(architecture)
    if wrapper is None or not isinstance(checkpoint, (Directory, GGUFCheckpoint)):
        return checkpoint, config
    text, stated = getattr(config, "text_config", None), checkpoint.config()
    if text is None:
        raise ConfigError(f"model: the config of {checkpoint.path.name} has no text_config")
    quantisation = checkpoint.quantisation() if isinstance(checkpoint, Directory) else None
    if quantisation is None:
        quantisation = (stated.get("text_config") or {}).get("quantization_config")
    inner = _config(config, text, wrapper, quantisation)
    part = TextPart(checkpoint, config, wrapper, inner, quantisation, stored=stored)
    # Some configs say so of a head of its own; transformers believes the weights, too.
    inner.tie_word_embeddings = bool(inner.tie_word_embeddings) and not (stored and part.has_own_head())
    return part, inner


def _config(outer: Any, text: Any, wrapper: Wrapper, quantisation: Any) -> Any:
    """The config of the text model, as its own checkpoint would have it. Raises ConfigError."""
    with importing_transformers():
        from transformers import AutoConfig
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    model_type = wrapper.model_type or text.model_type
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    if wrapper.own:
        architecture = outer.architectures[0]
    elif not isinstance(architecture, str) or not architecture.endswith("ForCausalLM"):
        raise ConfigError(
            f"model: the text model of {outer.architectures[0]} is a {shown(model_type)}, "
            "which is no causal language model of transformers"
        )
    fields = {**text.to_dict(), **wrapper.fields, "architectures": [architecture]}
    if wrapper.own:
        fields["canvas_length"] = outer.canvas_length
    rope = fields.get("rope_parameters") or {}
    if "mrope_section" in rope:
        fields["mrope_section"] = rope["mrope_section"]
    fields["rope_parameters"] = {name: value for name, value in rope.items() if name not in _MROPE}
    # transformers asks the outer config first, and of the head no other.
    fields["tie_word_embeddings"] = outer.tie_word_embeddings
    fields["dtype"] = text.dtype or outer.dtype
    ends = getattr(outer, "eos_token_id", None)
    if ends is not None:
        fields["eos_token_id"] = ends
    if quantisation is not None:
        fields["quantization_config"] = quantisation
    try:
        return AutoConfig.for_model(**{**fields, "model_type": model_type})
    except Exception as error:
        # Each of the many config classes raises its own types of errors.
        raise ConfigError(f"model: the text_config cannot be used: {error}") from error


class TextPart(Checkpoint):
    """The checkpoint of a wrapper as that of its text model."""

    def __init__(
        self,
        whole: Directory | GGUFCheckpoint,
        outer: Any,
        wrapper: Wrapper,
        config: Any,
        quantisation: Any,
        *,
        stored: bool,
    ) -> None:
        """``config``: of the text model; ``stored``: the weights are to be read."""
        self.path: Path = whole.path
        #: with all parts
        self.whole = whole
        #: the config of the whole model
        self.outer = outer
        self.architecture: str = outer.architectures[0]
        self._wrapper = wrapper
        self._text_config = config
        self._quantisation = quantisation
        self._stored = stored

    def description(self, prefixes: tuple[str, ...] = (), renames: Sequence[tuple[str, str]] = ()) -> str:
        """The part that is loaded, in words for the user; with an encoder of images if that has tensors of
        such names, see :func:`other_tensors`. Raises ConfigError."""
        found = f"text{' and images' if prefixes else ' part'} of {self.architecture}"
        if not self._stored or isinstance(self.whole, GGUFCheckpoint):
            return found
        unread = self._text.unread - len(other_tensors(self._files, prefixes, renames).names)
        return f"{found}; {unread} tensors of other parts are not read" if unread else found

    def config(self) -> dict[str, Any]:
        return self.whole.config()

    def generation_config(self) -> dict[str, Any]:
        return self.whole.generation_config()

    def tokenizer(self) -> Any | None:
        return self.whole.tokenizer()

    def processor(self) -> tuple[dict[str, Any], dict[str, Any]] | None:
        return self.whole.processor()

    def files(self) -> list[Path]:
        return self.whole.files()

    def tensors(self) -> Tensors:
        return self._tensors

    def others(self, prefixes: tuple[str, ...], renames: Sequence[tuple[str, str]]) -> Tensors:
        """The tensors of another part; see :func:`other_tensors`. Raises ConfigError."""
        from aioinfer.checkpoint.formats import NothingQuantised

        if isinstance(self.whole, GGUFCheckpoint):
            assert self.whole.mmproj is not None
            return self.whole.mmproj.tensors()
        found = other_tensors(self._files, prefixes, renames)
        try:
            return self._as_quantised(found)
        except NothingQuantised:
            return found  # the text model is, as a rule alone

    def texts(self) -> Callable[[Tensors], Tensors]:
        """A function that takes the tensors of the text model from those of the same architecture."""
        return partial(_TextTensors, unread=self._wrapper.unread, config=self._text_config)

    def has_own_head(self) -> bool:
        """Whether the checkpoint has a head that is not the embedding. Raises ConfigError."""
        tensors = self._tensors
        if _HEAD not in tensors.names or _EMBEDDING not in tensors.names:
            return False
        head, embedding = tensors.read(_HEAD), tensors.read(_EMBEDDING)
        return head.dtype != embedding.dtype or not head.equal(embedding)

    @cached_property
    def _files(self) -> Tensors:
        whole = self.whole
        return whole.tensors() if isinstance(whole, GGUFCheckpoint) else SafetensorsTensors(self.path)

    @cached_property
    def _text(self) -> _TextTensors:
        return _TextTensors(self._files, self._wrapper.unread, self._text_config)

    @cached_property
    def _tensors(self) -> Tensors:
        return self._as_quantised(self._text)

    def _as_quantised(self, tensors: Tensors) -> Tensors:
        if self._quantisation is None:
            return tensors
        from aioinfer.checkpoint.formats import quantised_tensors

        return quantised_tensors(tensors, self._quantisation)


class _TextTensors(RenamedTensors):
    """The tensors of the text model in a multimodal checkpoint, under the names that they have without it."""

    def __init__(self, tensors: Tensors, unread: tuple[str, ...], config: Any) -> None:
        """``config``: of the text model. Raises ConfigError if a tensor is there twice."""
        self._config = config
        #: number of the tensors of other parts
        self.unread = 0
        stored: dict[str, str] = {}
        for name in tensors.names:
            if name.removeprefix("model.").startswith(unread):
                self.unread += 1
                continue
            inner = _without_wrapper(name)
            if inner in stored:
                raise ConfigError(f"model: {name} is in the checkpoint as {stored[inner]}, too")
            stored[inner] = name
        super().__init__(tensors, stored)

    def shape(self, name: str) -> tuple[int, ...]:
        shape = super().shape(name)
        return (shape[0], shape[2], shape[1]) if self._transposed(name, shape) else shape

    def read(self, name: str) -> torch.Tensor:
        tensor = super().read(name)
        turned = self._transposed(name, tuple(tensor.shape))
        return tensor.transpose(1, 2).contiguous() if turned else tensor

    def _transposed(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether stacked experts, or their scales, are stored as [experts, inputs, outputs]: releases of
        Qwen3-VL are, checkpoints that transformers saves are not. transformers goes by the shape as well."""
        weight = name.removesuffix("_inv").removesuffix("_scale")
        if not weight.endswith((".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")) or len(shape) != 3:
            return False
        if weight != name and weight in self._stored:
            shape = self._tensors.shape(self._stored[weight])
        hidden, middle = self._config.hidden_size, self._config.moe_intermediate_size
        outputs, inputs = (2 * middle, hidden) if weight.endswith("gate_up_proj") else (hidden, middle)
        return shape[1:] != (outputs, inputs) and shape[1:] == (inputs, outputs)


def other_tensors(
    tensors: Tensors, prefixes: tuple[str, ...], renames: Sequence[tuple[str, str]]
) -> RenamedTensors:
    """The tensors of a checkpoint whose names have one of these prefixes, without "model." in front.

    Args:
        prefixes: of their names, as they are returned.
        renames: beginnings of names in the checkpoint, and what is returned for them.
    """
    found = {}
    for stored in tensors.names:
        name = stored.removeprefix("model.")
        for old, new in renames:
            if name.startswith(old):
                name = new + name.removeprefix(old)
                break
        if name.startswith(prefixes):
            found[name] = stored
    return RenamedTensors(tensors, found)


def _without_wrapper(name: str) -> str:
    for outer, inner in _PREFIXES:
        if name.startswith(outer):
            return inner + name.removeprefix(outer)
    return name
