"""Fields of a ``quantization_config`` that are read, or that change no weight. Others are refused by name."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from aioinfer.errors import ConfigError, shown

__all__ = ["FIELDS", "check_fields"]

#: which modules are quantised: the tensors tell
_MODULES = frozenset(
    {
        *(
            "block_name_to_quantize",
            "ignore",
            "ignored_layers",
            "lm_head",
            "module_name_preceding_first_block",
        ),
        *("modules_in_block_to_quantize", "modules_to_not_convert", "modules_not_quantized"),
        *("to_quant_block_names", "llm_int8_skip_modules"),
    }
)
#: how the weights were found, and which kernels a library is to use
_TOOLS = frozenset(
    {
        # Of AutoRound, which states them of weights alone, too. What is multiplied is not rounded by them.
        *("act_bits", "act_data_type", "act_dynamic", "act_group_size", "act_sym"),
        *("act_group_aware", "amp", "autoround_version", "backend", "batch_size", "cache_block_outputs"),
        *("damp_auto_increment", "damp_percent", "data_type", "dataset", "dequantize", "disable_exllama"),
        *("do_fuse", "enable_alg_ext", "enable_minmax_tuning", "enable_norm_bias_tuning"),
        *("enable_quanted_input", "exllama_config", "fuse_max_seq_len", "gradient_accumulate_steps"),
        *("is_checkpoint_fp8_serialized", "iters", "low_cpu_mem_usage", "low_gpu_mem_usage", "lr"),
        *(
            "max_input_length",
            "meta",
            "minmax_lr",
            "model_file_base_name",
            "model_free",
            "model_name_or_path",
        ),
        *("model_seqlen", "modules_to_fuse", "mse", "nblocks", "nsamples", "offload_to_disk", "pack_dtype"),
        *("pad_token_id", "producer", "provider", "quant_method", "run_compressed", "sampler", "scale_dtype"),
        *("seqlen", "static_groups", "tokenizer", "train_bs", "true_sequential", "use_cuda_fp16"),
        *("use_exllama", "version"),
    }
)
_COMMON = _MODULES | _TOOLS
_ZEROS = _COMMON | {
    *("bits", "checkpoint_format", "desc_act", "dynamic", "format", "group_size", "method", "q_group_size"),
    *("sym", "w_bit", "zero_point"),
}
#: by ``quant_method``
FIELDS: Mapping[str, frozenset[str]] = {
    "auto-round": _ZEROS | {"extra_config", "packing_format"},
    "awq": _ZEROS,
    "bitsandbytes": _COMMON
    | {
        *("_load_in_4bit", "_load_in_8bit", "load_in_4bit", "load_in_8bit", "llm_int8_threshold"),
        *("bnb_4bit_compute_dtype", "bnb_4bit_quant_storage", "bnb_4bit_quant_type"),
        *("bnb_4bit_use_double_quant", "llm_int8_enable_fp32_cpu_offload", "llm_int8_has_fp16_weight"),
    },
    "compressed-tensors": _COMMON
    | {
        *("config_groups", "format", "global_compression_ratio", "kv_cache_scheme", "quantization_status"),
        "sparsity_config",
    },
    "fp8": _COMMON
    | {
        *("activation_scheme", "fmt", "kv_cache_scheme", "moe_modules_to_not_convert", "scale_fmt"),
        "weight_block_size",
    },
    "gptq": _ZEROS,
    "modelopt": _COMMON
    | {
        *("config_groups", "exclude_modules", "group_size", "kv_cache_quant_algo", "kv_cache_scheme"),
        *("quant_algo", "quantization", "quantized_layers"),
    },
    "mxfp4": _COMMON,
}


def check_fields(stated: Mapping[str, Any], known: Collection[str], where: str) -> None:
    """Raise ConfigError for a field of an object that is not known and not empty."""
    for name, value in stated.items():
        if value and name not in known:
            raise ConfigError(
                f"model: {where} has {shown(name)}, which is not known here and may change the weights"
            )
