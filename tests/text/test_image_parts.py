"""Images in the messages of chat templates: in their places, whatever a template needs changed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from aioinfer.errors import InvalidRequest
from aioinfer.text.conversation import Change, fitted
from aioinfer.text.messages import IMAGE, parts_of, plain_messages
from aioinfer.text.tokenizer import HFTokenizer

_LOOP = "{% for m in messages %}<|user|>{{ m['role'] }}:"
_PARTS = (
    "{% for p in m['content'] %}{% if p['type'] == 'image' %}<pic>"
    "{% elif p['type'] == 'text' %}{{ p['text'] TRIM }}{% endif %}{% endfor %}"
)
_END = "{% endfor %}{% if add_generation_prompt %}<|user|>answer:{% endif %}"
_STRICT = (
    "{% for m in messages %}"
    "{% if m['role'] not in ['user', 'assistant'] %}{{ raise_exception('no') }}{% endif %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns') }}{% endif %}"
    "<|user|>{{ m['role'] }}:{% if m['content'] is string %}{{ m['content'] }}{% else %}"
)
TEMPLATES = {
    "text or parts": _LOOP
    + "{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    + _PARTS
    + "{% endif %}",
    "parts alone": _LOOP + _PARTS,
    "text alone": _LOOP + "{{ m['content'] }}",
    "text added": _LOOP + "{{ 'x' + m['content'] }}",
    "texts of parts": _LOOP
    + "{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    + "{% for p in m['content'] %}{{ p['text'] }}{% endfor %}{% endif %}",
    "strict": _STRICT + _PARTS + "{% endif %}",
}
PICTURE = {"type": "image"}


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


def tokenizer_with(tokenizer: Tokenizer, name: str, trim: str = "") -> HFTokenizer:
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    fast.chat_template = TEMPLATES[name].replace("TRIM", trim) + _END
    found = HFTokenizer(fast)
    images: Any = SimpleNamespace(reserved=("<pic>", "<patch>"), token_id=1)
    found.images = images
    return found


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


@pytest.mark.parametrize("name", ["text or parts", "parts alone", "strict"])
@pytest.mark.parametrize("trim", ["", "| trim"])
def test_images_stay_between_their_texts(byte_level: Tokenizer, name: str, trim: str) -> None:
    render = tokenizer_with(byte_level, name, trim).render_chat
    assert render([user(PICTURE, text("what"), PICTURE, PICTURE, text("is"))]) == (
        "<|user|>user:<pic>what<pic><pic>is<|user|>answer:"
    )
    chat = [user(PICTURE), {"role": "assistant", "content": "a cat"}, user(text("sure?"), PICTURE)]
    assert render(chat) == ("<|user|>user:<pic><|user|>assistant:a cat<|user|>user:sure?<pic><|user|>answer:")
    assert render([{"role": "user", "content": "no image"}]) == "<|user|>user:no image<|user|>answer:"


def test_changes_for_a_template_keep_images_in_place(byte_level: Tokenizer) -> None:
    render = tokenizer_with(byte_level, "strict").render_chat
    chat = [
        {"role": "system", "content": [text("be brief"), PICTURE]},
        user(PICTURE, text("one")),
        user(text("two"), PICTURE),
    ]
    assert render(chat) == ("<|user|>user:be brief<pic>\n\n<pic>one\n\ntwo<pic><|user|>answer:")


@pytest.mark.parametrize("name", ["text alone", "text added", "texts of parts"])
def test_a_template_without_images_takes_text_and_writes_no_image(byte_level: Tokenizer, name: str) -> None:
    render = tokenizer_with(byte_level, name).render_chat
    assert "hello" in render([user(text("hello"))])
    try:
        assert "<pic>" not in render([user(PICTURE, text("hello"))])
    except InvalidRequest as refused:
        assert refused.field == "messages"


@pytest.mark.parametrize("word", ["<pic>", "<patch>"])
@pytest.mark.parametrize("content", [[text("a WORD")], "a WORD b"])
def test_the_text_of_an_image_is_refused_beside_images_alone(
    byte_level: Tokenizer, word: str, content: Any
) -> None:
    given = content.replace("WORD", word) if isinstance(content, str) else [text(f"a {word}")]
    render = tokenizer_with(byte_level, "text or parts").render_chat
    assert word in render([{"role": "user", "content": given}])
    with pytest.raises(InvalidRequest, match="stands for an image") as caught:
        render([{"role": "user", "content": given}, {"role": "assistant", "content": "b"}, user(PICTURE)])
    assert caught.value.field == "messages[0].content"


@pytest.mark.parametrize("content", [IMAGE, [text(IMAGE)], [text("a"), PICTURE, text(f"b{IMAGE}")]])
def test_no_text_is_an_image(content: Any) -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        plain_messages([{"role": "user", "content": content}], ())


def test_other_parts_are_refused_with_the_types_that_are_read() -> None:
    with pytest.raises(InvalidRequest, match="only parts of types 'text' and 'image' are supported"):
        plain_messages([{"role": "user", "content": [{"type": "audio"}]}], ())


def test_images_are_parts_of_no_message_without_an_encoder() -> None:
    with pytest.raises(InvalidRequest, match="only parts of type 'text'") as caught:
        plain_messages([user(text("a"), PICTURE)])
    assert caught.value.field == "messages[0].content[1]"


def test_results_of_tools_have_images() -> None:
    called = {"id": "1", "type": "function", "function": {"name": "look", "arguments": {}}}
    chat = [
        user(text("look")),
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "1", "content": [text("seen"), PICTURE]},
    ]
    plain = plain_messages(chat, ())
    assert fitted(plain, Change(0))[2]["content"] == [text("seen"), PICTURE]
    split = fitted(plain, Change.SPLIT_CALLS | Change.NULL_BESIDE_CALLS)
    assert split[-1]["content"] == [text("seen"), PICTURE]


def test_contents_become_parts_and_nothing_empty() -> None:
    assert parts_of(f"{IMAGE}a{IMAGE}{IMAGE}") == [PICTURE, text("a"), PICTURE, PICTURE]
    assert parts_of("") == [text("")]
