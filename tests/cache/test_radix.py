"""The radix tree and the pages it owns against a naive model."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aioinfer.cache import radix
from aioinfer.cache.nodes import Hold
from aioinfer.cache.pages import PageAllocator
from aioinfer.cache.radix import Lock, RadixTree, token_key
from tests.machines import run_machine

PAGE, PAGES = 2, 16
Prefix = tuple[str, tuple[int, ...]]
NAMESPACES = st.sampled_from(["", "b"])
TOKENS = st.lists(st.integers(0, 1), max_size=5 * PAGE)
VISITS = st.lists(st.tuples(NAMESPACES, TOKENS), min_size=1, max_size=4)


class Reader:
    """A request: its tokens, the lock on what was cached, its pages, and how far the tree knows them."""

    def __init__(self, namespace: str, ids: tuple[int, ...], lock: Lock, pages: list[int]) -> None:
        self.namespace = namespace
        self.ids = ids
        self.lock = lock
        self.pages = pages
        self.shared = lock.num_pages
        self.last_step = 0
        self.flushed = False


class Held:
    """A hold, and the pages of its prefix that are left."""

    def __init__(self, hold: Hold, prefixes: list[Prefix]) -> None:
        self.hold = hold
        self.left = prefixes


class TreeMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.tree = RadixTree(PAGE)
        self.pages = PageAllocator(PAGES, PAGE)
        self.readers: list[Reader] = []
        self.launched = self.resolved = 0
        #: naive: which page holds the KV of the last page of this prefix
        self.known: dict[Prefix, int] = {}
        #: pages that are no longer matched and still read
        self.orphans: set[int] = set()
        #: newest step that may touch a page, and the time of a prefix's last use
        self.touched = dict.fromkeys(range(1, PAGES + 1), 0)
        self.used: dict[Prefix, int] = {}
        self.now = 0
        self.holds: list[Held] = []
        #: pages that left the cache while they were held
        self.lost = 0

    # -- the naive model ------------------------------------------------------------------

    def prefixes(self, namespace: str, ids: tuple[int, ...]) -> list[Prefix]:
        return [(namespace, ids[:stop]) for stop in range(PAGE, len(ids) + 1, PAGE)]

    def longest(self, namespace: str, ids: tuple[int, ...]) -> list[int]:
        found = []
        for prefix in self.prefixes(namespace, ids):
            if prefix not in self.known:
                break
            found.append(self.known[prefix])
        return found

    def use(self, reader: Reader) -> None:
        self.now += 1
        if not reader.flushed:
            shared = reader.ids[: reader.shared * PAGE]
            self.used.update(dict.fromkeys(self.prefixes(reader.namespace, shared), self.now))

    def held(self) -> set[Prefix]:
        return {prefix for each in self.holds for prefix in each.left}

    def remove(self, prefix: Prefix) -> int:
        """A page is no longer matched: what is held of a prefix ends before it."""
        self.lost += prefix in self.held()
        for each in self.holds:
            if prefix in each.left:
                del each.left[each.left.index(prefix) :]
        return self.known.pop(prefix)

    def locked(self) -> set[int]:
        return {page for reader in self.readers for page in reader.pages[: reader.shared]}

    def draw(self, data: st.DataObject) -> Reader:
        reader: Reader = data.draw(st.sampled_from(self.readers))
        return reader

    # -- rules ----------------------------------------------------------------------------

    @rule(namespace=NAMESPACES, ids=TOKENS)
    def arrive(self, namespace: str, ids: list[int]) -> None:
        self._arrive(namespace, ids)

    @rule(wishes=VISITS, compute=st.booleans())
    def visit(self, wishes: list[tuple[str, list[int]]], compute: bool) -> None:
        """Lives as most are: side by side, all they have is shared, and stays behind unlocked."""
        visitors = [self.readers[-1] for wish in wishes if self._arrive(*wish)]
        if compute and self.launched - self.resolved < 3:
            self._launch(visitors)
        for reader in visitors:
            self._extend(reader, len(reader.ids) // PAGE)
        for reader in visitors:
            self._leave(reader, False)

    @precondition(lambda self: any(each.left for each in self.holds))
    @rule(data=st.data(), tail=TOKENS)
    def branch(self, data: st.DataObject, tail: list[int]) -> None:
        """Somebody shares the beginning of what is held."""
        namespace, ids = data.draw(st.sampled_from([each.left[-1] for each in self.holds if each.left]))
        kept = data.draw(st.integers(0, len(ids) // PAGE - 1)) * PAGE
        self.visit([(namespace, [*ids[:kept], 1 - ids[kept], *tail])], compute=False)

    def _arrive(self, namespace: str, ids: list[int]) -> bool:
        sequence = tuple(ids[: len(ids) // PAGE * PAGE])
        wanted = self.longest(namespace, sequence)
        assert self.tree.match(token_key(sequence), namespace) == len(wanted)
        assert self.tree.find(token_key(sequence), namespace)[0] == len(wanted)
        lock = self.tree.lock(token_key(sequence), namespace)
        assert lock.num_pages == len(wanted)
        assert lock.pages() == wanted
        need = len(sequence) // PAGE - len(wanted)
        if need > self.pages.free:
            assert self.tree.unlock(lock, 0) == []
            self.now += 1
            self.used.update(
                dict.fromkeys(self.prefixes(namespace, sequence[: len(wanted) * PAGE]), self.now)
            )
            return False
        fresh = self.pages.take(need)
        for page in fresh:
            assert self.touched[page] <= self.resolved, "handed out while in flight"
            assert page not in self.known.values(), "handed out while cached"
        self.readers.append(Reader(namespace, sequence, lock, wanted + fresh))
        self.use(self.readers[-1])
        return True

    @precondition(lambda self: self.readers and self.launched - self.resolved < 3)
    @rule(data=st.data())
    def launch(self, data: st.DataObject) -> None:
        self._launch(data.draw(st.lists(st.sampled_from(self.readers), unique=True)))

    def _launch(self, readers: list[Reader]) -> None:
        self.launched += 1
        for reader in readers:
            reader.last_step = self.launched
            self.touched.update(dict.fromkeys(reader.pages, self.launched))

    @precondition(lambda self: self.resolved < self.launched)
    @rule()
    def resolve(self) -> None:
        self.resolved += 1
        self.pages.resolved(self.resolved)

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        reader = self.draw(data)
        self._extend(reader, data.draw(st.integers(reader.shared, len(reader.ids) // PAGE)))

    def _extend(self, reader: Reader, stop: int) -> None:
        if stop == reader.shared:
            return
        own = reader.pages[reader.shared : stop]
        key = token_key(reader.ids[reader.shared * PAGE : stop * PAGE])
        kept = self.tree.extend(reader.lock, key, own)
        assert len(kept) == len(own)
        if reader.flushed:
            assert kept == own
            assert reader.lock.num_pages == reader.shared
            return
        wanted = [
            self.known.setdefault(prefix, page)
            for prefix, page in zip(
                self.prefixes(reader.namespace, reader.ids)[reader.shared : stop], own, strict=True
            )
        ]
        assert kept == wanted, "the first copy stays"
        doubles = [mine for mine, theirs in zip(own, kept, strict=True) if mine != theirs]
        self.pages.keep(len(own) - len(doubles))
        self.pages.give(doubles, reader.last_step)
        reader.pages[reader.shared : stop] = kept
        reader.shared = stop
        self.touched.update({page: max(self.touched[page], reader.last_step) for page in kept})
        assert reader.lock.num_pages == stop
        assert reader.lock.pages() == reader.pages[:stop]
        self.use(reader)

    @precondition(lambda self: self.readers)
    @rule(data=st.data(), forget=st.booleans())
    def leave(self, data: st.DataObject, forget: bool) -> None:
        self._leave(self.draw(data), forget)

    def _leave(self, reader: Reader, forget: bool) -> None:
        self.readers.remove(reader)
        if forget:
            self.tree.forget(reader.lock)
            self.forgotten(reader)
        self.use(reader)
        gone = self.tree.unlock(reader.lock, reader.last_step)
        orphaned = self.orphans - self.locked()
        assert sorted(page for run, _ in gone for page in run) == sorted(orphaned)
        self.orphans -= orphaned
        for run, fence in gone:
            assert all(self.touched[page] <= max(fence, self.resolved) for page in run)
            self.pages.drop(run, fence)
        self.pages.give(reader.pages[reader.shared :], reader.last_step)
        with pytest.raises(RuntimeError):
            self.tree.unlock(reader.lock, reader.last_step)

    def forgotten(self, reader: Reader) -> None:
        """The end of its prefix without other locks and children is not matched again."""
        if reader.flushed:
            return
        others = self.locked()
        for prefix in reversed(self.prefixes(reader.namespace, reader.ids[: reader.shared * PAGE])):
            page = self.known[prefix]
            longer = any(
                other != prefix and other[0] == prefix[0] and other[1][: len(prefix[1])] == prefix[1]
                for other in self.known
            )
            if longer or page in others:
                return
            self.orphans.add(self.remove(prefix))

    @rule(count=st.integers(1, 6))
    def evict(self, count: int) -> None:
        locked = self.locked()
        for page in self.tree.evict(count, self.resolved):
            (prefix,) = (prefix for prefix, owner in self.known.items() if owner == page)
            assert page not in locked, "evicted while it is read"
            assert self.touched[page] <= self.resolved, "evicted while a step may read it"
            leaves = [each for each in self.known if self.is_spare(each, locked)]
            assert prefix in leaves, "evicted before its children"
            held = self.held()
            assert prefix not in held or held.issuperset(leaves), "held, and others are not"
            alike = [each for each in leaves if (each in held) == (prefix in held)]
            assert self.used[prefix] == min(self.used[each] for each in alike), "used more recently"
            self.remove(prefix)
            self.pages.drop([page], self.resolved)

    def is_spare(self, prefix: Prefix, locked: set[int]) -> bool:
        namespace, ids = prefix
        hanging = any(
            other != prefix and other[0] == namespace and other[1][: len(ids)] == ids for other in self.known
        )
        return not hanging and self.known[prefix] not in locked

    @rule(namespace=NAMESPACES, ids=TOKENS, data=st.data())
    def hold(self, namespace: str, ids: list[int], data: st.DataObject) -> None:
        sequence = tuple(ids)
        if self.known and data.draw(st.booleans()):
            namespace, sequence = data.draw(st.sampled_from(list(self.known)))
        found = self.prefixes(namespace, sequence)[: len(self.longest(namespace, sequence))]
        self._hold(self.tree.hold(token_key(sequence), namespace), found)

    @precondition(lambda self: self.holds)
    @rule(data=st.data(), forks=st.integers(1, 3))
    def hold_again(self, data: st.DataObject, forks: int) -> None:
        held = data.draw(st.sampled_from(self.holds))
        for _ in range(forks):
            self._hold(self.tree.hold_again(held.hold), [*held.left])

    def _hold(self, hold: Hold, prefixes: list[Prefix]) -> None:
        self.holds.append(Held(hold, prefixes))
        self.now += bool(prefixes)
        self.used.update(dict.fromkeys(prefixes, self.now))

    @precondition(lambda self: self.holds)
    @rule(data=st.data(), twice=st.booleans())
    def release_hold(self, data: st.DataObject, twice: bool) -> None:
        held = data.draw(st.sampled_from(self.holds))
        self.holds.remove(held)
        for _ in range(1 + twice):
            self.tree.release_hold(held.hold)
            assert not held.hold.num_pages

    @precondition(lambda self: self.known)
    @rule()
    def flush(self) -> None:
        locked = self.locked()
        self.lost += len(self.held())
        for each in self.holds:
            each.left.clear()
        self.orphans |= set(self.known.values()) & locked
        gone = self.tree.flush()
        spare = sorted(page for page in self.known.values() if page not in locked)
        assert sorted(page for run, _ in gone for page in run) == spare
        for run, fence in gone:
            assert all(self.touched[page] <= max(fence, self.resolved) for page in run)
            self.pages.drop(run, fence)
        self.known.clear()
        for reader in self.readers:
            reader.flushed = True

    @invariant()
    def everything_is_accounted_for(self) -> None:
        self.tree.check()
        cached = self.tree.audit(reader.lock for reader in self.readers)
        assert sorted(cached) == sorted({*self.known.values(), *self.orphans})
        self.pages.check()
        private = (page for reader in self.readers for page in reader.pages[reader.shared :])
        self.pages.audit(private, cached)
        spare = [page for page in self.known.values() if page not in self.locked()]
        assert self.tree.evictable == len(spare)
        if not self.readers:
            assert self.tree.num_locks == 0
        for each in self.holds:
            assert each.hold.num_pages == len(each.left)
        assert self.tree.holds.pages == len(self.held())
        assert self.tree.holds.lost == self.lost

    def teardown(self) -> None:
        if not hasattr(self, "tree"):
            return
        while self.resolved < self.launched:
            self.resolve()
        for reader in self.readers:
            for run, fence in self.tree.unlock(reader.lock, reader.last_step):
                self.pages.drop(run, fence)
            self.pages.give(reader.pages[reader.shared :], reader.last_step)
        self.pages.drop(self.tree.evict(PAGES, self.resolved), self.resolved)
        assert self.pages.free == PAGES, "something can never be evicted"
        assert (self.tree.num_nodes, self.tree.num_pages, self.tree._roots) == (0, 0, {})
        assert (self.tree.holds.number, self.tree.holds.pages) == (0, 0), "a hold on nothing"
        for each in self.holds:
            self.tree.release_hold(each.hold)
        self.tree.check()


def test_the_tree_behaves_like_the_naive_model() -> None:
    run_machine(TreeMachine, 200, 80)


def test_many_unlocks_do_not_let_the_heap_grow() -> None:
    tree = RadixTree(PAGE)
    lock = tree.lock(b"")
    tree.extend(lock, token_key([1, 2]), [1])
    tree.unlock(lock, 0)
    for _ in range(1000):
        tree.unlock(tree.lock(token_key([1, 2])), 0)
    assert len(tree._heap) < 100
    assert tree.evict(1, 0) == [1]


def test_long_runs_part_at_the_right_page() -> None:
    tree = RadixTree(PAGE)
    ids = list(range(400))
    lock = tree.lock(b"")
    tree.extend(lock, token_key(ids), list(range(1, 201)))
    for common in (0, 1, 2, 99, 100, 199):
        other = [*ids[: common * PAGE], *([7] * 50)]
        assert tree.match(token_key(other)) == common
    assert tree.match(token_key(ids)) == 200
    assert tree.match(token_key([*ids, 1, 2])) == 200
    assert radix.token_key([1]) == (1).to_bytes(4, "little")


def test_both_halves_of_a_split_keep_the_fence() -> None:
    """Step 5, which has not resolved, reads two pages. Their node is split, and the lower half is forgotten
    while a request that was never in a step holds the upper one."""
    tree = RadixTree(PAGE)
    lock = tree.lock(b"")
    tree.extend(lock, token_key([0, 0, 0, 0]), [1, 2])
    tree.unlock(lock, 5)
    upper = tree.lock(token_key([0, 0, 1, 1]))
    whole = tree.lock(token_key([0, 0, 0, 0]))
    tree.forget(whole)
    assert tree.unlock(whole, 0) == [([2], 5)]
    assert tree.unlock(upper, 0) == []
    assert tree.evict(1, 4) == []
    assert tree.evict(1, 5) == [1]
