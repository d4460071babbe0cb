"""llama-index over chats, completions and responses."""

from __future__ import annotations

import asyncio
import sys
from typing import Any, Literal

from llama_index.core import PromptTemplate
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike, OpenAILikeResponses
from pydantic import BaseModel


class Sign(BaseModel):
    """A sign."""

    sign: Literal["plus", "minus"]


class City(BaseModel):
    city: Literal["Rome", "Oslo"]


def weather(city: str) -> str:
    """The weather of a city."""
    return "rain"


RAIN = FunctionTool.from_defaults(weather, fn_schema=City)


def chat(model: Any) -> None:
    asked = [ChatMessage(role="user", content="What is 20 + 22?")]
    print("run", model.chat(asked).message.content)
    print("stream", "".join(each.delta or "" for each in model.stream_chat(asked)))
    print("typed", type(model.structured_predict(Sign, PromptTemplate("What is 20 + 22?"))).__name__)
    answer = model.chat_with_tools([RAIN], user_msg="What is 20 + 22?", tool_required=True)
    print("tools", model.get_tool_calls_from_response(answer)[0].tool_name)


async def agent(model: Any) -> None:
    acting = FunctionAgent(tools=[RAIN], llm=model, system_prompt="Be brief.")
    print("run", bool(str(await acting.run("What is 20 + 22?"))))


def main(url: str) -> None:
    common: Any = {
        "model": "tiny-chat",
        "api_base": f"{url}/v1",
        "api_key": "none",
        "temperature": 0,
        "max_retries": 0,
        "context_window": 1024,
        "max_tokens": 200,
    }
    functions: Any = {"is_chat_model": True, "is_function_calling_model": True}
    model = OpenAILike(**common, **functions, should_use_structured_outputs=True)
    chat(model)
    asyncio.run(agent(model))
    chat(OpenAILikeResponses(**{**common, "max_output_tokens": 200}, **functions))
    completion = OpenAILike(**{**common, "max_tokens": 8})
    whole = completion.complete("20 + 22 =").text
    print("stream", "".join(each.delta or "" for each in completion.stream_complete("20 + 22 =")) == whole)


main(sys.argv[1])
