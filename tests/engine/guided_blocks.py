"""Random engines whose blocks have constraints, and what must come of them.

Answers are compared with those of the algorithms and guides alone, block by block, and each is one that a
fresh matcher accepts, which is none of the guides' doing.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from aioinfer.diffusion.block import Block
from aioinfer.diffusion.registry import algorithm_class, usable_algorithms
from aioinfer.errors import InvalidRequest
from aioinfer.execution.decoding.block_steering import BlockSteering
from aioinfer.execution.grammar_worker import GrammarWorker
from aioinfer.loop.preparing import Preparing
from aioinfer.outputs import TokenLogprob
from aioinfer.params import DiffusionParams, Grammar, SamplingParams
from aioinfer.scheduling.step import NewRequestData
from aioinfer.text.bad_words import spell
from aioinfer.text.grammar import Compiler
from tests.diffusion.cases import take, take_blocks
from tests.engine import block_worlds
from tests.engine.block_worlds import make_block_world
from tests.engine.reading import replay
from tests.engine.worlds import Claim, World, verify_ids
from tests.toys.blocks import ScriptedDevice, begin_blocks
from tests.toys.scripted import ScriptedLogits

__all__ = ["Guided", "decode", "make_constrained_world"]

#: of a block; algorithms that edit take the most
_MOST_ROUNDS = 60
#: of the toy's letters; some have dead ends, as there is no token for a single "a"
GRAMMARS = (
    Grammar("choice", '["bcd", "dcb", "b", "über", "hha"]'),
    Grammar("regex", "[a-d]{3,9}"),
    Grammar("regex", "(ab|c[d-f]{2,5})+x?"),
    Grammar("regex", "a{3}(b|[^c])*"),
    # Where a token is known, what comes before it must not change its length: paths are kept.
    Grammar("regex", "([^x]{3}x|[^y]{2}yy){1,9}"),
    Grammar("lark", 'start: (x | "b")+ "c"\nx: /[de]{2}/ | "a" start'),
)

Asked: TypeAlias = tuple[list[int], SamplingParams]


def make_constrained_world(seed: int, *arguments: Any) -> World:
    """The worlds of a diffusion model, in which most requests have a grammar, bad words, or both."""
    world = make_block_world(seed, *arguments)
    plain = world.params

    def params(rng: random.Random) -> SamplingParams:
        return constrained(plain(rng), rng)

    world.params, world.verify = params, verify
    return world


def constrained(params: SamplingParams, rng: random.Random) -> SamplingParams:
    wanted = rng.choice(["grammar", "grammar", "grammar", "bad words", "both", "none"])
    if params.template is not None or algorithm_class(_diffusion(params).algorithm).moves:
        return params  # these have no constraints besides
    if wanted in ("grammar", "both"):
        params = params.changed(grammar=rng.choice(GRAMMARS), ignore_eos=False, min_tokens=0)
    if wanted in ("bad words", "both"):
        params = params.changed(bad_words=rng.choice([("a", "bc"), ((1,), (5, 6)), ("x", "ü")]))
    return params


@dataclass
class Guided:
    """What one request must get, by token."""

    ids: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    #: it cannot go on behind these
    failed: bool = False


def verify(world: World, claims: Sequence[Claim]) -> None:
    guided = [claim for claim in claims if claim.params.masked]
    block_worlds.verify(world, [claim for claim in claims if not claim.params.masked])
    versions = {claim.number: claim.versions[0][1] if claim.versions else 0 for claim in guided}
    for version in {*versions.values()}:
        mine = [claim for claim in guided if versions[claim.number] == version]
        script, preparing = world.device.script_of(version), world.engine._core.preparing
        asked = [(claim.prompt, claim.params) for claim in mine]
        longest = world.engine.info.max_model_len
        for claim, found in zip(mine, decode(world.device, script, asked, longest, preparing), strict=True):
            verify_claim(claim, found)
            verify_constraints(claim, preparing)


def verify_claim(claim: Claim, found: Guided) -> None:
    if len(claim.versions) > 1:
        # The block under way begins again, with what there is of it: not where a plain one would.
        count = claim.versions[0][0]
        assert claim.ids[:count] == found.ids[:count], claim
        return
    if claim.failed is not None or found.failed:
        assert found.failed, claim
        # What another stop has ended before is none of it.
        count = min(len(claim.ids), len(found.ids))
        assert claim.ids[:count] == found.ids[:count], claim
        assert claim.reason is None or count == len(claim.ids), claim
        return
    verify_ids(claim, found.ids)
    if claim.result is None:
        return
    count = len(claim.ids)
    assert claim.result.step_map == found.steps[:count], claim
    if claim.result.logprobs is not None:
        pairs = zip(found.ids[:count], found.logprobs[:count], strict=True)
        plain = [TokenLogprob(each.token_id, each.logprob) for each in claim.result.logprobs]
        assert plain == [TokenLogprob(*pair) for pair in pairs], claim


def verify_constraints(claim: Claim, preparing: Preparing) -> None:
    """A fresh matcher accepts whatever has come, and accepts no more behind an end."""
    params = claim.params
    ended = claim.reason == "stop" and claim.ids[-1] == 0
    if params.structure is not None:
        compiler = Compiler(preparing._grammar_compiler().backend)
        replay(compiler, params.structure, claim.ids, ended=ended)
    for word in spell(params.bad_words, preparing._tokenizer):
        parts = [claim.ids[at : at + len(word)] for at in range(len(claim.ids))]
        assert list(word) not in parts, (claim, word)


def decode(
    device: ScriptedDevice,
    script: ScriptedLogits,
    asked: Sequence[Asked],
    longest: int,
    preparing: Preparing,
) -> list[Guided]:
    """Each up to its length, its stop token or its dead end. ``preparing`` compiles grammars."""
    found = [Guided() for _ in asked]
    for name in usable_algorithms((1, 2)):
        rows = [row for row, (_, params) in enumerate(asked) if _diffusion(params).algorithm == name]
        if rows:
            mine = [asked[row] for row in rows]
            _decode(
                device,
                script,
                name,
                mine,
                [found[row] for row in rows],
                longest,
                _steering(mine, device, preparing, longest),
            )
    return found


def _steering(
    asked: Sequence[Asked], device: ScriptedDevice, preparing: Preparing, longest: int
) -> BlockSteering:
    steering = BlockSteering(device.block_size, GrammarWorker(1000.0, threaded=False))
    for row, (prompt, params) in enumerate(asked):
        try:
            grammar = preparing.complete(prompt, params, _ends(params)).grammar
        except InvalidRequest:
            grammar = None  # the request was refused, too, and has no output
        most = min(longest, len(prompt) + (longest if params.max_tokens is None else params.max_tokens))
        data = NewRequestData(params, params.seed or 0, _ends(params), prompt, (), grammar, max_length=most)
        steering.admit(row, data)
    return steering


def _decode(
    device: ScriptedDevice,
    script: ScriptedLogits,
    algorithm: str,
    asked: Sequence[Asked],
    found: Sequence[Guided],
    longest: int,
    steering: BlockSteering,
) -> None:
    """Side by side; rows have nothing to do with each other."""
    size, mask_id = device.block_size, device.mask_token_id
    cls = algorithm_class(algorithm)
    starts = [len(prompt) // size * size for prompt, _ in asked]
    given = [prompt[start:] for (prompt, _), start in zip(asked, starts, strict=True)]
    block = begin_blocks(given, starts, size=size, mask_id=mask_id)
    state = cls.init_state(
        [_diffusion(params) for _, params in asked],
        [params for _, params in asked],
        [params.seed or 0 for _, params in asked],
    )
    before = torch.tensor([_hash(device, prompt) for prompt, _ in asked])
    live = list(range(len(asked)))
    while live:
        guide = steering.guide(live, alone=True)
        cls(mask_id).step(script.logits(before, block.ids), block, state, guide=guide)
        assert int(block.rounds.max()) <= _MOST_ROUNDS, "a block does not get done"
        going = [
            not done or _extend(found[row], block, at, *asked[row], longest)
            for at, (row, done) in enumerate(zip(live, block.done.tolist(), strict=True))
        ]
        finished = block.done.clone()
        before = torch.where(finished, script.chain(before, script.digest(block.ids)), before)
        for name in cls.counters:
            state[name].masked_fill_(finished, 0)
        following = begin_blocks([[]] * len(live), (block.starts + size).tolist(), size=size, mask_id=mask_id)
        for column, blank in zip(block.columns().values(), following.columns().values(), strict=True):
            where = finished.view(-1, *[1] * (column.dim() - 1))
            column.copy_(torch.where(where, blank, column))
        if not all(going):
            keep = torch.tensor([at for at, goes in enumerate(going) if goes], dtype=torch.int64)
            block, state, before = take_blocks(block, keep), take(state, keep), before[keep]
            live = [row for row, goes in zip(live, going, strict=True) if goes]


def _hash(device: ScriptedDevice, prompt: list[int]) -> int:
    """Of the prompt's whole blocks."""
    script, size = device.script, device.block_size
    before = torch.zeros(1, dtype=torch.int64)
    for stop in range(size, len(prompt) + 1, size):
        before = script.chain(before, script.digest(torch.tensor([prompt[stop - size : stop]])))
    return int(before)


def _extend(
    found: Guided, block: Block, row: int, prompt: list[int], params: SamplingParams, longest: int
) -> bool:
    """A block is done; False if the output ends in it."""
    assert params.max_tokens is not None
    if block.failed[row]:
        found.failed = True
        return False
    most = min(longest - len(prompt), params.max_tokens)
    columns = (block.ids, block.written_in, block.logprobs)
    first = max(0, len(prompt) - int(block.starts[row]))
    for token, step, logprob in zip(*(column[row, first:].tolist() for column in columns), strict=True):
        found.ids.append(token)
        found.steps.append(step)
        found.logprobs.append(logprob)
        if token in _ends(params) or len(found.ids) == most:
            return False
    return True


def _ends(params: SamplingParams) -> frozenset[int]:
    return frozenset({*params.stop_token_ids, *(() if params.ignore_eos else (0,))})


def _diffusion(params: SamplingParams) -> DiffusionParams:
    return params.diffusion or DiffusionParams()
