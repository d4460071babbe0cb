"""Thread pools: threads that compute one program after the other."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from aioinfer.model.native_linear import NativeLinear
from aioinfer.native.bindings import ThreadPool, shared_thread_pool
from tests.native.support import normal
from tests.tiers import RACES, nightly

WEIGHT = normal(40, 16, seed=0)


def program(pool: ThreadPool) -> NativeLinear:
    """A small one: two phases, each with a barrier."""
    return NativeLinear(pool, WEIGHT, None)


@nightly(RACES)
def test_callers_on_many_threads_take_turns() -> None:
    """Two pools with four callers each, all at once."""
    weight = normal(96, 64, seed=0)
    layers = [NativeLinear(shared_thread_pool(threads), weight, None) for threads in (2, 3)]
    inputs = [normal(rows, 64, seed=rows) for rows in range(1, 9)]
    wanted = [layers[0](values) for values in inputs]
    start = threading.Barrier(8)

    def call(at: int) -> bool:
        start.wait()
        return all(torch.equal(layers[at % 2](inputs[at]), wanted[at]) for _ in range(200))

    with ThreadPoolExecutor(8) as callers:
        assert all(callers.map(call, range(8)))


@nightly(RACES)
def test_many_more_threads_than_cores_get_through_thousands_of_small_programs() -> None:
    values = normal(3, 16, seed=1)
    wanted = program(shared_thread_pool(1))(values)
    for threads, programs in ((16, 300), (3, 3000)):
        layer = program(ThreadPool(threads))
        for _ in range(programs):
            assert torch.equal(layer(values), wanted)


def test_pools_come_and_go() -> None:
    """Also those that never computed anything."""
    values = normal(2, 16, seed=1)
    wanted = program(shared_thread_pool(1))(values)
    for at in range(60):
        pool = ThreadPool(1 + at % 5)
        if at % 3:
            assert torch.equal(program(pool)(values), wanted)


def test_threads_that_cannot_be_created_are_an_error_and_do_not_end_the_process() -> None:
    """Each has a stack of megabytes, and memory is short: some threads exist when the next one fails."""
    code = """if True:
        import resource
        from aioinfer.native.bindings import ThreadPool, ThreadsUnavailable, kernels
        kernels()
        resource.setrlimit(resource.RLIMIT_STACK, (8 << 20, 8 << 20))
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
        try:
            ThreadPool(1000)
        except ThreadsUnavailable as error:
            print(error)
        ThreadPool(2)
    """
    # The stack of a thread is as large as the limit when the process began.
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert re.match(r"aioinfer_thread_pool: thread \d+ of 1000 cannot be created: ", done.stdout)


def test_a_process_shares_one_pool_of_a_size_while_it_is_in_use() -> None:
    pool = shared_thread_pool(5)
    assert shared_thread_pool(5) is pool
    assert shared_thread_pool(4) is not pool
    assert (pool.threads, shared_thread_pool(4).threads) == (5, 4)


def test_programs_of_nothing_end() -> None:
    assert program(shared_thread_pool(3))(torch.empty(0, 16)).shape == (0, 40)
