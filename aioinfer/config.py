"""One dataclass: the single source of keyword arguments, command-line flags, environment and YAML keys.

``EngineConfig(max_running_requests=8)``, ``--max-running-requests 8``, ``AIOINFER_MAX_RUNNING_REQUESTS=8``
and ``max_running_requests: 8`` in a file all set the same field. Flags win over the environment, the
environment over the file, the file over the defaults below.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from aioinfer import plugins
from aioinfer.errors import ConfigError

__all__ = ["EngineConfig", "ServerConfig", "bundled_models", "load_settings", "policy_names"]

_BUNDLED = Path(__file__).parent / "bundled"


_POSITIVE = (
    "page_size",
    "max_running_requests",
    "max_step_tokens",
    "chunk_size",
    "max_model_len",
    "num_pages",
    "threads",
    "max_queued_requests",
    "max_queued_tokens",
    "max_prefill_tokens",
    "max_decode_rows",
    "lookahead",
    "max_rounds",
    "block_size",
    "max_passed_over",
    "clip_new_tokens",
    "max_lag",
)
_NOT_NEGATIVE = ("force_fifo_every", "share_prefix_tokens", "max_overlapped_prefill", "decode_graph_rows")


def _option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How an :class:`~aioinfer.Engine` runs. ``None`` means: decided when the model is known."""

    model: str = _option("tiny-chat", "model directory, or the name of a bundled model")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = _option(
        "auto", "weights and activations; auto takes what the checkpoint says"
    )
    load_format: Literal["auto", "random"] = _option(
        "auto", "auto reads the checkpoint; random makes weights up: a config.json is all that it needs"
    )
    device: Literal["auto", "cpu", "cuda"] = _option("auto", "auto takes cuda where there is one")
    attention_backend: Literal["auto", "triton", "native", "sdpa"] = _option(
        "auto",
        "kernels of the layers; auto takes Triton on cuda and native ones on a CPU where they can run, "
        "else torch's own (sdpa)",
    )
    moe_backend: Literal["auto", "triton", "native", "grouped", "loop"] = _option(
        "auto",
        "kernels of a mixture of experts; auto takes Triton on cuda and native ones on a CPU where they can "
        "run, else torch's (grouped, or loop)",
    )
    sampling_backend: Literal["auto", "triton", "native", "torch"] = _option(
        "auto",
        "sampling kernels; auto takes Triton on cuda and native ones on a CPU where they can run, "
        "else torch's own",
    )
    deterministic: bool = _option(
        False,
        "ids and logprobs of a request have the same bits in any company, with any window, chunks, cache and "
        "retractions; an error where the kernels cannot promise it, as native ones do",
    )
    quantization: Literal["none", "int8"] = _option(
        "none",
        "int8 rounds the weights of linear layers to 8 bits while loading, a factor for every output: half "
        "the memory, faster in small batches and slower in large ones; on a CPU with native kernels",
    )
    max_model_len: int | None = _option(None, "longest prompt plus output in tokens")
    page_size: int = _option(
        16, "KV positions per page; with a diffusion model at least, and a multiple of, a block"
    )
    num_pages: int | None = _option(None, "KV pages; by default from the memory budget")
    kv_memory_gib: float = _option(1.0, "KV budget on the CPU in GiB when num_pages is not given")
    gpu_memory_utilization: float = _option(0.85, "share of GPU memory for weights and KV together")
    max_running_requests: int = _option(64, "requests that hold a slot at the same time")
    max_step_tokens: int = _option(2048, "tokens of one step, prefill and decode together")
    chunk_size: int = _option(512, "longest prefill chunk of one request in one step")
    max_prefill_tokens: int | None = _option(
        None,
        "prefill tokens of one step; a single chunk may exceed it when it is alone; "
        "default: 256 for diffusion on a CPU, else no limit of their own",
    )
    max_decode_rows: int | None = _option(None, "requests that decode in one step; others take turns")
    mixed: bool = _option(True, "decodes and prefill chunks share steps")
    step_priority: Literal["decode", "prefill"] = _option("decode", "who gets a step's tokens first")
    policy: str = _option(
        "fcfs", "order of the queue: fcfs, lpm, dfs-weight, lof, random, routing-key or priority"
    )
    preemption: bool = _option(False, "the first in the queue may displace requests of lower priority")
    admission: Literal["fifo", "pack"] = _option(
        "pack", "fifo keeps the policy's order; pack lets in first what fits whole into the step"
    )
    lookahead: int = _option(64, "waiting requests that pack looks at")
    force_fifo_every: int = _option(8, "every so many rounds of packing are fifo; 0 never")
    max_passed_over: int = _option(16, "rounds in which the eldest may be passed over before it goes first")
    prefix_cache: bool = _option(True, "keep KV of finished prefixes for requests that begin alike")
    share_prefix_tokens: int = _option(
        64, "wait for another's prefill when so many tokens are shared with it; 0 never"
    )
    new_token_ratio: float = _option(0.4, "share of the possible output that admission keeps pages for")
    min_new_token_ratio: float = _option(0.1, "what the ratio decays to; it rises with every retraction")
    new_token_ratio_decay: float = _option(0.002, "decay of the ratio per step")
    clip_new_tokens: int = _option(4096, "possible output of one request counted at most")
    overlap_steps: Literal[0, 1, 2] | None = _option(
        None,
        "steps launched ahead of the one being read; 0 is sequential; default: 1, 0 for diffusion on a CPU",
    )
    plan_late: bool = _option(
        True,
        "plan a step when the one before is about to end, not as soon as the window has room: who arrives "
        "meanwhile is in it",
    )
    max_overlapped_prefill: int = _option(
        256, "prefill tokens of a step behind which more prefill is launched before its result was read"
    )
    block_size: int | None = _option(
        None, "positions per block of a diffusion model; by default what the checkpoint says"
    )
    diffusion_mode: Literal["fdfo", "sync"] = _option(
        "fdfo",
        "fdfo: each block leaves when it is done; sync: all of a batch wait for the last; diffusion models",
    )
    fused_commit: bool = _option(
        True, "the last forward over a block is the first over the one behind it; diffusion models"
    )
    max_rounds: int | None = _option(
        None,
        "diffusion models: rounds computed in one step while no block gets done and nobody wants in; "
        "default: 4 with window 0, else 1",
    )
    fast_forward: bool = _option(True, "take tokens that a grammar forces without computing them one by one")
    grammar_patience: float = _option(
        0.002, "seconds that a step waits for late grammar masks before it goes on without their rows"
    )
    decode_graph_rows: int = _option(
        256, "largest batch of tokens or blocks captured as a graph on cuda; 0 captures none"
    )
    launch_mode: Literal["thread", "inline"] = _option("thread", "where steps are launched")
    switch_interval: float | None = _option(
        None, "seconds of sys.setswitchinterval while the engine runs; 0 leaves it; default: 0.0003 on cuda"
    )
    gc: Literal["auto", "idle", "python"] = _option(
        "auto",
        "idle freezes what is there and collects between steps only; python leaves it; auto: idle on cuda",
    )
    threads: int | None = _option(
        None, "CPU threads of the device; by default all cores that this process may use and has the time of"
    )
    seed: int | None = _option(None, "seed of the seeds of requests that bring none")
    max_queued_requests: int = _option(4096, "requests waiting for a slot before new ones are rejected")
    max_queued_tokens: int = _option(4_000_000, "prompt tokens waiting before new requests are rejected")
    max_lag: int | None = _option(
        None, "tokens a consumer may be behind before its request is parked; default: never"
    )
    waiting_timeout: float | None = _option(None, "seconds a request may wait for its first step")
    running_timeout: float | None = _option(None, "seconds a request may run after its first step")
    drain_timeout: float = _option(30.0, "seconds that closing waits for running requests")
    transformers_fallback: bool = _option(False, "run the transformers implementation of any model")

    def __post_init__(self) -> None:
        _check_types(self)
        for name in _POSITIVE:
            _at_least(self, name, 1)
        for name in _NOT_NEGATIVE:
            _at_least(self, name, 0)
        for name in ("waiting_timeout", "running_timeout", "kv_memory_gib"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name} must be positive, got {value!r}")
        for name in ("drain_timeout", "grammar_patience"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ConfigError(f"{name} must not be negative, got {getattr(self, name)!r}")
        if self.switch_interval is not None and not 0 <= self.switch_interval <= 1:
            raise ConfigError(f"switch_interval must be in [0, 1], got {self.switch_interval!r}")
        for name in ("new_token_ratio", "min_new_token_ratio", "new_token_ratio_decay"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} must be in [0, 1], got {getattr(self, name)!r}")
        _known_policy(self.policy)
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization!r}"
            )
        if self.max_step_tokens < self.max_running_requests:
            raise ConfigError(
                f"max_step_tokens ({self.max_step_tokens}) must be at least max_running_requests "
                f"({self.max_running_requests}): every running request may need a token in one step"
            )

    @property
    def model_path(self) -> Path:
        """The directory of the model, bundled or not."""
        bundled = _BUNDLED / self.model
        return bundled if self.model in bundled_models() else Path(self.model).expanduser()

    @property
    def num_slots(self) -> int:
        """Slots besides the null slot 0: enough that fenced ones never hold up an admission."""
        return self.max_running_requests * (2 if self.overlap_steps is None else self.overlap_steps + 1)

    @property
    def graph_rows(self) -> int:
        """Rows of the largest decode batch that is captured, where graphs can be."""
        rows = self.max_running_requests
        return min(rows, self.max_decode_rows or rows, self.decode_graph_rows)

    def round_rows(self, block_size: int) -> int:
        """Rows, of a block each, of the largest rounds that are captured, where graphs can be."""
        rows = min(2 * self.max_running_requests, self.max_step_tokens // block_size)
        return min(rows, self.max_decode_rows or rows, self.decode_graph_rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """How ``aioinfer serve`` listens."""

    host: str = _option("127.0.0.1", "address to listen on")
    port: int = _option(8000, "port to listen on; 0 takes a free one")
    api_key: str | None = _option(None, "bearer token that clients must send")
    insecure: bool = _option(False, "allow other than loopback addresses without an API key")
    served_model_name: str | None = _option(None, "model name in the API; by default the directory's")
    tool_call_parser: str | None = _option(
        None, "how the model writes tool calls: hermes; without it tools are refused"
    )
    reasoning_parser: str | None = _option(
        None, "how the model writes reasoning, to split it off: qwen3 or deepseek-r1"
    )
    max_body_mib: float = _option(16.0, "largest request body in MiB")
    ping_interval: float = _option(5.0, "seconds of silence before an SSE comment keeps a stream alive")
    send_timeout: float = _option(30.0, "seconds a client may refuse to read before it is dropped")
    stall_timeout: float = _option(120.0, "seconds without a finished step before /health says 503")
    drain_timeout: float = _option(30.0, "seconds that SIGTERM waits for running requests")

    def __post_init__(self) -> None:
        _check_types(self)
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be in [0, 65535], got {self.port}")
        for name in ("max_body_mib", "ping_interval", "send_timeout", "stall_timeout"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name} must be positive, got {value!r}")
        _known_parsers(self)
        if self.host not in ("127.0.0.1", "::1", "localhost") and not (self.api_key or self.insecure):
            raise ConfigError(f"host {self.host} is not loopback: give an api_key, or insecure=True")


def bundled_models() -> list[str]:
    """Names of the models that come with the package."""
    if not _BUNDLED.is_dir():
        return []
    return sorted(entry.name for entry in _BUNDLED.iterdir() if (entry / "config.json").is_file())


def load_settings(
    cls: type[Any],
    flags: Mapping[str, Any] = types.MappingProxyType({}),
    environ: Mapping[str, str] | None = None,
    file: Mapping[str, Any] = types.MappingProxyType({}),
) -> Any:
    """Build a config dataclass from flags, environment and file settings, in this order of precedence.

    Keys of ``file`` that the class does not have are ignored here: one file may hold several classes.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    for item in dataclasses.fields(cls):
        variable = f"AIOINFER_{item.name.upper()}"
        if item.name in flags:
            values[item.name] = flags[item.name]
        elif variable in environ:
            values[item.name] = parse_setting(cls, item.name, environ[variable])
        elif item.name in file:
            values[item.name] = file[item.name]
    return cls(**values)


def parse_setting(cls: type[Any], name: str, text: str) -> Any:
    """One field from its text form, as flags and environment variables give it."""
    options = _options(cls, name)
    if type(None) in options and text.lower() in ("", "none", "null"):
        return None
    if bool in options:
        lowered = text.lower()
        if lowered in ("1", "true", "yes", "on"):
            return True
        if lowered in ("0", "false", "no", "off"):
            return False
        raise ConfigError(f"{name} must be true or false, got {text!r}")
    for kind in (int, float):
        if kind in options or any(isinstance(option, kind) for option in options):
            try:
                return kind(text)
            except ValueError:
                raise ConfigError(f"{name} must be a number, got {text!r}") from None
    return text


#: the annotations of a class, evaluated once
_hints: Callable[..., dict[str, Any]] = functools.cache(typing.get_type_hints)


def _options(cls: type[Any], name: str) -> tuple[Any, ...]:
    """What a field may hold: types, and the values of a Literal."""
    hint = _hints(cls)[name]
    # A Literal or None is typing's kind of union.
    union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    parts = typing.get_args(hint) if union else (hint,)
    return tuple(
        option
        for part in parts
        for option in (typing.get_args(part) if typing.get_origin(part) is Literal else (part,))
    )


def _check_types(config: Any) -> None:
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        options = _options(type(config), item.name)
        kinds = tuple(option for option in options if isinstance(option, type))
        if float in kinds and isinstance(value, int) and not isinstance(value, bool):
            continue
        if isinstance(value, bool) and bool not in kinds:
            raise ConfigError(f"{item.name} must not be a truth value, got {value!r}")
        if isinstance(value, kinds) or (not isinstance(value, bool) and value in options):
            continue
        wanted = ", ".join(getattr(option, "__name__", repr(option)) for option in options)
        raise ConfigError(f"{item.name} must be one of {wanted}; got {value!r}")


def policy_names() -> tuple[str, ...]:
    """Queue policies by the names that the config takes."""
    return tuple(name.replace("_", "-") for name in plugins.names(plugins.POLICIES))


def _known_policy(name: str) -> None:
    if name not in policy_names():
        raise ConfigError(f"policy must be one of {', '.join(policy_names())}; got {name!r}")


def _known_parsers(config: ServerConfig) -> None:
    from aioinfer.text.reasoning import REASONING_PARSERS
    from aioinfer.text.tool_calls import PARSERS

    for name, known in (("tool_call_parser", PARSERS), ("reasoning_parser", REASONING_PARSERS)):
        value = getattr(config, name)
        if value is not None and value not in known:
            raise ConfigError(f"{name} must be one of {', '.join(known)}; got {value!r}")


def _at_least(config: Any, name: str, low: int) -> None:
    value = getattr(config, name)
    if value is not None and value < low:
        raise ConfigError(f"{name} must be at least {low}, got {value}")
