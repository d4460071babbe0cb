"""What a correct engine must generate on the scripted device, and where it ends."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch

from aioinfer.params import DiffusionParams, SamplingParams
from tests.diffusion import reference
from tests.toys.blocks import ScriptedDevice, scripted_generate, scripted_rounds
from tests.toys.scripted import ScriptedLogits

SIZE, MASK = 8, 63
SCRIPT = ScriptedLogits(64, MASK, mean_steps=3.0, edits=2)


def by_reference(prompt: list[int], algorithm: str, blocks: int) -> list[int]:
    """Blocks one after the other, by the plain reference."""
    ids, before = list(prompt), torch.zeros(1, dtype=torch.int64)
    whole = len(prompt) // SIZE
    for number in range(whole + blocks):
        start = number * SIZE
        if number >= whole:
            given = ids[start:] if number == whole else []
            row = reference.Row(algorithm, given, SIZE, MASK, start, {}, {"temperature": 0.0, "seed": 0})
            while not row.done:
                row.step(SCRIPT.logits(before, torch.tensor([row.ids]))[0])
            ids[start:] = row.ids
        before = SCRIPT.chain(before, SCRIPT.digest(torch.tensor([ids[start : start + SIZE]])))
    return ids[len(prompt) :]


@pytest.mark.parametrize("algorithm", sorted(reference.DEFAULTS))
@pytest.mark.parametrize("length", [1, SIZE - 1, SIZE, 2 * SIZE + 3])
def test_a_request_is_generated_as_by_the_plain_reference(algorithm: str, length: int) -> None:
    prompt = [(5 * at + length) % 64 for at in range(length)]
    wanted = by_reference(prompt, algorithm, 3)

    def generate(**params: Any) -> list[int]:
        sampling = SamplingParams(temperature=0.0, diffusion=DiffusionParams(algorithm=algorithm), **params)
        return scripted_generate(SCRIPT, prompt, sampling)

    for count in (1, SIZE - 1, SIZE, SIZE + 1, len(wanted)):
        assert generate(max_tokens=count, ignore_eos=True) == wanted[:count]
    for at in (0, 3, len(wanted) - 1):
        stop = wanted[at]
        assert (
            generate(max_tokens=100, ignore_eos=True, stop_token_ids=(stop,))
            == wanted[: wanted.index(stop) + 1]
        )
    assert MASK not in wanted


def test_rounds_are_those_that_are_scripted() -> None:
    params = SamplingParams(temperature=0.0, diffusion=DiffusionParams(threshold=0.9))
    before = SCRIPT.chain(torch.zeros(1, dtype=torch.int64), SCRIPT.digest(torch.arange(SIZE).unsqueeze(0)))
    wanted = int(SCRIPT.steps(before, torch.tensor([SIZE - 2]), SIZE))
    rounds = scripted_rounds(SCRIPT, [*range(SIZE), 1, 2], params)
    assert [bool(block.done) for block in islice(rounds, wanted)] == [False] * (wanted - 1) + [True]


def test_pages_are_of_whole_blocks() -> None:
    with pytest.raises(ValueError, match="12"):
        ScriptedDevice(page_size=12, block_size=8)
    info = ScriptedDevice(page_size=16, block_size=8, num_pages=2, max_model_len=30).open()
    assert (info.page_size, info.block_size, info.max_model_len, info.mask_token_id) == (16, 8, 24, 63)
