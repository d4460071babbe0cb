"""The contest: engines loaded, measured in turns and stopped in between; and the figures that result."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.peers.process import PeerFailed, PeerProcess
from bench.peers.watch import Watch
from bench.report import Report

__all__ = ["Cell", "Contest", "Contestant", "Limits", "figures", "prompts", "ratio", "schedule", "tell"]


@dataclass(frozen=True, slots=True)
class Cell:
    """So many sequences at once; with one new token it is a prefill."""

    concurrency: int
    prompt: int
    output: int

    @property
    def name(self) -> str:
        return f"c={self.concurrency}" if self.output > 1 else f"prefill {self.concurrency}x{self.prompt}"

    @property
    def metric(self) -> str:
        """The figure that stands for it."""
        return "decode_tokens_per_s" if self.output > 1 else "prefill_tokens_per_s"


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds that a peer may take, and disturbance that a sample may have."""

    load: float = 900.0
    run: float = 300.0
    #: cores used by others, or by the hypervisor's other guests, beyond which a sample is taken again
    noise: float = 0.25
    #: samples that are taken until there is a quiet one
    attempts: int = 1


@dataclass(slots=True)
class Contestant:
    """An engine, how it is started, and its results."""

    name: str
    command: Sequence[str]
    cwd: Path
    log: Path
    #: of the load request
    settings: dict[str, Any]
    process: PeerProcess | None = None
    #: why it is out
    failed: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    peak_mib: float = 0.0
    #: samples of every cell, round by round
    samples: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    #: cells that it could not do, and why
    errors: dict[str, str] = field(default_factory=dict)

    def by_round(self, cell: Cell, metric: str) -> dict[int, float]:
        found = self.samples.get(cell.name, [])
        return {sample["round"]: sample[metric] for sample in found if metric in sample}


class Contest:
    """Runs engines one at a time. Processes are gone when it is left."""

    def __init__(
        self, engines: Sequence[Contestant], cells: Sequence[Cell], vocab: int, limits: Limits, seed: int = 0
    ) -> None:
        self._engines = {engine.name: engine for engine in engines}
        self._cells = cells
        self._vocab = vocab
        self._limits = limits
        self._seed = seed

    def run(self, rounds: int) -> None:
        try:
            for engine in self._engines.values():
                self._load(engine)
            for number, name, cell in schedule(list(self._engines), self._cells, rounds):
                engine = self._engines[name]
                self._wake(engine, f"{number}:{cell.name}")
                self._measure(engine, cell, number)
                if engine.process is not None:
                    engine.process.pause()
        finally:
            for engine in self._engines.values():
                if engine.process is not None:
                    engine.process.kill()

    def _load(self, engine: Contestant) -> None:
        """Start it, load, compute every cell's shape once for few tokens, and stop it."""
        begin = time.monotonic()
        try:
            process = engine.process = PeerProcess(engine.command, log=engine.log, cwd=engine.cwd)
        except OSError as error:
            engine.failed = f"cannot be started: {error}"
            return
        with Watch(process.pid) as use:
            try:
                told = process.ask("load", self._limits.load, settings=engine.settings)
                engine.facts = told["facts"]
            except PeerFailed as error:
                self._out(engine, str(error))
            for cell in self._cells:
                if engine.process is not None:
                    self._try(engine, cell, "warm", min(4, cell.output))
        engine.peak_mib = use.peak_mib
        if engine.process is not None:
            engine.process.pause()
            _say(engine, f"loaded and warm in {time.monotonic() - begin:.0f} s")

    def _wake(self, engine: Contestant, what: str) -> None:
        """Have it go on, first with a short run: being stopped costs a process something later."""
        if engine.process is None:
            return
        engine.process.resume()
        short = Cell(1, min(16, self._cells[0].prompt), 2)
        try:
            self._ask(engine.process, short, f"awake {what}", short.output)
        except PeerFailed as error:
            self._out(engine, str(error))

    def _measure(self, engine: Contestant, cell: Cell, number: int) -> None:
        """Keep the first quiet sample of a cell, or the least disturbed of all attempts."""
        samples: list[dict[str, Any]] = []
        for attempt in range(self._limits.attempts):
            sample = self._sample(engine, cell, number, attempt)
            if sample is None:
                break
            rate = sample.get(cell.metric)
            shown = f"{rate:.1f} tokens/s" if rate else "no rate"
            _say(
                engine, f"round {number + 1}, {cell.name}: {shown}, others {sample['others_cores']:.2f} cores"
            )
            samples.append(sample)
            if sample["others_cores"] <= self._limits.noise:
                break
        if samples:
            quietest = min(samples, key=lambda sample: float(sample["others_cores"]))
            engine.samples.setdefault(cell.name, []).append(quietest)

    def _sample(self, engine: Contestant, cell: Cell, number: int, attempt: int) -> dict[str, Any] | None:
        """One run for one token, and one for all; None if it cannot do it."""
        if engine.process is None or cell.name in engine.errors:
            return None
        with Watch(engine.process.pid) as use:
            first = self._try(engine, cell, f"{number}:{attempt}:first", 1)
            whole = None
            if first is not None and cell.output > 1:
                whole = self._try(engine, cell, f"{number}:{attempt}:whole", cell.output)
        engine.peak_mib = max(engine.peak_mib, use.peak_mib)
        if first is None or cell.name in engine.errors:
            return None
        return {
            "round": number,
            **figures(cell, first["seconds"], whole["seconds"] if whole else None),
            "others_cores": use.others_cores,
            "first_tokens": [ids[0] for ids in first["tokens"]],
        }

    def _try(self, engine: Contestant, cell: Cell, what: str, new_tokens: int) -> dict[str, Any] | None:
        """An answer; None if it fails, which costs it that cell, or everything if it died or hung."""
        assert engine.process is not None
        try:
            return self._ask(engine.process, cell, what, new_tokens)
        except PeerFailed as error:
            engine.errors[cell.name] = str(error)
            if engine.process.exit_code is not None:
                self._out(engine, f"{cell.name}: {error}")
            return None

    def _ask(self, process: PeerProcess, cell: Cell, what: str, new_tokens: int) -> dict[str, Any]:
        made = prompts(replace(cell, output=new_tokens), self._vocab, self._seed, cell.output, what)
        return process.ask("run", self._limits.run, prompts=made, new_tokens=new_tokens)

    def _out(self, engine: Contestant, why: str) -> None:
        assert engine.process is not None
        engine.process.kill()
        engine.process, engine.failed = None, why
        _say(engine, f"out: {why}")


def _say(engine: Contestant, text: str) -> None:
    print(f"{engine.name:12s} {text}", flush=True)


def figures(cell: Cell, first: float, whole: float | None) -> dict[str, float]:
    """Rates in tokens/s from the seconds of one new token and of all; ``whole`` is None for a prefill.

    There is no decode rate where more tokens took no longer than one: something else was in the way.
    """
    rates = {"prefill_tokens_per_s": cell.concurrency * cell.prompt / first}
    if whole is not None:
        rates["end_to_end_tokens_per_s"] = cell.concurrency * cell.output / whole
        if whole > first:
            rates["decode_tokens_per_s"] = cell.concurrency * (cell.output - 1) / (whole - first)
    return rates


def prompts(cell: Cell, vocab: int, *seed: Any) -> list[list[int]]:
    """Random ids, the same for the same seed."""
    rng = random.Random(":".join(map(str, (cell.name, *seed))))
    return [[rng.randrange(vocab) for _ in range(cell.prompt)] for _ in range(cell.concurrency)]


def schedule(engines: Sequence[str], cells: Sequence[Cell], rounds: int) -> Iterator[tuple[int, str, Cell]]:
    """Turns (round, engine, cell): engines alternate cell by cell; who begins changes every round."""
    for number in range(rounds):
        at = number % len(engines)
        for cell in cells:
            for engine in [*engines[at:], *engines[:at]]:
                yield number, engine, cell


def ratio(ours: dict[int, float], theirs: dict[str, dict[int, float]]) -> dict[str, Any] | None:
    """One engine's figure over the best of the others', by round.

    The best has the highest median; the ratio is taken round by round, where disturbances were the same for
    both. None if there is no round that both have.
    """
    medians = {name: statistics.median(values.values()) for name, values in theirs.items() if values}
    if not medians or not ours:
        return None
    best = max(medians, key=lambda name: medians[name])
    shared = [value / theirs[best][number] for number, value in ours.items() if number in theirs[best]]
    return {"over": best, **_spread(shared)} if shared else None


def _spread(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def tell(engines: Sequence[Contestant], cells: Sequence[Cell], report: Report) -> None:
    """Report a row per cell and engine, and the first engine over the best of the others."""
    ours, *theirs = engines
    for cell in cells:
        for engine in engines:
            rate = _spread(list(engine.by_round(cell, cell.metric).values()))
            whole = _spread(list(engine.by_round(cell, "end_to_end_tokens_per_s").values()))
            samples = engine.samples.get(cell.name, [])
            report.row(
                cell=cell.name,
                engine=engine.name,
                tokens_per_s=rate.get("median"),
                min=rate.get("min"),
                max=rate.get("max"),
                end_to_end=whole.get("median"),
                others_cores=max((sample["others_cores"] for sample in samples), default=None),
                same_first=_same_first(ours.samples.get(cell.name, []), samples),
                peak_mib=engine.peak_mib,
            )
    for cell in cells:
        compared = {cell.name: cell.metric}
        if cell.output > 1:
            compared[f"{cell.name} end to end"] = "end_to_end_tokens_per_s"
        for name, metric in compared.items():
            others = {peer.name: peer.by_round(cell, metric) for peer in theirs}
            if found := ratio(ours.by_round(cell, metric), others):
                report.row(cell=name, engine=ours.name, **found)
    for engine in engines:
        for name, error in engine.errors.items():
            report.error(f"{engine.name}: {name} failed: {error[:300]}")
        if engine.failed:
            report.error(f"{engine.name} is out: {engine.failed[:300]}")
    report.add(
        engines={engine.name: {"facts": engine.facts, "samples": engine.samples} for engine in engines}
    )


def _same_first(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> float | None:
    """Share of sequences with the same first token: whether it is the same model."""
    pairs = [
        (a, b)
        for one, other in zip(ours, theirs, strict=False)
        for a, b in zip(one["first_tokens"], other["first_tokens"], strict=True)
    ]
    return sum(a == b for a, b in pairs) / len(pairs) if pairs else None
