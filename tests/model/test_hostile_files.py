"""Files of a model that would hold its start, take all memory or lead elsewhere are named."""

from __future__ import annotations

import base64
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from aioinfer.checkpoint.files import Directory, open_checkpoint
from aioinfer.checkpoint.tensors import MOST_JSON
from aioinfer.config import EngineConfig
from aioinfer.errors import ConfigError
from aioinfer.ledger import LEDGER
from aioinfer.model.inspection import LoadOptions
from aioinfer.model.loader import load_model
from aioinfer.model.rope import Rope, longest
from aioinfer.system.memory import Available
from tests.model.checkpoints import make_model

CPU = torch.device("cpu")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The bundled model's files, which may be replaced."""
    path = tmp_path / "model"
    shutil.copytree(EngineConfig().model_path, path)
    return path


def pipe(file: Path) -> None:
    os.mkfifo(file)


def device(file: Path) -> None:
    file.symlink_to("/dev/zero")


def huge(file: Path) -> None:
    with file.open("wb") as opened:
        opened.truncate(MOST_JSON + 1)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("make", [pipe, device, huge])
def test_a_file_that_has_no_end_is_not_waited_for(model: Path, name: str, make: Any) -> None:
    (model / name).unlink(missing_ok=True)
    make(model / name)
    opened = open_checkpoint(model)
    reads = [opened.config, opened.tokenizer, opened.files]
    if make is huge or name == "config.json":
        with pytest.raises(ConfigError, match=rf"{name} cannot be read: (it is no regular|it has \d+ bytes)"):
            [read() for read in reads]
    else:  # as if it were not there
        assert None not in [read() for read in reads]


@pytest.mark.parametrize(
    "name", ["chat_template.jinja", "additional_chat_templates/tools.jinja", "merges.txt", "vocab.txt"]
)
def test_no_text_of_a_model_is_that_of_a_file_elsewhere(model: Path, tmp_path: Path, name: str) -> None:
    secret, file = tmp_path / "secret", model / name
    secret.write_text("{{ 1 }} of mine")
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    file.symlink_to(secret)
    with pytest.raises(ConfigError, match=rf"{file.name}' is a link that leads outside"):
        Directory(model).tokenizer()
    file.unlink()
    file.symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match=rf"{file.name}' is a link that leads outside"):
        Directory(model).tokenizer()


def test_links_of_a_hubs_cache_lead_to_its_blobs(model: Path, tmp_path: Path) -> None:
    repository = tmp_path / "models--org--name"
    snapshot, blobs = repository / "snapshots" / "abc", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (model / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    for file in model.iterdir():
        file.rename(blobs / file.name)
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    assert Directory(snapshot).tokenizer().chat_template == "{{ messages[0].content }}!"


def replace(pattern: Any, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


DOUBLING = [replace({"String": "a"}, "aa")] * 40
GROWING: dict[str, Any] = {
    "doubling": {"normalizer": {"type": "Sequence", "normalizers": DOUBLING}},
    "of the decoder": {"decoder": {"type": "Sequence", "decoders": DOUBLING}},
    "nested": {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [{"type": "Sequence", "normalizers": DOUBLING[:9]}] * 2,
        }
    },
    "one": {"normalizer": replace({"String": "a"}, "b" * 9999)},
    "before everything": {"normalizer": replace({"Regex": "(?=.)"}, "b" * 9999)},
    "expressions": {
        "decoder": {"type": "Sequence", "decoders": [replace({"Regex": "."}, "aa")] * 30},
    },
    "map": {
        "normalizer": {
            "type": "Precompiled",
            "precompiled_charsmap": base64.b64encode(bytes(4) + b"b" * 9999 + b"\0").decode(),
        }
    },
}


@pytest.mark.parametrize("name", GROWING)
def test_a_tokenizer_whose_rules_make_texts_far_longer_is_refused(model: Path, name: str) -> None:
    file = model / "tokenizer.json"
    whole = {**json.loads(file.read_text()), **GROWING[name]}
    whole["added_tokens"][-1] |= {"content": "<a>", "normalized": True, "special": False}
    file.write_text(json.dumps(whole))
    part = next(iter(GROWING[name]))
    with pytest.raises(ConfigError, match=rf"the {part} in tokenizer.json can make a text .* times longer"):
        Directory(model).tokenizer()


def test_rules_of_real_tokenizers_are_not_refused(model: Path) -> None:
    file = model / "tokenizer.json"
    rules = [
        *(replace({"String": quote}, '"') for quote in ("``", "''")),
        *({"type": kind} for kind in ("NFKD", "StripAccents", "Lowercase")),
        {"type": "Prepend", "prepend": "▁"},
        replace({"String": " "}, "▁"),
        replace({"Regex": " {2,}"}, " "),
    ]
    whole = {**json.loads(file.read_text()), "normalizer": {"type": "Sequence", "normalizers": rules}}
    file.write_text(json.dumps(whole))
    assert Directory(model).tokenizer() is not None


@pytest.mark.parametrize(
    ("name", "factors"),
    [
        ("short_factor", [1.0] * 3),
        ("long_factor", [1.0] * 5),
        ("long_factor", []),
        ("short_factor", [1.0, 1.0, 0.0, 1.0]),
        ("long_factor", [1.0, 1.0, 1.0, float("nan")]),
        ("short_factor", "1.0"),
    ],
)
def test_longrope_needs_a_factor_for_each_frequency(tmp_path: Path, name: str, factors: Any) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 10_000.0}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "original_max_position_embeddings": 32}
    make_model("Phi3", {**sizes, "rope_parameters": rope, "partial_rotary_factor": 1.0}, tmp_path, seed=0)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    config["rope_parameters"][name] = factors
    file.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=name):
        load_model(tmp_path, LoadOptions(device=CPU))
    # Classes of transformers do not check it all, and not all of them do.
    wrong = transformers.PreTrainedConfig(**sizes, max_position_embeddings=64)
    wrong.rope_parameters = {**rope, name: factors}
    with pytest.raises(ConfigError, match=f"{name} of longrope must be a list of 4 positive numbers"):
        longest(wrong)


def test_more_positions_than_memory_has_room_for_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    config = transformers.LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=1 << 26)
    monkeypatch.setattr(LEDGER, "available", lambda: Available(1 << 30, "machine"))
    with pytest.raises(ConfigError, match=r"max_position_embeddings: rotary factors of 67108864 positions"):
        Rope(config, 16, 1 << 26, torch.bfloat16, CPU)


@pytest.mark.parametrize("positions", [1, 65_535, 65_537, 200_000])
def test_rotary_factors_are_those_of_all_positions_at_once(positions: int) -> None:
    config = transformers.LlamaConfig(hidden_size=64, num_attention_heads=4)
    angles = torch.arange(positions).float()[:, None] / 10_000 ** (torch.arange(0, 16, 2).float() / 16)
    cos, sin = Rope(config, 16, positions, torch.float32, CPU).table
    assert cos.shape == (positions, 1, 16)
    torch.testing.assert_close(cos[:, 0, :8], angles.cos(), atol=0.02, rtol=0)
    torch.testing.assert_close(sin[:, 0, 8:], angles.sin(), atol=0.02, rtol=0)
