"""Rows that verify drafts leave the state in front of them, and the next row replays what was right."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from aioinfer.model.inspection import LoadOptions
from aioinfer.model.loader import load_model
from aioinfer.model.state import RowStates, StatePool
from aioinfer.native.bindings import InvalidArguments
from tests.model.harness import attention_for, build_batch, require
from tests.tiers import SECONDS, points, rest

CPU = torch.device("cpu")
DRAFTS, PAGES = 4, 8
Checkpoint = Callable[[str], tuple[Path, Any]]


@dataclass
class Life:
    """A sequence whose tokens are known beforehand, in slot and pages of its own."""

    slot: int
    tokens: list[int]
    prompt: int
    wanted: torch.Tensor
    computed: int = 0
    replays: int = 0
    #: of the row in the step: its tokens, and how many of them are right
    ids: list[int] = field(default_factory=list)
    right: int = 0

    def choose(self, rng: random.Random, vocab_size: int) -> int:
        """What the next row computes; returns the number of its drafts."""
        at, left = self.computed, len(self.tokens) - self.computed
        if at < self.prompt:
            self.right = rng.choice([1, 3, self.prompt])
            self.right = min(self.right, self.prompt - at)
            self.ids = self.tokens[at : at + self.right]
            return 0
        drafts = rng.randrange(min(DRAFTS + 1, left))
        self.ids, self.right = self.tokens[at : at + 1 + drafts], 1 + drafts
        if drafts and rng.random() < 0.7:
            wrong = rng.randrange(1, drafts + 1)
            self.ids[wrong:] = [(each + rng.choice([1, 5])) % vocab_size for each in self.ids[wrong:]]
            self.right = wrong
        return drafts

    def check(self, logits: torch.Tensor, tolerance: float) -> None:
        """Those of the right positions, and move on."""
        wanted = self.wanted[self.computed : self.computed + self.right]
        torch.testing.assert_close(logits[: self.right], wanted, rtol=tolerance, atol=tolerance)
        self.replays = self.right - 1 if self.computed >= self.prompt else 0
        self.computed += self.right


@rest(SECONDS)
@pytest.mark.parametrize(
    ("kind", "kernels", "dtype"),
    points(
        [("lfm2", "native", "float32"), ("qwen3.5", "native", "bfloat16"), ("qwen3.5", "sdpa", "float32")]
        + [("granite-hybrid", kernels, "float32") for kernels in ("native", "sdpa")],
        [("lfm2", "native", "bfloat16"), ("lfm2", "sdpa", "float32"), ("qwen3.5", "native", "float32")]
        + [
            (kind, kernels, "float32")
            for kind in ("qwen3.5-moe", "lfm2-moe", "falcon-h1", "nemotron-h")
            for kernels in ("native", "sdpa")
        ],
    ),
)
@torch.inference_mode()
def test_logits_are_those_without_drafts(checkpoint: Checkpoint, kind: str, kernels: Any, dtype: str) -> None:
    require(kernels)
    model = load_model(checkpoint(kind)[0], LoadOptions(dtype=dtype, device=CPU, kernels=kernels))
    spec, rng = model.spec, random.Random(kind)
    assert spec.verifies
    attention = attention_for(spec, 6 * PAGES, 8, kernels)
    vocab = min(spec.vocab_size, 100)
    tolerance = 0.0 if kernels == "native" else 1e-3
    for _ in range(4):
        pool = StatePool(spec.states, 5, CPU, num_slots=5, drafts=DRAFTS, dtype=spec.dtype)
        lives = []
        for slot in range(1, 6):
            tokens = [rng.randrange(vocab) for _ in range(rng.randrange(20, 60))]
            pages = [*range(1, 1 + PAGES)]
            cells = torch.tensor([slot])
            batch = build_batch(
                [(tokens, 0, pages)],
                8,
                num_decodes=0,
                logits_rows=range(len(tokens)),
                states=RowStates(pool, torch.zeros_like(cells), cells),
            )
            wanted = model.forward(batch, attention).clone()
            lives.append(Life(slot, tokens, rng.randrange(1, 15), wanted))
        while running := [life for life in lives if life.computed < len(life.tokens) and rng.random() < 0.9]:
            drafts = {life.slot: life.choose(rng, vocab) for life in running}
            running.sort(key=lambda life: (life.computed < life.prompt, drafts[life.slot], life.replays > 0))
            plain = [life for life in running if life.computed >= life.prompt and not drafts[life.slot]]
            slots = torch.tensor([life.slot for life in running])
            states = RowStates(pool, slots * torch.tensor([life.computed > 0 for life in running]), slots)
            if any(drafts.values()) or any(life.replays for life in running):
                replays = np.cumsum([0, *(life.replays for life in running)])
                kept = np.asarray([len(life.ids) - drafts[life.slot] for life in running])
                states = RowStates(pool, states.read, slots, slots.numpy(), replays, kept)
            rows = [
                (life.ids, life.computed, [*range(1 + life.slot * PAGES, 1 + (1 + life.slot) * PAGES)])
                for life in running
            ]
            total = sum(len(life.ids) for life in running)
            batch = build_batch(rows, 8, num_decodes=len(plain), logits_rows=range(total), states=states)
            logits = model.forward(batch, attention)
            at = 0
            for life in running:
                count = len(life.ids)
                life.check(logits[at : at + count], tolerance)
                at += count


@pytest.mark.parametrize(
    ("replays", "kept", "write", "message"),
    [
        ([0, 5], [1], 1, "no room"),
        ([0, 0], [0], 1, "not in order"),
        ([0, 0], [3], 1, "not in order"),
        ([0, -1], [1], 1, "not in order"),
        ([1, 1], [1], 1, "what their states include"),
        ([0, 1], [1], 3, "no stash"),
        ([0, 1], [1], 0, "no stash"),
    ],
)
def test_rows_that_do_not_fit_their_stash_are_refused(
    checkpoint: Checkpoint, replays: list[int], kept: list[int], write: int, message: str
) -> None:
    require("native")
    model = load_model(checkpoint("lfm2")[0], LoadOptions(dtype="float32", device=CPU, kernels="native"))
    pool = StatePool(model.spec.states, 4, CPU, num_slots=2, drafts=DRAFTS)
    cell = torch.tensor([write])
    states = RowStates(pool, torch.tensor([1]), cell, cell.numpy(), np.asarray(replays), np.asarray(kept))
    batch = build_batch([([1, 2], 3, [1])], 8, num_decodes=0, states=states)
    with pytest.raises(InvalidArguments, match=message):
        model.forward(batch, attention_for(model.spec, 2, 8, "native"))
    none = StatePool(model.spec.states, 4, CPU)
    batch.states = RowStates(
        none, torch.tensor([1]), cell, cell.numpy(), np.zeros(2, np.int64), np.ones(1, np.int64)
    )
    with pytest.raises(InvalidArguments, match="no stashes"):
        model.forward(batch, attention_for(model.spec, 2, 8, "native"))
