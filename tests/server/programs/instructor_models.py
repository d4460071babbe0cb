"""instructor over chats, its default, responses and messages."""

from __future__ import annotations

import sys
from typing import Any, Literal

import anthropic
import instructor
import openai
from pydantic import BaseModel


class Sign(BaseModel):
    """A sign."""

    sign: Literal["plus", "minus"]


def main(url: str) -> None:
    responses: Any = instructor.from_openai(
        openai.OpenAI(base_url=f"{url}/v1", api_key="none"), mode=instructor.Mode.RESPONSES_TOOLS
    )
    found = responses.responses.create(model="tiny-chat", input="Hi.", response_model=Sign, max_retries=1)
    print("typed", type(found).__name__)
    asked = [{"role": "user", "content": "Hi."}]
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS_STRICT):
        chats: Any = instructor.from_openai(client, mode=mode)
        create: Any = {"model": "tiny-chat", "messages": asked, "max_tokens": 200, "max_retries": 1}
        print("typed", type(chats.create(response_model=Sign, **create)).__name__)
        partial = list(chats.create_partial(response_model=Sign, **create))
        print("stream", partial[-1].sign in ("plus", "minus"))
    messages: Any = instructor.from_anthropic(anthropic.Anthropic(base_url=url, api_key="none"))
    found = messages.messages.create(
        model="tiny-chat", messages=asked, max_tokens=200, response_model=Sign, max_retries=1
    )
    print("typed", type(found).__name__)


main(sys.argv[1])
