"""aioinfer: chats about images. A prompt is the number of an image, or -1, and that of a question.

Options are settings of the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from bench.peers.adapters.image_prompts import picture, question
from bench.peers.adapters.protocol import Settings, serve


class AioInfer:
    def load(self, settings: Settings) -> dict[str, Any]:
        import uvloop

        from aioinfer.config import EngineConfig
        from aioinfer.engine import Engine

        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        config = EngineConfig(
            model=settings.model, threads=settings.threads, kv_memory_gib=settings.kv_gib,
            max_running_requests=settings.max_batch, **settings.options,
        )  # fmt: skip
        self._engine = Engine(config)
        self._runner.run(self._engine.start())
        return {"aioinfer": version("aioinfer"), "kernels": dict(self._engine.info.kernels)}

    def run(self, prompts: Sequence[list[int]], new_tokens: int) -> list[list[int]]:
        from aioinfer.params import SamplingParams

        params = SamplingParams(max_tokens=new_tokens, ignore_eos=True, temperature=0)

        async def gather() -> list[Any]:
            return await asyncio.gather(
                *(self._engine.generate(_chat(image, number), params) for image, number in prompts)
            )

        return [list(result.token_ids) for result in self._runner.run(gather())]


def _chat(image: int, number: int) -> list[dict[str, Any]]:
    parts = [] if image < 0 else [{"type": "image", "image": picture(image)}]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": question(number)}]}]


if __name__ == "__main__":
    serve(AioInfer)
