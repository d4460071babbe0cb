"""What a server does with prompts before the model sees them."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from typing import Any

import openai
import pytest

from aioinfer.config import EngineConfig
from aioinfer.text.tokenizer import HFTokenizer
from tests.server.conftest import Bundled, Serving
from tests.tiers import SECONDS, rest
from tests.toys import ToyTokenizer


class Counting(ToyTokenizer):
    """Counts what it tokenizes; texts that begin with "!" wait for the gate."""

    def __init__(self) -> None:
        super().__init__()
        self.encoded: Counter[str] = Counter()
        self.begun = threading.Semaphore(0)
        self.gate = threading.Event()

    def encode(self, text: str) -> list[int]:
        self.encoded[text] += 1
        if text.startswith("!"):
            self.begun.release()
            self.gate.wait()
        return super().encode(text)


@rest(SECONDS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_is_tokenized_once_for_all_its_choices(serving: Serving, stream: bool) -> None:
    tokenizer = Counting()
    async with serving(tokenizer=tokenizer) as served, served.client(strict=False) as client:
        answer: Any = await client.completions.create(
            model="toy", prompt=["first", "second"], n=16, max_tokens=2, stream=stream
        )
        if stream:
            indices = {choice.index async for chunk in answer for choice in chunk.choices}
        else:
            indices = {choice.index for choice in answer.choices}
    assert indices == set(range(32))
    assert tokenizer.encoded == {"first": 1, "second": 1}


async def test_a_client_that_left_while_its_prompt_waited_has_no_work_done(serving: Serving) -> None:
    tokenizer = Counting()
    try:
        async with serving(tokenizer=tokenizer) as served, served.client() as client:

            def ask(prompt: str, n: int) -> asyncio.Task[Any]:
                call = client.completions.create(model="toy", prompt=prompt, n=n, max_tokens=2)
                return asyncio.create_task(call)

            blocking = [ask(f"!{number}", 1) for number in range(2)]
            for _ in blocking:
                await asyncio.to_thread(tokenizer.begun.acquire)
            leaving = ask("left", 100)
            while served.engine.stats().arriving < 102:
                await asyncio.sleep(0.001)
            leaving.cancel()
            while served.engine.stats().arriving > 2 or served.engine._started()._intake.waiting:
                await asyncio.sleep(0.001)
            tokenizer.gate.set()
            await asyncio.gather(*blocking)
        assert tokenizer.encoded == {"!0": 1, "!1": 1}
    finally:
        tokenizer.gate.set()


@rest(SECONDS)
async def test_a_text_that_cannot_fit_is_refused_without_tokenizing(serving: Serving) -> None:
    tokenizer = Counting()
    async with serving(tokenizer=tokenizer) as served, served.client() as client:
        for prompt in ("x" * (1 << 20), [5] * 100_000):
            with pytest.raises(openai.BadRequestError, match="maximum context length is 4096 tokens"):
                await client.completions.create(model="toy", prompt=prompt, n=128)
    assert not tokenizer.encoded


async def test_an_echo_of_ids_shows_special_tokens_if_they_are_asked_for(bundled: Bundled) -> None:
    ids = HFTokenizer.load(EngineConfig().model_path).encode("<|user|>Hi")
    async with bundled() as client:
        for skipped, echoed in ((True, "Hi"), (False, "<|user|>Hi")):
            answer = await client.completions.create(
                model="tiny-chat",
                prompt=ids,
                echo=True,
                max_tokens=1,
                extra_body={"skip_special_tokens": skipped},
            )
            assert answer.choices[0].text.startswith(echoed), (skipped, answer.choices[0].text)
