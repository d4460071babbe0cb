"""Logprobs of answers, in the forms of the chat and of the completion endpoint, as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from json.encoder import encode_basestring_ascii as _quoted

from aioinfer.outputs import Chunk, TokenLogprob
from aioinfer.server.http.pace import Pace

__all__ = ["ChatLogprobs", "CompletionLogprobs", "Speller", "divided", "prompt_logprobs"]

#: tokens whose texts are remembered
_REMEMBERED = 1 << 15
#: OpenAI's value for a logprob that is not known; JSON has no infinity
_UNLIKELY = -9999.0
#: entries of tokens in a part of JSON, and in an event
_TOGETHER, _PER_EVENT = 32, 256
_Out = Callable[[str], None]


class Speller:
    """Token ids as text. One per server, because the alternatives of an answer are many and often the same.

    Attributes:
        text: the text of a token.
        name: what logprobs call it: its text, or ``token_id:5``.
        fields: the start of a token's entry in chats, and its end.
    """

    def __init__(self, decode: Callable[[int], str], *, by_id: bool = False) -> None:
        self.text = lru_cache(_REMEMBERED)(decode)
        self.name: Callable[[int], str] = "token_id:{}".format if by_id else self.text
        self.fields = lru_cache(_REMEMBERED)(self._fields)

    @cached_property
    def by_id(self) -> Speller:
        """The same with ids as names."""
        return Speller(self.text, by_id=True)

    def _fields(self, token: int) -> tuple[str, str]:
        raw = json.dumps(list(self.text(token).encode()))
        return f'{{"token":{_quoted(self.name(token))},"logprob":', f',"bytes":{raw}'


class ChatLogprobs:
    """A list of entries, each with its most likely alternatives."""

    def __init__(self, speller: Speller) -> None:
        self._fields = speller.fields

    async def write(
        self, logprobs: Sequence[TokenLogprob | None], pace: Pace, out: _Out, prompt_ids: Sequence[int] = ()
    ) -> None:
        """``choices[].logprobs`` of these tokens, part by part to ``out``."""
        out('{"content":[')
        await self.entries(logprobs, pace, out)
        out('],"refusal":null}')

    async def entries(self, logprobs: Sequence[TokenLogprob | None], pace: Pace, out: _Out) -> None:
        """The entries of these tokens with commas in between, part by part to ``out``."""
        comma = ""
        for each in logprobs:
            if each is None:
                continue
            top = ",".join([f"{self._entry(token, logprob)}}}" for token, logprob in each.top])
            out(f'{comma}{self._entry(each.token_id, each.logprob)},"top_logprobs":[{top}]}}')
            comma = ","
            await pace()

    def _entry(self, token: int, logprob: float) -> str:
        """An entry without its closing brace."""
        before, after = self._fields(token)
        return f"{before}{_number(logprob)}{after}"


class CompletionLogprobs:
    """Parallel lists, with the offset of each token in the text. One object per choice."""

    def __init__(self, speller: Speller) -> None:
        self._text = speller.text
        self._name = speller.name
        self._offset = 0

    async def write(
        self, logprobs: Sequence[TokenLogprob | None], pace: Pace, out: _Out, prompt_ids: Sequence[int] = ()
    ) -> None:
        """``choices[].logprobs`` of these tokens, part by part to ``out``. Entries of tokens at the beginning
        of an echoed prompt, ``prompt_ids``, that have no logprob are None."""
        tokens, values, tops, offsets = [], [], [], []
        for at, each in enumerate(logprobs):
            token = each.token_id if each is not None else prompt_ids[at]
            text = self._text(token)
            tokens.append(_quoted(self._name(token)))
            offsets.append(str(self._offset))
            self._offset += len(text)
            if each is None:
                values.append("null")
                tops.append("null")
            else:
                values.append(_number(each.logprob))
                top = {_quoted(self._name(other)): _number(logprob) for other, logprob in each.top}
                tops.append(f"{{{','.join([f'{key}:{value}' for key, value in top.items()])}}}")
            await pace()
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        for name, items in zip(names, (tokens, values, tops, offsets), strict=True):
            out(f'{"{" if name == "tokens" else ","}"{name}":[')
            for at in range(0, len(items), _TOGETHER):
                out(("," if at else "") + ",".join(items[at : at + _TOGETHER]))
                await pace()
            out("]")
        out("}")


async def prompt_logprobs(
    entries: Sequence[TokenLogprob | None], speller: Speller, pace: Pace, out: _Out
) -> None:
    """``prompt_logprobs`` in vLLM's form, part by part to ``out``: an object by token ids for each token of
    the prompt, null for the first one."""
    comma = "["
    for each in entries:
        out(comma)
        comma = ","
        if each is None:
            out("null")
            continue
        ranks = {token: rank for rank, (token, _) in enumerate(each.top, 1)}
        found = {each.token_id: each.logprob, **dict(each.top)}
        parts = [
            f'"{token}":{{"logprob":{_number(logprob)},"rank":{ranks.get(token, "null")},'
            f'"decoded_token":{_quoted(speller.text(token))}}}'
            for token, logprob in found.items()
        ]
        out(f"{{{','.join(parts)}}}")
        await pace()
    out("]")


def divided(chunk: Chunk) -> Iterator[Chunk]:
    """The chunk of a slow reader in parts with a bounded number of logprobs. The last one has the text."""
    ids, logprobs, steps, version = chunk.token_ids, chunk.logprobs, chunk.step_map, chunk.weight_version
    start = 0
    if logprobs is not None:
        for at in range(0, len(ids) - _PER_EVENT, _PER_EVENT):
            start = at + _PER_EVENT
            mine = slice(at, start)
            part = steps and steps[mine]
            yield Chunk("", ids[mine], logprobs=logprobs[mine], step_map=part, weight_version=version)
    if not start:
        yield chunk
        return
    rest = slice(start, None)
    yield replace(
        chunk, token_ids=ids[rest], logprobs=logprobs and logprobs[rest], step_map=steps and steps[rest]
    )


def _number(value: float) -> str:
    return float.__repr__(value if math.isfinite(value) else _UNLIKELY)
