"""Linear layers in the layout of oneDNN, against torch's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from aioinfer.model.linear import PackedLinear, TorchLinear, packed_or_torch

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inner"), [(1, 1), (3, 7), (97, 24), (64, 48), (5, 300)])
def test_packed_weights_multiply_any_number_of_rows(outputs: int, inner: int, dtype: torch.dtype) -> None:
    make = packed_or_torch(CPU, dtype)
    for rows in (0, 1, 2, 9, 40, 300):
        generator = torch.Generator().manual_seed(rows)
        # Rows of something wider, as a projection's share of a larger one is.
        values = torch.randn(rows, inner + 5, generator=generator).to(dtype)[:, 3 : 3 + inner]
        weight = torch.randn(outputs, inner, generator=generator).to(dtype)
        for bias in (None, torch.randn(outputs, generator=generator).to(dtype)):
            expected = F.linear(values.double(), weight.double(), None if bias is None else bias.double())
            got = make(weight, bias)(values)
            assert got.dtype == dtype
            # One rounding of the result, and in float32 those of a sum of ``inner`` numbers.
            bound = {torch.float32: 1e-6 * inner**0.5 + 1e-6, torch.bfloat16: 2**-8}[dtype]
            torch.testing.assert_close(got.double(), expected, rtol=bound, atol=bound * inner**0.5)


def test_only_a_cpu_packs_and_only_what_it_can() -> None:
    assert packed_or_torch(CPU, torch.float16) is TorchLinear
    assert packed_or_torch(torch.device("meta"), torch.float32) is TorchLinear


def test_without_packed_weights_there_are_plain_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*arguments: object) -> None:
        raise AttributeError("no such operation")

    monkeypatch.setattr(PackedLinear, "__init__", missing)
    assert packed_or_torch(CPU, torch.float32) is TorchLinear
