"""llama.cpp's mtmd: one prompt after the other, as its server encodes images. The model is a directory with
``text.gguf`` and ``mmproj.gguf``."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.peers.adapters.image_prompts import HEIGHT, WIDTH, picture, question
from bench.peers.adapters.protocol import Settings, serve


class LlamaCpp:
    def load(self, settings: Settings) -> dict[str, Any]:
        import llama_cpp
        from llama_cpp import mtmd_cpp

        folder = Path(settings.model)
        self._llama = llama_cpp.Llama(
            str(folder / "text.gguf"), n_ctx=settings.max_len, n_batch=512, n_threads=settings.threads,
            n_threads_batch=settings.threads, verbose=False,
        )  # fmt: skip
        self._mtmd, params = mtmd_cpp, mtmd_cpp.mtmd_context_params_default()
        params.use_gpu, params.n_threads, params.print_timings = False, settings.threads, False
        self._context = mtmd_cpp.mtmd_init_from_file(
            str(folder / "mmproj.gguf").encode(), self._llama.model, params
        )
        if not self._context:
            raise RuntimeError("mmproj.gguf was not loaded")
        return {"llama-cpp-python": version("llama-cpp-python")}

    def run(self, prompts: Sequence[list[int]], new_tokens: int) -> list[list[int]]:
        return [self._one(image, number, new_tokens) for image, number in prompts]

    def _one(self, image: int, number: int, new_tokens: int) -> list[int]:
        import llama_cpp

        mtmd, llama = self._mtmd, self._llama
        data = picture(image).tobytes()
        bitmap = mtmd.mtmd_bitmap_init(WIDTH, HEIGHT, (ctypes.c_uint8 * len(data)).from_buffer_copy(data))
        text = mtmd.mtmd_input_text()
        written = (mtmd.mtmd_default_marker().decode() + question(number)).encode()
        text.text, text.text_len, text.add_special, text.parse_special = written, len(written), False, True
        chunks, bitmaps = mtmd.mtmd_input_chunks_init(), (mtmd.mtmd_bitmap_p_ctypes * 1)(bitmap)
        try:
            if mtmd.mtmd_tokenize(self._context, chunks, ctypes.byref(text), bitmaps, 1):
                raise RuntimeError("the prompt was not tokenized")
            llama.reset()
            llama._ctx.kv_cache_clear()
            for at in range(mtmd.mtmd_input_chunks_size(chunks)):
                self._chunk(mtmd.mtmd_input_chunks_get(chunks, at))
            logits = llama_cpp.llama_get_logits_ith(llama._ctx.ctx, -1)
            assert new_tokens == 1, "it is the time to the first token"
            return [max(range(llama.n_vocab()), key=logits.__getitem__)]
        finally:
            mtmd.mtmd_input_chunks_free(chunks)
            mtmd.mtmd_bitmap_free(bitmap)

    def _chunk(self, chunk: Any) -> None:
        """Compute tokens, or a tile."""
        import llama_cpp

        mtmd, llama, count = self._mtmd, self._llama, ctypes.c_size_t()
        if mtmd.mtmd_input_chunk_get_type(chunk) == mtmd.MTMD_INPUT_CHUNK_TYPE_TEXT:
            tokens = mtmd.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(count))
            if llama_cpp.llama_decode(llama._ctx.ctx, llama_cpp.llama_batch_get_one(tokens, count.value)):
                raise RuntimeError("a text was not computed")
            llama.n_tokens += count.value
            return
        end = llama_cpp.llama_pos(0)
        start, sequence = llama_cpp.llama_pos(llama.n_tokens), llama_cpp.llama_seq_id(0)
        context = llama._ctx.ctx
        if mtmd.mtmd_helper_eval_chunk_single(
            self._context, context, chunk, start, sequence, 512, False, ctypes.byref(end)
        ):
            raise RuntimeError("a tile was not computed")
        llama.n_tokens = end.value


if __name__ == "__main__":
    serve(LlamaCpp)
