"""TokenBudget: output tokens that several requests share."""

from __future__ import annotations

from aioinfer.errors import InvalidRequest, shown

__all__ = ["TokenBudget"]


class TokenBudget:
    """Output tokens for several requests together, of one engine or of several on one loop::

        budget = TokenBudget(2000)
        async with asyncio.TaskGroup() as group:
            for prompt in prompts:
                group.create_task(ask(engine.generate(prompt, budget=budget)))

    Tokens count in the order in which they are computed. When all are used up, the requests that share them
    end with the finish reason "length", those that wait and those that come later, too; ``left`` may be
    raised before. What a stop drops of an output is given back. An object of one process: dispatchers and
    stored checkpoints refuse it.
    """

    __slots__ = ("left",)

    def __init__(self, tokens: int) -> None:
        """Raises InvalidRequest: ``tokens`` is not a positive number of tokens."""
        if type(tokens) is not int or tokens < 1:
            raise InvalidRequest("budget", f"must be a positive number of tokens, got {shown(tokens)}")
        #: tokens that are not used
        self.left = tokens

    def __repr__(self) -> str:
        return f"<TokenBudget {self.left} left>"
