"""Adapters in native kernels: a row with one is computed as if alone, and as merged weights are."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from aioinfer.errors import ConfigError
from aioinfer.model.inspection import LoadOptions
from aioinfer.model.loader import load_model
from aioinfer.model.quantization import Quantization
from tests.compiled import require_native
from tests.model.adapters import factors, write_adapter
from tests.model.checkpoints import make_checkpoint
from tests.model.harness import Driver

PROMPTS = [
    [5, 9, 2, 11, 3, 8, 1],
    [7, 7, 1],
    [100, 3, 9, 4, 4, 2, 8, 6, 19],
    [5, 9, 2, 11, 3, 8, 1],
    [2, 8, 2, 1],
]
#: of the prompts
SLOTS = [1, 2, 0, 3, 1]
NEW = 5
CPU = torch.device("cpu")

FAMILIES = [
    "llama-head-dim",
    "llama-biases",
    "qwen3",
    "phi3",
    "glm4",
    "gpt2-wide",
    "gemma2",
    "gemma4-experts",
    "olmo2",
    "lfm2",
    "qwen3.5",
    "qwen3-next",
]


def modules(path: Path) -> dict[str, tuple[int, int]]:
    """The weights [outputs, inputs] of layers that can be adapted."""
    found = {}
    for name, tensor in load_file(path / "model.safetensors").items():
        kind = name.removesuffix(".weight").rpartition(".")[2]
        fixed = ("conv1d", "conv", "lm_head", "embed_tokens", "wte", "wpe", "gate", "experts", "router")
        if (
            not name.endswith(".weight")
            or tensor.dim() != 2
            or any(part in fixed for part in name.split("."))
        ):
            continue
        if "expert" in name or "norm" in kind:
            continue
        shape = tuple(tensor.shape)
        found[name.removesuffix(".weight")] = shape[::-1] if kind.startswith("c_") else shape
    return found  # type: ignore[return-value]


def adapters(
    path: Path, where: Path, dtype: torch.dtype = torch.float32
) -> list[tuple[Path, dict[str, Any], float]]:
    """Three adapters of different ranks, targets and scales: each with its matrices and its scale."""
    shapes = modules(path)
    assert shapes, "nothing to adapt"
    some = dict(list(shapes.items())[::2])
    made = []
    for number, (targets, rank, alpha) in enumerate(((shapes, 4, 8), (some, 16, 16), (shapes, 21, 30))):
        matrices = factors(targets, dict.fromkeys(targets, rank), seed=number, dtype=dtype)
        fields: dict[str, Any] = {"target_modules": sorted(matrices), "r": rank, "lora_alpha": alpha}
        transposed = "gpt2" in path.name
        to = write_adapter(where / str(number), matrices, fan_in_fan_out=transposed, **fields)
        made.append((to, matrices, alpha / rank))
    return made


def merged(path: Path, to: Path, matrices: dict[str, Any], scale: float) -> Path:
    shutil.copytree(path, to)
    tensors = load_file(to / "model.safetensors")
    for name, (a, b) in matrices.items():
        weight = tensors[f"{name}.weight"]
        delta = scale * b.float() @ a.float()
        delta = delta.T if delta.shape != weight.shape or name.rpartition(".")[2].startswith("c_") else delta
        tensors[f"{name}.weight"] = (weight.float() + delta).to(weight.dtype).contiguous()
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return to


def loaded(path: Path, quantization: Quantization = "auto", dtype: str = "float32") -> Any:
    model = load_model(
        path, LoadOptions(dtype=dtype, device=CPU, kernels="native", quantization=quantization)
    )
    assert model.invariant, "not native throughout"
    return model


def logits(model: Any, prompts: Sequence[Sequence[int]], slots: Sequence[int], chunk: int) -> list[Any]:
    driver = Driver(model, chunk=chunk, kernels="native")
    found = driver.run(prompts, NEW, gap=1, slots=slots, all_logits=True)
    return [torch.stack([each.logits[at] for at in sorted(each.logits)]) for each in found]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_with_an_adapter_is_computed_as_if_it_were_alone(
    family: str, dtype: str, tmp_path: Path
) -> None:
    require_native()
    path = tmp_path / family
    make_checkpoint(family, path)
    model = loaded(path, dtype=dtype)
    before = logits(model, PROMPTS, [0] * 5, 4)
    for slot, (adapter, _, _) in enumerate(adapters(path, tmp_path / "adapters"), 1):
        model.adapters.install(slot, model.adapters.prepare(adapter))
    for one, other in zip(before, logits(model, PROMPTS, [0] * 5, 4), strict=True):
        assert torch.equal(one, other), "adapters that no row has change rows"
    together = logits(model, PROMPTS, SLOTS, 4)
    for index, (prompt, slot) in enumerate(zip(PROMPTS, SLOTS, strict=True)):
        (alone,) = logits(model, [prompt], [slot], 3)
        assert torch.equal(together[index], alone)
        assert torch.equal(together[index], before[index]) == (slot == 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_computed_as_merged_weights_are(family: str, tmp_path: Path) -> None:
    require_native()
    path = tmp_path / family
    make_checkpoint(family, path)
    model = loaded(path)
    for number, (adapter, matrices, scale) in enumerate(adapters(path, tmp_path / "adapters")):
        model.adapters.install(1, model.adapters.prepare(adapter))
        other = loaded(merged(path, tmp_path / f"merged-{number}", matrices, scale))
        expected = logits(other, PROMPTS[:3], [0] * 3, 4)
        found = logits(model, PROMPTS[:3], [1] * 3, 4)
        for one, two in zip(found, expected, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_rounded_weights_take_adapters_too(quantization: Quantization, tmp_path: Path) -> None:
    require_native()
    path = tmp_path / "qwen3"
    make_checkpoint("qwen3", path)
    model = loaded(path, quantization)
    base = logits(model, PROMPTS, [0] * 5, 4)
    exact = loaded(path)
    for slot, (adapter, _, _) in enumerate(adapters(path, tmp_path / "adapters"), 1):
        for each in (model, exact):
            each.adapters.install(slot, each.adapters.prepare(adapter))
    together = logits(model, PROMPTS, SLOTS, 4)
    for index, (prompt, slot) in enumerate(zip(PROMPTS, SLOTS, strict=True)):
        (alone,) = logits(model, [prompt], [slot], 3)
        assert torch.equal(together[index], alone)
        assert torch.equal(together[index], base[index]) == (slot == 0)
    # Nearer to what unrounded weights and the adapter give than to what these weights give without it.
    first, wanted = together[0][: len(PROMPTS[0])], logits(exact, PROMPTS[:1], [1], 4)[0][: len(PROMPTS[0])]
    assert (first - wanted).norm() < 0.5 * (base[0][: len(PROMPTS[0])] - wanted).norm()


def test_numbers_that_the_type_of_the_model_does_not_have_are_refused(tmp_path: Path) -> None:
    """The largest float32 is none of bfloat16's."""
    path = tmp_path / "llama-head-dim"
    make_checkpoint("llama-head-dim", path)
    (first, _, _), *_ = adapters(path, tmp_path)
    tensors = load_file(first / "adapter_model.safetensors")
    next(iter(tensors.values()))[0, 0] = torch.finfo(torch.float32).max
    save_file(tensors, first / "adapter_model.safetensors")
    assert loaded(path).adapters.prepare(first).rank == 4
    with pytest.raises(ConfigError, match=r"adapter: .* numbers that the model's type does not have"):
        loaded(path, dtype="bfloat16").adapters.prepare(first)


def test_a_row_whose_slot_is_empty_is_refused_before_anything_is_computed(tmp_path: Path) -> None:
    require_native()
    make_checkpoint("qwen3", tmp_path / "qwen3")
    model = loaded(tmp_path / "qwen3")
    (adapter, _, _), *_ = adapters(tmp_path / "qwen3", tmp_path / "adapters")
    model.adapters.install(2, model.adapters.prepare(adapter))
    for slot in (1, 3, -1):
        with pytest.raises(ValueError, match="a row's adapter is not there"):
            logits(model, PROMPTS[:1], [slot], 4)
    model.adapters.remove(2)
    with pytest.raises(ValueError, match="a row's adapter is not there"):
        logits(model, PROMPTS[:1], [2], 4)
