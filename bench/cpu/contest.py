"""The contest: engines loaded, measured in turns, stopped in between; what each of them did."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.cpu.cells import Cell, agreement, figures, prompts, schedule
from bench.peers.process import PeerFailed, PeerProcess
from bench.peers.watch import Memory, Watch, available_gib, locked

__all__ = ["Contest", "Contestant", "Limits", "needed_gib"]

#: GiB that a process has besides weights and KV
_BASE = 0.75
#: share of the free memory that engines may take together
_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class Limits:
    """What is put up with."""

    #: seconds that a peer may take
    load: float = 900.0
    run: float = 300.0
    #: cores used by others, or by the hypervisor's other guests, in which a sample is as good as none
    noise: float = 0.25
    #: samples that are taken until there is a quiet one
    attempts: int = 1


@dataclass(slots=True)
class Contestant:
    """An engine, how it is started, and what came of it."""

    name: str
    command: Sequence[str]
    cwd: Path
    log: Path
    #: of the load request
    settings: dict[str, Any]
    #: GiB that it needs, roughly
    need: float = 0.0
    process: PeerProcess | None = None
    #: why it is out
    failed: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    load_seconds: list[float] = field(default_factory=list)
    peak: Memory = field(default_factory=Memory)
    #: what every cell was like, round by round
    samples: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    #: what it said, by round, cell and attempt
    tokens: dict[tuple[int, str, int], list[list[int]]] = field(default_factory=dict)
    #: cells that it could not do, and why
    errors: dict[str, str] = field(default_factory=dict)

    def result(self) -> dict[str, Any]:
        """For the report."""
        return {
            "facts": self.facts,
            "load_s": self.load_seconds,
            "peak_rss_mib": self.peak.resident,
            "peak_private_mib": self.peak.private,
            "failed": self.failed,
            "errors": self.errors,
            "samples": self.samples,
        }


class Contest:
    """Runs engines one at a time. Processes are gone when it is left."""

    def __init__(
        self,
        engines: Sequence[Contestant],
        cells: Sequence[Cell],
        vocab: int,
        limits: Limits,
        *,
        seed: int = 0,
        lock: Path | None = None,
    ) -> None:
        self._engines = {engine.name: engine for engine in engines}
        self._cells = cells
        self._vocab = vocab
        self._limits = limits
        self._seed = seed
        self._lock = lock
        self._wakes = itertools.count()

    def run(self, rounds: int, together: bool | None = None) -> bool:
        """All rounds; ``together`` says whether all engines stay loaded, None lets memory decide. Returns how
        it was."""
        engines = list(self._engines.values())
        if together is None:
            wanted, free = sum(engine.need for engine in engines), available_gib()
            together = wanted < _SHARE * free
            how = "all stay loaded" if together else "one at a time is loaded"
            print(f"{how}: about {wanted:.1f} GiB wanted for all, {free:.1f} free", flush=True)
        try:
            if together:
                for engine in engines:
                    self._load(engine)
                    self._rest(engine, together)
            for turn in schedule(list(self._engines), self._cells, rounds, together):
                engine = self._engines[turn.engine]
                if not together:
                    self._load(engine)
                with locked(self._lock):
                    if together:
                        self._wake(engine)
                    for cell in turn.cells:
                        self._measure(engine, cell, turn.round)
                    self._rest(engine, together)
        finally:
            for engine in engines:
                if engine.process is not None:
                    engine.process.kill()
        self._compare()
        return together

    def _compare(self) -> None:
        """Hold everybody's tokens against those of the first engine, where it has some."""
        reference, *_ = self._engines.values()
        for engine in self._engines.values():
            for name, samples in engine.samples.items():
                for sample in samples:
                    key = sample["round"], name, sample["attempt"]
                    if key in reference.tokens:
                        sample["agreement"] = agreement(reference.tokens[key], engine.tokens[key])

    def _wake(self, engine: Contestant) -> None:
        """Have it go on, first with a short run: being stopped costs a process something later."""
        if engine.process is None:
            return
        engine.process.resume()
        short = Cell(1, min(16, self._cells[0].prompt), 2)
        try:
            self._ask(engine.process, short, f"awake {next(self._wakes)}", short.output)
        except PeerFailed as error:
            self._out(engine, str(error))

    def _rest(self, engine: Contestant, together: bool) -> None:
        if engine.process is None:
            return
        if together:
            engine.process.pause()
        else:
            engine.process.close()
            engine.process = None

    def _load(self, engine: Contestant) -> None:
        """Start it, load, and compute every cell's shape once for few tokens; nothing if it is out."""
        if engine.failed is not None:
            return
        try:
            process = PeerProcess(engine.command, log=engine.log, cwd=engine.cwd)
        except OSError as error:
            engine.failed = f"cannot be started: {error}"
            _say(engine, engine.failed)
            return
        engine.process = process
        begin = time.monotonic()
        with Watch(process.pid) as use:
            try:
                told = process.ask("load", self._limits.load, settings=engine.settings)
                engine.facts = told["facts"]
            except PeerFailed as error:
                self._out(engine, str(error))
            for cell in self._cells:
                self._warm(engine, cell)
        engine.peak = engine.peak.max(use.peak)
        if engine.failed is None:
            engine.load_seconds.append(time.monotonic() - begin)
            _say(engine, f"loaded and warm in {engine.load_seconds[-1]:.0f} s")

    def _warm(self, engine: Contestant, cell: Cell) -> None:
        if engine.process is None or cell.name in engine.errors:
            return
        short = dataclasses.replace(cell, output=min(4, cell.output))
        try:
            self._ask(engine.process, short, "warm", short.output)
        except PeerFailed as error:
            self._failed(engine, cell, str(error))

    def _measure(self, engine: Contestant, cell: Cell, round: int) -> None:
        """A sample of the cell: the first that little disturbed, or of all attempts the least disturbed."""
        samples: list[dict[str, Any]] = []
        for attempt in range(self._limits.attempts):
            sample = self._sample(engine, cell, round, attempt)
            if sample is None:
                break
            rate = sample.get(cell.metric)
            _say(
                engine,
                f"round {round + 1}, {cell.name}: {f'{rate:.1f} tokens/s' if rate else 'no rate'}, "
                f"{sample['peak_rss_mib']:.0f} MiB, others used {sample['others_cores']:.2f} cores",
            )
            samples.append(sample)
            if _disturbed(sample) <= self._limits.noise:
                break
        if samples:
            engine.samples.setdefault(cell.name, []).append(min(samples, key=_disturbed))

    def _sample(self, engine: Contestant, cell: Cell, round: int, attempt: int) -> dict[str, Any] | None:
        """One run for one token, and one for all; None if it cannot do it."""
        process = engine.process
        if process is None or cell.name in engine.errors:
            return None
        whole: dict[str, Any] | None = None
        with Watch(process.pid) as use:
            try:
                first = self._ask(process, cell, f"{round}:{attempt}:first", 1)
                if cell.output > 1:
                    whole = self._ask(process, cell, f"{round}:{attempt}:whole", cell.output)
            except PeerFailed as error:
                self._failed(engine, cell, str(error))
                first = None
        engine.peak = engine.peak.max(use.peak)
        if first is None:
            return None
        last = whole or first
        sample: dict[str, Any] = {
            "round": round,
            "attempt": attempt,
            **figures(cell, first["seconds"], whole["seconds"] if whole else None),
            "peak_rss_mib": use.peak.resident,
            "cpu_s": use.cpu,
            "own_cpu_s": use.own_cpu,
            "others_cores": use.others_cpu / use.seconds,
            "stolen_cores": use.stolen / use.seconds,
        }
        if "breakdown" in last:
            sample["breakdown"] = last["breakdown"]
        engine.tokens[round, cell.name, attempt] = last["tokens"]
        return sample

    def _ask(self, process: PeerProcess, cell: Cell, what: str, new_tokens: int) -> dict[str, Any]:
        made = prompts(cell, self._vocab, self._seed, what)
        answer = process.ask("run", self._limits.run, prompts=made, new_tokens=new_tokens)
        tokens, seconds = answer.get("tokens"), answer.get("seconds")
        lists = isinstance(tokens, list) and all(isinstance(ids, list) for ids in tokens)
        if not lists or [len(ids) for ids in tokens or []] != [new_tokens] * len(made):
            raise PeerFailed(f"{cell.name}: it answered with other than {new_tokens} tokens for each prompt")
        if not isinstance(seconds, float) or seconds <= 0:
            raise PeerFailed(f"{cell.name}: it says that it took {seconds} seconds")
        return answer

    def _failed(self, engine: Contestant, cell: Cell, why: str) -> None:
        """A cell that it cannot do costs it that cell; if it died or hung, it is out."""
        engine.errors[cell.name] = why
        assert engine.process is not None
        if engine.process.exit_code is not None:
            self._out(engine, f"{cell.name}: {why}")
        else:
            _say(engine, f"{cell.name}: {why}")

    def _out(self, engine: Contestant, why: str) -> None:
        assert engine.process is not None
        engine.process.kill()
        engine.process, engine.failed = None, why
        _say(engine, f"out: {why}")


def needed_gib(copies: float, checkpoint: float, kv: float) -> float:
    """What an engine takes, roughly: so many sizes of the checkpoint, the KV budget, and itself."""
    return copies * checkpoint + kv + _BASE


def _disturbed(sample: dict[str, Any]) -> float:
    """Cores that somebody else had meanwhile."""
    return float(sample["others_cores"] + sample["stolen_cores"])


def _say(engine: Contestant, text: str) -> None:
    print(f"{engine.name:12s} {text}", flush=True)
