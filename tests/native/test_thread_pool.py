"""Teams: threads that compute one program after the other."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from aioinfer.model.native import NativeLinear
from aioinfer.native.bindings import ThreadPool, shared_thread_pool
from tests.native.support import normal
from tests.tiers import RACES, battery

WEIGHT = normal(40, 16, seed=0)


def program(team: ThreadPool) -> NativeLinear:
    """A small one: two phases, and a barrier behind each."""
    return NativeLinear(team, WEIGHT, None)


@battery(RACES)
def test_callers_on_many_threads_take_turns() -> None:
    """Two teams, and four callers each; all of them at once."""
    weight = normal(96, 64, seed=0)
    layers = [NativeLinear(shared_thread_pool(threads), weight, None) for threads in (2, 3)]
    inputs = [normal(rows, 64, seed=rows) for rows in range(1, 9)]
    wanted = [layers[0](values) for values in inputs]
    start = threading.Barrier(8)

    def call(at: int) -> bool:
        start.wait()
        return all(torch.equal(layers[at % 2](inputs[at]), wanted[at]) for _ in range(200))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(call, range(8)))


@battery(RACES)
def test_many_more_threads_than_cores_get_through_thousands_of_small_programs() -> None:
    values = normal(3, 16, seed=1)
    wanted = program(shared_thread_pool(1))(values)
    for threads, programs in ((16, 300), (3, 3000)):
        layer = program(ThreadPool(threads))
        for _ in range(programs):
            assert torch.equal(layer(values), wanted)


def test_teams_come_and_go() -> None:
    """Those that have never computed anything, too."""
    values = normal(2, 16, seed=1)
    wanted = program(shared_thread_pool(1))(values)
    for at in range(60):
        team = ThreadPool(1 + at % 5)
        if at % 3:
            assert torch.equal(program(team)(values), wanted)


def test_threads_that_cannot_be_had_are_an_error_and_no_end_of_the_process() -> None:
    """Each has a stack of megabytes, for which there is no room: some of them exist when it comes out."""
    code = """if True:
        import resource
        from aioinfer.native.bindings import ThreadPool, kernels
        kernels()
        resource.setrlimit(resource.RLIMIT_STACK, (8 << 20, 8 << 20))
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
        try:
            ThreadPool(1000)
        except MemoryError as error:
            print(error)
        ThreadPool(2)
    """
    # The stack of a thread is as large as the limit when the process began.
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("aioinfer_team: ")


def test_a_process_has_one_team_of_a_size_while_someone_holds_it() -> None:
    team = shared_thread_pool(5)
    assert shared_thread_pool(5) is team
    assert shared_thread_pool(4) is not team
    assert (team.threads, shared_thread_pool(4).threads) == (5, 4)


def test_programs_of_nothing_end() -> None:
    assert program(shared_thread_pool(3))(torch.empty(0, 16)).shape == (0, 40)
