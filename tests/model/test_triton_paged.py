"""The decode and the prefill kernel against attention written out, interpreted or compiled on CUDA."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from tests.model.kernels import Problem, assert_close, interpreted_on, kernels_or_skip, matmul_by_rows
from tests.tiers import INTERPRETER, grid, nightly, points

#: (q_len, kv_len): one query per row; a row without a context has one too: padding
DECODES = [(1, 1), (1, 70), (1, 0), (1, 33), (1, 16)]
#: a decode, chunks of which some begin a sequence, a whole prompt
MIXED = [(1, 37), (9, 9), (20, 45), (1, 1), (33, 33)]
ROWS = {"decode": DECODES, "prefill": MIXED}
KERNELS = pytest.mark.parametrize("kernel", ["decode", "prefill"])


def problem(rows: list[tuple[int, int]], device: str, **changes: Any) -> Problem:
    shape = {"heads": 4, "kv_heads": 2, "head_dim": 32, "page_size": 16, "device": device, **changes}
    return Problem.make(rows, **shape)


def decode(task: Problem, **options: Any) -> torch.Tensor:
    """Through small tiles, so that short contexts have several splits; ``tuning``: changes to these."""
    from aioinfer.model.attention.triton_decode import DecodeTuning, paged_decode

    sizes = {"split_size": 32, "max_splits": 4, "block_n": 16, "programs": 4096, "least_lanes": 4}
    tuning = DecodeTuning(num_stages=2, **{**sizes, **options.pop("tuning", {})})
    options = {"scale": 0.3, "tuning": tuning, **options}
    return paged_decode(task.q, task.keys, task.values, task.block_table, task.kv_len, **options)


def prefill(task: Problem, **options: Any) -> torch.Tensor:
    """Through small tiles, so that short rows have several."""
    from aioinfer.model.attention.triton_prefill import PrefillTuning, paged_prefill

    tuning = PrefillTuning(block_m=32, block_n=16, num_warps=4, num_stages=2)
    options = {"scale": 0.3, "tuning": tuning, "num_tokens": sum(task.q_lens), **options}
    return paged_prefill(task.q, task.keys, task.values, task.block_table, task.cu_q, task.kv_len, **options)


def attend(kernel: str, task: Problem, **options: Any) -> torch.Tensor:
    return (decode if kernel == "decode" else prefill)(task, **options)


def without(task: Problem, rows: int) -> int:
    """Take the first rows from a batch, whose queries stay; returns how many tokens they have."""
    task.cu_q, task.kv_len, task.block_table = task.cu_q[rows:], task.kv_len[rows:], task.block_table[rows:]
    return sum(task.q_lens[:rows])


@KERNELS
@pytest.mark.parametrize("dtype", grid([torch.bfloat16], [torch.float32, torch.float16], INTERPRETER))
@pytest.mark.parametrize("head_dim", grid([80], [64, 96, 128, 256], INTERPRETER))
def test_head_sizes_and_types(device: str, kernel: str, head_dim: int, dtype: torch.dtype) -> None:
    """With the tuning that a model gets."""
    from aioinfer.model.attention.triton_decode import paged_decode

    rows = [(1, 40), (1, 0), (1, 7)] if kernel == "decode" else [(1, 70), (5, 69)]
    task, scale = problem(rows, device, head_dim=head_dim, dtype=dtype), head_dim**-0.5
    if kernel == "decode":
        got = paged_decode(task.q, task.keys, task.values, task.block_table, task.kv_len, scale=scale)
    else:
        got = prefill(task, scale=scale, tuning=None)
    assert got.dtype == dtype
    assert_close(got, task.expected(scale), dtype)


@KERNELS
@pytest.mark.parametrize("page_size", grid([24], [3, 8, 16, 32, 64], INTERPRETER))
def test_page_sizes(device: str, kernel: str, page_size: int) -> None:
    task = problem(ROWS[kernel], device, page_size=page_size)
    assert_close(attend(kernel, task), task.expected(0.3), torch.float32)


@KERNELS
@pytest.mark.parametrize(
    ("heads", "kv_heads"), points([(5, 1)], [(2, 2), (14, 2), (80, 2), (132, 2)], INTERPRETER)
)
def test_groups_of_heads(device: str, kernel: str, heads: int, kv_heads: int) -> None:
    """One query per key, groups that are no power of two, more heads than a tile of queries holds."""
    rows = [(1, 70), (1, 3)] if kernel == "decode" else [(1, 20), (7, 22), (3, 3)]
    task = problem(rows, device, heads=heads, kv_heads=kv_heads, head_dim=16)
    assert_close(attend(kernel, task), task.expected(0.3), torch.float32)


@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize(
    ("kernel", "window"),
    points(
        [("decode", 17)],
        [(kernel, window) for kernel in ROWS for window in (1, 4, 17, 64, 1000)],
        INTERPRETER,
    ),
)
def test_windows_and_soft_caps(device: str, kernel: str, window: int, soft_cap: float | None) -> None:
    task = problem(ROWS[kernel], device, window=window)
    got = attend(kernel, task, window=window, soft_cap=soft_cap)
    assert_close(got, task.expected(0.3, window=window, soft_cap=soft_cap), torch.float32)


@KERNELS
@pytest.mark.parametrize("window", grid([None], [4], INTERPRETER))
def test_sinks_take_a_share_of_the_weights(device: str, kernel: str, window: int | None) -> None:
    task = problem(ROWS[kernel], device, window=window)
    # From one that takes nearly all of it to one that takes nothing.
    sinks = torch.linspace(-30, 9, task.q.shape[1], device=device)
    got = attend(kernel, task, window=window, sinks=sinks)
    assert_close(got, task.expected(0.3, window=window, sinks=sinks), torch.float32)


@nightly(INTERPRETER)
@pytest.mark.parametrize(("block", "page_size"), points([(12, 24)], [(4, 16), (8, 8), (32, 32)], INTERPRETER))
@pytest.mark.parametrize("window", [None, 10])
def test_diffusion_blocks(device: str, block: int, page_size: int, window: int | None) -> None:
    """Prompts of whole blocks, blocks being denoised after their context, and a block not yet complete."""
    rows = [(1, 3), (3, 3), (1, 1), (2, 4)]
    rows = [(q_len * block, kv_len * block) for q_len, kv_len in rows] + [(5, 2 * block + 5)]
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


def test_rows_without_work_give_zeros(device: str) -> None:
    for extra_pages in (1, 8):
        task = problem([(1, 0), (1, 0)], device, extra_pages=extra_pages)
        assert not task.keys.isfinite().any()
        assert torch.equal(decode(task), torch.zeros_like(task.q))
    task = problem([(2, 0), (3, 20), (0, 0), (1, 0), (0, 5)], device)
    got = prefill(task)
    assert_close(got[2:5], task.expected(0.3)[2:5], torch.float32)
    assert not got[:2].any()
    assert not got[5:].any()
    assert decode(problem([], device)).shape == prefill(problem([], device)).shape == (0, 4, 32)


@nightly(INTERPRETER)
def test_a_long_row_has_longer_splits_and_not_more(device: str) -> None:
    for window in (None, 150):
        task = problem([(1, 200), (1, 129), (1, 128)], device, page_size=64)
        got = decode(task, tuning={"max_splits": 3}, window=window)
        assert_close(got, task.expected(0.3, window=window), torch.float32)


@nightly(INTERPRETER)
@pytest.mark.parametrize("splits", [3, 32])
@pytest.mark.parametrize("options", [{"window": 17, "soft_cap": 2.0}, {"block": 8}, {"window": 1}], ids=str)
def test_keys_are_divided_among_programs(device: str, options: dict[str, Any], splits: int) -> None:
    """Also among more than there are tiles of keys; rows without work, and of whose tokens some see no key of
    a split. Other rows stay as they are."""
    rows = [*MIXED, (2, 0), (0, 0), (16, 120)]
    task = problem(rows, device, window=options.get("window"), head_dim=16)
    sinks = torch.linspace(-3, 3, task.q.shape[1], device=device)
    for given in ({}, {"sinks": sinks}):
        out = torch.full_like(task.q, 7.0)
        got = prefill(task, splits=splits, num_tokens=len(task.q) + 9, out=out, **options, **given)
        assert_close(got, task.expected(0.3, **options, **given), torch.float32)
    expected, out, first = task.expected(0.3, **options), torch.full_like(task.q, 7.0), without(task, 2)
    prefill(task, num_tokens=len(task.q) - first, out=out, splits=2, **options)
    assert_close(out[first:], expected[first:], torch.float32)
    assert (out[:first] == 7.0).all()


@nightly(INTERPRETER)
def test_a_decode_has_the_same_bits_in_any_company_and_under_any_page_table(device: str) -> None:
    """The width of the page table sets the grid."""
    task = problem([(1, 70), (1, 5), (1, 33), (1, 17)], device)
    together = decode(task)
    for row, length in enumerate(task.kv_lens):
        for width in (-(-length // 16), None):
            assert torch.equal(decode(task.part(row, width=width))[0], together[row]), (length, width)


@nightly(INTERPRETER)
@pytest.mark.parametrize("window", grid([90], [None], INTERPRETER))
def test_a_row_has_the_same_bits_however_many_lanes_share_its_splits(device: str, window: int | None) -> None:
    task = problem([(1, 200), (1, 5), (1, 0), (1, 129)], device, window=window, page_size=64)
    one_each = decode(task, window=window)
    assert_close(one_each, task.expected(0.3, window=window), torch.float32)
    for lanes in (1, 2, 3):
        shared = decode(task, window=window, tuning={"programs": 1, "least_lanes": lanes})
        assert torch.equal(shared, one_each), lanes


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
            chunks = [task.part(row, at, min(at + size, q_len)) for at in range(0, q_len, size)]
            got = torch.cat([prefill(chunk, window=window) for chunk in chunks])
            assert torch.equal(got, together[task.cu_q[row] : task.cu_q[row + 1]]), (row, size)


@pytest.mark.parametrize(("rows", "lanes"), [(1, 16), (32, 16), (64, 8), (100, 5), (256, 4), (1024, 4)])
def test_many_rows_have_fewer_lanes_than_splits(rows: int, lanes: int) -> None:
    """Eight KV heads, contexts of 16 splits; and no lane without a split."""
    kernels_or_skip("cpu")
    from aioinfer.model.attention.triton_decode import DecodeTuning, _num_lanes

    assert _num_lanes(16, 8 * rows, DecodeTuning()) == lanes
    assert _num_lanes(2, 8 * rows, DecodeTuning()) == 2


@pytest.mark.parametrize(
    ("tokens", "rows", "heads", "longest", "padded", "splits"),
    [
        # Of LLaDA2-mini, one block: two tiles for each of its four KV heads.
        (32, 1, (16, 4), 4096, False, 16),
        (32, 1, (16, 4), 300, False, 1),
        (32, 1, (16, 4), 2048, False, 8),
        (1024, 32, (16, 4), 4096, False, 1),
        (2048, 1, (16, 4), 40_960, False, 1),
        # Captured steps have room for many rows; drafts that few rows verify.
        (16, 17, (32, 8), 40_960, True, 15),
        (16, 17, (32, 8), 40_960, False, 1),
        (128, 65, (32, 8), 40_960, True, 3),
        (512, 65, (32, 8), 40_960, True, 1),
        (16, 1, (32, 8), 300, True, 1),
    ],
)
def test_few_tiles_divide_their_keys(
    tokens: int, rows: int, heads: tuple[int, int], longest: int, padded: bool, splits: int
) -> None:
    kernels_or_skip("cpu")
    from aioinfer.model.attention.triton_prefill import PrefillTuning, choose_splits

    assert choose_splits(tokens, rows, *heads, longest, PrefillTuning(), padded=padded) == splits


@KERNELS
def test_strided_queries_and_outputs(device: str, kernel: str) -> None:
    """Queries are a slice of a projection. In a mixed step ``cu_q`` begins within them, after the decodes;
    other outputs stay."""
    task = problem(ROWS[kernel], device)
    expected, wide = task.expected(0.3), torch.randn(len(task.q), 8, 32, device=device)
    wide[:, 1:5] = task.q
    task.q, out, first = wide[:, 1:5], torch.full((len(task.q), 6, 32), 7.0, device=device), 0
    more: dict[str, Any] = {}
    if kernel == "prefill":
        first = without(task, 2)
        more = {"num_tokens": len(task.q) - first}
    attend(kernel, task, out=out[:, 2:6], **more)
    assert_close(out[first:, 2:6], expected[first:], torch.float32)
    assert (out[:first] == 7.0).all()
    assert (out[:, :2] == 7.0).all()


def test_what_does_not_fit_is_refused(device: str) -> None:
    from aioinfer.model.attention.triton_decode import DecodeTuning
    from aioinfer.model.attention.triton_prefill import PrefillTuning

    task = problem([(1, 3)], device)
    q = task.q
    task.q = q[:, :3]
    with pytest.raises(ValueError, match="do not fit"):
        decode(task)
    task.q = q.transpose(1, 2)
    with pytest.raises(ValueError, match="contiguous"):
        decode(task)
    with pytest.raises(ValueError, match="splits are 1 to 32"):
        prefill(problem([(1, 3)], device), splits=33)
    for kind, sizes, message in (
        (DecodeTuning, {"split_size": 24, "block_n": 16}, "block_n"),
        (DecodeTuning, {"max_splits": 0}, "needs a split and a lane"),
        (DecodeTuning, {"least_lanes": 0}, "needs a split and a lane"),
        (PrefillTuning, {"block_m": 8}, "size of a tile"),
        (PrefillTuning, {"block_n": 24}, "size of a tile"),
    ):
        with pytest.raises(ValueError, match=message):
            kind(**sizes)  # type: ignore[arg-type]
