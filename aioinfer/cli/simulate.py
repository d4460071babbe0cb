"""``aioinfer simulate``: what an engine, or several behind a dispatcher, would do with a load.

It runs in virtual time and needs neither the model nor its device: steps take as long as a file of costs
says. Standard output is the same, byte by byte, for the same arguments.
"""

from __future__ import annotations

import argparse
import asyncio
import threading
import time
from dataclasses import replace
from pathlib import Path

from aioinfer.cli.flags import read_settings
from aioinfer.cli.streams import check_output, note, write
from aioinfer.cli.terminal import Progress
from aioinfer.config import EngineConfig
from aioinfer.errors import ConfigError, shown
from aioinfer.scheduling.costs import Costs
from aioinfer.twin import drawings, report, running, sweep
from aioinfer.twin.load import Load
from aioinfer.twin.outcome import Outcome
from aioinfer.twin.synthesis import WORKLOADS, synthesize
from aioinfer.twin.traces import read_trace, scaled
from aioinfer.twin.virtual_trace import VirtualTrace

__all__ = ["simulate"]


async def simulate(options: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    slo = None if options.slo is None else report.Slo.parse(options.slo)
    price, total = sweep.parse("price", options.price), sweep.parse("requests", options.requests)
    variants = _variants(options)
    loads = [_load(options, variant, total) for variant in variants]
    if options.plots is not None:
        drawings.check()
    for path in filter(None, (options.json, options.perfetto)):
        check_output(path)
    trace = None if options.perfetto is None else VirtualTrace()
    if trace is not None and len(variants) > 1:
        raise ConfigError("--perfetto writes a single run: give it without --what-if")
    ended, outcomes = threading.Event(), []
    try:
        for variant, load in zip(variants, loads, strict=True):
            outcome = await asyncio.to_thread(_run, variant, load, total or 0, trace, ended)
            outcomes.append((variant.label, outcome))
    finally:
        ended.set()
    setups = [variant.setup for variant in variants]
    rows = [(label, report.figures(outcome, slo, price=price)) for label, outcome in outcomes]
    facts = {
        "load": options.trace or options.workload,
        "costs": "; ".join(dict.fromkeys(each.costs.description for each in setups)),
        "seed": ", ".join(dict.fromkeys(str(each.seed) for each in setups)),
    }
    if any(each.costs.extrapolated for each in setups):
        facts["note"] = "figures are extrapolated: the costs were not measured on this hardware"
    found = zip(setups, outcomes, strict=True)
    beyond = {setup.costs.outside(outcome.largest) for setup, (_, outcome) in found} - {""}
    if beyond:
        facts["note"] = (
            f"figures are extrapolated: steps have more {', '.join(sorted(beyond))} than were measured"
        )
    write("\n".join(f"{name:6} {fact}" for name, fact in facts.items()))
    write(f"\n{report.table(rows)}")
    try:
        if options.json is not None:
            options.json.write_text(f"{report.as_json(rows, **facts)}\n")
        if trace is not None:
            trace.write(options.perfetto)
            more = f", {trace.left_out} later ones left out" if trace.left_out else ""
            write(f"\n{trace.kept} events in {options.perfetto}{more}; open it at https://ui.perfetto.dev")
        if options.plots is not None:
            drawings.draw(outcomes, rows, options.plots)
    except OSError as error:
        note(f"aioinfer: {error}")
        return 1
    return 0


def _variants(options: argparse.Namespace) -> list[sweep.Variant]:
    """The runs of the command, checked as far as this is possible before the first one."""
    config = read_settings(EngineConfig, options)
    if config.costs is None:
        raise ConfigError("a simulation needs --costs FILE, which aioinfer calibrate writes")
    roles = tuple(options.roles.split(",")) if options.roles else ()
    setup = running.Setup(
        costs=Costs.read(Path(config.costs)),
        config=config,
        replicas=sweep.parse("replicas", vars(options).get("replicas") or str(len(roles) or 1)),
        routing=sweep.parse("routing", options.routing),
        roles=roles,
        events=sweep.events(options.kill, options.drain, options.join),
        exact=options.exact,
        seed=config.seed or 0,
    )
    found = sweep.variants(setup, sweep.parse("rate", options.rate), options.what_if)
    for variant in found:
        variant.setup.check()
    return found


def _load(options: argparse.Namespace, variant: sweep.Variant, most: int | None) -> Load:
    """The load of a variant, which is made while it is simulated."""
    until = None if options.duration is None else sweep.duration(options.duration, "--duration")
    if options.trace is not None:
        return scaled(read_trace(options.trace), variant.rate, most, until)
    if options.workload not in WORKLOADS:
        raise ConfigError(f"--workload must be one of {', '.join(WORKLOADS)}; got {shown(options.workload)}")
    spec = WORKLOADS[options.workload]
    if most is not None or until is not None:
        spec = replace(spec, requests=most, seconds=until)
    return synthesize(replace(spec, rate=spec.rate * variant.rate), variant.setup.seed)


class _Ended(Exception):
    """The command was cancelled, and its thread ends."""


def _run(
    variant: sweep.Variant, load: Load, total: int, trace: VirtualTrace | None, ended: threading.Event
) -> Outcome:
    """Simulate, until ``ended`` is set. ``total``: requests, 0 if unknown."""
    stage, started, bar = variant.label or "simulation", time.perf_counter(), Progress()

    def progress(seconds: float, requests: int) -> None:
        if ended.is_set():
            raise _Ended
        bar(f"{stage}, requests", requests, total)

    outcome = running.simulate(load, variant.setup, progress=progress, trace=trace)
    bar("", 1, 1)  # takes the bar away
    note(f"{stage}: {outcome.seconds:.0f} s in {time.perf_counter() - started:.1f} s")
    return outcome
