"""``python -m bench fanout``: cost of bringing tokens from a finished step to their clients.

A real server in a process of its own runs over a device whose steps take exactly the time that they are told
and no processor, with the tokens of a real text. The client is a process that only counts bytes and events.

``saturated``  events/s with steps of 0 ms, also as a share of those of a bare aiohttp writer with a task per
               stream
``paced``      steps of 2 or 6 ms: tokens/s, share of a core of the loop's thread, lateness of the loop (the
               arrival of all streams included), share of the time in which the device works
``inprocess``  ``async for`` in the engine's process, without HTTP
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

from bench.fanout.processes import client, compiled_client, target
from bench.report import Report

PARTS = {
    "saturated": "steps of 0 ms, in turns with a bare aiohttp writer",
    "paced": "steps that take their time",
    "inprocess": "async for, without HTTP",
}
#: streams and milliseconds of a step
PACED = ((256, 2.0), (256, 6.0), (1024, 6.0), (2048, 6.0))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=list(PARTS), nargs="+", default=list(PARTS))
    parser.add_argument("--streams", type=int, nargs="+", help="instead of those of each part")
    parser.add_argument("--seconds", type=float, default=3.0, help="of every measurement")
    parser.add_argument("--rounds", type=int, default=3, help="of saturated, in turns with the bare writer")


def run(options: argparse.Namespace, report: Report) -> None:
    """A section per part."""
    with compiled_client() as program:
        for name in options.only:
            section = report.section(name, PARTS[name])
            if name == "saturated":
                for streams in options.streams or (256, 1024, 2048):
                    _saturated(options, program, streams, section)
            elif name == "paced":
                for streams, step_ms in (
                    PACED if options.streams is None else [(each, 6.0) for each in options.streams]
                ):
                    found = _measure(options, program, "server", streams, step_ms)
                    shown = (
                        "tokens_per_s",
                        "events_per_s",
                        "loop",
                        "us_per_token",
                        "busy",
                        "lag_p99",
                        "lag_max",
                    )
                    section.row(streams=streams, step_ms=step_ms, **{name: found[name] for name in shown})
            else:
                for streams in options.streams or (256,):
                    for step_ms in (0.0, 6.0):
                        _inprocess(options, streams, step_ms, section)


def _saturated(options: argparse.Namespace, program: Path, streams: int, report: Report) -> None:
    rounds = [
        [_measure(options, program, kind, streams, 0.0) for kind in ("bare", "server")]
        for _ in range(options.rounds)
    ]
    ratios = [own["events_per_s"] / bare["events_per_s"] for bare, own in rounds]
    bare, own = (
        {name: statistics.median(each[name] for each in way) for name in way[0]}
        for way in zip(*rounds, strict=True)
    )
    report.row(
        streams=streams,
        bare_events_per_s=bare["events_per_s"],
        events_per_s=own["events_per_s"],
        of_bare=statistics.median(ratios),
        tokens_per_s=own["tokens_per_s"],
        bare_us_per_event=bare["us_per_event"],
        us_per_token=own["us_per_token"],
        ratios=ratios,
    )


def _inprocess(options: argparse.Namespace, streams: int, step_ms: float, report: Report) -> None:
    with target("inprocess", streams, step_ms) as own:
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


def _measure(
    options: argparse.Namespace, program: Path, kind: str, streams: int, step_ms: float
) -> dict[str, float]:
    """Rates while all streams are there; lateness of the loop, their arrival included."""
    with target(kind, streams, step_ms) as own, client(program, own.port, streams) as counting:
        own.begin()
        counting.wait_begun(streams)
        time.sleep(0.3)
        counts, sums = counting.counts(), own.tell()
        time.sleep(options.seconds)
        counts_after, sums_after = counting.counts(), own.tell()
    if counts_after["errors"] or counts_after["done"]:
        raise RuntimeError(f"streams failed or ended early: {counts_after}")
    seconds = sums_after["time"] - sums["time"]
    events = (counts_after["events"] - counts["events"]) / (counts_after["time"] - counts["time"])
    loop = (sums_after["loop_s"] - sums["loop_s"]) / seconds
    tokens = (sums_after["tokens"] - sums["tokens"]) / seconds if "tokens" in sums else events
    return {
        "events_per_s": events,
        "tokens_per_s": tokens,
        "loop": loop,
        "us_per_token": 1e6 * loop / max(1.0, tokens),
        "us_per_event": 1e6 * loop / max(1.0, events),
        "busy": (sums_after["busy_s"] - sums["busy_s"]) / seconds if "busy_s" in sums else 0.0,
        **{f"lag_{name}": value for name, value in sums_after["lag_ms"].items()},
    }
