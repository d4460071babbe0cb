"""Damaged files of a model directory: a ConfigError that says what is wrong with which, and nothing else."""

from __future__ import annotations

import copy
import functools
import json
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from aioinfer.config import EngineConfig
from aioinfer.errors import ConfigError
from aioinfer.execution.torch_device import TorchDevice
from aioinfer.loop import factory
from tests.model.checkpoints import make_checkpoint
from tests.tiers import FURTHER, SECONDS, grid, rest, scaled

VALUES: list[Any] = [-1, 0, 1.5, "x", None, 10**30, [], True, {}, float("nan")]
#: no model computes with a negative number of these, or with a text
SIZES = {
    *("head_dim", "hidden_size", "intermediate_size", "max_position_embeddings", "num_attention_heads"),
    *("num_hidden_layers", "num_key_value_heads", "rms_norm_eps", "rope_theta", "vocab_size"),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    base = tmp_path_factory.mktemp("checkpoints")

    @functools.cache
    def make(name: str) -> Path:
        path = base / name
        if name == "llada2":
            shutil.copytree(EngineConfig(model="tiny-diffusion").model_path, path)
        else:
            path.mkdir()
            make_checkpoint(name, path)
        (path / "generation_config.json").write_text('{"eos_token_id": 1, "do_sample": true, "top_k": 5}')
        return path

    return make


def load(path: Path) -> None:
    """As an engine does, but for the kernels."""
    config = EngineConfig(
        model=str(path), num_pages=64, attention_backend="sdpa", sampling_backend="torch", threads=1
    )
    device = TorchDevice(config)
    try:
        info = device.open()
        factory.default_params(config, info)
        factory.load_tokenizer(config)
    finally:
        device.close()


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    elif not isinstance(value, list):
        yield path


def changed(value: Any, path: tuple[str, ...], new: Any) -> Any:
    value = copy.deepcopy(value)
    place = value
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = new
    return value


@rest(SECONDS)
@pytest.mark.parametrize(
    "name",
    grid(
        ["qwen3", "gemma4-shared"],
        [
            "qwen3-moe",
            "gpt2",
            "gemma3",
            "persimmon",
            "llada2",
            "granite-hybrid-moe",
            "falcon-h1",
            "nemotron-h",
        ],
    ),
)
def test_a_field_that_makes_no_sense_is_a_config_error(
    name: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    path = tmp_path / name
    shutil.copytree(checkpoint(name), path)
    dice = random.Random(name)
    named = SIZES if name != "persimmon" else {"num_hidden_layers"}  # transformers' code reads others of them
    refused = 0
    for file in ("config.json", "generation_config.json"):
        good = json.loads((path / file).read_text())
        cases = [(leaf, value) for leaf in leaves(good) for value in VALUES]
        for leaf, value in dice.sample(cases, scaled(len(cases)) // 2):
            (path / file).write_text(json.dumps(changed(good, leaf, value)))
            try:
                load(path)
            except ConfigError as error:
                refused += 1
                assert str(error).startswith(("model: ", "max_model_len", "block_size")), (file, leaf, value)
                assert len(str(error)) < 1500
                if leaf[-1] in named and value is not None:
                    assert leaf[-1] in str(error), (leaf, value, error)
            except BaseException as error:
                error.add_note(f"{file}: {leaf} = {value!r}")
                raise
            else:
                assert leaf[-1] not in named or value is None or value == 0 or type(value) is float, leaf
        (path / file).write_text(json.dumps(good))
    assert refused > 5


def header(content: bytes, size: int, text: bytes) -> bytes:
    return struct.pack("<Q", size) + text + content[-64:]


DAMAGES: list[tuple[str, Any]] = [
    ("nothing", lambda content: b""),
    ("half", lambda content: content[: len(content) // 2]),
    ("one byte", lambda content: content[:1]),
    ("zeros", lambda content: bytes(len(content))),
    ("noise", lambda content: random.Random(7).randbytes(2000)),
    ("deep", lambda content: b"[" * 100_000),
    ("a list", lambda content: b"[]"),
    ("a text", lambda content: b'"x"'),
    ("not UTF-8", lambda content: b'{"\xff\xfe": 1}'),
    ("a header too long", lambda content: header(content, 1 << 62, b"{}")),
    ("a header that is no object", lambda content: header(content, 2, b"[]")),
    (
        "offsets beyond the end",
        lambda content: header(
            content,
            90,
            b'{"a": {"dtype": "F32", "shape": [1000000], "data_offsets": [0, 4000000]}}'.ljust(90),
        ),
    ),
]


@pytest.mark.parametrize(
    "file",
    [
        "config.json",
        *grid(["model.safetensors"], ["generation_config.json", "model.safetensors.index.json"], FURTHER),
        "tokenizer.json",
        "tokenizer_config.json",
    ],
)
@pytest.mark.parametrize("damage", [name for name, _ in DAMAGES])
def test_a_damaged_file_is_a_config_error(
    damage: str, file: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    path = tmp_path / "model"
    shutil.copytree(checkpoint("qwen3"), path)
    bundled = EngineConfig().model_path
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bundled / name, path / name)
    content = (path / file).read_bytes() if (path / file).exists() else b"{}"
    (path / file).write_bytes(dict(DAMAGES)[damage](content))
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.gguf", b"GGUF", r"x\.gguf cannot be read as GGUF: it was cut"),
        ("adapter_config.json", b"{}", "is a LoRA adapter"),
        ("readme", b"", r"has no config\.json"),
    ],
)
def test_a_directory_of_something_else_is_called_by_its_name(
    name: str, content: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("{}/model.gguf", r"model\.gguf cannot be read as GGUF"),
        ("{}/model.safetensors", "is a file; a GGUF file, or a directory with"),
        ("nobody/no-such-model", r"nobody/no-such-model is neither.*Downloads are not allowed"),
        ("no-such-model", r"no bundled model of that name \(tiny-chat"),
        ("x" * 5000, "cannot be read"),
    ],
)
def test_a_path_that_is_no_directory_is_told_apart(path: str, message: str, tmp_path: Path) -> None:
    for name in ("model.gguf", "model.safetensors"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=message):
        load(Path(path.format(tmp_path)))
