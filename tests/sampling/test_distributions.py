"""Every combination of what changes a distribution, from parameters to drawn tokens, against the exact one.

Drawn is what an engine draws: parameters by slot, packing, runner, sampler; only the model is replaced by
one that always says the same. Exact are float64 probabilities by the definitions in ``SamplingParams``.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from aioinfer.execution.backends import Direct
from aioinfer.execution.decoding.relay import Relay
from aioinfer.execution.decoding.tokens import TokenDecoding, TokenPacker
from aioinfer.execution.grammar_worker import GrammarWorker
from aioinfer.execution.packing import Packer
from aioinfer.execution.runner import Runner
from aioinfer.params import SamplingParams
from aioinfer.sampling.backend import SamplingBackend
from aioinfer.sampling.batch import PenaltyReset
from aioinfer.sampling.sampler import Sampler
from aioinfer.scheduling.step import Generating, NewRequestData, Step
from tests.model.kernels import kernels_or_skip
from tests.sampling.support import CPU
from tests.tiers import EXACT, INTERPRETER, SECONDS, grid, rest, thinned

Doubles = npt.NDArray[np.float64]

SWITCHES = ("temperature", "top_k", "top_p", "min_p", "penalties", "logit_bias", "allowed_token_ids")
COMBINATIONS = list(itertools.product((False, True), repeat=len(SWITCHES)))
SLOTS = 64
DRAWS = 3072
#: Two looks at each of 144 combinations: right code fails any of them for one seed in 3000.
REJECTED = 1e-6
SEED = 20260


@dataclass
class Case:
    """One request's wishes, what was said so far, and what the model says next."""

    params: SamplingParams
    logits: npt.NDArray[np.float32]
    prompt: list[int]
    output: list[int]

    @property
    def exact(self) -> Doubles:
        """Probabilities by the definitions, in their order, in float64."""
        params, scores = self.params, self.logits.astype(np.float64)
        for token, bias in (params.logit_bias or {}).items():
            scores[token] += bias
        if params.allowed_token_ids is not None:
            forbidden = np.ones(len(scores), bool)
            forbidden[list(params.allowed_token_ids)] = False
            scores[forbidden] = -np.inf
        for token in {*self.prompt, *self.output}:
            penalty = params.repetition_penalty
            scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
        for token in set(self.output):
            count = self.output.count(token)
            scores[token] -= params.frequency_penalty * count + params.presence_penalty
        probabilities = softmax(scores / params.temperature)
        if params.top_k:
            probabilities = kept(probabilities, np.sort(probabilities)[-params.top_k])
        if params.top_p < 1:
            ordered = np.sort(probabilities)[::-1]
            sums = ordered.cumsum()
            assert np.abs(sums - params.top_p).min() > 1e-6, "too close to call in float32"
            probabilities = kept(probabilities, ordered[int((sums < params.top_p).sum())])
        return kept(probabilities, params.min_p * probabilities.max())


def softmax(scores: Doubles) -> Doubles:
    weights: Doubles = np.exp(scores - scores.max())
    return weights / weights.sum()


def kept(probabilities: Doubles, least: float) -> Doubles:
    weights = np.where(probabilities >= least, probabilities, 0.0)
    return weights / weights.sum()


def make_case(seed: int, vocab: int, switches: dict[str, bool]) -> Case:
    """Values by dice, of the kind that leaves several tokens and changes the outcome."""
    rng = np.random.default_rng([SEED, seed, vocab])
    logits = rng.normal(0, 2, vocab).astype(np.float32)
    if vocab > 1000:
        # A few dozen that matter, anywhere in the vocabulary, above a long tail.
        logits -= 4
        logits[rng.choice(vocab, 48, replace=False)] += 8
    likely = np.argsort(logits)[::-1][:32]
    values: dict[str, Any] = {
        "temperature": rng.choice([0.6, 1.5]),
        "top_k": int(rng.integers(5, 20)),
        "top_p": rng.choice([0.7, 0.85, 0.95]),
        "min_p": rng.choice([0.05, 0.1, 0.2]),
        "logit_bias": {int(token): float(rng.normal(0, 2)) for token in rng.choice(likely, 6, replace=False)},
        "allowed_token_ids": sorted({*rng.choice(likely, 16, replace=False).tolist(), 0, 31}),
    }
    fields = {name: value for name, value in values.items() if switches[name]}
    if switches["penalties"]:
        fields |= {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.6}
    prompt = rng.choice(likely, 5).tolist()
    output = rng.choice(likely, 12).tolist()
    return Case(SamplingParams(**fields), logits, prompt, output)


class SameLogits:
    """A model that says the same for every row."""

    def __init__(self, logits: npt.NDArray[np.float32], device: torch.device) -> None:
        self._logits = torch.from_numpy(logits).to(device)
        self.spec: Any = None
        self.encoder = None

    def forward(self, batch: Any, attention: Any) -> torch.Tensor:
        return self._logits.expand(len(batch.logits_rows), -1).clone()


def draw(case: Case, rows: int, sampling: SamplingBackend = "torch") -> npt.NDArray[np.int64]:
    """How often each token came in a step of ``rows`` rows."""
    vocab = len(case.logits)
    return np.bincount(tokens(case, rows, Sampler(SLOTS, vocab, CPU, sampling)), minlength=vocab)


def tokens(case: Case, rows: int, sampler: Sampler, device: torch.device = CPU) -> npt.NDArray[np.int64]:
    """What came in a step of so many rows: other seeds by slot, other positions by row."""
    packer = Packer(TokenPacker(SLOTS), SLOTS, 1, 1 << 20)
    for slot in range(1, SLOTS + 1):
        admission = NewRequestData(case.params, SEED + slot, frozenset(), case.prompt, case.output)
        packer._rows.admit({slot: admission})
    at = np.arange(rows)
    no_requests: list[Any] = [None] * rows
    decodes = Generating(no_requests, 1 + at % SLOTS, len(case.prompt + case.output) + at // SLOTS)
    packed = packer.pack(Step(1, decodes, (), rows))
    if case.params.penalised:
        packed.work.penalty_resets = [
            PenaltyReset(slot, case.prompt, case.output) for slot in range(1, SLOTS + 1)
        ]
    attention: Any = None
    decoding = TokenDecoding(sampler, Relay(SLOTS, device), GrammarWorker())
    output = Runner(SameLogits(case.logits, device), attention, decoding).run(packed, Direct(device))
    found: npt.NDArray[np.int64] = output.tensors[0].cpu().numpy()
    return found


def p_value(counts: npt.NDArray[np.int64], probabilities: Doubles) -> float:
    """How probable counts at least as far off are by chance (Pearson); 0 if something came that cannot.

    Tokens expected less than 5 times are taken together, rarest first, until they are not.
    """
    if counts[probabilities == 0].any():
        return 0.0
    order = np.argsort(probabilities)
    order = order[probabilities[order] > 0]
    wanted, found = probabilities[order] * counts.sum(), counts[order].astype(np.float64)
    # Bins end where the expected count since the last end reaches 5; all above are bins of their own.
    bins, filled = np.empty(len(order), np.int64), 0.0
    number = 0
    for index, expected in enumerate(wanted.tolist()):
        bins[index] = number
        filled += expected
        if filled >= 5:
            number, filled = number + 1, 0.0
    bins = np.minimum(bins, max(number - 1, 0))
    wanted, found = np.bincount(bins, wanted), np.bincount(bins, found)
    if len(wanted) == 1:
        return 1.0
    statistic = float(((found - wanted) ** 2 / wanted).sum())
    half = torch.tensor([(len(wanted) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def fits(counts: npt.NDArray[np.int64], probabilities: Doubles) -> bool:
    """Counts are as chance has them: all together, and no token that should have come is missing."""
    most_missed = probabilities[counts == 0].max(initial=0.0)
    missing = len(counts) * float((1 - most_missed) ** counts.sum())
    return p_value(counts, probabilities) > REJECTED and missing > REJECTED


def name_of(combination: tuple[bool, ...]) -> str:
    return " ".join(itertools.compress(SWITCHES, combination)) or "none"


def case_of(combination: tuple[bool, ...], vocab: int) -> Case:
    return make_case(COMBINATIONS.index(combination), vocab, dict(zip(SWITCHES, combination, strict=True)))


@rest(SECONDS)
@pytest.mark.parametrize("combination", thinned(COMBINATIONS, 42, EXACT), ids=name_of)
def test_draws_follow_the_exact_distribution(
    combination: tuple[bool, ...], sampling: SamplingBackend
) -> None:
    case = case_of(combination, 50)
    counts = draw(case, DRAWS, sampling)
    assert fits(counts, case.exact), (SEED, case, counts)


#: all filters, with all or none of what changes logits
LARGE = [
    (*filters, *(rest,) * 3) for filters in itertools.product((False, True), repeat=4) for rest in (0, 1)
]


@rest(SECONDS)
@pytest.mark.parametrize("combination", grid(LARGE[-1:], LARGE[:-1], EXACT), ids=name_of)
def test_draws_from_a_large_vocabulary_do_so_too(
    combination: tuple[bool, ...], sampling: SamplingBackend
) -> None:
    """Larger than what is taken in one go: rows come one at a time, top-p from a window or by search."""
    case = case_of(combination, 5000)
    counts = draw(case, 384, sampling)
    assert fits(counts, case.exact), (SEED, case, counts)


# -- the same by kernels -----------------------------------------------------------------------------------


def by_kernels(case: Case, rows: int, device: str) -> npt.NDArray[np.int64]:
    """Tokens by the kernels of sampling, on the CPU interpreted."""
    at = torch.device(device)
    return tokens(case, rows, Sampler(SLOTS, len(case.logits), at, "triton"), at)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [50, 5000])
def test_draws_of_compiled_kernels_follow_the_exact_distribution(vocab: int) -> None:
    kernels_or_skip("cuda", compiled=True)
    for combination in COMBINATIONS:
        case = case_of(combination, vocab)
        counts = np.bincount(by_kernels(case, DRAWS, "cuda"), minlength=vocab)
        assert fits(counts, case.exact), (SEED, case, counts)


@rest(SECONDS)
@pytest.mark.parametrize("combination", grid(LARGE[-1:], LARGE[-4::-3], INTERPRETER), ids=name_of)
def test_kernels_draw_the_tokens_of_torch(combination: tuple[bool, ...], device: str) -> None:
    """Whose distribution is tested above."""
    case = case_of(combination, 50)
    wanted = tokens(case, 4, Sampler(SLOTS, 50, CPU, "torch"))
    assert by_kernels(case, 4, device).tolist() == wanted.tolist()
