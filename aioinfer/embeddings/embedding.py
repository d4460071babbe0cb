"""Embeddings: what is asked for, and what becomes of what was pooled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Self, TypedDict

from aioinfer.checkpoint.sentences import Sentences
from aioinfer.errors import AioInferError, InvalidRequest, shown
from aioinfer.inputs import plain
from aioinfer.loop.options import PromptForm, PromptSource, is_one
from aioinfer.outputs import Result, Usage
from aioinfer.pooling import Pooling, PoolingKind
from aioinfer.request import JobOptions

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from aioinfer.execution.device import DeviceInfo
    from aioinfer.loop.options import Prompt

__all__ = [
    "Embedding",
    "EmbeddingArguments",
    "EmbeddingForm",
    "EmbeddingOptions",
    "honest",
    "input_form",
    "inputs_of",
    "of_input",
    "source_form",
    "split_options",
]

_KINDS: tuple[PoolingKind, ...] = ("last", "cls", "mean", "tokens")


@dataclass(frozen=True, slots=True)
class Embedding:
    """The embedding of one input."""

    #: float32 [dimensions]; with ``pooling="tokens"`` [tokens, dimensions]
    vector: npt.NDArray[np.float32] = field(compare=False)
    usage: Usage
    prompt_token_ids: Sequence[int] = field(default=(), repr=False)
    #: of the weights that computed it, as of a Result. Of several inputs, each has its own
    weight_version: int = field(default=0, compare=False)


class EmbeddingOptions(TypedDict, total=False):
    """Options of :meth:`aioinfer.Engine.embed`."""

    pooling: Literal["last", "cls", "mean", "tokens"] | None
    dimensions: int | None
    normalize: bool | None
    prompt_name: str | None
    truncate_prompt_tokens: int | None


class EmbeddingArguments(EmbeddingOptions, JobOptions, total=False):
    """These, and options of all requests."""


def split_options(given: EmbeddingArguments) -> tuple[EmbeddingOptions, JobOptions]:
    """What says how to embed, and the options of requests."""
    names = EmbeddingOptions.__annotations__.keys()
    parts: Any = ({}, {})
    for name, value in given.items():
        parts[name not in names][name] = value
    settings, options = parts
    return settings, options


@dataclass(frozen=True, slots=True)
class EmbeddingForm:
    """The way from inputs to embeddings."""

    pooling: Pooling
    dimensions: int | None
    normalize: bool
    sentences: Sentences
    prompt_name: str | None = None
    #: how texts become tokens; None: as usual
    form: PromptForm | None = None

    @classmethod
    def of(
        cls,
        info: DeviceInfo,
        sentences: Sentences,
        *,
        pooling: str | None = None,
        dimensions: int | None = None,
        normalize: bool | None = None,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> Self:
        """The form that a caller asks for, completed by what the model recommends. Raises InvalidRequest."""
        pooling, dimensions, normalize, prompt_name = map(
            plain, (pooling, dimensions, normalize, prompt_name)
        )
        if pooling is None and sentences.unsupported:
            message = f"{sentences.unsupported}, which is not supported: pooling says what else is wanted"
            raise InvalidRequest("model", message)
        usual = "mean" if info.whole_prompts and not sentences.embeds else sentences.pooling
        kind: Any = usual if pooling is None else pooling
        if kind not in _KINDS:
            raise InvalidRequest("pooling", f"must be one of {', '.join(_KINDS)}, got {shown(kind)}")
        size = info.hidden_size or 0
        if dimensions is not None and (type(dimensions) is not int or not 1 <= dimensions <= size):
            raise InvalidRequest("dimensions", f"must be 1 to {size}, got {shown(dimensions)}")
        if normalize is not None and type(normalize) is not bool:
            raise InvalidRequest("normalize", f"must be true or false, got {shown(normalize)}")
        if prompt_name is not None and prompt_name not in list(sentences.prompts):
            known = ", ".join(sentences.prompts) or "none"
            raise InvalidRequest("prompt_name", f"the model has {known}, got {shown(prompt_name)}")
        chosen = sentences.normalize if normalize is None else normalize
        form = input_form(info, sentences, truncate_prompt_tokens)
        return cls(Pooling(kind), dimensions, chosen, sentences, prompt_name, form)

    def prompt(self, given: Prompt) -> Prompt:
        """An input with the text in front of it that the model expects. Raises InvalidRequest."""
        if isinstance(given, str):
            return self.sentences.with_prompt(given, self.prompt_name)
        if self.prompt_name is not None:
            raise InvalidRequest("prompt_name", "only a text can have a prompt in front of it")
        return given

    def finish(self, result: Result) -> Embedding:
        """The embedding: cut to its dimensions, then of length 1 if it is to be."""
        vector = result.pooled
        if self.dimensions is not None:
            vector = vector[..., : self.dimensions].copy()
        if self.normalize:
            vector = normalized(vector)
        return Embedding(vector, result.usage, result.prompt_token_ids, result.weight_version)


def honest(info: DeviceInfo, sentences: Sentences) -> DeviceInfo:
    """Of a model that only embeds, the length is that of the inputs it was made for."""
    longest = sentences.max_tokens
    if info.generates or longest is None or longest >= info.max_model_len:
        return info
    return replace(info, max_model_len=longest, length_reason="max_seq_length of its files")


def input_form(info: DeviceInfo, sentences: Sentences, truncate: Any = None) -> PromptForm:
    """The way from inputs to tokens: at most as many as the model was made for, or cut to the first
    ``truncate`` of them. Raises InvalidRequest."""
    longest, truncate = sentences.max_tokens, plain(truncate)
    if truncate is None:
        return PromptForm(longest=info.max_model_len if longest is None else longest)
    form = PromptForm(truncate=truncate, beginning=True, longest=longest)
    return form if longest is None or truncate < 0 else replace(form, truncate=min(truncate, longest))


def source_form(prompt: Prompt, form: PromptForm | None) -> PromptForm | None:
    """The form of an input; None for one that has its form already."""
    return None if isinstance(prompt, PromptSource) else form


def normalized(vectors: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """float32 [..., D], each vector with length 1; one of zeros stays so."""
    import numpy as np  # not needed before

    lengths = np.linalg.norm(vectors.astype(np.float64), axis=-1, keepdims=True)
    found: npt.NDArray[np.float32] = (vectors / np.maximum(lengths, 1e-30)).astype(np.float32)
    return found


def inputs_of(inputs: Any) -> tuple[list[Prompt], bool]:
    """The inputs of :meth:`aioinfer.Engine.embed` in a list of their own, and whether it was a single one.
    Raises InvalidRequest."""
    if is_one(inputs):
        return [inputs], True
    try:
        if isinstance(inputs, (bytes, bytearray, memoryview)):
            raise TypeError
        return list(inputs), False
    except TypeError:
        kinds = "a text, token ids, a chat or a list of such"
        raise InvalidRequest("inputs", f"must be {kinds}, got {shown(inputs)}") from None


def of_input(error: AioInferError, name: str) -> AioInferError:
    """The error of the input with this name, with that name."""
    if isinstance(error, InvalidRequest) and error.field == "prompt":
        named = InvalidRequest(name, error.message, code=error.code)
        named.__cause__, named.request_id = error.__cause__, error.request_id
        return named
    error.add_note(f"of {name}")
    return error
