"""Train and evaluate the bundled demo model: a 2.8 M parameter Qwen3 that does a handful of small tasks.

    python -m examples.training.train_chat              # about 20 minutes on two cores
    python -m examples.training.train_chat --eval       # exact match per task on held-out questions

Everything is made here: the text (tasks.py), the byte-level BPE tokenizer, the weights. The result
is an ordinary Hugging Face directory. The optimiser is Muon (Jordan et al., 2024) for the matrices and
AdamW for the rest.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from examples.training.common import (
    END,
    IGNORE,
    PAD,
    ROLES,
    SPECIALS,
    byte_level_bpe,
    learning_rate,
    make_optimizers,
    pack,
    save_text_files,
    take_step,
)
from examples.training.tasks import TASKS, Item, conversation, held_out, lexicon_text

DEFAULT_OUT = Path(__file__).resolve().parents[2] / "aioinfer" / "bundled" / "tiny-chat"

ROW = 256
BATCH = 16


# -- tokenizer -----------------------------------------------------------------------------------------


def train_tokenizer() -> Tokenizer:
    """Byte-level BPE in which only lower-case words after a space merge: template words are one token,
    while names, quoted words and numbers are spelled, so that copying them needs no spelling lessons."""
    return byte_level_bpe(r" [a-z]+|[A-Za-z]|[0-9]| ?[^\sA-Za-z0-9]+|\s", lexicon_text(), 1024, SPECIALS)


def encode_conversation(tokenizer: Tokenizer, messages: list[dict[str, str]]) -> tuple[list[int], list[int]]:
    """Ids, and labels that leave out everything but the answers and their end tokens."""
    ids: list[int] = []
    labels: list[int] = []
    for message in messages:
        content = [*tokenizer.encode(message["content"]).ids, END]
        answer = message["role"] == "assistant"
        ids += [ROLES[message["role"]], *content]
        labels += [IGNORE, *(content if answer else [IGNORE] * len(content))]
    return ids, labels


# -- data ----------------------------------------------------------------------------------------------


def packed_rows(tokenizer: Tokenizer, seed: int) -> Iterator[list[tuple[list[int], list[int]]]]:
    """Endless rows of conversations that fit into ROW tokens together."""
    rng = random.Random(seed)
    return pack(lambda: encode_conversation(tokenizer, conversation(rng)), lambda item: len(item[0]), ROW)


def make_batch(rows: list[list[tuple[list[int], list[int]]]]) -> dict[str, torch.Tensor]:
    """Tensors of one batch; positions restart and attention is closed within each conversation."""
    ids = torch.full((len(rows), ROW), PAD)
    labels = torch.full((len(rows), ROW), IGNORE)
    positions = torch.zeros(len(rows), ROW, dtype=torch.long)
    document = torch.zeros(len(rows), ROW, dtype=torch.long)
    for index, row in enumerate(rows):
        start = 0
        for number, (tokens, targets) in enumerate(row, 1):
            stop = start + len(tokens)
            ids[index, start:stop] = torch.tensor(tokens)
            labels[index, start:stop] = torch.tensor(targets)
            positions[index, start:stop] = torch.arange(len(tokens))
            document[index, start:stop] = number
            start = stop
    same = document[:, :, None] == document[:, None, :]
    mask = (same & torch.ones(ROW, ROW, dtype=torch.bool).tril()).unsqueeze(1)
    return {"ids": ids, "labels": labels, "positions": positions, "mask": mask}


# -- training ------------------------------------------------------------------------------------------


def make_model(vocab_size: int) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=192,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=512,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=PAD,
        attn_implementation="sdpa",
    )
    model = Qwen3ForCausalLM(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.04)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.data /= (2 * config.num_hidden_layers) ** 0.5
    return model


def train(steps: int, seed: int, out: Path, peak: float = 2e-3) -> None:
    torch.manual_seed(seed)
    torch.set_num_threads(2)
    tokenizer = train_tokenizer()
    vocab_size = -(-tokenizer.get_vocab_size() // 32) * 32
    model = make_model(vocab_size)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{tokenizer.get_vocab_size()} tokens, {parameters:,} parameters", flush=True)
    optimizers = make_optimizers(model, peak)
    rows = packed_rows(tokenizer, seed)

    def loss_of(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            output = model(batch["ids"], attention_mask=batch["mask"], position_ids=batch["positions"])
        logits = output.logits[:, :-1].float().reshape(-1, vocab_size)
        return torch.nn.functional.cross_entropy(logits, batch["labels"][:, 1:].reshape(-1))

    compiled: Any = torch.compile(loss_of)
    started = time.monotonic()
    for step in range(steps):
        rate = learning_rate((step + 1) / steps, peak)
        loss = compiled(make_batch([next(rows) for _ in range(BATCH)]))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        take_step(optimizers, rate)
        if step % 50 == 0 or step == steps - 1:
            elapsed = time.monotonic() - started
            print(f"step {step:5d}  loss {loss.item():.4f}  lr {rate:.1e}  {elapsed:6.0f} s", flush=True)
    save(model, tokenizer, out)


def save(model: Qwen3ForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """Write an ordinary Hugging Face directory with bf16 weights."""
    model.to(torch.bfloat16).save_pretrained(out)
    save_text_files(tokenizer, out, model.config.max_position_embeddings)


# -- evaluation ----------------------------------------------------------------------------------------


@torch.inference_mode()
def answers(
    model: Any, tokenizer: Any, items: list[Item], max_new_tokens: int = 256
) -> list[tuple[str, bool]]:
    """Greedy answers in one left-padded batch: text, and whether it ended by itself."""
    prompts = [
        tokenizer.apply_chat_template(item.messages, add_generation_prompt=True, return_dict=False)
        for item in items
    ]
    width = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    output = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=END,
        pad_token_id=PAD,
    )
    texts = tokenizer.batch_decode(output[:, width:], skip_special_tokens=True)
    return [(text, END in row) for text, row in zip(texts, output[:, width:].tolist(), strict=True)]


def evaluate(path: Path, count: int, seed: int) -> None:
    """Print exact match and end rate per task on held-out questions, from the saved files."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(path)
    print(f"{'task':12s} {'exact':>7s} {'ends':>7s}   of {count} held-out questions")
    for task in [*TASKS, "second_turn"]:
        items = held_out(task, count, seed)
        replies = answers(model, tokenizer, items)
        right = [item.check(text) for item, (text, _) in zip(items, replies, strict=True)]
        print(f"{task:12s} {sum(right) / count:7.3f} {sum(end for _, end in replies) / count:7.3f}")
        wrong = [(item, text) for item, (text, _), ok in zip(items, replies, right, strict=True) if not ok]
        for item, text in wrong[:2]:
            print(f"    {item.messages[-1]['content']!r}: {text!r} should be {item.answer!r}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--eval", action="store_true", help="evaluate instead of training")
    parser.add_argument("--model", type=Path, default=DEFAULT_OUT, help="directory to evaluate")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="directory to write")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=200, help="questions per task when evaluating")
    options = parser.parse_args()
    if options.eval:
        evaluate(options.model, options.count, options.seed)
        return
    train(options.steps, options.seed, options.out)
    evaluate(options.out, options.count, options.seed)


if __name__ == "__main__":
    main()
