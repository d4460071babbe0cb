"""transformers' ``generate``: one static batch, every prompt of the same length.

Options are arguments of ``from_pretrained`` (``attn_implementation=eager``).
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from bench.peers.adapters.protocol import Settings, serve


def load_model(settings: Settings) -> Any:
    """The model in bf16 on so many threads."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(settings.threads)
    return AutoModelForCausalLM.from_pretrained(
        settings.model, dtype=torch.bfloat16, **settings.options
    ).eval()


class Generate:
    def load(self, settings: Settings) -> dict[str, Any]:
        self._model = load_model(settings)
        return {
            "versions": {name: version(name) for name in ("transformers", "torch")},
            "attention": self._model.config._attn_implementation,
        }

    def run(self, prompts: Sequence[list[int]], new_tokens: int) -> list[list[int]]:
        import torch

        ids = torch.tensor(prompts)
        with torch.inference_mode():
            made = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                eos_token_id=None,
                pad_token_id=0,
            )
        tokens: list[list[int]] = made[:, ids.shape[1] :].tolist()
        return tokens

    def breakdown(self) -> None:
        return None


if __name__ == "__main__":
    serve(Generate)
