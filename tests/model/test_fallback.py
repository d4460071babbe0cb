"""Models through transformers: those that run, and those that would run wrongly and are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from aioinfer.errors import ConfigError
from aioinfer.model import shallow, transformers_model
from aioinfer.model.decoder import Decoder
from aioinfer.model.inspection import LoadOptions, inspect_model
from aioinfer.model.loader import load_model
from aioinfer.model.native import NativeDecoder
from aioinfer.model.selfcheck import record
from aioinfer.model.transformers_model import TransformersLM
from aioinfer.native.bindings import native_unsupported
from tests.model.checkpoints import FAMILIES, NATIVE, OWN, RECURRENT, make_model
from tests.model.harness import load
from tests.tiers import SECONDS, grid, rest, thinned

Checkpoint = Callable[[str], tuple[Path, Any]]
CPU = torch.device("cpu")
SMALL = {
    "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 64,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
}  # fmt: skip
STATE_SPACE = {
    "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
}  # fmt: skip
SPARSE = {
    "head_dim": 8, "index_n_heads": 2, "index_head_dim": 8, "index_block_size": 128,
    "layer_types": ["full_attention", "minimax_m3_sparse"],
}  # fmt: skip
#: what native kernels compute as a whole: inner sizes of the others' experts are no multiples of 16
WHOLE = [family for family in NATIVE if family not in ("qwen3-moe", "qwen3-moe-window")]
BUFFERS = ("layer_scalar", "e_score_correction_bias")
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}


@pytest.mark.parametrize("family", thinned(FAMILIES, 3))
def test_who_runs_what(checkpoint: Checkpoint, family: str) -> None:
    path, oracle = checkpoint(family)
    for force in (False, True)[: 1 if "kv_lora_rank" in FAMILIES[family][1] else 2]:
        model = load(path, force_transformers=force)
        own = NativeDecoder if family in WHOLE and native_unsupported() is None else Decoder
        assert isinstance(model, own if family in OWN and not force else TransformersLM)
        spec, config = model.spec, oracle.config
        assert spec.num_layers == config.num_hidden_layers
        # transformers' code hands over the keys that layers share in every one of them.
        shared = 0 if force else getattr(config, "num_kv_shared_layers", 0)
        assert len(spec.kv_layers) == config.num_hidden_layers - shared
        assert spec.hidden_size == config.hidden_size
        assert spec.vocab_size == config.vocab_size
        # Linear scaling makes more positions; others state those that theirs makes, or keep the first ones.
        lengths = {"longrope": 128, "linear": 512}
        assert spec.max_model_len == lengths.get(family.rpartition("-")[2], 256)
        # transformers has the factors of Gemma 4's layers in buffers.
        buffers = [tensor for name, tensor in oracle.named_buffers() if name.endswith(BUFFERS)]
        tensors = [*oracle.parameters(), *([] if force else buffers)]
        assert spec.num_parameters == sum(tensor.numel() for tensor in tensors)


def hybrid(*layer_types: str) -> tuple[str, dict[str, Any]]:
    return "OlmoHybrid", {
        **SMALL,
        "head_dim": 8,
        "layer_types": list(layer_types),
        **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
        **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    }


@pytest.mark.parametrize("dtype", grid(["float32"], ["bfloat16"]))
@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        # A window in the mask alone, longer than the check.
        ("Phimoe", {**SMALL, **EXPERTS, "sliding_window": 20}, "masks 20"),
        ("Bart", {"vocab_size": 97, "d_model": 32, "decoder_layers": 2}, "takes no position_ids"),
        ("Bloom", {"vocab_size": 97, "hidden_size": 32, "n_layer": 2, "n_head": 4}, "takes no position_ids"),
        (*hybrid("linear_attention", "full_attention"), "LinearAttentionLayer in layer 0"),
        (*hybrid("full_attention", "linear_attention"), "LinearAttentionLayer in layer 1"),
        # Nine tokens are one block, for which it needs nothing besides keys and values.
        ("MiniMaxM3VLText", {**SMALL, **EXPERTS, **SPARSE}, "MiniMaxM3VLSparse.* in layer 1"),
        # Attention of other kinds, which a few tokens may not tell from causal attention.
        ("Doge", {**SMALL}, "makes a mask of its own"),
        ("Bert", {**SMALL, "is_decoder": False}, "to other tokens than those before each one"),
        (
            "Llama4Text",
            {**SMALL, **EXPERTS, "attention_chunk_size": 20, "head_dim": 8, "intermediate_size_mlp": 48},
            "to other tokens than those before each one",
        ),
    ],
)
def test_what_would_run_wrongly_is_refused(
    tmp_path: Path, kind: str, settings: dict[str, Any], message: str, dtype: str
) -> None:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**settings)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.25)
    model.to(getattr(torch, dtype)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"{message}.*docs/models.md has the models that run"):
        load(tmp_path, dtype=dtype)


def falcon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, std: float | None = None) -> None:
    """A small Falcon-H1, with attention and a state space in each layer, for which there is no own code;
    ``std``: of its weights, None as training starts."""
    monkeypatch.setattr(f"{inspect_model.__module__}.own_implementation", lambda config: None)
    torch.manual_seed(0)
    config = transformers.FalconH1Config(**SMALL, head_dim=8, **STATE_SPACE)
    model = transformers.FalconH1ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if std is not None and parameter.dim() > 1:
                parameter.normal_(std=std)
    model.to(getattr(torch, dtype)).save_pretrained(tmp_path)


def test_a_state_beside_attention_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    falcon(tmp_path, monkeypatch, "bfloat16")
    with pytest.raises(ConfigError, match=r"LinearAttentionAndFull.* in layer 0"):
        load(tmp_path, dtype="bfloat16")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("std", [None, 0.05, 0.25])
def test_a_lost_state_is_seen_in_logits_however_little_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, std: float | None
) -> None:
    monkeypatch.setattr(f"{TransformersLM.__module__}.check_cache", lambda name, cache: None)
    falcon(tmp_path, monkeypatch, dtype, std)
    with pytest.raises(ConfigError, match="its logits differ by"):
        load(tmp_path, dtype=dtype)


@pytest.mark.parametrize("stated", [40, 4096])
def test_what_begins_behind_the_longest_block_of_the_config_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stated: int
) -> None:
    from transformers.models.persimmon import modeling_persimmon

    eager = modeling_persimmon.eager_attention_forward

    def other_behind(*args: Any, **options: Any) -> Any:
        """Attention that is another one for the tokens behind the first 40."""
        result, weights = eager(*args, **options)
        return torch.cat([result[:, :40], result[:, 40:] * 2], dim=1), weights

    monkeypatch.setattr(modeling_persimmon, "eager_attention_forward", other_behind)
    config = transformers.PersimmonConfig(**{**SMALL, "max_position_embeddings": 96}, index_block_size=stated)
    transformers.PersimmonForCausalLM(config).save_pretrained(tmp_path)
    if stated > 40:  # so long a prompt is not computed for a check
        assert isinstance(load(tmp_path), TransformersLM)
        return
    with pytest.raises(ConfigError, match="its logits differ by"):
        load(tmp_path)


DEEP = {
    "vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 24, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 16, "intermediate_size": 96, "max_position_embeddings": 256,
    "moe_intermediate_size": 32, "num_experts_per_tok": 6,
}  # fmt: skip
MIXTURES: dict[str, dict[str, Any]] = {
    "Glm4Moe": {"n_routed_experts": 32, "n_shared_experts": 1, "n_group": 1, "topk_group": 1},
    "Olmoe": {"num_experts": 32},
    "Ernie4_5_Moe": {"moe_num_experts": 32, "moe_k": 6},
}


@rest(SECONDS)
@pytest.mark.parametrize("kind", thinned(MIXTURES, 3))
def test_a_deep_mixture_of_experts_is_accepted_in_half_precision(tmp_path: Path, kind: str) -> None:
    config = getattr(transformers, f"{kind}Config")(**DEEP, **MIXTURES[kind])
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            std = 0.5 if name.endswith("gate.weight") else parameter.shape[-1] ** -0.5
            parameter.normal_(std=std, generator=generator)
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    loaded = load(tmp_path, dtype="bfloat16", force_transformers=True)
    assert isinstance(loaded, TransformersLM)
    # The check has left all as it was.
    oracle = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).state_dict()
    state = loaded.state()
    assert state.keys() == oracle.keys()
    assert all(state[name].dtype == oracle[name].dtype for name in state)
    assert all(torch.equal(state[name], oracle[name]) for name in state)


@pytest.mark.parametrize(
    ("family", "depth"),
    # Gemma 4 has its layers elsewhere, too, and cannot be cut.
    [("qwen3-moe", 1), ("gemma3", 2), ("smollm3", 2), ("qwen3-moe-mixed", 2), ("gemma4-shared", 6)],
)
def test_of_a_large_model_one_layer_of_each_kind_is_compared(
    checkpoint: Checkpoint, family: str, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, oracle = checkpoint(family)
    monkeypatch.setattr(shallow, "_SMALL", 0)
    depths: list[int] = []
    check = transformers_model.check_paged

    def watched(forward: Any, layers: Any, *args: Any) -> float:
        depths.append(len(layers))
        return check(forward, layers, *args)

    monkeypatch.setattr(transformers_model, "check_paged", watched)
    model = load(path, force_transformers=True)
    assert isinstance(model, TransformersLM)
    assert model.spec.num_layers == len(model.spec.kv_layers) == oracle.config.num_hidden_layers
    assert depths == [depth]
    assert len(oracle.state_dict()) == len(model.state())


def test_a_model_that_computes_attention_by_itself_is_refused() -> None:
    # Which models do so changes with the release of transformers.
    with pytest.raises(ConfigError, match="attention of Own in transformers cannot be replaced"):
        record("Own", 2, lambda watch: None)


@pytest.mark.parametrize("family", ["lfm2", "qwen3.5"])
def test_code_that_keeps_its_state_to_itself_is_refused_for_our_own(
    checkpoint: Checkpoint, family: str
) -> None:
    path, _ = checkpoint(family)
    with pytest.raises(ConfigError, match=r"recurrent state to itself.* the built-in code can"):
        load(path, force_transformers=True)
    # Of layers of attention alone there is no state.
    other = path / "attention"
    make_model("Lfm2", {"layer_types": ["full_attention"] * 3}, other, seed=0)
    assert isinstance(load(other, force_transformers=True), TransformersLM)
    assert load(other).spec.states == ()


@pytest.mark.parametrize(
    ("family", "change", "reason"),
    [
        ("lfm2", {"conv_L_cache": 9}, "convolutions over 9 positions"),
        ("lfm2", {"layer_types": ["conv"] * 4}, "no attention at all"),
        ("qwen3.5", {"hidden_act": "gelu"}, "the activation gelu"),
        ("bamba", {"mamba_d_conv": 9}, "convolutions over 9 positions"),
        ("bamba", {"attn_layer_indices": []}, "no attention at all"),
        ("granite-hybrid", {"time_step_limit": (0.001, 0.1)}, r"steps limited to \(0.001, 0.1\)"),
        ("falcon-h1", {"mlp_bias": True}, "biases in front of factors"),
        ("falcon-h1", {"mamba_rms_norm": True}, "a norm in front of the gates of its state spaces"),
        (
            "nemotron-h",
            {"layers_block_type": ["mlp", "linear_attention", "full_attention"]},
            "a feed-forward part behind no mixer",
        ),
        ("nemotron-h", {"mlp_hidden_act": "tanh"}, "the activations tanh and silu"),
    ],
)
@pytest.mark.parametrize("forced", [False, True])
def test_a_variant_with_recurrent_state_that_nothing_computes_is_refused(
    tmp_path: Path, family: str, change: dict[str, Any], reason: str, forced: bool
) -> None:
    prefix, settings = RECURRENT[family]
    make_model(prefix, {**settings, **change}, tmp_path, seed=0)
    for read in (load_model, inspect_model):
        with pytest.raises(ConfigError, match=f"with {reason} is not supported"):
            read(tmp_path, LoadOptions(device=CPU, force_transformers=forced))


@pytest.mark.parametrize("fallback", [False, True])
def test_a_model_that_switches_frequencies_stops_where_it_would_switch(
    tmp_path: Path, fallback: bool
) -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
    }
    config = transformers.Phi3Config(**SMALL, rope_parameters=rope, original_max_position_embeddings=32)
    transformers.Phi3ForCausalLM(config).save_pretrained(tmp_path)
    assert load(tmp_path, force_transformers=fallback).spec.max_model_len == 32
