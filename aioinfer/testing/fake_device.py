"""FakeDevice: writes scripted answers, byte by byte."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from aioinfer.config import EngineConfig
from aioinfer.execution.device import CompletedFlight, DeviceInfo, Progress, StepResult
from aioinfer.execution.grammar_worker import GrammarRow, GrammarWorker
from aioinfer.execution.steering import SteeredRow, advance, awake, steer
from aioinfer.images.processor import ImageProcessor
from aioinfer.images.support import ImageSupport
from aioinfer.model.adapters.base import PreparedAdapter
from aioinfer.observe.timeline import DeviceLane, now
from aioinfer.outputs import TokenLogprob
from aioinfer.pooling import Pooling
from aioinfer.request import Output
from aioinfer.sampling.outcomes import ASKED, DEFERRED, FORCED, NO_TOKEN
from aioinfer.scheduling.step import NewRequestData, Row, Step
from aioinfer.testing.fake_images import FakeImages
from aioinfer.text.detokenizer import Detokenizer, OffsetDetokenizer
from aioinfer.text.messages import IMAGE, plain_messages

__all__ = ["FakeDevice", "FakeTokenizer", "Script", "hashes", "logprob", "mix", "pool"]

_END = 0
_VOCABULARY = 257
_HASH_MASK = (1 << 63) - 1
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
        #: called once after the content, instead of its end
        self.fail = fail
        self.failed = False
        #: when the first token comes
        self.due = 0.0
        #: a grammar did not allow it: the rest is the shortest text
        self.off = content is None


class FakeDevice:
    """A synchronous device that needs no torch. Its time is that of the loop."""

    synchronous = True

    def __init__(
        self,
        config: EngineConfig,
        clock: Callable[[], float],
        hidden_size: int = 3,
        images: ImageSupport | None = None,
    ) -> None:
        self.lane = DeviceLane()
        self.masks = GrammarWorker(threaded=False)
        self._config = config
        self._clock = clock
        self._hidden_size = hidden_size
        self._images = images
        self._tenants: dict[int, NewRequestData] = {}
        #: slots whose newest row sampled nothing: their rows in flight are void
        self._void: set[int] = set()
        self._scripts: dict[Output, Script] = {}
        self._most = 64

    def open(self, progress: Progress | None = None) -> DeviceInfo:
        config = self._config
        num_pages = config.num_pages or 4096
        capacity = num_pages * config.positions_per_page
        return DeviceInfo(
            vocab_size=_VOCABULARY,
            max_model_len=min(config.max_model_len or capacity, capacity),
            num_pages=num_pages,
            eos_token_ids=frozenset({_END}),
            description="scripted answers",
            hidden_size=self._hidden_size,
            images=self._images,
            max_adapters=config.adapter_slots,
            adapter_reason="" if config.adapter_slots else "max_adapters is 0",
        )

    def play(self, output: Output, script: Script, begun: int = 0) -> None:
        """Set the answer to a request that has ``begun`` tokens already. Called before its first step."""
        if len(self._scripts) >= self._most:
            self._scripts = {each: found for each, found in self._scripts.items() if not each.ended}
            self._most = 2 * len(self._scripts) + 64
        script.due = self._clock() + script.delay - begun * script.pace
        self._scripts[output] = script

    def _script(self, row: Row) -> Script:
        """The script of a row's request; an empty one if the request has ended meanwhile. A fork, and a
        stream that was rewound, go on with the newest one of their prompt, but not with its error."""
        output = row.sequence.output
        found = self._scripts.get(output)
        if found is None and not output.finished:
            ids = tuple(output.prompt_ids)
            for other, script in reversed(self._scripts.items()):
                if tuple(other.prompt_ids) == ids:
                    found = Script(script.content, script.delay, script.pace, None)
                    found.due, self._scripts[output] = script.due, found
                    break
        return found or Script(b"", 0.0, 0.0, None)

    def prepare_adapter(self, path: Path) -> PreparedAdapter:
        """Take any path: nothing is read."""
        return _Adapter()

    def install_adapter(self, slot: int, adapter: PreparedAdapter) -> None:
        """Do nothing: answers do not depend on adapters."""

    def remove_adapter(self, slot: int) -> None:
        """Do nothing."""

    def prepare_weights(self, given: Any, go_on: Callable[[], None]) -> None:
        """Take any weights: nothing is read."""

    def install_weights(self, prepared: None) -> None:
        """Do nothing: answers do not depend on weights."""

    def check(self) -> None:
        """The device is never lost by itself."""

    def close(self) -> None:
        """There is nothing to give back."""

    def prepare(self, step: Step) -> Step:
        return step

    def seconds(self, step: Step) -> float:
        """Duration of a step: until the first of its requests may have a token."""
        time = self._clock()
        waits = [self._wait(row, time) for row in step.rows if row.samples]
        return min(min(waits, default=0.0), _LONGEST_STEP)

    def _wait(self, row: Row, time: float) -> float:
        script = self._script(row)
        if script.failed:
            return _LONGEST_STEP
        return max(0.0, script.due + row.output_index * script.pace - time)

    def launch(self, step: Step) -> CompletedFlight:
        start = now()
        result = StepResult([])
        for index, row in enumerate(step.rows):
            if row.new_request is not None:
                self._tenants[row.slot] = row.new_request
            if row.ids:
                self._void.discard(row.slot)
            tenant = self._tenants[row.slot]
            forced: list[int] = []
            token = self._sample(row, tenant, forced) if row.samples else NO_TOKEN
            result.tokens.append(token)
            if forced:
                result.forced[index] = forced
            if token in (ASKED, DEFERRED, FORCED):
                self._void.add(row.slot)
            if tenant.params.logprobs is not None and token >= 0:
                result.logprobs[index] = [logprob(row.kv_length, token)]
            if row.pools is not None:
                assert row.sequence.pooled is not None
                first, last = row.pools
                states = hashes(tenant.prompt_ids[:last])[first:]
                result.pooled[index] = pool(row.sequence.pooled.pooling, states, self._hidden_size)
            if row.scores is not None:
                result.prompt_logprobs[index] = [
                    logprob(at + 1, tenant.prompt_ids[at + 1]) for at in range(*row.scores)
                ]
        self.lane.step(step.id, start, start, start, now())
        return CompletedFlight(result)

    def _sample(self, row: Row, tenant: NewRequestData, forced: list[int]) -> int:
        """The next token of a row, or what stands for it; ``forced`` gets tokens that are not sampled."""
        if row.slot in self._void or not self._due(row):
            return DEFERRED
        rows, steered, mask = [], [], None
        outcomes: dict[int, int] = {}
        if tenant.grammar is not None:
            rows = [GrammarRow(0, tenant.grammar, row.kv_length, bool(row.ids))]
            found = self.masks.collect(rows, 1)
            mask, outcomes = found.masks[0], found.outcomes
            forced += found.forced.get(0, [])
        token = self._next(row, tenant)
        given: dict[int, list[int]] = {}
        if tenant.steering is not None:
            line = np.zeros(_VOCABULARY, np.float32)
            line[token] = 1.0
            steered = [SteeredRow(0, tenant.steering, row.kv_length, bool(row.ids))]
            wanted = steer(awake(steered), [line], patience=self.masks.patience, outcomes=outcomes, usable={})
            self.masks.skip(rows, wanted.outcomes)
            outcomes, given, token = outcomes | wanted.outcomes, wanted.forced, int(line.argmax())
            forced += given.get(0, [])
        if outcomes:
            token = outcomes[0]
        elif mask is not None:
            token = self._allowed(row, token, mask)
        self.masks.advance(rows, [token], given)
        advance(steered, [token], {0: forced} if forced else {})
        return token

    def _due(self, row: Row) -> bool:
        """True if a row may have its token by now."""
        script = self._script(row)
        content = script.content or b""
        if script.fail is not None and row.output_index >= len(content):
            if not script.failed:
                script.failed = True
                asyncio.get_running_loop().call_soon(script.fail)
            return False
        # Timers can be early by the resolution of a clock.
        return self._wait(row, self._clock()) <= 1e-4

    def _next(self, row: Row, tenant: NewRequestData) -> int:
        content = self._script(row).content or b""
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


class _Adapter:
    """An adapter without content."""

    rank = 8
    num_bytes = 0
    fingerprint = f"{1:016x}"


def logprob(position: int, token: int) -> TokenLogprob:
    """A logprob without a meaning, unique to the position and the token."""
    return TokenLogprob(token, -(1000.0 * position + token))


def mix(state: int, value: int) -> int:
    """One step of a 63-bit multiplicative hash (the constant is 2**64 / golden ratio)."""
    state = (state ^ value) * 0x9E3779B97F4A7C15 & _HASH_MASK
    return state ^ (state >> 29)


def hashes(ids: Sequence[int], state: int = 0) -> list[int]:
    """Hashes of a sequence up to each of its tokens; ``state`` is the hash of what comes before."""
    found = []
    for token in ids:
        state = mix(state, token)
        found.append(state)
    return found


def pool(pooling: Pooling, states: Sequence[int], hidden_size: int = 3) -> npt.NDArray[Any]:
    """Pooled values of positions up to which the sequence has these hashes."""
    if pooling.kind == "choices":
        return np.asarray([mix(states[-1], token) & 0xFFFF for token in pooling.token_ids], np.float32)
    hidden = np.stack([_hidden(state, hidden_size) for state in states])
    if pooling.kind == "tokens":
        return hidden
    found: npt.NDArray[Any] = hidden.sum(0, dtype=np.float64) if pooling.kind == "mean" else hidden[-1]
    return found


def _hidden(state: int, size: int) -> npt.NDArray[np.float32]:
    """A hidden state: the bits of a hash, and of hashes of that, which float32 holds exactly."""
    found: list[int] = []
    while len(found) < size:
        found += (state >> shift & 0x1FFFFF for shift in (0, 21, 42))
        state = mix(state, size)
    return np.asarray(found[:size], np.float32)


class FakeTokenizer:
    """A token per byte of UTF-8, and 0 for the end of an output. ``images``: chats may have images."""

    def __init__(self, *, images: bool = False) -> None:
        self.images = ImageProcessor(FakeImages()) if images else None
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
        reserved = None if self.images is None else self.images.reserved
        lines = [
            f"{each['role']}: {each['content'] or ''}{''.join(map(_call, each.get('tool_calls', ())))}\n"
            for each in plain_messages(messages, reserved)
        ]
        return "".join([*lines, "assistant: "]).replace(IMAGE, FakeImages.placeholder)

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(token - 1 for token in ids if token != _END).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return b"" if token_id == _END else bytes([token_id - 1])

    def detokenizer(self, prompt_ids: Sequence[int], *, skip_special_tokens: bool) -> Detokenizer:
        return OffsetDetokenizer(self.decode, prompt_ids)

    def for_grammars(self) -> Any:
        import llguidance

        return llguidance.TokenizerWrapper(_Bytes())


def _call(call: Mapping[str, Any]) -> str:
    function = call.get("function", call)
    return f"\n{function.get('name')}({json.dumps(function.get('arguments'))})"


class _Bytes:
    """Bytes as a tokenizer for ``llguidance.TokenizerWrapper``."""

    eos_token_id = _END
    bos_token_id = None
    special_token_ids = (_END,)

    def __init__(self) -> None:
        self.tokens = [b"<end>", *(bytes([byte]) for byte in range(256))]

    def __call__(self, text: bytes) -> list[int]:
        return [1 + byte for byte in bytes(text)]
