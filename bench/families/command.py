"""``python -m bench families``: own code against transformers' code, family by family, on a CPU.

Every family's model has the same residual, heads and layers and random weights; what differs is what the
family adds: norms, gates, windows, caps, experts. Decode of a batch is timed over steps in which all requests
are running, by both implementations in turns, with the same scheduler, pages and threads. A family that
transformers' code cannot compute over pages (its layers have a state) is compared with its own ``generate``,
for which all requests begin and end together. ``per_mib_us`` is the time of an own step for each MiB of
weights: that of the first family is to be expected of the others, and less where a step does not read all
experts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from aioinfer.config import EngineConfig
from aioinfer.llm import LLM
from aioinfer.model.loader import LoadOptions, inspect_model
from aioinfer.params import SamplingParams
from bench.command import BadOptions
from bench.report import Report

_LAYERS = 6
_SHAPE = {
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 3072,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_WINDOWS: dict[str, Any] = {
    "sliding_window": 64,
    "layer_types": ["sliding_attention", "full_attention"] * (_LAYERS // 2),
}
_EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 768}
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
#: by model type: architecture and what its config says besides the shape
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3ForCausalLM", {}),
    "llama": ("LlamaForCausalLM", {}),
    "phi3": ("Phi3ForCausalLM", {}),
    "smollm3": ("SmolLM3ForCausalLM", {}),
    "gemma": ("GemmaForCausalLM", {}),
    "gemma2": ("Gemma2ForCausalLM", _WINDOWS),
    "gemma3_text": (
        "Gemma3ForCausalLM",
        {**_WINDOWS, "rope_parameters": dict.fromkeys(("sliding_attention", "full_attention"), _ROPE)},
    ),
    "olmo2": ("Olmo2ForCausalLM", {}),
    "olmo3": ("Olmo3ForCausalLM", _WINDOWS),
    "glm4": ("Glm4ForCausalLM", {}),
    "gpt2": (
        "GPT2LMHeadModel",
        {"n_embd": 1024, "n_layer": _LAYERS, "n_head": 16, "n_inner": 4608, "n_positions": 2048},
    ),
    "mixtral": ("MixtralForCausalLM", _EXPERTS),
    "gpt_oss": ("GptOssForCausalLM", {**_WINDOWS, **_EXPERTS, "rope_parameters": _ROPE}),
    "gemma4_text": (
        "Gemma4ForCausalLM",
        {
            **_WINDOWS,
            "global_head_dim": 128,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 64,
            "vocab_size_per_layer_input": 32_000,
        },
    ),
    "lfm2": (
        "Lfm2ForCausalLM",
        {"layer_types": ["conv", "full_attention"] * (_LAYERS // 2), "block_auto_adjust_ff_dim": False},
    ),
    "qwen3_5_text": (
        "Qwen3_5ForCausalLM",
        {
            "layer_types": ["linear_attention", "full_attention"] * (_LAYERS // 2),
            "linear_num_key_heads": 8,
            "linear_num_value_heads": 8,
            "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.25},
        },
    ),
}
#: over pages transformers' code cannot compute these
STATEFUL = frozenset({"lfm2", "qwen3_5_text"})
_PROMPT = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--families", nargs="+", default=[*FAMILIES], metavar="TYPE", help="by model type")
    parser.add_argument("--batch", type=int, default=8, help="requests at a time")
    parser.add_argument("--output", type=int, default=32, help="tokens of each")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0, help="0: one a core")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--layers", type=int, default=_LAYERS, help="an even number")


def run(options: argparse.Namespace, report: Report) -> None:
    """See the module."""
    unknown = set(options.families) - FAMILIES.keys()
    if unknown or options.layers < 2 or options.layers % 2:
        raise BadOptions(f"families are {', '.join(FAMILIES)}; layers an even number")
    for family in options.families:
        with tempfile.TemporaryDirectory() as folder:
            write_config(family, Path(folder), options.layers)
            measure(family, folder, options, report)


def measure(family: str, folder: str, options: argparse.Namespace, report: Report) -> None:
    """A row: tokens per second of both, in turns, and their ratio in each round."""
    cpu = torch.device("cpu")
    info = inspect_model(Path(folder), LoadOptions(dtype=options.dtype, device=cpu, load_format="random"))
    if not info.own:
        report.error(f"{family}: {info.fallback_reason}")
        return
    with contextlib.ExitStack() as open_ones:
        own = open_ones.enter_context(LLM(_config(folder, options, fallback=False)))
        ways: dict[str, Callable[[int], float]] = {"own": lambda output: decode(own, options, output)}
        if family in STATEFUL:
            ways["transformers"] = Generate(folder, options)
        else:
            other = open_ones.enter_context(LLM(_config(folder, options, fallback=True)))
            ways["transformers"] = lambda output: decode(other, options, output)
        rates: dict[str, list[float]] = {way: [] for way in ways}
        for run_it in ways.values():
            run_it(4)
        for at in range(options.rounds):
            for way in sorted(ways, reverse=at % 2 == 1):
                rates[way].append(ways[way](options.output))
    ratios = [own / other for own, other in zip(rates["own"], rates["transformers"], strict=True)]
    median, mib = statistics.median(rates["own"]), weights_mib(folder, info.dtype.itemsize)
    report.row(
        family=family,
        own=median,
        transformers=statistics.median(rates["transformers"]),
        ratio=statistics.median(ratios),
        least=min(ratios),
        mib=mib,
        per_mib_us=1e6 * options.batch / median / mib,
        rounds=rates,
    )


def weights_mib(folder: str, itemsize: int) -> float:
    """MiB of a model's weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    return float(itemsize * model.num_parameters() / (1 << 20))


def decode(llm: LLM, options: argparse.Namespace, output: int) -> float:
    """Tokens per second of a batch, from the first token of the last request on."""
    params = SamplingParams(temperature=0, max_tokens=output + 1, ignore_eos=True)
    prompts = _prompts(options)
    first = time.perf_counter()
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
    prefill = time.perf_counter() - first
    start = time.perf_counter()
    results = llm.generate(prompts, params)
    assert all(len(result.token_ids) == output + 1 for result in results)
    seconds = time.perf_counter() - start - prefill
    return float(options.batch * output / max(seconds, 1e-9))


class Generate:
    """Tokens per second of a batch by the ``generate`` of transformers' model, from the second token on."""

    def __init__(self, folder: str, options: argparse.Namespace) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.set_num_threads(options.threads or torch.get_num_threads())
        dtype = getattr(torch, options.dtype)
        config = AutoConfig.from_pretrained(folder)
        self._model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        self._ids = torch.tensor(_prompts(options))

    def __call__(self, output: int) -> float:
        took = self._seconds(output + 1) - self._seconds(1)
        return len(self._ids) * output / max(took, 1e-9)

    def _seconds(self, tokens: int) -> float:
        start = time.perf_counter()
        with torch.inference_mode():
            self._model.generate(self._ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
        return time.perf_counter() - start


def _prompts(options: argparse.Namespace) -> list[list[int]]:
    return [[(7 * at + 3 * row) % 1000 + 1 for at in range(_PROMPT)] for row in range(options.batch)]


def write_config(family: str, folder: Path, layers: int) -> None:
    """A model directory, to be loaded with ``load_format="random"``."""
    architecture, more = FAMILIES[family]
    config = {**_SHAPE, **more, "architectures": [architecture], "model_type": family}
    config["num_hidden_layers"] = layers
    if "n_layer" in config:
        config["n_layer"] = layers
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:2] * (layers // 2)
    (folder / "config.json").write_text(json.dumps(config))


def _config(folder: str, options: argparse.Namespace, fallback: bool) -> EngineConfig:
    return EngineConfig(
        model=folder,
        load_format="random",
        dtype=options.dtype,
        device="cpu",
        threads=options.threads or None,
        transformers_fallback=fallback,
        prefix_cache=False,
        max_running_requests=options.batch,
        max_model_len=512,
    )
