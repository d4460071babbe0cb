"""Random engines on the toy device, what is asked of them, and what any correct engine must answer."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from aioinfer.config import EngineConfig, policy_names
from aioinfer.engine import Engine
from aioinfer.execution.device import StepOutOfMemory
from aioinfer.images.prompt import shown
from aioinfer.outputs import Result, TokenLogprob
from aioinfer.params import SamplingParams
from aioinfer.pooling import KINDS, Pooling
from aioinfer.scheduling.step import Row, Step
from aioinfer.testing import TimedLauncher
from tests.engine.adapting import Adapting
from tests.engine.branches import Branching
from tests.engine.imaging import PLACE, Imaging
from tests.engine.processors import Steering, Written, written
from tests.engine.reading import Injected
from tests.engine.stores import FlakyStore
from tests.speculation.drafters import KINDS as DRAFTERS
from tests.speculation.drafters import Guesser
from tests.toys import ToyDevice, ToyTokenizer, toy_generate
from tests.toys.device import toy_logprob
from tests.toys.pooling import toy_pooled

VOCAB = 64
#: that processors see at the positions of images
IMAGE_TOKEN = ToyTokenizer(VOCAB).encode(PLACE)[0]


@dataclass
class Claim:
    """What an engine has answered."""

    number: int
    behaviour: str
    prompt: list[int]
    params: SamplingParams
    ids: list[int]
    text: str
    #: None: the consumer left before the end
    reason: str | None
    #: if the consumer waited for it
    result: Result | None
    #: how many tokens weights of which version computed
    versions: list[tuple[int, int]] = field(default_factory=list)
    #: key of the adapter that it was accepted with
    adapter: int = 0
    #: of a request that only prefills
    pooling: Pooling | None = None
    #: its processors or its grammar have ended it: "processor", "grammar"
    failed: str | None = None
    #: what it was given of its output, and how many of these tokens another stream has written
    begun: list[int] = field(default_factory=list)
    kept: int = 0


@dataclass
class World:
    """One engine under test, the dice, and what came of its requests."""

    rng: random.Random
    engine: Engine
    #: has ``lost`` and ``steps``
    device: Any
    launcher: TimedLauncher
    #: what a request may ask for
    params: Callable[[random.Random], SamplingParams]
    #: raises if claims are not what any correct engine answers
    verify: Callable[[World, Sequence[Claim]], None]
    #: what some requests do instead of generating; None: nothing
    prefills: Callable[[SamplingParams], tuple[SamplingParams, Pooling | None]] | None = None
    claims: list[Claim] = field(default_factory=list)
    outcomes: list[tuple[Any, ...]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    #: times that a stream was cut and went on from its checkpoint
    restored: int = 0
    #: None: nobody loads any
    adapters: Adapting | None = None
    #: seconds between two updates of the weights; None: there are none
    renewal: float | None = None
    #: keeps pages besides the engine; None: nothing does
    store: FlakyStore | None = None
    #: seconds between two flushes of the prefix cache besides those of the operator; None: there are none
    forgetting: float | None = None
    #: what steers the streams; None: nothing does
    steering: Steering | None = None
    #: forks, rewinds and injections; None: there are none
    branching: Branching | None = None
    #: images in prompts; None: there are none
    imaging: Imaging | None = None


#: policy, admission, mixed, prefix cache
COMBINATIONS = list(itertools.product(policy_names(), ("fifo", "pack"), (True, False), (True, False)))


class Faults:
    """Steps that fail, and memory that is short now and then, before or after the forward, or for steps of
    more tokens than one of ``scarce``."""

    def __init__(
        self, seed: int, dice: random.Random, rate: float, lose_at: int | None, scarce: Sequence[int]
    ) -> None:
        self.device: Any = None
        self._dice = dice
        self._rate = rate
        self._lose_at = lose_at
        self._memory = memory = random.Random(seed + 2)
        self._shortages = memory.choice([0.0, 0.0, 0.02, 0.2]) if rate else 0.0
        self._most_tokens = memory.choice([1000] * 8 + list(scarce)) if rate else 1000

    def early(self, step: Step) -> None:
        if self._lose_at is not None and step.id >= self._lose_at:
            self.device.lost = True
            raise Injected("the device is lost")
        if self._dice.random() < self._rate:
            raise Injected(f"step {step.id}")
        if step.num_tokens > self._most_tokens or self._memory.random() < self._shortages / 2:
            raise StepOutOfMemory(f"step {step.id}")

    def late(self, step: Step) -> None:
        if self._memory.random() < self._shortages / 2:
            raise StepOutOfMemory(f"step {step.id}, late")


def random_switches(rng: random.Random) -> dict[str, Any]:
    """Settings that any engine may have."""
    return {
        "max_queued_requests": rng.choice([10, 1000, 1000, 1000]),
        "max_queued_tokens": rng.choice([300, 100_000, 100_000, 100_000]),
        "max_decode_rows": rng.choice([None, None, 1, 3]),
        "step_priority": rng.choice(["decode", "prefill"]),
        "max_overlapped_prefill": rng.choice([0, 4, 1000]),
        "preemption": rng.random() < 0.5,
        "lookahead": rng.choice([1, 4, 64]),
        "force_fifo_every": rng.choice([0, 2, 8]),
        "max_passed_over": rng.choice([1, 4, 16]),
        "new_token_ratio": rng.choice([0.0, 0.4, 1.0]),
        "min_new_token_ratio": rng.choice([0.0, 0.1]),
        "max_lag": rng.choice([None, None, 1, 5]),
    }


def make_world(
    seed: int, fault_rate: float = 0.02, lose_at: int | None = None, imaging: Imaging | None = None
) -> World:
    rng = random.Random(seed)
    # Neighbouring seeds go through every combination of the switches.
    policy, admission, mixed, prefix_cache = COMBINATIONS[seed % len(COMBINATIONS)]
    page_size = rng.choice([1, 2, 4, 8])
    max_running = rng.randint(1, 8)
    num_pages = rng.randint(8, 40) if page_size > 1 else rng.randint(24, 60)
    settings: dict[str, Any] = {"overlap_steps": rng.choice([0, 1, 2]), "admission": admission}
    drafting, drafter = random_drafting(random.Random(seed + 5))
    adapting = Adapting.of(random.Random(seed + 6))
    settings["max_step_tokens"] = max_running + rng.choice([0, 3, 30])
    settings |= {} if imaging is None else imaging.settings(max_running)
    config = EngineConfig(
        model="toy",
        page_size=page_size,
        max_running_requests=max_running,
        chunk_size=rng.choice([1, 3, 8, 64]),
        state_snapshot_tokens=random.Random(seed + 4).choice([1, 1, 5, 64]),
        seed=seed,
        max_adapters=0 if adapting is None else adapting.most,
        max_prefill_tokens=rng.choice([None, None, 4, 16]),
        mixed=mixed,
        policy=policy,
        itl_target=random.Random(seed + 7).choice([0.0, 0.001, 0.02, 0.2]),
        prefix_cache=prefix_cache,
        share_prefix_tokens=rng.choice([0, 4, 8]),
        # Processors that are late come back to the steps at once, or never.
        grammar_patience=random.Random(seed + 10).choice([0.0, 1000.0]),
        **settings,
        **drafting,
        **random_switches(rng),
    )
    dice = random.Random(seed + 1)
    faults = Faults(seed, dice, fault_rate, lose_at, scarce=[1, 6])
    deferral_rate = rng.choice([0.0, 0.0, 0.1, 0.4])

    def defer(row: Row) -> int | None:
        if dice.random() >= deferral_rate:
            return None
        # What nobody samples has no logprob, and nobody decides it.
        params, free = row.sequence.params, dice.choice([0, 1, 2, 9])
        return 0 if params.logprobs is not None or params.logits_processors or params.masked else free

    # Of its own dice, so that the others fall as they did before there were states.
    snapshots = random.Random(seed + 3).choice([*[None] * 6, 0, 1, 2, 3, 8, 100])
    tokenizer = ToyTokenizer(VOCAB, looks_up=seed % 2 == 1)
    if imaging is not None:
        tokenizer = imaging.tokenizer(VOCAB, looks_up=seed % 2 == 1)
    device = ToyDevice(
        num_pages=num_pages,
        page_size=page_size,
        num_slots=config.num_slots,
        vocab_size=VOCAB,
        fault=faults.early,
        late_fault=faults.late,
        defer=defer,
        snapshots=snapshots,
        max_adapters=config.adapter_slots,
        images=None if imaging is None else imaging.support(tokenizer),
    )
    faults.device = device
    launcher = TimedLauncher(
        device, lambda step: dice.choice([0.0, 0.001, 0.01, 0.03]) + 1e-4 * step.num_tokens
    )
    engine = Engine(config, launcher=lambda _: launcher, tokenizer=lambda _: tokenizer, drafter=drafter)
    renewal = random.Random(seed + 6).choice([None, 0.01, 0.05, 0.2])
    renewal, store = random_store(seed, renewal, prefix_cache=prefix_cache)
    return World(
        *(rng, engine, device, launcher, random_params, verify, random_prefills),
        adapters=adapting,
        renewal=renewal,
        store=store,
        imaging=imaging,
    )


def make_seeing_world(seed: int, fault_rate: float = 0.02, lose_at: int | None = None) -> World:
    """The same worlds, in which most prompts have images."""
    return make_world(seed, fault_rate, lose_at, Imaging.of(seed))


def random_store(
    seed: int, renewal: float | None, *, prefix_cache: bool
) -> tuple[float | None, FlakyStore | None]:
    """A store in most engines with a prefix cache; these seldom renew their weights: pages of later ones are
    not stored."""
    rng = random.Random(seed + 8)
    if not prefix_cache or rng.random() < 0.3:
        return renewal, None
    renewal = rng.choice([None, None, renewal])
    return renewal, FlakyStore(rng, rng.choice([1, 4, 30, 1000]), rng.choice([0.0, 0.05, 0.3]))


def with_store(make: Callable[..., World]) -> Callable[..., World]:
    """The same worlds, each with a store that has most of what the engine itself forgets soon."""

    def made(seed: int, *arguments: Any) -> World:
        world = make(seed, *arguments)
        rng = random.Random(seed + 9)
        if world.engine.config.prefix_cache:
            world.store = FlakyStore(rng, 1000, 0.1)
            world.renewal = None
            world.forgetting = rng.choice([0.01, 0.05])
        return world

    return made


def with_processors(make: Callable[..., World]) -> Callable[..., World]:
    """The same worlds, in which most requests have logits processors."""

    def made(seed: int, fault_rate: float, lose_at: int | None) -> World:
        rng = random.Random(seed + 11)
        world = make(seed, fault_rate * rng.choice([0.0, 0.2, 1.0]), lose_at)
        world.steering = Steering(rng)
        world.device.masks.patience = rng.choice([1000.0, 1000.0, 0.0])
        if rng.random() < 0.5:
            world.renewal = None
        return world

    return made


def with_branches(make: Callable[..., World]) -> Callable[..., World]:
    """The same worlds, in which most streams are forked, rewound and injected into."""

    def made(seed: int, *arguments: Any) -> World:
        world = make(seed, *arguments)
        world.branching = Branching(random.Random(seed + 12))
        return world

    return made


def random_drafting(rng: random.Random) -> tuple[dict[str, Any], Guesser | None]:
    """Settings of speculation, and a drafter in place of the config's in most engines."""
    drafter = Guesser(rng.choice(DRAFTERS), rng, VOCAB) if rng.random() < 0.8 else None
    return {
        "speculation": rng.choice(["off", "lookup"]),
        "max_draft_tokens": rng.choice([1, 2, 5, 15]),
        "adaptive_drafts": rng.random() < 0.3,
    }, drafter


def random_params(rng: random.Random) -> SamplingParams:
    stop = rng.choice([(), (), ("a",), ("ab", "zz"), ("üb", "cd", "x")])
    return SamplingParams(
        temperature=rng.choice([0.0, 1.0]),
        seed=rng.randrange(1 << 40),
        max_tokens=rng.choice([1, 2, 5, 20, 40]),
        min_tokens=rng.choice([0, 0, 0, 1]),
        stop=stop,
        stop_token_ids=rng.choice([(), (), (3, 4, 5)]),
        ignore_eos=rng.random() < 0.3,
        include_stop=rng.random() < 0.2,
        logprobs=rng.choice([None, None, 0]),
        prompt_logprobs=rng.choice([None, None, None, 0]),
    )


def random_prefills(params: SamplingParams) -> tuple[SamplingParams, Pooling | None]:
    """Of its own dice: some requests have no output, and most of these pool."""
    assert params.seed is not None
    rng = random.Random(params.seed + 6)
    start = rng.choice([0, 0, 1, 5, 1000])
    if params.prompt_logprobs is not None:
        params = params.changed(logprob_start_len=start)
    if rng.random() < 0.7:
        return params, None
    kind = rng.choice([*KINDS, None])
    params = params.changed(max_tokens=0, min_tokens=0)
    if kind in (None, "cls", "classes"):
        return params, None
    return params, Pooling(kind, (3, 9, 40) if kind == "choices" else ())


def of_prompt(params: SamplingParams) -> SamplingParams:
    """Those of them that apply to a prompt that is pooled."""
    return SamplingParams(
        max_tokens=0, prompt_logprobs=params.prompt_logprobs, logprob_start_len=params.logprob_start_len
    )


def verify(world: World, claims: Sequence[Claim]) -> None:
    """Answers are those of the plainest toy."""
    for claim in claims:
        params = claim.params
        steered = params.logits_processors or params.masked
        verify_claim(claim, expected(world, claim, _steered if steered else _plain))


def expected(world: World, claim: Claim, generate: Callable[..., Written]) -> Written:
    """What weights of all versions of a claim have written one after the other."""
    begun = len(claim.begun)
    found = Written(claim.begun, {*range(claim.kept, begun)})
    for version in [each for _, each in claim.versions] or [0]:
        count = begun + sum(count for count, before in claim.versions if before < version)
        forced = {at for at in found.forced if at < count}
        limit = world.engine.info.max_model_len
        found = generate(claim, limit, weights=version, begun=found.ids[:count])
        found.forced |= forced
    return found


def _plain(claim: Claim, limit: int, **rest: Any) -> Written:
    seed = claim.params.seed
    assert seed is not None
    given = {"seed": seed, "vocab_size": VOCAB, "max_length": limit, "adapter": claim.adapter, **rest}
    return Written(toy_generate(claim.prompt, claim.params, **given))


def _steered(claim: Claim, limit: int, **rest: Any) -> Written:
    given = {"vocab_size": VOCAB, "limit": limit, "adapter": claim.adapter, **rest}
    return written(claim.prompt, claim.params, shown=shown(claim.prompt, IMAGE_TOKEN), **given)


def verify_claim(claim: Claim, found: Written) -> None:
    params = claim.params
    if claim.failed is not None:
        ids, _text, reason = ended(found.ids, params)
        assert reason == "length", (claim, found)
        assert (claim.failed, claim.ids) == (found.failed, ids), (claim, found)
        return
    if found.failed is not None and claim.reason is not None:
        assert claim.reason != "length", (claim, found)
    verify_ids(claim, found.ids)
    result = claim.result
    if result is None:
        return
    start = len(result.prompt_token_ids)
    for at, logprob in enumerate(result.logprobs or ()):
        token = result.token_ids[at]
        certain = TokenLogprob(token, 0.0, ())
        right = [certain if at in found.forced else toy_logprob(start + at, token)]
        assert logprob in right or (at < claim.kept and logprob == certain), claim
    for at, scored in enumerate((result.prompt_logprobs or ())[1:], 1):
        wanted = toy_logprob(at, result.prompt_token_ids[at])
        assert scored == (None if at < params.logprob_start_len else wanted)
    if claim.pooling is not None:
        pooled = toy_pooled(
            *(claim.prompt, claim.pooling), adapter=claim.adapter, weights=result.weight_version
        )
        assert (result.pooled == pooled).all()
    assert result.prompt_logprobs is None or len(result.prompt_logprobs) == start, (claim, found)


def verify_ids(claim: Claim, ids: list[int]) -> None:
    """``ids``: what comes of the claim's request if no text ends it."""
    ids, text, reason = ended(ids, claim.params)
    if claim.reason is not None:
        assert (claim.ids, claim.text, claim.reason) == (ids, text, reason), claim
    else:
        # What was delivered before the consumer left is a prefix of what would have come.
        assert claim.ids == ids[: len(claim.ids)], claim
        assert text.startswith(claim.text), claim
    if claim.result is not None:
        logprobs = claim.result.logprobs
        assert logprobs is None or [each.token_id for each in logprobs] == ids


def _first_stop(text: str, stops: Sequence[str], before: int, free: int) -> tuple[int, int] | None:
    """End and begin of the stop string that ends first behind ``before``, and begins behind ``free``."""
    found = [(text.find(stop, max(free, before - len(stop) + 1)), len(stop)) for stop in stops]
    return min(((at + size, at) for at, size in found if at >= 0), default=None)


def ended(ids: list[int], params: SamplingParams) -> tuple[list[int], str, str]:
    """Ids, text and finish reason where stop strings and tokens end a stream of ids."""
    pieces = ToyTokenizer(VOCAB)._pieces
    stop_ids = set(params.stop_token_ids) | (set() if params.ignore_eos else {0})
    text, free = "", 0  # where the last stop has ended that came too early to be one
    for index, token in enumerate(ids):
        ended = token in stop_ids
        if not ended or params.include_stop:
            before = len(text)
            text += pieces[token]
            while hit := _first_stop(text, params.stop, before, free):
                end, at = hit
                if index >= params.min_tokens:
                    return ids[: index + 1], text[: end if params.include_stop else at], "stop"
                free = end
        if ended:
            return ids[: index + 1], text, "stop"
    return ids, text, "length"
