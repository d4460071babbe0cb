"""Which layers of a model an adapter changes, and where in their outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from aioinfer.checkpoint.adapter import AdapterFiles
from aioinfer.errors import ConfigError
from aioinfer.model.adapters.targets import AdapterTargets, LowRank
from aioinfer.model.weights import RandomWeights, StoredMatrix
from tests.model.adapters import factors, write_adapter

HIDDEN, RANK = 8, 4
QKV_ROWS = {"q_proj": 6, "k_proj": 4, "v_proj": 4}


def matrix(names: list[str], rows: list[int], width: int = HIDDEN, **options: Any) -> StoredMatrix:
    weights = RandomWeights(dtype=torch.float32, device=torch.device("cpu"))
    return StoredMatrix(weights, names, rows, width, **options)


def qkv(layer: int = 0, **options: Any) -> StoredMatrix:
    at = f"model.layers.{layer}.self_attn"
    return matrix([f"{at}.{name}" for name in QKV_ROWS], list(QKV_ROWS.values()), **options)


def adapter(
    path: Path, shapes: dict[str, tuple[int, int]], *, rank: int = RANK, **fields: Any
) -> AdapterFiles:
    wrote = factors(shapes, dict.fromkeys(shapes, rank), seed=3, dtype=torch.float32)
    return AdapterFiles.read(write_adapter(path, wrote, r=rank, **fields))


def of_qkv(*names: str, layer: int = 0) -> dict[str, tuple[int, int]]:
    return {f"model.layers.{layer}.self_attn.{name}": (QKV_ROWS[name], HIDDEN) for name in names}


def added(parts: list[LowRank | None], outputs: int) -> torch.Tensor:
    """To the weight of a layer."""
    result = torch.zeros(outputs, HIDDEN)
    for part in parts:
        if part is not None:
            result[part.start : part.start + len(part.b)] += part.scale * part.b @ part.a
    return result


def wanted(files: AdapterFiles, names: list[str], rows: list[int]) -> torch.Tensor:
    """The same, from tensors in order."""
    parts = []
    for name, count in zip(names, rows, strict=True):
        found = files.modules.get(name.removeprefix("model."))
        parts.append(torch.zeros(count, HIDDEN) if found is None else found.scale * found.b @ found.a)
    return torch.cat(parts)


@pytest.mark.parametrize("chosen", [("q_proj",), ("q_proj", "v_proj"), ("k_proj",), tuple(QKV_ROWS)])
@pytest.mark.parametrize("ordered", [False, True])
def test_a_fused_layer_has_a_target_for_each_of_its_tensors(
    tmp_path: Path, chosen: tuple[str, ...], ordered: bool
) -> None:
    # As of Qwen3-Next: of a tensor, the halves of its rows lie apart.
    order = torch.tensor([0, 2, 4, 6, 9, 8, 7, 10, 11, 12, 13, 1, 3, 5]) if ordered else None
    stored, targets = qkv(order=order), AdapterTargets()
    assert targets.add(stored) == 0
    files = adapter(tmp_path, of_qkv(*chosen))
    found = targets.match(files, 64)
    assert list(found) == [0]
    assert [part is not None for part in found[0]] == [name in chosen for name in QKV_ROWS]
    plain = wanted(files, list(stored.names), list(stored.rows))
    assert torch.equal(added(found[0], 14), plain if order is None else plain[order])


@pytest.mark.parametrize("outer", ["", "transformer."])
@pytest.mark.parametrize("inner", ["", "transformer."])
def test_a_prefix_of_the_whole_model_makes_no_difference(tmp_path: Path, outer: str, inner: str) -> None:
    targets = AdapterTargets()
    targets.add(matrix([f"{inner}h.0.attn.c_attn"], [24], transposed=True))
    shapes = {f"{outer}h.0.attn.c_attn": (24, HIDDEN)}
    assert list(targets.match(adapter(tmp_path / "turned", shapes, fan_in_fan_out=True), 64)) == [0]
    with pytest.raises(ConfigError, match=r"fan_in_fan_out is false, and .* is stored as \[inputs"):
        targets.match(adapter(tmp_path / "straight", shapes), 64)


def test_a_tensor_that_a_layer_has_twice_is_adapted_twice(tmp_path: Path) -> None:
    targets, at = AdapterTargets(), "model.layers.0.self_attn"
    stored = matrix([f"{at}.q_proj", f"{at}.k_proj", f"{at}.k_proj"], [6, 4, 4])
    targets.add(stored)
    files = adapter(tmp_path, of_qkv("k_proj"))
    found = targets.match(files, 64)
    assert torch.equal(added(found[0], 14), wanted(files, list(stored.names), [6, 4, 4]))


Q = "model.layers.0.self_attn.q_proj"
#: modules of an adapter beside q_proj, its fields, and what is said of it
REFUSED: list[tuple[dict[str, tuple[int, int]], dict[str, Any], str]] = [
    *(
        ({name: (6, HIDDEN)}, {}, f"^adapter: {name} cannot be adapted: {reason}$")
        for name, reason in (
            ("model.layers.0.mlp.experts.3.down_proj", "experts are not adapted"),
            ("model.layers.0.mlp.shared_expert.down_proj", "shared experts are not adapted"),
            ("model.layers.0.mlp.gate", "routers are not adapted"),
            ("lm_head", "the head is not adapted"),
            ("model.embed_tokens", "embeddings are not adapted"),
            ("model.layers.0.per_layer_input_gate", "inputs by layer are not adapted"),
            ("model.visual.blocks.0.attn.qkv", "it is in no part of the text model, which alone is adapted"),
            ("model.layers.7.self_attn.q_proj", "the model has no such linear layer"),
            ("model.layers.0.self_attn.q_norm", "the model has no such linear layer"),
        )
    ),
    ({Q: (6, 9)}, {}, f"lora_A of {Q} has 9 inputs, the layer has 8"),
    ({Q: (7, 8)}, {}, f"lora_B of {Q} has 7 outputs, the layer has 6"),
    ({}, {"rank": 9}, "q_proj has rank 9; max_lora_rank is 8"),
    ({}, {"fan_in_fan_out": True}, r"fan_in_fan_out is true, and the weight of .* is stored as \[outputs"),
    *(
        ({}, {"target_modules": chosen}, r"chooses model\.layers\.0\.self_attn\.[kv]_proj")
        for chosen in (["q_proj", "v_proj"], r".*self_attn.*(q|v)_proj", "all-linear")
    ),
]


@pytest.mark.parametrize(("modules", "fields", "message"), REFUSED)
def test_what_does_not_fit_the_model_is_refused_with_the_reason(
    tmp_path: Path, modules: dict[str, tuple[int, int]], fields: dict[str, Any], message: str
) -> None:
    targets = AdapterTargets()
    targets.add(qkv())
    files = adapter(tmp_path, of_qkv("q_proj") | modules, **fields)
    with pytest.raises(ConfigError, match=message):
        targets.match(files, 8)


@pytest.mark.parametrize("part", ["experts.0", "shared_expert", "per_layer_projection"])
def test_layers_that_are_not_adapted_have_no_index(part: str) -> None:
    targets = AdapterTargets()
    assert targets.add(matrix([f"model.layers.0.{part}"], [4])) is None
    assert targets.layers == []


def test_names_of_modules_that_the_model_does_not_have_are_no_error(tmp_path: Path) -> None:
    """Training scripts name those of several models at once."""
    targets = AdapterTargets()
    targets.add(qkv())
    assert targets.match(adapter(tmp_path, of_qkv("q_proj"), target_modules=["q_proj", "c_attn"]), 64)
