"""transformers' image processor of LFM2-VL where torchvision is not installed.

Of it, it calls two functions; they stand here as what torchvision makes of them for bytes on a CPU, so that
all else is transformers' own.
"""

from __future__ import annotations

import inspect
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

__all__ = ["processor_class", "theirs"]


def functional() -> Any:
    """What transformers calls of torchvision."""

    def resize(image: torch.Tensor, size: tuple[int, int], interpolation: str, antialias: bool) -> Any:
        if image.shape[-2:] == size:
            return image
        return torch.nn.functional.interpolate(
            image, size, mode=interpolation, align_corners=False, antialias=antialias
        )

    def normalize(image: torch.Tensor, mean: Any, std: Any, inplace: bool = False) -> torch.Tensor:
        return image.sub_(mean.view(-1, 1, 1)).div_(std.view(-1, 1, 1))

    modes = SimpleNamespace(LANCZOS="lanczos", BILINEAR="bilinear", BICUBIC="bicubic")
    return SimpleNamespace(resize=resize, normalize=normalize, InterpolationMode=modes)


@pytest.fixture
def processor_class(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The class of transformers, over these functions."""
    names = ["torchvision", "torchvision.transforms", "torchvision.transforms.v2"]
    modules = [ModuleType(name) for name in names]
    modules[-1].functional = functional()  # type: ignore[attr-defined]
    module = "transformers.models.lfm2_vl.image_processing_lfm2_vl"
    monkeypatch.delitem(sys.modules, module, raising=False)
    # Before there is something by the name: transformers looks whether it is installed, once.
    from transformers import image_processing_backends

    with monkeypatch.context() as patched:
        for name, stub in zip(names, modules, strict=True):
            patched.setitem(sys.modules, name, stub)
        from transformers.models.lfm2_vl.image_processing_lfm2_vl import Lfm2VlImageProcessor
    monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(image_processing_backends, "tvF", functional(), raising=False)
    return Lfm2VlImageProcessor


def theirs(kind: Any, image: npt.NDArray[np.uint8], settings: dict[str, Any]) -> Any:
    """What transformers makes of an image. Its constructor asks for torchvision, so there is none."""
    processor = object.__new__(kind)
    names = inspect.signature(kind._preprocess).parameters
    fields = {name: getattr(kind, name) for name in names if hasattr(kind, name)}
    fields |= settings
    fields["image_mean"], fields["image_std"] = tuple(fields["image_mean"]), tuple(fields["image_std"])
    fields["resample"] = {2: "bilinear", 3: "bicubic"}[int(fields["resample"])]
    fields |= {
        "do_resize": True,
        "return_row_col_info": True,
        "return_tensors": "pt",
        "disable_grouping": None,
    }
    pixels = torch.from_numpy(image).permute(2, 0, 1).contiguous()
    return processor._preprocess([pixels], **fields)
