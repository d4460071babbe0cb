"""Drafts change no bit of a model's output: the demo model in float32 and in deterministic bfloat16."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from aioinfer.config import EngineConfig
from aioinfer.llm import LLM
from aioinfer.outputs import Result
from aioinfer.params import Grammar, SamplingParams
from aioinfer.speculation.drafter import Drafter, DraftRequest
from examples.training.tasks import TASKS, held_out
from tests.engine.asking import SCHEMA
from tests.engine.laws import watch_core
from tests.engine.test_speculation import alike
from tests.model.harness import require
from tests.sequences import sequence_of
from tests.tiers import SIMULATION, grid, nightly, scaled

#: of requests, in each of four samplers
REQUESTS = 200
SAMPLERS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "warm": {"temperature": 0.8, "top_p": 0.9, "min_p": 0.02},
    "penalised": {
        "temperature": 1.0,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.2,
    },
    "hot": {"temperature": 2.0, "top_k": 40, "logit_bias": {40: 2.0, 41: -3.0}, "min_tokens": 15},
}
BUNDLED = EngineConfig().model_path
DRAFTERS = ("oracle", "wrong", "random", "stale")

Asked = tuple[Any, SamplingParams]


class Known:
    """Knows the outputs of requests by their names, and proposes them or something else."""

    def __init__(self, kind: str, outputs: Sequence[Sequence[int]], vocab_size: int) -> None:
        self._kind = kind
        self._outputs = outputs
        self._vocab_size = vocab_size
        self._rng = random.Random(7)

    def propose(self, request: DraftRequest, most: int) -> Sequence[int]:
        rng = self._rng
        if self._kind == "random":
            return [rng.randrange(self._vocab_size) for _ in range(most)]
        at = len(request.tokens) - request.prompt_length - (self._kind == "stale")
        ids = self._outputs[int(request.name)][max(0, at) :][:most]
        right = 0 if self._kind == "wrong" else rng.randrange(4) if self._kind == "partly" else len(ids)
        return [*ids[:right], *((token + 1) % self._vocab_size for token in ids[right:])]


def asked(count: int, sampler: str) -> list[Asked]:
    """Conversations of every task, with what a request may ask for besides its sampler."""
    rng = random.Random(count)
    tasks = sorted(TASKS)
    found: list[Asked] = []
    for number in range(count):
        item = held_out(tasks[number % len(tasks)], 1 + number // len(tasks))[-1]
        more: dict[str, Any] = rng.choice(
            [
                *[{}] * 6,
                {"logprobs": 2},
                {"logprobs": 0, "prompt_logprobs": 1},
                {"stop": ("the", " =")},
                {"stop_regex": ("[A-Z][a-z]+ and",)},
                {"bad_words": ("the", "and", "1")},
                {"grammar": SCHEMA},
                {"grammar": Grammar("regex", "[a-z ]{20}")},
                {"allowed_token_ids": range(30, 200)},
            ]
        )
        chosen = {**SAMPLERS[sampler], **more}
        if "grammar" in more:
            chosen.pop("min_tokens", None)
        most = rng.choice([20, 40] if "min_tokens" in chosen else [3, 20, 40])
        params = SamplingParams(seed=number, max_tokens=most, **chosen)
        found.append((item.messages, params))
    return found


def run(
    requests: Sequence[Asked], *, retract: bool, drafter: Drafter | None = None, **config: Any
) -> list[Result]:
    settings = {
        "threads": 1,
        "deterministic": True,
        "max_running_requests": 16,
        "adaptive_drafts": False,
        **config,
    }
    with LLM(EngineConfig(**settings), drafter=drafter) as llm:
        watch_core(llm._core)
        keys = [llm.add_request(*request) for request in requests]
        for number, key in enumerate(keys):
            if (drafting := sequence_of(llm._open[key]).drafting) is not None:
                drafting.request.name = str(number)
        found: dict[int, Result] = {}
        turn = 0
        while llm.has_unfinished():
            turn += 1
            scheduler = llm._core.scheduler
            if retract and turn % 7 == 0 and (victim := scheduler._victim()) is not None:
                scheduler.queues.retract(victim)
            found |= llm.step()
        if drafter is not None and not retract:
            assert llm.stats().verified_rows > 0
    return [found[key] for key in keys]


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with noise in its weights: often right, and often not."""
    folder = tmp_path_factory.mktemp("models") / "disturbed"
    shutil.copytree(BUNDLED, folder)
    weights = load_file(folder / "model.safetensors")
    torch.manual_seed(0)
    for tensor in weights.values():
        if tensor.dim() > 1:
            tensor += (
                0.06 * tensor.float().std() * torch.randn_like(tensor, dtype=torch.float32).to(tensor.dtype)
            )
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@nightly(SIMULATION)
@pytest.mark.native
@pytest.mark.parametrize("dtype", grid(["bfloat16"], ["float32"]))
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_outputs_have_the_bits_of_those_without_drafts(sampler: str, dtype: str, disturbed: Path) -> None:
    """Tokens, logprobs, text, reasons and usage; with windows, page sizes, chunks and retraction; by drafters
    of all kinds, by the same model, another one and a diffusion model."""
    require("native")
    requests = asked(scaled(REQUESTS, 60), sampler)
    wanted = run(requests, retract=False, dtype=dtype, speculation="off")
    outputs = [result.token_ids for result in wanted]
    known = [(Known(kind, outputs, 512), "lookup") for kind in DRAFTERS]
    models = ("lookup", str(BUNDLED), str(disturbed), "tiny-diffusion")
    for number, (drafter, speculation) in enumerate([*known, *((None, each) for each in models)]):
        rng = random.Random(number)
        found = run(
            requests,
            retract=number % 2 == 1,
            dtype=dtype,
            drafter=drafter,
            speculation=speculation,
            overlap_steps=number % 3,
            page_size=rng.choice([16, 32] if drafter is None else [8, 16, 32]),
            chunk_size=rng.choice([16, 512]),
            max_draft_tokens=rng.choice([3, 8, 15]),
            max_step_tokens=rng.choice([64, 2048]),
            # Without patience, masks are late anywhere.
            grammar_patience=rng.choice([0.0, 1.0]),
        )
        for one, other in zip(found, wanted, strict=True):
            alike(one, other)


@nightly(SIMULATION)
@pytest.mark.parametrize("seed", range(4))
def test_the_fallback_through_transformers_verifies_drafts_too(seed: int) -> None:
    requests = [(messages, params) for messages, params in asked(12, "warm") if params.logprobs is None]
    settings: dict[str, Any] = {
        "dtype": "float32",
        "deterministic": False,
        "transformers_fallback": True,
        "max_running_requests": 4,
    }
    wanted = run(requests, retract=False, speculation="off", **settings)
    known = Known("stale" if seed % 2 else "oracle", [result.token_ids for result in wanted], 512)
    found = run(requests, retract=False, drafter=known, **settings)
    assert [result.token_ids for result in found] == [result.token_ids for result in wanted]
