"""Sizing: how many KV pages and recurrent states there are, and what else wants memory on a CUDA device.

    total ┌──────────────┬─────────┬────────────┬────────┬───────────────────────┬──────────────────┐
          │    others    │ weights │ activations│ graphs │       KV pages        │ left alone       │
          └──────────────┴─────────┴────────────┴────────┴───────────────────────┴──────────────────┘
                                                                                  1 - gpu_memory_utilization

Activations and graphs are measured, by the largest step and a trial capture, before the pages are made. The
recurrent states of a model that has any, of all slots and of cached prefixes, come off the KV pages' part.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aioinfer.config import EngineConfig
from aioinfer.errors import ConfigError, OutOfMemory
from aioinfer.ledger import LEDGER
from aioinfer.model.spec import ModelSpec
from aioinfer.scheduling.speculation import STASHED

if TYPE_CHECKING:
    from aioinfer.model.draft_heads.base import DraftHead

__all__ = [
    *("PoolSize", "by_memory", "check_pool", "cpu_budget", "cuda_budget"),
    *("fewer_requests", "fit_states", "size_pool", "stashed_drafts", "step_bytes", "waiting_bytes"),
]


_GIB = 1 << 30
_MIB = 1 << 20

#: bytes that steps of the smallest model take, with what the C library keeps
_STEP_BASE = 24 << 20
#: at most so much of what the slots' states leave of the memory budget goes to snapshots of states
_SNAPSHOT_SHARE = 4
#: and at most this many per running request
_SNAPSHOTS_EACH = 4


#: least memory of a device in bytes: running requests, tokens per step, tokens per chunk
_BY_MEMORY = ((60 * _GIB, 256, 8192, 2048), (36 * _GIB, 128, 4096, 1024))


@dataclass(frozen=True, slots=True)
class PoolSize:
    """Pages of the pool, the null page not counted, and the longest sequence that is served."""

    num_pages: int
    max_model_len: int
    #: of a model with recurrent state: states that are kept for cached prefixes; None: it has none
    num_snapshots: int | None = None
    #: bytes of all recurrent states
    state_bytes: int = 0


def cpu_budget(config: EngineConfig) -> int:
    """Bytes for KV on the CPU."""
    return int(config.kv_memory_gib * _GIB)


def step_bytes(config: EngineConfig, spec: ModelSpec) -> int:
    """Bytes that steps on the CPU take for moments. Estimated: for each token the activations of a layer in
    float32, two of an inner size of four times the hidden one and eight of that, and for each row the logits,
    four times."""
    per_token = 4 * (2 * 4 + 8) * spec.hidden_size
    rows = config.running_requests * spec.unit
    # Of canvases, what stays in the slots.
    kept = rows * spec.hidden_size * spec.dtype.itemsize if spec.canvas else 0
    if spec.canvas:
        rows = min(rows, config.step_tokens)
    kept += image_bytes(config, spec)
    return _STEP_BASE + config.step_tokens * per_token + 16 * rows * spec.vocab_size + kept


def waiting_bytes(config: EngineConfig, spec: ModelSpec, head: DraftHead | None) -> int:
    """Bytes of the hidden states that wait for a draft head; None: there is none."""
    if head is None:
        return 0
    return (config.num_slots + 1) * STASHED * head.width * spec.dtype.itemsize


def image_bytes(config: EngineConfig, spec: ModelSpec) -> int:
    """Bytes of the features of images that are kept; of one unit at least."""
    if spec.images is None:
        return 0
    return max(int(config.encoder_cache_gib * 2**30), spec.images.longest * spec.images.position_bytes)


def check_pool(config: EngineConfig, pool_bytes: int, *, state_bytes: int = 0) -> None:
    """Raise ConfigError if a pool on the CPU is larger than the memory that is left for it.

    ``pool_bytes``: of KV pages and recurrent states; ``state_bytes``: of the latter alone. Its memory is
    taken as it is used: a pool that is too large would start, and be the end of the process when it is full.
    The same memory cannot be promised twice, see :mod:`aioinfer.ledger`.
    """
    left = LEDGER.short(pool_bytes)
    if left is None:
        return
    knob = f"num_pages is {config.num_pages}"
    if config.num_pages is None:
        knob = f"kv_memory_gib is {config.kv_memory_gib:g}"
    takes = f"the KV pool takes {pool_bytes / _GIB:.2f} GiB"
    if state_bytes and config.num_pages is not None:
        # Their number does not follow from the pages'.
        knob += f", max_running_requests {config.running_requests}"
        takes = (
            f"the KV pool takes {(pool_bytes - state_bytes) / _GIB:.2f} GiB, the recurrent states of slots "
            f"and snapshots {state_bytes / _GIB:.2f} GiB"
        )
    raise ConfigError(f"{knob}: {takes}, and {LEDGER.said(left)}")


def cuda_budget(*, total: int, free: int, wanted: int, utilization: float) -> int:
    """Bytes for KV on a CUDA device; negative if there is less than nothing.

    Args:
        total: bytes of the device.
        free: of these, free now, with the weights loaded.
        wanted: bytes that activations and graphs will take on top.
        utilization: share of ``total`` that may be used at all.
    """
    return int(free - wanted - total * (1 - utilization))


def by_memory(config: EngineConfig, total: int) -> EngineConfig:
    """The config with the requests that run, and the tokens of steps and chunks, that suit a CUDA device of
    ``total`` bytes, where it leaves these open. Estimated, not measured: a device with much memory is fast,
    decodes many rows in the time of a few, and computes a longer chunk while others can wait."""
    found = next((sizes for least, *sizes in _BY_MEMORY if total >= least), None)
    if found is None:
        return config
    names = "max_running_requests", "max_step_tokens", "chunk_size"
    values: dict[str, Any] = {
        name: value for name, value in zip(names, found, strict=True) if getattr(config, name) is None
    }
    # A limit that was given bounds what was not.
    if "max_running_requests" in values:
        values["max_running_requests"] = min(
            values["max_running_requests"], config.max_step_tokens or values["max_step_tokens"]
        )
    return dataclasses.replace(config, **values)


def stashed_drafts(config: EngineConfig, spec: ModelSpec) -> int:
    """Of a model with recurrent state, drafts of a slot that a step may verify; 0: none are."""
    verifies = spec.states and spec.verifies and config.speculation != "off"
    return config.max_draft_tokens if verifies else 0


def _slot_bytes(config: EngineConfig, spec: ModelSpec) -> int:
    """Of the recurrent state of a slot, with what drafts bring to it."""
    return spec.state_bytes + stashed_drafts(config, spec) * spec.stash_bytes


def size_pool(config: EngineConfig, spec: ModelSpec, page_bytes: int, budget: int) -> PoolSize:
    """Pages of ``page_bytes`` for ``budget`` bytes, or as many as the config says.

    Raises ConfigError for lengths that cannot be served, OutOfMemory if the budget is too small.
    """
    if config.max_model_len is not None and config.max_model_len > spec.max_model_len:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}; the model knows {spec.max_model_len} positions, which "
            "max_position_embeddings and the scaling of rotary positions in its config decide"
        )
    wanted_len = spec.max_model_len if config.max_model_len is None else config.max_model_len
    if spec.whole_prompts:
        wanted_len = min(wanted_len, config.step_tokens)
    wanted_len -= wanted_len % spec.grain
    num_snapshots, state_bytes = None, 0
    if spec.states:
        num_snapshots = _snapshots(config, spec, budget)
        state_bytes = (config.num_slots + 1) * _slot_bytes(config, spec) + num_snapshots * spec.state_bytes
        budget -= state_bytes
    num_pages = config.num_pages
    if num_pages is None:
        # Never more than every running request could use at its longest.
        useful = config.running_requests * -(-wanted_len // config.positions_per_page)
        num_pages = min(useful, budget // page_bytes)
    if num_pages < 1:
        raise OutOfMemory(
            f"not one KV page of {page_bytes} bytes fits into the memory budget of {budget} bytes: "
            "a smaller model or dtype, or more memory (gpu_memory_utilization, kv_memory_gib) is needed"
        )
    capacity = num_pages * config.positions_per_page
    if config.max_model_len is not None and config.max_model_len > capacity:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, but {num_pages} pages hold {capacity} positions"
        )
    if min(wanted_len, capacity) < max(2, spec.unit + spec.canvas):
        raise ConfigError("max_model_len and num_pages leave no room for a prompt and an output token")
    return PoolSize(num_pages, min(wanted_len, capacity), num_snapshots, state_bytes)


def fit_states(config: EngineConfig, spec: ModelSpec, budget: int) -> EngineConfig:
    """The config with as many running requests as there are recurrent states for, which a model may have,
    in half of ``budget`` bytes: the others wait, as they would for KV pages.

    Raises OutOfMemory if there is not one. A config that says how many pages there are is not changed.
    """
    if not spec.states or config.num_pages is not None:
        return config
    empty = _slot_bytes(config, spec)
    each = config.num_slots // config.running_requests * empty
    most = (budget // 2 - empty) // each
    if most < 1:
        raise OutOfMemory(
            "model: the recurrent state of one request and an empty one take "
            f"{(each + empty) / _MIB:.1f} MiB, and half of the memory budget has "
            f"{max(0, budget) / 2 / _MIB:.1f} MiB: more memory (gpu_memory_utilization, "
            "kv_memory_gib) is needed"
        )
    if most >= config.running_requests:
        return config
    return dataclasses.replace(config, max_running_requests=most)


def fewer_requests(wanted: EngineConfig, fitted: EngineConfig) -> int | None:
    """Requests that can run, if :func:`fit_states` has left fewer than were ``wanted``."""
    fewer = fitted.running_requests < wanted.running_requests
    return fitted.running_requests if fewer else None


def _snapshots(config: EngineConfig, spec: ModelSpec, budget: int) -> int:
    """Number of recurrent states kept for cached prefixes. Raises OutOfMemory, if the config leaves the
    number of pages open, where they and those of the slots are more than the budget."""
    wanted, bounded = config.state_snapshots, config.num_pages is None
    if not config.prefix_cache:
        wanted = 0
    slots = (config.num_slots + 1) * _slot_bytes(config, spec)
    left = budget - slots
    if bounded and left < 0:
        raise OutOfMemory(
            f"max_running_requests is {config.running_requests}: the recurrent states of its "
            f"{config.num_slots} slots take {slots / _GIB:.2f} GiB, and the memory budget has "
            f"{max(0, budget) / _GIB:.2f} GiB: fewer, or more memory (gpu_memory_utilization, kv_memory_gib) "
            "is needed"
        )
    if wanted is None:
        running = config.running_requests
        if not bounded:
            return running
        return min(_SNAPSHOTS_EACH * running, left // (_SNAPSHOT_SHARE * spec.state_bytes))
    if bounded and wanted * spec.state_bytes > left:
        raise OutOfMemory(
            f"state_snapshots is {wanted}: they take {wanted * spec.state_bytes / _GIB:.2f} GiB, and beside "
            f"the states of the slots the memory budget has {left / _GIB:.2f} GiB left"
        )
    return wanted
