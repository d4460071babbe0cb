"""Peers are asked with a deadline whatever they do, stopped and ended with all that they started."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import bench.command
import bench.peers.watch
from bench.command import execute
from bench.cpu.contest import Cell, Contest, Contestant, Limits
from bench.gpu.shapes import SHAPES
from bench.peers.adapters.to_gguf import name_in_gguf
from bench.peers.checkpoint import tensor_shapes
from bench.peers.process import PeerFailed, PeerProcess
from bench.peers.registry import ENVIRONMENTS, PEERS
from bench.peers.watch import Watch, tree
from tests.bench.fake_peer import SETTINGS, command_of
from tests.tiers import SECONDS, rest

ROOT = Path(__file__).parents[2]
Start = Callable[[str], PeerProcess]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    started: list[PeerProcess] = []

    def run(mode: str) -> PeerProcess:
        started.append(PeerProcess(command_of(mode), log=tmp_path / f"{mode}.log", cwd=ROOT))
        return started[-1]

    yield run
    for peer in started:
        peer.kill()
        assert _wait_for(lambda peer=peer: not tree(peer.pid))


@pytest.mark.parametrize("mode", ["well", "prints", "rubbish"])
def test_what_libraries_print_is_no_answer(start: Start, mode: str) -> None:
    peer = start(mode)
    assert peer.ask("load", 120, settings=SETTINGS)["facts"] == {"threads": 2, "options": {}}
    made = [[1, 2], [3, 4], list(range(3000))]
    answer = peer.ask("run", 120, prompts=made, new_tokens=3000)
    assert [tokens[:3] for tokens in answer["tokens"][:2]] == [[3, 4, 5], [7, 8, 9]]
    assert [len(tokens) for tokens in answer["tokens"]] == [3000] * 3
    assert answer["seconds"] > 0


@pytest.mark.parametrize(
    ("mode", "why"),
    [
        ("refuses to load", "load: MemoryError: too large"),
        ("stops early", "run: ArithmeticError: 2 tokens came"),
    ],
)
def test_an_error_is_an_answer_and_the_peer_stays(start: Start, mode: str, why: str) -> None:
    peer = start(mode)
    with pytest.raises(PeerFailed, match=why):
        peer.ask("load", 120, settings=SETTINGS)
        peer.ask("run", 120, prompts=[[1]], new_tokens=3)
    assert peer.exit_code is None
    with pytest.raises(PeerFailed, match="cannot 'dance'"):
        peer.ask("dance", 120)


@rest(SECONDS)
def test_a_peer_that_dies_or_hangs_has_ended_when_that_is_told(start: Start, tmp_path: Path) -> None:
    dying, hanging = start("dies"), start("hangs")
    for peer in (dying, hanging):
        peer.ask("load", 120, settings=SETTINGS)
    for _ in range(2):
        with pytest.raises(PeerFailed, match="it ended with 3: no memory left"):
            dying.ask("run", 120, prompts=[[1]], new_tokens=9)
    with pytest.raises(PeerFailed, match="not answer in time"):
        hanging.ask("run", 0.2, prompts=[[1]], new_tokens=9)
    deaf = PeerProcess(["sleep", "600"], log=tmp_path / "log", cwd=ROOT)
    with pytest.raises(PeerFailed, match="it reads nothing"):
        deaf.ask("run", 0.2, prompts=[[1] * 100_000])
    assert hanging.exit_code == deaf.exit_code == -9


def test_stopping_and_ending_reach_the_whole_family(start: Start) -> None:
    peer = start("family")
    peer.ask("load", 120, settings=SETTINGS)
    members = tree(peer.pid)
    assert len(members) == 2
    peer.pause()
    assert _wait_for(lambda: {_state(pid) for pid in members} == {"T"})
    peer.resume()
    assert peer.ask("run", 120, prompts=[[1]], new_tokens=2)["tokens"] == [[1, 2]]
    peer.pause()
    peer.kill()
    assert _wait_for(lambda: {_state(pid) for pid in members} <= {None, "Z"})
    peer.kill()


def test_a_peer_ends_with_a_bench_that_was_killed(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from bench.peers.process import PeerProcess\n"
        f"log = Path({str(tmp_path / 'log')!r})\n"
        "process = PeerProcess([sys.executable, '-c', 'import time; print(flush=True); time.sleep(600)'],"
        " log=log, cwd=log.parent)\n"
        "process._process.stdout.read(1); print(process.pid, flush=True); sys.stdin.read()"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, env=environment, stdin=pipe, stdout=pipe
    ) as harness:
        assert harness.stdout is not None
        pid = int(harness.stdout.readline())
        harness.kill()
    assert _wait_for(lambda: _state(pid) in (None, "Z"))


def test_a_bench_that_is_terminated_ends_its_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    engine = Contestant("well", command_of("well"), ROOT, tmp_path / "log", dict(SETTINGS))
    contest = Contest([engine], [Cell(1, 5, 8)], 50, Limits(load=60, run=60))
    monkeypatch.setattr(contest, "_measure", lambda *_: os.kill(os.getpid(), signal.SIGTERM))

    class Terminated:
        def run(self, *_: Any) -> None:
            contest.run(1)

    monkeypatch.setattr(bench.command, "load", lambda name: Terminated())
    with pytest.raises(SystemExit) as leaving:
        execute("cpu", Namespace(json=None, commit=None))
    assert leaving.value.code == 128 + signal.SIGTERM
    assert engine.process is not None
    assert engine.process.exit_code == -signal.SIGKILL


def _state(pid: int) -> str | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return None


def _wait_for(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + 120
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


def _processes(place: Path, busy: int, **pids: tuple[int, int, int]) -> None:
    """A /proc: ticks of all cores, and parent, ticks and resident pages of processes."""
    for name, (parent, ticks, resident) in pids.items():
        pid = name.removeprefix("pid")
        (place / pid).mkdir(exist_ok=True)
        user = ticks // 2
        fields = f"S {parent} {pid} 1 0 -1 0 0 0 0 0 {user} {ticks - user} 0 0 20 0 1 0"
        _replace(place / pid / "stat", f"{pid} (a name) and (a)) {fields}")
        _replace(place / pid / "statm", f"90000 {resident} 10 1 0 500 0")
    _replace(place / "stat", f"cpu  {busy} 0 0 77 88 0 0 0 0 0\ncpu0 {busy} 0 0 77 88 0 0 0 0 0\n")


def _replace(path: Path, text: str) -> None:
    """Write at once: another thread reads it meanwhile."""
    path.with_name("new").write_text(text)
    path.with_name("new").replace(path)


def test_watching_tells_a_process_from_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.peers.watch, "_PROC", tmp_path)
    monkeypatch.setattr(bench.peers.watch, "_INTERVAL", 0.001)
    times = iter([0.0, 10.0])
    monkeypatch.setattr(bench.peers.watch.time, "monotonic", lambda: next(times))
    tick, mib = 1 / os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE") / 2**20
    _processes(tmp_path, 1000, pid7=(1, 100, 300), pid8=(7, 10, 50), pid9=(1, 500, 9000))
    with Watch(7) as use:
        _processes(tmp_path, 1020, pid7=(1, 105, 900))
        while use.peak_mib != 950 * mib:
            time.sleep(0.001)
        _processes(tmp_path, 1080, pid7=(1, 120, 200), pid8=(7, 20, 60), pid9=(1, 550, 9999))
    assert use.others_cores == pytest.approx(50 * tick / 10)
    assert use.peak_mib == 950 * mib


def test_the_checkpoint_is_qwen3s() -> None:
    shapes = dict(tensor_shapes(SHAPES["0.6b"]))
    assert sum(map(math.prod, shapes.values())) == 596_049_920
    assert len({name_in_gguf(name) for name in shapes}) == len(shapes)
    assert name_in_gguf("model.layers.27.self_attn.q_norm.weight") == "blk.27.attn_q_norm.weight"
    with pytest.raises(KeyError):
        name_in_gguf("model.layers.0.self_attn.q_scale.weight")


def test_every_peer_has_an_adapter_and_an_environment() -> None:
    for peer in PEERS.values():
        assert (ROOT / "bench" / "peers" / "adapters" / f"{peer.adapter}.py").is_file()
        assert peer.environment is None or peer.environment in ENVIRONMENTS
