"""What the training scripts of the bundled models share: tokens, packing, optimisers, text files."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIALS = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|mask|>"]
PAD, END, MASK = 0, 1, 5
ROLES = {"system": 2, "user": 3, "assistant": 4}
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
IGNORE = -100

T = TypeVar("T")


def byte_level_bpe(pattern: str, texts: Iterable[str], size: int, specials: Sequence[str]) -> Tokenizer:
    """Byte-level BPE with at most ``size`` tokens; none crosses the end of a match of the pattern."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=20,
        special_tokens=list(specials),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def pack(draw: Callable[[], T], size: Callable[[T], int], row: int) -> Iterator[list[T]]:
    """Endless rows of items that fit into ``row`` tokens together (best fit over 64 open rows)."""
    rows: list[list[T]] = [[] for _ in range(64)]
    used = [0] * len(rows)
    while True:
        item = draw()
        if size(item) > row:
            continue
        fitting = [at for at in range(len(rows)) if used[at] + size(item) <= row]
        if fitting:
            at = max(fitting, key=used.__getitem__)
        else:
            at = max(range(len(rows)), key=used.__getitem__)
            yield rows[at]
            rows[at], used[at] = [], 0
        rows[at].append(item)
        used[at] += size(item)


def make_optimizers(
    model: torch.nn.Module, lr: float, adam: tuple[str, ...] = ("embed",)
) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, AdamW for norms and for the matrices whose names hold one of ``adam``."""
    matrices: list[torch.Tensor] = []
    others: list[torch.Tensor] = []
    norms: list[torch.Tensor] = []
    for name, parameter in model.named_parameters():
        named = any(part in name for part in adam)
        group = norms if parameter.dim() < 2 else others if named else matrices
        group.append(parameter)
    return [
        torch.optim.Muon(matrices, lr=lr, momentum=0.95, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(
            [{"params": others, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}],
            lr=lr,
            betas=(0.9, 0.98),
        ),
    ]


def learning_rate(progress: float, peak: float, warmup: float = 0.03) -> float:
    """Linear warm-up, then a cosine down to 5 % of the peak; ``progress`` goes from 0 to 1."""
    if progress < warmup:
        return peak * progress / warmup
    return peak * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - warmup) / (1 - warmup)))))


def take_step(optimizers: list[torch.optim.Optimizer], rate: float) -> None:
    """A step of every optimiser at the learning rate, after which there are no gradients."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()


def save_text_files(
    tokenizer: Tokenizer,
    out: Path,
    max_length: int,
    specials: Sequence[str] = SPECIALS,
    template: str = CHAT_TEMPLATE,
) -> PreTrainedTokenizerFast:
    """Write the tokenizer, its chat template and ``generation_config.json``."""
    out.mkdir(parents=True, exist_ok=True)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=specials[PAD],
        eos_token=specials[END],
        additional_special_tokens=list(specials[2:]),
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = template
    fast.save_pretrained(out)
    generation = {"do_sample": False, "eos_token_id": END, "pad_token_id": PAD}
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", "utf-8")
    return fast
