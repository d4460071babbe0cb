"""Coroutines of a dispatcher that are closed at an await: nothing is raised, and what they had begun is
undone."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aioinfer.parallel import Dispatcher
from tests.parallel.framed import Kind, both
from tests.parallel.toys import PARAMS, Toy, prompt, toys, turn, virtual
from tests.toys.adapters import write_toy_adapter

CALLS: dict[str, Callable[[Dispatcher, Path], Any]] = {
    "load_adapter": lambda dispatcher, path: dispatcher.load_adapter("a", path),
    "unload_adapter": lambda dispatcher, path: dispatcher.unload_adapter("there"),
    "restart": lambda dispatcher, path: dispatcher.restart("local-0"),
    "remove": lambda dispatcher, path: dispatcher.remove("local-0"),
    "add": lambda dispatcher, path: dispatcher.add(Toy()),
    "pause": lambda dispatcher, path: dispatcher.pause(),
}


@both
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("turns", [0, 1, 3, 9])
@virtual
async def test_a_call_that_is_closed_at_an_await_undoes_what_it_had_begun(
    kind: Kind, name: str, turns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``turns``: of the loop, from its first await on."""
    raised: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", raised.append)
    wrong: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: wrong.append(context))
    async with kind(toys(2)) as dispatcher:
        await dispatcher.load_adapter("there", write_toy_adapter(tmp_path / "1", "1"))
        path, streams = write_toy_adapter(tmp_path / "2", "2"), []
        for number in range(4):
            streams.append(dispatcher.generate(prompt(number), PARAMS))
        await turn()
        call = CALLS[name](dispatcher, path)
        call.send(None)
        for _ in range(turns):
            await asyncio.sleep(0)
        call.close()
        del call
        gc.collect()
        await asyncio.sleep(1.0)
        dispatcher.resume()
        assert [len((await each).token_ids) for each in streams] == [8] * 4
        for adapter in ("a", "there"):
            assert len({each.has(adapter) for each in dispatcher._replicas if each.takes_work}) == 1
        assert not dispatcher._changed
        lost = [each.name for each in dispatcher._replicas if not each.takes_work]
        for each in lost:
            await dispatcher.restart(each)
        assert len((await dispatcher.generate(prompt(9), PARAMS)).token_ids) == 8
    assert not raised
    assert not wrong
