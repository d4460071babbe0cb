"""The tokenizer over Hugging Face files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from aioinfer.errors import ConfigError, InvalidRequest
from aioinfer.text.tokenizer import HFTokenizer

TEMPLATE = (
    "{% for m in messages %}<|user|>{{ m['role'] }}:{{ m['content'] }}{% endfor %}"
    "{% if bad %}{{ raise_exception('no such thing') }}{% endif %}"
)


@pytest.fixture
def directory(byte_level: Tokenizer, tmp_path: Path) -> Path:
    fast = PreTrainedTokenizerFast(tokenizer_object=byte_level, eos_token="<|end|>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(tmp_path)
    return tmp_path


def test_text_goes_in_and_out(directory: Path) -> None:
    tokenizer = HFTokenizer.load(directory)
    ids = tokenizer.encode("naïve café 😀")
    assert tokenizer.decode(ids) == "naïve café 😀"
    assert tokenizer.eos_token_ids == {0}


def test_messages_go_through_the_template(directory: Path) -> None:
    tokenizer = HFTokenizer.load(directory)
    parts: list[Any] = [{"type": "text", "text": "the "}, {"type": "text", "text": "fox"}]
    ids = tokenizer.encode_chat([{"role": "user", "content": parts}])
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|user|>user:the fox"


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        (["text"], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": "\ud800"}], "messages[0].content"),
    ],
)
def test_malformed_messages_are_refused_by_name(directory: Path, messages: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        HFTokenizer.load(directory).encode_chat(messages)
    assert caught.value.field == field


def test_a_template_that_raises_is_the_callers_error(directory: Path) -> None:
    with pytest.raises(InvalidRequest, match="no such thing"):
        HFTokenizer.load(directory).encode_chat([{"role": "user", "content": "x"}], bad=True)


def test_without_a_template_messages_are_refused(directory: Path) -> None:
    (directory / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = HFTokenizer.load(directory)
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequest, match="no chat template"):
        tokenizer.encode_chat([{"role": "user", "content": "x"}])


def test_half_a_surrogate_pair_is_refused(directory: Path) -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        HFTokenizer.load(directory).encode("a\udc80")


def test_a_broken_directory_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError):
        HFTokenizer.load(tmp_path)
