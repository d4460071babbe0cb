"""Pages of mapped files that were read count as no memory of the process, and lose nothing."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from aioinfer.checkpoint.tensors import SafetensorsTensors
from aioinfer.model import weights as module
from aioinfer.model.weights import Weights
from aioinfer.system.mapped_pages import give_back

SIZE = 1 << 20


def resident(file: Path) -> int:
    """Bytes of a file that count as memory of this process."""
    found, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            ours = line.endswith(str(file))
        elif ours and line.startswith("Rss:"):
            found += 1024 * int(line.split()[1])
    return found


def saved(path: Path, count: int = 2) -> Path:
    tensors = {f"{at}.weight": torch.randn(512, SIZE // 2048) for at in range(count)}
    save_file(tensors, path / "model.safetensors")
    return path / "model.safetensors"


@pytest.mark.linux
def test_what_is_read_is_given_back_and_can_be_read_again(tmp_path: Path) -> None:
    file = saved(tmp_path)
    tensor = SafetensorsTensors(tmp_path).read("1.weight")
    before = tensor.clone()
    assert resident(file) >= SIZE
    give_back([file], [tensor.data_ptr()])
    assert resident(file) == 0
    assert torch.equal(tensor, before)


def test_what_another_model_has_written_stays(tmp_path: Path) -> None:
    """Weights that are mapped are replaced in place."""
    file = saved(tmp_path)
    other, own = (SafetensorsTensors(tmp_path).read("0.weight") for _ in range(2))
    other.fill_(7.0)
    assert own.sum() != 7.0 * own.numel()
    give_back([file], [own.data_ptr()])
    assert bool((other == 7.0).all())


@pytest.mark.linux
def test_mappings_for_reading_are_given_back(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(bytes(range(256)) * (SIZE // 256))
    with file.open("rb") as opened:
        mapped = np.frombuffer(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ), dtype=np.uint8)
    total = mapped.sum(dtype=np.int64)
    assert resident(file) >= SIZE
    give_back([file], [])
    assert resident(file) == 0
    assert mapped.sum(dtype=np.int64) == total


@pytest.mark.linux
def test_weights_take_no_more_than_a_part_of_their_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = saved(tmp_path, count=8)
    monkeypatch.setattr(module, "_MOST_READ", 2 * SIZE)
    tensors = SafetensorsTensors(tmp_path)
    weights = Weights(tensors, dtype=torch.float32, device=torch.device("cpu"), files=[file])
    most = 0
    for at in range(8):
        weights.take(f"{at}.weight", (512, SIZE // 2048)).sum()
        most = max(most, resident(file))
    assert most < 5 * SIZE
    weights.give_back()
    assert resident(file) == 0
