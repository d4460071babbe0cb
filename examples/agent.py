"""An agent: the model calls functions until it has an answer.

python examples/agent.py /models/Qwen3-0.6B "What is 17 times 23?"
"""

import asyncio
import sys

from aioinfer import Engine, EngineConfig


def multiply(a: int, b: int) -> int:
    """The product of two integers."""
    return a * b


async def ask(engine: Engine, question: str, most_turns: int = 8) -> str:
    tools = {tool.__name__: tool for tool in (multiply,)}
    messages = [{"role": "user", "content": question}]
    for _ in range(most_turns):
        answer = await engine.chat(messages, tools=list(tools.values()))
        messages.append(answer.message)
        if not answer.tool_calls:
            return answer.content or ""
        for call in answer.tool_calls:
            # The grammar lets the model call these functions only, with arguments of their types.
            messages.append(call.reply(tools[call.name](**call.parsed)))
    raise RuntimeError(f"no answer within {most_turns} turns")


async def main(model: str, question: str) -> None:
    async with Engine(EngineConfig(model=model)) as engine:
        print(await ask(engine, question))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(f"usage: {sys.argv[0]} MODEL QUESTION")
    asyncio.run(main(*sys.argv[1:]))
