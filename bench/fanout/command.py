"""``python -m bench fanout``: what it costs to bring tokens from a step that has landed to their clients.

    python -m bench fanout
    python -m bench fanout --only burden --streams 512

A real server in a process of its own runs over a device whose steps take exactly the time that they are told
and no processor, with the tokens of a real text. The client is a process that only counts bytes and events.

``saturated``  events/s with steps of 0 ms, also as a share of those of a bare aiohttp writer with a task per
               stream
``paced``      steps of 2 or 6 ms: tokens/s, share of a core of the loop's thread, lateness of the loop (the
               arrival of all streams included), how much of the time the device works
``burden``     the same with 1 ms of Python on the loop and 2 ms on the launch thread per step
``inprocess``  ``async for`` in the engine's process, without HTTP
``text``       requests that are read to their end: every token and every character is compared
``memory``     resident memory over many short requests
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aioinfer.config import EngineConfig
from aioinfer.text.tokenizer import HFTokenizer
from bench.fanout.device import expected_ids, real_text
from bench.fanout.processes import Client, Target, body, client, compiled_client, responses, target
from bench.fanout.target import MAX_TOKENS
from bench.report import Report
from bench.soak.command import slope

#: streams and milliseconds of a step
PACED = ((256, 2.0), (256, 6.0), (1024, 6.0), (2048, 6.0))
#: tokens of a request of ``memory``
_SHORT = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=list(_PARTS), nargs="+", default=list(_PARTS))
    parser.add_argument("--streams", type=int, nargs="+", help="instead of those of each part")
    parser.add_argument("--seconds", type=float, default=3.0, help="of every measurement")
    parser.add_argument("--rounds", type=int, default=3, help="of saturated, in turns with the bare writer")
    parser.add_argument("--requests", type=int, default=20_000, help="of memory")
    parser.add_argument("--loop", choices=("asyncio", "uvloop"), default="asyncio")
    parser.add_argument("--tokenizer", help="a directory; default: that of the bundled model")


def run(options: argparse.Namespace, report: Report) -> None:
    """A section per part."""
    with compiled_client() as program:
        for name in options.only:
            title, part = _PARTS[name]
            part(options, program, report.section(name, title))


# -- parts ---------------------------------------------------------------------------------------------


def _saturated(options: argparse.Namespace, program: Path, report: Report) -> None:
    for streams in options.streams or (256, 1024, 2048):
        rounds = []
        for _ in range(options.rounds):
            bare = _measure(options, program, "bare", streams, 0.0)
            rounds.append((bare, _measure(options, program, "server", streams, 0.0)))
        ratios = [own["events_per_s"] / bare["events_per_s"] for bare, own in rounds]
        bare, own = ({name: statistics.median(each[name] for each in way) for name in way[0]}
                     for way in zip(*rounds, strict=True))  # fmt: skip
        report.row(
            streams=streams,
            bare_events_per_s=bare["events_per_s"],
            events_per_s=own["events_per_s"],
            of_bare=statistics.median(ratios),
            of_bare_cpu=bare["us_per_event"] / own["us_per_event"],
            tokens_per_s=own["tokens_per_s"],
            bare_us=bare["us_per_event"],
            us_per_event=own["us_per_event"],
            us_per_token=1e6 * own["loop"] / own["tokens_per_s"],
            client=own["client"],
            ratios=ratios,
        )


def _paced(options: argparse.Namespace, program: Path, report: Report) -> None:
    cases = PACED if options.streams is None else [(streams, 6.0) for streams in options.streams]
    for streams, step_ms in cases:
        _row(report, streams, step_ms, _measure(options, program, "server", streams, step_ms))


def _burden(options: argparse.Namespace, program: Path, report: Report) -> None:
    for streams in options.streams or (256, 512):
        found = _measure(options, program, "server", streams, 6.0, packing_ms=1.0, launching_ms=2.0)
        _row(report, streams, 6.0, found)


def _row(report: Report, streams: int, step_ms: float, found: dict[str, float]) -> None:
    shown = (
        "tokens_per_s",
        "events_per_s",
        "loop",
        "us_per_token",
        "busy",
        "lag_p99",
        "lag_p99.9",
        "lag_max",
    )
    figures = {name: found[name] for name in shown}
    report.row(streams=streams, step_ms=step_ms, most=1e3 * streams / step_ms, **figures)


def _inprocess(options: argparse.Namespace, program: Path, report: Report) -> None:
    for streams in options.streams or (256,):
        for step_ms in (0.0, 6.0):
            with target(
                "inprocess", options.loop, options.tokenizer, streams=streams, step_ms=step_ms
            ) as own:
                time.sleep(1.0)
                before = own.tell()
                time.sleep(options.seconds)
                after = own.tell()
            seconds, loop, tokens, chunks = (
                after[name] - before[name] for name in ("time", "loop_s", "tokens", "chunks")
            )
            report.row(
                streams=streams,
                step_ms=step_ms,
                tokens_per_s=tokens / seconds,
                chunks_per_s=chunks / seconds,
                us_per_chunk=1e6 * loop / max(1, chunks),
                loop=loop / seconds,
            )


def _text(options: argparse.Namespace, program: Path, report: Report) -> None:
    tokenizer = HFTokenizer.load(Path(options.tokenizer or EngineConfig().model_path))
    text_ids = tokenizer.encode_part(real_text())
    context = tokenizer.encode_part("a")[0]  # behind a whole character, the text is that of its own tokens
    for streams in options.streams or (256, 1024):
        for step_ms in (0.0, 2.0):
            wrong, done, events = 0, 0, 0
            with tempfile.TemporaryDirectory() as folder:
                file, length = Path(folder) / "kept", 97
                asked = body(length, context, stream_options={"include_usage": True})
                with (
                    target(
                        "server", options.loop, options.tokenizer, streams=streams, step_ms=step_ms
                    ) as own,
                    client(program, own.port, streams, asked, 2 * streams, str(file)) as counting,
                ):
                    counting.wait("done", 2 * streams)
                for number, found in responses(file):
                    ids = expected_ids(text_ids, number, length)
                    text = "".join(each["choices"][0]["text"] for each in found if each["choices"])
                    usage = found[-1]["usage"]["completion_tokens"]
                    wrong += text != tokenizer.decode(ids) or usage != length
                    done, events = done + 1, events + len(found)
            report.row(streams=streams, step_ms=step_ms, requests=done, events=events, wrong=wrong)
            if wrong or done != 2 * streams:
                report.error(f"{wrong} of {done} outputs are wrong, {2 * streams - done} are lost")


def _memory(options: argparse.Namespace, program: Path, report: Report) -> None:
    (streams,) = (options.streams or [256])[:1]
    samples: list[list[float]] = []
    with (
        target("server", options.loop, options.tokenizer, streams=streams, step_ms=0.0) as own,
        client(program, own.port, streams, body(_SHORT), options.requests) as counting,
    ):
        for share in range(1, 11):
            counting.wait("done", options.requests * share // 10, 600.0)
            samples.append([counting.counts()["done"], own.tell(collect=True)["rss_kib"]])
    # The first part fills pools of memory that stay.
    report.row(
        streams=streams,
        requests=options.requests,
        kib_per_request=slope(samples[3:]),
        first_mib=samples[0][1] / 1024,
        last_mib=samples[-1][1] / 1024,
        samples=samples,
    )


# -- measuring -----------------------------------------------------------------------------------------


def _measure(
    options: argparse.Namespace, program: Path, kind: str, streams: int, step_ms: float, **burden: float
) -> dict[str, float]:
    """Rates while all streams are there; how late the loop was, their arrival included."""
    settings = {"streams": streams, "step_ms": step_ms, **burden}
    with (
        target(kind, options.loop, options.tokenizer, **settings) as own,
        client(program, own.port, streams, body(MAX_TOKENS)) as counting,
    ):
        own.begin()
        counting.wait("begun", streams)
        time.sleep(0.3)
        before = _both(counting, own)
        time.sleep(options.seconds)
        after = _both(counting, own)
        if after["errors"] or after["done"]:
            raise RuntimeError(f"{after['errors']} streams failed, {after['done']} ended early")
        lag = own.tell()["lag_ms"]
    changes = {name: after[name] - before[name] for name in after}
    seconds, loop_seconds = changes["client_time"], changes["time"]
    loop = changes["loop_s"] / loop_seconds
    tokens = changes.get("tokens", changes["events"]) / loop_seconds
    return {
        "events_per_s": changes["events"] / seconds,
        "tokens_per_s": tokens,
        "loop": loop,
        "us_per_token": 1e6 * loop / max(1.0, tokens),
        "us_per_event": 1e6 * loop * seconds / max(1.0, changes["events"]),
        "busy": changes.get("busy_s", 0.0) / loop_seconds,
        "client": changes["cpu"] / seconds,
        **{f"lag_{name}": value for name, value in lag.items()},
    }


def _both(counting: Client, own: Target) -> dict[str, Any]:
    counts, sums = counting.counts(), own.tell()
    numbers = {name: value for name, value in sums.items() if isinstance(value, int | float)}
    return {**counts, "client_time": counts["time"], **numbers}


_PARTS: dict[str, tuple[str, Callable[[argparse.Namespace, Path, Report], None]]] = {
    "saturated": ("steps of 0 ms, in turns with a bare aiohttp writer", _saturated),
    "paced": ("steps that take their time", _paced),
    "burden": ("1 ms of Python on the loop and 2 ms on the launch thread per step", _burden),
    "inprocess": ("async for, without HTTP", _inprocess),
    "text": ("every token and character", _text),
    "memory": ("resident memory over short requests", _memory),
}
