"""Argument structures are compared with those of the library, and tensors are checked before their addresses
are taken."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from aioinfer.config import EngineConfig
from aioinfer.execution.torch_device import TorchDevice
from aioinfer.model.native_linear import NativeLinear
from aioinfer.native import bindings
from aioinfer.native.arguments import RouteArguments
from aioinfer.native.bindings import Kernels, LayoutMismatch, ThreadPool, kernels, shared_thread_pool
from aioinfer.native.build import build
from aioinfer.native.processor import choose_tiles
from aioinfer.native.structures import STRUCTURES, Arguments, describe
from aioinfer.native.tensors import address, rows_address
from tests.native.support import normal

FIELDS = dict(RouteArguments._fields_)


def structure(fields: dict[str, Any], name: str = "RouteArguments") -> type[Arguments]:
    """A structure with these fields in place of the real one."""
    return type(name, (Arguments,), {"__slots__": (), "_fields_": list(fields.items())})


def test_the_library_and_the_bindings_agree_on_every_structure() -> None:
    text = kernels().function("layout").decode()
    assert text.splitlines() == [describe(structure) for structure in STRUCTURES]
    assert describe(RouteArguments) == (
        "RouteArguments pool:address@0 router:address@8 values:address@16 count:int@24"
        " hidden:int@32 weights:address@40 experts:address@48 size:56"
    )


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (
            structure({**FIELDS, "more": ctypes.c_int64}),
            "RouteArguments: the library has size:56 where the bindings have more:int@56",
        ),
        (
            structure({**FIELDS, "hidden": ctypes.c_float}),
            "RouteArguments: the library has hidden:int@32 where the bindings have hidden:float@32",
        ),
        (
            structure({name: FIELDS[name] for name in ("router", "pool", *list(FIELDS)[2:])}),
            "RouteArguments: the library has pool:address@0 where the bindings have router:address@0",
        ),
        (
            structure(FIELDS, "OtherArguments"),
            "OtherArguments: the library has nothing where the bindings have OtherArguments",
        ),
    ],
    ids=["more", "float", "order", "name"],
)
def test_another_layout_is_refused(monkeypatch: pytest.MonkeyPatch, other: type[Arguments], why: str) -> None:
    path = str(build())
    others = [other if kind is RouteArguments else kind for kind in STRUCTURES]
    monkeypatch.setattr(bindings, "STRUCTURES", others)
    with pytest.raises(LayoutMismatch, match=f"^argument structure {why}$"):
        Kernels(path, choose_tiles())


def test_with_another_layout_an_engine_computes_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where kernels cannot be compiled."""
    monkeypatch.setattr(bindings, "_loaded", None)
    monkeypatch.setattr(bindings, "STRUCTURES", STRUCTURES[:-1])
    why = bindings.native_unsupported()
    assert why is not None
    assert why.startswith("argument structure LogprobsArguments: the library has ")
    with pytest.raises(RuntimeError, match="LogprobsArguments"):
        ThreadPool(1)
    device = TorchDevice(EngineConfig(device="cpu", threads=1, num_pages=20, max_model_len=64))
    assert "sdpa attention" in device.open().description
    device.close()


def test_a_field_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(AttributeError, match="int4"):
        RouteArguments(**dict.fromkeys(FIELDS, 0), int4=True)  # type: ignore[call-arg]
    arguments = RouteArguments.zeros()
    with pytest.raises(AttributeError, match="cuont"):
        arguments.cuont = 1  # type: ignore[attr-defined]
    with pytest.raises(TypeError):
        arguments.count = 1.5  # type: ignore[assignment]
    assert (arguments.count, arguments.hidden) == (0, 0)


def test_an_entry_point_takes_no_other_structure() -> None:
    arguments = RouteArguments(**dict.fromkeys(FIELDS, 0))
    with pytest.raises(ctypes.ArgumentError):
        kernels().function("sample", arguments)
    with pytest.raises(KeyError):
        kernels().call(arguments)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(4, dtype=torch.int32),
        torch.zeros(3, dtype=torch.int64),
        torch.zeros(8, dtype=torch.int64)[::2],
        torch.zeros(2, 2, dtype=torch.int64).T,
        torch.zeros(4, dtype=torch.int64, device="meta"),
    ],
    ids=["dtype", "too few", "steps", "transposed", "device"],
)
def test_a_tensor_that_a_kernel_cannot_read_has_no_address(tensor: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="4 contiguous elements"):
        address(tensor, torch.int64, 4)
    good = torch.zeros(2, 2, dtype=torch.int64)
    assert address(good, torch.int64, 4) == good.data_ptr()


def test_rows_may_lie_apart_but_not_their_elements() -> None:
    matrix = normal(4, 6, seed=0)
    assert rows_address(matrix[1:, 2:4], torch.float32) == matrix[1:, 2:].data_ptr()
    assert rows_address(matrix[:1].expand(3, -1), torch.float32) == matrix.data_ptr()
    for wrong in (matrix.T, matrix[:, ::2], matrix.double(), matrix.to("meta")):
        with pytest.raises(ValueError, match="contiguous rows"):
            rows_address(wrong, torch.float32)


def test_a_layer_refuses_values_of_another_type_or_size() -> None:
    linear = NativeLinear(shared_thread_pool(1), normal(20, 16, seed=0), None)
    for wrong in (normal(2, 16, seed=1).bfloat16(), normal(2, 8, seed=1), normal(2, 16, seed=1).double()):
        with pytest.raises(ValueError, match="32 contiguous elements"):
            linear(wrong)
