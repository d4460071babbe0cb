"""Random engines of a diffusion model without a network, what is asked of them, and what must come of it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from aioinfer.config import EngineConfig, policy_names
from aioinfer.diffusion.block import Block
from aioinfer.diffusion.guide import steered
from aioinfer.diffusion.registry import algorithm_class, usable_algorithms
from aioinfer.engine import Engine
from aioinfer.outputs import TokenLogprob
from aioinfer.params import DiffusionParams, SamplingParams
from aioinfer.testing import TimedLauncher
from tests.diffusion.adjusting import adjusted, raw_logprobs
from tests.diffusion.cases import random_params as random_diffusion
from tests.diffusion.cases import take, take_blocks
from tests.engine.worlds import VOCAB, Claim, Faults, World, random_store, random_switches, verify_ids
from tests.toys import ToyTokenizer
from tests.toys.blocks import EDITS, ScriptedDevice, begin_blocks
from tests.toys.scripted import ScriptedLogits

#: mode, fused commit, mixed, rounds of a multi_step, prefix cache
COMBINATIONS = list(
    itertools.product(("fdfo", "fdfo", "sync"), (True, False), (True, False), (1, 4), (True, False))
)
#: blocks and pages
SIZES = ((4, 4), (4, 8), (4, 16), (8, 8), (8, 16), (2, 8), (16, 16))


def make_block_world(seed: int, fault_rate: float = 0.02, lose_at: int | None = None) -> World:
    rng = random.Random(seed)
    mode, fused, mixed, max_rounds, prefix_cache = COMBINATIONS[seed % len(COMBINATIONS)]
    size, page_size = rng.choice(SIZES)
    max_running = rng.choice([1, 2, 4, 8, 8])
    config = EngineConfig(
        model="scripted",
        page_size=page_size,
        max_running_requests=max_running,
        max_step_tokens=max(max_running, 2 * size) + rng.choice([0, size, 4 * size, 200]),
        chunk_size=rng.choice([1, size, 3 * size, 64]),
        max_prefill_tokens=rng.choice([None, None, 2, 2 * size]),
        overlap_steps=rng.choice([0, 1, 1, 2]),
        itl_target=random.Random(seed + 7).choice([0.0, 0.001, 0.02]),
        seed=seed,
        mixed=mixed,
        policy=rng.choice(policy_names()),
        admission=rng.choice(["fifo", "pack"]),
        prefix_cache=prefix_cache,
        share_prefix_tokens=rng.choice([0, page_size, 2 * page_size]),
        diffusion_mode=mode,  # type: ignore[arg-type]
        fused_commit=fused,
        max_rounds=max_rounds,
        **random_switches(rng),
    )
    dice = random.Random(seed + 1)
    faults = Faults(seed, dice, fault_rate, lose_at, scarce=[size, 2 * size])
    device = faults.device = ScriptedDevice(
        # Of blocks for one or two sequences up to enough for all.
        num_pages=rng.randint(8, 50) * size // page_size + 1,
        page_size=page_size,
        num_slots=config.num_slots,
        max_model_len=rng.choice([8, 16]) * size,
        block_size=size,
        vocab_size=VOCAB,
        mask_token_id=rng.choice([None, 7]),
        fault=faults.early,
        late_fault=faults.late,
        script_seed=rng.randrange(1 << 30),
        mean_steps=rng.choice([1.5, 4.0]),
        edits=rng.choice([0, 0, 3]),
    )
    launcher = TimedLauncher(device, lambda step: dice.choice([0.0, 0.001, 0.01]) + 1e-4 * step.num_tokens)
    tokenizer = ToyTokenizer(VOCAB, looks_up=seed % 2 == 1)
    engine = Engine(config, launcher=lambda _: launcher, tokenizer=lambda _: tokenizer)
    renewal = random.Random(seed + 6).choice([None, 0.01, 0.05, 0.2])
    renewal, store = random_store(seed, renewal, prefix_cache=prefix_cache)
    return World(rng, engine, device, launcher, random_params, verify, renewal=renewal, store=store)


def random_params(rng: random.Random) -> SamplingParams:
    algorithm = rng.choice(usable_algorithms((1, 2)))
    given = random_diffusion(algorithm, np.random.default_rng(rng.randrange(1 << 40)))
    temperature = rng.choice([0.0, 0.0, 0.5, 1.0])
    params = SamplingParams(
        temperature=temperature,
        top_k=rng.choice([0, 3]),
        top_p=rng.choice([1.0, 0.9]),
        seed=rng.randrange(1 << 40),
        max_tokens=rng.choice([1, 2, 5, 8, 20, 40]),
        stop=rng.choice([(), (), ("a",), ("ab", "zz"), ("üb", "cd", "x")]),
        stop_token_ids=rng.choice([(), (), (3, 4, 5)]),
        ignore_eos=rng.random() < 0.3,
        include_stop=rng.random() < 0.2,
        logprobs=rng.choice([None, 0]),
        diffusion=DiffusionParams(algorithm=algorithm, draft=rng.random() < 0.3, **given),
    )
    return params if algorithm_class(algorithm).moves else _pinned(_adjusting(params))


def _adjusting(params: SamplingParams) -> SamplingParams:
    """The same, or with parameters that change logits."""
    rng = random.Random(params.seed)
    adjusting: dict[str, Any] = {
        "repetition_penalty": rng.choice([1.5, 0.7]),
        "presence_penalty": rng.choice([1.5, -0.5]),
        "frequency_penalty": 1.0,
        "logit_bias": {rng.randrange(1, VOCAB): rng.choice([12.0, 4.0, -100.0]) for _ in range(4)},
        "allowed_token_ids": sorted(rng.sample(range(VOCAB), 40)),
        "min_tokens": 1,  # more may exceed the context
        "top_n_sigma": 1.3,
        "logprobs": rng.choice([1, 3]),
    }
    if rng.random() < 0.6:
        return params
    return replace(params, **{name: value for name, value in adjusting.items() if rng.random() < 0.4})


def _pinned(params: SamplingParams) -> SamplingParams:
    """Now and then with a template, by dice of its own."""
    dice = random.Random(repr(params.seed))
    if dice.random() < 0.85:
        return params
    pins = dice.choices([None, dice.randrange(10, VOCAB - 1)], [1, 2], k=dice.choice([2, 7, 20, 40]))
    if params.allowed_token_ids is not None:
        params = replace(params, allowed_token_ids=None)
    return replace(params, template=[None, *pins], stop=())


@dataclass
class Plain:
    """What one request must get, by token."""

    ids: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    #: where alternatives are asked for: of all tokens, the likeliest first
    tops: list[list[float]] = field(default_factory=list)


def verify(world: World, claims: Sequence[Claim]) -> None:
    """Answers are those of the algorithms alone, block by block: no pages, no slots, nothing on the way."""
    by_version: dict[int, list[Claim]] = {}
    for claim in claims:
        by_version.setdefault(claim.versions[0][1] if claim.versions else 0, []).append(claim)
    for version, each in by_version.items():
        _verify(world, each, version)


def _verify(world: World, claims: Sequence[Claim], version: int) -> None:
    """Those whose first tokens weights of this version have written."""
    asked = [(claim.prompt, claim.params) for claim in claims]
    longest, script = world.engine.info.max_model_len, world.device.script_of(version)
    for claim, plain in zip(claims, decode(world.device, script, asked, longest), strict=True):
        if len(claim.versions) > 1:
            # The block under way begins again, with what there is of it: not where any plain one would.
            count = claim.versions[0][0]
            assert claim.ids[:count] == plain.ids[:count], claim
            continue
        verify_ids(claim, plain.ids)
        if claim.result is None:
            continue
        count = len(claim.ids)
        assert claim.result.step_map == plain.steps[:count], claim
        if claim.result.logprobs is not None:
            check_logprobs(claim.result.logprobs, plain, claim.params)


def check_logprobs(found: Sequence[TokenLogprob], plain: Plain, params: SamplingParams) -> None:
    """To the bit where only the algorithm writes, else as far as two ways to compute them agree."""
    pairs = zip(plain.ids[: len(found)], plain.logprobs[: len(found)], strict=True)
    if not steered(params):
        assert found == [TokenLogprob(*pair) for pair in pairs]
        return
    for at, (each, (token, logprob)) in enumerate(zip(found, pairs, strict=True)):
        assert each.token_id == token
        assert abs(each.logprob - logprob) < 1e-4
        wanted = sorted(plain.tops[at], reverse=True)[: params.logprobs]
        assert len(each.top) == len({token for token, _ in each.top}) == len(wanted)
        for (other, value), right in zip(each.top, wanted, strict=True):
            assert abs(value - right) < 1e-4
            assert abs(plain.tops[at][other] - right) < 1e-4


def decode(
    device: ScriptedDevice,
    script: ScriptedLogits,
    asked: Sequence[tuple[list[int], SamplingParams]],
    longest: int,
) -> list[Plain]:
    """Each up to its length or its stop token."""
    found = [Plain() for _ in asked]
    for name in usable_algorithms((1, 2)):
        rows = [row for row, (_, params) in enumerate(asked) if _diffusion(params).algorithm == name]
        if rows:
            _decode(device, script, name, [asked[row] for row in rows], [found[row] for row in rows], longest)
    return found


def _decode(
    device: ScriptedDevice,
    script: ScriptedLogits,
    algorithm: str,
    asked: Sequence[tuple[list[int], SamplingParams]],
    found: Sequence[Plain],
    longest: int,
) -> None:
    """Side by side; rows have nothing to do with each other."""
    size, mask_id = device.block_size, device.mask_token_id
    cls = algorithm_class(algorithm)
    starts = [len(prompt) // size * size for prompt, _ in asked]
    block = begin_blocks(
        [prompt[start:] for (prompt, _), start in zip(asked, starts, strict=True)],
        starts,
        size=size,
        mask_id=mask_id,
    )
    for at, each in enumerate(asked):
        _pin(block, at, *each, mask_id)
    state = cls.init_state(
        [_diffusion(params) for _, params in asked],
        [params for _, params in asked],
        [params.seed or 0 for _, params in asked],
        size,
    )
    before = torch.tensor([_hash(device, prompt) for prompt, _ in asked])
    live = list(range(len(asked)))
    tops: list[list[list[float]]] = [[[]] * size for _ in asked]
    while live:
        logits = script.logits(before, block.ids)
        lines, ids = logits.clone(), block.ids.clone()
        changed = [at for at, row in enumerate(live) if steered(asked[row][1])]
        for at in changed:
            lines[at] = _adjusted(logits[at], block, at, asked[live[at]], found[live[at]].ids, mask_id)
        cls(mask_id, None, EDITS).step(lines, block, state)
        for at in changed:
            for place in torch.nonzero(block.changed[at] & (block.written_in[at] == block.rounds[at] - 1)):
                lowered = None
                if place and "penalty" in state:
                    lowered = int(ids[at, place - 1]), float(state["penalty"][at])
                values = raw_logprobs(logits[at, int(place)], mask_id, lowered)
                block.logprobs[at, place] = values[int(block.ids[at, place])]
                tops[live[at]][int(place)] = values
        going = [
            not done or _extend(found[row], block, at, tops[row], *asked[row], longest)
            for at, (row, done) in enumerate(zip(live, block.done.tolist(), strict=True))
        ]
        finished = block.done.clone()
        before = torch.where(finished, script.chain(before, script.digest(block.ids)), before)
        for name in cls.counters:
            state[name].masked_fill_(finished, 0)
        if cls.history:
            state["history"][finished] = 0
        following = begin_blocks([[]] * len(live), (block.starts + size).tolist(), size=size, mask_id=mask_id)
        for column, blank in zip(block.columns().values(), following.columns().values(), strict=True):
            where = finished.view(-1, *[1] * (column.dim() - 1))
            column.copy_(torch.where(where, blank, column))
        for at, (row, ended) in enumerate(zip(live, finished.tolist(), strict=True)):
            if ended:
                _pin(block, at, *asked[row], mask_id)
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


def _pin(block: Block, row: int, prompt: list[int], params: SamplingParams, mask_id: int) -> None:
    """Write what a template has into a block that begins. With as many tokens as it has, it is the end."""
    if params.template is None:
        return
    assert params.max_tokens is not None
    for at in range(block.ids.shape[1]):
        place = int(block.starts[row]) + at - len(prompt)
        if place >= len(params.template):
            block.editable[row, at] = params.max_tokens > len(params.template)
        elif place >= 0 and (pin := params.template[place]) is not None:
            block.ids[row, at], block.known[row, at], block.editable[row, at] = pin, True, False


def _own(block: Block, row: int, prompt: list[int]) -> list[bool]:
    """The positions behind the prompt."""
    return [int(block.starts[row]) + at >= len(prompt) for at in range(block.ids.shape[1])]


def _adjusted(
    logits: torch.Tensor,
    block: Block,
    row: int,
    asked: tuple[list[int], SamplingParams],
    output: list[int],
    mask_id: int,
) -> torch.Tensor:
    """As the request's parameters have them, by another definition than the package's."""
    prompt, params = asked
    own = [a and b for a, b in zip(block.known[row].tolist(), _own(block, row, prompt), strict=True)]
    tokens = zip(block.ids[row].tolist(), own, strict=True)
    return adjusted(
        *(logits, params),
        mask_id=mask_id,
        prompt=prompt,
        before=output,
        block=[token if there else None for token, there in tokens],
        start=int(block.starts[row]),
        stop_ids=[*params.stop_token_ids, *(() if params.ignore_eos else (0,))],
    )


def _extend(
    plain: Plain,
    block: Block,
    row: int,
    tops: list[list[float]],
    prompt: list[int],
    params: SamplingParams,
    longest: int,
) -> bool:
    """A block is done; False if the output ends in it."""
    assert params.max_tokens is not None
    most = min(longest - len(prompt), params.max_tokens)
    stop_ids = {*params.stop_token_ids, *(() if params.ignore_eos else (0,))}
    columns = (block.ids, block.written_in, block.logprobs)
    for token, step, logprob, own, top in zip(
        *(column[row].tolist() for column in columns), _own(block, row, prompt), tops, strict=True
    ):
        if not own:
            continue
        plain.tops.append(top if step >= 0 else [])
        plain.ids.append(token)
        plain.steps.append(step)
        plain.logprobs.append(logprob)
        if token in stop_ids or len(plain.ids) == most:
            return False
    return True


def _diffusion(params: SamplingParams) -> DiffusionParams:
    return params.diffusion or DiffusionParams()
