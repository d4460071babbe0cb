"""Diffusion models on real devices: real attention over pages, on the CPU and behind the CUDA backend."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from aioinfer.config import EngineConfig
from aioinfer.errors import ConfigError
from aioinfer.execution.build import Parts, build
from aioinfer.execution.decoding import kind as kind_of
from aioinfer.execution.device import DeviceInfo, StepResult
from aioinfer.execution.grammar_worker import GrammarWorker
from aioinfer.execution.torch_device import TorchDevice
from aioinfer.model.inspection import LoadOptions
from aioinfer.model.kernels import choose_attention
from aioinfer.model.loader import load_model
from aioinfer.observe.timeline import DeviceLane
from aioinfer.params import DiffusionParams, SamplingParams
from tests.execution.block_driver import Driven, Driver, check
from tests.execution.fake_cuda import FakeCudaDevice, install
from tests.model.block_models import MASK, VOCAB, Plain, block_config, write_checkpoint
from tests.tiers import SECONDS, rest

SIZE = 8
CONFIG = block_config(num_hidden_layers=2)
KINDS: list[dict[str, Any]] = [
    {"threshold": 0.1},
    {"algorithm": "joint_threshold", "threshold": 0.1, "edit_threshold": 0.1, "max_post_edits": 3},
    {"algorithm": "static_steps", "steps": 3},
    {"algorithm": "entropy_bound", "entropy_bound": 5.0},
    {"threshold": 0.2, "steps": 4},
]


def config(path: Path, **changes: Any) -> EngineConfig:
    settings = {
        "page_size": 3,
        "num_pages": 80,
        "max_running_requests": 6,
        "attention_backend": "sdpa",
        "decode_graph_rows": 0,
        **changes,
    }
    return EngineConfig(
        model=str(path), dtype="float32", device="cpu", block_size=SIZE, max_step_tokens=200, **settings
    )


def drive(
    device: TorchDevice,
    info: DeviceInfo,
    ahead: int,
    plain: Plain,
    kinds: Sequence[dict[str, Any]] = KINDS,
    *,
    size: int = SIZE,
    blocks: int = 3,
) -> None:
    """Requests of all algorithms, in rows of every kind, against the description of model and algorithm."""
    assert info.page_size is not None
    rng, each = random.Random(ahead), 80 // len(kinds)
    requests = []
    for key, kind in enumerate(kinds):
        prompt = [
            rng.choice([MASK, rng.randrange(VOCAB)]) for _ in range(rng.choice([1, size - 1, 2 * size]))
        ]
        # Behind nothing but masks all positions say the same, and a rounding error decides who is first.
        prompt[0] = rng.randrange(MASK)
        temperature = 0.0 if key % 2 == 0 else 0.7
        params = SamplingParams(temperature=temperature, diffusion=DiffusionParams(**kind))
        pages = list(range(1 + key * each, 1 + (key + 1) * each))
        requests.append(Driven(key, prompt, params, key, key + 1, pages))
    driver = Driver(lambda step: device.launch(device.prepare(step)), requests, size, info.page_size, ahead)
    driver.run(blocks, ahead=ahead)
    for request in requests:
        check(request, lambda before, ids: plain.logits(before + ids)[-size:].float(), size, MASK, 1e-2)


@rest(SECONDS)
@pytest.mark.parametrize(("cuda", "ahead"), [(False, 0), (True, 0), (True, 1)])
def test_a_model_denoises_as_model_and_algorithm_are_described(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuda: bool, ahead: int
) -> None:
    tensors = write_checkpoint(tmp_path, CONFIG)
    if cuda:
        recorded = install(monkeypatch)
    device = (FakeCudaDevice if cuda else TorchDevice)(config(tmp_path, max_model_len=77))
    info = device.open()
    assert (info.page_size, info.block_size, info.mask_token_id) == (SIZE, SIZE, MASK)
    assert info.max_model_len == 72, "whole blocks"
    drive(device, info, ahead, Plain(CONFIG, tensors, SIZE))
    if cuda:
        assert not recorded.recordings, "nothing was to be captured"
    device.close()


def test_without_a_number_of_pages_the_pool_is_sized_by_a_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path, CONFIG)
    install(monkeypatch)
    info = FakeCudaDevice(config(tmp_path, num_pages=None, page_size=17)).open()
    assert (info.page_size, info.max_model_len) == (24, 256)
    assert info.num_pages == 6 * -(-256 // 24)


def test_what_cannot_hold_blocks_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIG)
    model = load_model(tmp_path, LoadOptions(dtype="float32", device=torch.device("cpu"), block_size=128))
    with pytest.raises(ConfigError, match=r"max_step_tokens is 200; two blocks of 128"):
        kind_of(model.spec).fit(config(tmp_path))
    with pytest.raises(ConfigError, match=r"less than a block of 8"):
        TorchDevice(config(tmp_path, max_model_len=7)).open()


@pytest.mark.parametrize(
    "settings",
    [{}, {"max_running_requests": 1, "max_model_len": 8}, {"max_running_requests": 100, "max_model_len": 20}],
)
def test_the_largest_steps_run_and_touch_the_junk_page_alone(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    write_checkpoint(tmp_path, CONFIG)
    cpu = torch.device("cpu")
    model = load_model(tmp_path, LoadOptions(dtype="float32", device=cpu, block_size=SIZE))
    decoding = kind_of(model.spec)
    fitted = decoding.fit(config(tmp_path, **settings))
    choice = choose_attention(cpu, model.spec.head_dims, torch.float32, "sdpa")
    parts = Parts(fitted, decoding, model, choice, cpu, GrammarWorker(), DeviceLane())
    backend, size = build(parts)
    known, blocks = parts.largest_steps(size.max_model_len)
    results: list[StepResult] = []
    for packed in (known, blocks):
        assert set(packed.sections["slot_mapping"] // fitted.page_size) == {0}
        assert max(packed.kv_lens) <= size.max_model_len
        results.append(backend.launch(packed).wait())
    assert not results[0].blocks
    assert len(results[1].blocks) == min(fitted.running_requests, 200 // SIZE)
    assert all(state.rounds == 1 and not state.failed for state in results[1].blocks.values())
