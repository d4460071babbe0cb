"""What a dispatcher remembers of the prefix caches of engines in other processes."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

from aioinfer import SamplingParams
from aioinfer.parallel.prefixes import PAGE, RememberedPages
from aioinfer.parallel.replica import Load
from tests.parallel.served import dispatching, toy

PROMPT = [number % 30 + 1 for number in range(4 * PAGE)]


def test_what_was_used_last_is_kept_and_of_a_prefix_its_beginning() -> None:
    pages = RememberedPages()
    pages.add([1, 2, 3], 5)
    pages.add([7, 8, 9], 5)
    assert pages.leading([1, 2, 3]) == 2
    pages.add([1, 2], 5)  # used again
    pages.add([10, 11], 5)
    assert [pages.leading(each) for each in ([1, 2], [7, 8, 9], [10, 11])] == [2, 1, 2]
    pages.add([20, 21, 22], 2)  # the replica has come back with fewer
    assert [pages.leading(each) for each in ([1], [20, 21, 22])] == [0, 2]
    pages.clear()
    assert len(pages) == 0


async def test_a_prompt_goes_where_its_beginning_was(tmp_path: Path) -> None:
    """Also when nothing of it is under way, and with the answer that came; a salt makes it another one."""
    params = SamplingParams(max_tokens=2 * PAGE, ignore_eos=True)
    async with dispatching(tmp_path, *(toy() for _ in range(3))) as dispatcher:
        first = await dispatcher.generate(PROMPT, params)
        more = [*PROMPT, *first.token_ids]
        for _ in range(3):
            await dispatcher.generate([5, 6, 7], params)  # each of the others has its turn
            result = await dispatcher.generate([*more, 9, 9], params)
            assert result.usage.cached_tokens >= len(more) - PAGE
        assert (await dispatcher.generate(more, params, cache_salt="another")).usage.cached_tokens == 0


async def test_a_cache_that_is_flushed_is_forgotten(tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    async with dispatching(tmp_path, toy(), toy()) as dispatcher:
        await dispatcher.generate(PROMPT, params)
        assert sum(len(each.remembered) for each in dispatcher.replicas) == 4
        dispatcher.flush_cache()
        assert not any(len(each.remembered) for each in dispatcher.replicas)


async def test_a_replica_that_has_lost_its_pages_is_no_longer_preferred(tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    async with dispatching(tmp_path, toy(), toy()) as dispatcher:
        await dispatcher.generate(PROMPT, params)
        (home,) = [each for each in dispatcher.replicas if len(each.remembered)]
        home.engine.flush_cache()
        stream = dispatcher.generate(PROMPT, params, max_lag=1)  # it cannot end before it is read
        await anext(stream)
        assert not len(home.remembered)
        await stream
        assert len(home.remembered) == 4


async def test_an_engine_without_a_cache_has_nothing_to_remember(tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    async with dispatching(tmp_path, toy(prefix_cache=False), toy(prefix_cache=False)) as dispatcher:
        await dispatcher.generate(PROMPT, params)
        assert not any(len(each.remembered) for each in dispatcher.replicas)


async def test_a_prompt_whose_logprobs_are_wanted_is_computed_and_stays_remembered(tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    async with dispatching(tmp_path, toy()) as dispatcher:
        await dispatcher.generate(PROMPT, params)
        stream = dispatcher.generate(PROMPT, params.changed(prompt_logprobs=0), max_lag=1)
        await anext(stream)
        assert len(dispatcher.replicas[0].remembered) == 4
        await stream


def test_a_load_is_corrected_by_what_a_request_has_found() -> None:
    load, attempt = Load(), Mock(number=1, tokens=100, uncached=4, resumes=True, pages=())
    load.add(attempt)
    load.admitted(attempt, 64)
    assert (load.backlog, load.resuming, attempt.uncached) == (64, 64, 64)
    load.remove(attempt)
    assert (load.backlog, load.resuming, load.tokens) == (0, 0, 0)
