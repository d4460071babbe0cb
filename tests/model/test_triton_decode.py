"""The decode kernel against attention written out, interpreted on the CPU or compiled on CUDA."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.model.kernels import Problem, assert_close
from tests.tiers import INTERPRETER, grid, nightly, points

LENGTHS = [1, 70, 0, 33, 16]


def problem(lengths: list[int], device: str, **changes: Any) -> Problem:
    """One query per row. A row of length 0 has one too: padding."""
    shape = {"heads": 4, "kv_heads": 2, "head_dim": 32, "page_size": 16, "device": device, **changes}
    return Problem.make([(1, length) for length in lengths], **shape)


def decode(
    task: Problem, *, max_splits: int = 4, programs: int = 4096, least_lanes: int = 4, **options: Any
) -> torch.Tensor:
    """Through small tiles, so that short contexts have several splits."""
    from aioinfer.model.attention.triton_decode import DecodeTuning, paged_decode

    tuning = DecodeTuning(
        split_size=32, max_splits=max_splits, block_n=16, programs=programs, least_lanes=least_lanes,
        num_stages=2,
    )  # fmt: skip
    return paged_decode(
        task.q, task.keys, task.values, task.block_table, task.kv_len, scale=0.3, tuning=tuning, **options
    )


@pytest.mark.parametrize("dtype", grid([torch.bfloat16], [torch.float32, torch.float16], INTERPRETER))
@pytest.mark.parametrize("head_dim", grid([80], [64, 96, 128, 256], INTERPRETER))
def test_head_sizes_and_types(device: str, head_dim: int, dtype: torch.dtype) -> None:
    """With the tuning that a model gets."""
    from aioinfer.model.attention.triton_decode import paged_decode

    task = problem([40, 0, 7], device, head_dim=head_dim, dtype=dtype)
    scale = head_dim**-0.5
    got = paged_decode(task.q, task.keys, task.values, task.block_table, task.kv_len, scale=scale)
    assert got.dtype == dtype
    assert_close(got, task.expected(scale), dtype)


@pytest.mark.parametrize("page_size", grid([24], [3, 8, 16, 32, 64], INTERPRETER))
def test_page_sizes(device: str, page_size: int) -> None:
    task = problem(LENGTHS, device, page_size=page_size)
    assert_close(decode(task), task.expected(0.3), torch.float32)


@pytest.mark.parametrize(
    ("heads", "kv_heads"), points([(5, 1)], [(2, 2), (14, 2), (40, 2), (132, 2)], INTERPRETER)
)
def test_groups_of_heads(device: str, heads: int, kv_heads: int) -> None:
    """One query per key, groups that are no power of two, more heads than a tile of queries holds."""
    task = problem([70, 3], device, heads=heads, kv_heads=kv_heads, head_dim=16)
    assert_close(decode(task), task.expected(0.3), torch.float32)


@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize("window", grid([17], [1, 4, 64, 1000], INTERPRETER))
def test_windows_and_soft_caps(device: str, window: int, soft_cap: float | None) -> None:
    task = problem(LENGTHS, device, window=window)
    got = decode(task, window=window, soft_cap=soft_cap)
    assert_close(got, task.expected(0.3, window=window, soft_cap=soft_cap), torch.float32)


@pytest.mark.parametrize("window", grid([None], [4], INTERPRETER))
def test_sinks_take_a_share_of_the_weights(device: str, window: int | None) -> None:
    task = problem(LENGTHS, device, window=window)
    # From one that takes nearly all of it to one that takes nothing.
    sinks = torch.linspace(-30, 9, task.q.shape[1], device=device)
    got = decode(task, window=window, sinks=sinks)
    assert_close(got, task.expected(0.3, window=window, sinks=sinks), torch.float32)


def test_a_row_without_work_gives_zeros_from_a_pool_of_nan(device: str) -> None:
    for extra_pages in (1, 8):
        task = problem([0, 0], device, extra_pages=extra_pages)
        assert not task.keys.isfinite().any()
        assert torch.equal(decode(task), torch.zeros_like(task.q))
    assert decode(problem([], device)).shape == (0, 4, 32)


@nightly(INTERPRETER)
def test_a_long_row_has_longer_splits_and_not_more(device: str) -> None:
    task = problem([200, 129, 128], device, page_size=64)
    assert_close(decode(task, max_splits=3), task.expected(0.3), torch.float32)
    assert_close(decode(task, max_splits=3, window=150), task.expected(0.3, window=150), torch.float32)


@nightly(INTERPRETER)
def test_a_row_has_the_same_bits_in_any_company_and_under_any_page_table(device: str) -> None:
    """The width of the page table sets the grid."""
    task = problem([70, 5, 33, 17], device)
    together = decode(task)
    for row, length in enumerate(task.kv_lens):
        for width in {-(-length // 16), task.block_table.shape[1]}:
            alone = Problem(
                task.q[row : row + 1], task.keys, task.values, task.block_table[row : row + 1, :width],
                task.cu_q, task.kv_len[row : row + 1], [1], [length],
            )  # fmt: skip
            assert torch.equal(decode(alone)[0], together[row]), (length, width)


@nightly(INTERPRETER)
@pytest.mark.parametrize("window", grid([90], [None], INTERPRETER))
def test_a_row_has_the_same_bits_however_many_lanes_share_its_splits(device: str, window: int | None) -> None:
    task = problem([200, 5, 0, 129], device, window=window, page_size=64)
    one_each = decode(task, window=window)
    assert_close(one_each, task.expected(0.3, window=window), torch.float32)
    for lanes in (1, 2, 3):
        shared = decode(task, window=window, programs=1, least_lanes=lanes)
        assert torch.equal(shared, one_each), lanes


@pytest.mark.parametrize(("rows", "lanes"), [(1, 16), (32, 16), (64, 8), (100, 5), (256, 4), (1024, 4)])
def test_many_rows_have_fewer_lanes_than_splits(rows: int, lanes: int) -> None:
    """Eight KV heads, contexts of 16 splits; and no lane without a split."""
    pytest.importorskip("triton", reason="triton is not installed")
    from aioinfer.model.attention.triton_decode import DecodeTuning, _num_lanes

    assert _num_lanes(16, 8 * rows, DecodeTuning()) == lanes
    assert _num_lanes(2, 8 * rows, DecodeTuning()) == 2


def test_strided_queries_and_outputs(device: str) -> None:
    """Queries are a slice of the projection of queries, keys and values."""
    task = problem(LENGTHS, device)
    wide = torch.randn(len(LENGTHS), 8, 32, device=device)
    wide[:, 1:5] = task.q
    out = torch.zeros(len(LENGTHS), 6, 32, device=device)
    expected = task.expected(0.3)
    task.q = wide[:, 1:5]
    assert_close(decode(task, out=out[:, 2:6]), expected, torch.float32)
    assert_close(out[:, 2:6], expected, torch.float32)
    assert not out[:, :2].any()


def test_what_does_not_fit_is_refused(device: str) -> None:
    from aioinfer.model.attention.triton_decode import DecodeTuning

    task = problem([3], device, heads=4)
    task.q = task.q[:, :3]
    with pytest.raises(ValueError, match="do not fit"):
        decode(task)
    task.q = problem([3], device).q.transpose(1, 2)
    with pytest.raises(ValueError, match="contiguous"):
        decode(task)
    with pytest.raises(ValueError, match="block_n"):
        DecodeTuning(split_size=24, block_n=16)
    for nothing in ({"max_splits": 0}, {"least_lanes": 0}):
        with pytest.raises(ValueError, match="needs a split and a lane"):
            DecodeTuning(**nothing)
