"""Packed weights in the cache: mapped, they give the same bits; what is not whole is made anew."""

from __future__ import annotations

import fcntl
import gc
import logging
import os
import shutil
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import pytest
import torch

from aioinfer import Engine, EngineConfig, SamplingParams
from aioinfer.cli.doctor import examine
from aioinfer.errors import ConfigError
from aioinfer.execution.sizing import check_pool
from aioinfer.ledger import LEDGER
from aioinfer.model import weights_cache
from aioinfer.model.inspection import LoadOptions
from aioinfer.model.loader import load_model
from aioinfer.model.native_linear import NativeLinear
from aioinfer.model.quantization import Quantization, Rounding
from aioinfer.model.weights import Weights
from aioinfer.model.weights_cache import MappedMemory, WeightsWriter
from aioinfer.native import build as building
from aioinfer.native.bindings import InvalidArguments, shared_thread_pool
from aioinfer.system.memory import Available
from tests.model.block_models import block_config, write_checkpoint
from tests.native.support import prompt_logits
from tests.tiers import SECONDS, grid, rest

CPU = torch.device("cpu")
DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "cut": lambda content: content[: len(content) // 2],
    "without its end": lambda content: content[:-1],
    "a byte flipped": lambda content: content[:5000] + bytes([content[5000] ^ 1]) + content[5001:],
    "longer": lambda content: content + b"x",
    "of another kind": lambda content: content[:-8] + b"aioinfW0",
    "with an index beyond it": lambda content: content[:-24] + b"\xff" * 8 + content[-16:],
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache that this test has for itself."""
    directory = tmp_path / "cache"
    monkeypatch.setenv("AIOINFER_CACHE", str(directory))
    return directory


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the tensors that are read."""
    names: list[str] = []
    read = Weights._read

    def counted(self: Weights, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        names.append(name)
        return read(self, name, shape)

    monkeypatch.setattr(Weights, "_read", counted)
    return names


def load(
    path: Path, quantization: Quantization = "none", *told: Any, cached: bool = True, **options: Any
) -> Any:
    block = 4 if path.name == "llada2" else None
    options = {"dtype": "float32", "kernels": "native", "block_size": block, **options}
    options |= {"quantization": quantization, "cache_weights": cached}
    return load_model(path, LoadOptions(device=CPU, **options), *told)


def files(cache: Path) -> list[str]:
    """Names of all but what is kept of config.json."""
    return sorted(path.name for path in cache.iterdir() if path.suffix != ".kept")


KINDS = ["llama-biases", "qwen3-moe-mixed", "llada2", "gpt2-wide", "lfm2-biases", "gemma4-experts"]
FURTHER_KINDS = ["qwen3-wide-untied", "gpt-oss", "glm4", "qwen3.5-moe", "qwen3-next", "gemma4-shared"]
FURTHER_KINDS += ["gemma4-keys"]


@pytest.mark.parametrize("kind", grid(KINDS, FURTHER_KINDS))
@pytest.mark.parametrize("quantization", grid(["none", "int4"], ["int8"]))
@pytest.mark.parametrize("dtype", grid(["bfloat16"], ["float32"]))
def test_mapped_weights_give_the_same_bits_and_matrices_are_not_read_again(
    cache: Path,
    checkpoint: Callable[[str], Any],
    reads: list[str],
    kind: str,
    quantization: Quantization,
    dtype: str,
) -> None:
    """Tied and untied, with biases, with experts and their biases, with a shared one, with rows in another
    order, and transposed, with rows that are there twice, with inputs by layer."""
    path = cache.parent / kind
    if kind == "llada2":
        write_checkpoint(path, block_config(moe_intermediate_size=32, intermediate_size=48))
    else:
        path = checkpoint(kind)[0]
    plain = load(path, quantization, cached=False, dtype=dtype)
    wanted = prompt_logits(plain)
    first = load(path, quantization, dtype=dtype)
    assert first.spec.layer_reason.endswith("; weights were cached and mapped")
    reads.clear()
    second = load(path, quantization, dtype=dtype)
    assert second.spec.layer_reason.endswith("; weights are mapped from the cache")
    # What is left are vectors, the routers, positions, and the table of which rows are read.
    matrices = ("_proj.weight", "_proj", "c_attn.weight", "c_fc.weight", "wte.weight")
    matrices += ("_qkv.weight", "_ba.weight", ".w1.weight", "embed_tokens.weight", "head.weight")
    matrices += ("input_gate.weight", "_projection.weight")
    assert not [name for name in reads if name.endswith(matrices) and "router" not in name]
    assert first.spec.num_parameters == second.spec.num_parameters == plain.spec.num_parameters
    del plain
    for model in (first, second):
        assert torch.equal(prompt_logits(model), wanted)
    assert len(files(cache)) == 1


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_written_anew(
    cache: Path, checkpoint: Callable[[str], Any], caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    path = checkpoint("qwen3")[0]
    wanted = prompt_logits(load(path, "int8"))
    [name] = files(cache)
    whole = (cache / name).read_bytes()
    (cache / name).write_bytes(DAMAGES[damage](whole))
    assert torch.equal(prompt_logits(load(path, "int8")), wanted)
    assert files(cache) == [name]
    assert (cache / name).read_bytes() == whole
    assert [record.levelname for record in caplog.records if "made anew" in record.message] == ["WARNING"]


def test_weights_of_another_code_that_lack_a_name_are_made_anew(
    cache: Path, checkpoint: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint("qwen3")[0]
    wanted = prompt_logits(load(path))
    add = weights_cache.WeightsWriter.add
    with monkeypatch.context() as patch:
        patch.setattr(
            weights_cache.WeightsWriter,
            "add",
            lambda self, name, *memory: add(self, name.replace("mlp", "old"), *memory),
        )
        shutil.rmtree(cache)
        load(path)
    assert torch.equal(prompt_logits(load(path)), wanted)
    assert load(path).spec.layer_reason.endswith("are mapped from the cache")


def test_a_changed_checkpoint_replaces_its_file_and_leaves_those_of_others(
    cache: Path, checkpoint: Callable[[str], Any]
) -> None:
    path, other = cache.parent / "mine", checkpoint("qwen3")[0]
    shutil.copytree(other, path)
    load(other)
    load(path, "int8")
    load(path)
    three = files(cache)
    assert len(three) == 3
    tensors = checkpoint("qwen3-wide-untied")[0]
    shutil.rmtree(path)
    shutil.copytree(tensors, path)
    wanted = prompt_logits(load(path, cached=False))
    assert torch.equal(prompt_logits(load(path)), wanted)
    after = files(cache)
    assert len(after) == 3
    assert len(set(three) & set(after)) == 2


def test_the_same_directory_by_another_path_has_the_same_file(
    cache: Path, checkpoint: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint("qwen3")[0]
    load(path)
    link = cache.parent / "link"
    link.symlink_to(path)
    monkeypatch.chdir(path.parent)
    for other in (link, Path(path.name)):
        assert load(other).spec.layer_reason.endswith("are mapped from the cache")
    assert len(files(cache)) == 1


def test_files_of_other_kernels_and_of_other_code_are_told_apart(
    cache: Path, checkpoint: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of other kernels stay, as of another processor; code replaces what it would write otherwise."""
    path, pool = checkpoint("qwen3")[0], shared_thread_pool(torch.get_num_threads())
    load(path)
    with monkeypatch.context() as patch:
        patch.setattr(pool.kernels, "name", "kernels-of-another-processor.so")
        load(path)
    assert len(files(cache)) == 2
    with monkeypatch.context() as patch:
        patch.setattr(weights_cache, "own_code", lambda: "other code")
        assert load(path).spec.layer_reason.endswith("were cached and mapped")
    assert len(files(cache)) == 2


def test_mapped_weights_count_as_memory_that_a_pool_cannot_have(
    checkpoint: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LEDGER, "_shares", weakref.WeakSet())  # of this test alone
    model = load(checkpoint("qwen3")[0])
    mapped = LEDGER.untaken()
    assert mapped > 10_000
    again = load(checkpoint("qwen3")[0])  # the same memory
    assert LEDGER.untaken() == mapped
    config = EngineConfig(num_pages=9)
    monkeypatch.setattr(LEDGER, "available", lambda: Available(mapped + 5000, "machine"))
    check_pool(config, 5000)
    with pytest.raises(ConfigError, match=r"has 0\.00 GiB left beside 0\.00 GiB that this process"):
        check_pool(config, 5001)
    del model, again
    gc.collect()
    check_pool(config, mapped + 5000)


class Cancelled(BaseException):
    """What ends a start."""


def cancelled(path: Path, when: Callable[[str, int, int], bool]) -> list[tuple[str, int, int]]:
    """A start that ends at the first look at its progress that this is true of; returns all looks."""
    looks: list[tuple[str, int, int]] = []

    def progress(*look: Any) -> None:
        looks.append(look)
        if when(*look):
            raise Cancelled

    with pytest.raises(Cancelled):
        load(path, "none", progress)
    return looks


def test_a_start_that_is_cancelled_goes_on_next_time(cache: Path, checkpoint: Callable[[str], Any]) -> None:
    """While weights are written, and while a file is checked."""
    path = checkpoint("qwen3")[0]
    cancelled(path, lambda stage, done, total: stage == "weights" and done > total // 2)
    assert files(cache) == []
    assert load(path).spec.layer_reason.endswith("were cached and mapped")
    cancelled(path, lambda *look: True)
    assert load(path).spec.layer_reason.endswith("are mapped from the cache")


def test_a_file_that_is_mapped_can_be_replaced_and_removed(
    cache: Path, checkpoint: Callable[[str], Any]
) -> None:
    path = checkpoint("qwen3")[0]
    model = load(path)
    wanted = prompt_logits(model)
    shutil.rmtree(cache)
    load(path)
    [name] = files(cache)
    (cache / name).unlink()
    assert torch.equal(prompt_logits(model), wanted)


@pytest.mark.parametrize("after", [0, 1, 5])
def test_a_full_disk_costs_the_file_and_not_the_start(
    cache: Path,
    checkpoint: Callable[[str], Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    after: int,
) -> None:
    path, writes, fdopen = checkpoint("qwen3")[0], iter(range(after)), os.fdopen

    class Full:
        def __init__(self, file: IO[bytes]) -> None:
            self._file = file

        def write(self, content: Any) -> int:
            if next(writes, None) is None:
                raise OSError(28, "No space left on device")
            return self._file.write(content)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

    wanted = prompt_logits(load(path, cached=False))

    def opened(descriptor: int, mode: str, **given: Any) -> Any:
        file = fdopen(descriptor, mode, **given)
        return Full(file) if "w" in mode else file

    monkeypatch.setattr(os, "fdopen", opened)
    model = load(path)
    assert torch.equal(prompt_logits(model), wanted)
    assert "could not be cached: [Errno 28]" in model.spec.layer_reason
    assert files(cache) == []
    assert "No space left" in caplog.text


def test_a_cache_that_cannot_be_written_costs_the_file_and_not_the_start(
    cache: Path, checkpoint: Callable[[str], Any]
) -> None:
    cache.write_text("not a directory")
    model = load(checkpoint("qwen3")[0])
    assert "could not be cached" in model.spec.layer_reason
    assert prompt_logits(model).isfinite().all()


def test_of_several_that_start_at_once_one_writes_the_file(
    cache: Path, checkpoint: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that all of them share its memory. The others wait, and write it if nothing came of it."""
    path = checkpoint("qwen3")[0]
    writing, waiting = threading.Event(), threading.Event()
    commit, fails = WeightsWriter.commit, iter([True, False])

    def slow(writer: WeightsWriter, *args: Any) -> bool:
        writing.set()
        assert waiting.wait(60)
        if next(fails):
            writer._give_up(OSError("the disk is full"))
        return commit(writer, *args)

    def looked(seconds: float) -> None:
        waiting.set()
        threading.Event().wait(seconds)

    monkeypatch.setattr(WeightsWriter, "commit", slow)
    monkeypatch.setattr("aioinfer.native.turns.time.sleep", looked)
    with ThreadPoolExecutor(3) as threads:
        first = threads.submit(load, path)
        assert writing.wait(60)
        others = [threads.submit(load, path) for _ in range(2)]
        reasons = [each.result().spec.layer_reason.rpartition("; ")[2] for each in (first, *others)]
    assert reasons[0] == "weights could not be cached: the disk is full"
    assert sorted(reasons[1:]) == ["weights are mapped from the cache", "weights were cached and mapped"]
    assert len(files(cache)) == 1


@rest(SECONDS)
def test_a_start_that_is_cancelled_while_another_one_writes_does_not_wait(
    cache: Path, checkpoint: Callable[[str], Any]
) -> None:
    path = checkpoint("qwen3")[0]
    load(path)
    [name] = files(cache)
    (cache / name).unlink()
    lock = cache / f".writing-{Path(name).stem}"
    with lock.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        turns = iter([False, False, True])
        looks = cancelled(path, lambda *look: next(turns))
    assert looks == [("weights", 0, 1)] * 3  # nothing is read meanwhile
    assert load(path).spec.layer_reason.endswith("weights were cached and mapped")
    assert files(cache) == [name]


def test_what_was_not_used_for_long_and_what_killed_processes_left_is_removed(
    cache: Path, checkpoint: Callable[[str], Any]
) -> None:
    path, day = checkpoint("qwen3")[0], 86400.0
    load(path)
    ages = {"weights-a-b.packed": 40 * day, "weights-c-d.packed": 20 * day}
    ages |= {".writing-a": day, ".writing-b": 9.0, ".writing-c": day}
    for name, age in ages.items():
        (cache / name).write_bytes(b"")
        os.utime(cache / name, (time.time() - age,) * 2)
    with (cache / ".writing-c").open("rb") as slow:
        fcntl.flock(slow, fcntl.LOCK_EX)
        assert load(path).spec.layer_reason.endswith("are mapped from the cache")
    assert set(ages) & set(files(cache)) == {"weights-c-d.packed", ".writing-b", ".writing-c"}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"kernels": "sdpa"}, "these layers are sdpa, without packed weights"),
        ({"force_transformers": True, "kernels": "auto"}, "is transformers' own"),
        ({"load_format": "random"}, "random weights are not cached"),
    ],
)
def test_models_without_packed_weights_are_refused(
    checkpoint: Callable[[str], Any], options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^cache_weights: .*{reason}"):
        load(checkpoint("qwen3")[0], **options)


def test_the_doctor_refuses_what_an_engine_refuses() -> None:
    config = EngineConfig(device="cpu", attention_backend="sdpa", cache_weights=True)
    assert examine(config)[-1].text.startswith("cache_weights: these layers are sdpa")


def test_without_a_home_the_setting_is_named(
    checkpoint: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def homeless() -> Path:
        raise building.BuildFailed("there is no home directory")

    monkeypatch.setattr(building, "cache_directory", homeless)
    with pytest.raises(ConfigError, match=r"^cache_weights: there is no home directory"):
        load(checkpoint("qwen3")[0])


@pytest.mark.parametrize("rounding", [None, Rounding(8, 32), Rounding(4, 32)])
def test_mapped_memory_of_another_size_is_refused(rounding: Rounding | None) -> None:
    pool = shared_thread_pool(1)
    packed = NativeLinear(pool, torch.randn(64, 96), None, rounding).packed
    address, size = packed.memory
    for shape, taken in (((64, 96), size - 64), ((64, 96), size + 1), ((96, 96), size), ((64, 128), size)):
        with pytest.raises(InvalidArguments, match="another size"):
            NativeLinear.mapped(
                pool, MappedMemory(address, taken, packed), None, shape, rounding, dtype=torch.float32
            )


async def test_an_engine_says_that_its_weights_are_mapped(caplog: pytest.LogCaptureFixture) -> None:
    config = EngineConfig(device="cpu", attention_backend="native", cache_weights=True)
    question = [{"role": "user", "content": "What is 17 + 25?"}]
    with caplog.at_level(logging.INFO, "aioinfer"):
        for told in ("weights were cached and mapped)", "weights are mapped from the cache)"):
            async with Engine(config) as engine:
                result = await engine.generate(question, SamplingParams(temperature=0))
                assert engine.info.kernels["layers"].endswith(told)
            assert "42" in result.text
    assert caplog.text.count("packed weights are written to") == 1
