"""What a checkpoint states of its image processor is obeyed, as transformers obeys it, or refused."""

from __future__ import annotations

import functools
import importlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from aioinfer.errors import ConfigError
from tests.images.checkpoints import picture, smolvlm
from tests.images.gemma import gemma3, gemma4
from tests.images.internvl_models import internvl
from tests.images.qwen_models import qwen
from tests.images.test_prompts import processor_of, source

SIZES = [(40, 80), (200, 17), (33, 31)]
#: of every family
USUAL = [
    {"do_rescale": False},
    {"do_normalize": False},
    {"do_convert_rgb": False},
    {"do_pad": False},
    {"rescale_factor": 0.5},
    {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]},
    *({"resample": number} for number in range(4)),
]


class Family(NamedTuple):
    write: Callable[[Path], Any]
    #: transformers' processor
    name: str
    kind: str
    #: further settings to try
    settings: list[dict[str, Any]]
    #: what transformers' processor of prompts tells that of images
    asked: dict[str, Any] = {}  # noqa: RUF012


FAMILIES = {
    "smolvlm": Family(
        smolvlm,
        "smolvlm",
        "SmolVLMImageProcessor",
        [{"do_image_splitting": False}, {"size": {"longest_edge": 40}}],
    ),
    "internvl": Family(
        internvl,
        "got_ocr2",
        "GotOcr2ImageProcessor",
        [{"min_patches": 2, "max_patches": 3}, {"crop_to_patches": False}],
        {"crop_to_patches": True},
    ),
    "gemma3": Family(gemma3, "gemma3", "Gemma3ImageProcessor", [], {"do_convert_rgb": True}),
    "gemma4": Family(gemma4, "gemma4", "Gemma4ImageProcessor", []),
    "qwen3-vl": Family(
        qwen,
        "qwen2_vl",
        "Qwen2VLImageProcessor",
        [{"min_pixels": 4000}, {"max_pixels": 2000}, {"size": {"shortest_edge": 256, "longest_edge": 4096}}],
    ),
}
CASES = [(name, settings) for name, family in FAMILIES.items() for settings in [*USUAL, *family.settings]]


def state(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Write settings into the files of a checkpoint; returns all that they state."""
    file = path / "processor_config.json"
    stated = json.loads(file.read_text()) if file.is_file() else {}
    if "image_processor" in stated:
        stated["image_processor"].update(settings)
        found: dict[str, Any] = stated["image_processor"]
    else:
        file = path / "preprocessor_config.json"
        found = stated = {**json.loads(file.read_text()), **settings}
    file.write_text(json.dumps(stated))
    return found


@functools.cache
def _made(name: str, root: Path) -> Path:
    path = root / name
    path.mkdir()
    FAMILIES[name].write(path)
    return path


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


def copied(name: str, root: Path, path: Path) -> None:
    """Copy a checkpoint without its weights."""
    shutil.copytree(
        _made(name, root), path, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True
    )


@pytest.mark.parametrize(("name", "settings"), CASES, ids=lambda value: str(value)[:40])
def test_pixels_are_those_of_transformers(
    tmp_path: Path, checkpoints: Path, name: str, settings: dict[str, Any]
) -> None:
    family = FAMILIES[name]
    copied(name, checkpoints, tmp_path)
    stated = state(tmp_path, settings)
    module = importlib.import_module(f"transformers.models.{family.name}.image_processing_pil_{family.name}")
    oracle = getattr(module, f"{family.kind}Pil")(**stated)
    ours = processor_of(tmp_path)
    for size in SIZES:
        expected = oracle([[picture(*size)]], return_tensors="np", **family.asked)["pixel_values"]
        units = ours.process(source(*size)).parts.units
        found = np.concatenate([next(iter(unit.pixels.values())).ravel() for unit in units])
        assert np.array_equal(found, np.asarray(expected, np.float32).ravel()[: found.size])
        assert found.size == np.asarray(expected).size or name == "gemma4"


@pytest.mark.parametrize("name", FAMILIES)
def test_images_of_unknown_sizes_are_refused(tmp_path: Path, checkpoints: Path, name: str) -> None:
    copied(name, checkpoints, tmp_path)
    state(tmp_path, {"do_resize": False})
    with pytest.raises(ConfigError, match="do_resize false"):
        processor_of(tmp_path)
