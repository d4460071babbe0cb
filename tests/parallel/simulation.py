"""Random lifetimes of streams of a dispatcher, in virtual time, while replicas come and go."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

from aioinfer.errors import EngineFailed
from aioinfer.parallel import Dispatcher
from aioinfer.parallel.record import Record
from aioinfer.parallel.replica import ReplicaState
from aioinfer.parallel.rows import Ending
from aioinfer.testing import VirtualLoop
from tests.engine.simulation import lifetime, settle
from tests.engine.worlds import World
from tests.parallel.worlds import (
    check_loads,
    check_sums,
    disturb,
    make_dispatcher_world,
    may_fail,
    move_sessions,
)

__all__ = ["simulate"]


async def run_world(world: World, dispatcher: Dispatcher, lifetimes: int) -> None:
    await dispatcher.start()
    disturbing = asyncio.ensure_future(disturb(world, dispatcher))
    moving = asyncio.ensure_future(move_sessions(world, dispatcher))
    async with asyncio.TaskGroup() as group:
        for number in range(lifetimes):
            group.create_task(lifetime(world, number))
        group.create_task(_until_all_have_arrived(disturbing, group))
    for operator in (disturbing, moving):
        operator.cancel()
        await asyncio.wait([operator])
        if not operator.cancelled():
            operator.result()
    gc.collect()
    await asyncio.sleep(45.0)  # what is lost last is noticed by its silence
    world.verify(world, world.claims)
    running = dispatcher._started()
    assert not running.open, "a stream has not ended"
    assert not len(running.queue)
    assert not len(running.handovers)
    assert not running.queue.tokens
    assert not running.placing._sharing
    for replica in dispatcher._replicas:
        assert not replica.load.requests
        assert replica.load.backlog == replica.load.tokens == replica.load.resuming == 0
        assert not replica.load.pages
        assert not replica.held
        if replica.state is ReplicaState.READY:
            engine: Any = replica
            await settle(engine.engine)
    check_loads(dispatcher)
    check_sums(dispatcher)
    world.counts["moved"] += running.resumed
    world.counts["handed over"] += running.handovers.done
    world.counts["handed over with pages"] += running.handovers.done - running.handovers.without_pages
    assert not running.diverged
    await dispatcher.aclose()


async def _until_all_have_arrived(disturbing: asyncio.Task[None], group: asyncio.TaskGroup) -> None:
    """An operator that fails ends the world."""
    while True:
        await asyncio.sleep(0.05)
        assert asyncio.get_running_loop().time() < 200, "a stream does not end"
        if disturbing.done():
            disturbing.result()
        tasks = [each for each in group._tasks if each is not asyncio.current_task()]
        if not tasks:
            return


def simulate(seed: int, lifetimes: int) -> World:
    """Run one world to its end. Every failure names the seed."""
    finish = Record.finish

    world, dispatcher = make_dispatcher_world(seed)

    def once(self: Record, ending: Ending, now: float) -> None:
        assert not self.output.finished, "a stream ended twice"
        if isinstance(ending.error, EngineFailed):
            assert may_fail(dispatcher, self), f"{self} failed: {ending.error}"
            world.counts["streams lost"] += 1
        finish(self, ending, now)

    loop = VirtualLoop(seed, shuffle=seed % 2 == 1, executor_delay=0.003)
    raised: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: raised.append(context))
    Record.finish = once  # type: ignore[method-assign]
    try:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(run_world(world, dispatcher, lifetimes))
        wrong = [each for each in raised if "never retrieved" not in each["message"]]
        assert not wrong, wrong
    except BaseException as error:
        error.add_note(f"seed={seed} lifetimes={lifetimes} {dispatcher._policy} {dispatcher._on_loss}")
        raise
    finally:
        Record.finish = finish  # type: ignore[method-assign]
    return world
