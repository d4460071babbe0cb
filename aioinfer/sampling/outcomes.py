"""Outcomes: the negative entries of a step's result, for rows that sampled no token."""

__all__ = [
    "ASKED",
    "BAD_GRAMMAR",
    "BAD_LOGITS",
    "BAD_PROCESSOR",
    "DEFERRED",
    "FORCED",
    "NOT_FINITE",
    "NO_TOKEN",
]

#: the row does not sample
NO_TOKEN = -1
#: the row's logits were not finite, or, of a row that does not sample, its last hidden state; its request
#: fails, no other does
BAD_LOGITS = -2
#: what that request is told
NOT_FINITE = "the model gave no finite numbers"
#: the row's grammar allows no token, or raised; its request fails, no other does
BAD_GRAMMAR = -3
#: the row was computed but could not sample yet. Later rows of the same request that are already launched are
#: void and have the same entry, until a row whose input tokens the host knows
DEFERRED = -4
#: the row did not sample because its grammar allows one continuation only, or its logits processors want one:
#: ``StepResult.forced`` has its tokens. Later rows are void as above
FORCED = -5
#: the row did not sample because its logits processors decide later how its request goes on. Later rows are
#: void as above
ASKED = -6
#: a logits processor of the row raised; its request fails, no other does
BAD_PROCESSOR = -7
