"""EngineConfig: how an engine runs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from aioinfer import plugins
from aioinfer.checkpoint.locate import locate, model_name
from aioinfer.config.images import ImageSettings
from aioinfer.config.options import (
    AT_LEAST_ONE,
    NOT_NEGATIVE,
    POSITIVE,
    UNIT_INTERVAL,
    Bounds,
    check_fields,
    option,
    register,
)
from aioinfer.config.values import shown
from aioinfer.errors import ConfigError

__all__ = ["PAGE_SIZE", "EngineConfig", "given", "policy_names"]

_DEVICE = re.compile(r"auto|cpu|cuda(:(0|[1-9]\d?))?")
#: positions of a page, where neither a config nor the device says otherwise
PAGE_SIZE = 16
#: ways of drafting
SPECULATION = ("off", "lookup", "auto")


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(ImageSettings):
    """Settings of an :class:`~aioinfer.Engine`. ``None`` is resolved when the model is known.

    Raises:
        ConfigError: a field has the wrong type or is out of bounds; the message begins with its name.
    """

    # A backend of "auto" is Triton on CUDA; on a CPU the native kernels where they can run, else torch's.

    model: str = option(
        "tiny-chat", "model", "bundled name, directory, GGUF file, or a hub's org/name[:variant][@revision]"
    )
    download: bool | None = option(
        None, "model", "fetch a hub's model that is not in the local cache; by default the command line does"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", "model", "dtype of weights and activations; auto: the checkpoint's"
    )
    load_format: Literal["auto", "random"] = option(
        "auto", "model", "auto reads the checkpoint's weights; random needs a config.json only"
    )
    #: auto: weights that are quantised in the checkpoint stay so where kernels compute them (native ones
    #: whole numbers, Triton's floats of 8 bits), and are dequantised elsewhere; none: they are dequantised
    #: everywhere. int8: groups of up to 128 with a scale. int4: groups of up to 64 with scale and offset; the
    #: head and the embedding have 8 bits. Both multiply integers, with activations rounded to 8 bits. fp8:
    #: e4m3 with a scale for each output, activations as they are; fp8-dynamic: those of layers, not of
    #: experts, are rounded, too.
    quantization: Literal["auto", "none", "int8", "int4", "fp8", "fp8-dynamic"] = option(
        "auto",
        "model",
        "bits of linear layers: the checkpoint's, or rounded to (int8, int4: native kernels; fp8: Triton)",
    )
    cache_weights: bool = option(
        False, "model", "map packed weights from the user's cache, writing them first; native kernels only"
    )
    max_model_len: int | None = option(None, "model", "maximum prompt plus output in tokens", AT_LEAST_ONE)
    transformers_fallback: bool = option(False, "model", "run the transformers implementation, for any model")

    #: Every name counts once; what a name had before drains in a slot of its own.
    max_adapters: int = option(
        16, "adapters", "LoRA adapters that may be loaded at a time; 0: none", Bounds(0, 4096)
    )
    max_lora_rank: int = option(64, "adapters", "largest rank of an adapter", Bounds(1, 1024))
    adapters: str | None = option(
        None, "adapters", "adapters to load at the start: NAME=PATH, separated by commas"
    )

    #: cuda without a number is the current CUDA device of the thread that starts the engine.
    device: str = option("auto", "kernels", "auto, cpu, cuda or cuda:N; auto: cuda where available")
    attention_backend: Literal["auto", "triton", "flashinfer", "native", "sdpa"] = option(
        "auto", "kernels", "attention kernels"
    )
    moe_backend: Literal["auto", "triton", "native", "grouped", "loop"] = option(
        "auto", "kernels", "mixture-of-experts kernels"
    )
    sampling_backend: Literal["auto", "triton", "native", "torch"] = option(
        "auto", "kernels", "sampling kernels"
    )
    #: The same for every batch composition, overlap, chunk size, cache setting and retraction.
    deterministic: bool = option(
        False, "kernels", "bitwise reproducible ids and logprobs; an error if the kernels cannot"
    )
    threads: int | None = option(
        None,
        "kernels",
        "CPU threads of the device, at most 4 per core; default: the cores of this process",
        AT_LEAST_ONE,
    )
    decode_graph_rows: int = option(
        256, "kernels", "largest batch captured as a CUDA graph; 0: no graphs", NOT_NEGATIVE
    )
    #: What a step has beside its decodes: chunks of prompts, and drafts that it verifies. FlashInfer computes
    #: what is not captured.
    prefill_graph_tokens: int | None = option(
        None,
        "kernels",
        "most tokens beside decodes in a captured step; 0: none; default: 2048, with flashinfer 256",
        NOT_NEGATIVE,
    )

    #: Of a diffusion model: a multiple of the block size.
    page_size: int | None = option(
        None, "memory", "KV positions per page; default: 64 on CUDA, else 16", AT_LEAST_ONE
    )
    #: fp8: e4m3 with a power of two for each head of a token, half the memory of bfloat16.
    kv_dtype: Literal["auto", "fp8"] = option(
        "auto", "memory", "type of keys and values; auto: the model's; fp8: half of it (Triton only)"
    )
    num_pages: int | None = option(None, "memory", "KV pages; default: from the memory budget", AT_LEAST_ONE)
    kv_memory_gib: float = option(
        1.0, "memory", "KV budget in GiB on a CPU, taken as it is used, if num_pages is not given", POSITIVE
    )
    gpu_memory_utilization: float = option(
        0.85, "memory", "share of GPU memory for weights and KV", Bounds(0, 1, low_open=True)
    )
    prefix_cache: bool = option(True, "memory", "reuse the KV of common prefixes")
    #: Files of pages of computed prefixes, found again after a restart, and by other processes that share the
    #: directory. Who can read it can learn from it what was computed.
    prefix_cache_dir: str | None = option(
        None, "memory", "directory that keeps the KV of prefixes; several engines may share it; CPU only"
    )
    prefix_cache_disk_gib: float = option(
        16.0, "memory", "size of that directory in GiB; the least recently used files are removed", POSITIVE
    )
    #: Of a model with recurrent state, whose cached prefixes can be used up to a kept state only. Default: a
    #: quarter of the memory budget at most, and 4 per running request at most.
    state_snapshots: int | None = option(
        None,
        "memory",
        "recurrent states kept for cached prefixes; default: by the budget",
        NOT_NEGATIVE,
    )
    state_snapshot_tokens: int = option(
        64,
        "memory",
        "tokens that a recurrent state must save to be kept",
        AT_LEAST_ONE,
    )
    share_prefix_tokens: int = option(
        64,
        "memory",
        "hold a request back while another computes at least this long a common prefix; 0: never",
        NOT_NEGATIVE,
    )
    new_token_ratio: float = option(
        0.4, "memory", "share of the possible output that admission reserves pages for", UNIT_INTERVAL
    )
    min_new_token_ratio: float = option(
        0.1, "memory", "minimum of the ratio; every retraction raises the ratio again", UNIT_INTERVAL
    )
    new_token_ratio_decay: float = option(0.002, "memory", "decay of the ratio per step", UNIT_INTERVAL)
    clip_new_tokens: int = option(
        4096, "memory", "maximum output per request that admission counts", AT_LEAST_ONE
    )

    # More on a GPU with much memory: see aioinfer.execution.sizing.
    max_running_requests: int | None = option(
        None, "batching", "requests that hold a slot; default: 64, 128 or 256 by GPU memory", AT_LEAST_ONE
    )
    max_step_tokens: int | None = option(
        None,
        "batching",
        "tokens per step, prefill and decode together; default: 2048, 4096 or 8192 by GPU memory",
        AT_LEAST_ONE,
    )
    chunk_size: int | None = option(
        None,
        "batching",
        "longest prefill chunk of one request in one step; default: 512, 1024 or 2048 by GPU memory",
        AT_LEAST_ONE,
    )
    #: A single chunk may exceed it when it is the only one in its step.
    max_prefill_tokens: int | None = option(
        None,
        "batching",
        "prefill tokens per step; default: 256 for diffusion on a CPU, else no limit",
        AT_LEAST_ONE,
    )
    #: Of a step that prompts share with requests that generate; the limits in tokens hold as well.
    itl_target: float | None = option(
        None,
        "batching",
        "seconds of a step in which prompts share with streams; 0: no limit; default: 0.2 on a CPU, else 0",
        NOT_NEGATIVE,
    )
    costs: str | None = option(
        None, "batching", "file of aioinfer calibrate: what steps take; default: learned from those that run"
    )
    refine_costs: bool = option(True, "batching", "learn from the steps that run what they take")
    max_decode_rows: int | None = option(
        None, "batching", "decode rows per step; more requests take turns", AT_LEAST_ONE
    )
    mixed: bool = option(True, "batching", "steps mix decode rows and prefill chunks")
    step_priority: Literal["decode", "prefill"] = option(
        "decode", "batching", "the rows that get a step's tokens first"
    )

    #: A class is a policy of the application's own, a subclass of aioinfer.scheduling.policy.Policy.
    policy: str | type = option(
        "fcfs",
        "scheduling",
        "queue order: fcfs, lpm, dfs-weight, lof, priority, random, routing-key, slack",
    )
    preemption: bool = option(False, "scheduling", "the head of the queue may displace lower priorities")
    admission: Literal["fifo", "pack"] = option(
        "pack",
        "scheduling",
        "fifo: the policy's order; pack: of equals, those that fit first, where tokens are short",
    )
    lookahead: int = option(64, "scheduling", "waiting requests that pack considers", AT_LEAST_ONE)
    force_fifo_every: int = option(
        8, "scheduling", "every n-th round in which pack could reorder is fifo; 0: none", NOT_NEGATIVE
    )
    max_passed_over: int = option(
        16, "scheduling", "rounds that may pass over the oldest request", AT_LEAST_ONE
    )

    overlap_steps: Literal[0, 1, 2] | None = option(
        None,
        "overlap",
        "steps launched ahead of the one being read; default: 1, for diffusion on a CPU 0",
    )
    #: A step planned late includes the requests that arrive while the step before it runs.
    plan_late: bool = option(True, "overlap", "plan a step when the one before it is about to end")
    max_overlapped_prefill: int = option(
        256,
        "overlap",
        "more prefill is launched ahead only after steps of at most this many prefill tokens",
        NOT_NEGATIVE,
    )
    launch_mode: Literal["thread", "inline"] = option("thread", "overlap", "where steps are launched")
    switch_interval: float | None = option(
        None,
        "overlap",
        "sys.setswitchinterval in seconds; 0: unchanged; default: 0.0003 on cuda and in aioinfer serve",
        UNIT_INTERVAL,
    )
    gc: Literal["auto", "idle", "python"] = option(
        "auto", "overlap", "idle: freeze and collect between steps; python: unchanged; auto: idle on cuda"
    )

    #: Outputs are the same with and without. lookup: what followed the same tokens before, in a request's own
    #: prediction, prompt and output. auto: that, and an MTP layer, if the checkpoint has one.
    speculation: str = option(
        "auto",
        "speculation",
        "what drafts tokens that a step verifies: off, lookup in a request's own text, auto (that, and the "
        "MTP layer of the checkpoint), or a model or draft head",
    )
    max_draft_tokens: int = option(
        15, "speculation", "drafts of one request in a step at most", Bounds(1, 255)
    )
    adaptive_drafts: bool = option(
        True, "speculation", "verify as many drafts as are expected to pay; else all that there are"
    )

    seed: int | None = option(None, "sampling", "seed for the requests that have none")
    fast_forward: bool = option(
        True, "sampling", "append the tokens that a grammar forces without a forward each"
    )
    max_grammar_bytes: int = option(
        65_536, "sampling", "largest grammar or JSON schema of a request, in bytes", Bounds(1, 1 << 20)
    )
    max_grammar_depth: int = option(64, "sampling", "deepest nesting of a JSON schema", Bounds(1, 120))
    grammar_patience: float = option(
        0.002, "sampling", "seconds that a step waits for late grammar masks", NOT_NEGATIVE
    )
    #: For 150,000 tokens it takes 0.5 s, which streams wait for if it is left to a request, and 66 MiB.
    prepare_grammars: bool = option(
        True, "sampling", "make at the start what all grammars need, not with the first one"
    )

    block_size: int | None = option(
        None, "diffusion", "positions per block; default: the checkpoint's", AT_LEAST_ONE
    )
    diffusion_algorithm: str | None = option(
        None, "diffusion", "denoising algorithm of requests that name none; default: low_confidence"
    )
    #: Each of requests that name neither this nor another algorithm.
    diffusion_threshold: float | None = option(
        None, "diffusion", "confidence threshold of that algorithm; default: the algorithm's", UNIT_INTERVAL
    )
    diffusion_edit_threshold: float | None = option(
        None, "diffusion", "the same for tokens that it replaces; default: the algorithm's", UNIT_INTERVAL
    )
    diffusion_steps: int | None = option(
        None, "diffusion", "most rounds in which it fills a block; default: no limit", AT_LEAST_ONE
    )
    diffusion_mode: Literal["fdfo", "sync"] = option(
        "fdfo", "diffusion", "fdfo: each block leaves when it is done; sync: the batch waits for the last"
    )
    fused_commit: bool = option(True, "diffusion", "commit a block in the first forward over the next block")
    #: Rounds continue in one step while no block is done and no request waits for admission.
    max_rounds: int | None = option(
        None,
        "diffusion",
        "denoising rounds per step, above 1 on a CPU only; default: 4 with overlap_steps 0, else 1",
        AT_LEAST_ONE,
    )

    tool_call_parser: str | None = option(
        "auto",
        "chat",
        "format of tool calls: hermes, granite, apriel, nemotron, functools, qwen3-coder, seed-oss, glm45,"
        " minimax-m2, gemma4, mistral, mistral-v11, llama3, harmony, deepseek-v3, deepseek-v31, deepseek-v32,"
        " deepseek-v4, kimi-k2, lfm2, pythonic; auto: the chat template's; none: tools are refused",
    )
    reasoning_parser: str | None = option(
        "auto",
        "chat",
        "format of reasoning to split off: qwen3, deepseek-r1, mistral, gemma4, harmony, seed-oss, cohere,"
        " apriel, apertus, granite, ernie45, hunyuan-a13b, hunyuan-v3, minimax-m3, kimi-k3, solar;"
        " auto: the chat template's; none: all is content",
    )
    chat_template: str | None = option(
        None, "chat", "chat template in place of the model's: a Jinja file, or the template itself"
    )

    max_queued_requests: int = option(
        4096,
        "limits",
        "waiting requests before new ones are rejected; those that free slots take do not wait",
        AT_LEAST_ONE,
    )
    max_queued_tokens: int = option(
        4_000_000, "limits", "waiting prompt tokens before requests are rejected", AT_LEAST_ONE
    )
    max_stop_strings: int = option(16, "limits", "stop strings of a request, at most 16", Bounds(0, 16))
    max_stop_characters: int = option(
        16_384, "limits", "characters of a request's stop strings in all", NOT_NEGATIVE
    )
    max_stop_patterns: int = option(8, "limits", "stop patterns of a request, at most 8", Bounds(0, 8))
    max_lag: int | None = option(
        None,
        "limits",
        "unread tokens of a stream before its request is parked; default: no limit",
        AT_LEAST_ONE,
    )
    waiting_timeout: float | None = option(None, "limits", "seconds until a request's first step", POSITIVE)
    ttft_target: float | None = option(
        None, "limits", "seconds until a request's first token: refused if it would come later", POSITIVE
    )
    running_timeout: float | None = option(
        None, "limits", "seconds from a request's first step to its end", POSITIVE
    )
    drain_timeout: float = option(
        30.0, "limits", "seconds that closing waits for running requests", NOT_NEGATIVE
    )

    max_sessions: int = option(1024, "sessions", "sessions that may be open", NOT_NEGATIVE)
    session_timeout: float = option(
        600.0, "sessions", "seconds without use until a session's KV is held no longer", POSITIVE
    )
    max_held_share: float = option(
        0.5, "sessions", "share of the KV pages that are held at most; 0: none", UNIT_INTERVAL
    )

    #: Of the logger aioinfer.stats, at level INFO; one line says that the engine is idle.
    stats_interval: float | None = option(
        None,
        "observing",
        "seconds between log lines of throughput and load; 0: none; default: none, of aioinfer serve 10",
        NOT_NEGATIVE,
    )
    #: Only of an Engine; the extra "tracing" installs what it needs.
    tracing: bool = option(False, "observing", "a span of OpenTelemetry per request, without its content")

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.model.strip() or "\0" in self.model:
            raise ConfigError(f"model must name a model, got {shown(self.model)}")
        _known_parsers(self)
        self._check_adapters()
        if self.chat_template is not None and not self.chat_template.strip():
            raise ConfigError("chat_template must name a file or be a template, got an empty text")
        if not _DEVICE.fullmatch(self.device):
            raise ConfigError(f"device must be auto, cpu, cuda or cuda:N, got {shown(self.device)}")
        if not self.speculation.strip() or "\0" in self.speculation:
            raise ConfigError(
                f"speculation must be off, lookup, auto, a model or a head, got {shown(self.speculation)}"
            )
        if isinstance(self.policy, str) and self.policy not in policy_names():
            raise ConfigError(f"policy must be one of {', '.join(policy_names())}; got {self.policy!r}")
        if self.prefix_cache_dir is not None and not (self.prefix_cache and self.prefix_cache_dir.strip()):
            given = shown(self.prefix_cache_dir)
            raise ConfigError(f"prefix_cache_dir must name a directory, with prefix_cache on, got {given}")
        algorithms = plugins.names(plugins.ALGORITHMS)
        if self.diffusion_algorithm is not None and self.diffusion_algorithm not in algorithms:
            raise ConfigError(
                f"diffusion_algorithm must be one of {', '.join(algorithms)}; "
                f"got {shown(self.diffusion_algorithm)}"
            )
        if self.step_tokens < self.running_requests:
            raise ConfigError(
                f"max_step_tokens ({self.step_tokens}) must be at least max_running_requests "
                f"({self.running_requests}): every running request may need a token in one step"
            )

    @property
    def model_path(self) -> Path:
        """Its directory or file on this machine. Blocks. Raises ConfigError: it is not here."""
        return locate(self.model)

    @property
    def model_name(self) -> str:
        """Name of the model for clients, unless another is served."""
        return model_name(self.model)

    @property
    def adapter_paths(self) -> dict[str, str]:
        """Paths of the adapters to load at the start, by name."""
        given = [each.strip() for each in (self.adapters or "").split(",")]
        pairs = (each.partition("=") for each in given if each)
        return {name.strip(): path.strip() for name, _, path in pairs}

    def _check_adapters(self) -> None:
        given = [each for each in (self.adapters or "").split(",") if each.strip()]
        paths = self.adapter_paths
        if not all(name and path and "\0" not in path for name, path in paths.items()):
            raise ConfigError(f"adapters must be NAME=PATH, separated by commas, got {shown(self.adapters)}")
        if len(paths) < len(given):
            raise ConfigError(f"adapters has a name twice: {shown(self.adapters)}")
        if len(paths) > self.max_adapters:
            raise ConfigError(f"adapters are {len(paths)}, and max_adapters is {self.max_adapters}")

    @property
    def adapter_slots(self) -> int:
        """Slots of the device for adapters: one more than names, so that one can be replaced."""
        return self.max_adapters + 1 if self.max_adapters else 0

    @property
    def running_requests(self) -> int:
        """``max_running_requests``, or what it is where nothing says otherwise."""
        return 64 if self.max_running_requests is None else self.max_running_requests

    @property
    def step_tokens(self) -> int:
        """``max_step_tokens``, or what it is where nothing says otherwise."""
        return 2048 if self.max_step_tokens is None else self.max_step_tokens

    @property
    def chunk_tokens(self) -> int:
        """``chunk_size``, or what it is where nothing says otherwise."""
        return 512 if self.chunk_size is None else self.chunk_size

    @property
    def positions_per_page(self) -> int:
        """``page_size``, or what it is where the device has no other default."""
        return PAGE_SIZE if self.page_size is None else self.page_size

    @property
    def num_slots(self) -> int:
        """Slots in addition to the null slot 0: enough that fenced slots never delay an admission."""
        return self.running_requests * (2 if self.overlap_steps is None else self.overlap_steps + 1)

    @property
    def graph_rows(self) -> int:
        """Rows of the largest decode batch captured as a graph."""
        rows = self.running_requests
        return min(rows, self.max_decode_rows or rows, self.decode_graph_rows)

    @property
    def graph_tokens(self) -> int:
        """Tokens beside decodes of the largest step captured as a graph."""
        most = self.prefill_graph_tokens
        if most is None:
            # Captured rows are never FlashInfer's: so few, by estimate, that it is launches that cost.
            most = 256 if self.attention_backend == "flashinfer" else 2048
        return min(self.step_tokens, most)

    def round_rows(self, block_size: int) -> int:
        """Rows, one block each, of the largest denoising round captured as a graph."""
        rows = min(2 * self.running_requests, self.step_tokens // block_size)
        return min(rows, self.max_decode_rows or rows, self.decode_graph_rows)


def given(config: object) -> EngineConfig:
    """A config as it was passed to an engine, or the defaults. Raises ConfigError: it is something else."""
    if config is None:
        return EngineConfig()
    if isinstance(config, EngineConfig):
        return config
    model = shown(config) if isinstance(config, str) else "..."
    raise ConfigError(f"config must be EngineConfig(model={model}), for example; got {shown(config)}")


def policy_names() -> tuple[str, ...]:
    """Names of the queue policies in a config."""
    return tuple(name.replace("_", "-") for name in plugins.names(plugins.POLICIES))


def _known_parsers(config: EngineConfig) -> None:
    from aioinfer.text import AUTO
    from aioinfer.text.reasoning import REASONING_PARSERS
    from aioinfer.text.tool_calls import PARSERS

    for name, known in (("tool_call_parser", PARSERS), ("reasoning_parser", REASONING_PARSERS)):
        value = getattr(config, name)
        if value not in (None, AUTO) and value not in known:
            names = ", ".join((AUTO, *known))
            raise ConfigError(f"{name} must be one of {names}, or none; got {shown(value)}")
