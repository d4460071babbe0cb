"""aioinfer: requests gathered on a loop, as in an application.

Options are settings of the engine. A tokenizer is there, so its text is made too, unlike that of peers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from bench.peers.adapters.protocol import Settings, serve


class AioInfer:
    def load(self, settings: Settings) -> dict[str, Any]:
        import uvloop

        from aioinfer.config import EngineConfig, parse_setting
        from aioinfer.engine import Engine

        values: dict[str, Any] = {
            "model": settings.model,
            "device": "cpu",
            "threads": settings.threads,
            "kv_memory_gib": settings.kv_gib,
            "max_model_len": settings.max_len,
            "max_running_requests": settings.max_batch,
            "prefix_cache": False,
        }
        values |= {name: parse_setting(EngineConfig, name, text) for name, text in settings.options.items()}
        config = EngineConfig(**values)
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._engine = Engine(config)
        self._runner.run(self._engine.start())
        return {
            "versions": {"torch": version("torch")},
            "kv_gib": settings.kv_gib,
            "step_tokens": config.step_tokens,
            "options": settings.options,
        }

    def run(self, prompts: Sequence[list[int]], new_tokens: int) -> list[list[int]]:
        from aioinfer.params import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)

        async def gather() -> list[Any]:
            return await asyncio.gather(*[self._engine.generate(prompt, params) for prompt in prompts])

        return [list(result.token_ids) for result in self._runner.run(gather())]


if __name__ == "__main__":
    serve(AioInfer)
