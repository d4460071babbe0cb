"""Train and evaluate the bundled tiny-diffusion: a small LLaDA2 that does the demo model's tasks in blocks.

    python -m examples.training.train_diffusion         # starts from the bundled tiny-chat
    python -m examples.training.train_diffusion --eval  # exact match and steps per block, by task

A conversation is cut into blocks of 16 tokens. A row of the training holds its clean blocks and, beside
them, blocks of its answers in which some tokens are masked; a block sees itself and the clean blocks before
it, so one forward teaches what decoding meets, block by block. The loss is the plain cross-entropy of the
masked tokens. An answer ends with end tokens up to the end of its block.

The bundled weights, 3.57 million parameters, 7.2 MB: 985 steps from tiny-chat on the tasks with one right
answer, 807 on the open ones too (``--start ... --peak 1e-3``), then on all tasks 750 and 844 (of 40 minutes
and of 36, ``--peak 1.5e-3`` and ``1.2e-3``), some with wrong answers, and 2200 as they are now
(``--peak 1.5e-3``); 31, 28, 23, 36 and 44 minutes on two cores that were busy with other things too. 200
held-out questions per task, threshold 0.95, bf16; it has not learnt to answer yes or no:

    task       exact  forwards per block (sd)  tokens per forward
    add        1.000  1.04 (0.19)                8.7
    copy       1.000  1.00 (0.00)                4.2
    reverse    1.000  1.00 (0.00)                5.6
    key_value  0.975  1.10 (0.32)                7.2
    json       0.995  1.11 (0.32)               10.5
    story      0.770  1.10 (0.41)               13.4
    chat       1.000  1.00 (0.00)                7.8
    letters    1.000  7.15 (5.31), from 1 to 16   1.0
    dice       1.000  4.66 (2.67), from 1 to 9   1.6
    extract    0.745  2.48 (3.18)                4.7
    who        0.920  3.40 (3.22)                2.6
    fill       0.945  1.82 (1.73)                4.4
    kind       0.915  2.59 (2.32)                1.9
    yes_no     0.445  2.83 (2.11)                2.1
    mood       1.000  1.03 (0.17)                6.0
    second_turn 1.000  1.08 (0.27)                7.6
    all blocks        1.99 (2.53), from 1 to 16
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, distributed
from torch.multiprocessing.spawn import spawn

from examples.training.common import (
    END,
    IGNORE,
    MASK,
    PAD,
    ROLES,
    learning_rate,
    make_optimizers,
    pack,
    save_text_files,
    take_step,
)
from examples.training.diffusion_model import DiffusionModel, Experts, layers_of, load, save, upcycle
from examples.training.tasks import FORM_TASKS, OPEN_TASKS, TASKS, Item, conversation, held_out

BUNDLED = Path(__file__).resolve().parents[2] / "aioinfer" / "bundled"
ROW = 288
COPIES = 2
MOST_BLOCKS = 6


# -- data ----------------------------------------------------------------------------------------------


@dataclass
class Sample:
    """A conversation for training: its clean blocks, and noised ones of its answers.

    All lists have one entry per token. ``units`` numbers the blocks of the sample: tokens of one unit see
    each other. ``blocks`` counts blocks from the start of the conversation: every token sees the clean
    tokens of earlier blocks.
    """

    ids: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    units: list[int] = field(default_factory=list)
    clean: list[bool] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.ids)

    def append(self, ids: list[int], labels: list[int], block: int, clean: bool) -> None:
        unit = self.units[-1] + 1 if self.units else 0
        self.ids += ids
        self.labels += labels
        self.blocks += [block] * len(ids)
        self.units += [unit] * len(ids)
        self.clean += [clean] * len(ids)


def noise(rng: random.Random, tokens: list[int], fixed: int) -> tuple[list[int], list[int]]:
    """A block with some of its tokens masked, never the first ``fixed``; and those tokens as labels."""
    rate = 1.0 if rng.random() < 0.25 else rng.uniform(0.05, 1.0)
    masked = {at for at in range(fixed, len(tokens)) if rng.random() < rate} or {
        rng.randrange(fixed, len(tokens))
    }
    ids = [MASK if at in masked else token for at, token in enumerate(tokens)]
    return ids, [token if at in masked else IGNORE for at, token in enumerate(tokens)]


def make_sample(
    tokenizer: Tokenizer, messages: list[dict[str, str]], rng: random.Random, size: int
) -> Sample:
    """The conversation in blocks of ``size``. An answer ends with end tokens up to the end of its block."""
    ids: list[int] = []
    answers: list[tuple[int, list[int], int]] = []  # block, tokens, how many of them are not the answer's
    for message in messages:
        content = [*tokenizer.encode(message["content"]).ids, END]
        ids.append(ROLES[message["role"]])
        if message["role"] == "assistant":
            fixed = len(ids) % size
            text = ids[len(ids) - fixed :] + content
            text += [END] * (-len(text) % size)
            first = len(ids) // size
            answers += [
                (first + at // size, text[at : at + size], fixed if at == 0 else 0)
                for at in range(0, len(text), size)
            ]
        ids += content
    sample = Sample()
    for block in range(answers[-1][0]):
        sample.append(ids[block * size : (block + 1) * size], [IGNORE] * size, block, True)
    noised = answers * COPIES
    for block, tokens, fixed in rng.sample(noised, min(len(noised), MOST_BLOCKS)):
        sample.append(*noise(rng, tokens, fixed), block, False)
    return sample


def make_batch(rows: list[list[Sample]], size: int) -> dict[str, Tensor]:
    """Tensors of one batch; attention is closed within each conversation."""
    shape = (len(rows), ROW)
    ids, labels = torch.full(shape, PAD), torch.full(shape, IGNORE)
    blocks, units, samples = (torch.full(shape, -1) for _ in range(3))
    clean = torch.zeros(shape, dtype=torch.bool)
    for index, row in enumerate(rows):
        start = unit = 0
        for number, sample in enumerate(row):
            place = (index, slice(start, start + len(sample)))
            ids[place] = torch.tensor(sample.ids)
            labels[place] = torch.tensor(sample.labels)
            blocks[place] = torch.tensor(sample.blocks)
            units[place] = torch.tensor(sample.units) + unit
            clean[place] = torch.tensor(sample.clean)
            samples[place] = number
            start, unit = start + len(sample), unit + sample.units[-1] + 1
    positions = blocks.clamp(min=0) * size + torch.arange(ROW) % size
    earlier = (
        (samples[:, :, None] == samples[:, None, :])
        & clean[:, None, :]
        & (blocks[:, None, :] < blocks[:, :, None])
    )
    mask = (earlier | (units[:, :, None] == units[:, None, :])).unsqueeze(1)
    return {"ids": ids, "labels": labels, "positions": positions, "mask": mask}


def batches(tokenizer: Tokenizer, size: int, rows: int, seed: int) -> Iterator[dict[str, Tensor]]:
    """Endless batches of so many rows of the training mix."""
    rng = random.Random(seed)

    def draw() -> Sample:
        return make_sample(tokenizer, conversation(rng, tasks=TASKS | OPEN_TASKS | FORM_TASKS), rng, size)

    packed = pack(draw, len, ROW)
    while True:
        yield make_batch([next(packed) for _ in range(rows)], size)


# -- training ------------------------------------------------------------------------------------------


@torch.no_grad()
def balance(model: DiffusionModel, loads: Tensor, rate: float) -> None:
    """Make busy experts less likely to be picked, without a loss (Wang et al., 2024)."""
    experts = [layer.mlp for layer in layers_of(model) if isinstance(layer.mlp, Experts)]
    for mlp, load_of in zip(experts, loads, strict=True):
        bias = mlp.gate.expert_bias
        bias += rate * torch.sign(load_of.mean() - load_of)


def average(tensors: list[Tensor]) -> None:
    """The mean over all processes, in place and in one message."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    distributed.all_reduce(flat)
    flat /= distributed.get_world_size()
    for tensor, mean in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(mean.view_as(tensor))


def train(options: argparse.Namespace) -> None:
    """Train in ``options.processes`` processes of one thread each, which meet once per step: threads
    that meet in every operation lose far more to whatever else the machine does."""
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"file://{folder}/meeting"
        if options.processes == 1:
            train_in(0, options, meeting)
        else:
            spawn(train_in, (options, meeting), nprocs=options.processes)


def train_in(rank: int, options: argparse.Namespace, meeting: str) -> None:
    """One process of the training; the first one writes the files."""
    distributed.init_process_group("gloo", meeting, rank=rank, world_size=options.processes)
    try:
        run(rank, options)
    finally:
        distributed.destroy_process_group()


def run(rank: int, options: argparse.Namespace) -> None:
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)
    tokenizer = Tokenizer.from_file(str(options.start / "tokenizer.json"))
    started_from = json.loads((options.start / "config.json").read_text("utf-8"))["model_type"]
    resumed = started_from == "llada2_moe"
    model = load(options.start) if resumed else upcycle(options.start, options.block)
    optimizers = make_optimizers(model, options.peak, adam=("embed", ".gate.weight"))
    rows = options.rows // options.processes
    data = batches(tokenizer, model.config.block_size, rows, options.seed * options.processes + rank)

    def loss_of(batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            hidden, loads = model(batch["ids"], batch["positions"], batch["mask"])
            logits = model.logits(hidden)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        return loss, loads

    compiled: Any = torch.compile(loss_of) if options.compile else loss_of
    step, recent, progress = 0, 0.0, torch.zeros(())
    started = time.monotonic()
    while progress < 1:
        # Whichever runs out first, so that a busy machine gets less training and not half a schedule.
        elapsed = time.monotonic() - started
        progress.fill_(max((step + 1) / options.steps, elapsed / 60 / options.minutes))
        loss, loads = compiled(next(data))
        loss.backward()
        loss = loss.detach()
        average(
            [
                loss,
                loads,
                progress,
                *(parameter.grad for parameter in model.parameters() if parameter.grad is not None),
            ]
        )
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        rate = learning_rate(progress.item(), options.peak)
        take_step(optimizers, rate)
        balance(model, loads, 1e-3)
        recent += (loss.item() - recent) * (1.0 if step == 0 else 0.03)
        if rank == 0 and (step % 50 == 0 or progress >= 1):
            print(f"step {step:5d}  loss {recent:.4f}  lr {rate:.1e}  {elapsed:6.0f} s", flush=True)
        step += 1
        if rank == 0 and (step % 250 == 0 or progress >= 1):
            write(model, tokenizer, options.out)


def write(model: DiffusionModel, tokenizer: Tokenizer, out: Path) -> None:
    """Write an ordinary Hugging Face directory with bf16 weights."""
    save_text_files(tokenizer, out, model.config.max_position_embeddings)
    save(model, out)


# -- evaluation ----------------------------------------------------------------------------------------


@dataclass
class Answer:
    """What the reference decoder found: ids up to the end token, and the forwards each block took."""

    ids: list[int]
    steps: list[int]
    ended: bool


def reveal(logits: Tensor, ids: Tensor, masked: Tensor, threshold: float, mask_id: int) -> None:
    """Low-confidence decoding of one forward, in place.

    The best token of a masked position is written where its probability is above the threshold; where none
    of a block's is, the most likely one is. ``logits [rows, block, vocab]``, the others ``[rows, block]``.
    """
    logits = logits.clone()
    logits[..., mask_id] = -torch.inf
    confidence, best = logits.softmax(-1).max(-1)
    confidence = confidence.masked_fill(~masked, -torch.inf)
    chosen = confidence > threshold
    first = torch.zeros_like(chosen).scatter_(1, confidence.argmax(1, keepdim=True), True)
    chosen |= first & ~chosen.any(1, keepdim=True) & masked
    ids[chosen] = best[chosen]
    masked &= ~chosen


@torch.inference_mode()
def decode(
    model: DiffusionModel, prompts: list[list[int]], threshold: float = 0.95, most_blocks: int = 20
) -> list[Answer]:
    """Plain block by block decoding: every forward computes all tokens again; nobody waits for anybody."""
    size, mask_id = model.config.block_size, model.config.mask_token_id
    texts = [prompt + [mask_id] * (size - len(prompt) % size) for prompt in prompts]
    masked = [torch.arange(size) >= len(prompt) % size for prompt in prompts]
    answers = [Answer([], [0], False) for _ in prompts]
    active = list(range(len(prompts)))
    while active:
        longest = max(len(texts[row]) for row in active)
        ids = torch.tensor([texts[row] + [PAD] * (longest - len(texts[row])) for row in active])
        at = torch.tensor([len(texts[row]) for row in active])[:, None] + torch.arange(-size, 0)
        block = torch.arange(longest) // size
        mask = (block[:, None] >= block).expand(len(active), 1, -1, -1)
        hidden, _ = model(ids, torch.arange(longest).expand_as(ids), mask)
        logits = model.logits(hidden[torch.arange(len(active))[:, None], at])
        current, open_ = ids.gather(1, at), torch.stack([masked[row] for row in active])
        reveal(logits, current, open_, threshold, mask_id)
        for index, row in enumerate(active):
            texts[row][-size:] = current[index].tolist()
            masked[row] = open_[index]
            answer = answers[row]
            answer.steps[-1] += 1
            if masked[row].any():
                continue
            found = texts[row][len(prompts[row]) :]
            answer.ended = END in found
            answer.ids = found[: found.index(END)] if answer.ended else found
            if not answer.ended and len(answer.steps) < most_blocks:
                answer.steps.append(0)
                texts[row] += [mask_id] * size
                masked[row] = torch.ones(size, dtype=torch.bool)
            else:
                active = [other for other in active if other != row]
    return answers


def ask(
    model: DiffusionModel, tokenizer: Any, items: list[Item], threshold: float, group: int = 50
) -> list[tuple[str, Answer]]:
    """The answers to the items, as text too."""
    prompts = [
        tokenizer.apply_chat_template(item.messages, add_generation_prompt=True, return_dict=False)
        for item in items
    ]
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    answers: dict[int, Answer] = {}
    for start in range(0, len(order), group):
        chosen = order[start : start + group]
        found = decode(model, [prompts[index] for index in chosen], threshold)
        answers.update(zip(chosen, found, strict=True))
    return [(tokenizer.decode(answers[index].ids), answers[index]) for index in range(len(items))]


def evaluate(options: argparse.Namespace) -> None:
    """Print exact match, steps per block and tokens per forward by task, from the saved files."""
    from transformers import PreTrainedTokenizerFast

    torch.set_num_threads(options.threads)
    model = load(options.model, getattr(torch, options.dtype))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(options.model)
    print(f"{options.count} held-out questions each, threshold {options.threshold}, {options.dtype}")
    print(f"{'task':12s} {'exact':>6s} {'ends':>6s} {'steps':>6s} {'sd':>5s} {'tok/fwd':>8s}  steps: blocks")
    pooled: list[int] = []
    for task in options.tasks or [*TASKS, *OPEN_TASKS, *FORM_TASKS, "second_turn"]:
        items = held_out(task, options.count, options.seed)
        replies = ask(model, tokenizer, items, options.threshold)
        right = [item.check(text) for item, (text, _) in zip(items, replies, strict=True)]
        steps = [count for _, answer in replies for count in answer.steps]
        tokens = sum(len(answer.ids) + answer.ended for _, answer in replies)
        pooled += steps
        print(
            f"{task:12s} {sum(right) / len(items):6.3f}"
            f" {sum(answer.ended for _, answer in replies) / len(items):6.3f} {spread(steps)}"
            f" {tokens / sum(steps):8.2f}  {counts(steps)}",
            flush=True,
        )
        wrong = [(item, text) for item, (text, _), ok in zip(items, replies, right, strict=True) if not ok]
        for item, text in wrong[: options.show]:
            print(f"    {item.messages[-1]['content']!r}: {text!r} should be {item.answer!r}")
    print(f"{'all':12s} {'':13s} {spread(pooled)} {'':8s}  {counts(pooled)}")


def spread(steps: list[int]) -> str:
    """Mean and standard deviation."""
    values = torch.tensor(steps, dtype=torch.float32)
    return f"{values.mean():6.2f} {values.std(correction=0):5.2f}"


def counts(steps: list[int]) -> str:
    """How many blocks took how many steps."""
    return ", ".join(f"{count}: {blocks}" for count, blocks in sorted(Counter(steps).items()))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--eval", action="store_true", help="evaluate instead of training")
    parser.add_argument("--model", type=Path, default=BUNDLED / "tiny-diffusion", help="what to evaluate")
    parser.add_argument(
        "--start", type=Path, default=BUNDLED / "tiny-chat", help="a chat or diffusion model to start from"
    )
    parser.add_argument("--out", type=Path, default=BUNDLED / "tiny-diffusion", help="directory to write")
    parser.add_argument("--block", type=int, default=16, help="block size, when a chat model is the start")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--minutes", type=float, default=60.0, help="end earlier if that takes longer")
    parser.add_argument("--peak", type=float, default=2e-3, help="highest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2, help="that train, with one thread each")
    parser.add_argument("--rows", type=int, default=16, help=f"of {ROW} tokens per step")
    parser.add_argument("--threads", type=int, default=2, help="of the evaluation")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="train without a compiler")
    parser.add_argument("--count", type=int, default=200, help="questions per task when evaluating")
    parser.add_argument("--threshold", type=float, default=0.95)
    parser.add_argument("--dtype", default="bfloat16", help="of the evaluation")
    parser.add_argument("--tasks", nargs="*", help="tasks to evaluate, by default all")
    parser.add_argument("--show", type=int, default=2, help="wrong answers to print per task")
    options = parser.parse_args(arguments)
    if not options.eval:
        train(options)
        options.model = options.out
    evaluate(options)


if __name__ == "__main__":
    main()
