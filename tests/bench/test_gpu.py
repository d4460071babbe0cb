"""The GPU bench's arithmetic is right, and a part that fails stays alone. A rehearsal is in test_benches."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
from pathlib import Path

import pytest
import torch

from aioinfer.model.attention.pool import KVPool
from aioinfer.model.inspection import LoadOptions
from aioinfer.model.loader import load_model
from aioinfer.text.tokenizer import HFTokenizer
from bench.command import main
from bench.gpu.command import run_part
from bench.gpu.plan import FULL, REHEARSAL, Plan
from bench.gpu.roofline import Peaks, decode_step
from bench.gpu.shapes import SHAPES, shape_of, write_model, write_tokenizer
from bench.gpu.workload import workload
from bench.report import Report
from tests.tiers import PROGRAM, nightly

#: of an H200
H200 = Peaks(bandwidth=4.3e12, flops=790e12)
#: ideal tokens/s of batches of 1, 8, 64 and 256 at a context of 1024, by hand
DECODES = {
    "0.6b": (3_280, 16_060, 31_300, 34_460),
    "8b": (281, 2_103, 11_060, 18_370),
    "14b": (153, 1_173, 7_090, 13_400),
}
#: GB of weights that a step reads, KiB of a position
SIZES = {"0.6b": (1.19, 112), "8b": (15.14, 144), "14b": (27.98, 160)}


def test_the_offline_workload_is_nano_vllms() -> None:
    load = workload(FULL)
    assert (len(load.prompts), sum(load.prompt_lengths), sum(load.outputs)) == (256, 142_827, 133_966)
    assert max(load.outputs) == 1024


@pytest.mark.parametrize("name", DECODES)
def test_the_roofline_is_the_known_one(name: str) -> None:
    shape = SHAPES[name]
    for batch, expected in zip((1, 8, 64, 256), DECODES[name], strict=True):
        assert batch / decode_step(shape, 1024 * batch, batch, H200) == pytest.approx(expected, rel=2e-3)
    assert shape.step_bytes / 1e9 == pytest.approx(SIZES[name][0], abs=0.005)
    assert shape.kv_bytes / 1024 == SIZES[name][1]


@pytest.mark.parametrize("tied", [True, False])
def test_a_step_reads_the_parameters_of_the_model_that_runs(tmp_path: Path, tied: bool) -> None:
    shape = dataclasses.replace(SHAPES["tiny"], tied=tied)
    folder = write_model(shape, tmp_path)
    options = LoadOptions(dtype="auto", device=torch.device("cpu"), load_format="random")
    spec = load_model(folder, options).spec
    embedding = 0 if tied else shape.vocab * shape.hidden
    assert shape.step_bytes == 2 * (spec.num_parameters - embedding)
    assert shape.kv_bytes == KVPool.bytes_per_page(spec.kv_layers, 1, spec.dtype)


def test_numbers_of_8_bits_are_half_of_what_is_read() -> None:
    shape, small = SHAPES["8b"], shape_of("8b", {"quantization": "fp8", "kv_dtype": "fp8"})
    assert shape_of("8b", {"quantization": "auto"}) == shape
    assert small.kv_bytes == 2 * 36 * 8 * 129
    scales = 36 * (48 * 128 + 2 * 12_288 + 2 * 4096)
    assert shape.step_bytes - small.step_bytes == shape.layer_parameters - 4 * scales


def test_the_made_up_tokenizer_spells_every_token(tmp_path: Path) -> None:
    write_tokenizer(512, tmp_path)
    tokenizer = HFTokenizer.load(tmp_path)
    assert tokenizer.vocab_size == 512
    assert tokenizer.decode(range(256, 260)) == " aaa baa caa daa"
    assert len({tokenizer.decode([at]) for at in range(256, 512)}) == 256
    assert tokenizer.decode(tokenizer.encode("naïve\n")) == "naïve\n"


async def run(plan: Plan, report: Report) -> None:
    """A part that goes wrong as its plan says, in a process of its own."""
    report.row(value=1.5)
    if plan.shape == "raises":
        raise ValueError("on purpose")
    if plan.shape == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    # And leaves a thread that never ends.
    threading.Thread(target=threading.Event().wait).start()
    if plan.shape == "hangs":
        threading.Event().wait()


@nightly(PROGRAM)
@pytest.mark.parametrize(
    ("how", "error"),
    [("raises", "on purpose"), ("dies", "exit code -9"), ("hangs", "ended after"), ("works", None)],
)
def test_a_part_that_fails_has_its_rows(how: str, error: str | None) -> None:
    report = Report()
    plan = Plan(REHEARSAL, "cpu", "float32", how)
    run_part("tests.bench.test_gpu", plan, 60.0 if how == "hangs" else 240.0, report)
    assert report.rows == [{"value": 1.5}]
    assert report.environment is not None
    assert report.failed == (error is not None)
    assert error is None or error in report.errors[0]


@pytest.mark.parametrize(
    "arguments", [["nothing"], ["--set", "windw=1"], ["--set", "overlap_steps=9"], ["--set", "overlap_steps"]]
)
def test_a_typo_is_found_before_anything_starts(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["gpu", *arguments])
    assert leaving.value.code == 2
    said = capsys.readouterr()
    assert "error: " in said.err
    assert not said.out


def test_a_setting_holds_unless_the_bench_is_about_it(tmp_path: Path) -> None:
    from bench.gpu.engines import engine_config

    settings = {"overlap_steps": "2", "max_step_tokens": "99", "attention_backend": "sdpa"}
    config = engine_config(Plan(REHEARSAL, "cpu", "float32", "tiny", settings), tmp_path, overlap_steps=0)
    assert (config.overlap_steps, config.max_step_tokens, config.attention_backend) == (0, 99, "sdpa")
    assert config.load_format == "random"
