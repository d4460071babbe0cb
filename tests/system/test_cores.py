"""By default there are as many threads as there are cores to be had, also in a container."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from aioinfer.config import EngineConfig
from aioinfer.errors import ConfigError
from aioinfer.execution import torch_threads
from aioinfer.execution.torch_device import TorchDevice
from aioinfer.execution.torch_threads import TorchThreads
from aioinfer.native import bindings
from aioinfer.native.bindings import ThreadsUnavailable
from aioinfer.system.cores import check_threads, cpu_quota, default_threads


@pytest.mark.parametrize(
    ("membership", "files", "quota"),
    [
        ("0::/", {}, None),
        ("0::/", {"cpu.max": "max 100000"}, None),
        ("0::/", {"cpu.max": "150000 100000"}, 1.5),
        # The tightest of a group and those around it; nobody else's.
        ("0::/a/b", {"a/cpu.max": "300000 100000", "a/b/cpu.max": "max 100000"}, 3.0),
        ("0::/a/b", {"a/cpu.max": "300000 100000", "a/b/cpu.max": "50000 50000", "c/cpu.max": "1 9"}, 1.0),
        # The path is the host's, the mount the container's.
        ("0::/kube/pod7", {"cpu.max": "200000 100000"}, 2.0),
        ("0::/../other", {"cpu.max": "200000 100000"}, 2.0),
        ("4:cpu:/d\n3:memory:/e", {"cpu/d/cpu.cfs_quota_us": "50", "cpu/d/cpu.cfs_period_us": "100"}, 0.5),
        ("4:cpu,cpuacct:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100"}, None),
        ("0::/", {"cpu.max": "rubbish"}, None),
    ],
)  # fmt: skip
def test_the_quota_is_the_tightest_of_the_groups(
    tmp_path: Path, membership: str, files: dict[str, str], quota: float | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    mine = tmp_path / "membership"
    mine.write_text(membership + "\n")
    assert cpu_quota(tmp_path, mine) == quota


def test_without_control_groups_there_is_no_quota(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path, tmp_path / "none") is None


@pytest.mark.parametrize(
    ("usable", "quota", "threads"), [(8, None, 8), (8, 1.5, 2), (8, 0.2, 1), (2, 16.0, 2), (8, 4.0, 4)]
)
def test_threads_have_a_core_each_and_the_time_of_it(usable: int, quota: float | None, threads: int) -> None:
    assert default_threads(usable, quota) == threads


@pytest.mark.parametrize(("asked", "used"), [(None, 1), (2, 2)])
def test_a_device_takes_what_is_granted_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, asked: int | None, used: int
) -> None:
    monkeypatch.setattr(torch_threads, "cpu_quota", lambda: 0.7)
    before = torch.get_num_threads()
    device = TorchDevice(EngineConfig(device="cpu", threads=asked))
    assert device.open().threads == used
    assert torch.get_num_threads() == used
    device.close()
    assert torch.get_num_threads() == before


def threads_here_and_elsewhere() -> list[int]:
    found = [torch.get_num_threads()]
    other = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    other.start()
    other.join()
    return found


@pytest.mark.native
@pytest.mark.parametrize(
    ("thread", "attention", "beside"),
    [("aioinfer-launch", "auto", 1), ("aioinfer-launch", "sdpa", 2), ("of a caller", "auto", 2)],
)
def test_torch_has_one_thread_beside_kernels_and_all_of_them_elsewhere(
    thread: str, attention: Any, beside: int
) -> None:
    found: list[list[int]] = []

    def open_and_close() -> None:
        found.append(threads_here_and_elsewhere())
        device = TorchDevice(EngineConfig(device="cpu", threads=2, attention_backend=attention))
        assert device.open().threads == 2
        found.append(threads_here_and_elsewhere())
        device.close()
        found.append(threads_here_and_elsewhere())

    launch = threading.Thread(target=open_and_close, name=thread)
    launch.start()
    launch.join()
    before, opened, closed = found
    assert (opened, closed) == ([beside, 2], before)


@pytest.mark.native
def test_engines_that_open_side_by_side_leave_torchs_threads_alone() -> None:
    before, devices = threads_here_and_elsewhere(), [TorchThreads() for _ in range(4)]
    done = threading.Barrier(len(devices))

    def open_and_close(threads: TorchThreads) -> None:
        for _ in range(20):
            threads.take(EngineConfig(device="cpu", threads=before[0]))
            threads.leave_one()
            assert torch.get_num_threads() == 1
            threads.give_back()
        done.wait(60)

    launches = [
        threading.Thread(target=open_and_close, args=(each,), name="aioinfer-launch") for each in devices
    ]
    for launch in launches:
        launch.start()
    for launch in launches:
        launch.join()
    assert not done.broken
    assert threads_here_and_elsewhere() == before


def test_far_more_threads_than_cores_are_refused() -> None:
    """They would be created, and every step would wait for all of them hundreds of times."""
    for threads, cores in ((16, 1), (8, 2), (64, 16)):
        check_threads(threads, cores)
    for threads, cores in ((17, 1), (65, 16), (10_000, 128)):
        with pytest.raises(ConfigError, match=rf"^threads: {threads} are too many for {cores} cores"):
            check_threads(threads, cores)
    before = torch.get_num_threads()
    with pytest.raises(ConfigError, match=r"^threads: 10000 are too many"):
        TorchDevice(EngineConfig(device="cpu", threads=10_000)).open()
    assert torch.get_num_threads() == before


@pytest.mark.native
def test_threads_that_the_system_refuses_are_an_error_of_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(threads: int) -> None:
        raise ThreadsUnavailable(f"thread 1 of {threads} cannot be created")

    monkeypatch.setattr(bindings, "shared_thread_pool", refuse)
    device = TorchDevice(EngineConfig(device="cpu", threads=3))
    with pytest.raises(ConfigError, match=r"^threads: thread 1 of 3 cannot be created"):
        device.open()
    device.close()
