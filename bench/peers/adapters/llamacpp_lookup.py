"""llama.cpp: one sequence after the other through its Llama class, with or without prompt lookup.

The option ``drafts`` is how many tokens a look-up drafts, 0 for none (10 by default, as in the library).
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from itertools import islice
from typing import Any

from bench.peers.adapters.protocol import Settings, serve


class LlamaCppLookup:
    def load(self, settings: Settings) -> dict[str, Any]:
        import llama_cpp
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        drafts = int(settings.options.get("drafts", 10))
        self._model = llama_cpp.Llama(
            settings.model,
            n_ctx=settings.max_len,
            n_threads=settings.threads,
            n_threads_batch=settings.threads,
            # Where drafts are verified, the logits of all positions are needed.
            logits_all=drafts > 0,
            draft_model=LlamaPromptLookupDecoding(num_pred_tokens=drafts) if drafts else None,
            verbose=False,
        )
        return {"versions": {"llama-cpp-python": version("llama-cpp-python")}, "drafts": drafts}

    def run(self, prompts: Sequence[list[int]], new_tokens: int) -> list[list[int]]:
        return [list(islice(self._generated(prompt), new_tokens)) for prompt in prompts]

    def _generated(self, prompt: list[int]) -> Any:
        self._model.reset()
        return self._model.generate(prompt, temp=0.0, repeat_penalty=1.0)

    def breakdown(self) -> None:
        return None


if __name__ == "__main__":
    serve(LlamaCppLookup)
