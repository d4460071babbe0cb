"""litellm over responses and messages."""

from __future__ import annotations

import sys
from typing import Any

import litellm


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


main(sys.argv[1])
