"""DecodeBatch: the requests that decode, as columns.

Most rows of most steps are decodes: one more token of a request whose prompt is computed. They are kept
in arrays, so that planning a step costs a few array operations and no object per token.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from aioinfer.scheduling.request import Request

__all__ = ["NO_DECODES", "DecodeBatch", "Decodes", "TableUpdate"]

#: slot, index of the first page in its table, pages
TableUpdate = tuple[int, int, list[int]]


@dataclass(frozen=True, slots=True)
class Decodes:
    """The decode rows of one step: for each, compute the token that waits in the slot's relay cell."""

    requests: list[Request]
    #: int64 [D]
    slots: npt.NDArray[np.int64]
    #: int64 [D]: the position each row computes
    starts: npt.NDArray[np.int64]
    #: pages that joined or changed in the rows' page tables
    tables: list[TableUpdate]
    #: requests whose last token, by length, is sampled here
    ending: list[Request]

    def __len__(self) -> int:
        return len(self.requests)


NO_DECODES = Decodes([], np.empty(0, np.int64), np.empty(0, np.int64), [], [])


class DecodeBatch:
    """Rows in no particular order; a row that leaves is replaced by the last one."""

    __slots__ = ("_columns", "_page_size", "_stale", "_turn", "capacity", "computed", "last_step", "limit",
                 "requests", "slots")  # fmt: skip

    def __init__(self, size: int, page_size: int) -> None:
        self._page_size = page_size
        self._columns = np.zeros((4, size), np.int64)
        self.slots, self.computed, self.capacity, self.limit = self._columns
        self.requests: list[Request] = []
        #: requests whose page table the device does not know completely
        self._stale: dict[int, Request] = {}
        #: the newest launched step with rows of this batch
        self.last_step = 0
        self._turn = 0

    def __len__(self) -> int:
        return len(self.requests)

    def add(self, request: Request) -> None:
        """A request whose newest token is in its relay cell, and which wants another."""
        index = len(self.requests)
        capacity = len(request.pages) * self._page_size
        self._columns[:, index] = (request.slot, request.computed, capacity, request.max_length)
        self.requests.append(request)
        request.batch, request.batch_index = self, index
        if request.sent_pages < len(request.pages):
            self._stale[request.key] = request

    def remove(self, request: Request) -> None:
        """The request decodes no more, for now or for good; it takes along how far it came."""
        index, last = request.batch_index, len(self.requests) - 1
        computed = request.computed
        request.batch, request.batch_index = None, -1
        request.advance(computed, computed + 1 - len(request.prompt_ids))
        request.last_step = max(request.last_step, self.last_step)
        mover = self.requests.pop()
        if index != last:
            self.requests[index] = mover
            self._columns[:, index] = self._columns[:, last]
            mover.batch_index = index
        self._stale.pop(request.key, None)

    def out_of_pages(self) -> list[Request]:
        """Requests whose next position has no page yet, eldest first."""
        count = len(self.requests)
        rows = np.flatnonzero(self.computed[:count] >= self.capacity[:count])
        return sorted((self.requests[row] for row in rows.tolist()), key=_by_arrival)

    def changed_pages(self, request: Request) -> None:
        """Pages were added to a request's table or exchanged in it."""
        self.capacity[request.batch_index] = len(request.pages) * self._page_size
        self._stale[request.key] = request

    def expected_tokens(self, clip: int) -> int:
        """Tokens that may still come, each request counted with at most ``clip``."""
        count = len(self.requests)
        return int(np.minimum(self.limit[:count] - self.computed[:count], clip).sum())

    def launch(self, step_id: int, without: Collection[Request], most: int) -> Decodes:
        """Rows for step ``step_id``: all requests but ``without``, or ``most`` of them in turn."""
        count = len(self.requests)
        if count <= len(without) or most <= 0:
            return NO_DECODES
        self.last_step = step_id
        if not without and count <= most:
            requests = self.requests.copy()
            slots, starts = self.slots[:count].copy(), self.computed[:count].copy()
            self.computed[:count] += 1
            limits = self.limit[:count]
        else:
            rows = self._choose(without, most)
            requests = [self.requests[row] for row in rows.tolist()]
            slots, starts, limits = self.slots[rows], self.computed[rows], self.limit[rows]
            self.computed[rows] += 1
        tables = self._tell_pages(requests) if self._stale else []
        ending = [requests[row] for row in np.flatnonzero(starts + 2 >= limits).tolist()]
        for request in ending:
            self.remove(request)
        return Decodes(requests, slots, starts, tables, ending)

    def audit(self) -> None:
        """Assert that the columns say what the requests do. O(rows)."""
        for index, request in enumerate(self.requests):
            assert request.batch is self
            assert request.batch_index == index
            row = [int(column[index]) for column in (self.slots, self.capacity, self.limit)]
            assert row == [request.slot, len(request.pages) * self._page_size, request.max_length], request

    def _choose(self, without: Collection[Request], most: int) -> npt.NDArray[np.int64]:
        """Rows in turn, so that everybody moves on when not all fit into a step."""
        rows = np.arange(len(self.requests))
        if without:
            rows = np.delete(rows, [request.batch_index for request in without])
        if len(rows) <= most:
            return rows
        start = int(np.searchsorted(rows, self._turn % len(self.requests)))
        chosen = np.take(rows, np.arange(start, start + most), mode="wrap")
        self._turn = int(chosen[-1]) + 1
        return chosen

    def _tell_pages(self, requests: list[Request]) -> list[TableUpdate]:
        present = self._stale.keys() & {request.key for request in requests}
        tables = []
        for request in [request for key, request in self._stale.items() if key in present]:
            tables.append((request.slot, request.sent_pages, request.pages[request.sent_pages :]))
            request.sent_pages = len(request.pages)
            del self._stale[request.key]
        return tables


def _by_arrival(request: Request) -> int:
    return request.key
