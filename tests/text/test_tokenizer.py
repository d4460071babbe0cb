"""The tokenizer over Hugging Face files."""

from __future__ import annotations

import inspect
import json
import logging
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from aioinfer.errors import ConfigError, InvalidRequest
from aioinfer.text.detokenizer import OffsetDetokenizer
from aioinfer.text.tokenizer import HFTokenizer
from tests.tiers import SECONDS, rest, scaled

USER = {"role": "user", "content": "the fox"}


@pytest.fixture
def tokenizer(directory: Path) -> HFTokenizer:
    return HFTokenizer.load(directory)


def refused(tokenizer: HFTokenizer, messages: Any, **kwargs: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        tokenizer.encode_chat(messages, **kwargs)
    return caught.value


def rendered(tokenizer: HFTokenizer, messages: Any, **kwargs: Any) -> str:
    return tokenizer.decode(tokenizer.encode_chat(messages, **kwargs), skip_special_tokens=False)


def test_text_goes_in_and_out(tokenizer: HFTokenizer) -> None:
    ids = tokenizer.encode("naïve café 😀")
    assert tokenizer.decode(ids) == "naïve café 😀"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|begin|>naïve café 😀"
    assert tokenizer.eos_token_ids == {0}
    assert max(ids) < tokenizer.vocab_size


def test_ids_are_those_of_transformers(directory: Path, tokenizer: HFTokenizer) -> None:
    reference = AutoTokenizer.from_pretrained(directory)

    @settings(max_examples=scaled(100), deadline=None, derandomize=True)
    @given(st.text(max_size=30))
    def run(text: str) -> None:
        assert tokenizer.encode(text) == reference.encode(text)

    run()
    assert tokenizer.encode("a<|user|>b") == reference.encode("a<|user|>b")
    assert 1 in tokenizer.encode("a<|user|>b"), "special tokens in a prompt are special tokens"


@pytest.mark.parametrize("text", ["a\udc80", "\ud83d", None, 3, b"bytes", ["a"]])
def test_invalid_text_is_refused(tokenizer: HFTokenizer, text: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        tokenizer.encode(text)
    assert caught.value.field == "prompt"


# -- chat ---------------------------------------------------------------------------------------------


#: texts of a user in parts, as clients of images write them
PARTS = [{"type": "text", "text": "the "}, {"type": "text", "text": "fox"}]


@pytest.mark.parametrize(
    ("messages", "options", "text"),
    [
        ([USER], {}, "<|user|>user:the fox<|user|>answer:"),
        ([USER], {"add_generation_prompt": False}, "<|user|>user:the fox"),
        ([{"role": "user", "content": PARTS}], {}, "<|user|>user:the fox<|user|>answer:"),
        (
            [{"role": "assistant", "content": "Hel"}],
            {"continue_final_message": True},
            "<|user|>assistant:Hel",
        ),
        ([{"role": "assistant", "content": None, "tool_calls": []}], {}, "<|user|>assistant:<|user|>answer:"),
    ],
)
def test_messages_are_rendered_up_to_the_answer(
    tokenizer: HFTokenizer, messages: Any, options: dict[str, Any], text: str
) -> None:
    assert rendered(tokenizer, messages, **options) == text


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        (None, "messages"),
        ([], "messages"),
        ("text", "messages"),
        ({"role": "user", "content": "x"}, "messages"),
        (["text"], "messages[0]"),
        ([USER, None], "messages[1]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": 3, "content": "x"}], "messages[0].role"),
        ([{"role": "", "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([USER, {"role": "user", "content": {"type": "text"}}], "messages[1].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": "\ud800"}], "messages[0].content"),
        ([{"role": "us\ud800er", "content": "x"}], "messages[0].role"),
        ([USER, {"role": "tool"}], "messages[1].content"),
        ([{"role": "user", "content": "x", "name": "\udfff"}], "messages"),
    ],
)
def test_malformed_messages_are_refused_by_name(tokenizer: HFTokenizer, messages: Any, field: str) -> None:
    assert refused(tokenizer, messages).field == field


@pytest.mark.parametrize(
    ("bad", "reason"), [("raise", "no such thing"), ("divide", "zero"), ("range", "Range too big")]
)
def test_a_template_that_fails_fails_the_request(tokenizer: HFTokenizer, bad: str, reason: str) -> None:
    error = refused(tokenizer, [USER], bad=bad)
    assert error.field == "messages"
    assert reason in str(error)


def test_all_arguments_of_the_library_are_variables_or_reserved(tokenizer: HFTokenizer) -> None:
    """A name that is neither raises a TypeError about a function that the caller has never heard of."""
    functions = PreTrainedTokenizerBase.apply_chat_template, render_jinja_template
    names = {name for function in functions for name in inspect.signature(function).parameters}
    names -= {"kwargs", "tools", "documents", "add_generation_prompt", "continue_final_message"}
    for name in [*names, "messages"]:
        with pytest.raises(InvalidRequest, match=name) as caught:
            tokenizer.encode_chat([USER], **{name: []})
        assert caught.value.field == "chat_template_kwargs"


def test_without_a_template_messages_are_refused(directory: Path) -> None:
    without_template(directory)
    tokenizer = HFTokenizer.load(directory)
    assert not tokenizer.has_chat_template
    error = refused(tokenizer, [USER])
    assert error.field == "messages"
    assert "no chat template" in str(error)


#: as those of models of text and images look
WITH_IMAGES = (
    "{% for m in messages %}<|user|>{{ m.role }}:"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<|image|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)


def without_template(directory: Path) -> None:
    (directory / "chat_template.jinja").unlink(missing_ok=True)
    configuration = json.loads((directory / "tokenizer_config.json").read_text())
    configuration.pop("chat_template", None)
    (directory / "tokenizer_config.json").write_text(json.dumps(configuration))


def test_a_template_may_be_that_of_a_processor(directory: Path) -> None:
    """Models of text and images had theirs in a file of its own; the tokenizer's counts first."""
    (directory / "chat_template.json").write_text(json.dumps({"chat_template": WITH_IMAGES}))
    assert rendered(HFTokenizer.load(directory), [USER]).endswith("answer:")
    without_template(directory)
    tokenizer = HFTokenizer.load(directory)
    for content in ("the fox", PARTS):
        assert rendered(tokenizer, [{"role": "user", "content": content}]) == "<|user|>user:the fox"
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    error = refused(tokenizer, [{"role": "user", "content": [*PARTS, image]}])
    assert error.field == "messages[0].content[2]"
    assert "only parts of type 'text' are supported, got 'image_url'" in str(error)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"chat_template": 3}'])
def test_a_processors_template_that_is_none_is_an_error(directory: Path, text: str) -> None:
    without_template(directory)
    (directory / "chat_template.json").write_text(text)
    with pytest.raises(ConfigError, match=r"chat_template\.json"):
        HFTokenizer.load(directory)


# -- decoding -----------------------------------------------------------------------------------------


def test_a_tokenizer_in_python_works_too() -> None:
    """ByT5 has no fast tokenizer; its decoder omits incomplete characters instead of writing U+FFFD."""
    tokenizer = HFTokenizer(ByT5Tokenizer())
    prompt, output = tokenizer.encode("Hello"), tokenizer.encode(" naïve 😀 日本 .")
    detokenizer = tokenizer.detokenizer(prompt, skip_special_tokens=True)
    assert isinstance(detokenizer, OffsetDetokenizer)
    text = "".join([detokenizer.push(token) for token in output]) + detokenizer.finish()
    assert text == " naïve 😀 日本 ." == tokenizer.decode(output)
    with pytest.raises(InvalidRequest):
        tokenizer.encode("\ud800")


# -- threads and files --------------------------------------------------------------------------------


@rest(SECONDS)
def test_threads_share_a_tokenizer_without_truncation(tokenizer: HFTokenizer) -> None:
    """The file sets truncation to 4 and padding to 16: shared state that concurrent calls would change."""
    texts = [f"the quick brown fox {number} " * 50 for number in range(200)]
    alone = [tokenizer.encode(text) for text in texts]
    assert all(tokenizer.decode(ids) == text for ids, text in zip(alone, texts, strict=True))
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(tokenizer.encode, texts)) == alone
        chats = list(pool.map(lambda text: tokenizer.encode_chat([{"role": "user", "content": text}]), texts))
    assert all(len(chat) > len(ids) for chat, ids in zip(chats, alone, strict=True))


@rest(SECONDS)
def test_other_threads_run_while_a_long_prompt_is_encoded(tokenizer: HFTokenizer) -> None:
    """The event loop is one of them: encoding with the GIL held would stop it."""

    def turns_beside(text: str) -> int:
        encoding, turns = threading.Thread(target=tokenizer.encode, args=(text,)), 0
        encoding.start()
        while encoding.is_alive():
            time.sleep(0.001)
            turns += 1
        return turns

    # The longer the text, the more turns there are, however fast the machine; or as few as before.
    texts = ("the quick brown fox jumps over the lazy dog. " * count for count in (10_000, 40_000, 160_000))
    assert any(turns_beside(text) > 10 for text in texts)


def test_special_tokens_are_plain_text_if_the_model_defines_so(directory: Path) -> None:
    configuration = json.loads((directory / "tokenizer_config.json").read_text())
    configuration["split_special_tokens"] = True
    (directory / "tokenizer_config.json").write_text(json.dumps(configuration))
    assert 1 not in HFTokenizer.load(directory).encode("a<|user|>b")


@pytest.mark.parametrize("content", ["{}", "not json", '{"version": "1.0", "model": {"type": "Nope"}}', None])
def test_a_broken_directory_is_a_config_error(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError):
        HFTokenizer.load(tmp_path)


def test_code_in_the_directory_is_not_run_and_no_question_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configuration = {"auto_map": {"AutoTokenizer": ["mine.Mine", None]}, "tokenizer_class": "Mine"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(configuration))
    (tmp_path / "mine.py").write_text("raise SystemExit('the code of the directory ran')")

    def asked(*_: Any) -> str:
        raise SystemExit("somebody asked on the terminal")

    monkeypatch.setattr("builtins.input", asked)
    with pytest.raises(ConfigError):
        HFTokenizer.load(tmp_path)


def test_importing_the_room_loads_no_library() -> None:
    code = (
        "import sys, aioinfer.text.tokenizer, aioinfer.text.output\n"
        "print([name for name in ('torch', 'transformers', 'tokenizers', 'jinja2') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_a_model_type_unknown_to_transformers_logs_no_warning(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (directory / "config.json").write_text('{"model_type": "llada2_moe", "architectures": ["X"]}')
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)  # its records are not handed on
    try:
        tokenizer = HFTokenizer.load(directory)
    finally:
        logger.removeHandler(caplog.handler)
    assert not caplog.messages
    assert tokenizer.decode(tokenizer.encode_part("the fox")) == "the fox"


def test_the_turn_end_of_llada2_ends_an_output(directory: Path) -> None:
    plain = AutoTokenizer.from_pretrained(directory)
    plain.add_special_tokens({"additional_special_tokens": ["<|role_end|>"]})
    end = plain.convert_tokens_to_ids("<|role_end|>")
    assert HFTokenizer(plain).eos_token_ids == {0, end}
