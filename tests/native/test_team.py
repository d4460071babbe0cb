"""Teams: threads that compute one program after the other; and argmax, the smallest of these."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from aioinfer.model.native import NativeLinear
from aioinfer.native.library import Team, shared_team
from tests.native.support import normal


def argmax(team: Team, values: torch.Tensor) -> list[int]:
    out = torch.full((len(values),), -1, dtype=torch.int64)
    team.argmax(values.data_ptr(), *values.shape, out.data_ptr())
    found: list[int] = out.tolist()
    return found


# Around a vector, a stretch, and several of them.
@pytest.mark.parametrize(
    "width", [1, 7, 8, 9, 15, 16, 17, 31, 33, 1023, 1024, 1025, 1039, 1040, 1041, 2048, 2049, 5000]
)
def test_the_first_of_the_largest_is_found_wherever_it_is(width: int) -> None:
    rng = random.Random(width)
    team = shared_team(2)
    rows = []
    for _ in range(40):
        row = normal(width, seed=rng.randrange(99)).round()
        for _ in range(rng.choice([0, 1, 2])):
            row[rng.randrange(width)] = rng.choice([9.0, float("inf"), float("nan"), float("-inf")])
        rows.append(row)
    rows.append(torch.full((width,), float("-inf")))
    rows.append(torch.full((width,), float("nan")))
    rows.append(torch.full((width,), -0.0))
    last = torch.full((width,), -1e30)
    last[-1] = -1e29
    rows.append(last)
    values = torch.stack(rows)
    assert argmax(team, values) == values.argmax(1).tolist()


def test_callers_on_many_threads_take_turns() -> None:
    """Two teams, and four callers each; all of them at once."""
    weight = normal(96, 64, seed=0)
    layers = [NativeLinear(shared_team(threads), weight, None) for threads in (2, 3)]
    inputs = [normal(rows, 64, seed=rows) for rows in range(1, 9)]
    wanted = [layers[0](values) for values in inputs]
    start = threading.Barrier(8)

    def call(at: int) -> bool:
        start.wait()
        return all(torch.equal(layers[at % 2](inputs[at]), wanted[at]) for _ in range(200))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(call, range(8)))


def test_many_more_threads_than_cores_get_through_thousands_of_small_programs() -> None:
    values = normal(3, 40, seed=1)
    wanted = values.argmax(1).tolist()
    for threads, programs in ((16, 300), (3, 3000)):
        team = Team(threads)
        for _ in range(programs):
            assert argmax(team, values) == wanted


def test_teams_come_and_go() -> None:
    """Those that have never computed anything, too."""
    values = normal(2, 8, seed=1)
    for at in range(60):
        team = Team(1 + at % 5)
        if at % 3:
            assert argmax(team, values) == values.argmax(1).tolist()


@pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="the sanitizer needs all addresses")
def test_threads_that_cannot_be_had_are_an_error_and_no_end_of_the_process() -> None:
    """Each has a stack of megabytes, for which there is no room: some of them exist when it comes out."""
    code = """if True:
        import resource
        from aioinfer.native.library import Team, kernels
        kernels()
        resource.setrlimit(resource.RLIMIT_STACK, (8 << 20, 8 << 20))
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
        try:
            Team(1000)
        except MemoryError as error:
            print(error)
        Team(2)
    """
    # The stack of a thread is as large as the limit when the process began.
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("aioinfer_team: ")


def test_a_process_has_one_team_of_a_size_while_someone_holds_it() -> None:
    team = shared_team(5)
    assert shared_team(5) is team
    assert shared_team(4) is not team
    assert (team.threads, shared_team(4).threads) == (5, 4)


def test_programs_of_nothing_end() -> None:
    assert argmax(shared_team(3), torch.empty(0, 5)) == []
