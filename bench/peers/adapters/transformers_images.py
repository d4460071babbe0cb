"""transformers: all prompts of a run in one batch, by the image processor on Pillow and ``generate``."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from bench.peers.adapters.image_prompts import picture, question
from bench.peers.adapters.protocol import Settings, serve


class Transformers:
    def load(self, settings: Settings) -> dict[str, Any]:
        import torch
        from transformers import AutoTokenizer, Idefics3Processor, SmolVLMForConditionalGeneration
        from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

        torch.set_num_threads(settings.threads)
        self._model = SmolVLMForConditionalGeneration.from_pretrained(
            settings.model, dtype=torch.bfloat16
        ).eval()
        images = SmolVLMImageProcessorPil.from_pretrained(settings.model)
        tokenizer = AutoTokenizer.from_pretrained(settings.model)
        # The class of the family needs packages for videos; this one's text of an image is the same.
        self._processor = Idefics3Processor(images, tokenizer, image_seq_len=64)
        return {"transformers": version("transformers"), "torch": torch.__version__}

    def run(self, prompts: Sequence[list[int]], new_tokens: int) -> list[list[int]]:
        import torch
        from PIL import Image

        pictures = [[Image.fromarray(picture(image))] for image, _ in prompts]
        texts = [f"<image>{question(number)}" for _, number in prompts]
        inputs = self._processor(text=texts, images=pictures, return_tensors="pt")
        inputs["pixel_values"] = inputs["pixel_values"].to(torch.bfloat16)
        with torch.inference_mode():
            found = self._model.generate(
                **inputs, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False
            )
        behind: list[list[int]] = found[:, inputs["input_ids"].shape[1] :].tolist()
        return behind


if __name__ == "__main__":
    serve(Transformers)
