"""What memory there is, and that a KV pool takes of it what is used."""

from __future__ import annotations

import gc
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from aioinfer.checkpoint.tensors import SafetensorsTensors, stored_bytes
from aioinfer.config import EngineConfig
from aioinfer.errors import ConfigError, OutOfMemory
from aioinfer.execution.sizing import check_pool
from aioinfer.execution.torch_device import TorchDevice
from aioinfer.ledger import LEDGER
from aioinfer.model.attention.pool import KVShape, pool_zeros
from aioinfer.model.backend import Backend
from aioinfer.model.kernels import make_attention
from aioinfer.model.quantization import Rounding
from aioinfer.model.weights import Weights
from aioinfer.system.memory import Available, give_back, memory_available, resident
from tests.model.harness import require

CPU, GIB, MIB = torch.device("cpu"), 1 << 30, 1 << 20
#: of a group that has no limit, in version 1
NO_LIMIT = 9223372036854771712


def available(place: Path, membership: str, files: dict[str, str], free: int | None) -> Available | None:
    """With these files of control groups and so many bytes free on the machine."""
    for name, text in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text + "\n")
    mine, meminfo = place / "membership", place / "meminfo"
    mine.write_text(membership + "\n")
    if free is not None:
        meminfo.write_text(f"MemTotal:  1 kB\nMemAvailable: {free >> 10} kB\nHugePages_Total: 0\n")
    return memory_available(place, mine, meminfo)


@pytest.mark.parametrize(
    ("membership", "files", "free", "wanted"),
    [
        ("0::/", {}, 8 * GIB, (8 * GIB, "machine")),
        ("0::/", {}, None, None),
        ("0::/", {"memory.max": "max", "memory.current": "5"}, 8 * GIB, (8 * GIB, "machine")),
        ("0::/", {"memory.max": "4096", "memory.current": "96"}, 8 * GIB, (4000, "control group")),
        ("0::/", {"memory.max": "4096", "memory.current": "5000"}, 8 * GIB, (0, "control group")),
        ("0::/", {"memory.max": f"{9 * GIB}", "memory.current": "0"}, 8 * GIB, (8 * GIB, "machine")),
        # What throttles counts, too, and copies of files do not.
        (
            "0::/",
            {
                "memory.max": "4096", "memory.high": "3000", "memory.current": "1000",
                "memory.stat": "anon 300\ninactive_file 400\nactive_file 200",
            },
            None,
            (2600, "control group"),
        ),
        # The tightest of a group and those around it.
        (
            "0::/a/b",
            {
                "memory.max": "900", "memory.current": "100",
                "a/memory.max": "600", "a/memory.current": "100",
                "a/b/memory.max": "max", "a/b/memory.current": "50",
            },
            8 * GIB,
            (500, "control group"),
        ),
        (
            "5:memory:/d\n4:cpu:/e",
            {
                "memory/d/memory.limit_in_bytes": "1000", "memory/d/memory.usage_in_bytes": "700",
                "memory/d/memory.stat": "inactive_file 1\ntotal_inactive_file 100\ntotal_active_file 50",
            },
            8 * GIB,
            (450, "control group"),
        ),
        (
            "5:memory:/",
            {"memory/memory.limit_in_bytes": f"{NO_LIMIT}", "memory/memory.usage_in_bytes": "7"},
            8 * GIB,
            (8 * GIB, "machine"),
        ),
        ("0::/", {"memory.max": "rubbish", "memory.current": "1"}, 8 * GIB, (8 * GIB, "machine")),
        ("0::/", {"memory.max": "4096"}, 8 * GIB, (8 * GIB, "machine")),
    ],
)  # fmt: skip
@pytest.mark.linux
def test_what_is_left_is_the_least_of_machine_and_groups(
    tmp_path: Path, membership: str, files: dict[str, str], free: int | None, wanted: Any
) -> None:
    assert available(tmp_path, membership, files, free) == (None if wanted is None else Available(*wanted))


@pytest.mark.linux
def test_a_system_that_says_nothing_sets_no_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory_available(tmp_path, tmp_path / "none", tmp_path / "none") is None
    monkeypatch.setattr(LEDGER, "available", lambda: None)
    check_pool(EngineConfig(), 10**18)


def leave(patch: pytest.MonkeyPatch, size: int, source: str = "control group") -> None:
    """The system has so much left, beside what this process has promised before."""
    gc.collect()
    patch.setattr(LEDGER, "available", lambda: Available(size + promised, source))
    promised = LEDGER.untaken()


def test_a_pool_beyond_the_memory_is_refused_with_the_setting_it_comes_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leave(monkeypatch, 3 * GIB // 2)
    with pytest.raises(ConfigError, match=r"kv_memory_gib is 2: .* 2.00 GiB, .* control group has 1.50 GiB"):
        check_pool(EngineConfig(kv_memory_gib=2), 2 * GIB)
    with pytest.raises(ConfigError, match="num_pages is 77: "):
        check_pool(EngineConfig(num_pages=77), 2 * GIB)
    check_pool(EngineConfig(kv_memory_gib=2), 3 * GIB // 2)
    fixed = EngineConfig(num_pages=77, max_running_requests=200)
    told = r"num_pages is 77, max_running_requests 200: .* takes 0.50 GiB, .* states .* 1.50 GiB, .* has 1.50"
    with pytest.raises(ConfigError, match=told):
        check_pool(fixed, 2 * GIB, state_bytes=3 * GIB // 2)


def test_a_device_does_not_open_with_a_pool_that_cannot_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="num_pages is 1000000000: the KV pool takes"):
        TorchDevice(EngineConfig(device="cpu", threads=1, num_pages=10**9)).open()
    leave(monkeypatch, 32 * MIB)
    with pytest.raises(ConfigError, match=r"kv_memory_gib is 1: .* control group has 0.00 GiB left beside"):
        TorchDevice(EngineConfig(device="cpu", threads=1)).open()


@pytest.mark.parametrize("fallback", [False, True])
@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2)])
def test_weights_beyond_the_memory_are_refused_before_they_are_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dtype: Any, size: int, fallback: bool
) -> None:
    """Under a control group with a limit. Of the checkpoint, only the headers are read."""
    config = EngineConfig(device="cpu", threads=1, num_pages=64, dtype=dtype, transformers_fallback=fallback)
    tensors = SafetensorsTensors(config.model_path)
    numbers = stored_bytes(tensors, 4) // 4
    assert stored_bytes(tensors, 2) == 2 * numbers
    matrices = {name: Rounding(4, 64) for name in tensors.names if len(tensors.shape(name)) > 1}
    rounded = sum(math.prod(tensors.shape(name)) for name in matrices)
    assert stored_bytes(tensors, 2, matrices) == 2 * (numbers - rounded) + rounded * 9 // 16

    def limited_to(limit: int) -> None:
        files = {"memory.max": f"{limit}", "memory.current": "0"}
        left = available(tmp_path, "0::/", files, 8 * GIB)
        assert left is not None
        leave(monkeypatch, left.bytes, left.source)

    def unread(*given: object, **named: object) -> None:
        raise AssertionError("weights are read")

    with monkeypatch.context() as patch:
        patch.setattr(Weights, "__init__", unread)
        patch.setattr("aioinfer.model.transformers_model.TransformersLM.__init__", unread)
        limited_to(size * numbers - 1)
        with pytest.raises(OutOfMemory, match=r"weights: .* GiB are needed, and the control group has"):
            TorchDevice(config).open()
        limited_to(size * numbers)
        with pytest.raises(AssertionError, match="weights are read"):
            TorchDevice(config).open()


def test_random_weights_beyond_the_memory_are_refused_as_they_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = EngineConfig(device="cpu", threads=1, num_pages=64, load_format="random")
    leave(monkeypatch, 1000)
    with pytest.raises(OutOfMemory, match="control group"):
        TorchDevice(config).open()


@pytest.mark.parametrize("kernels", ["native", "sdpa"])
def test_a_pool_takes_memory_as_it_is_used(kernels: Any) -> None:
    """Half a gigabyte in two layers, of which the first pages are written."""
    if kernels == "native":
        require("native")
    layers, sizes = (KVShape(4, 64),) * 2, {"num_pages": 16 * 1024, "page_size": 16}
    attention: Any = make_attention(
        Backend(kernels, "a test"), layers, dtype=torch.bfloat16, device=CPU, **sizes
    )
    stores = attention._cells if kernels == "native" else [*attention._pool.keys, *attention._pool.values]
    assert sum(store.nbytes for store in stores) >= 512 * MIB
    assert sum(resident(store.data_ptr(), store.nbytes) for store in stores) < 32 * MIB
    for store in stores:
        assert store.data_ptr() % 64 == 0
        assert not store.flatten()[-(1 << 20) :].any()
        store.flatten()[: 1 << 20].fill_(1)
    # Written or read, in pages that may be large.
    assert 0 < sum(resident(store.data_ptr(), store.nbytes) for store in stores) < 64 * MIB


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_pools_are_zeros_of_their_shape(dtype: torch.dtype) -> None:
    for shape in ((3, 2, 5), (1,), (0, 4)):
        found, wanted = pool_zeros(shape, dtype, CPU), torch.zeros(shape, dtype=dtype)
        assert torch.equal(found, wanted)
        assert (found.dtype, found.stride()) == (wanted.dtype, wanted.stride())


@pytest.mark.linux
def test_a_pool_is_not_made_of_memory_that_was_used_before() -> None:
    """The C library would give it some, and write zeros to all of it."""
    del_later = [torch.ones(31 * MIB, dtype=torch.uint8)]
    del_later.clear()  # from now on glibc keeps such sizes
    del_later = [torch.ones(24 * MIB, dtype=torch.uint8) for _ in range(4)]
    kept = [torch.ones(1000) for _ in range(100)]  # above them
    del_later.clear()
    pool = pool_zeros((20 * MIB,), torch.uint8, CPU)
    assert resident(pool.data_ptr(), pool.nbytes) < MIB
    del kept


def test_giving_memory_back_works_wherever_it_is_called() -> None:
    give_back()
