"""langchain-openai over responses."""

from __future__ import annotations

import sys
from typing import Any, Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Sign(BaseModel):
    """A sign."""

    sign: Literal["plus", "minus"]


def weather(city: Literal["Rome", "Oslo"]) -> str:
    """The weather of a city."""
    return "rain"


def main(url: str) -> None:
    rain: Any = tool(weather)
    model: Any = ChatOpenAI(
        model="tiny-chat",
        base_url=f"{url}/v1",
        api_key="none",
        use_responses_api=True,
        temperature=0,
        max_tokens=200,
        max_retries=0,
    )
    print("run", model.invoke("What is 20 + 22?").text)
    print("stream", "".join(chunk.text for chunk in model.stream("What is 20 + 22?")))
    for method in ("json_schema", "function_calling"):
        typed = model.with_structured_output(Sign, method=method)
        print("typed", type(typed.invoke("What is 20 + 22?")).__name__)
    asked = HumanMessage("What is 20 + 22?")
    answer = model.bind_tools([rain], tool_choice="required", strict=True).invoke([asked])
    (call,) = answer.tool_calls
    result = ToolMessage(rain.invoke(call["args"]), tool_call_id=call["id"])
    print("tools", bool(model.bind_tools([rain]).invoke([asked, answer, result]).text))


main(sys.argv[1])
