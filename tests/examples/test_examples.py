"""The examples run as they stand, and the serving bench measures what it says."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from aiohttp.test_utils import TestClient, TestServer

from bench.load import length_distribution, make_load
from bench.report import percentiles
from bench.serving import Record, bench, parse, summarise
from tests.server.conftest import Serving, serving

__all__ = ["serving"]

ROOT = Path(__file__).parents[2]


def test_the_embedding_example_runs() -> None:
    done = subprocess.run(
        [sys.executable, "examples/embed.py"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Once there was a child called Mira")
    assert "44 + 44 = 88" in done.stdout


def test_the_diffusion_example_shows_a_block_filling_up() -> None:
    command = [sys.executable, "examples/diffusion_stream.py", "What is 17 + 25?", "--threshold", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    *drafts, last = done.stdout.splitlines()
    assert last == "17 + 25 = 42"
    assert any("░" in draft for draft in drafts)
    assert re.search(r"\d+ tokens in \d+ rounds", done.stderr)
    wrong = subprocess.run(
        [*command, "--algorithm", "factor"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert wrong.returncode == 1
    assert wrong.stderr == "threshold: is not a parameter of factor\n"


def test_the_diffusion_bench_compares_all_ways_on_the_same_requests(tmp_path: Path) -> None:
    options = (
        "--shape tiny --concurrency 1 2 --fresh 0 1 --rounds 1 --requests 4 --per-client 1 --max-tokens 20"
    )
    file = tmp_path / "lines.jsonl"
    command = [sys.executable, "-m", "bench", "diffusion", *options.split(), "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [sorted(line["cells"]) for line in lines] == [["1x0", "2x0"], ["1x1", "2x1"]]
    for cell in (cell for line in lines for cell in line["cells"].values()):
        assert list(cell) == ["sync", "sync+", "fdfo", "reuse", "mixed", "fused", "overlap"]
        assert all(way["tokens_per_s"] > 0 and way["ttft_ms"] > 0 for way in cell.values())
        # The last forward over a block is the first over the next.
        assert cell["fused"]["forwards_per_token"] <= cell["mixed"]["forwards_per_token"]


async def test_the_aiohttp_example_answers_on_its_own_route_and_on_openais() -> None:
    sys.path.insert(0, str(ROOT / "examples"))
    from aiohttp_app import make_app

    async with TestClient(TestServer(make_app())) as client:
        response = await client.get("/add/20/22")
        assert await response.json() == {"answer": "20 + 22 = 42"}
        response = await client.post(
            "/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hello!"}]}
        )
        assert (await response.json())["choices"][0]["message"]["content"].startswith("Hello!")


@pytest.mark.parametrize("how", [["--concurrency", "4"], ["--rate", "200", "--burstiness", "0.3"]])
async def test_the_bench_counts_every_token_over_http(serving: Serving, how: list[str]) -> None:
    async with serving() as served:
        options = parse(
            ["--url", served.url, "--requests", "20", "--prompt-tokens", "5", "--output-tokens", "7", *how]
        )
        # The toy has 64 tokens.
        import bench.serving as module

        module.VOCAB, kept = (1, 60), module.VOCAB
        try:
            result = await bench(options)
        finally:
            module.VOCAB = kept
    assert (result["requests"], result["failed"]) == (20, 0)
    assert result["output_tokens"] == 20 * 7
    assert result["prompt_tokens"] == 20 * 5
    assert result["ttft_ms"]["p50"] <= result["latency_ms"]["p50"]


def test_the_bench_prints_a_table_and_a_json_line(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    options = "--requests 8 --concurrency 4 --threads 1 --prompt-tokens uniform:5:20 --output-tokens 6"
    command = [sys.executable, "-m", "bench", "serving", *options.split(), "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for name in ("TTFT", "TPOT", "ITL", "latency", "p99", "tokens/s"):
        assert name in done.stdout
    (line,) = file.read_text().splitlines()
    assert done.stdout.endswith(line + "\n")
    result = json.loads(line)
    assert result["output_tokens"] == 48
    assert result["environment"]["versions"]["torch"]


@pytest.mark.parametrize("device", [[], ["--toy"], ["--stall"]])
def test_the_overlap_bench_runs_every_way(tmp_path: Path, device: list[str]) -> None:
    line = tmp_path / "line.json"
    command = [sys.executable, "-m", "bench", "overlap", "--batch", "2", "--rounds", "1", "--output", "4"]
    subprocess.run(
        [*command, *device, "--json", str(line)], cwd=ROOT, check=True, capture_output=True, timeout=120
    )
    cases = json.loads(line.read_text())["cases"]
    assert len(cases) == {(): 7, ("--toy",): 1, ("--stall",): 9}[tuple(device)]
    assert all(value >= 0 for case in cases for value in case.values() if isinstance(value, float))


def test_figures_follow_their_definitions() -> None:
    record = Record(sent=1.0, arrivals=[(1.5, 1), (1.7, 2), (2.0, 1)], prompt_tokens=3)
    assert (record.tokens, record.ttft, record.latency) == (4, 0.5, 1.0)
    assert record.itl() == pytest.approx([0.1, 0.1, 0.3])
    result = summarise([record, Record(error="x")], seconds=2.0)
    assert (result["failed"], result["output_tokens_per_s"]) == (1, 2.0)
    assert result["tpot_ms"]["p50"] == pytest.approx(1e3 * 0.5 / 3)
    assert percentiles([1, 2, 3, 4])["p50"] == 2.5


def test_loads_repeat_with_their_seed() -> None:
    def load(seed: int, distinct: int | None = None) -> list[object]:
        return make_load(
            count=10,
            rate=5,
            concurrency=None,
            burstiness=1,
            prompt_tokens="uniform:1:9",
            output_tokens="lognormal:2:0.5:20",
            distinct_prompts=distinct,
            vocab=(1, 9),
            seed=seed,
        ).requests  # type: ignore[return-value]

    assert load(1) == load(1) != load(2)
    repeated = make_load(
        count=10, rate=None, concurrency=2, burstiness=1, prompt_tokens="8", output_tokens="1",
        distinct_prompts=2, vocab=(1, 9), seed=0,
    ).requests  # fmt: skip
    assert len({tuple(request.prompt) for request in repeated}) == 2


@pytest.mark.parametrize("text", ["", "abc", "uniform:1", "normal:1:2"])
def test_an_unknown_distribution_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"distribution|invalid literal"):
        length_distribution(text)(random.Random(0))


def test_the_readmes_examples_run(tmp_path: Path) -> None:
    """The ten lines, and behind them the others, which use names of those before."""
    examples = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.S)
    assert len(examples) == 3
    file = tmp_path / "readme.py"
    file.write_text("\n".join(examples))
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    first, structured, watched = re.split(r"(?<=\n)(?={)|(?<=}\n)", done.stdout, maxsplit=2)
    assert "\n17 + 25 = 42 stop Usage(" in first
    assert json.loads(structured)["pet"] in ("cat", "dog")
    lines = [line.partition("|") for line in watched.splitlines()]
    assert "".join(text for text, _, _ in lines) == "17 + 25 = 42"
