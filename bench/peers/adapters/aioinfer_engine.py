"""aioinfer: requests gathered on a loop, as in an application; ``synchronous=true`` takes its LLM instead.

Other options are settings of the engine. A tokenizer is there, so its text is made too, which peers are
spared.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from bench.peers.adapters.protocol import Settings, serve


class AioInfer:
    def load(self, settings: Settings) -> dict[str, Any]:
        from aioinfer.config import EngineConfig, parse_setting

        options = dict(settings.options)
        self._synchronous = options.pop("synchronous", "false") == "true"
        values: dict[str, Any] = {
            "model": settings.model,
            "device": "cpu",
            "threads": settings.threads,
            "kv_memory_gib": settings.kv_gib,
            "max_model_len": settings.max_len,
            "max_running_requests": settings.max_batch,
            "prefix_cache": False,
        }
        values.update({name: parse_setting(EngineConfig, name, text) for name, text in options.items()})
        config = EngineConfig(**values)
        if self._synchronous:
            from aioinfer.llm import LLM

            self._llm = LLM(config)
        else:
            import uvloop

            from aioinfer.engine import Engine

            self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
            self._engine = Engine(config)
            self._runner.run(self._engine.start())
        return {
            "versions": {name: _version(name) for name in ("aioinfer", "torch")},
            "kv_gib": settings.kv_gib,
            "step_tokens": config.step_tokens,
            "options": {name: str(value) for name, value in options.items()},
        }

    def run(self, prompts: Sequence[list[int]], new_tokens: int) -> list[list[int]]:
        from aioinfer.params import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
        before, start = self._forward_seconds(), time.perf_counter()
        if self._synchronous:
            results = self._llm.generate(list(prompts), params, progress=False)
        else:
            results = self._runner.run(self._gather(prompts, params))
        wall = time.perf_counter() - start
        parts = {part: seconds - before[part] for part, seconds in self._forward_seconds().items()}
        self._parts = {**parts, "Python": wall - sum(parts.values())} if parts else None
        return [list(result.token_ids) for result in results]

    async def _gather(self, prompts: Sequence[list[int]], params: Any) -> list[Any]:
        return await asyncio.gather(*[self._engine.generate(prompt, params) for prompt in prompts])

    def breakdown(self) -> dict[str, float] | None:
        """Seconds that linears, attention, the rest of the forward and, by which everything else is meant,
        Python took in the last run; None where the kernels do not count."""
        return self._parts

    def _forward_seconds(self) -> Mapping[str, float]:
        return {} if self._synchronous else self._engine.stats().forward_seconds


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    serve(AioInfer)
