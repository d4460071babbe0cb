"""``python -m bench.peers.adapters.to_gguf DIR FILE [TYPE]``: a dense Qwen3 checkpoint as GGUF.

``... FILE.bf16.gguf FILE Q4_K_M``: the same in a mixture of types.

Matrices are BF16, or of another type that the package gguf can make: Q8_0, or Q4_0, with which the head and
the embedding are Q8_0. Mixtures as ``Q4_K_M`` are made by llama.cpp itself, from a file of BF16.

Without a vocabulary: prompts are token ids, and nothing is turned into text. Reads bf16 by hand, so that
numpy suffices.
"""

from __future__ import annotations

import ctypes
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: names of a layer's tensors in a checkpoint, and in GGUF
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_EXPERT = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(\w+)\.weight")
_WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def name_in_gguf(name: str) -> str:
    """Name of a tensor in GGUF, of an expert that of the stack of all. Raises KeyError if it is not known."""
    if match := _EXPERT.fullmatch(name):
        return f"blk.{match[1]}.{_LAYER[f'mlp.{match[3]}']}_exps.weight"
    stem, _, kind = name.rpartition(".")
    if stem in _WHOLE:
        return f"{_WHOLE[stem]}.{kind}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{_LAYER[rest]}.{kind}"


def convert(folder: Path, target: Path, name_of_type: str = "BF16") -> None:
    import gguf

    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] != "qwen3":
        raise SystemExit(f"only qwen3 is converted, not {config['model_type']}")
    writer: Any = gguf.GGUFWriter(str(target), "qwen3")
    add_config(writer, config)
    writer.add_file_type(getattr(gguf.LlamaFileType, f"MOSTLY_{name_of_type}"))
    types = gguf.GGMLQuantizationType
    kind = types[name_of_type]
    for name, rows in tensors(folder):
        place = name_in_gguf(name)
        narrow = kind if place.startswith("blk.") or name_of_type == "BF16" else types.Q8_0
        add(writer, place, rows, types.F32 if rows.ndim == 1 else narrow)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_config(writer: Any, config: dict[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config.get("rope_theta") or config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")


def tensors(folder: Path) -> Iterator[tuple[str, Any]]:
    """Names, and bf16 as uint16 arrays that map the files."""
    import numpy

    for file in sorted(folder.glob("*.safetensors")):
        raw = numpy.memmap(file, dtype=numpy.uint8, mode="r")
        size = int(raw[:8].view("<u8")[0])
        for name, entry in json.loads(raw[8 : 8 + size].tobytes()).items():
            if name == "__metadata__":
                continue
            if entry["dtype"] != "BF16":
                raise SystemExit(f"{name} is {entry['dtype']}, not BF16")
            begin, end = (8 + size + at for at in entry["data_offsets"])
            yield name, raw[begin:end].view("<u2").reshape(entry["shape"])


def add(writer: Any, name: str, rows: Any, kind: Any) -> None:
    """Write one tensor in a type of GGUF."""
    import gguf
    import numpy

    if kind == gguf.GGMLQuantizationType.BF16:
        writer.add_tensor(name, rows.view(numpy.uint8), raw_dtype=kind)
        return
    wide = (rows.astype("<u4") << 16).view("<f4")
    if kind == gguf.GGMLQuantizationType.F32:
        writer.add_tensor(name, wide)
    else:
        writer.add_tensor(name, gguf.quants.quantize(wide, kind), raw_dtype=kind)


def mix(source: Path, target: Path, name: str) -> None:
    """Have llama.cpp quantise a GGUF file of BF16 to one of its mixtures."""
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{name}")
    if llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(params)):
        raise SystemExit(f"llama.cpp could not make {name} of {source}")


if __name__ == "__main__":
    call = mix if sys.argv[1].endswith(".gguf") else convert
    call(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:4])
