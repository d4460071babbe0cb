"""aioinfer's beam search. What is returned is the best hypothesis; all beams have as many tokens.

Options are settings of the engine, and ``beam_width``. A beam that forks has its row before the one that
loses has left, so there are more rows than beams.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bench.peers.adapters.aioinfer_engine import AioInfer
from bench.peers.adapters.protocol import Settings, serve


class AioInferBeams(AioInfer):
    def load(self, settings: Settings) -> dict[str, Any]:
        own = dict(settings.options)
        self._width = int(own.pop("beam_width"))
        return super().load(replace(settings, max_batch=2 * self._width * settings.max_batch, options=own))

    def run(self, prompts: Sequence[list[int]], new_tokens: int) -> list[list[int]]:
        from aioinfer.params import SamplingParams

        params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)

        async def gather() -> list[Any]:
            return await asyncio.gather(
                *[self._engine.beam(prompt, self._width, params) for prompt in prompts]
            )

        return [list(found[0].result.token_ids) for found in self._runner.run(gather())]


if __name__ == "__main__":
    serve(AioInferBeams)
