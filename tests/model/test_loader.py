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
from aioinfer.params import SamplingParams
from tests.model import harness
from tests.model.checkpoints import greedy, make_checkpoint
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
    with LLM(EngineConfig(model=str(tmp_path), threads=1)) as llm:
        (result,) = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=8))
    assert result.token_ids == greedy(oracle, [1, 2, 3], 8)


def test_the_checkpoint_says_its_dtype_unless_the_caller_does(tmp_path: Path) -> None:
    make_checkpoint("qwen3", tmp_path, torch.bfloat16)
    assert load(tmp_path).spec.dtype == torch.bfloat16
    assert load(tmp_path, dtype="float32").spec.dtype == torch.float32


def drop(tensors: dict[str, torch.Tensor], ending: str) -> None:
    for name in [name for name in tensors if name.endswith(ending)]:
        del tensors[name]


def broken(make: Callable[[Path], None], message: str) -> Any:
    return pytest.param(make, message, id=message)


def edit_config(**changes: Any) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        config = json.loads((path / "config.json").read_text())
        config.update(changes)
        (path / "config.json").write_text(json.dumps(config))

    return edit


def edit_weights(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        tensors = load_file(path / "model.safetensors")
        change(tensors)
        save_file(tensors, path / "model.safetensors")

    return edit


@pytest.mark.parametrize(
    ("make", "message"),
    [
        broken(lambda path: (path / "config.json").unlink(), "no config.json"),
        broken(lambda path: (path / "model.safetensors").unlink(), "no model.safetensors"),
        broken(lambda path: (path / "config.json").write_text("{"), "cannot be read"),
        broken(edit_config(architectures=None), "names no architecture"),
        broken(edit_config(quantization_config={"quant_method": "gptq", "bits": 4}), "quantised"),
        broken(edit_config(model_type="nonsense"), "cannot be used"),
        broken(edit_config(architectures=["NonsenseForCausalLM"]), "no causal language model"),
        broken(lambda path: (path / "generation_config.json").write_text("{"), "generation_config.json"),
        broken(
            lambda path: (path / "model.safetensors.index.json").write_text("{"), "index.json cannot be read"
        ),
        broken(lambda path: (path / "model.safetensors.index.json").write_text("{}"), "no weight_map"),
        broken(
            lambda path: (path / "model.safetensors.index.json").write_text(
                '{"weight_map": {"a": "gone.safetensors"}}'
            ),
            "gone.safetensors, which is missing",
        ),
        broken(lambda path: (path / "model.safetensors").rename(path / "weights.bin"), "are not loaded"),
        broken(edit_weights(lambda tensors: tensors.pop("model.norm.weight")), "no tensor model.norm.weight"),
        broken(
            edit_weights(lambda tensors: tensors.update({"model.norm.weight": torch.ones(3)})),
            "model.norm.weight is shaped",
        ),
        broken(edit_weights(lambda tensors: tensors.update(extra=torch.ones(3))), "unexpected tensors"),
        broken(lambda path: (path / "model.safetensors").write_bytes(b"nonsense"), "cannot be read"),
    ],
)
def test_a_broken_checkpoint_says_what_is_wrong(
    tmp_path: Path, make: Callable[[Path], None], message: str
) -> None:
    make_checkpoint("qwen3", tmp_path)
    make(tmp_path)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path)


@pytest.mark.parametrize(
    ("family", "ending", "lacking"),
    [
        ("qwen2", "_proj.bias", "q_proj.bias"),
        ("qwen3", "_norm.weight", "q_norm.weight"),
        ("llama-biases", "mlp.down_proj.bias", "down_proj.bias"),
        ("llama-biases", "o_proj.bias", "o_proj.bias"),
        ("lfm2-biases", "conv.conv.bias", "conv.conv.bias"),
        ("lfm2-biases", "conv.in_proj.bias", "conv.in_proj.bias"),
        ("lfm2", "conv.conv.weight", "conv.conv.weight"),
        ("lfm2-moe", "expert_bias", "expert_bias"),
        ("qwen3.5", "A_log", "A_log"),
        ("qwen3.5", "dt_bias", "dt_bias"),
        ("qwen3.5", "in_proj_a.weight", "in_proj_a.weight"),
        ("qwen3.5", "linear_attn.norm.weight", "linear_attn.norm.weight"),
        ("qwen3.5-moe", "shared_expert_gate.weight", "shared_expert_gate.weight"),
        ("qwen3-next", "in_proj_qkvz.weight", "in_proj_qkvz.weight"),
    ],
)
def test_what_the_config_calls_for_must_be_there(
    tmp_path: Path, family: str, ending: str, lacking: str
) -> None:
    make_checkpoint(family, tmp_path)
    edit_weights(lambda tensors: drop(tensors, ending))(tmp_path)
    with pytest.raises(ConfigError, match=f"no tensor .*{lacking}"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("lfm2", "model.layers.0.conv.conv.weight"),
        ("lfm2", "model.layers.1.self_attn.q_layernorm.weight"),
        ("qwen3.5", "model.layers.0.linear_attn.conv1d.weight"),
        ("qwen3.5", "model.layers.0.linear_attn.A_log"),
        ("qwen3.5", "model.layers.1.self_attn.q_proj.weight"),
        ("qwen3-next", "model.layers.0.linear_attn.in_proj_ba.weight"),
        ("qwen3.5-moe", "model.layers.0.mlp.shared_expert.down_proj.weight"),
    ],
)
def test_a_tensor_of_another_shape_is_named(tmp_path: Path, family: str, name: str) -> None:
    make_checkpoint(family, tmp_path)
    edit_weights(lambda tensors: tensors.update({name: tensors[name][1:].contiguous()}))(tmp_path)
    with pytest.raises(ConfigError, match=rf"{name} is shaped .*the config says"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("lfm2", {"conv_L_cache": 0}, "conv_L_cache in config.json must be an integer in"),
        ("lfm2", {"norm_eps": -1.0}, "norm_eps in config.json must be a positive number"),
        ("lfm2", {"block_multiple_of": 0}, "block_multiple_of in config.json must be an integer in"),
        ("lfm2", {"block_ff_dim": 0}, "block_ff_dim in config.json must be an integer in"),
        ("qwen3.5", {"linear_num_key_heads": 0}, "linear_num_key_heads in config.json must be an integer in"),
        ("qwen3.5", {"linear_key_head_dim": 32}, "in_proj_qkv.weight is shaped"),
        ("qwen3.5", {"linear_num_key_heads": 3}, "4 heads of values are no multiple of 3"),
        ("qwen3.5", {"layer_types": ["linear_attention"] * 2}, "the config"),
        ("lfm2", {"layer_types": ["conv"] * 4}, "with no attention at all is not supported"),
    ],
)
def test_a_config_that_does_not_fit_is_one_error(
    tmp_path: Path, family: str, change: dict[str, Any], message: str
) -> None:
    make_checkpoint(family, tmp_path)
    edit_config(**change)(tmp_path)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path)


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


def test_a_window_in_the_config_of_a_family_without_windows_is_ignored(tmp_path: Path) -> None:
    oracle = make_checkpoint("llama-gqa-tied", tmp_path)
    edit_config(sliding_window=4)(tmp_path)
    prompt = list(range(1, 20))
    (sequence,) = Driver(load(tmp_path), chunk=5).run([prompt], 8)
    assert sequence.ids[len(prompt) :] == greedy(oracle, prompt, 8)


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


def test_an_unknown_dtype_is_refused(tmp_path: Path) -> None:
    make_checkpoint("qwen3", tmp_path)
    with pytest.raises(ConfigError, match="int8"):
        load(tmp_path, dtype="int8")


def test_a_directory_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="/no/such/place"):
        load(Path("/no/such/place"))


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


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("gemma2", {"final_logit_softcapping": 0}, "final_logit_softcapping"),
        ("gemma2", {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping"),
        ("gemma3", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        ("gpt2-wide", {"n_inner": -64}, "n_inner"),
        ("gpt2-wide", {"n_head": 3}, "n_embd, 64, is no multiple of n_head, 3"),
        ("olmo2", {"num_key_value_heads": 3}, "4 heads of queries are no multiple of 3 heads of keys"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers of the config has 1 entries for 3 layers"),
        ("llama-mqa", {"num_hidden_layers": 2**31 - 1}, "num_hidden_layers"),
    ],
)
def test_numbers_that_no_model_has_are_named(
    tmp_path: Path, family: str, changes: dict[str, Any], message: str
) -> None:
    make_checkpoint(family, tmp_path)
    edit_config(**changes)(tmp_path)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path)


def test_fields_that_the_code_of_a_model_type_does_not_read_are_not_believed(tmp_path: Path) -> None:
    oracle = make_checkpoint("gpt2-wide", tmp_path)
    edit_config(head_dim=32, num_key_value_heads=2)(tmp_path)
    (sequence,) = Driver(load(tmp_path), chunk=5).run([[1, 2, 3]], 6)
    assert sequence.ids[3:] == greedy(oracle, [1, 2, 3], 6)


def test_a_soft_cap_in_the_config_of_gemma_3_is_not_one_of_scores(tmp_path: Path) -> None:
    oracle = make_checkpoint("gemma3", tmp_path)
    edit_config(attn_logit_softcapping=1.0)(tmp_path)
    (sequence,) = Driver(load(tmp_path), chunk=5).run([[1, 2, 3]], 6)
    assert sequence.ids[3:] == greedy(oracle, [1, 2, 3], 6)


def test_a_rotation_beside_those_of_types_of_layers_is_not_used(tmp_path: Path) -> None:
    """What transformers makes of a config with one rotation: that, and defaults for each type."""
    oracle = make_checkpoint("gemma3", tmp_path)
    edit_config(rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 100.0})(tmp_path)
    wanted = type(oracle).from_pretrained(tmp_path).eval()
    prompt = list(range(1, 20))
    (sequence,) = Driver(load(tmp_path), chunk=5).run([prompt], 6)
    assert sequence.ids[len(prompt) :] == greedy(wanted, prompt, 6)
