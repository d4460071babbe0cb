"""The config dataclasses: the single source of keyword arguments, flags, environment variables and YAML keys.

``EngineConfig(max_running_requests=8)``, ``--max-running-requests 8``, ``AIOINFER_MAX_RUNNING_REQUESTS=8``
and ``max_running_requests: 8`` in a file set the same field. Flags take precedence over the environment, the
environment over the file, the file over the defaults below. A field's metadata holds its group, its help text
and its bounds.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from aioinfer import plugins
from aioinfer.checkpoint.locate import locate, model_name
from aioinfer.errors import ConfigError
from aioinfer.plain import keep_plain
from aioinfer.settings import (
    check_type,
    field_options,
    load_settings,
    parse_setting,
    read_settings_file,
    shown,
    shown_bound,
    value_names,
    warn_of_variables,
)

__all__ = [
    "GROUPS",
    "EngineConfig",
    "ServerConfig",
    "is_loopback",
    "load_settings",
    "parse_setting",
    "policy_names",
    "value_names",
]

#: Upper bound of the fields without one: excludes infinity, and integers that no float can hold.
_LARGEST = sys.float_info.max


@dataclass(frozen=True, slots=True)
class _Bounds:
    """Values that a numeric field accepts: finite, in [low, high] or (low, high]."""

    low: float
    high: float = _LARGEST
    low_open: bool = False

    def check(self, name: str, value: float) -> None:
        """Raises ConfigError with the field's name."""
        if self.low <= value <= self.high and not (self.low_open and value == self.low):
            return
        if self.high < _LARGEST:
            bracket = "(" if self.low_open else "["
            wanted = f"be in {bracket}{shown_bound(self.low)}, {shown_bound(self.high)}]"
        elif self.low:
            wanted = f"be at least {shown_bound(self.low)}"
        else:
            wanted = "be positive" if self.low_open else "not be negative"
        raise ConfigError(f"{name} must {wanted}, got {shown(value)}")


_AT_LEAST_ONE = _Bounds(1)
_NOT_NEGATIVE = _Bounds(0)
_POSITIVE = _Bounds(0, low_open=True)
_UNIT_INTERVAL = _Bounds(0, 1)

#: Group of a field -> title of its flags in ``--help``, in this order.
GROUPS = {
    "model": "model",
    "kernels": "device and kernels",
    "memory": "KV memory and prefix cache",
    "batching": "batching",
    "scheduling": "queue policy and admission",
    "overlap": "overlap and event loop",
    "sampling": "sampling and grammars",
    "diffusion": "diffusion models",
    "chat": "chats: tool calls, reasoning, template",
    "limits": "limits and timeouts",
    "observing": "metrics, log lines and traces",
    "server": "HTTP server",
    "connections": "HTTP connections",
}


def _option(default: Any, group: str, help: str, bounds: _Bounds | None = None) -> Any:
    """A field with its group in ``--help``, its help text and, for numbers, the values that it accepts."""
    assert group in GROUPS
    return field(default=default, metadata={"group": group, "help": help, "bounds": bounds})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How an :class:`~aioinfer.Engine` runs. ``None`` is resolved when the model is known.

    Raises:
        ConfigError: a field has the wrong type or is out of bounds; the message begins with its name.
    """

    # A backend of "auto" is Triton on CUDA; on a CPU the native kernels where they can run, else torch's.

    model: str = _option(
        "tiny-chat", "model", "bundled name, directory, GGUF file, or a hub's org/name[:variant][@revision]"
    )
    download: bool | None = _option(
        None, "model", "fetch a hub's model that is not in the local cache; by default the command line does"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = _option(
        "auto", "model", "dtype of weights and activations; auto: the checkpoint's"
    )
    load_format: Literal["auto", "random"] = _option(
        "auto", "model", "auto reads the checkpoint's weights; random needs a config.json only"
    )
    #: auto: weights that are quantised in the checkpoint stay so where native kernels compute them, and are
    #: dequantised elsewhere; none: they are dequantised everywhere. int8: groups of up to 128 with a scale.
    #: int4: groups of up to 64 with scale and offset; the head and the embedding have 8 bits. All multiply
    #: integers, with activations rounded to 8 bits.
    quantization: Literal["auto", "none", "int8", "int4"] = _option(
        "auto", "model", "bits of linear layers: the checkpoint's, or rounded to (native CPU kernels only)"
    )
    cache_weights: bool = _option(
        False, "model", "map packed weights from the user's cache, writing them first; native kernels only"
    )
    max_model_len: int | None = _option(None, "model", "maximum prompt plus output in tokens", _AT_LEAST_ONE)
    transformers_fallback: bool = _option(
        False, "model", "run the transformers implementation, for any model"
    )

    device: Literal["auto", "cpu", "cuda"] = _option("auto", "kernels", "auto: cuda where available")
    attention_backend: Literal["auto", "triton", "native", "sdpa"] = _option(
        "auto", "kernels", "attention kernels"
    )
    moe_backend: Literal["auto", "triton", "native", "grouped", "loop"] = _option(
        "auto", "kernels", "mixture-of-experts kernels"
    )
    sampling_backend: Literal["auto", "triton", "native", "torch"] = _option(
        "auto", "kernels", "sampling kernels"
    )
    #: The same for every batch composition, overlap, chunk size, cache setting and retraction.
    deterministic: bool = _option(
        False, "kernels", "bitwise reproducible ids and logprobs; an error if the kernels cannot"
    )
    threads: int | None = _option(
        None,
        "kernels",
        "CPU threads of the device, at most 4 per core; default: the cores of this process",
        _AT_LEAST_ONE,
    )
    decode_graph_rows: int = _option(
        256, "kernels", "largest batch captured as a CUDA graph; 0: no graphs", _NOT_NEGATIVE
    )

    #: Of a diffusion model: a multiple of the block size.
    page_size: int = _option(16, "memory", "KV positions per page", _AT_LEAST_ONE)
    num_pages: int | None = _option(
        None, "memory", "KV pages; default: from the memory budget", _AT_LEAST_ONE
    )
    kv_memory_gib: float = _option(
        1.0, "memory", "KV budget in GiB on a CPU, taken as it is used, if num_pages is not given", _POSITIVE
    )
    gpu_memory_utilization: float = _option(
        0.85, "memory", "share of GPU memory for weights and KV", _Bounds(0, 1, low_open=True)
    )
    prefix_cache: bool = _option(True, "memory", "reuse the KV of common prefixes")
    #: Of a model with recurrent state, whose cached prefixes can be used up to a kept state only. Default: a
    #: quarter of the memory budget at most, and 4 per running request at most.
    state_snapshots: int | None = _option(
        None,
        "memory",
        "recurrent states kept for cached prefixes; default: by the budget",
        _NOT_NEGATIVE,
    )
    state_snapshot_tokens: int = _option(
        64,
        "memory",
        "tokens that a recurrent state must save to be kept",
        _AT_LEAST_ONE,
    )
    share_prefix_tokens: int = _option(
        64,
        "memory",
        "hold a request back while another computes at least this long a common prefix; 0: never",
        _NOT_NEGATIVE,
    )
    new_token_ratio: float = _option(
        0.4, "memory", "share of the possible output that admission reserves pages for", _UNIT_INTERVAL
    )
    min_new_token_ratio: float = _option(
        0.1, "memory", "minimum of the ratio; every retraction raises the ratio again", _UNIT_INTERVAL
    )
    new_token_ratio_decay: float = _option(0.002, "memory", "decay of the ratio per step", _UNIT_INTERVAL)
    clip_new_tokens: int = _option(
        4096, "memory", "maximum output per request that admission counts", _AT_LEAST_ONE
    )

    max_running_requests: int = _option(64, "batching", "requests that hold a slot", _AT_LEAST_ONE)
    max_step_tokens: int = _option(
        2048, "batching", "tokens per step, prefill and decode together", _AT_LEAST_ONE
    )
    chunk_size: int = _option(
        512, "batching", "longest prefill chunk of one request in one step", _AT_LEAST_ONE
    )
    #: A single chunk may exceed it when it is the only one in its step.
    max_prefill_tokens: int | None = _option(
        None,
        "batching",
        "prefill tokens per step; default: 256 for diffusion on a CPU, else no limit",
        _AT_LEAST_ONE,
    )
    max_decode_rows: int | None = _option(
        None, "batching", "decode rows per step; more requests take turns", _AT_LEAST_ONE
    )
    mixed: bool = _option(True, "batching", "steps mix decode rows and prefill chunks")
    step_priority: Literal["decode", "prefill"] = _option(
        "decode", "batching", "the rows that get a step's tokens first"
    )

    policy: str = _option(
        "fcfs", "scheduling", "queue order: fcfs, lpm, dfs-weight, lof, random, routing-key or priority"
    )
    preemption: bool = _option(False, "scheduling", "the head of the queue may displace lower priorities")
    admission: Literal["fifo", "pack"] = _option(
        "pack",
        "scheduling",
        "fifo: the policy's order; pack: of equals, those that fit first, where tokens are short",
    )
    lookahead: int = _option(64, "scheduling", "waiting requests that pack considers", _AT_LEAST_ONE)
    force_fifo_every: int = _option(
        8, "scheduling", "every n-th round in which pack could reorder is fifo; 0: none", _NOT_NEGATIVE
    )
    max_passed_over: int = _option(
        16, "scheduling", "rounds that may pass over the oldest request", _AT_LEAST_ONE
    )

    overlap_steps: Literal[0, 1, 2] | None = _option(
        None,
        "overlap",
        "steps launched ahead of the one being read; default: 1, for diffusion on a CPU 0",
    )
    #: A step planned late includes the requests that arrive while the step before it runs.
    plan_late: bool = _option(True, "overlap", "plan a step when the one before it is about to end")
    max_overlapped_prefill: int = _option(
        256,
        "overlap",
        "more prefill is launched ahead only behind steps of at most this many prefill tokens",
        _NOT_NEGATIVE,
    )
    launch_mode: Literal["thread", "inline"] = _option("thread", "overlap", "where steps are launched")
    switch_interval: float | None = _option(
        None,
        "overlap",
        "sys.setswitchinterval in seconds; 0: unchanged; default: 0.0003 on cuda",
        _UNIT_INTERVAL,
    )
    gc: Literal["auto", "idle", "python"] = _option(
        "auto", "overlap", "idle: freeze and collect between steps; python: unchanged; auto: idle on cuda"
    )

    seed: int | None = _option(None, "sampling", "seed for the requests that have none")
    fast_forward: bool = _option(
        True, "sampling", "append the tokens that a grammar forces without a forward each"
    )
    max_grammar_bytes: int = _option(
        65_536, "sampling", "largest grammar or JSON schema of a request, in bytes", _Bounds(1, 1 << 20)
    )
    max_grammar_depth: int = _option(64, "sampling", "deepest nesting of a JSON schema", _Bounds(1, 120))
    grammar_patience: float = _option(
        0.002, "sampling", "seconds that a step waits for late grammar masks", _NOT_NEGATIVE
    )

    block_size: int | None = _option(
        None, "diffusion", "positions per block; default: the checkpoint's", _AT_LEAST_ONE
    )
    diffusion_mode: Literal["fdfo", "sync"] = _option(
        "fdfo", "diffusion", "fdfo: each block leaves when it is done; sync: the batch waits for the last"
    )
    fused_commit: bool = _option(True, "diffusion", "commit a block in the first forward over the next block")
    #: Rounds continue in one step while no block is done and no request waits for admission.
    max_rounds: int | None = _option(
        None, "diffusion", "denoising rounds per step; default: 4 with overlap_steps 0, else 1", _AT_LEAST_ONE
    )

    tool_call_parser: str | None = _option(
        "auto",
        "chat",
        "format of tool calls: hermes, qwen3-coder, gemma4, mistral, mistral-v11, llama3, harmony;"
        " auto: the chat template's; none: tools are refused",
    )
    reasoning_parser: str | None = _option(
        "auto",
        "chat",
        "format of reasoning to split off: qwen3, deepseek-r1, mistral, gemma4, harmony;"
        " auto: the chat template's",
    )
    chat_template: str | None = _option(
        None, "chat", "chat template in place of the model's: a Jinja file, or the template itself"
    )

    max_queued_requests: int = _option(
        4096, "limits", "waiting requests before new ones are rejected", _AT_LEAST_ONE
    )
    max_queued_tokens: int = _option(
        4_000_000, "limits", "waiting prompt tokens before requests are rejected", _AT_LEAST_ONE
    )
    max_stop_strings: int = _option(16, "limits", "stop strings of a request, at most 16", _Bounds(0, 16))
    max_stop_characters: int = _option(
        16_384, "limits", "characters of a request's stop strings in all", _NOT_NEGATIVE
    )
    max_stop_patterns: int = _option(8, "limits", "stop patterns of a request, at most 8", _Bounds(0, 8))
    max_lag: int | None = _option(
        None,
        "limits",
        "unread tokens of a stream before its request is parked; default: no limit",
        _AT_LEAST_ONE,
    )
    waiting_timeout: float | None = _option(None, "limits", "seconds until a request's first step", _POSITIVE)
    running_timeout: float | None = _option(
        None, "limits", "seconds from a request's first step to its end", _POSITIVE
    )
    drain_timeout: float = _option(
        30.0, "limits", "seconds that closing waits for running requests", _NOT_NEGATIVE
    )

    #: Of the logger aioinfer.stats, at level INFO; one line says that the engine is idle.
    stats_interval: float | None = _option(
        None,
        "observing",
        "seconds between log lines of throughput and load; 0: none; default: none, of aioinfer serve 10",
        _NOT_NEGATIVE,
    )
    #: Only of an Engine; the extra "tracing" installs what it needs.
    tracing: bool = _option(False, "observing", "a span of OpenTelemetry per request, without its content")

    def __post_init__(self) -> None:
        _check_fields(self)
        if not self.model.strip() or "\0" in self.model:
            raise ConfigError(f"model must name a model, got {shown(self.model)}")
        _known_parsers(self)
        if self.chat_template is not None and not self.chat_template.strip():
            raise ConfigError("chat_template must name a file or be a template, got an empty text")
        if self.policy not in policy_names():
            raise ConfigError(f"policy must be one of {', '.join(policy_names())}; got {self.policy!r}")
        if self.max_step_tokens < self.max_running_requests:
            raise ConfigError(
                f"max_step_tokens ({self.max_step_tokens}) must be at least max_running_requests "
                f"({self.max_running_requests}): every running request may need a token in one step"
            )

    @classmethod
    def load(
        cls, path: str | Path | None = None, environ: Mapping[str, str] | None = None, **settings: Any
    ) -> EngineConfig:
        """A config from the sources of the command line.

        Args:
            path: a YAML file; None: no file. It may hold the fields of :class:`ServerConfig`, too.
            environ: variables, ``AIOINFER_CHUNK_SIZE`` for ``chunk_size``; None: those of the process.
            settings: fields; they take precedence over the variables, these over the file, and the file over
                the defaults.

        Raises:
            ConfigError: a value is invalid, or the file cannot be read or has an unknown key.
            TypeError: one of ``settings`` is no field.
        """
        return _load(cls, path, environ, settings)

    @property
    def model_path(self) -> Path:
        """Its directory or file on this machine. Blocks. Raises ConfigError: it is not here."""
        return locate(self.model)

    @property
    def model_name(self) -> str:
        """What clients call the model unless told otherwise."""
        return model_name(self.model)

    @property
    def num_slots(self) -> int:
        """Slots in addition to the null slot 0: enough that fenced slots never delay an admission."""
        return self.max_running_requests * (2 if self.overlap_steps is None else self.overlap_steps + 1)

    @property
    def graph_rows(self) -> int:
        """Rows of the largest decode batch captured as a graph."""
        rows = self.max_running_requests
        return min(rows, self.max_decode_rows or rows, self.decode_graph_rows)

    def round_rows(self, block_size: int) -> int:
        """Rows, one block each, of the largest denoising round captured as a graph."""
        rows = min(2 * self.max_running_requests, self.max_step_tokens // block_size)
        return min(rows, self.max_decode_rows or rows, self.decode_graph_rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """How ``aioinfer serve`` listens.

    Raises:
        ConfigError: a field has the wrong type or is out of bounds; the message begins with its name.
    """

    host: str = _option("127.0.0.1", "server", "address to listen on")
    port: int = _option(8000, "server", "port to listen on; 0: any free port", _Bounds(0, 65535))
    uds: str | None = _option(None, "server", "path of a Unix socket to listen on instead of host and port")
    uds_mode: str = _option("600", "server", "permissions of the Unix sockets, in octal digits")
    tls_certificate: str | None = _option(None, "server", "PEM file of a certificate chain: serve HTTPS")
    tls_key: str | None = _option(None, "server", "PEM file of its key; default: in the same file")
    tls_ca: str | None = _option(None, "server", "PEM file of authorities: clients need a certificate of one")
    api_key: str | None = _option(None, "server", "bearer token that clients must send")
    api_keys: str | None = _option(None, "server", "YAML file of further keys with names and limits")
    insecure: bool = _option(False, "server", "allow a non-loopback host without an API key")
    served_model_name: str | None = _option(
        None, "server", "names of the model in the API, separated by commas; default: the directory's name"
    )
    access_log: bool = _option(False, "server", "log one line per request")
    access_log_format: Literal["text", "json"] = _option("text", "server", "form of these lines")
    playground: bool = _option(True, "server", "a page at / to try the model with")
    metrics: bool = _option(True, "observing", "answer /metrics in the formats of Prometheus")
    vllm_metrics: bool = _option(True, "observing", "show metrics by the names of vLLM, too, for its boards")
    admin_port: int | None = _option(
        None, "server", "port of the admin routes on 127.0.0.1; 0: any free port", _Bounds(0, 65535)
    )
    admin_uds: str | None = _option(None, "server", "path of a Unix socket for the admin routes")
    admin_key: str | None = _option(None, "server", "bearer token that admin requests must send")
    #: Separated by commas. Keeps pages away whose name has been pointed to this server (DNS rebinding).
    allowed_hosts: str | None = _option(
        None,
        "server",
        "hosts of requests besides loopback names; *: any; default: any with a key or not on loopback",
    )
    cors_origins: str | None = _option(
        None, "server", "origins of web pages that may use the server, as in https://a.b,https://c.d; *: any"
    )

    max_body_mib: float | None = _option(
        None,
        "connections",
        "largest request body in MiB; default: 1, and 64 bytes per token of the context, at most 16",
        _POSITIVE,
    )
    #: The parser of JSON holds up all else while it runs, 0.1 to 0.5 us per value on a Xeon.
    max_body_values: int | None = _option(
        None,
        "connections",
        "JSON values and keys of a request body; default: 262144, or twice the context",
        _AT_LEAST_ONE,
    )
    max_messages: int = _option(4096, "connections", "messages of a chat", _AT_LEAST_ONE)
    max_answer_logprobs: int | None = _option(
        None,
        "connections",
        "logprobs in an answer, alternatives included; default: 262144, or those of one choice",
        _AT_LEAST_ONE,
    )
    max_connections: int | None = _option(
        None,
        "connections",
        "open connections; default: 4096, fewer if the limit of open files is low",
        _AT_LEAST_ONE,
    )
    header_timeout: float = _option(
        10.0, "connections", "seconds until a new connection has sent a request's headers", _POSITIVE
    )
    body_timeout: float = _option(
        30.0, "connections", "seconds from a request's headers to the end of its body", _POSITIVE
    )
    idle_timeout: float = _option(
        75.0, "connections", "seconds between requests before a connection is closed", _POSITIVE
    )
    ping_interval: float = _option(
        5.0, "connections", "seconds of silence before an SSE comment is sent", _POSITIVE
    )
    send_timeout: float = _option(
        30.0, "connections", "seconds without a read before a client is disconnected", _POSITIVE
    )
    stall_timeout: float = _option(
        120.0, "connections", "seconds without a finished step before /health returns 503", _POSITIVE
    )
    drain_timeout: float = _option(
        30.0, "limits", "seconds that SIGTERM waits for running requests", _NOT_NEGATIVE
    )

    def __post_init__(self) -> None:
        _check_fields(self)
        _check_listening(self)
        if self.uds is None and not is_loopback(self.host) and not (self.needs_key or self.insecure):
            raise ConfigError(f"host {self.host} is not loopback: give an api_key, or insecure=True")

    @property
    def needs_key(self) -> bool:
        """Clients must send a key."""
        return self.api_key is not None or self.api_keys is not None

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names in ``served_model_name``; empty: the model's own."""
        return tuple(name.strip() for name in (self.served_model_name or "").split(",") if name.strip())

    @property
    def socket_mode(self) -> int:
        """``uds_mode`` as a number."""
        return int(self.uds_mode, 8)

    @classmethod
    def load(
        cls, path: str | Path | None = None, environ: Mapping[str, str] | None = None, **settings: Any
    ) -> ServerConfig:
        """As :meth:`EngineConfig.load`, also from the same file."""
        return _load(cls, path, environ, settings)


_Config = TypeVar("_Config", EngineConfig, ServerConfig)


def _load(
    cls: type[_Config],
    path: str | Path | None,
    environ: Mapping[str, str] | None,
    settings: Mapping[str, Any],
) -> _Config:
    known = {item.name for kind in (EngineConfig, ServerConfig) for item in dataclasses.fields(kind)}
    if unknown := sorted(settings.keys() - {item.name for item in dataclasses.fields(cls)}):
        raise TypeError(f"{cls.__name__} has no field {unknown[0]}")
    environ = os.environ if environ is None else environ
    warn_of_variables(environ, known)
    file = {} if path is None else read_settings_file(path, known)
    config: _Config = load_settings(cls, settings, environ, file)
    return config


def is_loopback(host: str) -> bool:
    """A name or address that leads to this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        # Names below localhost are reserved, too (RFC 6761, section 6.3).
        return host == "localhost" or host.endswith(".localhost")


def _check_fields(config: Any) -> None:
    """Make every field plain and check its type, then check the bounds of the numbers. Raises ConfigError."""
    keep_plain(config)
    items = dataclasses.fields(config)
    for item in items:
        check_type(item.name, getattr(config, item.name), field_options(type(config), item.name))
    for item in items:
        value, bounds = getattr(config, item.name), item.metadata["bounds"]
        if bounds is not None and value is not None:
            bounds.check(item.name, value)


def policy_names() -> tuple[str, ...]:
    """Names of the queue policies in a config."""
    return tuple(name.replace("_", "-") for name in plugins.names(plugins.POLICIES))


def _check_listening(config: ServerConfig) -> None:
    if not re.fullmatch("0?[0-7]{3}", config.uds_mode):
        raise ConfigError(f"uds_mode must be three octal digits such as 660, got {shown(config.uds_mode)}")
    for name in ("uds", "admin_uds"):
        if getattr(config, name) == "":
            raise ConfigError(f"{name} must be a path, not empty")
    for name in ("tls_key", "tls_ca"):
        if getattr(config, name) is not None and config.tls_certificate is None:
            raise ConfigError(f"{name} needs tls_certificate")
    if config.uds is not None and config.uds == config.admin_uds:
        raise ConfigError("admin_uds must be another path than uds")


def _known_parsers(config: EngineConfig) -> None:
    from aioinfer.text import AUTO
    from aioinfer.text.reasoning import REASONING_PARSERS
    from aioinfer.text.tool_calls import PARSERS

    for name, known in (("tool_call_parser", PARSERS), ("reasoning_parser", REASONING_PARSERS)):
        value = getattr(config, name)
        if value not in (None, AUTO) and value not in known:
            names = ", ".join((AUTO, *known))
            raise ConfigError(f"{name} must be one of {names}, or none; got {shown(value)}")
