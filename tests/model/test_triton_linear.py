"""Products in a fixed order: against float64, and each row with the same bits in any company."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.model.kernels import TOLERANCE, interpreted_on, matmul_by_rows, normal
from tests.tiers import INTERPRETER, grid, points


@pytest.mark.parametrize("dtype", grid([torch.bfloat16], [torch.float32, torch.float16], INTERPRETER))
@pytest.mark.parametrize(
    ("rows", "outputs", "inner"), points([(3, 70, 100)], [(1, 64, 64), (65, 33, 256), (0, 8, 8)], INTERPRETER)
)
def test_products_of_any_shape(device: str, rows: int, outputs: int, inner: int, dtype: torch.dtype) -> None:
    from aioinfer.model.triton_linear import TritonLinear

    values, weight, bias = (
        normal(*shape, seed=at).to(dtype).to(device)
        for at, shape in enumerate([(rows, inner), (outputs, inner), (outputs,)])
    )
    weight = weight * inner**-0.5
    for given in (None, bias):
        expected = values.double() @ weight.double().T
        expected = expected if given is None else expected + given.double()
        got = TritonLinear(weight, given)(values)
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_in_any_company(
    device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from aioinfer.model.triton_linear import fixed_order_product

    if interpreted_on(device):
        monkeypatch.setattr(np, "matmul", matmul_by_rows)
    values, weight = (
        normal(*shape, seed=at).to(dtype).to(device) for at, shape in enumerate([(70, 96), (40, 96)])
    )
    together = fixed_order_product(values, weight)
    for first, last in ((0, 1), (3, 20), (37, 70), (69, 70)):
        assert torch.equal(fixed_order_product(values[first:last], weight), together[first:last])
    # A slice of wider rows is what some layers multiply.
    wide = torch.cat((values, values), dim=1)
    assert torch.equal(fixed_order_product(wide[:, 96:], weight), together)
    with pytest.raises(ValueError, match="does not fit"):
        fixed_order_product(values, weight.T)
