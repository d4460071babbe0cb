"""Gemma 4: which layers have keys and values, what stays in the file, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from aioinfer.errors import ConfigError
from aioinfer.model.attention.pool import KVPool, KVShape
from aioinfer.model.decoder import Decoder
from aioinfer.model.inspection import LoadOptions, inspect_model
from aioinfer.model.loader import load_model
from aioinfer.model.native import NativeDecoder
from tests.model import harness
from tests.model.checkpoints import FAMILIES, assert_greedy, make_checkpoint, make_model
from tests.model.harness import require
from tests.model.multimodal_models import edit_tensors
from tests.tiers import SECONDS, rest

CPU = torch.device("cpu")
PROMPT = [7, 3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]
TABLE = "model.embed_tokens_per_layer.weight"


def load(path: Path, kernels: Any = "sdpa", *told: Any, **options: Any) -> Any:
    return harness.load(path, *told, kernels=kernels, **options)


@pytest.mark.parametrize("kernels", ["sdpa", "native"])
def test_only_layers_that_write_have_keys_and_values(tmp_path: Path, kernels: str) -> None:
    require(kernels)
    make_checkpoint("gemma4-shared", tmp_path)
    model = load(tmp_path, kernels)
    assert isinstance(model, NativeDecoder if kernels == "native" else Decoder)
    assert model.spec.num_layers == 6
    assert model.spec.kv_layers == (KVShape(1, 16), KVShape(1, 32), KVShape(1, 16))
    assert KVPool.bytes_per_page(model.spec.kv_layers, 8, torch.float32) == 2 * 8 * 4 * (16 + 32 + 16)
    assert inspect_model(tmp_path, LoadOptions(dtype="auto", device=CPU)).head_dims == {16, 32}


@rest(SECONDS)
@pytest.mark.parametrize("kernels", ["sdpa", "native"])
def test_what_a_checkpoint_has_for_layers_that_share_is_not_read(tmp_path: Path, kernels: str) -> None:
    """Releases have tensors of keys and values for all layers."""
    require(kernels)
    oracle = make_checkpoint("gemma4-shared", tmp_path)
    extra = {
        f"model.layers.{index}.self_attn.{name}.weight": torch.full((3,), float("nan"))
        for index in (3, 4, 5)
        for name in ("k_proj", "v_proj", "k_norm", "v_norm")
    }
    edit_tensors(tmp_path, lambda tensors: tensors | extra)
    assert_greedy(tmp_path, [PROMPT], 12, oracle, kernels=kernels)
    name = "model.layers.2.self_attn.v_norm.weight"
    edit_tensors(tmp_path, lambda tensors: tensors | {name: torch.ones(16)})
    with pytest.raises(ConfigError, match="unexpected tensors, first " + name):
        load(tmp_path)


@pytest.mark.native
def test_the_table_of_inputs_stays_in_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is neither copied, nor counted as memory that is needed."""
    from aioinfer.model.families import base
    from aioinfer.model.native import NativeDecoder as Native

    require("native")
    make_checkpoint("gemma4-shared", tmp_path)
    read: list[int] = []
    used: list[int] = []
    take = base.Weights.take
    inputs = Native._per_layer_inputs

    def watched(self: Any, name: str, *args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = take(self, name, *args, **kwargs)
        if name == TABLE:
            read.append(tensor.data_ptr())
        return tensor

    def watched_inputs(self: Any, given: Any) -> int:
        used.append(given.table.data_ptr())
        return inputs(self, given)

    monkeypatch.setattr(base.Weights, "take", watched)
    monkeypatch.setattr(Native, "_per_layer_inputs", watched_inputs)
    sizes: list[int] = []
    model = load(tmp_path, "native", None, sizes.append)
    assert len(read) == 1
    assert read == used
    table = model.spec.vocab_size * 6 * 16
    # Factors of layers are stored and are no parameters, and a tied head is stored once.
    every = 4 * model.spec.num_parameters
    assert sizes == [every - 4 * table]
    # In another type it is a copy.
    load_model(tmp_path, LoadOptions(dtype="bfloat16", device=CPU, kernels="native"), check_size=sizes.append)
    assert sizes[1:] == [every // 2]


def test_inputs_by_layer_of_a_size_that_no_vector_divides_run_by_torch(tmp_path: Path) -> None:
    require("native")
    prefix, changes = FAMILIES["gemma4-shared"]
    oracle = make_model(prefix, {**changes, "hidden_size_per_layer_input": 8}, tmp_path, seed=2)
    assert isinstance(load(tmp_path, "native"), Decoder)
    assert_greedy(tmp_path, [PROMPT], 4, oracle, kernels="native")
