"""FakeDevice: types scripted answers, byte by byte."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from aioinfer.config import EngineConfig
from aioinfer.scheduling.request import Request
from aioinfer.scheduling.step import NewRequestData, Row, Step
from aioinfer.testing.toy import ToyDevice
from aioinfer.testing.toy_adapters import ToyAdapter
from aioinfer.testing.toy_pooling import hashes
from aioinfer.text.detokenizer import Detokenizer, OffsetDetokenizer
from aioinfer.text.tokenizer import plain_messages

__all__ = ["FakeDevice", "FakeTokenizer", "Script"]

_END = 0
_VOCABULARY = 257
#: the hash of a sequence, of which nothing is known
_SOUND = 3
#: seconds of a step in which no request may have a token yet; newer requests wait for its end
_LONGEST_STEP = 0.01
#: Bytes from the most to the least wanted, for a short text in JSON. Of letters the last goes first, so that
#: a tag of a call is taken before one of reasoning.
_FIRST, _LAST = b'}]",:0{[', b"<-\\"
_WANTED = [*_FIRST, *sorted(set(range(33, 256)) - {*_FIRST, *_LAST}, reverse=True), *_LAST, *range(33)]


class Script:
    """One answer on its way: its bytes, None for the shortest text; when they come; how it ends."""

    __slots__ = ("content", "delay", "due", "fail", "failed", "off", "pace")

    def __init__(
        self, content: bytes | None, delay: float, pace: float, fail: Callable[[], None] | None
    ) -> None:
        self.content = content
        self.delay = delay
        self.pace = pace
        #: called once behind the content, instead of its end
        self.fail = fail
        self.failed = False
        #: when the first token comes
        self.due = 0.0
        #: a grammar did not allow it: the rest is the shortest text
        self.off = content is None


class FakeDevice(ToyDevice):
    """Needs no torch. Its time is that of the loop."""

    def __init__(self, config: EngineConfig, clock: Callable[[], float]) -> None:
        super().__init__(
            num_pages=config.num_pages or 4096,
            page_size=config.positions_per_page,
            num_slots=config.num_slots,
            max_model_len=config.max_model_len,
            vocab_size=_VOCABULARY,
            defer=self._due,
            max_adapters=config.adapter_slots,
        )
        self._clock = clock
        self._scripts: dict[Request, Script] = {}
        self._most = 64

    def play(self, request: Request, script: Script, begun: int = 0) -> None:
        """The answer to a request, of which ``begun`` tokens are there. Called before its first step."""
        if len(self._scripts) >= self._most:
            self._scripts = {each: found for each, found in self._scripts.items() if not each.ended}
            self._most = 2 * len(self._scripts) + 64
        script.due = self._clock() + script.delay - begun * script.pace
        self._scripts[request] = script

    def _script(self, row: Row) -> Script:
        """Of a request that has ended meanwhile, of which a step in flight still has a row: an empty one."""
        return self._scripts.get(row.request) or Script(b"", 0.0, 0.0, None)

    def prepare_adapter(self, path: Path) -> ToyAdapter:
        """Any path will do: nothing of it is read."""
        return ToyAdapter(1, 8, 0)

    def seconds(self, step: Step) -> float:
        """How long a step takes: until the first of its requests may have a token."""
        now = self._clock()
        waits = [self._wait(row, now) for row in step.rows if row.samples]
        return min(min(waits, default=0.0), _LONGEST_STEP)

    def _wait(self, row: Row, now: float) -> float:
        script = self._script(row)
        if script.failed:
            return _LONGEST_STEP
        return max(0.0, script.due + row.output_index * script.pace - now)

    def _due(self, row: Row) -> int | None:
        """As ``defer`` of the toy: 0 for a row that has no token yet."""
        script = self._script(row)
        content = script.content or b""
        if script.fail is not None and row.output_index >= len(content):
            if not script.failed:
                script.failed = True
                asyncio.get_running_loop().call_soon(script.fail)
            return 0
        # Timers can be early by the resolution of a clock.
        return 0 if self._wait(row, self._clock()) > 1e-4 else None

    def _write(self, row: Row, table: list[int]) -> list[int]:
        """Nothing depends on memory here, and checking it would take time for every token before this one."""
        if row.new_request is not None:
            self._doomed.discard(row.request.key)
            self._tenants[row.slot] = row.new_request
        if row.ids:
            self._void.discard(row.request.key)
        return [_SOUND] * (1 + len(row.drafts))

    def _hashes(self, row: Row, state: Sequence[int], first: int, last: int) -> Sequence[int]:
        return hashes(row.request.prompt_ids[:last])[first:]

    def _next(self, row: Row, state: int, tenant: NewRequestData) -> int:
        script = self._script(row)
        content = script.content or b""
        if row.output_index < len(content):
            return content[row.output_index] + 1
        return _END if row.output_index >= tenant.params.min_tokens else b" "[0] + 1

    def _allowed(self, row: Row, token: int, mask: npt.NDArray[np.int32]) -> int:
        """The token, or where the answer breaks the grammar the next one of a short text."""

        def allows(token: int) -> bool:
            return bool(mask[token // 32] >> (token % 32) & 1)

        script = self._script(row)
        if not script.off and allows(token):
            return token
        script.off = True
        if allows(_END):
            return _END
        wanted = b'"' if allows(b"~"[0] + 1) and allows(b'"'[0] + 1) else _WANTED  # within a string
        return 1 + next(byte for byte in wanted if allows(byte + 1))


class FakeTokenizer:
    """A token per byte of UTF-8, and 0 for the end of an output."""

    def __init__(self) -> None:
        self.vocab_size = _VOCABULARY
        self.eos_token_ids = frozenset({_END})
        self.has_chat_template = True
        self.added_tokens: Mapping[str, int] = {}
        self.special_tokens: frozenset[str] = frozenset()
        self.longest_token: int | None = 1
        self.chat_templates: tuple[str, ...] = ()
        self.template_names: frozenset[str] | None = None

    def encode(self, text: str) -> list[int]:
        return [1 + byte for byte in text.encode(errors="replace")]

    def encode_part(self, text: str) -> list[int]:
        return self.encode(text)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], /, **template_kwargs: Any) -> list[int]:
        return self.encode(self.render_chat(messages, **template_kwargs))

    def render_chat(self, messages: Sequence[Mapping[str, Any]], /, **template_kwargs: Any) -> str:
        """``role: content`` line by line, up to the answer. Raises InvalidRequest as real tokenizers do."""
        lines = [f"{each['role']}: {each['content']}\n" for each in plain_messages(messages)]
        return "".join([*lines, "assistant: "])

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(token - 1 for token in ids if token != _END).decode(errors="replace")

    def detokenizer(self, prompt_ids: Sequence[int], *, skip_special_tokens: bool) -> Detokenizer:
        return OffsetDetokenizer(self.decode, prompt_ids)

    def for_grammars(self) -> Any:
        import llguidance

        return llguidance.TokenizerWrapper(_Bytes())


class _Bytes:
    """What ``llguidance.TokenizerWrapper`` wraps."""

    eos_token_id = _END
    bos_token_id = None
    special_token_ids = (_END,)

    def __init__(self) -> None:
        self.tokens = [b"<end>", *(bytes([byte]) for byte in range(256))]

    def __call__(self, text: bytes) -> list[int]:
        return [1 + byte for byte in bytes(text)]
