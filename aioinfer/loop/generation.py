"""The ways in which a model generates: token by token, or block by block. Chosen once per model.

What follows from the answer for requests and their scheduling is here, behind one protocol; what follows for
computing is in :mod:`aioinfer.execution.decoding`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from aioinfer import plugins
from aioinfer.config import EngineConfig
from aioinfer.diffusion.guide import steered
from aioinfer.diffusion.pins import Pins
from aioinfer.errors import ConfigError, InvalidRequest
from aioinfer.params import DiffusionParams, SamplingParams
from aioinfer.scheduling.block_batch import BlockBatch
from aioinfer.scheduling.block_cursor import BlockCursor
from aioinfer.scheduling.memory import Memory
from aioinfer.scheduling.queues import RunningBatch
from aioinfer.scheduling.sequence import MakeCursor
from aioinfer.scheduling.speculation import Speculation
from aioinfer.scheduling.token_batch import TokenBatch

if TYPE_CHECKING:
    from aioinfer.diffusion.algorithm import Algorithm

__all__ = ["BlockGeneration", "Generation", "TokenGeneration", "default_diffusion", "generation"]

#: parameters that make no sense where tokens are written in any order, and why
_REFUSED = {
    "logits_processors": "decide token after token, and a diffusion model writes blocks in any order",
    "thinking_budget": "counts token after token, and a diffusion model writes blocks in any order",
    "prompt_logprobs": "a diffusion model predicts masked tokens, and a prompt has none",
}
#: those and all others that decide on single tokens, for which canvases have no place
_NOT_OF_CANVASES = (
    "template",  # first, as it sets others
    *("top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("min_tokens", "logit_bias", "allowed_token_ids", "grammar", "bad_words"),
    *plugins.names(plugins.FILTERS),
)


class Generation(Protocol):
    """Parts of the loop's side that depend on a model's way to generate."""

    #: fields of ``generation_config.json`` that become default parameters
    recommended: tuple[str, ...]
    #: settings that are left open in the config, on a device that computes while Python waits
    synchronous_settings: Mapping[str, Any]

    def check(self, params: SamplingParams) -> None:
        """Raise InvalidRequest for parameters that the model cannot honour."""

    def cursor(self, params: SamplingParams) -> MakeCursor | None:
        """A maker of cursors for a request; None: the default one."""

    def batch(
        self, memory: Memory, config: EngineConfig, speculation: Speculation | None = None
    ) -> RunningBatch:
        """A new batch for a scheduler. ``speculation``: what drafts tokens; blocks have no use for it."""


class TokenGeneration:
    """Autoregressive models."""

    recommended: tuple[str, ...] = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    synchronous_settings: Mapping[str, Any] = MappingProxyType({})

    def check(self, params: SamplingParams) -> None:
        if params.diffusion is not None:
            raise InvalidRequest("diffusion", "the model is not a diffusion model")
        if params.template is not None:
            raise InvalidRequest(
                "template", "an autoregressive model fills templates of text, and not of token ids"
            )

    def cursor(self, params: SamplingParams) -> MakeCursor | None:
        return None

    def batch(
        self, memory: Memory, config: EngineConfig, speculation: Speculation | None = None
    ) -> RunningBatch:
        return TokenBatch(memory, config.running_requests, speculation)


class BlockGeneration:
    """Diffusion models."""

    recommended: tuple[str, ...]
    # A round that is launched before the previous one was read costs a forward now and then. An asynchronous
    # device gets that back; a CPU, whose forwards need the interpreter themselves, does not. And where many
    # prompts arrive at once, its long steps cost more per token than short ones and delay the rounds of all
    # other requests (``python -m bench diffusion``).
    synchronous_settings: Mapping[str, Any] = MappingProxyType(
        {"overlap_steps": 0, "max_prefill_tokens": 256}
    )

    def __init__(self, block_size: int, *, edits: bool = False, canvas: bool = False) -> None:
        """``edits``: the model has tokens that delete and split. ``canvas``: its blocks are canvases."""
        self._block_size = block_size
        self._edits = edits
        self._canvas = canvas
        self.recommended = () if canvas else TokenGeneration.recommended

    def check(self, params: SamplingParams) -> None:
        defaults, refused = SamplingParams(), dict(_REFUSED)
        if self._canvas:
            why = "this model draws canvases as a whole, and does not support it"
            refused |= dict.fromkeys(_NOT_OF_CANVASES, why)
        for name, reason in refused.items():
            if getattr(params, name) != getattr(defaults, name):
                raise InvalidRequest(name, reason)
        if self._canvas and params.logprobs:
            raise InvalidRequest("logprobs", "this model reports those of its own tokens only: ask for 0")
        if params.max_tokens == 0:
            raise InvalidRequest("max_tokens", "a diffusion model generates blocks: it cannot be 0")

    def cursor(self, params: SamplingParams) -> MakeCursor:
        from aioinfer.diffusion.registry import algorithm_class  # needs torch, which the device has, too

        diffusion = params.diffusion or DiffusionParams()
        algorithm = algorithm_class(diffusion.algorithm)
        _check_algorithm(algorithm, diffusion, self._edits, self._canvas)
        if not algorithm.steerable and (params.template is not None or steered(params)):
            raise InvalidRequest(
                "algorithm",
                f"{algorithm.name} knows no grammars, penalties, alternatives and templates",
            )
        return functools.partial(
            BlockCursor,
            block_size=self._block_size,
            monotone=algorithm.monotone,
            drafts=diffusion.draft,
            pins=functools.partial(Pins.of, params),
            canvas=self._canvas,
        )

    def batch(
        self, memory: Memory, config: EngineConfig, speculation: Speculation | None = None
    ) -> RunningBatch:
        return BlockBatch(memory, config, self._block_size, canvas=self._canvas)


def generation(block_size: int | None, *, edits: bool = False, canvas: bool = False) -> Generation:
    """Choose by the size of the model's blocks; None: without blocks. ``edits``, ``canvas``: as in
    BlockGeneration."""
    if block_size is None:
        return TokenGeneration()
    return BlockGeneration(block_size, edits=edits, canvas=canvas)


def _check_algorithm(algorithm: type[Algorithm], params: DiffusionParams, edits: bool, canvas: bool) -> None:
    """Raise InvalidRequest for parameters that it does not use, and for a model that cannot have it."""
    algorithm.check(params)
    if algorithm.canvas != canvas:
        kind = "canvases" if canvas else "masks"
        raise InvalidRequest("algorithm", f"{algorithm.name} is not for this model, which has {kind}")
    if algorithm.moves and not edits:
        raise InvalidRequest(
            "algorithm", f"{algorithm.name} needs a model whose config has delete_token_id and split_token_id"
        )


def default_diffusion(
    config: EngineConfig,
    block_size: int | None,
    *,
    edits: bool = False,
    canvas: bool = False,
    recommended: Mapping[str, Any] = MappingProxyType({}),
) -> DiffusionParams | None:
    """The denoising parameters of requests that name none; None where the config names none and the model has
    masks. ``edits``, ``canvas``: as in BlockGeneration; ``recommended``: the ``generation_config.json`` of a
    model with canvases. Raises ConfigError for a model that is no diffusion model or cannot have the
    algorithm, and for what the algorithm does not use."""
    fields = ("algorithm", "threshold", "edit_threshold", "steps")
    given = {name: getattr(config, f"diffusion_{name}") for name in fields}
    values: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if canvas:
        values = {"algorithm": "renoise"} | _of_canvases(recommended) | values
    if not values:
        return None
    if block_size is None:
        raise ConfigError(f"diffusion_{next(iter(values))}: the model is not a diffusion model")
    from aioinfer.diffusion.registry import algorithm_class  # needs torch, which the device has, too

    try:
        params = DiffusionParams(**values)
        _check_algorithm(algorithm_class(params.algorithm), params, edits, canvas)
    except InvalidRequest as error:
        raise ConfigError(f"diffusion_{error}") from error
    return params


def _of_canvases(recommended: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of ``renoise`` by transformers' names for them."""
    sampler = recommended.get("sampler_config")
    stated = {
        "steps": recommended.get("max_denoising_steps"),
        "entropy_bound": sampler.get("entropy_bound") if isinstance(sampler, dict) else None,
    }
    for name in ("t_min", "t_max", "stability_threshold", "confidence_threshold"):
        stated[name] = recommended.get(name)
    return {name: value for name, value in stated.items() if value is not None}
