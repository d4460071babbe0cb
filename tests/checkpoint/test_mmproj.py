"""Models in GGUF files with their image encoders in files of their own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from aioinfer import Engine, EngineConfig, SamplingParams
from aioinfer.checkpoint.files import Checkpoint, GGUFCheckpoint, checkpoint_at
from aioinfer.errors import ConfigError
from aioinfer.images.processor import ImageProcessor
from aioinfer.images.prompt import PromptImages
from aioinfer.images.source import ImageSource
from tests.checkpoint.gguf_models import write_file
from tests.checkpoint.mmproj_models import MODEL, PAIRED, mmproj_parts, write_pair
from tests.images.checkpoints import picture, smolvlm
from tests.images.gemma import gemma3
from tests.images.internvl_models import internvl
from tests.images.qwen_models import qwen
from tests.images.towers import features
from tests.model.harness import load
from tests.tiers import SECONDS, rest

FAMILIES: dict[str, Callable[..., Any]] = {
    "idefics3": partial(smolvlm, family="Idefics3"),
    "gemma3": gemma3,
    "internvl": internvl,
    "qwen3vl": qwen,
}
SIZES = [(96, 40), (17, 33), (64, 64)]


#: changes metadata and tensors of a file with an encoder
Change = Callable[[dict[str, Any], dict[str, Any]], object]


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def folder(tmp_path: Path, family: str) -> Path:
    """The checkpoint of a family, with its files in ``pair``."""
    for name in ("whole", "pair"):
        (tmp_path / name).mkdir()
    FAMILIES[family](tmp_path / "whole")
    write_pair(tmp_path / "whole", tmp_path / "pair")
    return tmp_path


def prompt(checkpoint: Checkpoint) -> tuple[list[int], PromptImages]:
    """The ids of a text with images, and these."""
    tokenizer = checkpoint.tokenizer()
    assert tokenizer is not None
    images = ImageProcessor.of(checkpoint, tokenizer.get_added_vocab())
    assert images is not None
    processed = [images.process(ImageSource(picture(*size).tobytes(), size)) for size in SIZES]
    text = images.expand(images.placeholder.join(["first", " and ", "", "?"]), processed)
    ids = tokenizer.encode(text, add_special_tokens=False)
    _, found = images.fold(ids, processed)
    return ids, found


def test_ids_pixels_and_features_are_those_of_the_checkpoint(folder: Path) -> None:
    ids, images = prompt(checkpoint_at(folder / "whole"))
    found, others = prompt(checkpoint_at(folder / "pair" / MODEL, mmproj=True))
    assert found == ids
    whole, pair = (load(folder / name, kernels="sdpa") for name in ("whole", f"pair/{MODEL}"))
    assert pair.spec.images == whole.spec.images
    assert pair.spec.part == whole.spec.part
    assert pair.spec.num_parameters == whole.spec.num_parameters
    for one, other in zip(images.units, others.units, strict=True):
        assert (one.start, one.length, one.patches) == (other.start, other.length, other.patches)
        for name, pixels in one.pixels.items():
            np.testing.assert_array_equal(pixels, other.pixels[name])
        expected = features(whole.encoder, dict(one.pixels))
        torch.testing.assert_close(features(pair.encoder, dict(other.pixels)), expected, rtol=1e-5, atol=1e-6)


@rest(SECONDS)
async def test_chats_are_those_of_the_checkpoint(folder: Path) -> None:
    content = [
        {"type": "text", "text": "first "},
        *({"type": "image", "image": picture(*size)} for size in SIZES),
        {"type": "text", "text": "?"},
    ]
    found = []
    for name in ("whole", "pair"):
        async with Engine(EngineConfig(model=str(folder / name), dtype="float32", device="cpu")) as engine:
            params = SamplingParams(max_tokens=6, temperature=0.0)
            answer = await engine.chat([{"role": "user", "content": content}], params)
            found.append((answer.result.prompt_token_ids, answer.result.token_ids))
    assert found[0] == found[1]
    assert all(found[0])


def rewrite(folder: Path, change: Change) -> Path:
    """Write the file of the encoder anew, changed; returns it."""
    metadata, tensors = mmproj_parts(folder / "whole")
    change(metadata, tensors)
    target = folder / "pair" / PAIRED
    architecture = metadata.pop("general.architecture", "clip")
    write_file(target, metadata, architecture, tensors)
    return target


def opened(folder: Path) -> Any:
    """The model with the encoder that is named."""
    return load(folder / "pair" / MODEL, kernels="sdpa", mmproj=folder / "pair" / PAIRED)


@pytest.fixture
def smol(tmp_path: Path) -> Path:
    for name in ("whole", "pair"):
        (tmp_path / name).mkdir()
    smolvlm(tmp_path / "whole", family="Idefics3")
    write_pair(tmp_path / "whole", tmp_path / "pair")
    return tmp_path


def vision(name: str, value: object) -> Change:
    return lambda metadata, _: metadata.__setitem__(f"clip.{name}", value)


def without(name: str) -> Change:
    return lambda metadata, tensors: (metadata.pop(f"clip.{name}", None), tensors.pop(name, None))


def shaped(name: str, *shape: int) -> Change:
    return lambda _, tensors: tensors.__setitem__(name, np.zeros(shape, np.float32))


#: what is wrong, and what the error says
DAMAGED: list[tuple[Change, str]] = [
    (
        lambda metadata, _: metadata.update({"general.architecture": "llama"}),
        "architecture 'llama', no image",
    ),
    (vision("has_vision_encoder", False), "has no image encoder"),
    (vision("projector_type", "pixtral"), "type 'pixtral' are not supported: idefics3, gemma3"),
    (without("projector_type"), "projectors of the type ''"),
    (vision("projector_type", 3), "projector_type of .* is int"),
    (vision("projector_type", "gemma3"), "text models are of the architecture gemma3, not 'llama'"),
    (vision("vision.projection_dim", 64), "belongs to another model: its features have 64 .* model has 48"),
    (without("vision.projection_dim"), "does not state clip.vision.projection_dim"),
    (vision("vision.block_count", 0), "block_count of .* is 0"),
    (vision("vision.block_count", 3), "no tensor vision_model.encoder.layers.2"),
    (vision("vision.block_count", 1), "unexpected tensors, first vision_model.encoder.layers.1"),
    (vision("vision.embedding_length", "32"), "embedding_length of .* is str"),
    (vision("vision.embedding_length", 64), "is shaped .*, the config says"),
    (vision("vision.attention.head_count", 3), "make no sense: 3 heads of 32"),
    (vision("vision.feed_forward_length", 64), "mlp.fc1.weight is shaped"),
    (vision("vision.image_size", 1 << 20), "position_embedding.weight is shaped"),
    (vision("vision.image_size", 3), "patches of 4 in images of 3"),
    (vision("vision.patch_size", 0), "patch_size of .* is 0"),
    (vision("vision.projector.scale_factor", 3), "8 patches a side"),
    (vision("vision.projector.scale_factor", 4), "connector.modality_projection.proj.weight is shaped"),
    (vision("vision.image_mean", [0.5, 0.5]), "image_mean of .* is a list of 2"),
    (vision("vision.image_std", [0.5, 0.0, 0.5]), "image_std of .* has a 0"),
    (without("vision.image_std"), "does not state clip.vision.image_std"),
    (without("vision.attention.layer_norm_epsilon"), "does not state .*layer_norm_epsilon"),
    (without("v.blk.1.attn_q.weight"), "no tensor vision_model.encoder.layers.1.self_attn.q_proj.weight"),
    (without("mm.model.fc.weight"), "no tensor connector.modality_projection.proj.weight"),
    (shaped("v.blk.1.ln1.weight", 31), "layers.1.layer_norm1.weight is shaped"),
    (shaped("v.patch_embd.weight", 32, 3, 4, 5), "patch_embedding.weight is shaped"),
    (shaped("v.blk.0.attn_qkv.weight", 96, 32), "has a tensor 'v.blk.0.attn_qkv.weight', which is not known"),
]


@rest(SECONDS)
@pytest.mark.parametrize("number", range(len(DAMAGED)))
def test_a_damaged_encoder_is_one_error(smol: Path, number: int) -> None:
    change, said = DAMAGED[number]
    rewrite(smol, change)
    with pytest.raises(ConfigError, match=said):
        opened(smol)
        prompt(checkpoint_at(smol / "pair" / MODEL, smol / "pair" / PAIRED))


def test_a_file_that_is_cut_anywhere_is_one_error(smol: Path) -> None:
    file = smol / "pair" / PAIRED
    data = file.read_bytes()
    for size in (0, 3, 20, 200, 800, len(data) // 2, len(data) - 300):
        file.write_bytes(data[:size])
        with pytest.raises(ConfigError, match=f"mmproj: {PAIRED} cannot be read as GGUF"):
            opened(smol)
    file.unlink()
    with pytest.raises(ConfigError, match=f"mmproj: there is no file .*{PAIRED}"):
        opened(smol)


def test_a_text_model_is_no_encoder_and_an_encoder_is_no_text_model(smol: Path) -> None:
    model, encoder = smol / "pair" / MODEL, smol / "pair" / PAIRED
    with pytest.raises(ConfigError, match="architecture 'llama', no image encoder"):
        load(model, mmproj=model)
    with pytest.raises(ConfigError, match="'clip' are not supported"):
        load(encoder)
    with pytest.raises(ConfigError, match="mmproj: is for models in GGUF files"):
        load(smol / "whole", mmproj=encoder)


def test_the_encoder_beside_a_model_is_found(smol: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, encoder = smol / "pair" / MODEL, smol / "pair" / PAIRED
    assert load(model).spec.images is not None
    assert checkpoint_at(model, True).files() == [model, encoder]
    assert load(model, images=False).encoder is None
    assert GGUFCheckpoint(model).files() == [model]
    # One of another model.
    rewrite(smol, vision("vision.projection_dim", 64))
    assert load(model).encoder is None
    assert "model.gguf reads no images: mmproj-model.gguf belongs to another model" in caplog.text
    encoder.rename(smol / "pair" / "other-mmproj-f16.gguf")
    rewrite(smol, lambda *_: None)
    with pytest.raises(ConfigError, match=r"several beside model.gguf, name one: mmproj-.*, other-mmproj"):
        load(model)
    assert load(model, mmproj=encoder).encoder is not None
    assert load(model, images=False).encoder is None


def test_products_may_be_named_the_other_way_round(smol: Path) -> None:
    """As in files of early converters."""
    expected = opened(smol).encoder
    unit = {"pixel_values": np.random.default_rng(1).standard_normal((3, 32, 32), dtype=np.float32)}

    def swap(_: object, tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if "ffn_up" in name]:
            other = name.replace("ffn_up", "ffn_down")
            tensors[name], tensors[other] = tensors[other], tensors[name]

    rewrite(smol, swap)
    assert torch.equal(features(opened(smol).encoder, unit), features(expected, unit))


def test_sizes_of_one_may_be_left_out(tmp_path: Path) -> None:
    for name in ("whole", "pair"):
        (tmp_path / name).mkdir()
    internvl(tmp_path / "whole")
    write_pair(tmp_path / "whole", tmp_path / "pair")
    expected = opened(tmp_path).encoder
    unit = {"pixel_values": np.random.default_rng(1).standard_normal((3, 16, 16), dtype=np.float32)}
    rewrite(
        tmp_path,
        lambda _, tensors: tensors.update(
            {name: np.squeeze(tensors[name]) for name in ("v.class_embd", "v.position_embd.weight")}
        ),
    )
    assert torch.equal(features(opened(tmp_path).encoder, unit), features(expected, unit))


def test_a_token_that_converters_leave_out_takes_the_place_of_an_unused_one(tmp_path: Path) -> None:
    for name in ("whole", "pair"):
        (tmp_path / name).mkdir()
    gemma3(tmp_path / "whole")
    write_pair(tmp_path / "whole", tmp_path / "pair", lacking="<image_soft_token>")
    ids, images = prompt(checkpoint_at(tmp_path / "whole"))
    found, others = prompt(checkpoint_at(tmp_path / "pair" / MODEL, True))
    assert found == ids
    assert [unit.key for unit in others.units] == [unit.key for unit in images.units]
    rewrite(tmp_path, vision("projector_type", "gemma3"))
    tokens = checkpoint_at(tmp_path / "pair" / MODEL).tokenizer().get_vocab()
    assert "<image_soft_token>" not in tokens


@rest(SECONDS)
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_quantised_encoders_are_computed_as_they_are_stored(smol: Path, kind: str) -> None:
    import gguf

    stored = gguf.GGMLQuantizationType[kind]
    unit = {"pixel_values": np.random.default_rng(1).standard_normal((3, 32, 32), dtype=np.float32)}

    def quantise(_: object, tensors: dict[str, Any], *, back: bool) -> None:
        for name, values in tensors.items():
            if values.ndim == 2 and values.shape[-1] % 32 == 0 and "embd" not in name:
                blocks = gguf.quants.quantize(values, stored)
                tensors[name] = gguf.quants.dequantize(blocks, stored) if back else (blocks, stored)

    rewrite(smol, lambda *parts: quantise(*parts, back=True))
    expected = features(opened(smol).encoder, unit)
    rewrite(smol, lambda *parts: quantise(*parts, back=False))
    model = opened(smol)
    torch.testing.assert_close(features(model.encoder, unit), expected, rtol=1e-5, atol=1e-5)
