"""transformers' continuous batching, with as many blocks as the KV budget holds.

Options are fields of ``ContinuousBatchingConfig`` (``max_batch_tokens=4096``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from bench.peers.adapters.hf_generate import load_model
from bench.peers.adapters.protocol import Settings, serve

#: positions of a block
_BLOCK = 256
#: bytes of a bf16 key or value
_ELEMENT = 2


class ContinuousBatching:
    def load(self, settings: Settings) -> dict[str, Any]:
        from transformers import ContinuousBatchingConfig

        self._model = load_model(dataclasses.replace(settings, options={}))
        shape = self._model.config
        position = 2 * _ELEMENT * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim
        blocks = int(settings.kv_gib * 2**30) // (position * _BLOCK)
        # Its masks cost a byte or more per token of a step and position of the cache.
        blocks = min(blocks, settings.max_batch * -(-settings.max_len // _BLOCK))
        # What 5.17 calls a block's size is a page's later.
        known = {item.name for item in dataclasses.fields(ContinuousBatchingConfig)}
        options: dict[str, Any] = {
            "page_size" if "page_size" in known else "block_size": _BLOCK,
            "num_blocks": blocks,
            "max_batch_tokens": max(settings.max_len, 2048),
            "allow_block_sharing": False,
        }
        options.update({name: int(text) for name, text in settings.options.items()})
        self._config = ContinuousBatchingConfig(**options)
        return {
            "versions": {name: version(name) for name in ("transformers", "torch")},
            "kv_gib": blocks * position * _BLOCK / 2**30,
            "options": {name: str(value) for name, value in options.items()},
        }

    def run(self, prompts: Sequence[list[int]], new_tokens: int) -> list[list[int]]:
        from transformers import GenerationConfig

        config = GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=new_tokens)
        results = self._model.generate_batch(
            list(prompts),
            generation_config=config,
            continuous_batching_config=self._config,
            progress_bar=False,
            persistent_manager=True,
        )
        ordered = sorted(results.values(), key=lambda result: int(result.request_id.rsplit("_", 1)[-1]))
        return [list(result.generated_tokens) for result in ordered]

    def breakdown(self) -> None:
        return None


if __name__ == "__main__":
    serve(ContinuousBatching)
