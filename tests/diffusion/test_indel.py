"""joint_threshold_indel: what its tokens do to a block, round by round, and which models can have it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from aioinfer.config import EngineConfig
from aioinfer.errors import ConfigError, InvalidRequest
from aioinfer.loop.generation import default_diffusion, generation
from aioinfer.params import DiffusionParams, Grammar, SamplingParams
from tests.diffusion.cases import MASK, VOCAB, Case, Denoiser
from tests.diffusion.reference import DELETE, SPLIT, Row

NAME = "joint_threshold_indel"
GREEDY = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": 1}
D, S, M = DELETE, SPLIT, MASK


@dataclass
class Said(Case):
    """One row; by round, the likeliest token of each position, and the next likeliest. The last round is said
    again and again."""

    said: list[list[int]] = field(default_factory=list)
    next: int = 9

    def logits(self, row: int, round: int) -> torch.Tensor:
        logits = torch.zeros(self.size, VOCAB)
        logits[:, self.next] = 4.0
        tokens = self.said[min(round, len(self.said) - 1)]
        # Later positions are surer.
        sure = 8.0 + torch.arange(self.size) / 10
        logits[torch.arange(self.size), torch.tensor(tokens)] = sure
        return logits


def blocks(given: list[int], said: list[list[int]], **params: Any) -> list[list[int]]:
    """The block after each round."""
    size = len(said[0])
    row = Row(NAME, given, size, MASK, 0, params, dict(GREEDY))
    denoiser = Denoiser.of(Said(NAME, size, torch.float32, [row], [0], said))
    found = []
    while not denoiser.block.done.all():
        denoiser.step()
        found.append(denoiser.block.ids[0].tolist())
        assert denoiser.block.known[0].tolist() == [
            at < len(given) or token != MASK for at, token in enumerate(found[-1])
        ]
    return found


@pytest.mark.parametrize(
    ("given", "said", "wanted"),
    [
        # what follows moves up, and a mask comes behind
        ([], [[1, 3, 4, 5], [1, D, 4, 5], [1, 4, 5, 6]], [[1, 3, 4, 5], [1, 4, 5, M], [1, 4, 5, 6]]),
        # a mask comes before the token, and the last one is lost
        ([], [[1, 3, 4, 5], [1, S, 4, 5], [1, 6, 3, 4]], [[1, 3, 4, 5], [1, M, 3, 4], [1, 6, 3, 4]]),
        # both at once, and a token that is replaced
        ([], [[1, 3, 4, 5], [D, S, 4, 8], [6, 3, 4, 8]], [[1, 3, 4, 5], [M, 3, 4, 8], [6, 3, 4, 8]]),
        # masks can be deleted and split, too
        ([], [[D, 3, S, 5], [3, 6, 8, 5]], [[3, M, M, 5], [3, 6, 8, 5]]),
        # the prompt stays, whatever is said there, also if it spells a mask
        ([M, 1], [[D, S, D, 4], [3, D, 4, 6]], [[M, 1, 4, M], [M, 1, 4, 6]]),
        # of the last position nothing is lost but the token
        ([1, 3, 4], [[1, 3, 4, 5], [1, 3, 4, S], [1, 3, 4, 6]], [[1, 3, 4, 5], [1, 3, 4, M], [1, 3, 4, 6]]),
    ],
)
def test_tokens_that_delete_and_split(
    given: list[int], said: list[list[int]], wanted: list[list[int]]
) -> None:
    assert blocks(given, said) == [*wanted, wanted[-1]]


def test_what_is_known_of_a_token_moves_with_it() -> None:
    said = [[1, 3, 4, 5], [1, S, 4, 5], [1, 6, 3, 4]]
    row = Row(NAME, [], 4, MASK, 0, {"threshold": 0.9}, dict(GREEDY))
    denoiser = Denoiser.of(Said(NAME, 4, torch.float32, [row], [0], said))
    denoiser.step()
    before = denoiser.block.logprobs[0].tolist()
    denoiser.step()
    block = denoiser.block
    assert block.written_in[0].tolist() == [0, 1, 0, 0]
    assert block.logprobs[0].tolist() == [before[0], 0.0, *before[1:3]]
    assert block.changed.all()
    denoiser.step()
    assert block.written_in[0].tolist() == [0, 2, 0, 0]
    denoiser.step()
    assert block.done.all()
    assert not block.changed.any()


def test_masks_that_were_inserted_are_filled_beside_one_of_the_first() -> None:
    """Unsure, and yet two at once while one of them is new; all, when only such are left."""
    said = [[1, 3, 4, S], [S, 3, 4, 5], [1, 3, 4, 5]]
    found = blocks([], said, threshold=1.0)
    assert found[0] == [M, M, M, M]
    assert [each.count(M) for each in found[:4]] == [4, 2, 1, 0]


def test_a_block_that_was_seen_goes_on_with_a_token_that_was_not_tried() -> None:
    """Between two blocks for ever, but for the position that is least sure."""
    said = [[1, 3, 4, 5], [6, 3, 4, 8], [1, 3, 4, 5], [6, 3, 4, 8], [1, 3, 4, 5]]
    found = blocks([], said)
    assert found[:3] == [[1, 3, 4, 5], [6, 3, 4, 8], [1, 3, 4, 5]]
    # Position 0 was 1 and 6.
    assert found[3] == [9, 3, 4, 8]


@pytest.mark.parametrize("most", [0, 1, 3])
def test_the_last_round_writes_neither_masks_nor_edits(most: int) -> None:
    """Without it this one would delete for ever."""
    found = blocks([], [[1, 3, D, 5], [D, D, D, D]], max_post_edits=most)
    assert len(found) == 1 + most
    assert not {D, S, M} & {*found[-1]}


def test_a_block_ends_in_as_many_rounds_as_its_positions_and_edits() -> None:
    """Masks of the first round that split are still there."""
    found = blocks([], [[S, S, S, S]], threshold=1.0, max_post_edits=2)
    assert len(found) == 4 + 2 + 1
    assert found[-1] == [9, 9, 9, 9]


def test_only_a_model_with_these_tokens_can_have_it() -> None:
    params = SamplingParams(diffusion=DiffusionParams(algorithm=NAME))
    config = EngineConfig(diffusion_algorithm=NAME)
    with pytest.raises(InvalidRequest, match="needs a model whose config has delete_token_id") as caught:
        generation(8).cursor(params)
    assert caught.value.field == "algorithm"
    with pytest.raises(ConfigError, match="diffusion_algorithm: joint_threshold_indel needs a model"):
        default_diffusion(config, 8)
    assert generation(8, edits=True).cursor(params) is not None
    with pytest.raises(InvalidRequest, match="joint_threshold_indel knows no grammars"):
        generation(8, edits=True).cursor(replace(params, grammar=Grammar("regex", "[a-z]+")))
    assert default_diffusion(config, 8, edits=True) == params.diffusion
