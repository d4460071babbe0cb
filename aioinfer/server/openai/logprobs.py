"""Logprobs of answers, in the forms of the chat and of the completion endpoint, as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from json.encoder import encode_basestring_ascii as _quoted
from typing import TYPE_CHECKING

from aioinfer.outputs import Chunk, TokenLogprob
from aioinfer.params import SamplingParams
from aioinfer.server.http.pace import Pace

if TYPE_CHECKING:
    from aioinfer.text.detokenizer import Detokenizer
    from aioinfer.text.tokenizer import Tokenizer

__all__ = ["ChatLogprobs", "CompletionLogprobs", "Speller", "TextOffsets", "divided", "prompt_logprobs"]

#: tokens whose texts are remembered
_REMEMBERED = 1 << 15
#: OpenAI's value for a logprob that is not known; JSON has no infinity
_UNLIKELY = -9999.0
#: entries of tokens in a part of JSON, and in an event
_TOGETHER, _PER_EVENT = 32, 256
#: a name of a token that no other has
_ID = "token_id:{}"
_Out = Callable[[str], None]


class Speller:
    """The bytes of tokens. One per server, because the alternatives of an answer are many and often the same.

    Attributes:
        bytes: the bytes of a token.
        name: what logprobs call it: its text, ``token_id:5``, or in OpenAI's notation the bytes of a part of
            a character, such as ``bytes:\\xf0\\x9f``.
        fields: the start of a token's entry in chats, and its end.
    """

    def __init__(self, spell: Callable[[int], bytes], *, by_id: bool = False) -> None:
        self.bytes = lru_cache(_REMEMBERED)(spell)
        self.name: Callable[[int], str] = _ID.format if by_id else lru_cache(_REMEMBERED)(self._name)
        self.fields = lru_cache(_REMEMBERED)(self._fields)

    @cached_property
    def by_id(self) -> Speller:
        """The same with ids as names."""
        return Speller(self.bytes, by_id=True)

    def text(self, token: int) -> str:
        """The text of a token, with U+FFFD for a part of a character."""
        return self.bytes(token).decode(errors="replace")

    def _name(self, token: int) -> str:
        found = self.bytes(token)
        try:
            return found.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join([f"\\x{byte:02x}" for byte in found])

    def _fields(self, token: int) -> tuple[str, str]:
        raw = json.dumps(list(self.bytes(token)))
        return f'{{"token":{_quoted(self.name(token))},"logprob":', f',"bytes":{raw}'


class TextOffsets:
    """Where the tokens of one choice begin in its text, ``echo`` included. A token that is a part of a
    character begins where the character does, one that is not in the text where it would be."""

    def __init__(
        self, tokenizer: Tokenizer | None, prompt_ids: Sequence[int], echo: str, params: SamplingParams
    ) -> None:
        self._tokenizer = tokenizer
        self._prompt_ids = prompt_ids
        self._echo = echo
        self._skips = params.skip_special_tokens
        self._at = len(echo)
        self._detokenizer: Detokenizer | None = None

    async def of_prompt(self, pace: Pace) -> list[int]:
        """The offsets of the prompt's tokens."""
        if self._tokenizer is None:
            return [0] * len(self._prompt_ids)
        for skips in (True, False):
            found, pieces, size = [], [], 0
            detokenizer = self._tokenizer.detokenizer([], skip_special_tokens=skips)
            for token in self._prompt_ids:
                found.append(size)
                pieces.append(detokenizer.push(token))
                size += len(pieces[-1])
                await pace()
            pieces.append(detokenizer.finish())
            if "".join(pieces) == self._echo:
                break
        # A text with special tokens in it, before which others were put, agrees at the end.
        missing = size + len(pieces[-1]) - len(self._echo)
        return [max(0, at - missing) for at in found]

    def of_next(self, token: int) -> int:
        """The offset of the next token of the output."""
        if self._tokenizer is None:
            return self._at
        if self._detokenizer is None:
            self._detokenizer = self._tokenizer.detokenizer(self._prompt_ids, skip_special_tokens=self._skips)
        at = self._at
        self._at += len(self._detokenizer.push(token))
        return at


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

    def __init__(self, speller: Speller, offsets: TextOffsets) -> None:
        self._name = speller.name
        self._offsets = offsets

    async def write(
        self, logprobs: Sequence[TokenLogprob | None], pace: Pace, out: _Out, echoed: Sequence[int] = ()
    ) -> None:
        """``choices[].logprobs`` of these tokens, part by part to ``out``. They begin with those of an echoed
        prompt, ``echoed``; entries of its first tokens, which have no logprob, are None."""
        tokens, values, tops = [], [], []
        offsets = await self._offsets.of_prompt(pace) if echoed else []
        for at, each in enumerate(logprobs):
            token = each.token_id if each is not None else echoed[at]
            tokens.append(_quoted(self._name(token)))
            if at >= len(echoed):
                offsets.append(self._offsets.of_next(token))
            if each is None:
                values.append("null")
                tops.append("null")
            else:
                values.append(_number(each.logprob))
                tops.append(self._top(each))
            await pace()
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        for name, items in zip(names, (tokens, values, tops, list(map(str, offsets))), strict=True):
            out(f'{"{" if name == "tokens" else ","}"{name}":[')
            for at in range(0, len(items), _TOGETHER):
                out(("," if at else "") + ",".join(items[at : at + _TOGETHER]))
                await pace()
            out("]")
        out("}")

    def _top(self, entry: TokenLogprob) -> str:
        """The alternatives by name, the most likely one first; of tokens with one text, the others by id."""
        found: dict[str, str] = {}
        for token, logprob in entry.top:
            name = self._name(token)
            found[_ID.format(token) if name in found else name] = _number(logprob)
        return f"{{{','.join([f'{_quoted(name)}:{value}' for name, value in found.items()])}}}"


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
