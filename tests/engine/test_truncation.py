"""Prompts that are cut to a number of tokens, however long they are."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from aioinfer.config import EngineConfig
from aioinfer.errors import InvalidRequest
from aioinfer.execution.device import DeviceInfo
from aioinfer.loop.options import PromptForm, PromptSource
from aioinfer.testing import FakeEngine
from aioinfer.text.tokenizer import HFTokenizer
from tests.text.byte_levels import BUNDLED, bundled

INFO = DeviceInfo(1 << 20, 4096, 64, frozenset(), "none")


class Counting:
    """A tokenizer that counts the characters that it gets."""

    def __init__(self, tokenizer: HFTokenizer) -> None:
        self._tokenizer = tokenizer
        self.characters = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode(self, text: str) -> list[int]:
        self.characters += len(text)
        return self._tokenizer.encode(text)

    def encode_part(self, text: str) -> list[int]:
        self.characters += len(text)
        return self._tokenizer.encode_part(text)


def with_ends(raw: Tokenizer) -> HFTokenizer:
    raw = Tokenizer.from_str(raw.to_str())
    raw.add_special_tokens(["<s>", "</s>"])
    ends = [("<s>", raw.token_to_id("<s>")), ("</s>", raw.token_to_id("</s>"))]
    raw.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    return HFTokenizer(PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>"))


@cache
def words() -> HFTokenizer:
    return with_ends(bundled(BUNDLED[0]))


@cache
def runs() -> HFTokenizer:
    """Tokens of long texts depend on where these begin: digits are in threes, and letters a in eights."""
    vocab = {each: at for at, each in enumerate([*"0123456789ab ", "aa", "aaaa", "aaaaaaaa"])}
    merges = [("a", "a"), ("aa", "aa"), ("aaaa", "aaaa")]
    for pair in [f"{at:02}" for at in range(100)]:
        vocab[pair] = len(vocab)
        merges.append((pair[0], pair[1]))
    raw = Tokenizer(models.BPE(vocab, merges))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex("[0-9]{1,3}| ?[ab]+"), "isolated")
    raw.decoder = decoders.Fuse()
    return with_ends(raw)


@cache
def sentences() -> HFTokenizer:
    """One word from the beginning to the end, as in Llama 2."""
    vocab = {each: at for at, each in enumerate(["▁", *"abcd", "ab", "▁ab", "cd", "abcd"])}
    merges = [("a", "b"), ("▁", "ab"), ("c", "d"), ("ab", "cd")]
    raw = Tokenizer(models.BPE(vocab, merges))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    return with_ends(raw)


def kept(ids: list[int], most: int, beginning: bool) -> list[int]:
    if len(ids) <= most:
        return ids
    return [*ids[: most - 1], ids[-1]] if beginning else ids[-most:]


TEXTS: dict[str, tuple[Callable[[], HFTokenizer], str]] = {
    "words": (words, "The quick brown fox, jumps 12345 times! "),
    "spaces": (words, " " * 37 + "\n"),
    "letters": (runs, "a"),
    "digits": (runs, "1234567"),
    "letters and words": (runs, "a" * 501 + " b "),
    "digits and words": (runs, "1234567" * 41 + " ab 12 "),
    "one word": (sentences, "abcdabcd ab cdab "),
}


@pytest.mark.parametrize("beginning", [False, True])
@pytest.mark.parametrize("name", TEXTS)
def test_a_text_that_is_cut_has_the_tokens_of_the_whole(name: str, beginning: bool) -> None:
    make, part = TEXTS[name]
    dice = random.Random(name)
    for most in (3, 8, 64):
        text = part * (200_000 // len(part)) + part[: dice.randrange(len(part))]
        form = PromptForm(truncate=most, beginning=beginning)
        found = PromptSource(text, make(), INFO, form=form).encode()
        assert list(found) == kept(make().encode(text), most, beginning)


@pytest.mark.parametrize("beginning", [False, True])
def test_what_is_far_from_the_end_that_is_kept_is_not_tokenized(beginning: bool) -> None:
    for make, part in ((words, "The quick brown fox. "), (sentences, "abcd ab ")):
        tokenizer: Any = Counting(make())
        text = part * 500_000
        PromptSource(text, tokenizer, INFO, form=PromptForm(truncate=10, beginning=beginning)).encode()
        assert 0 < tokenizer.characters < len(text) / 100


async def test_chats_and_texts_longer_than_the_context_are_cut() -> None:
    async with FakeEngine("ok") as engine:
        context = engine.info.max_model_len
        text = "".join(random.Random(1).choices("abc ", k=20 * context))
        ask = [{"role": "user", "content": text}]
        for prompt, end in ((text, ""), (ask, "\nassistant: ")):
            with pytest.raises(InvalidRequest, match="maximum context length"):
                await engine.generate(prompt)
            source = engine.prompt(prompt, truncate_prompt_tokens=50)
            ids = (await engine.generate(source)).prompt_token_ids
            assert engine.tokenizer is not None
            assert engine.tokenizer.decode(ids) == (text + end)[-50:]
            source = engine.prompt(prompt, truncate_prompt_tokens=-10)
            assert (await engine.generate(source)).usage.prompt_tokens == context - 10


@pytest.mark.parametrize("long", ["x" * 5000, [1] * 5000, ["a", "x" * 5000], ["a", [1] * 5000]])
async def test_an_input_that_is_too_long_is_told_once_how_it_is_cut(long: Any) -> None:
    async with FakeEngine(config=EngineConfig(model="fake", max_model_len=1000, overlap_steps=0)) as engine:
        found = []
        with pytest.raises(InvalidRequest) as caught:
            await engine.embed(long)
        found.append(caught.value)
        with pytest.raises(InvalidRequest) as caught:
            await asyncio.to_thread(lambda: engine.threadsafe().embed(long).result())
        found.append(caught.value)
        assert [str(each).count("truncate_prompt_tokens") for each in found] == [1, 1]
        assert str(found[0]) == str(found[1])
