"""pydantic-ai over responses, chats and messages."""

from __future__ import annotations

import asyncio
import sys
from typing import Any, Literal

from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


class Sign(BaseModel):
    sign: Literal["plus", "minus"]


async def main(url: str) -> None:
    openai = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    models: list[Any] = [
        OpenAIResponsesModel("tiny-chat", provider=openai),
        OpenAIChatModel("tiny-chat", provider=openai),
        AnthropicModel("tiny-chat", provider=AnthropicProvider(base_url=url, api_key="none")),
    ]
    called: list[str] = []

    def weather(city: Literal["Rome", "Oslo"]) -> str:
        """The weather of a city."""
        called.append(city)
        return "rain"

    greedy: Any = {"temperature": 0, "max_tokens": 50}
    for model in models:
        agent: Any = Agent(model, instructions="Be brief.")
        print("run", (await agent.run("What is 20 + 22?", model_settings=greedy)).output)
        async with agent.run_stream("What is 20 + 22?", model_settings=greedy) as stream:
            print("stream", await stream.get_output())
        typed: Any = Agent(model, output_type=Sign)
        output = await typed.run("What is 20 + 22?", model_settings={"max_tokens": 200})
        print("typed", type(output.output).__name__)
        called.clear()
        acting: Any = Agent(model, tools=[weather], output_type=Sign)
        output = await acting.run("What is 20 + 22?", model_settings={"max_tokens": 200})
        print("tools", type(output.output).__name__)


asyncio.run(main(sys.argv[1]))
