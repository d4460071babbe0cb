"""Logprobs spell tokens by their own bytes, and the text can be put together from them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, processors
from transformers import PreTrainedTokenizerFast

from aioinfer.outputs import TokenLogprob
from aioinfer.params import SamplingParams
from aioinfer.server.http.pace import Pace
from aioinfer.server.openai.logprobs import ChatLogprobs, CompletionLogprobs, Speller, TextOffsets
from aioinfer.text.tokenizer import HFTokenizer
from tests.text.byte_levels import made

BYTE = 3  # the id of <0x00>


def sentencepiece() -> HFTokenizer:
    """A vocabulary as Llama 2 has it: spaces are part of the words, and other characters are bytes."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{at:02X}>": BYTE + at for at in range(256)}}
    for piece in ["▁", "w", "e", "we", "▁we", "a"]:
        vocab[piece] = len(vocab)
    merges = [("w", "e"), ("▁", "we")]
    raw = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return HFTokenizer(PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>"))


def byte_level() -> HFTokenizer:
    """Tokens that begin and end within characters."""
    raw = made([b" we", "é".encode(), b"\x91\xa9x", b"\xf0\x9f"])
    return HFTokenizer(PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>"))


MAKE = {"sentencepiece": sentencepiece, "byte_level": byte_level}


async def written(writer: ChatLogprobs | CompletionLogprobs, ids: Sequence[int], **more: Any) -> Any:
    parts: list[str] = []
    entries = more.pop("entries", None) or [TokenLogprob(each, -1.0) for each in ids]
    await writer.write(entries, Pace(), parts.append, **more)
    return json.loads("".join(parts))


def completion(tokenizer: HFTokenizer, prompt_ids: Sequence[int] = (), echo: str = "") -> CompletionLogprobs:
    offsets = TextOffsets(tokenizer, prompt_ids, echo, SamplingParams())
    return CompletionLogprobs(Speller(tokenizer.token_bytes), offsets)


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
@pytest.mark.parametrize("text", [" we we", "é👩 we", " 👩‍👩‍👧é", "we\n\u00a0we!", "wewe we"])
async def test_the_bytes_of_the_tokens_are_the_text(make: Any, text: str) -> None:
    tokenizer = make()
    prompt = tokenizer.encode("we")
    ids = tokenizer.encode_part("a" + text)[1:]
    if make is sentencepiece:  # "▁", "a"
        ids = ids[1:]
    chat = await written(ChatLogprobs(Speller(tokenizer.token_bytes)), ids)
    assert bytes(value for each in chat["content"] for value in each["bytes"]).decode() == text
    plain = await written(completion(tokenizer, prompt), ids)
    names = [each["token"] for each in chat["content"]]
    assert plain["tokens"] == names
    for token, name, offset in zip(ids, names, plain["text_offset"], strict=True):
        whole = not name.startswith("bytes:")
        assert whole == (tokenizer.token_bytes(token).decode(errors="replace") == name)
        if whole:
            assert text[offset:].startswith(name)
        else:
            assert name == "bytes:" + "".join(f"\\x{each:02x}" for each in tokenizer.token_bytes(token))
            assert offset < len(text)


async def test_alternatives_are_parts_of_characters_by_their_bytes() -> None:
    tokenizer = sentencepiece()
    first, second = BYTE + 0xF0, BYTE + 0xE2
    entry = TokenLogprob(first, -1.0, ((first, -1.0), (second, -2.0)))
    chat = await written(ChatLogprobs(Speller(tokenizer.token_bytes)), [], entries=[entry])
    assert [each["bytes"] for each in chat["content"][0]["top_logprobs"]] == [[0xF0], [0xE2]]
    plain = await written(completion(tokenizer), [], entries=[entry])
    assert plain["top_logprobs"] == [{"bytes:\\xf0": -1.0, "bytes:\\xe2": -2.0}]


async def test_alternatives_with_and_without_space_are_two() -> None:
    tokenizer = sentencepiece()
    tight, spaced = tokenizer.encode_part("awe")[-1], tokenizer.encode_part("we")[0]
    entry = TokenLogprob(tight, -1.0, ((tight, -1.0), (spaced, -2.0)))
    plain = await written(completion(tokenizer), [], entries=[entry])
    assert plain["top_logprobs"] == [{"we": -1.0, " we": -2.0}]


async def test_of_tokens_with_one_text_the_likely_one_has_its_name() -> None:
    """A byte token and the letter of this byte."""
    tokenizer = sentencepiece()
    letter, byte = tokenizer.encode_part("a")[-1], BYTE + ord("a")
    for likely, other in ((letter, byte), (byte, letter)):
        entry = TokenLogprob(likely, -1.0, ((likely, -1.0), (other, -2.0)))
        plain = await written(completion(tokenizer), [], entries=[entry])
        assert plain["top_logprobs"] == [{"a": -1.0, f"token_id:{other}": -2.0}]


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
@pytest.mark.parametrize("prompt", ["we é we", "👩", "</s> we", " we"])
async def test_offsets_are_those_in_the_text_with_its_echo(make: Any, prompt: str) -> None:
    tokenizer = make()
    prompt_ids = tokenizer.encode(prompt)
    ids = tokenizer.encode_part("a👩a we")[-7:]
    text = prompt + tokenizer.decode([*tokenizer.encode("a"), *ids])[1:]
    entries = [None, *(TokenLogprob(each, -1.0) for each in [*prompt_ids[1:], *ids])]
    writer = completion(tokenizer, prompt_ids, prompt)
    found = await written(writer, [], entries=entries, echoed=prompt_ids)
    offsets = found["text_offset"]
    assert offsets == sorted(offsets)
    assert offsets[len(prompt_ids)] == len(prompt)
    assert found["token_logprobs"][0] is None
    for token, offset in zip([*prompt_ids, *ids], offsets, strict=True):
        shown = tokenizer.token_bytes(token).decode(errors="ignore").lstrip(" ")
        assert shown in ("<s>", "x") or text[offset:].lstrip(" ").startswith(shown)


async def test_tokens_that_are_not_in_the_text_take_no_room() -> None:
    tokenizer = sentencepiece()
    ids = [tokenizer.encode_part("a")[-1], 2, tokenizer.encode_part("a")[-1], 2]
    writer = completion(tokenizer, tokenizer.encode("we"))
    assert (await written(writer, ids))["text_offset"] == [0, 1, 1, 2]


async def test_offsets_go_on_from_chunk_to_chunk() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode_part("é👩 we") * 2
    whole = await written(completion(tokenizer), ids)
    writer = completion(tokenizer)
    parts = [await written(writer, [each]) for each in ids]
    assert [each["text_offset"][0] for each in parts] == whole["text_offset"]
