"""llama.cpp: sequences stepped together through its batch interface, greedy by numpy's argmax.

Options are fields of ``llama_context_params`` (``n_ubatch=1024``). KV is f16, as it is by default.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from bench.peers.adapters.protocol import Settings, serve


class LlamaCpp:
    def load(self, settings: Settings) -> dict[str, Any]:
        import llama_cpp

        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(
            settings.model.encode(), llama_cpp.llama_model_default_params()
        )
        if not self._model:
            raise RuntimeError("the model cannot be loaded")
        params = llama_cpp.llama_context_default_params()
        position = _kv_bytes(self._model)
        # A pool for each sequence, whatever the budget: in one for all, every query goes through everyone's
        # positions (13 % fewer tokens/s at 32). A batch takes all prompts at once, in pieces of n_ubatch.
        pool = int(settings.kv_gib * 2**30) // position // 256 * 256
        params.n_ctx = max(settings.max_len * settings.max_batch, pool)
        params.n_seq_max, params.kv_unified = settings.max_batch, False
        params.n_batch = params.n_ctx
        params.n_threads = params.n_threads_batch = settings.threads
        for name, text in settings.options.items():
            setattr(params, name, int(text))
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError("no context can be made")
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(params.n_batch, 0, 1)
        return {
            "versions": {"llama-cpp-python": version("llama-cpp-python")},
            "kv_gib": params.n_ctx * position / 2**30,
            "step_tokens": params.n_ubatch,
            "system": llama_cpp.llama_print_system_info().decode(),
        }

    def clear(self) -> None:
        """Forget all sequences."""
        import llama_cpp

        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)

    def run(self, prompts: Sequence[list[int]], new_tokens: int) -> list[list[int]]:
        self.clear()
        tokens: list[list[int]] = [[] for _ in prompts]
        step, starts = list(prompts), [0] * len(prompts)
        for _ in range(new_tokens):
            for ids, new in zip(tokens, self._decode(step, starts), strict=True):
                ids.append(new)
            starts = [start + len(ids) for start, ids in zip(starts, step, strict=True)]
            step = [ids[-1:] for ids in tokens]
        return tokens

    def _decode(self, step: Sequence[list[int]], starts: Sequence[int]) -> list[int]:
        """Append ids to every sequence; returns the next token of each."""
        import llama_cpp
        import numpy

        batch, at, ends = self._batch, 0, []
        for sequence, (ids, start) in enumerate(zip(step, starts, strict=True)):
            for place, token in enumerate(ids):
                batch.token[at], batch.pos[at] = token, start + place
                batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence
                batch.logits[at] = place == len(ids) - 1
                at += 1
            ends.append(at - 1)
        batch.n_tokens = at
        if (status := llama_cpp.llama_decode(self._context, batch)) != 0:
            raise RuntimeError(f"llama_decode: {status}")
        rows = (llama_cpp.llama_get_logits_ith(self._context, end) for end in ends)
        return [int(numpy.ctypeslib.as_array(row, (self._vocab,)).argmax()) for row in rows]


def _kv_bytes(model: Any) -> int:
    """Bytes of a position's f16 keys and values, or, of layers that differ, as many as all could have."""
    import ctypes
    import re

    import llama_cpp

    def number(name: str) -> int | None:
        text = ctypes.create_string_buffer(64)
        found = llama_cpp.llama_model_meta_val_str(model, f"{family}.{name}".encode(), text, len(text))
        # Of every layer in some files.
        return None if found < 0 else max(map(int, re.findall(rb"\d+", text.value)))

    name = ctypes.create_string_buffer(64)
    llama_cpp.llama_model_meta_val_str(model, b"general.architecture", name, len(name))
    family = name.value.decode()
    heads = number("attention.head_count") or 1
    usual = (number("embedding_length") or 0) // heads
    sizes = sum(number(f"attention.{part}_length") or usual for part in ("key", "value"))
    return 2 * (number("block_count") or 0) * (number("attention.head_count_kv") or heads) * sizes


if __name__ == "__main__":
    serve(LlamaCpp)
