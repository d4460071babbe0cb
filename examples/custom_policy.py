"""A queue policy of one's own: who has to be served soonest goes first.

python examples/custom_policy.py
"""

import asyncio

from aioinfer import Engine, EngineConfig, SamplingParams
from aioinfer.scheduling.policy import Ranked
from aioinfer.scheduling.sequence import Sequence

PATIENCE = {"chat": 1.0, "report": 60.0}


class EarliestDeadline(Ranked):
    """Each kind of work, told by the routing key, has some seconds until it should begin."""

    def rank(self, request: Sequence) -> float:
        return request.arrival + PATIENCE.get(request.routing_key or "chat", 10.0)


async def order(engine: Engine) -> list[str]:
    """Five reports, then five chats: in which order they are done."""
    done: list[str] = []

    async def work(kind: str, number: int) -> None:
        await engine.generate(f"{kind} {number}", SamplingParams(max_tokens=8), routing_key=kind)
        done.append(f"{kind} {number}")

    async with asyncio.TaskGroup() as group:
        for kind in ("report", "chat"):
            for number in range(1, 6):
                group.create_task(work(kind, number))
    return done


async def main() -> None:
    async with Engine(EngineConfig(policy=EarliestDeadline, max_running_requests=1)) as engine:
        print(*await order(engine), sep="\n")


if __name__ == "__main__":
    asyncio.run(main())
