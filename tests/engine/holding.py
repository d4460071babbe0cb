"""Holds, commits on demand and sessions in random lives: somebody does what sessions do, at any moment."""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aioinfer import Session, errors
from aioinfer.engine import Engine
from aioinfer.loop.holding import Held
from aioinfer.params import SamplingParams
from aioinfer.stream import Stream

__all__ = ["hold_and_commit", "through_a_session"]

_NOTHING = SamplingParams(temperature=0, max_tokens=0)


async def hold_and_commit(engine: Engine, seed: int) -> None:
    """Offer what requests have so far to others, hold it, fork and release holds, until it is cancelled."""
    dice, held = random.Random(seed), list[Held]()
    while True:
        await asyncio.sleep(dice.expovariate(1 / 0.01))
        runtime = engine._started()
        if runtime.state.value != "running":
            return
        queues, holding = runtime.core.scheduler.queues, runtime.holding
        for sequence in [*queues.running.values()]:
            if dice.random() < 0.5:
                before = sequence.kv.cached_pages
                assert runtime.core.commit(sequence) >= before * queues.memory.pages.page_size
            if dice.random() < 0.3:
                key = sequence.token_key(0, dice.randrange(sequence.known + 1))
                new = holding.hold(key, sequence.namespace, dice.choice([None, 0.01, 0.1]))
                again = None if new is None else new.again()
                held += [each for each in (new, again) if each is not None]
        dice.shuffle(held)
        while len(held) > 6 or (held and dice.random() < 0.3):
            held.pop().release()
        for each in held:
            each.touch()
        assert queues.memory.held_pages <= engine.config.max_held_share * queues.memory.pages.total
        runtime.driver.wake()


async def through_a_session(
    engine: Engine,
    dice: random.Random,
    ids: Sequence[int],
    params: SamplingParams,
    options: Mapping[str, Any],
) -> Stream:
    """The same request as the turn of a session, whose past is a part of the prompt, or nothing where that
    could not be computed; perhaps of a fork of it, or of one that was saved and loaded."""
    fixed = {name: value for name, value in options.items() if name == "cache_salt"}
    session: Session = engine.session(**fixed)
    with contextlib.suppress(errors.AioInferError):
        await session.generate(ids[: dice.randrange(len(ids))], _NOTHING)
    if dice.random() < 0.3:
        session = session.fork()
    if dice.random() < 0.3:
        with tempfile.TemporaryDirectory() as place, contextlib.suppress(errors.AioInferError):
            path = Path(place) / "session"
            await session.save(path)
            loaded = await engine.load_session(path)
            assert loaded.token_ids == session.token_ids
            session = loaded
    rest = {name: value for name, value in options.items() if name not in fixed}
    return session.generate(list(ids[session.num_tokens :]), params, **rest)
