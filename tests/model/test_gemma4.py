"""Gemma 4: which layers have keys and values, what stays in the file, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from aioinfer.config import EngineConfig
from aioinfer.errors import ConfigError
from aioinfer.llm import LLM
from aioinfer.model.attention.pool import KVPool, KVShape
from aioinfer.model.decoder import Decoder
from aioinfer.model.inspection import LoadOptions, inspect_model
from aioinfer.model.loader import load_model
from aioinfer.model.native import NativeDecoder
from aioinfer.params import SamplingParams
from tests.model import harness
from tests.model.checkpoints import greedy, make_checkpoint
from tests.model.harness import require
from tests.model.multimodal_models import edit_config, edit_tensors
from tests.tiers import SECONDS, rest

CPU = torch.device("cpu")
PROMPT = [7, 3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]
TABLE = "model.embed_tokens_per_layer.weight"


def load(path: Path, kernels: Any = "sdpa", *told: Any, **options: Any) -> Any:
    return harness.load(path, *told, kernels=kernels, **options)


def ids(path: Path, kernels: str) -> list[int]:
    config = EngineConfig(
        model=str(path), dtype="float32", num_pages=64, page_size=8, threads=1, chunk_size=7,
        attention_backend=kernels,  # type: ignore[arg-type]
    )  # fmt: skip
    with LLM(config) as llm:
        (result,) = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=12))
    return list(result.token_ids)


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
    assert ids(tmp_path, kernels) == greedy(oracle, PROMPT, 12)
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


def test_images_may_attend_both_ways_where_there_are_none(tmp_path: Path) -> None:
    oracle = make_checkpoint("gemma4-keys", tmp_path)
    edit_config(tmp_path, lambda stated: stated.update(use_bidirectional_attention="vision"))
    assert ids(tmp_path, "sdpa") == greedy(oracle, PROMPT, 12)


def test_a_release_states_the_heads_of_its_global_layers_by_themselves(tmp_path: Path) -> None:
    oracle = make_checkpoint("gemma4-keys", tmp_path)

    def as_released(stated: dict[str, Any]) -> None:
        (heads,) = {json.dumps(each) for each in stated.pop("per_layer_config").values()}
        assert json.loads(heads) == {"head_dim": 32, "num_key_value_heads": 1}
        stated |= {"global_head_dim": 32, "num_global_key_value_heads": 1}

    edit_config(tmp_path, as_released)
    assert ids(tmp_path, "sdpa") == greedy(oracle, PROMPT, 12)
