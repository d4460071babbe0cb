"""openai-agents over responses, its default, and chats."""

from __future__ import annotations

import asyncio
import sys
from typing import Any, Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_default_openai_client,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel


class Sign(BaseModel):
    sign: Literal["plus", "minus"]


called: list[str] = []


def weather(city: Literal["Rome", "Oslo"]) -> str:
    """The weather of a city."""
    called.append(city)
    return "rain"


async def agents(model: Any) -> None:
    called.clear()
    greedy = ModelSettings(temperature=0)
    plain: Any = Agent(name="plain", instructions="Be brief.", model=model, model_settings=greedy)
    print("run", (await Runner.run(plain, "What is 20 + 22?")).final_output)
    streamed = Runner.run_streamed(plain, "What is 20 + 22?")
    kinds = {event.type async for event in streamed.stream_events()}
    print("stream", streamed.final_output, "raw_response_event" in kinds)
    settings = ModelSettings(tool_choice="required", max_tokens=200)
    agent: Any = Agent(name="agent", model=model, tools=[function_tool(weather)], model_settings=settings)
    await Runner.run(agent, "What is 20 + 22?", max_turns=4)
    print("tools", len(called))
    typed: Any = Agent(name="typed", model=model, output_type=Sign)
    print("typed", type((await Runner.run(typed, "What is 20 + 22?")).final_output).__name__)


async def main(url: str) -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    set_default_openai_client(client)
    await agents("tiny-chat")
    await agents(OpenAIChatCompletionsModel("tiny-chat", client))
    # It sends an effort and a verbosity with a name that it knows.
    known: Any = Agent(name="known", instructions="Be brief.", model="gpt-5.5")
    print("run", (await Runner.run(known, "What is 20 + 22?")).final_output)


asyncio.run(main(sys.argv[1]))
