"""The kill test: replicas in child processes are killed under the load of the `openai` client, and no answer
differs from that of a run without kills.

    python -m tests.parallel.kills --streams 1000
    python -m tests.parallel.kills --streams 300 --model tiny-diffusion
    python -m tests.parallel.kills --streams 300 --rolling
    python -m tests.parallel.kills --streams 300 --prefill
    python -m tests.parallel.kills --streams 300 --ray auto
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import openai

from aioinfer.config import EngineConfig, ServerConfig
from aioinfer.parallel import Dispatcher
from aioinfer.server import serve
from examples.training.tasks import TASKS, held_out
from tests.parallel.waiting import until

__all__ = ["run"]

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "n": {"type": "integer"}},
    "required": ["name", "n"],
    "additionalProperties": False,
}
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 10}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
#: what is asked of a model that generates token by token
CHAT: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "drawn": {"temperature": 1.2, "top_p": 0.95},
    "penalties": {"presence_penalty": 0.7, "frequency_penalty": 0.4},
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    "logprobs": {"logprobs": True, "top_logprobs": 3},
    "two choices": {"n": 2, "temperature": 1.0},
    "a tool": {"tools": [TOOL], "tool_choice": "required"},
    "stops": {"stop": ["the", "qu"], "temperature": 1.1},
    "a prediction": {"prediction": {"type": "content", "content": "What comes next is known, or nearly."}},
}
BLOCKS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "drawn": {"temperature": 0.9},
    "logprobs": {"logprobs": True, "top_logprobs": 0},
    "two choices": {"n": 2, "temperature": 1.0},
    "stops": {"stop": ["the", "qu"]},
}


def requests(model: str) -> list[dict[str, Any]]:
    """Every kind with every prompt."""
    kinds = BLOCKS if model == "tiny-diffusion" else CHAT
    prompts: list[Any] = [held_out(task, 1)[-1].messages for task in sorted(TASKS)]
    if model == "tiny-diffusion":
        prompts = [
            [{"role": "user", "content": f"copy: {word}"}] for word in ("banana", "a longer text to copy")
        ]
    found = []
    for number, (kind, messages) in enumerate((kind, messages) for kind in kinds for messages in prompts):
        body = {"model": model, "messages": messages, "seed": number, "max_tokens": 300, **kinds[kind]}
        if not {"response_format", "tools"} & body.keys():
            body["extra_body"] = {"ignore_eos": True}  # long enough to be interrupted
        found.append(body | {"stream": True, "stream_options": {"include_usage": True}})
    return found


async def answer(client: openai.AsyncOpenAI, body: dict[str, Any]) -> str:
    """What a stream says, without ids and times, and wherever its chunks begin."""
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    async for chunk in await client.chat.completions.create(**body):
        usage = chunk.usage.model_dump() if chunk.usage else usage
        for choice in chunk.choices:
            found = choices.setdefault(choice.index, {"text": "", "logprobs": [], "calls": {}, "end": None})
            found["text"] += choice.delta.content or ""
            found["end"] = choice.finish_reason or found["end"]
            if choice.logprobs and choice.logprobs.content:
                found["logprobs"] += [each.model_dump() for each in choice.logprobs.content]
            for call in choice.delta.tool_calls or ():
                known = found["calls"].setdefault(call.index, {"name": "", "arguments": ""})
                if call.function:
                    known["name"] += call.function.name or ""
                    known["arguments"] += call.function.arguments or ""
    # What the prefix cache had, and which drafts were tried, depends on what else runs.
    for detail in ("prompt_tokens_details", "completion_tokens_details"):
        (usage or {}).pop(detail, None)
    return json.dumps([choices, usage], sort_keys=True)


@asynccontextmanager
async def served(dispatcher: Dispatcher) -> AsyncIterator[str]:
    """The address of a server over it."""
    stop, urls = asyncio.Event(), asyncio.Queue[str]()
    serving = asyncio.ensure_future(serve(dispatcher, ServerConfig(port=0), stop=stop, ready=urls.put_nowait))
    try:
        yield await urls.get()
    finally:
        stop.set()
        await serving


async def run(
    model: str,
    streams: int,
    clients: int,
    every: float,
    *,
    rolling: bool,
    seed: int,
    prefill: bool = False,
    ray: str | None = None,
    direct: bool = True,
) -> dict[str, Any]:
    """What differed, what failed, and how often replicas were killed or restarted. Streams are added to those
    asked for until that has happened once, for at most two minutes."""
    dice, counts = random.Random(seed), Counter[str]()
    bodies = requests(model)
    parsers: dict[str, Any] = {} if model == "tiny-diffusion" else {"tool_call_parser": "hermes"}
    config = EngineConfig(model=model, deterministic=True, threads=1, kv_memory_gib=0.1, **parsers)
    roles = ["prefill", "decode", "decode"] if prefill else []
    dispatcher = Dispatcher(
        processes=3, ray=ray, config=config, on_loss="identical", roles=roles, prefill_tokens=1
    )
    for replica in dispatcher._replicas if ray is not None else ():
        replica.direct = direct  # type: ignore[attr-defined]
    async with dispatcher, served(dispatcher) as url:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
        wanted = [await answer(client, body) for body in bodies]
        started = time.monotonic()

        def numbers() -> Iterator[int]:
            for number in count():
                disturbed = counts["kills"] or counts["rolled"] or time.monotonic() > started + 120
                if number >= streams and disturbed:
                    return
                yield number

        todo = numbers()

        async def load() -> None:
            for number in todo:
                which = number % len(bodies)
                try:
                    found = await answer(client, bodies[which])
                except openai.APIError as error:
                    counts["failed"] += 1
                    print(f"failed: {error}", flush=True)
                    continue
                counts["streams"] += 1
                if found != wanted[which]:
                    counts["differing"] += 1
                    print(f"differs:\n{wanted[which]}\n{found}", flush=True)

        def all_go_on() -> bool:
            """A stream that is lost twice at the same token ends, as it should."""
            running = dispatcher._started().open.values()
            return all(len(each.output.token_ids) > each.lost_length for each in running if each.losses)

        async def disturb() -> None:
            while True:
                await asyncio.sleep(every)
                await until(all_go_on)
                if rolling:
                    for name in [each.name for each in dispatcher.stats().replicas]:
                        await dispatcher.restart(name)
                        counts["rolled"] += 1
                    continue
                ready = [each for each in dispatcher._replicas if each.state.value == "ready"]
                if len(ready) > 1:
                    victim: Any = dice.choice(ready)
                    os.kill(victim.pid, signal.SIGKILL)
                    counts["kills"] += 1

        disturbing = asyncio.ensure_future(disturb())
        await asyncio.gather(*[load() for _ in range(clients)])
        disturbing.cancel()
        await asyncio.wait([disturbing])
        stats = dispatcher.stats()
        await client.close()
        return {
            **{name: counts[name] for name in ("streams", "failed", "differing", "kills", "rolled")},
            "resumed": stats.resumed,
            "diverged": stats.diverged,
            "handovers": stats.handovers,
            "without pages": stats.handovers_without_pages,
            "resume_seconds": stats.resume_seconds,
            "seconds": time.monotonic() - started,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny-chat", choices=("tiny-chat", "tiny-diffusion"))
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--every", type=float, default=2.0, help="seconds between kills")
    parser.add_argument("--rolling", action="store_true", help="restart all replicas in turn instead")
    parser.add_argument("--prefill", action="store_true", help="one of the replicas computes the prompts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--ray", metavar="ADDRESS", help="a Ray cluster on this machine that places the replicas"
    )
    parser.add_argument("--through-ray", action="store_true", help="which also carries what they compute")
    options = parser.parse_args()
    found = asyncio.run(
        run(
            options.model,
            options.streams,
            options.clients,
            options.every,
            rolling=options.rolling,
            seed=options.seed,
            prefill=options.prefill,
            ray=options.ray,
            direct=not options.through_ray,
        )
    )
    print(found)
    if found["failed"] or found["differing"] or found["diverged"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
