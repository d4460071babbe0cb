"""langchain-openai over chats, its default, responses and completions; langchain-anthropic over messages."""

from __future__ import annotations

import sys
from typing import Any, Literal

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel


class Sign(BaseModel):
    """A sign."""

    sign: Literal["plus", "minus"]


def weather(city: Literal["Rome", "Oslo"]) -> str:
    """The weather of a city."""
    return "rain"


def chat(model: Any, methods: tuple[str, ...]) -> None:
    rain: Any = tool(weather)
    print("run", model.invoke("What is 20 + 22?").text)
    print("stream", "".join(chunk.text for chunk in model.stream("What is 20 + 22?")))
    for method in methods:
        typed = model.with_structured_output(Sign, method=method)
        print("typed", type(typed.invoke("What is 20 + 22?")).__name__)
    asked = HumanMessage("What is 20 + 22?")
    answer = model.bind_tools([rain], tool_choice="any", strict=True).invoke([asked])
    call = answer.tool_calls[0]
    results = [ToolMessage(rain.invoke(each["args"]), tool_call_id=each["id"]) for each in answer.tool_calls]
    final = model.bind_tools([rain]).invoke([asked, answer, *results])
    print("tools", call["name"], final.usage_metadata["output_tokens"] > 0)


def main(url: str) -> None:
    common: Any = {"model": "tiny-chat", "api_key": "none", "temperature": 0, "max_tokens": 200}
    openai = {**common, "base_url": f"{url}/v1", "max_retries": 0}
    chat(ChatOpenAI(**openai), ("json_schema", "function_calling"))
    chat(ChatOpenAI(**openai, use_responses_api=True), ("json_schema", "function_calling"))
    chat(ChatAnthropic(**common, base_url=url), ("json_schema", "function_calling"))
    completion: Any = OpenAI(**openai)
    print("stream", "".join(completion.stream("20 + 22 =")) == completion.invoke("20 + 22 ="))


main(sys.argv[1])
