"""vLLM's CPU build through its offline interface, compiled as it is by default.

Options are arguments of ``vllm.LLM`` (``enforce_eager=true``). Nothing is detokenized.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from typing import Any

from bench.peers.adapters.protocol import Settings, serve


def environment(threads: int, kv_gib: float) -> dict[str, str]:
    """Variables that its processes read; the KV budget is whole GiB, and is touched at the start."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    return {
        "VLLM_CPU_KVCACHE_SPACE": str(max(1, round(kv_gib))),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
    }


class VLLM:
    def load(self, settings: Settings) -> dict[str, Any]:
        os.environ.update(environment(settings.threads, settings.kv_gib))
        import vllm

        options: dict[str, Any] = {
            "dtype": "bfloat16",
            "max_model_len": settings.max_len,
            "max_num_seqs": settings.max_batch,
            "enable_prefix_caching": False,
            "seed": 0,
        }
        for name, text in settings.options.items():
            options[name] = text
            with suppress(ValueError):
                options[name] = json.loads(text)
        self._llm = vllm.LLM(model=settings.model, **options)
        config = self._llm.llm_engine.vllm_config
        return {
            "versions": {name: version(name) for name in ("vllm-cpu", "torch", "transformers")},
            "kv_gib": int(os.environ["VLLM_CPU_KVCACHE_SPACE"]),
            "step_tokens": config.scheduler_config.max_num_batched_tokens,
            "compiled": not config.model_config.enforce_eager,
            "options": {name: str(value) for name, value in options.items()},
        }

    def run(self, prompts: Sequence[list[int]], new_tokens: int) -> list[list[int]]:
        import vllm

        params = vllm.SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        inputs: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
        results = self._llm.generate(inputs, params, use_tqdm=False)
        return [list(result.outputs[0].token_ids) for result in results]


if __name__ == "__main__":
    serve(VLLM)
