"""The ledger of memory: what was promised counts until it is taken, and caches are bounded in bytes."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import threading

import pytest

from aioinfer.errors import OutOfMemory
from aioinfer.ledger import ByteCache, Entry, Ledger, Share
from aioinfer.system.memory import Available, resident

GIB = 1 << 30


def test_what_was_promised_and_not_taken_is_not_left_for_others() -> None:
    ledger = Ledger(lambda: Available(10 * GIB, "control group"))
    first = Share("KV pages", ledger=ledger)
    ledger.claim(first, 6 * GIB)
    second = Share("KV pages", ledger=ledger)
    with pytest.raises(OutOfMemory, match=r"KV pages: 6.00 .* control group has 4.00 GiB left beside 6"):
        ledger.claim(second, 6 * GIB)
    assert second.promised == 0
    # What was taken is missing from what the system says already.
    first.taken = 6 * GIB
    ledger.available = lambda: Available(4 * GIB, "control group")
    ledger.claim(second, 4 * GIB)
    assert ledger.entries() == {"KV pages": Entry(10 * GIB, 6 * GIB, None)}
    first.close()
    first.close()
    assert ledger.untaken() == 4 * GIB
    ledger.available = lambda: None
    ledger.claim(first, 10**18)


def test_what_was_written_of_a_mapping_is_resident() -> None:
    with mmap.mmap(-1, 300 << 20) as memory:
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        assert resident(address, len(memory)) < 4 << 20
        for at in range(64 << 20, 96 << 20, 4096):
            memory[at] = 1
        assert 32 << 20 <= resident(address, len(memory)) < 40 << 20
        gc.collect()


def test_a_share_that_nobody_holds_is_given_back() -> None:
    ledger = Ledger()
    share = Share("weights", GIB, ledger=ledger)
    assert ledger.untaken() == GIB
    del share
    gc.collect()
    assert (ledger.untaken(), ledger.entries()) == (0, {})


def test_the_same_memory_counts_once() -> None:
    ledger = Ledger()
    shares = [Share("mapped weights", GIB, key="file", ledger=ledger) for _ in range(3)]
    assert ledger.untaken() == GIB
    shares[0].close()
    assert ledger.untaken() == GIB


def test_a_share_with_a_bound_takes_no_more() -> None:
    ledger = Ledger()
    bodies = Share("bodies", bound=100, ledger=ledger)
    assert bodies.take(60)
    assert not bodies.take(41)
    assert bodies.take(40)
    bodies.give(60)
    assert ledger.entries() == {"bodies": Entry(40, 40, 100)}
    assert ledger.untaken() == 60  # which others may not have


def test_claims_of_many_threads_never_exceed_what_is_left() -> None:
    ledger = Ledger(lambda: Available(100, "machine"))
    shares = [Share("pool", ledger=ledger) for _ in range(8)]
    begin = threading.Barrier(8)

    def claim(share: Share) -> None:
        begin.wait()
        for _ in range(200):
            try:
                ledger.claim(share, 1)
            except OutOfMemory:
                return

    threads = [threading.Thread(target=claim, args=(each,)) for each in shares]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert ledger.untaken() == 100


def test_a_cache_is_bounded_in_bytes_and_forgets_what_was_not_used_for_longest() -> None:
    ledger = Ledger()
    cache: ByteCache[str, str] = ByteCache("grammars", 100, ledger=ledger)
    for name in "abc":
        cache.put(name, name.upper(), 30)
    assert cache.get("a") == "A"
    cache.put("d", "D", 30)
    assert [cache.get(name) for name in "abcd"] == ["A", None, "C", "D"]
    cache.put("a", "AA", 90)  # what a value takes may have grown
    assert ([cache.get(name) for name in "acd"], cache.bytes, len(cache)) == (["AA", None, None], 90, 1)
    cache.put("a", "larger than the bound", 101)
    assert (cache.get("a"), cache.bytes) == (None, 0)
    cache.put("x", "X", 100)
    assert ledger.entries() == {"grammars": Entry(100, 100, 100)}
    cache.clear()
    assert (len(cache), cache.bytes) == (0, 0)


def test_what_a_cache_forgets_may_use_the_cache_when_it_goes() -> None:
    cache: ByteCache[int, Watched] = ByteCache("patterns", 10, ledger=Ledger())
    seen: list[int] = []

    class Watched:
        def __del__(self) -> None:
            worker = threading.Thread(target=lambda: seen.append(len(cache)))
            cache.get(0)
            worker.start()
            worker.join()

    cache.put(1, Watched(), 10)
    cache.put(2, Watched(), 10)
    gc.collect()
    assert seen == [1]
    cache.clear()
    assert len(seen) == 2


def test_a_cache_of_many_threads_keeps_its_bound_and_its_sum() -> None:
    cache: ByteCache[int, int] = ByteCache("grammars", 50, ledger=Ledger())

    def use(start: int) -> None:
        for at in range(2000):
            cache.put((start + at) % 40, at, at % 9)
            assert cache.bytes <= 50
            cache.get(at % 40)

    threads = [threading.Thread(target=use, args=(11 * each,)) for each in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    while len(cache):
        for key in range(40):
            cache.put(key, 0, 51)
    assert cache.bytes == 0


def test_a_child_keeps_caches_and_counts_no_pools_of_its_parent() -> None:
    from aioinfer.ledger import LEDGER

    before = LEDGER.untaken()
    pool, cache = Share("KV pages", GIB), ByteCache[int, int]("a test's", 100)
    cache.put(1, 1, 7)
    bounded = sum(each.bound - each.taken for each in LEDGER.entries().values() if each.bound is not None)
    child = os.fork()
    if child == 0:
        good = LEDGER.untaken() == bounded and cache.get(1) == 1 and LEDGER.entries()["a test's"].taken == 7
        os._exit(0 if good else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert LEDGER.untaken() == before + GIB + 93
    pool.close()
