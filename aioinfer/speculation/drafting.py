"""Drafting: the drafts of one request, and how many of them have turned out right."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aioinfer.speculation.drafter import DraftRequest

__all__ = ["DraftSource", "Drafting", "UsualRates"]

#: weight of the newest draft
_NEWEST = 0.125
#: and of it in what is usual
_NEWEST_OF_ALL = 0.02
#: the share of its first expectation below which a source is not expected to fall for a new request
_FLOOR = 1 / 3
#: what a proposal that is not used does to the expectation: it moves so far back to the first one. A model's
#: drafts cost its own time, too, and are tried less often.
_FORGET = 0.02
_FORGET_MODEL = 0.005


class DraftSource(Enum):
    """The source of drafts. The value is the chance that one of them is right if those before it are, as
    long as nothing else is known."""

    #: the drafter: the request's own text, for example
    TEXT = 0.6
    #: the request's own text, where few tokens were the same
    SHORT = 0.2
    #: a draft model
    MODEL = 0.7
    #: the caller's prediction
    PREDICTION = 0.9
    #: the request's grammar, which allows nothing else
    GRAMMAR = 0.99


class UsualRates:
    """The share of drafts that were right lately in an engine; a request has it before its own."""

    __slots__ = ("_rates",)

    def __init__(self) -> None:
        self._rates = {source: source.value for source in DraftSource}

    def of(self, source: DraftSource) -> float:
        """The chance that a draft is right if those before it are."""
        return max(self._rates[source], _FLOOR * source.value)

    def verified(self, source: DraftSource, accepted: int, rejected: bool) -> None:
        """Count ``accepted`` drafts of a row that were right, and perhaps one after them that was not."""
        self._rates[source] = _moved(self._rates[source], accepted, rejected, _NEWEST_OF_ALL)


class Drafting:
    """Belongs to a request that speculates."""

    __slots__ = (
        "_last",
        "_predicted",
        "_rates",
        "_usual",
        "accepted",
        "accepted_prediction",
        "computed",
        "failed",
        "rejected",
        "rejected_prediction",
        "request",
        "source",
    )

    def __init__(self, request: DraftRequest, usual: UsualRates | None = None) -> None:
        self.request = request
        self._usual = usual or UsualRates()
        #: there is a prediction
        self._predicted = len(request.prediction) > 0
        #: of the latest proposal
        self.source = DraftSource.TEXT
        #: of the latest row that verified drafts: their source, and how many were right
        self._last = (DraftSource.TEXT, 0)
        #: of the sources that were verified or proposed in vain; the others have the usual ones
        self._rates: dict[DraftSource, float] = {}
        #: positions that a draft model has computed: with the tokens that are there
        self.computed = 0
        #: its drafter has raised
        self.failed = False
        #: drafts that were verified
        self.accepted = 0
        self.rejected = 0
        #: those of them that came from the prediction
        self.accepted_prediction = 0
        self.rejected_prediction = 0

    def best(self, source: DraftSource) -> float:
        """The largest chance that a first draft may have, from this source or the prediction."""
        best = self.rate_of(source)
        if source is DraftSource.TEXT:
            best = max(best, self.rate_of(DraftSource.SHORT))
        return max(best, self.rate_of(DraftSource.PREDICTION)) if self._predicted else best

    @property
    def rate(self) -> float:
        """The chance that a draft of the latest proposal is right if those before it are."""
        return self.rate_of(self.source)

    def rate_of(self, source: DraftSource) -> float:
        """The same of any source."""
        rate = self._rates.get(source)
        return self._usual.of(source) if rate is None else rate

    def unused(self) -> None:
        """The latest proposal was not verified."""
        rate = self.rate_of(self.source)
        weight = _FORGET_MODEL if self.source is DraftSource.MODEL else _FORGET
        self._rates[self.source] = rate + weight * (self._usual.of(self.source) - rate)

    def verified(self, source: DraftSource, drafted: int, accepted: int) -> None:
        """Count ``drafted`` tokens, of which the first ``accepted`` were right."""
        self._last = (source, accepted)
        rejected = drafted - accepted
        self.accepted += accepted
        self.rejected += rejected
        if source is DraftSource.PREDICTION:
            self.accepted_prediction += accepted
            self.rejected_prediction += rejected
        # Those after the first wrong one say nothing.
        self._rates[source] = _moved(self.rate_of(source), accepted, rejected > 0, _NEWEST)
        self._usual.verified(source, accepted, rejected > 0)

    def cut(self, tokens: int) -> None:
        """The last ``tokens`` of the output were dropped, since a stop came before them."""
        source, accepted = self._last
        # The token after the right drafts was sampled without one.
        dropped = min(accepted, max(0, tokens - 1))
        self._last = (source, accepted - dropped)
        if source is DraftSource.PREDICTION:
            self.accepted_prediction -= dropped


def _moved(rate: float, accepted: int, rejected: bool, weight: float) -> float:
    rate = 1.0 - (1.0 - rate) * (1.0 - weight) ** accepted
    return rate - weight * rate if rejected else rate
