"""``python -m bench images``: chats about images on a CPU, beside transformers and llama.cpp's mtmd.

The model has random weights in the shape of SmolVLM2-256M, in bfloat16. A prompt is an image of 1024 x 512
pixels (two tiles and a third one of the whole: 3,072 patches, 192 positions) and a question of 32 tokens; the
time is that from the pixels to the first tokens of all prompts of a run. Engines take turns within a round,
each in a process of its own, which is stopped while others compute; ``ratio`` is the median of the rounds'
ratios to this engine.

``again`` is a second question about the image of the run before, which is in the prefix cache. ``text`` is a
question without an image, with the encoder loaded and without. llama.cpp's weights are those of the
checkpoint, but for an order of rows that costs nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.peers.process import PeerProcess
from bench.peers.registry import ROOT, python_of
from bench.report import Report

__all__ = ["add_arguments", "run"]

#: of a request, in seconds
_PATIENCE = 600.0
_CONFIG: dict[str, Any] = {
    "text_config": {
        "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49280,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 100_000.0,
    },
    "vision_config": {
        "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
        "patch_size": 16, "image_size": 512,
    },
    "scale_factor": 4,
}  # fmt: skip
_PROCESSOR: dict[str, Any] = {
    "image_processor_type": "SmolVLMImageProcessor", "do_image_splitting": True,
    "size": {"longest_edge": 1024}, "max_image_size": {"longest_edge": 512},
}  # fmt: skip
_ADAPTERS = {
    "aioinfer": ("aioinfer_images", None, {}),
    "text only": ("aioinfer_images", None, {"images": False}),
    "transformers": ("transformers_images", None, {}),
    "llama.cpp": ("llamacpp_images", "llamacpp", {}),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = ROOT / ".peers"
    parser.add_argument("--place", type=Path, default=default, help="where environments and models are")
    parser.add_argument("--engines", nargs="+", choices=list(_ADAPTERS), default=list(_ADAPTERS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 8])


def run(options: argparse.Namespace, report: Report) -> None:
    place = options.place.resolve()
    model = place / "models" / "smolvlm2-256m"
    if not (model / "config.json").is_file():
        _make(model)
    if "llama.cpp" in options.engines and not (model / "mmproj.gguf").is_file():
        _convert(model)
    settings = {
        "model": str(model), "threads": options.threads, "kv_gib": 0.5, "max_len": 1024, "max_batch": 16
    }  # fmt: skip
    with ExitStack() as stack:
        engines = {}
        for name in options.engines:
            adapter, environment, own = _ADAPTERS[name]
            python = sys.executable if environment is None else str(python_of(environment, place))
            command = [python, "-m", f"bench.peers.adapters.{adapter}"]
            log = place / "logs" / f"images-{adapter}.log"
            engine = engines[name] = PeerProcess(command, log=log, cwd=ROOT)
            stack.callback(engine.kill)
            facts = engine.ask("load", _PATIENCE, settings={**settings, "options": own})["facts"]
            report.fact(name, facts)
            engine.pause()
        _Rounds(engines, report).measure(options.rounds, options.at_once)


class _Rounds:
    """Runs of all engines, in turns. Every image and question is a new one, unless it says otherwise."""

    def __init__(self, engines: dict[str, PeerProcess], report: Report) -> None:
        self._engines = engines
        self._report = report
        self._number = 0

    def measure(self, rounds: int, at_once: Sequence[int]) -> None:
        with_images = [name for name in self._engines if name != "text only"]
        for count in at_once:
            self._compare(f"{count} at once", with_images, rounds, count)
        if "aioinfer" in self._engines:
            again = [self._again() for _ in range(rounds + 1)][1:]
            first, second = zip(*again, strict=True)
            share = statistics.median(b / a for a, b in again)
            self._report.row(
                what="again", engine="aioinfer", seconds=statistics.median(second), ratio=share,
                first=statistics.median(first),
            )  # fmt: skip
        if "text only" in self._engines and "aioinfer" in self._engines:
            self._compare("text, 16 at once", ["aioinfer", "text only"], 3 * rounds, 16, image=False)

    def _compare(
        self, what: str, names: Sequence[str], rounds: int, count: int, *, image: bool = True
    ) -> None:
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for number in range(rounds + 1):
            for name in names if number % 2 else reversed(names):
                took = self._ask(name, [[self._next() if image else -1, self._next()] for _ in range(count)])
                if number:
                    seconds[name].append(took)
        own = seconds[names[0]]
        for name in names:
            ratios = [theirs / ours for theirs, ours in zip(seconds[name], own, strict=True)]
            self._report.row(
                what=what, engine=name, seconds=statistics.median(seconds[name]),
                per_second=count / statistics.median(seconds[name]), ratio=statistics.median(ratios),
                all=[round(each, 4) for each in seconds[name]],
            )  # fmt: skip

    def _again(self) -> tuple[float, float]:
        image = self._next()
        return self._ask("aioinfer", [[image, self._next()]]), self._ask("aioinfer", [[image, self._next()]])

    def _ask(self, name: str, prompts: list[list[int]]) -> float:
        engine = self._engines[name]
        engine.resume()
        found = engine.ask("run", _PATIENCE, prompts=prompts, new_tokens=1)
        engine.pause()
        seconds: float = found["seconds"]
        return seconds

    def _next(self) -> int:
        self._number += 1
        return self._number


def _make(folder: Path) -> None:
    """Random weights, and a tokenizer of letters and the special tokens."""
    import json

    import torch
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, SmolVLMConfig, SmolVLMForConditionalGeneration

    folder.mkdir(parents=True)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: at for at, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<end>", "<image>", "<fake_token_around_image>", "<global-img>"]
    special += ["<row_1_col_1>", "<row_1_col_2>"]
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    fast.chat_template = (
        "{% for m in messages %}{% for part in m['content'] %}"
        "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
        "{% endfor %}{% endfor %}"
    )
    fast.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(_PROCESSOR))
    (folder / "processor_config.json").write_text(json.dumps({"image_seq_len": 64}))
    torch.manual_seed(0)
    config = SmolVLMConfig(**_CONFIG, image_token_id=tokenizer.token_to_id("<image>"), dtype="bfloat16")
    SmolVLMForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(folder)


def _convert(folder: Path) -> None:
    """The two files of llama.cpp: matrices in BF16, the rest in float32."""
    import gguf
    from safetensors import safe_open

    text, vision = _CONFIG["text_config"], _CONFIG["vision_config"]
    writer: Any = gguf.GGUFWriter(str(folder / "text.gguf"), "llama")
    writer.add_block_count(text["num_hidden_layers"])
    writer.add_context_length(text["max_position_embeddings"])
    writer.add_embedding_length(text["hidden_size"])
    writer.add_feed_forward_length(text["intermediate_size"])
    writer.add_head_count(text["num_attention_heads"])
    writer.add_head_count_kv(text["num_key_value_heads"])
    writer.add_rope_freq_base(text["rope_theta"])
    writer.add_layer_norm_rms_eps(text["rms_norm_eps"])
    letters = [f"<{at}>" for at in range(text["vocab_size"])]
    from tokenizers import Tokenizer

    for token, at in Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab().items():
        letters[at] = token
    letters[300] = "ĊĊ"  # of which llama.cpp wants a token
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(letters)
    writer.add_token_types([1] * 256 + [3] * 6 + [1] * (len(letters) - 262))
    writer.add_token_merges(["Ċ Ċ"])
    images: Any = gguf.GGUFWriter(str(folder / "mmproj.gguf"), "clip")
    keys: Any = gguf.Keys.ClipVision
    images.add_bool(gguf.Keys.Clip.HAS_VISION_ENCODER, True)
    images.add_string(gguf.Keys.Clip.PROJECTOR_TYPE, "idefics3")
    images.add_bool(keys.USE_GELU, True)
    for key, number in (
        (keys.PROJECTION_DIM, text["hidden_size"]), (keys.IMAGE_SIZE, vision["image_size"]),
        (keys.PATCH_SIZE, vision["patch_size"]), (keys.EMBEDDING_LENGTH, vision["hidden_size"]),
        (keys.FEED_FORWARD_LENGTH, vision["intermediate_size"]),
        (keys.BLOCK_COUNT, vision["num_hidden_layers"]),
        (keys.Attention.HEAD_COUNT, vision["num_attention_heads"]),
        (keys.Projector.SCALE_FACTOR, _CONFIG["scale_factor"]), (keys.PREPROC_IMAGE_SIZE, 1024),
    ):  # fmt: skip
        images.add_uint32(key, number)
    images.add_float32(keys.Attention.LAYERNORM_EPS, 1e-6)
    images.add_array(keys.IMAGE_MEAN, [0.5] * 3)
    images.add_array(keys.IMAGE_STD, [0.5] * 3)
    layers = max(text["num_hidden_layers"], vision["num_hidden_layers"])
    names = {
        kind: gguf.get_tensor_name_map(kind, layers)
        for kind in (gguf.MODEL_ARCH.LLAMA, gguf.MODEL_ARCH.MMPROJ)
    }
    types = gguf.GGMLQuantizationType
    with safe_open(folder / "model.safetensors", "pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118 - it is no mapping
            inner = name.replace("model.text_model.", "model.")
            of_text = inner != name or name.startswith("lm_head")
            kind = gguf.MODEL_ARCH.LLAMA if of_text else gguf.MODEL_ARCH.MMPROJ
            place = names[kind].get_name(inner, (".weight", ".bias"))
            values = tensors.get_tensor(name).float().numpy()
            matrix = values.ndim == 2 and "position_embedding" not in name
            target = writer if of_text else images
            if matrix:
                target.add_tensor(place, gguf.quants.quantize(values, types.BF16), raw_dtype=types.BF16)
            else:
                target.add_tensor(place, values)
    for each in (writer, images):
        each.write_header_to_file()
        each.write_kv_data_to_file()
        each.write_tensors_to_file()
        each.close()
