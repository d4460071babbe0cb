"""Self-check of a transformers model at load: its logits over paged KV must be those of its own attention.

What a layer caches must be keys and values, and the options that it passes to attention must be supported; a
window is compared with the one in the model's mask, since the tokens of a check are shorter than the window.
Then two sequences run over pages as in the engine, in chunks, mixed and decoded token by token, and every
logit is compared with the model's own "eager" attention. The comparison finds what a list of features cannot:
states that the model keeps, positions that are counted instead of read, scores that are changed after the
product. It is made in float32 (:mod:`aioinfer.model.shallow`), where rounding explains next to nothing: in
half precision it changes the choice of experts, which cannot be told from a small lost state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F

from aioinfer.errors import ConfigError
from aioinfer.model.attention.base import Attention, AttentionParams
from aioinfer.model.attention.pool import KVPool, KVShape
from aioinfer.model.attention.sdpa import SDPAAttention, visible
from aioinfer.model.batch import Batch

__all__ = [
    "FEW",
    "TOLERANCE",
    "Steps",
    "check_cache",
    "check_paged",
    "check_whole",
    "record",
    "sample",
    "steps",
]

#: options that transformers passes to attention and this package's attention does not support
_REFUSED = ("position_bias",)
#: layers of transformers' caches that hold keys and values alone, or nothing
_PLAIN = frozenset({"DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer"})
#: tokens of two sequences in each step of a check
Steps: TypeAlias = tuple[tuple[int, int], ...]
#: to see that a model runs: a prefill, a chunk beside a decode
FEW: Steps = ((4, 3), (2, 1))
_PAGE_SIZE = 4
#: The largest accepted difference in float32: root mean square, relative to the spread of the logits. Over
#: all families of transformers, shrunk, rounding alone caused up to 2e-5; the lost state of a mixer beside
#: attention 1e-3 with the weights that training starts from, and 0.3 with larger ones.
TOLERANCE = 1e-4
#: of an encoder in half precision
_TOLERANCE_HALF = 0.15


def check_cache(name: str, cache: Any) -> None:
    """Raise ConfigError if transformers' cache of a model holds other things than keys and values."""
    kinds: dict[str, int] = {}
    for index, layer in enumerate(getattr(cache, "layers", ())):
        if type(layer).__name__ not in _PLAIN:
            kinds.setdefault(type(layer).__name__, index)
    for kind, index in kinds.items():
        raise ConfigError(
            f"model: {name} keeps more of its tokens than keys and values ({kind} in layer {index}), "
            "which transformers' code cannot keep in pages"
        )


def steps(tokens: int) -> Steps:
    """Chunks, mixed steps and decodes behind a first chunk of ``tokens``."""
    return ((tokens, 0), (6, 4), (1, 6), (8, 1), (1, 1))


def sample(steps: Steps, vocab_size: int, attempt: int, device: torch.device) -> list[torch.Tensor]:
    """Ids of the two sequences of a check."""
    random = torch.Generator().manual_seed(attempt)
    lengths = map(sum, zip(*steps, strict=True))
    return [torch.randint(vocab_size, (length,), generator=random).to(device) for length in lengths]


def record(name: str, num_layers: int, run: Callable[[Callable[..., torch.Tensor]], object]) -> list[KVShape]:
    """The keys of all layers, recorded during ``run(watch)``, a forward of one fresh sequence in which
    ``watch`` replaces the attention.

    Raises ConfigError if the attention of some layer cannot be replaced by this package's.
    """
    if num_layers < 1:
        raise ConfigError(f"model: num_hidden_layers of {name} must be at least 1, got {num_layers}")
    seen: dict[int, KVShape] = {}
    calls = 0

    def watch(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        options: dict[str, Any],
    ) -> torch.Tensor:
        nonlocal calls
        calls += 1
        for option in _REFUSED:
            if options.get(option) is not None:
                raise ConfigError(f"model: {name} needs attention with {option}")
        window = options.get("sliding_window")
        # The window of the mask, not the mask itself: see ``_mask_window`` of transformers_model.
        if attention_mask is not None and attention_mask.numel() > 1:
            raise ConfigError(
                f"model: {name} makes a mask of its own for attention in layer {module.layer_idx}"
            )
        masked = None if attention_mask is None else int(attention_mask.flatten()[0])
        if masked == -1:
            raise ConfigError(
                f"model: {name} attends in layer {module.layer_idx} to other tokens than those before "
                "each one, or a window of them"
            )
        if masked is not None and (window or 0) != masked:
            raise ConfigError(
                f"model: {name} asks for a window of {window} in layer {module.layer_idx}, but masks {masked}"
            )
        if value.shape != key.shape:
            raise ConfigError(f"model: {name} has values of another size than keys, as in latent attention")
        seen[module.layer_idx] = KVShape(key.shape[1], key.shape[3])
        return _plain(query, key, value, options.get("scaling"), window).transpose(1, 2)

    run(watch)
    if not seen:
        raise ConfigError(f"model: the attention of {name} in transformers cannot be replaced")
    if sorted(seen) != list(range(num_layers)) or calls != num_layers:
        raise ConfigError(f"model: not each of the {num_layers} layers of {name} has one standard attention")
    return [seen[layer] for layer in range(num_layers)]


def check_paged(
    forward: Callable[[Batch, Attention], torch.Tensor],
    layers: Sequence[KVShape],
    prompts: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor],
    dtype: torch.dtype,
    steps: Steps,
) -> float:
    """Run the two sequences of :func:`sample` over pages in ``steps``; returns how much their logits differ
    from ``expected``, [n, vocab_size] each, relative to the spread of these: the larger difference. Not a
    number is 1."""
    attention, tables = _pool(layers, prompts, dtype)
    done = [0, 0]
    got: list[list[torch.Tensor]] = [[], []]
    for counts in steps:
        rows = [(at, done[at], counts[at]) for at in (0, 1) if counts[at]]
        rows.sort(key=lambda row: not _is_decode(row))
        logits = forward(_batch(rows, prompts, tables), attention).split([count for _, _, count in rows])
        for (at, _, count), part in zip(rows, logits, strict=True):
            got[at].append(part)
            done[at] += count
    worst = 0.0
    for parts, wanted in zip(got, expected, strict=True):
        spread = (wanted - wanted.mean(-1, keepdim=True)).norm().clamp_min(1e-9)
        error = float((torch.cat(parts) - wanted).norm() / spread)
        worst = max(worst, error if error == error else 1.0)
    return worst


def check_whole(
    name: str,
    forward: Callable[[Batch, Attention], torch.Tensor],
    layers: Sequence[KVShape],
    prompts: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor],
    dtype: torch.dtype,
) -> None:
    """Run whole prompts [n] over pages, in one step, and compare their hidden states with ``expected``.

    Raises ConfigError if they differ by more than rounding explains.
    """
    attention, tables = _pool(layers, prompts, dtype)
    rows = [(at, 0, len(ids)) for at, ids in enumerate(prompts)]
    found = forward(_batch(rows, prompts, tables), attention)
    wanted = torch.cat([*expected])
    error = float((found - wanted).norm() / wanted.norm().clamp_min(1e-9))
    # Not ``>``: NaN must fail, too.
    if not error <= (TOLERANCE if dtype == torch.float32 else _TOLERANCE_HALF):
        raise ConfigError(
            f"model: {name} cannot run over paged KV: its hidden states differ by {error:.2g} of their length"
        )


def _pool(
    layers: Sequence[KVShape], prompts: Sequence[torch.Tensor], dtype: torch.dtype
) -> tuple[Attention, torch.Tensor]:
    """Attention over a new pool, and the pages of two prompts [2, P]: interleaved, so that neither has
    adjacent ones."""
    device = prompts[0].device
    pages = -(-max(len(ids) for ids in prompts) // _PAGE_SIZE)
    pool = KVPool(layers, num_pages=2 * pages, page_size=_PAGE_SIZE, dtype=dtype, device=device)
    return SDPAAttention(pool), torch.arange(1, 2 * pages + 1, device=device).view(pages, 2).T


def _is_decode(row: tuple[int, int, int]) -> bool:
    _, start, count = row
    return start > 0 and count == 1


def _batch(
    rows: Sequence[tuple[int, int, int]], prompts: Sequence[torch.Tensor], tables: torch.Tensor
) -> Batch:
    """A packed batch of rows (prompt, start, count) that computes the logits of every token."""
    device = tables.device
    positions = [torch.arange(start, start + count, device=device) for _, start, count in rows]
    cells = [
        tables[at][where // _PAGE_SIZE] * _PAGE_SIZE + where % _PAGE_SIZE
        for (at, _, _), where in zip(rows, positions, strict=True)
    ]
    q_lens = [count for _, _, count in rows]
    kv_lens = [start + count for _, start, count in rows]
    return Batch(
        input_ids=torch.cat([prompts[at][start : start + count] for at, start, count in rows]),
        positions=torch.cat(positions),
        slot_mapping=torch.cat(cells),
        cu_q=F.pad(torch.tensor(q_lens, device=device).cumsum(0), (1, 0)),
        kv_len=torch.tensor(kv_lens, device=device),
        block_table=torch.stack([tables[at] for at, _, _ in rows]),
        logits_rows=torch.arange(sum(q_lens), device=device),
        q_lens=q_lens,
        kv_lens=kv_lens,
        num_decodes=sum(map(_is_decode, rows)),
    )


def _plain(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None, window: int | None
) -> torch.Tensor:
    """Causal attention of one fresh sequence, [1, heads, T, head_dim] each."""
    length, group = query.shape[2], query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(group, dim=1) for tensor in (key, value))
    mask = visible(length, 0, length, AttentionParams(1.0, window), query.device)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
