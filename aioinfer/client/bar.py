"""Bar: the progress of calls that are not awaited."""

from __future__ import annotations

import sys
from typing import Self

__all__ = ["Bar"]


class Bar:
    """A progress bar, called with how many of all are done."""

    def __init__(self, total: int, shown: bool | None) -> None:
        from tqdm import tqdm

        hidden = not (sys.stderr.isatty() if shown is None else shown)
        self._bar = tqdm(total=total, unit="request", disable=hidden)

    def __enter__(self) -> Self:
        return self

    def __call__(self, done: int, total: int | None) -> None:
        self._bar.update(done - self._bar.n if not self._bar.disable else 0)

    def __exit__(self, *_: object) -> None:
        self._bar.close()
