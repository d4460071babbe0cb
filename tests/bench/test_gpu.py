"""The GPU bench runs end to end without one, its arithmetic is right, and what fails in it stays alone."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import bench.gpu.isolation as isolation
from aioinfer.model.attention.pool import KVPool
from aioinfer.model.loader import LoadOptions, load_model
from aioinfer.text.tokenizer import HFTokenizer
from bench.command import main
from bench.gpu.command import _OPTIONAL, listen, run_all
from bench.gpu.kernels import prefill_flops
from bench.gpu.overlap import covered, device_seconds
from bench.gpu.peer import _collect
from bench.gpu.plan import FULL, PARTS, QUICK, REHEARSAL, Part, Plan
from bench.gpu.report import PartReport
from bench.gpu.roofline import Peaks, Shape, decode_phases, decode_step, offline
from bench.gpu.shapes import SHAPES, shape_of, write_model, write_tokenizer
from bench.gpu.workload import offline_workload
from bench.report import Report
from tests.tiers import PROGRAM, nightly

ROOT = Path(__file__).parents[2]
#: of the H200 that the table below was made for
H200 = Peaks(bandwidth=4.3e12, flops=790e12)
PLAN = Plan(REHEARSAL, "cpu", "float32", "tiny", rehearsal=True)


@nightly(PROGRAM)
def test_a_rehearsal_runs_everything(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    done = subprocess.run(
        [sys.executable, "-m", "bench", "gpu", "--rehearse", "--json", str(file), "--commit", "abc"],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = map(json.loads, file.read_text().splitlines())
    lines = line["sections"]
    assert line["environment"]["versions"]["torch"]
    assert line["environment"]["commit"] == "abc"
    assert line["size"] == "rehearsal"
    assert list(lines) == ["kernels", "model", "offline", "peer", "overlap", "endpoint"]
    for line in lines.values():
        assert line["rows"]
        assert "errors" not in line
    assert all(row["error"] < 1e-5 for row in lines["kernels"]["rows"] if "error" in row)
    decodes = [row["case"] for row in lines["kernels"]["rows"] if "gb_per_s" in row]
    assert decodes == ["decode triton", "decode small", "decode wide", "decode sdpa"] * len(REHEARSAL.decodes)
    assert [row["batch"] for row in lines["model"]["rows"]] == [1, 4]
    load = offline_workload(REHEARSAL.requests, *REHEARSAL.lengths, REHEARSAL.largest_id)
    assert lines["offline"]["facts"]["output_tokens"] == sum(load.outputs)
    # In float32 two implementations of one model say the same.
    ours, theirs = lines["peer"]["rows"]
    assert ours["tokens"] == theirs["tokens"] == sum(load.first(REHEARSAL.peer_requests, 20).outputs)
    assert theirs["equal_tokens"] == 1
    assert [(row["overlap_steps"], row["mode"]) for row in lines["overlap"]["rows"]] == list(REHEARSAL.ways)
    assert [row["way"] for row in lines["endpoint"]["rows"]] == ["in process", "HTTP"]


# -- arithmetic ----------------------------------------------------------------------------------------


def test_the_offline_workload_is_nano_vllms() -> None:
    load = offline_workload()
    assert (len(load.prompts), sum(load.prompt_lengths), sum(load.outputs)) == (256, 142_827, 133_966)
    assert max(load.outputs) == 1024
    assert load.first(3, 500).prompts == load.prompts[:3]
    assert load.first(9, 500).outputs == [min(output, 500) for output in load.outputs[:9]]


#: ideal tokens/s of batches of 1, 8, 64 and 256 at a context of 1024, by hand
DECODES = {
    "0.6b": (3_280, 16_060, 31_300, 34_460),
    "8b": (281, 2_103, 11_060, 18_370),
    "14b": (153, 1_173, 7_090, 13_400),
}
#: GB of weights that a step reads, KiB of a position, seconds of the offline workload's prefill and decode
WORKLOADS = {
    "0.6b": (1.19, 112, 0.17, 3.55),
    "8b": (15.14, 144, 2.55, 8.05),
    "14b": (27.98, 160, 4.83, 11.8),
}


@pytest.mark.parametrize("name", DECODES)
def test_the_roofline_is_the_known_one(name: str) -> None:
    shape = SHAPES[name]
    for batch, expected in zip((1, 8, 64, 256), DECODES[name], strict=True):
        assert batch / decode_step(shape, 1024 * batch, batch, H200) == pytest.approx(expected, rel=2e-3)
    weights, position, prefill, decode = WORKLOADS[name]
    assert shape.step_bytes / 1e9 == pytest.approx(weights, abs=0.005)
    assert shape.kv_bytes / 1024 == position
    load = offline_workload()
    found = offline(shape, load.prompt_lengths, load.outputs, H200)
    assert found == pytest.approx((prefill, decode), rel=0.03)


@pytest.mark.parametrize(("name", "tied"), [("tiny", True), ("tiny", False), ("tiny-moe", True)])
def test_a_step_reads_the_parameters_of_the_model_that_runs(tmp_path: Path, name: str, tied: bool) -> None:
    shape = dataclasses.replace(SHAPES[name], tied=tied)
    model = load_model(
        write_model(shape, tmp_path),
        LoadOptions(dtype="auto", device=torch.device("cpu"), load_format="random"),
    )
    spec = model.spec
    assert spec.dtype == torch.bfloat16
    embedding = 0 if tied else shape.vocab * shape.hidden
    assert shape.step_bytes == 2 * (spec.num_parameters - embedding)
    assert shape.kv_bytes == KVPool.bytes_per_page(spec.kv_layers, 1, spec.dtype)


def test_every_byte_of_a_step_counts() -> None:
    """Weights, the context and the row's own position, and logits there and back; prefill's token is free."""
    shape, slow = SHAPES["tiny"], Peaks(bandwidth=1, flops=float("inf"))
    assert decode_step(shape, 7, 1, slow) == shape.step_bytes + 8 * shape.kv_bytes + 8 * shape.vocab
    steps = decode_step(shape, 6, 1, slow) + decode_step(shape, 7, 1, slow)
    assert offline(shape, [5, 9], [3, 1], slow) == (0, steps)


def test_a_token_is_multiplied_with_the_experts_that_it_passes() -> None:
    shape = SHAPES["tiny-moe"]
    expert = 3 * shape.hidden * shape.intermediate
    idle = shape.experts - shape.chosen
    assert shape.layer_parameters - shape.token_parameters == shape.layers * idle * expert
    slow = Peaks(bandwidth=1, flops=float("inf"))
    read = shape.step_bytes - 2 * shape.layers * idle * expert
    assert decode_step(shape, 0, 1, slow) == read + shape.kv_bytes + 8 * shape.vocab
    fast = Peaks(bandwidth=float("inf"), flops=1)
    prefill, _ = offline(shape, [1], [1], fast)
    assert prefill == 2 * shape.token_parameters + shape.attention_flops / 2


def test_a_step_of_many_rows_is_bound_by_arithmetic() -> None:
    shape = Shape("dense", 1, 1024, 8, 8, 128, 4096, 16, True)
    few, many = (decode_step(shape, rows, rows, Peaks(1e12, 1e14)) for rows in (1, 100_000))
    assert few == pytest.approx(shape.step_bytes / 1e12, rel=0.01)
    matrices = 1024 * (128 * 8 * 4 + 3 * 4096 + 16)
    # Multiplied first; then attention reads two positions of each row, and sampling 16 logits.
    reads = 100_000 * (2 * 2 * 8 * 128 * 2 + 4 * 16)
    assert many == pytest.approx(100_000 * 2 * matrices / 1e14 + reads / 1e12)


def test_a_step_takes_the_sum_of_its_phases() -> None:
    """At 256 rows 8B multiplies while the memory waits, and attends while the matrix units do."""
    shape, rows = SHAPES["8b"], 256
    phases = decode_phases(shape, 1024 * rows, rows)
    assert sum(phase.moved for phase in phases.values()) == (
        shape.step_bytes + shape.kv_bytes * 1025 * rows + 8 * shape.vocab * rows
    )
    matrices = 36 * (4096 * 128 * (32 + 8 + 8 + 32) + 3 * 4096 * 12_288)
    seconds = {name: H200.seconds(phase) for name, phase in phases.items()}
    assert seconds["matrices"] == 2 * rows * matrices / H200.flops
    assert seconds["attention"] == 147_456 * 1025 * rows / H200.bandwidth
    assert seconds["head"] == 2 * rows * 4096 * 151_936 / H200.flops
    assert seconds["sampling"] == 4 * rows * 151_936 / H200.bandwidth
    total = decode_step(shape, 1024 * rows, rows, H200)
    assert total == pytest.approx(sum(seconds.values())) == pytest.approx(13.94e-3, rel=1e-3)
    # What the whole step would take if all of its reading and computing could overlap.
    assert total > 1.1 * (sum(phase.moved for phase in phases.values()) / H200.bandwidth)


def test_numbers_of_8_bits_are_half_of_what_is_read() -> None:
    shape, small = SHAPES["8b"], shape_of("8b", {"quantization": "fp8", "kv_dtype": "fp8"})
    assert shape_of("8b", {"quantization": "auto"}) == shape
    assert small.kv_bytes == 2 * 36 * 8 * 129
    scales = 36 * (48 * 128 + 2 * 12_288 + 2 * 4096)
    assert shape.step_bytes - small.step_bytes == shape.layer_parameters - 4 * scales
    # With head and embedding as they are, weights alone allow for this at batch 1.
    faster = decode_step(shape, 1024, 1, H200) / decode_step(small, 1024, 1, H200)
    assert faster == pytest.approx(1.85, abs=0.01)


def test_experts_of_8_bits_are_half_of_what_is_read() -> None:
    shape, small = SHAPES["moe"], shape_of("moe", {"quantization": "fp8"})
    scales = 24 * (32 * (2 * 512 + 1024) + 1024 + (16 + 2 * 8) * 64)
    routers = 24 * 32 * 1024
    assert small.step_bytes == shape.step_bytes - shape.layer_parameters + routers + 4 * scales
    # Of experts and what is idle of them, the share of scales is that of three matrices.
    per_expert = 3 * 1024 * 512 + 4 * (2 * 512 + 1024)
    assert small.expert_bytes == 24 * 32 * per_expert
    assert small.idle_bytes(1) == pytest.approx(24 * 24 * per_expert)
    few = [decode_phases(each, 0, 1)["experts"].moved for each in (shape, small)]
    assert few[0] / few[1] == pytest.approx(1.99, abs=0.01)


def test_experts_are_a_phase_of_their_own() -> None:
    """With few tokens an expert reads its weights for one of them, while the other matrices serve all."""
    shape, rows = SHAPES["moe"], 1000
    phases = decode_phases(shape, 0, rows)
    expert = 3 * shape.hidden * shape.intermediate * shape.layers
    assert phases["experts"].moved == pytest.approx(2 * 32 * expert)
    assert phases["experts"].flops == 2 * rows * 8 * expert
    attention = shape.layers * shape.hidden * (64 * (2 * 16 + 2 * 8) + shape.experts)
    assert phases["matrices"].flops == 2 * rows * attention
    assert "experts" not in decode_phases(SHAPES["8b"], 0, rows)


def test_the_operations_of_prefill_are_those_of_what_is_seen() -> None:
    shape = SHAPES["tiny"]
    for queries, context in ((5, 5), (3, 10), (1, 7)):
        seen = sum(
            1 for query in range(queries) for key in range(context) if key <= context - queries + query
        )
        assert prefill_flops(shape, 2, queries, context) == 2 * 4 * shape.heads * shape.head_dim * seen


def test_time_under_overlapping_spans_counts_once() -> None:
    assert covered([]) == 0
    assert covered([(5, 6), (0, 2), (1, 3), (1, 2), (3, 4)]) == 5
    events: list[dict[str, Any]] = [
        {"ph": "X", "cat": "kernel", "ts": 0.0, "dur": 10.0},
        {"ph": "X", "cat": "gpu_memcpy", "ts": 5.0, "dur": 10.0},
        {"ph": "X", "cat": "cuda_runtime", "ts": 100.0, "dur": 10.0},
        {"ph": "M", "name": "process_name"},
    ]
    assert device_seconds({"traceEvents": events}) == pytest.approx(15e-6)


def test_the_bounds_add_up_to_what_is_promised() -> None:
    basic = [bench for name, bench in PARTS.items() if name not in _OPTIONAL]
    assert sum(bench.full for bench in basic) < 6 * 60 - 40
    assert sum(bench.quick for bench in basic) < 3 * 60 - 25
    for size in (FULL, QUICK):
        heads = {(SHAPES[name].kv_heads, SHAPES[name].head_dim) for name in size.heads}
        assert len(heads) == 1  # one pool for all of them


def test_the_made_up_tokenizer_spells_every_token(tmp_path: Path) -> None:
    write_tokenizer(512, tmp_path)
    tokenizer = HFTokenizer.load(tmp_path)
    assert tokenizer.vocab_size == 512
    assert tokenizer.decode(range(256, 260)) == " aaa baa caa daa"
    assert len({tokenizer.decode([at]) for at in range(256, 512)}) == 256
    assert tokenizer.decode(tokenizer.encode("naïve\n")) == "naïve\n"


# -- isolation -----------------------------------------------------------------------------------------


@nightly(PROGRAM)
def test_one_that_fails_stops_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever happens to a bench, its rows so far are kept, and the next one runs."""
    monkeypatch.setattr(isolation, "_GRACE", 10.0)  # as long as the one that hangs has to say its first row
    ways = ("raises", "dies", "hangs", "guards")
    fakes = {way: Part("tests.bench.gpu_fakes", way, 0, 0, (way,)) for way in ways}
    fakes["missing"] = Part("tests.no_such_bench", "cannot be imported", 0, 0)
    jobs = [(name, fake, 0.0 if name == "hangs" else 60.0) for name, fake in fakes.items()]
    report = Report()
    run_all(jobs, PLAN, report)
    assert report.failed
    assert list(report.sections) == ["raises", "dies", "hangs", "guards", "missing"]
    errors = {name: " ".join(section.errors) for name, section in report.sections.items()}
    assert "ValueError: on purpose" in errors["raises"]
    assert "exit code -9" in errors["dies"]
    assert "cut off" in errors["hangs"]
    assert "one case" in errors["guards"]
    assert "invalid literal" in errors["guards"]
    assert "no_such_bench" in errors["missing"]
    assert {name: len(section.rows) for name, section in report.sections.items()} == {
        "raises": 1, "dies": 1, "hangs": 1, "guards": 2, "missing": 0,
    }  # fmt: skip
    assert "on purpose" in capsys.readouterr().out
    assert not multiprocessing.active_children()


async def test_a_case_that_would_take_too_long_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as the longest so far, that is; one that failed counts like any other."""
    clock = [0.0]
    monkeypatch.setattr("bench.gpu.report.time.monotonic", lambda: clock[0])
    said: list[tuple[str, Any]] = []
    report = PartReport(lambda kind, value: said.append((kind, value)), seconds=11)

    def case(seconds: float) -> None:
        clock[0] += seconds
        if seconds == 4:
            raise ValueError("on purpose")

    async def awaited() -> None:
        case(1)

    report.guarded("first", case, 1)
    report.guarded("second", case, 4)
    await report.guarded_async("third", awaited)
    assert [kind for kind, _ in said] == ["error"]
    await report.guarded_async("fourth", awaited)
    report.guarded("fifth", case, 1)
    assert said[1:] == [("note", "fifth: no time left")]
    assert report.remaining == 4


def test_listening_keeps_what_was_said(capsys: pytest.CaptureFixture[str]) -> None:
    said = [
        ("environment", {"gpu": None}),
        ("fact", ("a", 1)),
        ("note", "n"),
        ("row", {"x": 1}),
        ("error", "e"),
    ]
    report = Report()
    listen(SimpleNamespace(run=lambda seconds: iter(said)), 1.0, report)  # type: ignore[arg-type]
    assert report.facts.pop("seconds") >= 0
    assert report.environment == {"gpu": None}
    assert report.as_dict() == {"facts": {"a": 1}, "notes": ["n"], "rows": [{"x": 1}], "errors": ["e"]}


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

    plan = dataclasses.replace(
        PLAN, settings={"overlap_steps": "2", "max_step_tokens": "99", "attention_backend": "sdpa"}
    )
    config = engine_config(plan, tmp_path, overlap_steps=0)
    assert (config.overlap_steps, config.max_step_tokens, config.attention_backend) == (0, 99, "sdpa")
    assert config.load_format == "random"


# -- the peer ------------------------------------------------------------------------------------------


class Manager:
    """As much of transformers' manager as collecting asks for."""

    def __init__(self, *results: Any, running: bool = True) -> None:
        self.results = list(results)
        self.running = running

    def get_result(self, timeout: float) -> Any:
        return self.results.pop(0) if self.results else None

    def is_running(self) -> bool:
        return self.running


def result(name: str, error: str | None = None, finished: bool = True) -> Any:
    return SimpleNamespace(request_id=name, error=error, is_finished=lambda: finished)


def test_results_of_the_peer_are_kept_by_name_until_the_time_is_up() -> None:
    far = float("inf")
    found = _collect(Manager(result("b"), result("a", finished=False), None, result("a")), ["a", "b"], far)
    assert sorted(found) == ["a", "b"]
    assert _collect(Manager(result("a")), ["a"], end=0.0) == {}


def test_a_peer_that_fails_is_not_waited_for() -> None:
    with pytest.raises(RuntimeError, match="has ended"):
        _collect(Manager(running=False), ["a"], float("inf"))
    with pytest.raises(RuntimeError, match="out of pages"):
        _collect(Manager(result("a", "out of pages")), ["a"], float("inf"))


# -- measuring -----------------------------------------------------------------------------------------


class Cuda:
    """As much of torch.cuda as measuring asks for, with a clock that every call moves by a millisecond."""

    def __init__(self, *, captures: bool) -> None:
        self.captures = captures
        self.capturing = False
        self.recorded: list[Any] = []
        self.clock = 0.0

    def call(self) -> None:
        if self.capturing:
            self.recorded.append(self.call)
        else:
            self.clock += 1.0

    def synchronize(self, device: Any = None) -> None: ...

    def CUDAGraph(self) -> Any:
        return SimpleNamespace(replay=lambda: [call() for call in self.recorded])

    @contextlib.contextmanager
    def graph(self, graph: Any) -> Iterator[None]:
        self.capturing = True
        try:
            yield
        finally:
            self.capturing = False
        if not self.captures:
            raise RuntimeError("operation not permitted when stream is capturing")

    def Event(self, enable_timing: bool) -> Any:
        event = SimpleNamespace(at=0.0, synchronize=lambda: None)
        event.record = lambda: setattr(event, "at", self.clock)
        event.elapsed_time = lambda end: end.at - event.at
        return event


@pytest.mark.parametrize(("captures", "how"), [(True, "graph"), (False, "eager")])
def test_a_call_is_timed_in_a_graph_or_without_where_there_can_be_none(
    monkeypatch: pytest.MonkeyPatch, captures: bool, how: str
) -> None:
    import bench.gpu.measure as measure

    cuda = Cuda(captures=captures)
    monkeypatch.setattr(measure.torch, "cuda", cuda)
    seconds, found = measure.seconds_per_call([cuda.call, cuda.call], torch.device("cuda"))
    assert seconds == pytest.approx(1e-3)
    assert found == how
    assert len(cuda.recorded) == 2
