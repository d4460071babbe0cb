"""``python -m bench cpu --serve``: staggered arrivals through each engine's own streaming HTTP server.

The client is this process for all of them, on the same cores; its share of a core is in the report. Arrivals
are a Poisson process, at the same moments with the same prompts for every server, one rate after the other;
servers take turns rate by rate, and whoever is not measured is stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.client import Record, run_load, summarise, url_target
from bench.cpu.cells import spread
from bench.load import Load, make_load
from bench.peers.process import Process, end_of
from bench.peers.registry import ROOT, Peer, python_of
from bench.peers.watch import Memory, Watch, locked
from bench.report import Report

__all__ = ["Server", "contest", "free_port", "measure", "measure_servers", "server_command", "tell"]

#: seconds that a server may take to start
_START = 900.0
#: rates at which requests are sent at once to get a server going, and how many
_WARM = (1, 8)
_TIMES = {"TTFT": "ttft_ms", "ITL": "itl_ms"}


@dataclass(slots=True)
class Server:
    """A server, how it is started, and what requests of it saw."""

    name: str
    command: Sequence[str]
    variables: dict[str, str]
    url: str
    process: Process | None = None
    failed: str | None = None
    start_seconds: float = 0.0
    peak: Memory = field(default_factory=Memory)
    #: by rate, what every round was like, and all of its requests
    rounds: dict[float, list[dict[str, Any]]] = field(default_factory=dict)
    records: dict[float, list[Record]] = field(default_factory=dict)


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def server_command(
    peer: Peer, model: Path, port: int, options: argparse.Namespace, max_len: int
) -> tuple[list[str], dict[str, str]]:
    """How it is started, and with which environment. Raises ValueError for a peer without a server."""
    python, most = python_of(peer.environment, options.place), str(options.max_batch)
    own = _flags(options.own.get(peer.name, {}))
    if peer.adapter == "aioinfer_engine" and "synchronous" not in peer.options:
        own = [*_flags(peer.options), *own]
        command = [
            str(python), "-m", "aioinfer", "serve", "--model", str(model), "--port", str(port),
            "--device", "cpu", "--threads", str(options.threads), "--kv-memory-gib", str(options.kv_gib),
            "--max-model-len", str(max_len), "--max-running-requests", most, "--prefix-cache", "false",
        ]  # fmt: skip
        return command + own, {}
    if peer.name == "vllm":
        from bench.peers.adapters.vllm_offline import environment as variables

        # What ``vllm serve`` runs; that itself asks for the version of a package named vllm, and this one
        # is named otherwise.
        command = [
            str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
            "--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16",
            "--max-model-len", str(max_len), "--max-num-seqs", most, "--no-enable-prefix-caching",
            "--seed", "0",
        ]  # fmt: skip
        return command + own, variables(options.threads, options.kv_gib)
    raise ValueError(f"{peer.name} has no server here")


def _flags(settings: dict[str, str]) -> list[str]:
    return [part for name, value in settings.items() for part in (f"--{name.replace('_', '-')}", value)]


async def measure(
    server: Server, load: Load, patience: float
) -> tuple[list[Record], float, dict[str, float]]:
    """Send a load; its records, the seconds it took, and what the machine did meanwhile.

    Raises TimeoutError, aiohttp.ClientError, OSError.
    """
    assert server.process is not None
    async with asyncio.timeout(patience), url_target(server.url, None, None) as ask:
        with Watch(server.process.pid) as use:
            records, seconds = await run_load(load, ask)
    server.peak = server.peak.max(use.peak)
    noise = {
        "client_cores": use.own_cpu / use.seconds,
        "others_cores": max(0.0, use.others_cpu - use.own_cpu) / use.seconds,
        "server_cores": use.cpu / use.seconds,
        "stolen_s": use.stolen,
        "peak_rss_mib": use.peak.resident,
    }
    return records, seconds, noise


def start(server: Server, log: Path, patience: float = _START) -> None:
    """Start it, wait until it answers, and stop it; one that does not is out."""
    begin = time.monotonic()
    try:
        server.process = Process(server.command, log=log, cwd=ROOT, environment=server.variables, pipes=False)
    except OSError as error:
        out(server, f"cannot be started: {error}")
        return
    with Watch(server.process.pid) as use:
        why = None
        while why is None and not _answers(server.url):
            if server.process.exit_code is not None:
                why = f"it ended with {server.process.exit_code}: {end_of(log)}"
            elif time.monotonic() - begin > patience:
                why = "it did not get ready in time"
            time.sleep(0.2)
    server.peak = use.peak
    if why is not None:
        out(server, why)
        return
    server.process.pause()
    server.start_seconds = time.monotonic() - begin
    print(f"{server.name:12s} ready in {server.start_seconds:.0f} s", flush=True)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=5) as response:
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError):
        return False


async def contest(servers: Sequence[Server], vocab: int, options: argparse.Namespace) -> None:
    """All rounds of all rates, in turns."""

    def load(count: int, rate: float | None, concurrency: int | None, seed: str) -> Load:
        return make_load(
            count=count, rate=rate, concurrency=concurrency, burstiness=1.0,
            prompt_tokens=str(options.prompt_tokens), output_tokens=str(options.output_tokens),
            distinct_prompts=None, vocab=(0, vocab - 1), seed=hash_of(f"{options.seed}:{seed}"),
        )  # fmt: skip

    for server in servers:
        warm = [(None, load(count, None, count, f"warm {count}")) for count in _WARM]
        await _turn(server, warm, 0, options.patience)
    for round in range(options.rounds):
        at = round % len(servers)
        for rate in options.rates:
            arrivals = load(options.requests, rate, None, f"{round} {rate}")
            # What a process pays for having been stopped is not the server's.
            awake = load(1, None, 1, f"awake {round} {rate}")
            for server in [*servers[at:], *servers[:at]]:
                with locked(options.lock):
                    await _turn(server, [(None, awake), (rate, arrivals)], round, options.patience)


def hash_of(text: str) -> int:
    """A seed, the same in every process."""
    import zlib

    return zlib.crc32(text.encode())


async def _turn(
    server: Server, loads: Sequence[tuple[float | None, Load]], round: int, patience: float
) -> None:
    """Wake it, send the loads, stop it. One that dies or hangs is out; what has no rate is not kept."""
    import aiohttp

    if server.process is None:
        return
    server.process.resume()
    try:
        for rate, load in loads:
            records, seconds, noise = await measure(server, load, patience)
            if server.process.exit_code is not None:
                raise OSError(f"it ended with {server.process.exit_code}")
            if rate is not None:
                _keep(server, rate, records, {"round": round, **summarise(records, seconds), **noise})
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        out(server, f"{type(error).__name__}: {error}; {end_of(server.process.log)}")
    else:
        server.process.pause()


def out(server: Server, why: str) -> None:
    """It is not measured any more."""
    server.failed = why
    if server.process is not None:
        server.process.kill()
        server.process = None
    print(f"{server.name:12s} out: {why}", flush=True)


def _keep(server: Server, rate: float, records: list[Record], result: dict[str, Any]) -> None:
    server.rounds.setdefault(rate, []).append(result)
    server.records.setdefault(rate, []).extend(records)
    medians = [f"{name} p50 {result[key].get('p50', 0):.1f} ms" for name, key in _TIMES.items()]
    print(
        f"{server.name:12s} round {result['round'] + 1}, {rate:g}/s: {result['output_tokens_per_s']:.1f} "
        f"tokens/s, {', '.join(medians)}, {result['failed']} failed; client {result['client_cores']:.2f} "
        f"cores, others {result['others_cores']:.2f}",
        flush=True,
    )
    errors = [record.error for record in records if record.error is not None]
    if errors:
        print(f"{'':12s} {errors[0]}", flush=True)


def pooled(server: Server, rate: float) -> dict[str, Any]:
    """Percentiles over the requests of all rounds, and the rounds' tokens/s."""
    rounds = server.rounds.get(rate, [])
    seconds = sum(found["seconds"] for found in rounds)
    result = summarise(server.records[rate], seconds) if seconds else {}
    return {**result, "tokens_per_s_by_round": spread([found["output_tokens_per_s"] for found in rounds])}


def measure_servers(options: argparse.Namespace, peers: Sequence[Peer], model: Path, report: Report) -> None:
    """A row per rate and server."""
    import uvloop

    max_len = -(-(options.prompt_tokens + options.output_tokens + 1) // 256) * 256
    vocab = json.loads((model / "config.json").read_text())["vocab_size"]
    servers = []
    for peer in peers:
        port = free_port()
        try:
            command, variables = server_command(peer, model, port, options, max_len)
        except ValueError as error:
            report.note(f"{peer.name} is left out: {error}")
            continue
        servers.append(Server(peer.name, command, variables, f"http://127.0.0.1:{port}"))
    if not servers:
        report.error("nothing to measure")
        return
    try:
        for server in servers:
            start(server, options.place / "logs" / f"{server.name}.server.log")
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(contest(servers, vocab, options))
    finally:
        for server in servers:
            if server.process is not None:
                server.process.kill()
        tell(servers, options.rates, report)


def tell(servers: Sequence[Server], rates: Sequence[float], report: Report) -> None:
    """Percentiles over all rounds; then times of the first server over the best of the others'."""
    keys = [(metric, key) for metric in _TIMES.values() for key in ("p50", "p95", "p99")]
    found = {server.name: {f"{rate:g}": pooled(server, rate) for rate in rates} for server in servers}
    for rate in rates:
        for server in servers:
            values = found[server.name][f"{rate:g}"]
            report.row(
                rate=rate,
                server=server.name,
                **{f"{metric}_{key}": values.get(metric, {}).get(key) for metric, key in keys},
                tokens_per_s=values.get("output_tokens_per_s"),
                failed=values.get("failed"),
                peak_rss_mib=server.peak.resident,
            )
    if len(servers) > 1:
        for rate in rates:
            by_name = {name: by_rate[f"{rate:g}"] for name, by_rate in found.items()}
            ratios = _ratios([by_name[server.name] for server in servers], keys)
            report.row(rate=rate, server=servers[0].name, over="best other", **ratios)
    for server in servers:
        if server.failed:
            report.error(f"{server.name} is out: {server.failed[:300]}")
        if failed := sum(row["failed"] for rows in server.rounds.values() for row in rows):
            report.error(f"{server.name}: {failed} requests failed")
    report.add(
        servers=found,
        rounds={
            server.name: {f"{rate:g}": rows for rate, rows in server.rounds.items()} for server in servers
        },
        peaks={server.name: dataclasses.asdict(server.peak) for server in servers},
    )


def _ratios(values: Sequence[dict[str, Any]], keys: list[tuple[str, str]]) -> dict[str, float | None]:
    """The first server's figures as multiples of the best of the others'."""
    ours, *others = values
    ratios: dict[str, float | None] = {}
    for metric, key in keys:
        best = [other[metric][key] for other in others if other.get(metric)]
        ratios[f"{metric}_{key}"] = ours[metric][key] / min(best) if best and ours.get(metric) else None
    best = [other["output_tokens_per_s"] for other in others if "output_tokens_per_s" in other]
    rate = ours.get("output_tokens_per_s", 0.0)
    ratios["tokens_per_s"] = rate / max(best) if best and max(best) else None
    return ratios
