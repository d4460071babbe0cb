"""Pooling: what is wanted of the hidden states of a prompt, of a request that computes nothing else.

A hidden state is what the model has of a position after its last norm, before the head. Such a request
is a prompt without an output: its rows share steps with those of all others, and it ends with its last chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from aioinfer.errors import InvalidRequest, shown
from aioinfer.inputs import keep_plain, plain

__all__ = ["KINDS", "Pooling", "PoolingKind"]

#: the hidden state of the last token; that of the first one, of a model in which it sees the others; the mean
#: of all; each of them; the classifier's logits [classes] of the last token; and the logits of some tokens
#: that could follow it
PoolingKind: TypeAlias = Literal["last", "cls", "mean", "tokens", "classes", "choices"]

KINDS: tuple[PoolingKind, ...] = ("last", "cls", "mean", "tokens", "classes", "choices")
_MOST_CHOICES = 64


@dataclass(frozen=True, slots=True)
class Pooling:
    """Hidden states that a request wants, and their form. Raises InvalidRequest."""

    kind: PoolingKind = "last"
    #: of "choices": the tokens
    token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        keep_plain(self)
        ids = self.token_ids
        if not isinstance(ids, (list, tuple)) or not all(type(plain(each)) is int for each in ids):
            raise InvalidRequest("pooling", f"token_ids must be a list of token ids, got {shown(ids)}")
        object.__setattr__(self, "token_ids", tuple(plain(each) for each in ids))
        if self.kind not in KINDS:
            raise InvalidRequest("pooling", f"must be one of {', '.join(KINDS)}, got {shown(self.kind)}")
        if (self.kind == "choices") != bool(self.token_ids) or len(self.token_ids) > _MOST_CHOICES:
            raise InvalidRequest("pooling", f"choices are of 1 to {_MOST_CHOICES} tokens, others of none")

    @property
    def whole(self) -> bool:
        """Every position of the prompt is pooled: nothing of it can come from the prefix cache."""
        return self.kind in ("mean", "tokens")
