"""vLLM's beam search. What is returned is the best hypothesis; all beams have as many tokens.

Options are those of :mod:`~bench.peers.adapters.vllm_offline`, and ``beam_width``. Every token is a request
of its own there, so prefixes must be cached, and blocks be as small as the attention kernels have them: what
is behind the last full block of a beam is computed again for each token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bench.peers.adapters.protocol import Settings, serve
from bench.peers.adapters.vllm_offline import VLLM


class VLLMBeams(VLLM):
    def load(self, settings: Settings) -> dict[str, Any]:
        own = dict(settings.options)
        self._width = int(own.pop("beam_width"))
        return super().load(replace(settings, max_batch=self._width * settings.max_batch, options=own))

    def run(self, prompts: Sequence[list[int]], new_tokens: int) -> list[list[int]]:
        from vllm.sampling_params import BeamSearchParams

        params = BeamSearchParams(beam_width=self._width, max_tokens=new_tokens, ignore_eos=True)
        inputs: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
        found = self._llm.beam_search(inputs, params)
        # Its tokens begin with those of the prompt.
        pairs = zip(found, prompts, strict=True)
        return [list(each.sequences[0].tokens)[len(prompt) :] for each, prompt in pairs]


if __name__ == "__main__":
    serve(VLLMBeams)
