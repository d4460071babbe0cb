"""Roofline: costs of a model on hardware that is not here, from what that can do at most.

A step reads all weights once, or computes as long as its positions need; each position that is read has its
keys and values. What is reached of both peaks is assumed, so answers are marked as extrapolated.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from aioinfer._version import __version__
from aioinfer.errors import ConfigError, shown
from aioinfer.scheduling.costs import Costs, HostCosts, StepCosts

__all__ = ["HARDWARE", "Hardware", "roofline"]

#: of the peaks, what kernels are assumed to reach; and seconds of a step that neither of them explains
_BANDWIDTH, _FLOPS, _STEP = 0.75, 0.5, 5e-4
#: of the memory, what an engine takes for weights and KV
_MEMORY = 0.85
_PAGE = 16


class Hardware(NamedTuple):
    """Peaks of one device: bytes of memory, bytes per second, dense operations per second in bfloat16."""

    memory: float
    bandwidth: float
    flops: float


#: from the vendor's data sheets
HARDWARE = {
    "a100-80gb": Hardware(80e9, 2.039e12, 312e12),
    "l40s": Hardware(48e9, 0.864e12, 362e12),
    "h100": Hardware(80e9, 3.35e12, 989e12),
    "h200": Hardware(141e9, 4.8e12, 989e12),
    "b200": Hardware(180e9, 8.0e12, 2250e12),
}


def roofline(name: str, config: Any, hardware: str, *, weight_bytes: float = 2.0) -> Costs:
    """Costs of the model ``name`` with this transformers ``config``. ``weight_bytes``: of a weight. Raises
    ConfigError: hardware that is not known, or too small."""
    if hardware not in HARDWARE:
        raise ConfigError(f"hardware must be one of {', '.join(HARDWARE)}, got {shown(hardware)}")
    peak, config = HARDWARE[hardware], config.get_text_config()
    layers, hidden, heads = config.num_hidden_layers, config.hidden_size, config.num_attention_heads
    kv_heads, inner = getattr(config, "num_key_value_heads", heads), config.intermediate_size
    size = getattr(config, "head_dim", None) or hidden // heads
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None) or 1
    active = getattr(config, "num_experts_per_tok", 1) if experts > 1 else 1
    inner = getattr(config, "moe_intermediate_size", inner) if experts > 1 else inner
    shared = layers * 2 * hidden * size * (heads + kv_heads) + config.vocab_size * hidden
    weights = (shared + layers * experts * 3 * hidden * inner) * weight_bytes
    operations = 2 * (shared + layers * active * 3 * hidden * inner)
    kv_bytes = 4 * layers * kv_heads * size
    left = _MEMORY * peak.memory - weights
    if left < kv_bytes * _PAGE:
        raise ConfigError(f"{name} has {weights / 1e9:.0f} GB of weights: one {hardware} is too small")
    read, token = weights / (_BANDWIDTH * peak.bandwidth), operations / (_FLOPS * peak.flops)
    step = StepCosts(
        base=_STEP + read,
        row=0.0,
        context=kv_bytes / (_BANDWIDTH * peak.bandwidth),
        attention=4 * layers * heads * size / (_FLOPS * peak.flops),
        token=(0.0, token),
        knees=(0, max(1, round(read / token))),
    )
    pages = int(left / (kv_bytes * _PAGE))
    longest = min(getattr(config, "max_position_embeddings", 1 << 20), pages * _PAGE)
    sizes = {"max_running_requests": 256, "max_step_tokens": 8192, "chunk_size": 2048, "overlap_steps": 1}
    memory = {"num_pages": pages, "page_size": _PAGE, "max_model_len": longest}
    return Costs(
        step=step,
        # The loop's share, as it is on a processor of a server.
        host=HostCosts(plan=(3e-4, 2e-6), read=(2e-4, 4e-6), notice=(1e-4,), begin=5e-5),
        fingerprint={"model": name, "hardware": hardware, "aioinfer": __version__},
        engine={**sizes, **memory, "itl_target": 0.0},
    )
