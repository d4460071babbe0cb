"""How an engine's parts are chosen and its arguments read: plain functions without state."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from aioinfer.config import EngineConfig
from aioinfer.errors import ConfigError, InvalidRequest
from aioinfer.execution.device import Device, DeviceInfo
from aioinfer.loop.generation import generation
from aioinfer.params import SamplingParams

if TYPE_CHECKING:
    from aioinfer.execution.launcher import Launcher
    from aioinfer.text.grammar import Compiler
    from aioinfer.text.tokenizer import Tokenizer

__all__ = [
    "decide",
    "default_params",
    "encoder",
    "load_tokenizer",
    "make_device",
    "make_launcher",
    "timeout",
    "with_end_tokens",
]

_MAX_LABEL = 256


def make_device(config: EngineConfig) -> Device:
    """The device that the config asks for, not opened. Imports no torch; opening does."""
    from aioinfer.execution.torch_device import TorchDevice

    return TorchDevice(config)


def make_launcher(config: EngineConfig) -> Launcher:
    """The launcher and device that the config asks for. Imports no torch; opening the device does."""
    from aioinfer.execution.launcher import InlineLauncher, ThreadLauncher

    device = make_device(config)
    return ThreadLauncher(device) if config.launch_mode == "thread" else InlineLauncher(device)


def load_tokenizer(config: EngineConfig) -> Tokenizer | None:
    """The model's tokenizer, or None if its directory has none. Blocks."""
    from aioinfer.text.tokenizer import HFTokenizer

    path = config.model_path
    if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        return None
    return HFTokenizer.load(path)


def default_params(config: EngineConfig, info: DeviceInfo) -> SamplingParams:
    """What the model's ``generation_config.json`` recommends, as far as such a model supports it. Blocks.
    Raises ConfigError."""
    path = config.model_path / "generation_config.json"
    if not path.is_file():
        return SamplingParams()
    try:
        recommended = json.loads(path.read_text("utf-8"))
        known = generation(info.block_size).recommended
        values = {name: recommended[name] for name in known if recommended.get(name) is not None}
        if recommended.get("do_sample") is False:
            values["temperature"] = 0.0
        return SamplingParams(**values)
    except (ValueError, InvalidRequest) as error:
        raise ConfigError(f"{path.name} of the model: {error}") from error


def with_end_tokens(info: DeviceInfo, tokenizer: Tokenizer | None) -> DeviceInfo:
    """The tokenizer may know end tokens that the model's config does not."""
    if tokenizer is None:
        return info
    return dataclasses.replace(info, eos_token_ids=info.eos_token_ids | tokenizer.eos_token_ids)


def decide(config: EngineConfig, block_size: int | None, *, asynchronous: bool) -> EngineConfig:
    """The config with what it leaves open until model and device are known.

    ``block_size`` is that of a diffusion model, None for others; an ``asynchronous`` device computes while
    Python does something else.
    """
    settings: dict[str, Any] = {"overlap_steps": 1, "max_prefill_tokens": None}
    if not asynchronous:
        settings |= generation(block_size).synchronous_settings
    left_open = {name: value for name, value in settings.items() if getattr(config, name) is None}
    config = dataclasses.replace(config, **left_open)
    if config.max_rounds is None:
        config = dataclasses.replace(config, max_rounds=1 if config.overlap_steps else 4)
    return config


def timeout(field: str, value: float | None, default: float | None) -> float | None:
    """A per-request deadline in seconds, or the engine's own."""
    if value is None:
        return default
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not math.isfinite(value)
        or value <= 0
    ):
        raise InvalidRequest(field, f"must be a positive number of seconds, got {value!r}")
    return value


def grammar_compiler(tokenizer: Tokenizer | None, info: DeviceInfo) -> Compiler:
    """What compiles grammars for a model; takes a second for a large vocabulary.

    Raises ConfigError if the extra is missing, InvalidRequest if the model cannot have grammars.
    """
    from aioinfer.text.grammar import Compiler
    from aioinfer.text.guidance import GuidanceBackend

    if tokenizer is None:
        raise InvalidRequest("grammar", "the engine has no tokenizer, so there is no text to constrain")
    backend = GuidanceBackend(tokenizer.for_grammars(), info.vocab_size, sorted(info.eos_token_ids))
    return Compiler(backend)


def max_lag(value: int | None) -> int | None:
    """How many tokens a consumer may be behind."""
    if value is not None and (type(value) is not int or value < 1):
        raise InvalidRequest("max_lag", f"must be a positive number of tokens, got {value!r}")
    return value


def priority(value: int) -> int:
    """A request's priority."""
    if type(value) is not int or not -(2**31) <= value < 2**31:
        raise InvalidRequest("priority", f"must be an integer of 32 bits, got {value!r}")
    return value


def label(field: str, value: str | None) -> str | None:
    """A short name that a caller gives."""
    if value is not None and (not isinstance(value, str) or len(value) > _MAX_LABEL):
        raise InvalidRequest(field, f"must be a string of at most {_MAX_LABEL} characters")
    return value


def encoder(
    tokenizer: Tokenizer | None,
    prompt: str | Sequence[int] | Sequence[Mapping[str, Any]],
    template_kwargs: Mapping[str, Any] | None,
) -> Callable[[], list[int]] | None:
    """How to make token ids of a prompt, or None if it is token ids. Raises InvalidRequest."""
    if not isinstance(prompt, (str, list, tuple)):
        raise InvalidRequest("prompt", f"must be text, token ids or messages, got {type(prompt).__name__}")
    if not prompt:
        raise InvalidRequest("prompt", "is empty")
    chat = not isinstance(prompt, str) and isinstance(prompt[0], Mapping)
    if template_kwargs is not None and not chat:
        raise InvalidRequest("chat_template_kwargs", "only chat messages go through a template")
    if not chat and not isinstance(prompt, str):
        return None
    if tokenizer is None:
        raise InvalidRequest("prompt", "the model has no tokenizer: give token ids")
    if isinstance(prompt, str):
        return lambda: tokenizer.encode(prompt)
    kwargs = dict(template_kwargs or {})
    return lambda: tokenizer.encode_chat(prompt, **kwargs)
