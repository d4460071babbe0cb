"""DiffusionGemma: both passes give transformers' logits, in any mixture of rows; and what is refused."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from aioinfer import Engine, EngineConfig
from aioinfer.cli.doctor import examine
from aioinfer.errors import ConfigError
from aioinfer.model.attention.sdpa import SDPAAttention
from aioinfer.model.canvas import Canvas
from aioinfer.model.canvas_decoder import CanvasDecoder
from aioinfer.model.updates.recipe import prepare_update
from aioinfer.params import SamplingParams
from tests.checkpoint.test_formats import FORMATS
from tests.model.canvas_models import CANVAS, VOCAB, PlainCanvas, make_canvas_model
from tests.model.harness import build_batch, load, make_pool
from tests.model.multimodal_models import edit_tensors


def tokens(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=count)


class Rows:
    """Rows of canvases and prompts, computed by this package."""

    def __init__(self, path: Path, page_size: int = 4) -> None:
        self.model = load(path)
        self.size = page_size
        self.attention = SDPAAttention(make_pool(self.model.spec, 200, page_size))
        for cells in self.attention.page_tensors:
            cells.fill_(float("nan"))
        self.pages = {name: list(range(1 + 60 * at, 61 + 60 * at)) for at, name in enumerate(("a", "b", "c"))}

    def step(
        self,
        rows: Sequence[tuple[str, int, list[int]]],
        canvases: Sequence[tuple[int, bool, torch.Tensor | None, float]],
    ) -> tuple[torch.Tensor, Any]:
        """``rows``: request, start, ids. ``canvases``: which row ends with one, whether it is denoised, its
        vectors and the temperature."""
        ends = [sum(len(ids) for _, _, ids in rows[: row + 1]) for row, _, _, _ in canvases]
        batch = build_batch(
            [(ids, start, self.pages[name]) for name, start, ids in rows],
            self.size,
            num_decodes=0,
            logits_rows=[at for end in ends for at in range(end - CANVAS, end)],
        )
        if not canvases:
            return self.model.forward(batch, self.attention), None
        zero = torch.zeros(CANVAS, self.model.spec.hidden_size)
        batch.canvas = Canvas.of(
            batch.positions,
            batch.logits_rows.view(-1, CANVAS),
            torch.tensor([drafts for _, drafts, _, _ in canvases]),
            torch.tensor([temperature for _, _, _, temperature in canvases]),
            torch.stack([zero if vectors is None else vectors for _, _, vectors, _ in canvases]),
        )
        logits = self.model.forward(batch, self.attention)
        return logits.view(len(canvases), CANVAS, -1), batch.canvas


def test_both_passes_give_transformers_logits_beside_each_other(tmp_path: Path) -> None:
    plain = PlainCanvas(make_canvas_model(tmp_path))
    rows = Rows(tmp_path)
    assert isinstance(rows.model, CanvasDecoder)
    assert (rows.model.spec.block_size, rows.model.spec.canvas) == (CANVAS, True)
    a, b = tokens(21, 1), tokens(6, 2)
    first, second, third = tokens(CANVAS, 3), tokens(CANVAS, 4), tokens(CANVAS, 5)
    # A prompt in chunks, with its canvas behind the last one, and a short one.
    rows.step([("a", 0, a[:9])], [])
    found, canvas = rows.step(
        [("a", 9, a[9:] + first), ("b", 0, b + second)], [(0, True, None, 0.7), (1, True, None, 0.6)]
    )
    expected = plain.logits(a, first, None), plain.logits(b, second, None)
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-4, atol=1e-4)
    # The next round of one; the other is done: its tokens are read by the encoder, and a canvas follows.
    vectors, tempered = canvas.vectors[0].clone(), found[0] / 0.7
    found, canvas = rows.step(
        [("a", 21, third), ("b", 6, second), ("b", 14, first)],
        [(0, True, vectors, 0.7), (1, False, None, 1.0), (2, True, None, 0.5)],
    )
    torch.testing.assert_close(found[0], plain.logits(a, third, tempered), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[2], plain.logits(b + second, first, None), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(found[0], plain.logits(a, third, None), rtol=1e-2, atol=1e-2)


def test_windows_of_a_canvas_are_counted_from_its_beginning(tmp_path: Path) -> None:
    plain = PlainCanvas(make_canvas_model(tmp_path))
    rows = Rows(tmp_path)
    context, canvas = tokens(40, 1), tokens(CANVAS, 2)
    found, _ = rows.step([("a", 0, context + canvas)], [(0, True, None, 1.0)])
    torch.testing.assert_close(found[0], plain.logits(context, canvas, None), rtol=1e-4, atol=1e-4)


# -- checkpoints -----------------------------------------------------------------------------------


def edit_config(**fields: Any) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        file = path / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    return edit


def with_tensors(more: dict[str, torch.Tensor | None]) -> Callable[[Path], None]:
    """Tensors besides, or without those that are None."""

    def edit(path: Path) -> None:
        def edited(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return {name: tensor for name, tensor in (tensors | more).items() if tensor is not None}

        edit_tensors(path, edited)

    return edit


def in_8_bits(path: Path) -> None:
    config, encode, _ = FORMATS["fp8-channels"]
    edit_config(quantization_config={**config, "ignore": ["re:.*vision.*"]})(path)

    def edited(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            if "_proj.weight" in name and "vision" not in name:
                at = name.removesuffix(".weight")
                found |= {f"{at}.{part}": value for part, value in encode(tensor)[0].items()}
            else:
                found[name] = tensor
        return found

    edit_tensors(path, edited)


NORM, SCALAR = "language_model.norm.weight", "language_model.layers.1.layer_scalar"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (edit_config(tie_word_embeddings=False), "weights of its own in the encoder"),
        (with_tensors({f"model.encoder.{NORM}": torch.ones(32)}), "unexpected tensors"),
        (with_tensors({f"model.encoder.{SCALAR}": None}), "layer_scalar"),
        (edit_config(canvas_length=12), "canvas_length.*power of two"),
        (in_8_bits, "quantised weights"),
    ],
)
def test_checkpoints_that_are_not_computed_are_refused(
    tmp_path: Path, edit: Callable[[Path], None], message: str
) -> None:
    make_canvas_model(tmp_path)
    edit(tmp_path)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path)


def test_only_the_text_model_is_read(tmp_path: Path) -> None:
    model = make_canvas_model(tmp_path)
    spec = load(tmp_path).spec
    own = sum(
        tensor.numel()
        for name, tensor in model.model.decoder.named_parameters()
        if not name.startswith(("encoder", "lm_head"))
    )
    assert spec.num_parameters == own + 2 * len(model.model.decoder.layers)
    assert spec.part.startswith("text part of DiffusionGemmaForBlockDiffusion")


def test_other_weights_are_written_into_both_passes(tmp_path: Path) -> None:
    make_canvas_model(tmp_path / "one", seed=1)
    plain = PlainCanvas(make_canvas_model(tmp_path / "two", seed=2))
    rows = Rows(tmp_path / "one")
    prompt, canvas = tokens(12, 1), tokens(CANVAS, 2)
    prepare_update(rows.model, [*load_file(tmp_path / "two" / "model.safetensors").items()], int).install()
    found, _ = rows.step([("a", 0, prompt + canvas)], [(0, True, None, 1.0)])
    torch.testing.assert_close(found[0], plain.logits(prompt, canvas, None), rtol=1e-4, atol=1e-4)


async def test_a_config_alone_is_a_model_and_the_doctor_knows_it(tmp_path: Path) -> None:
    make_canvas_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    config = EngineConfig(model=str(tmp_path), load_format="random", num_pages=40, max_model_len=64)
    told = {finding.subject: finding.text for finding in examine(config)}
    assert f"canvases of {CANVAS}" in told["diffusion"]
    assert "canvases are computed by torch" in told["attention"]
    async with Engine(config) as engine:
        result = await engine.generate([1, 2, 3], SamplingParams(max_tokens=CANVAS, seed=1, ignore_eos=True))
        assert len(result.token_ids) == CANVAS
