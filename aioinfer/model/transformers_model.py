"""TransformersLM: any other causal LM of transformers, over our paged KV.

transformers lets a model's attention be replaced by name. Ours takes packed rows, so one forward of
shape [1, T] computes a whole step. Whether a model really goes through that door, and asks of attention
nothing that ours does not do, is found out at load by comparing with its own "eager" attention.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from aioinfer.errors import ConfigError
from aioinfer.model.attention.base import Attention
from aioinfer.model.attention.sdpa import causal_mask
from aioinfer.model.batch import Batch
from aioinfer.model.spec import ModelSpec, eos_token_ids

__all__ = ["TransformersLM"]

_NAME = "aioinfer_paged"
#: Arguments with which transformers asks for attention that ours does not compute.
_REFUSED = ("softcap", "s_aux", "position_bias", "cu_seq_lens_q")

#: What the attention of the forward running on this thread works with.
_local = threading.local()


class TransformersLM:
    """See :class:`~aioinfer.model.spec.CausalLM`."""

    def __init__(self, path: Path, config: Any, dtype: torch.dtype, device: torch.device) -> None:
        from transformers import AutoModelForCausalLM

        _register()
        try:
            with _quiet():
                model = AutoModelForCausalLM.from_pretrained(
                    path,
                    dtype=dtype,
                    local_files_only=True,
                    use_safetensors=True,
                    attn_implementation="eager",
                )
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise ConfigError(f"model: transformers cannot load {path.name}: {error}") from error
        self._model = model.eval().to(device)
        heads, kv_heads, head_dim, num_layers, vocab_size = self._check(device)
        self.spec = ModelSpec(
            architecture=config.architectures[0],
            num_layers=num_layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=vocab_size,
            max_model_len=config.get_text_config().max_position_embeddings,
            dtype=dtype,
            eos_token_ids=eos_token_ids(path, config),
            num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        )

    def forward(self, batch: Batch, attention: Attention) -> torch.Tensor:
        return self._run(batch.input_ids, batch.positions, batch.logits_rows, (attention, batch))

    def _run(self, ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, work: Any) -> torch.Tensor:
        _local.work = work
        try:
            output = self._model(
                input_ids=ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=rows
            )
        finally:
            _local.work = None
        logits: torch.Tensor = output.logits[0].float()
        return logits

    def _check(self, device: torch.device) -> tuple[int, int, int, int, int]:
        """Compare a short forward with the model's own attention, and learn the shapes of its KV."""
        vocab_size = self._model.get_input_embeddings().weight.shape[0]
        ids = torch.arange(1, 10, device=device) % vocab_size
        positions = torch.arange(len(ids), device=device)
        with torch.no_grad():
            expected = self._run(ids, positions, positions, None)
            self._model.set_attn_implementation(_NAME)
            seen: dict[int, tuple[int, int, int]] = {}
            actual = self._run(ids, positions, positions, seen)
        architecture = self._model.config.architectures[0]
        if len(set(seen.values())) != 1 or sorted(seen) != list(range(len(seen))):
            raise ConfigError(f"model: the attention of {architecture} cannot be replaced layer by layer")
        tolerance = 1e-3 if expected.dtype == self._model.dtype else 0.1
        if not torch.allclose(expected, actual, rtol=tolerance, atol=tolerance * float(expected.abs().max())):
            raise ConfigError(f"model: {architecture} computes attention in a way of its own")
        heads, kv_heads, head_dim = seen[0]
        return heads, kv_heads, head_dim, len(seen), expected.shape[-1]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars from a library: what is shown is the application's business."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(_NAME, _attend)
    AttentionMaskInterface.register(_NAME, lambda *args, **kwargs: None)


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls: query [1, num_heads, T, head_dim], key and value likewise."""
    for name in _REFUSED:
        if kwargs.get(name) is not None:
            raise ConfigError(f"model: {type(module).__name__} needs attention with {name}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    work = _local.work
    if isinstance(work, dict):
        work[module.layer_idx] = (q.shape[1], k.shape[1], q.shape[2])
        return _plain(query, key, value, scale, sliding_window).transpose(1, 2), None
    attention, batch = work
    output = attention(module.layer_idx, q, k, v, batch, scale=scale, window=sliding_window)
    return output[None], None


def _plain(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int | None
) -> torch.Tensor:
    """Causal attention of one fresh sequence, for the check at load."""
    length, group = query.shape[2], query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(group, dim=1) for tensor in (key, value))
    mask = causal_mask(length, length, window, query.device)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
