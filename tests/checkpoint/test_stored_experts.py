"""Experts of GGUF files stay as they are stored in native kernels, in the memory of their file."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from aioinfer.checkpoint.files import open_checkpoint
from aioinfer.checkpoint.formats.base import dequantised
from aioinfer.checkpoint.gguf.blocks import BLOCKS
from aioinfer.checkpoint.gguf.file import GGUFFile
from aioinfer.checkpoint.tensors import QuantisedMatrix
from aioinfer.config import EngineConfig
from aioinfer.errors import ConfigError
from aioinfer.llm import LLM
from aioinfer.model.inspection import LoadOptions
from aioinfer.model.loader import load_model
from aioinfer.model.moe.native_experts import NativeExperts
from aioinfer.model.native_linear import NativeLinear
from aioinfer.native.bindings import shared_thread_pool
from aioinfer.params import SamplingParams
from tests.checkpoint.gguf_models import make_family, write_gguf
from tests.checkpoint.test_gguf import blocks, examine
from tests.model.harness import require
from tests.native.support import prompt_logits
from tests.tiers import SECONDS, grid, rest

NATIVE = LoadOptions(device=torch.device("cpu"), dtype="float32", kernels="native")
KINDS = grid(["Q4_0", "MXFP4"], ["Q8_0", "Q5_1"])


def write(tmp_path: Path, family: str, kind: str, **more: bool) -> Path:
    """A family with sizes that blocks divide, as GGUF."""
    sizes = {"hidden_size": 128, "intermediate_size": 64}
    if family == "qwen3-moe":
        sizes["moe_intermediate_size"] = 64
    make_family(family, tmp_path / "hf", **sizes)
    write_gguf(tmp_path / "hf", tmp_path / "m.gguf", kind, **more)
    return tmp_path / "m.gguf"


def experts_of(path: Path, options: LoadOptions = NATIVE) -> list[NativeExperts]:
    model = load_model(path, options)
    assert model.updates is not None
    made = (part[1] for part in model.updates.kernels.made if isinstance(part, tuple))  # type: ignore[attr-defined]
    return [experts for experts in made if isinstance(experts, NativeExperts)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss"])
def test_experts_have_the_numbers_of_their_file_in_its_memory(tmp_path: Path, family: str, kind: str) -> None:
    require("native")
    path = write(tmp_path, family, kind)
    tensors, layers = open_checkpoint(path).tensors(), experts_of(path)
    assert layers
    for index, experts in enumerate(layers):
        parts = [
            tensors.read(f"model.layers.{index}.mlp.experts.{name}_proj") for name in ("gate", "up", "down")
        ]
        gate, up, down = (part.float() for part in parts)
        for expert, (first, second) in enumerate(experts.layers):
            assert torch.equal(first.dequantised(), torch.cat((gate[expert], up[expert])))
            assert torch.equal(second.dequantised(), down[expert])
    stored = sum(
        tensor.data.nbytes for name, tensor in GGUFFile(path).tensors.items() if "_exps.weight" in name
    )
    kept = sum(each.packed.memory[1] for experts in layers for pair in experts.layers for each in pair)
    # Numbers of 5 bits get 6.
    most = 1.2 if kind == "Q5_1" else 1.0
    assert kept <= most * stored


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss"])
def test_dequantised_experts_give_the_ids_of_torch(tmp_path: Path, family: str, kind: str) -> None:
    path, found = write(tmp_path, family, kind), []
    for kernels in ("sdpa", "native"):
        require(kernels)
        config = EngineConfig(
            model=str(path), dtype="float32", attention_backend=kernels, num_pages=64, threads=1,
            quantization="none",
        )  # fmt: skip
        with LLM(config) as llm:
            prompts = [[3, 1, 4, 1, 5, 9, 2][:length] for length in (1, 4, 7)]
            found.append(
                [
                    each.token_ids
                    for each in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8))
                ]
            )
    assert found[0] == found[1]


@pytest.mark.parametrize(("family", "kind"), [("qwen3-moe", "Q4_0"), ("gpt-oss", "MXFP4")])
def test_experts_are_mapped_from_the_cache_as_they_are_quantised(
    tmp_path: Path, family: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    require("native")
    monkeypatch.setenv("AIOINFER_CACHE", str(tmp_path / "cache"))
    path = write(tmp_path, family, kind, fused=family == "qwen3-moe")
    wanted = load_model(path, NATIVE)
    assert "weights of 4 bits as they are stored" in wanted.spec.layer_reason
    for done in ("were cached and mapped", "are mapped from the cache"):
        found = load_model(path, replace(NATIVE, cache_weights=True))
        assert found.spec.layer_reason == f"{wanted.spec.layer_reason}; weights {done}"
        assert torch.equal(prompt_logits(found), prompt_logits(wanted))


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_are_packed_without_loss(kind: str) -> None:
    require("native")
    data = blocks(kind, 33, 512, seed=4)
    rounding, unpack = BLOCKS[kind]
    values, scales, offsets = unpack(data)
    more = None if offsets is None else torch.from_numpy(offsets)
    matrix = QuantisedMatrix(torch.from_numpy(values), torch.from_numpy(scales), more, rounding)
    packed = NativeLinear.given(shared_thread_pool(1), matrix, None, dtype=torch.float32)
    with np.errstate(over="ignore"):
        wanted = torch.from_numpy(gguf.dequantize(data, gguf.GGMLQuantizationType[kind]))
    assert torch.equal(packed.dequantised(), wanted)
    torch.testing.assert_close(dequantised(matrix), wanted, rtol=0, atol=0)


@rest(SECONDS)
@pytest.mark.parametrize(("family", "kind"), [("gpt-oss", "MXFP4"), ("qwen3-moe", "Q4_0")])
def test_damaged_files_of_experts_are_errors_in_words(tmp_path: Path, family: str, kind: str) -> None:
    """Cut, and with any byte of what is said of stacks changed: their shapes, types and places."""
    target = write(tmp_path, family, kind)
    good, rng = target.read_bytes(), random.Random(kind)
    stated = good.index(b"blk.0.ffn_gate_exps")
    damaged = [good[: rng.randrange(stated, len(good))] for _ in range(20)]
    for _ in range(60):
        at = stated + rng.randrange(400)
        damaged.append(good[:at] + bytes([rng.randrange(256)]) + good[at + 1 :])
    refused = 0
    for contents in damaged:
        target.write_bytes(contents)
        try:
            examine(target)
            experts_of(target)
        except ConfigError as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused >= 40


def test_updates_need_experts_that_are_quantised_alike(tmp_path: Path) -> None:
    require("native")
    path = write(tmp_path, "qwen3-moe", "MXFP4")
    other = tmp_path / "other"
    other.mkdir()
    with LLM(EngineConfig(model=str(path), attention_backend="native", num_pages=64, threads=1)) as llm:
        before = llm.generate([[3, 1, 4]], SamplingParams(temperature=0, max_tokens=8))[0].token_ids
        llm.update_weights(str(path))
        assert llm.generate([[3, 1, 4]], SamplingParams(temperature=0, max_tokens=8))[0].token_ids == before
        write_gguf(tmp_path / "hf", other / "m.gguf", "Q4_0")
        with pytest.raises(ConfigError, match="must be quantised as in the checkpoint that was loaded"):
            llm.update_weights(str(other / "m.gguf"))
