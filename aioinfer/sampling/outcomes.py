"""What a row's entry in a step's result holds where no token was sampled."""

__all__ = ["BAD_GRAMMAR", "BAD_LOGITS", "DEFERRED", "FORCED", "NO_TOKEN"]

#: the row does not sample
NO_TOKEN = -1
#: the row's logits were not finite; its request fails, no other does
BAD_LOGITS = -2
#: the row's grammar allows no token, or raised; its request fails, no other does
BAD_GRAMMAR = -3
#: the row was computed but could not sample yet. Later rows of the same request that are already launched are
#: void and marked the same way, until a row whose input tokens the host knows
DEFERRED = -4
#: the row sampled nothing because its grammar leaves no choice: ``StepResult.forced`` has the tokens that
#: follow. Later rows are void as above
FORCED = -5
