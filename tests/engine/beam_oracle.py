"""What transformers finds by beam search, and small random models to ask it about."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers

from aioinfer.client.beams import Beams, EarlyStopping, Row

__all__ = ["Found", "Search", "driven", "must_equal", "random_model", "searches", "theirs"]

#: tokens of an output, and a score
Found = list[tuple[list[int], float]]
#: candidates whose scores differ by less can be in another order where sums are rounded otherwise
_TIE = 1e-4
_SHAPE = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "intermediate_size": 48, "max_position_embeddings": 128, "tie_word_embeddings": False,
    # Logits that are far enough apart for two implementations to sort them alike.
    "initializer_range": 0.3,
    **dict.fromkeys(("eos_token_id", "bos_token_id", "pad_token_id")),
}  # fmt: skip


class Search(NamedTuple):
    """One prompt and how it is searched."""

    prompt: list[int]
    width: int
    end: frozenset[int]
    limit: int = 14
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False


def random_model(prefix: str, vocab: int, seed: int) -> Any:
    """A model of two layers in float32."""
    torch.manual_seed(seed)
    config = getattr(transformers, f"{prefix}Config")(vocab_size=vocab, **_SHAPE)
    return getattr(transformers, f"{prefix}ForCausalLM")(config).eval()


def searches(model: Any, count: int, width: int, seed: int = 0) -> list[Search]:
    """Searches of random prompts, with end tokens that beams of the model meet, and all ways to end."""
    chance, vocab = random.Random(seed), model.config.vocab_size
    found = []
    for number in range(count):
        prompt = [chance.randrange(vocab) for _ in range(chance.randrange(1, 40))]
        met = _met(model, prompt, 14)
        end = frozenset(chance.sample(met, chance.randrange(1, 3))) | {chance.randrange(vocab)}
        early: tuple[EarlyStopping, ...] = (False, True, "never")
        penalty = (1.0, 1.0, 0.0, -0.7, 2.0)[number % 5]
        found.append(Search(prompt, width, end, 14, penalty, early[number % 3]))
    return found


@torch.no_grad()
def _met(model: Any, prompt: list[int], count: int) -> list[int]:
    """The second most likely token of each of ``count`` positions."""
    ids = list(prompt)
    found = []
    for _ in range(count):
        best = model(torch.tensor([ids])).logits[0, -1].topk(2).indices.tolist()
        ids.append(best[0])
        found.append(best[1])
    return sorted({*found})


@torch.no_grad()
def theirs(model: Any, search: Search) -> Found:
    """What ``generate`` of transformers returns, without padding."""
    found = model.generate(
        torch.tensor([search.prompt]),
        attention_mask=torch.ones(1, len(search.prompt)),  # else tokens 0 would be taken for padding
        num_beams=search.width,
        num_return_sequences=search.width,
        max_new_tokens=search.limit,
        length_penalty=search.length_penalty,
        early_stopping=search.early_stopping,
        eos_token_id=sorted(search.end),
        pad_token_id=0,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    outputs = [_cut(ids[len(search.prompt) :], search.end) for ids in found.sequences.tolist()]
    return list(zip(outputs, found.sequences_scores.tolist(), strict=True))


def _cut(ids: list[int], end: Collection[int]) -> list[int]:
    return ids[: 1 + next((at for at, token in enumerate(ids) if token in end), len(ids))]


class _Watched(Beams):
    """Knows how close it was."""

    gap = float("inf")

    def step(self, rows: Sequence[Row]) -> None:
        totals = np.concatenate(
            [beam.total + row.logprobs for beam, row in zip(self.running, rows, strict=True)]
        )
        best = np.sort(totals)[::-1][: self.count + 1]
        self.gap = min(self.gap, float(-np.diff(best).max(initial=-np.inf)))
        super().step(rows)


@torch.no_grad()
def driven(model: Any, search: Search) -> tuple[Found, float]:
    """What :class:`Beams` finds where the model computes every step anew, and the smallest difference between
    candidates that decided."""
    beams = _Watched(search.width, search.end, search.limit, search.length_penalty, search.early_stopping)
    while not beams.done:
        ids = [[*search.prompt, *[each.token_id for each in beam.path()]] for beam in beams.running]
        rows = model(torch.tensor(ids)).logits[:, -1].numpy()
        beams.step([beams.most_likely(row) for row in rows])
    found = [([each.token_id for each in beam.path()], score) for score, beam in beams.finished]
    return found, beams.gap


def must_equal(model: Any, search: Search, found: Found) -> bool:
    """Assert that it is what transformers finds. False: it is not, and a tie was decided otherwise."""
    expected = theirs(model, search)
    if [ids for ids, _ in found] != [ids for ids, _ in expected]:
        _, gap = driven(model, search)
        assert gap < _TIE, f"{search}: {found}, not {expected}"
        return False
    assert [score for _, score in found] == pytest.approx([score for _, score in expected], rel=1e-3)
    return True
