"""OpenVINO GenAI's continuous batching on an exported model.

Options in capitals are properties of the device (``KV_CACHE_PRECISION=bf16``), others fields of the
scheduler's config (``max_num_batched_tokens=512``). KV precision is the library's default unless asked for
otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from bench.peers.adapters.protocol import Settings, serve


class OpenVINO:
    def load(self, settings: Settings) -> dict[str, Any]:
        import openvino_genai

        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = max(1, round(settings.kv_gib))  # whole GiB only
        scheduler.max_num_seqs = settings.max_batch
        scheduler.enable_prefix_caching = False
        properties: dict[str, Any] = {
            "INFERENCE_PRECISION_HINT": "bf16",
            "INFERENCE_NUM_THREADS": settings.threads,
        }
        for name, value in settings.options.items():
            if name.isupper():
                properties[name] = value
            else:
                setattr(scheduler, name, type(getattr(scheduler, name))(int(value)))
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            settings.model, scheduler, "CPU", properties
        )
        return {
            "versions": {name: version(name) for name in ("openvino", "openvino-genai")},
            "kv_gib": scheduler.cache_size,
            "step_tokens": scheduler.max_num_batched_tokens,
            "properties": {name: str(value) for name, value in properties.items()},
        }

    def run(self, prompts: Sequence[list[int]], new_tokens: int) -> list[list[int]]:
        import numpy
        import openvino
        import openvino_genai

        config = openvino_genai.GenerationConfig()
        config.do_sample, config.ignore_eos, config.max_new_tokens = False, True, new_tokens
        # Neither model nor tokenizer names one, and none is taken for -1, which is refused.
        config.set_eos_token_id(0)
        inputs = [openvino.Tensor(numpy.array([prompt], dtype=numpy.int64)) for prompt in prompts]
        results = self._pipeline.generate(inputs, [config] * len(prompts))
        return [list(map(int, result.m_generation_ids[0])) for result in results]


if __name__ == "__main__":
    serve(OpenVINO)
