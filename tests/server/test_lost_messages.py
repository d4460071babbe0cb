"""What a client sends is in the prompt, in every protocol, also where the chat template would refuse it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aioinfer.text.tokenizer import HFTokenizer
from tests.server.conftest import Bundled, Messages
from tests.text.test_conversation import ALTERNATES, NINE, RAISES

#: a system message in front only, turns that alternate, ids of nine letters
STRICT = ALTERNATES.replace(
    "[{{ m.role }}]",
    "{% if m.role not in ('user', 'assistant', 'tool') and (m.role != 'system' or not loop.first) %}"
    + RAISES
    + "{% endif %}[{{ m.role }}]",
).replace("{{ c.function.name }}", NINE + " {{ c.function.name }}")
CALL = "call_0123456789"


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch, directory: Path) -> list[str]:
    """The prompts of chats with a model that has a strict template."""
    (directory / "chat_template.jinja").write_text(STRICT + "{# tools #}")
    found: list[str] = []
    render = HFTokenizer.render_chat

    def recorded(self: HFTokenizer, messages: Any, /, **variables: Any) -> str:
        found.append(render(self, messages, **variables))
        return found[-1]

    monkeypatch.setattr(HFTokenizer, "render_chat", recorded)
    return found


def check(prompt: str) -> None:
    head, _, rest = prompt.partition("[user]")
    assert head == "[system]be brief\n\nand kind"
    made = rest.removeprefix("where[assistant]").partition(" ")[0]
    assert made.isalnum()
    assert rest == f'where[assistant]{made} find{{"a": 1}}[tool]seven[assistant][user]and then?\n\nhurry'


async def test_chats(bundled: Bundled, directory: Path, prompts: list[str]) -> None:
    call = {"id": CALL, "type": "function", "function": {"name": "find", "arguments": '{"a": 1}'}}
    conversation: list[Any] = [
        {"role": "system", "content": "be brief"},
        {"role": "developer", "content": "and kind"},
        {"role": "user", "content": "where"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": CALL, "content": "seven"},
        {"role": "user", "content": "and then?"},
        {"role": "developer", "content": "hurry"},
    ]
    async with bundled(directory) as client:
        ask = {"model": "tiny-chat", "max_tokens": 1}
        await client.chat.completions.create(**ask, messages=conversation)  # type: ignore[call-overload]
        conversation[5] = {"role": "usr", "content": "and then?"}
        with pytest.raises(Exception, match="not a role") as refused:
            await client.chat.completions.create(**ask, messages=conversation)  # type: ignore[call-overload]
    assert refused.value.param == "messages[5].role"  # type: ignore[attr-defined]
    (prompt,) = prompts
    check(prompt)


async def test_responses(bundled: Bundled, directory: Path, prompts: list[str]) -> None:
    conversation: Any = [
        {"role": "developer", "content": "and kind"},
        {"role": "user", "content": "where"},
        {"type": "function_call", "call_id": CALL, "name": "find", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": CALL, "output": "seven"},
        {"role": "user", "content": "and then?"},
        {"role": "system", "content": "hurry"},
    ]
    async with bundled(directory) as client:
        await client.responses.create(
            model="tiny-chat", max_output_tokens=1, instructions="be brief", input=conversation
        )
    check(prompts[0])


async def test_messages(messages: Messages, directory: Path, prompts: list[str]) -> None:
    result = {"type": "tool_result", "tool_use_id": CALL, "content": "seven"}
    conversation: Any = [
        {"role": "system", "content": "and kind"},
        {"role": "user", "content": "where"},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": CALL, "name": "find", "input": {"a": 1}}],
        },
        {"role": "user", "content": [result, {"type": "text", "text": "and then?"}]},
        {"role": "system", "content": "hurry"},
    ]
    async with messages(directory) as client:
        await client.messages.create(
            model="tiny-chat", max_tokens=1, system="be brief", messages=conversation
        )
    check(prompts[0])


async def test_null_in_the_history_ends_no_conversation(
    bundled: Bundled, messages: Messages, directory: Path, prompts: list[str]
) -> None:
    called: Any = {"type": "function_call", "call_id": "abcdefghi", "name": "find", "arguments": None}
    output: Any = {"type": "function_call_output", "call_id": "abcdefghi", "output": None}
    conversation: Any = [{"role": "user", "content": "where"}, called, output]
    async with bundled(directory) as client:
        for _ in range(2):
            await client.responses.create(model="tiny-chat", max_output_tokens=1, input=conversation)
            called["arguments"] = ""
            conversation.append({"role": "assistant", "content": None})
    use = {"type": "tool_use", "id": "abcdefghi", "name": "find", "input": None}
    result: Any = {"type": "tool_result", "tool_use_id": "abcdefghi", "content": None}
    conversation = [
        {"role": "user", "content": "where"},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    async with messages(directory) as anthropic:
        await anthropic.messages.create(model="tiny-chat", max_tokens=1, messages=conversation)
    expected = "[user]where[assistant]abcdefghi find{}[tool]"
    assert prompts == [expected, f"{expected}[assistant]", expected]
