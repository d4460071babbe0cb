"""What differs between the architectures of GGUF files: metadata, defaults, norms and windows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from aioinfer.checkpoint.files import open_checkpoint
from aioinfer.checkpoint.gguf.config import config_of
from aioinfer.checkpoint.gguf.file import GGUFFile
from aioinfer.checkpoint.gguf.tensors import GGUFTensors
from aioinfer.config import EngineConfig
from aioinfer.errors import ConfigError
from aioinfer.llm import LLM
from aioinfer.params import SamplingParams
from tests.checkpoint.gguf_models import EVERY, make_family, write_gguf
from tests.model.checkpoints import assert_greedy, greedy_each
from tests.model.harness import load, require
from tests.tiers import FURTHER, points

#: those whose blocks are multiplied as they are stored
BLOCKS = ["gemma-mqa", "gemma2", "gemma3", "smollm3-interval", "olmo2", "olmo3", "glm4", "phi3"]
PAIRS = [(family, kind) for kind in ("Q8_0", "Q4_1") for family in BLOCKS]


def written(family: str, tmp_path: Path) -> None:
    """A family as GGUF at m.gguf."""
    make_family(family, tmp_path / "hf")
    write_gguf(tmp_path / "hf", tmp_path / "m.gguf")


@pytest.mark.parametrize("family", EVERY)
def test_metadata_that_are_missing_or_of_another_type_are_one_error(tmp_path: Path, family: str) -> None:
    written(family, tmp_path)
    file = GGUFFile(tmp_path / "m.gguf")
    config, prefix = config_of(file), file.metadata["general.architecture"]
    for name in [name for name in file.metadata if name.startswith(f"{prefix}.")]:
        if name.startswith("nemotron_h.expert_"):
            continue  # the converter writes them of models without experts, too
        whole = dict(file.metadata)
        wrong = 1 if isinstance(whole[name], str) else "wrong"
        file.metadata[name] = wrong
        with pytest.raises(ConfigError, match=f"{name} of the GGUF file is {type(wrong).__name__}"):
            config_of(file)
        del file.metadata[name]
        try:
            # Some have defaults.
            config_of(file)
        except ConfigError as error:
            # Without the size of keys another one follows from other metadata, and so does a rule of experts.
            others = "another size than its keys", "chooses experts in a way that is not supported"
            assert any(text in str(error) for text in (f"does not state {name}", *others))
        file.metadata.clear()
        file.metadata.update(whole)
    assert config_of(file) == config


@pytest.mark.parametrize("family", EVERY)
def test_numbers_that_make_no_sense_are_an_error_or_a_config(tmp_path: Path, family: str) -> None:
    """Nothing else is raised, and nothing is made as large as a number says."""
    written(family, tmp_path)
    file = GGUFFile(tmp_path / "m.gguf")
    prefix, refused = file.metadata["general.architecture"], 0
    whole = dict(file.metadata)
    for name in [
        name for name in whole if name.startswith(f"{prefix}.") and not isinstance(whole[name], str)
    ]:
        for number in (0, -1, 1, 2**31, 2**63, 0.0, -1.0, 1e-45, 1e38, float("inf"), float("nan"), [], [1.5]):
            file.metadata[name] = number
            try:
                config_of(file)
            except ConfigError as error:
                refused += 1
                assert str(error)
        file.metadata[name] = whole[name]
    assert refused > 10


@pytest.mark.parametrize(
    ("family", "kind"),
    points(
        [*(("qwen3-blocks", kind) for kind in ("Q8_0", "Q4_0", "Q4_1", "F16", "BF16")), *PAIRS[::3]],
        [pair for at, pair in enumerate(PAIRS) if at % 3],
        FURTHER,
    ),
)
def test_blocks_of_a_family_are_multiplied_as_they_are(tmp_path: Path, family: str, kind: str) -> None:
    """Native kernels with stored numbers, and with dequantised ones, against transformers with the latter."""
    require("native")
    oracle = make_family(family, tmp_path / "hf", hidden_size=64, intermediate_size=96)
    write_gguf(tmp_path / "hf", tmp_path / "m.gguf", kind)
    tensors = open_checkpoint(tmp_path / "m.gguf").tensors()
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            parameter.copy_(tensors.read(name).float())
    digits = [3, 1, 4, 1, 5, 9, 2, 6]
    prompts = [[*digits[:length], last] for length in (1, 4, 8) for last in (7, 50, 100)]
    expected = [oracle(torch.tensor([prompt])).logits[0, -1].detach().log_softmax(0) for prompt in prompts]
    for quantization in ("auto", "none"):
        config = EngineConfig(
            model=str(tmp_path / "m.gguf"), dtype="float32", attention_backend="native", num_pages=64,
            threads=1, quantization=quantization,
        )  # fmt: skip
        with LLM(config) as llm:
            results = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12, logprobs=5))
        if quantization == "none" or kind in ("F16", "BF16"):
            found = [result.token_ids for result in results]
            assert found == greedy_each(oracle, prompts, 12, found)
        errors = [
            abs(logprob - float(wanted[token]))
            for result, wanted in zip(results, expected, strict=True)
            for token, logprob in (result.logprobs or [])[0].top
        ]
        # Activations are rounded to 8 bits where weights are; of other weights it would be some units.
        assert sum(errors) / len(errors) < (0.2 if quantization == "auto" else 1e-3), quantization


def test_a_weight_that_the_model_does_not_have_is_an_error(tmp_path: Path) -> None:
    """A norm of heads, which Gemma 2 does not have, though Gemma 3 has it under this name."""
    make_family("gemma2", tmp_path / "hf")
    write_gguf(tmp_path / "hf", tmp_path / "m.gguf", further={"blk.1.attn_q_norm.weight": torch.ones(16)})
    with pytest.raises(ConfigError, match=r"1 unexpected tensors, first model\.layers\.1\.self_attn\.q_norm"):
        LLM(EngineConfig(model=str(tmp_path / "m.gguf"), num_pages=64, threads=1))


def config_with(file: GGUFFile, **changes: Any) -> dict[str, Any]:
    """The config with metadata of the architecture changed, or left out where they are None."""
    whole, prefix = dict(file.metadata), file.metadata["general.architecture"]
    try:
        for name, value in changes.items():
            key = f"{prefix}.{name.replace('__', '.')}"
            file.metadata.pop(key, None)
            if value is not None:
                file.metadata[key] = value
        return config_of(file)
    finally:
        file.metadata.clear()
        file.metadata.update(whole)


def test_gemmas_windows_and_scales_are_those_of_its_releases(tmp_path: Path) -> None:
    """With what the converter writes of them: no pattern, and no scale of queries."""
    plain = {"attention__scale": None, "attention__sliding_window_pattern": None}
    for family, largest, period in (("gemma2", 46, 2), ("gemma3", 62, 6)):
        written(family, tmp_path / family)
        file = GGUFFile(tmp_path / family / "m.gguf")
        head_dim, per_head = (16, 64 // 4) if family == "gemma2" else (32, 64 // 4)
        assert config_with(file, **plain)["query_pre_attn_scalar"] == head_dim
        config = config_with(file, **plain, block_count=largest)
        assert config["query_pre_attn_scalar"] == per_head
        full = [index for index, kind in enumerate(config["layer_types"]) if kind == "full_attention"]
        assert full == list(range(period - 1, largest, period))
        config = config_with(file, **plain, attention__sliding_window=0)
        assert (config["sliding_window"], set(config["layer_types"])) == (None, {"full_attention"})
    assert config_with(file, **plain, attention__sliding_window=None)["sliding_window"] is None
    bases = config_with(file, **plain, rope__freq_base_swa=None, rope__freq_base=1e6)["rope_parameters"]
    assert bases["sliding_attention"] == {"rope_type": "default", "rope_theta": 10_000.0}
    assert bases["full_attention"]["rope_theta"] == 1e6
    assert bases["full_attention"]["factor"] == 8


def test_metadata_that_describe_no_gemma_are_refused(tmp_path: Path) -> None:
    written("gemma3", tmp_path)
    file = GGUFFile(tmp_path / "m.gguf")
    for message, changes in (
        ("pattern has 2 values for 3 layers", {"attention__sliding_window_pattern": [True, 0]}),
        ("sliding_window of the GGUF file is negative", {"attention__sliding_window": -1}),
        ("gemma3.attention.scale of the GGUF file is 0.3", {"attention__scale": 0.3}),
        ("gemma3.attention.scale of the GGUF file is -1", {"attention__scale": -1.0}),
        ("bidirectional attention", {"attention__causal": False}),
        ("its keys", {"attention__value_length": 8}),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            config_with(file, **changes)
    pattern = config_with(file, attention__sliding_window_pattern=2)["layer_types"]
    assert pattern == ["sliding_attention", "full_attention", "sliding_attention"]


def test_variants_of_glm_4_with_other_rows_or_layers_are_refused(tmp_path: Path) -> None:
    written("glm4", tmp_path)
    file = GGUFFile(tmp_path / "m.gguf")
    assert config_with(file, rope__dimension_sections=[0, 0, 0, 0]) == config_of(file)
    further = {"nextn_predict_layers": 1, "block_count": 4}
    for changes in ({"rope__dimension_sections": [8, 12, 12, 0]}, further):
        with pytest.raises(ConfigError, match="GGUF files of GLM-4 for images"):
            config_with(file, **changes)


def test_the_part_of_a_head_that_rotates_is_not_its_size(tmp_path: Path) -> None:
    """Phi-3's files state no size of heads; transformers' default for GLM-4 is half of each."""
    written("phi3-partial-rotary", tmp_path)
    config = config_of(GGUFFile(tmp_path / "m.gguf"))
    assert config["head_dim"] == 32
    assert config["rope_parameters"]["partial_rotary_factor"] == 0.75
    written("glm4", tmp_path)
    file = GGUFFile(tmp_path / "m.gguf")
    assert config_of(file)["rope_parameters"]["partial_rotary_factor"] == 0.5
    whole = config_with(file, rope__dimension_count=None)
    assert whole["rope_parameters"]["partial_rotary_factor"] == 1.0


def test_factors_of_longrope_are_tensors(tmp_path: Path) -> None:
    oracle = make_family("phi3-longrope", tmp_path / "hf")
    file = tmp_path / "m.gguf"
    write_gguf(tmp_path / "hf", file)
    prompt = [(7 * at * at + 3) % 200 for at in range(150)]
    assert_greedy(file, [prompt[:50], prompt[:110]], 6, oracle, chunk=40)
    assert_greedy(file, [prompt[:129], prompt], 6, oracle, chunk=40, max_model_len=200)
    assert load(file).spec.max_model_len == 128
    assert load(file, max_model_len=200).spec.max_model_len == 256


def test_factors_of_longrope_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    make_family("phi3", tmp_path / "hf")
    file = tmp_path / "m.gguf"
    four, eight = torch.ones(4), torch.ones(8)
    for message, short, long in (
        (r"has no tensor rope_factors_short", None, eight),
        (r"has no tensor rope_factors_long", eight, None),
        (r"rope_factors_long.weight is F32 \(4,\)", eight, four),
        (r"rope_factors_short.weight is F16 \(8,\)", eight.half(), eight),
        (r"short_factor of longrope must be a list of 8 positive numbers", eight * 0, eight),
        (r"long_factor of longrope must be a list of 8 positive numbers", eight, eight / 0),
    ):
        factors = {"short": short, "long": long}
        further = {f"rope_factors_{name}.weight": it for name, it in factors.items() if it is not None}
        write_gguf(tmp_path / "hf", file, further=further)
        with pytest.raises(ConfigError, match=message):
            load(file)


def test_olmo_without_a_window_is_olmo_2(tmp_path: Path) -> None:
    written("olmo3-yarn", tmp_path)
    file = GGUFFile(tmp_path / "m.gguf")
    assert config_of(file)["model_type"] == "olmo3"
    assert config_of(file)["rope_parameters"]["full_attention"]["attention_factor"] == 1.5
    period = config_with(file, attention__sliding_window_pattern=None)["layer_types"]
    assert [kind == "full_attention" for kind in period] == [False, False, False, True]
    for window in (None, 0):
        config = config_with(file, attention__sliding_window=window)
        assert config["architectures"] == ["Olmo2ForCausalLM"]
        assert config["rope_parameters"]["rope_type"] == "yarn"


FUSED = ["llama-biases", "qwen2", "qwen3", "gemma2", "smollm3-interval", "olmo2", "glm4", "llama-mha-untied"]


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize("family", FUSED)
def test_queries_keys_and_values_may_be_one_tensor(tmp_path: Path, family: str, kind: str) -> None:
    """Of weights and biases, in the order that the converter reorders rows to before it fuses them."""
    make_family(family, tmp_path / "hf", hidden_size=64, intermediate_size=96)
    write_gguf(tmp_path / "hf", tmp_path / "m.gguf", kind)
    write_gguf(tmp_path / "hf", tmp_path / "fused.gguf", kind, fused=True)
    file = GGUFFile(tmp_path / "fused.gguf")
    assert "blk.0.attn_qkv.weight" in file.tensors
    assert "blk.0.attn_q.weight" not in file.tensors
    plain, fused = (open_checkpoint(tmp_path / name) for name in ("m.gguf", "fused.gguf"))
    assert plain.config() == fused.config()
    one, other = plain.tensors(), fused.tensors()
    assert set(one.names) == set(other.names)
    for name in one.names:
        assert one.shape(name) == other.shape(name)
        assert torch.equal(one.read(name), other.read(name))
        assert one.rounding(name) == other.rounding(name)
        if one.rounding(name) is not None:
            assert torch.equal(one.quantised(name).values, other.quantised(name).values)


def test_gates_and_inputs_of_experts_may_be_one_tensor(tmp_path: Path) -> None:
    oracle = make_family("qwen3-moe", tmp_path / "hf")
    write_gguf(tmp_path / "hf", tmp_path / "m.gguf", fused=True)
    assert "blk.0.ffn_gate_up_exps.weight" in GGUFFile(tmp_path / "m.gguf").tensors
    assert_greedy(tmp_path / "m.gguf", [[3, 1, 4, 1, 5], [9, 2]], 6, oracle)


def test_fused_rows_that_do_not_fit_the_heads_are_an_error(tmp_path: Path) -> None:
    make_family("qwen2", tmp_path / "hf")
    write_gguf(tmp_path / "hf", tmp_path / "m.gguf", fused=True)
    file = GGUFFile(tmp_path / "m.gguf")
    with pytest.raises(ConfigError, match=r"blk.0.attn_qkv.bias has 96 rows for 5 and 2 heads"):
        GGUFTensors(file, {**config_of(file), "num_attention_heads": 5, "num_key_value_heads": 2})
