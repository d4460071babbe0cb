"""litellm over responses, messages, chats and completions."""

from __future__ import annotations

import sys
from typing import Any, Literal

import litellm
from pydantic import BaseModel


class Sign(BaseModel):
    """A sign."""

    sign: Literal["plus", "minus"]


CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]


def main(url: str) -> None:
    completions: Any = litellm.completion
    answers: Any = litellm.responses
    responses: Any = {"model": "openai/tiny-chat", "api_base": f"{url}/v1", "api_key": "none"}
    messages: Any = {"model": "anthropic/tiny-chat", "api_base": url, "api_key": "none"}
    asked = [{"role": "user", "content": "What is 20 + 22?"}]
    answer = answers(**responses, input="What is 20 + 22?", temperature=0)
    print("run", answer.output[0].content[0].text)
    events = [event.type.value for event in answers(**responses, input="Hi.", temperature=0, stream=True)]
    print("stream", events[0], events[-1])
    print("run", completions(**messages, messages=asked, temperature=0).choices[0].message.content)
    chunks = completions(**messages, messages=asked, temperature=0, stream=True)
    print("stream", "".join(chunk.choices[0].delta.content or "" for chunk in chunks))
    for provider in ("openai", "hosted_vllm"):
        chats: Any = {**responses, "model": f"{provider}/tiny-chat", "messages": asked, "temperature": 0}
        print("run", completions(**chats).choices[0].message.content)
        chunks = list(completions(**chats, stream=True, stream_options={"include_usage": True}))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        print("stream", text, chunks[-1].usage.completion_tokens > 0)
        typed = completions(**chats, response_format=Sign).choices[0].message.content
        print("typed", type(Sign.model_validate_json(typed)).__name__)
        called = completions(**chats, tools=TOOLS, tool_choice="required", max_tokens=200)
        print("tools", called.choices[0].message.tool_calls[0].function.name)
    text_completion: Any = litellm.text_completion
    text = text_completion(
        model="text-completion-openai/tiny-chat",
        api_base=f"{url}/v1",
        api_key="none",
        prompt="20 + 22 =",
        max_tokens=8,
    )
    print("run", text.usage.completion_tokens > 0)


main(sys.argv[1])
