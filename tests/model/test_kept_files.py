"""What is kept of a checkpoint's small files gives the same model and tokenizer, without transformers."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from aioinfer.config import EngineConfig
from aioinfer.loop.factory import load_tokenizer
from aioinfer.model.inspection import LoadOptions, Opened, open_model
from aioinfer.model.kept_files import KeptConfig, KeptFiles
from aioinfer.native.build import cache_directory
from tests.model.checkpoints import FAMILIES, make_checkpoint
from tests.tiers import PROGRAM, rest, thinned

CPU = torch.device("cpu")
#: with the compiled kernels, which take a minute to make
COMPILED = cache_directory()
MESSAGES = [{"role": "user", "content": "the quick fox"}]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "cache"
    monkeypatch.setenv("AIOINFER_CACHE", str(directory))
    return directory


def with_tokenizer(path: Path, directory: Path) -> Path:
    """The checkpoint ``path`` with the tokenizer of ``directory``."""
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (directory / name).is_file():
            (path / name).write_bytes((directory / name).read_bytes())
    return path


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The files of a tokenizer, with a chat template."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special, alphabet = ["<|end|>", "<|user|>"], pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    raw.train_from_iterator(["the quick brown fox", "naïve 日本語"] * 5, trainer)
    raw.enable_truncation(4)
    fast = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|end|>")
    fast.chat_template = "{% for m in messages %}<|user|>{{ m.content }}{% endfor %}"
    fast.save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def read(config: Any, name: str) -> Any:
    value = getattr(config, name, "absent")
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value


@pytest.mark.parametrize("family", thinned(FAMILIES, 6))
def test_a_kept_config_has_the_same_fields(tmp_path: Path, family: str) -> None:
    make_checkpoint(family, tmp_path)
    _, config = open_model(tmp_path, stored=True)
    record = KeptConfig.record_of(config)
    if record is None:
        assert getattr(config, "is_heterogeneous", False), "only those of several kinds of layers"
        return
    kept = KeptConfig(json.loads(json.dumps(record)))
    names = {name for name in {*dir(config), *config.attribute_map} if name[0] != "_"}
    names -= {"per_layer_config", "torch_dtype", "use_return_dict"}
    for name in names:
        if not callable(getattr(config, name, None)):
            assert read(kept, name) == read(config, name), name
            # What a class declares decides which fields are read.
            if hasattr(config, name):
                assert hasattr(type(kept), name) == hasattr(type(config), name), name


def test_a_kept_longrope_config_has_the_factors_of_a_length(tmp_path: Path) -> None:
    """And keeps its own: what is copied is no part of the class either."""
    make_checkpoint("phi3-longrope", tmp_path)
    _, whole = open_model(tmp_path, True)
    for length in (256, None):
        parts = [open_model(tmp_path, True, keep=keep, length=length)[1] for keep in (False, True, True)]
        assert isinstance(parts[2], KeptConfig)
        assert parts[0].rope_parameters == parts[1].rope_parameters == parts[2].rope_parameters
        assert (parts[2].rope_parameters == whole.rope_parameters) == (length is None)
    one = open_model(tmp_path, True, keep=True)[1]
    other = copy.deepcopy(one)
    other.num_hidden_layers = 1
    other.rope_parameters["short_factor"][0] = 9.0
    assert one.num_hidden_layers == whole.num_hidden_layers
    assert one.rope_parameters == whole.rope_parameters


def test_the_second_opening_reads_what_the_first_one_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model"
    make_checkpoint("qwen3", path)
    options = LoadOptions(device=CPU, cache_weights=True)
    first = Opened.of(path, options)
    with monkeypatch.context() as patch:
        patch.setattr("aioinfer.model.inspection.read_config", lambda _: pytest.fail("it is read again"))
        second = Opened.of(path, options)
    assert isinstance(second.config, KeptConfig)
    assert (second.dtype, second.family, second.architecture) == (
        *(first.dtype, first.family, first.architecture),
    )
    stated = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**stated, "rms_norm_eps": 0.5}))
    assert Opened.of(path, options).config.rms_norm_eps == 0.5
    assert len(list((tmp_path / "cache").iterdir())) == 1, "what was replaced is removed"


def test_a_kept_tokenizer_does_the_same(
    tmp_path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (directory / "config.json").write_text("{}")
    config = EngineConfig(model=str(directory), cache_weights=True)
    first = load_tokenizer(config)
    with monkeypatch.context() as patch:
        patch.setattr("aioinfer.text.fast_tokenizer.token_texts", lambda *_: pytest.fail("made again"))
        second = load_tokenizer(config)
    assert first is not None
    assert second is not None
    fresh = load_tokenizer(EngineConfig(model=str(directory)))
    assert fresh is not None
    for each in (first, second):
        assert each.encode("naïve 日本 the") == fresh.encode("naïve 日本 the")
        assert each.encode_chat(MESSAGES) == fresh.encode_chat(MESSAGES)
        assert each.decode([5, 200, 0], skip_special_tokens=True) == fresh.decode([5, 200, 0])
        assert each.described() == fresh.described()
        for name in ("vocab_size", "eos_token_ids", "added_tokens", "special_tokens", "longest_token"):
            assert getattr(each, name) == getattr(fresh, name), name
        assert each.token_strings([0, 199]) == fresh.token_strings([0, 199])


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"declared": "x", "stated": "{}"}'])
def test_what_was_damaged_is_made_anew(tmp_path: Path, cache: Path, damage: bytes) -> None:
    path = tmp_path / "model"
    make_checkpoint("qwen3", path)
    options = LoadOptions(device=CPU, cache_weights=True)
    Opened.of(path, options)
    [kept] = cache.iterdir()
    whole = kept.read_bytes()
    kept.write_bytes(damage)
    assert Opened.of(path, options).architecture == "Qwen3ForCausalLM"
    assert kept.read_bytes() == whole


def test_what_others_could_have_written_is_not_read(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "model"
    make_checkpoint("qwen3", path)
    files = KeptFiles(path)
    files.keep("config", {"a": 1})
    assert files.find("config") == {"a": 1}
    [kept] = cache.iterdir()
    kept.chmod(0o666)
    assert files.find("config") is None


def test_a_cache_that_cannot_be_written_is_no_error(
    tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_checkpoint("qwen3", tmp_path / "model")
    cache.write_text("not a directory")
    KeptFiles(tmp_path / "model").keep("config", {})
    assert "is not kept for later starts" in caplog.text


def test_what_was_not_used_for_long_is_removed(tmp_path: Path, cache: Path) -> None:
    make_checkpoint("qwen3", tmp_path / "model")
    cache.mkdir()
    for name, age in (("config-a-b.kept", 40 * 86400.0), ("tokenizer-a-b.kept", 9.0)):
        (cache / name).write_bytes(b"")
        os.utime(cache / name, ((cache / name).stat().st_mtime - age,) * 2)
    files = KeptFiles(tmp_path / "model")
    files.keep("config", {})
    assert len(list(cache.iterdir())) == 2
    assert (cache / "tokenizer-a-b.kept").exists()


@rest(PROGRAM)
@pytest.mark.parametrize("format", ["directory", "gguf"])
def test_the_second_start_imports_no_transformers(
    tmp_path: Path, cache: Path, directory: Path, format: str
) -> None:
    from tests.checkpoint.gguf_models import write_gguf
    from tests.model.harness import require

    cache.mkdir()
    for library in COMPILED.glob("*.so"):
        shutil.copy(library, cache)
    require("native")
    path = tmp_path / "model"
    make_checkpoint("qwen3-blocks", path)
    if format == "gguf":
        write_gguf(path, tmp_path / "m.gguf", "Q4_0")
        path = tmp_path / "m.gguf"
    else:
        with_tokenizer(path, directory)
    code = (
        "import sys\nfrom aioinfer import LLM, EngineConfig, SamplingParams\n"
        f"config = EngineConfig(model={str(path)!r}, cache_weights=True, attention_backend='native', "
        "threads=1, num_pages=64, prepare_grammars=False)\n"
        "with LLM(config) as llm:\n"
        "    print(llm.generate([[5, 6, 7]], SamplingParams(max_tokens=6, temperature=0))[0].token_ids)\n"
        "print('transformers' in sys.modules)"
    )
    command = [sys.executable, "-c", code]
    said = [
        subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")
        for _ in range(2)
    ]
    assert said[0][0] == said[1][0]
    assert (said[0][1], said[1][1]) == ("True", "False")
