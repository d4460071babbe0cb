"""Templates of token ids, and what must come of them: each request alone, block by block, without an engine."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from aioinfer.diffusion.registry import algorithm_class
from aioinfer.params import DiffusionParams, SamplingParams
from tests.engine.block_parity import Asked, to_the_end
from tests.engine.block_worlds import Plain
from tests.toys.blocks import ScriptedDevice, begin_blocks

Template = list[int | None]


def templates(size: int, pin: int) -> list[Template]:
    """Pins and holes at all sorts of places: the ends of blocks, whole blocks, the first and the last."""
    hole: Template = [None]
    return [
        hole * 3,
        [pin] + hole * (size - 1),
        hole * 2 + [pin] * 3 + hole,
        [pin] * (2 * size + 1) + hole,
        hole + [pin] * (3 * size) + hole * 2,
        (hole + [pin]) * (size + 1),
        hole * (2 * size) + [pin],
        hole * size + [pin] * size + hole * size + [pin] * 2,
        [pin, pin + 1] + hole * (size + 2) + [pin],
    ]


def pinned_requests(algorithm: str, size: int, vocab_size: int, **options: object) -> list[Asked]:
    """Each template behind prompts that end around a block's end; some go on behind it, or end within."""
    rng = random.Random(algorithm)
    asked: list[Asked] = []
    for length in (1, size - 1, size, size + 3):
        for template in templates(size, 9):
            more = rng.choice([0, 0, 0, 2, size + 1, -1])
            most = max(1, len(template) + more)
            params = to_the_end(DiffusionParams(algorithm=algorithm), most, template=template, **options)
            asked.append((rng.choices(range(10, vocab_size), k=length), params))
    return asked


def fill(device: ScriptedDevice, prompt: Sequence[int], params: SamplingParams) -> Plain:
    """What one request must get."""
    size, mask_id, script = device.block_size, device.mask_token_id, device.script
    template, most = params.template, params.max_tokens
    assert template is not None
    assert most is not None
    fixed = [*prompt, *template]
    given = [*fixed, *([None] * (2 * size + most))]
    end = len(fixed) if most <= len(template) else len(given)
    diffusion, plain = params.diffusion or DiffusionParams(), Plain()
    cls, before = algorithm_class(diffusion.algorithm), torch.zeros(1, dtype=torch.int64)
    for start in range(0, len(prompt) + most, size):
        tokens = given[start : start + size]
        block = begin_blocks([[]], [start], size=size, mask_id=mask_id)
        for at, token in enumerate(tokens):
            block.editable[0, at] = token is None and start + at < end
            block.known[0, at] = token is not None
            block.ids[0, at] = mask_id if token is None else token
        state = cls.init_state([diffusion], [params], [params.seed or 0])
        while bool((block.editable & ~block.known).any()) or (bool(block.editable.any()) and not block.done):
            drawn = params.temperature > 0
            cls(mask_id).step(script.logits(before, block.ids), block, state, drawn=drawn)
        before = script.chain(before, script.digest(block.ids))
        columns = (block.ids, block.written_in, block.logprobs)
        for at, values in enumerate(zip(*(column[0].tolist() for column in columns), strict=True)):
            if start + at >= len(prompt) and len(plain.ids) < most:
                plain.ids.append(values[0])
                plain.steps.append(values[1])
                plain.logprobs.append(values[2])
    return plain
