"""Loading: files in every legal shape, and a clear word for every illegal one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from aioinfer.config import EngineConfig
from aioinfer.errors import ConfigError
from aioinfer.llm import LLM
from aioinfer.model.native import NativeDecoder
from tests.model import harness
from tests.model.checkpoints import assert_greedy, greedy, make_checkpoint
from tests.model.harness import Driver

CPU = torch.device("cpu")


def load(path: Path, *told: Any, **options: Any) -> Any:
    return harness.load(path, *told, **{"dtype": "auto", **options})


def test_sharded_files_load_like_a_single_one(tmp_path: Path) -> None:
    oracle = make_checkpoint("qwen3", tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    seen: list[tuple[str, int, int]] = []
    load(tmp_path, lambda *args: seen.append(args))
    assert seen[-1][0] == "weights"
    assert seen[-1][1] == seen[-1][2]
    assert_greedy(tmp_path, [[1, 2, 3]], 8, oracle)


def test_the_checkpoint_says_its_dtype_unless_the_caller_does(tmp_path: Path) -> None:
    make_checkpoint("qwen3", tmp_path, torch.bfloat16)
    assert load(tmp_path).spec.dtype == torch.bfloat16
    assert load(tmp_path, dtype="float32").spec.dtype == torch.float32


def edit_config(**changes: Any) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        config = json.loads((path / "config.json").read_text())
        config.update(changes)
        config = {name: value for name, value in config.items() if value is not None or name not in changes}
        (path / "config.json").write_text(json.dumps(config))

    return edit


def test_code_in_the_directory_is_neither_run_nor_asked_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Left to itself transformers asks on the terminal whether to run it."""
    make_checkpoint("qwen3", tmp_path)
    (tmp_path / "custom.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    changes = {
        "model_type": "custom",
        "auto_map": {"AutoConfig": "custom.Config", "AutoModelForCausalLM": "custom.Model"},
    }
    edit_config(**changes)(tmp_path)
    monkeypatch.setattr("builtins.input", lambda *args: pytest.fail("asked"))
    with pytest.raises(ConfigError, match="cannot be used"):
        load(tmp_path)
    assert not (tmp_path / "ran").exists()


def _as_released(stated: dict[str, Any]) -> dict[str, Any]:
    (heads,) = {json.dumps(each) for each in stated["per_layer_config"].values()}
    assert json.loads(heads) == {"head_dim": 32, "num_key_value_heads": 1}
    return {"per_layer_config": None, "global_head_dim": 32, "num_global_key_value_heads": 1}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        # A window of a family without windows, and fields that the code of a model type does not read.
        ("llama-gqa-tied", {"sliding_window": 4}),
        ("gpt2-wide", {"head_dim": 32, "num_key_value_heads": 2}),
        # Gemma 3 has no cap of scores; a rotation beside those of types of layers is not used.
        ("gemma3", {"attn_logit_softcapping": 1.0}),
        ("gemma3", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 100.0}}),
        # Images, of which there are none, may attend both ways.
        ("gemma4-keys", {"use_bidirectional_attention": "vision"}),
        # Releases state the heads of global layers by themselves.
        ("gemma4-keys", _as_released),
    ],
)
def test_a_config_is_read_as_transformers_reads_it(tmp_path: Path, family: str, changes: Any) -> None:
    oracle = make_checkpoint(family, tmp_path)
    stated = json.loads((tmp_path / "config.json").read_text())
    edit_config(**(changes(stated) if callable(changes) else changes))(tmp_path)
    wanted = type(oracle).from_pretrained(tmp_path, attn_implementation="eager").eval()
    assert_greedy(tmp_path, [list(range(1, 20))], 8, wanted)


def test_weights_in_the_right_dtype_stay_mapped(tmp_path: Path) -> None:
    make_checkpoint("qwen3", tmp_path)
    file = str(tmp_path / "model.safetensors")

    def mapped(dtype: str) -> bool:
        model = load(tmp_path, dtype=dtype, kernels="sdpa")
        address = model._words.data_ptr()
        with open("/proc/self/maps") as maps:
            ranges = [line.split()[0].split("-") for line in maps if line.rstrip().endswith(file)]
        return any(int(low, 16) <= address < int(high, 16) for low, high in ranges)

    if not Path("/proc/self/maps").exists():
        pytest.skip("no /proc")
    assert mapped("float32")
    assert not mapped("bfloat16")


@pytest.mark.native
def test_of_a_packed_checkpoint_nothing_stays_mapped(tmp_path: Path) -> None:
    make_checkpoint("qwen3", tmp_path)
    model = load(tmp_path, kernels="native")
    assert isinstance(model, NativeDecoder)
    assert str(tmp_path / "model.safetensors") not in Path("/proc/self/maps").read_text()


def test_end_tokens_come_from_the_generation_config_first(tmp_path: Path) -> None:
    make_checkpoint("qwen3", tmp_path)
    edit_config(eos_token_id=3)(tmp_path)
    file = tmp_path / "generation_config.json"
    for text, expected in (("{}", {3}), ('{"eos_token_id": 5}', {5}), ('{"eos_token_id": [5, 7]}', {5, 7})):
        file.write_text(text)
        assert load(tmp_path).spec.eos_token_ids == expected
    file.unlink()
    assert load(tmp_path).spec.eos_token_ids == {3}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_model_len": 10_000}, "max_model_len"),
        ({"max_model_len": 256, "num_pages": 2}, "pages hold"),
        ({"device": "cuda"}, "cuda"),
    ],
)
def test_settings_that_the_model_cannot_meet_are_refused(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    if settings.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    make_checkpoint("qwen3", tmp_path)
    with pytest.raises(ConfigError, match=message):
        LLM(EngineConfig(model=str(tmp_path), **settings))


@pytest.mark.parametrize("family", ["smollm3", "gpt2-wide", "gemma2"])
def test_a_head_of_its_own_is_used_though_the_config_says_tied(tmp_path: Path, family: str) -> None:
    """As transformers does; a head that is the embedding is not kept twice."""
    oracle = make_checkpoint(family, tmp_path)
    edit_config(tie_word_embeddings=True)(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    ends = "embed_tokens.weight", "wte.weight"
    (words,) = (value for name, value in tensors.items() if name.endswith(ends))
    prompt, found = list(range(1, 20)), []
    for head in (words.clone(), torch.randn(words.shape, generator=torch.Generator().manual_seed(7))):
        save_file({**tensors, "lm_head.weight": head}, file, metadata={"format": "pt"})
        wanted = type(oracle).from_pretrained(tmp_path, attn_implementation="eager").eval()
        (sequence,) = Driver(load(tmp_path), chunk=5).run([prompt], 8)
        found.append(sequence.ids[len(prompt) :])
        assert found[-1] == greedy(wanted, prompt, 8)
    assert found[0] != found[1]
