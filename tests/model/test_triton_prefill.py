"""The prefill kernel against attention written out, interpreted on the CPU or compiled on CUDA."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from tests.model.kernels import (
    Problem,
    assert_close,
    interpreted_on,
    kernels_or_skip,
    matmul_by_rows,
)
from tests.tiers import INTERPRETER, grid, nightly, points

#: (q_len, kv_len): a decode, chunks of which some begin a sequence, a whole prompt
MIXED = [(1, 37), (9, 9), (20, 45), (1, 1), (33, 33)]


def problem(rows: list[tuple[int, int]], device: str, **changes: Any) -> Problem:
    shape = {"heads": 4, "kv_heads": 2, "head_dim": 32, "page_size": 16, "device": device, **changes}
    return Problem.make(rows, **shape)


def prefill(task: Problem, *, num_tokens: int | None = None, **options: Any) -> torch.Tensor:
    """Through small tiles, so that short rows have several."""
    from aioinfer.model.attention.triton_prefill import PrefillTuning, paged_prefill

    tuning = PrefillTuning(block_m=32, block_n=16, num_warps=4, num_stages=2)
    options = {"scale": 0.3, "tuning": tuning, **options}
    total = sum(task.q_lens) if num_tokens is None else num_tokens
    return paged_prefill(
        task.q, task.keys, task.values, task.block_table, task.cu_q, task.kv_len, num_tokens=total, **options
    )


@pytest.mark.parametrize("dtype", grid([torch.bfloat16], [torch.float32, torch.float16], INTERPRETER))
@pytest.mark.parametrize("head_dim", grid([80], [64, 96, 128, 256], INTERPRETER))
def test_head_sizes_and_types(device: str, head_dim: int, dtype: torch.dtype) -> None:
    """With the tuning that a model gets."""
    task = problem([(1, 70), (5, 69)], device, head_dim=head_dim, dtype=dtype)
    got = prefill(task, scale=head_dim**-0.5, tuning=None)
    assert got.dtype == dtype
    assert_close(got, task.expected(head_dim**-0.5), dtype)


@pytest.mark.parametrize("page_size", grid([24], [3, 8, 16, 32, 64], INTERPRETER))
def test_page_sizes(device: str, page_size: int) -> None:
    task = problem(MIXED, device, page_size=page_size)
    assert_close(prefill(task), task.expected(0.3), torch.float32)


@pytest.mark.parametrize(("heads", "kv_heads"), points([(5, 1)], [(2, 2), (14, 2), (80, 2)], INTERPRETER))
def test_groups_of_heads(device: str, heads: int, kv_heads: int) -> None:
    """One query per key, groups that are no power of two, more heads than a tile of queries holds."""
    task = problem([(1, 20), (7, 22), (3, 3)], device, heads=heads, kv_heads=kv_heads, head_dim=16)
    assert_close(prefill(task), task.expected(0.3), torch.float32)


@nightly(INTERPRETER)
@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize("window", grid([17], [1, 4, 1000], INTERPRETER))
def test_windows_and_soft_caps(device: str, window: int, soft_cap: float | None) -> None:
    task = problem(MIXED, device, window=window)
    got = prefill(task, window=window, soft_cap=soft_cap)
    assert_close(got, task.expected(0.3, window=window, soft_cap=soft_cap), torch.float32)


@pytest.mark.parametrize("window", grid([None], [4], INTERPRETER))
def test_sinks_take_a_share_of_the_weights(device: str, window: int | None) -> None:
    task = problem(MIXED, device, window=window)
    # From one that takes nearly all of it to one that takes nothing.
    sinks = torch.linspace(-30, 9, task.q.shape[1], device=device)
    got = prefill(task, window=window, sinks=sinks)
    assert_close(got, task.expected(0.3, window=window, sinks=sinks), torch.float32)


@nightly(INTERPRETER)
@pytest.mark.parametrize(("block", "page_size"), points([(12, 24)], [(4, 16), (8, 8), (32, 32)], INTERPRETER))
@pytest.mark.parametrize("window", [None, 10])
def test_diffusion_blocks(device: str, block: int, page_size: int, window: int | None) -> None:
    """Prompts of whole blocks, blocks being denoised behind their context, and a block not yet complete."""
    rows = [
        (block, 3 * block),
        (3 * block, 3 * block),
        (block, block),
        (2 * block, 4 * block),
        (5, 2 * block + 5),
    ]
    task = problem(rows, device, page_size=page_size)
    got = prefill(task, block=block, window=window)
    assert_close(got, task.expected(0.3, block=block, window=window), torch.float32)


@nightly(INTERPRETER)
@pytest.mark.parametrize("seed", grid([0], range(1, 4), INTERPRETER))
def test_random_rows(device: str, seed: int) -> None:
    """Many short rows among long ones: every token is in exactly one tile."""
    rng = random.Random(seed)
    rows = []
    for _ in range(rng.randint(1, 9)):
        q_len = rng.choice([1, 1, 2, 8, 16, 17, 40])
        rows.append((q_len, q_len + rng.choice([0, 0, 1, 15, 16, 30])))
    task = problem(rows, device, page_size=rng.choice([8, 16]), head_dim=16)
    # Room for more tokens than there are, as with padded batches.
    got = prefill(task, num_tokens=sum(task.q_lens) + rng.choice([0, 50]))
    assert_close(got, task.expected(0.3), torch.float32)


def test_rows_without_work(device: str) -> None:
    task = problem([(2, 0), (3, 20), (0, 0), (1, 0), (0, 5)], device)
    got = prefill(task)
    assert_close(got[2:5], task.expected(0.3)[2:5], torch.float32)
    assert not got[:2].any()
    assert not got[5:].any()
    assert prefill(problem([], device)).shape == (0, 4, 32)


@nightly(INTERPRETER)
@pytest.mark.parametrize("splits", [3, 32])
@pytest.mark.parametrize("options", [{"window": 17, "soft_cap": 2.0}, {"block": 8}, {"window": 1}], ids=str)
def test_keys_are_divided_among_programs(device: str, options: dict[str, Any], splits: int) -> None:
    """Also among more than there are tiles of keys; rows without work, and of whose tokens some see no key of
    a split."""
    rows = [*MIXED, (2, 0), (0, 0), (16, 120)]
    task = problem(rows, device, window=options.get("window"), head_dim=16)
    sinks = torch.linspace(-3, 3, task.q.shape[1], device=device)
    for given in ({}, {"sinks": sinks}):
        out = torch.full_like(task.q, 7.0)
        got = prefill(task, splits=splits, num_tokens=len(task.q) + 9, out=out, **options, **given)
        assert_close(got, task.expected(0.3, **options, **given), torch.float32)


@nightly(INTERPRETER)
def test_other_rows_stay_when_keys_are_divided(device: str) -> None:
    task = problem(MIXED, device)
    expected, out = task.expected(0.3), torch.full_like(task.q, 7.0)
    first = task.q_lens[0] + task.q_lens[1]
    task.cu_q, task.kv_len, task.block_table = task.cu_q[2:], task.kv_len[2:], task.block_table[2:]
    prefill(task, num_tokens=len(task.q) - first, out=out, splits=2)
    assert_close(out[first:], expected[first:], torch.float32)
    assert (out[:first] == 7.0).all()
    with pytest.raises(ValueError, match="splits are 1 to 32"):
        prefill(task, splits=33)


@pytest.mark.parametrize(
    ("tokens", "rows", "longest", "splits"),
    [
        (32, 1, 4096, 16),  # one block of a diffusion model: two tiles for each of its four KV heads
        (32, 1, 300, 1),
        (32, 1, 2048, 8),
        (1024, 32, 4096, 1),
        (2048, 1, 40_960, 1),
    ],
)
def test_few_tiles_divide_their_keys(tokens: int, rows: int, longest: int, splits: int) -> None:
    """With LLaDA2-mini's 16 heads of queries and 4 of keys."""
    kernels_or_skip("cpu")
    from aioinfer.model.attention.triton_prefill import PrefillTuning, choose_splits

    assert choose_splits(tokens, rows, 16, 4, longest, PrefillTuning()) == splits


@pytest.mark.parametrize(
    ("tokens", "rows", "splits"),
    [
        (16, 17, 15),  # drafts that few rows verify
        (128, 65, 3),
        (512, 65, 1),
        (2048, 65, 1),
    ],
)
def test_padding_does_not_keep_keys_together(tokens: int, rows: int, splits: int) -> None:
    """Captured steps have room for many rows; with 32 heads of queries and 8 of keys."""
    kernels_or_skip("cpu")
    from aioinfer.model.attention.triton_prefill import PrefillTuning, choose_splits

    tuning = PrefillTuning()
    assert choose_splits(tokens, rows, 32, 8, 40_960, tuning, padded=True) == splits
    assert choose_splits(tokens, rows, 32, 8, 40_960, tuning) == 1
    assert choose_splits(tokens, 1, 32, 8, 300, tuning, padded=True) == 1


def part(task: Problem, row: int, start: int, stop: int) -> Problem:
    """Tokens [start, stop) of a row as a chunk that ends there, alone in its batch."""
    begin = int(task.cu_q[row])
    kv = task.kv_lens[row] - task.q_lens[row] + stop
    lens = [torch.tensor(values, device=task.q.device) for values in ([0, stop - start], [kv])]
    return Problem(
        task.q[begin + start : begin + stop], task.keys, task.values, task.block_table[row : row + 1], *lens,
        [stop - start], [kv],
    )  # fmt: skip


@nightly(INTERPRETER)
@pytest.mark.parametrize("window", grid([18], [None], INTERPRETER))
def test_a_token_has_the_same_bits_in_any_company_and_chunk(
    device: str, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if interpreted_on(device):
        monkeypatch.setattr(np, "matmul", matmul_by_rows)
    task = problem(MIXED, device)
    together = prefill(task, window=window)
    for row, q_len in enumerate(task.q_lens):
        for size in {1, 7, q_len} if row == 2 else {q_len}:
            chunks = [
                prefill(part(task, row, at, min(at + size, q_len)), window=window)
                for at in range(0, q_len, size)
            ]
            got = torch.cat(chunks)
            assert torch.equal(got, together[task.cu_q[row] : task.cu_q[row + 1]]), (row, size)


def test_later_rows_of_a_batch_and_strided_tensors(device: str) -> None:
    """As behind the decodes of a mixed step: ``cu_q`` begins within q, and other outputs stay."""
    task = problem(MIXED, device)
    expected = task.expected(0.3)
    wide = torch.randn(len(task.q), 8, 32, device=device)
    wide[:, 1:5] = task.q
    out = torch.full((len(task.q), 4, 32), 7.0, device=device)
    first = task.q_lens[0] + task.q_lens[1]
    task.q, task.cu_q, task.kv_len = wide[:, 1:5], task.cu_q[2:], task.kv_len[2:]
    task.block_table = task.block_table[2:]
    prefill(task, num_tokens=len(task.q) - first, out=out)
    assert_close(out[first:], expected[first:], torch.float32)
    assert (out[:first] == 7.0).all()


def test_sizes_of_tiles_are_checked() -> None:
    kernels_or_skip("cpu")
    from aioinfer.model.attention.triton_prefill import PrefillTuning

    for sizes in ({"block_m": 8}, {"block_n": 24}):
        with pytest.raises(ValueError, match="size of a tile"):
            PrefillTuning(**sizes)
