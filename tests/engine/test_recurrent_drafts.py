"""Drafts change no bit of an output of a model with recurrent state either."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aioinfer.config import EngineConfig
from aioinfer.execution import packing
from aioinfer.llm import LLM
from aioinfer.params import SamplingParams
from tests.engine.test_speculation import alike
from tests.engine.test_speculative_models import DRAFTERS, SAMPLERS, Known, asked, run
from tests.model.checkpoints import RECURRENT, make_model
from tests.model.harness import require
from tests.tiers import SECONDS, SIMULATION, grid, nightly, rest, scaled

#: of requests, in each of four samplers
REQUESTS = 125
BUNDLED = Path(EngineConfig().model_path)
TOKENS = 864
Model = Callable[[str], Path]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """``model(kind)``: random weights under the tokens of the demo model."""
    made: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in made:
            made[kind] = path = tmp_path_factory.mktemp(kind)
            prefix, settings = RECURRENT[kind]
            settings = {**settings, "vocab_size": TOKENS, "max_position_embeddings": 1024}
            make_model(prefix, settings, path, seed=len(kind))
            for each in BUNDLED.glob("*token*"):
                shutil.copy(each, path)
            for each in BUNDLED.glob("*template*"):
                shutil.copy(each, path)
        return made[kind]

    return get


@nightly(SIMULATION)
@pytest.mark.native
@pytest.mark.parametrize("kernels", ["native", "sdpa"])
@pytest.mark.parametrize(
    "kind",
    grid(
        ["lfm2", "qwen3.5"],
        ["lfm2-moe", "qwen3.5-moe", "qwen3-next", "granite-hybrid-moe", "falcon-h1", "nemotron-h"],
    ),
)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_outputs_are_those_without_drafts(sampler: str, kind: str, kernels: str, model: Model) -> None:
    """With windows, page sizes, chunks, snapshots and retraction. Native kernels give the same bits."""
    require(kernels)
    settings: dict[str, Any] = {
        "model": str(model(kind)),
        "dtype": "float32",
        "attention_backend": kernels,
        "deterministic": kernels == "native",
        "state_snapshot_tokens": 1,
    }
    requests = asked(scaled(REQUESTS, 30), sampler)
    wanted = run(requests, retract=False, speculation="off", **settings)
    outputs = [result.token_ids for result in wanted]
    known = [(Known(each, outputs, TOKENS), "lookup") for each in DRAFTERS]
    # A model drafts for itself, and models of both kinds for each other.
    models = (None, "lookup"), (None, settings["model"]), (None, str(BUNDLED))
    for number, (drafter, speculation) in enumerate([*known, *models]):
        rng = random.Random(number)
        found = run(
            requests,
            retract=number % 2 == 1,
            drafter=drafter,
            speculation=speculation,
            overlap_steps=number % 3,
            page_size=rng.choice([16, 32]),
            chunk_size=rng.choice([16, 512]),
            max_draft_tokens=rng.choice([3, 8, 15]),
            max_step_tokens=rng.choice([64, 2048]),
            grammar_patience=rng.choice([0.0, 1.0]),
            state_snapshots=rng.choice([None, 0, 3]),
            **settings,
        )
        for one, other in zip(found, wanted, strict=True):
            if kernels == "native":
                alike(one, other)
            assert one.token_ids == other.token_ids


@rest(SECONDS)
@pytest.mark.parametrize("kind", grid(["qwen3.5"], ["lfm2", "qwen3.5-moe"]))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_recurrent_model_that_drafts_for_itself_is_always_right(
    temperature: float, kind: str, model: Model
) -> None:
    """It catches up with the prompt in chunks, and its state takes in no drafts."""
    require("native")
    prompt = [3 + at % 400 for at in range(200)]
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=40, ignore_eos=True, top_p=0.95)
    settings: dict[str, Any] = {
        "model": str(model(kind)),
        "threads": 1,
        "deterministic": True,
        "chunk_size": 16,
        "overlap_steps": 0,
        "dtype": "float32",
    }
    with LLM(EngineConfig(speculation="off", **settings)) as plain:
        (wanted,) = plain.generate([prompt], params)
    config = EngineConfig(
        speculation=settings["model"], adaptive_drafts=False, max_draft_tokens=5, **settings
    )
    with LLM(config) as llm:
        (found,) = llm.generate([prompt], params)
        stats = llm.stats()
    alike(found, wanted)
    assert stats.rejected_tokens == 0
    assert 13 + 12 < stats.steps < 13 + 12 + 10


def _keeps_drafts(replays: Any, kept: Any, lengths: Any) -> tuple[Any, Any]:
    """A state includes all positions of its row."""
    return replays, kept if lengths is None else lengths.copy()


def _forgets_drafts(replays: Any, kept: Any, lengths: Any) -> tuple[Any, Any]:
    """What was right is not replayed."""
    return np.zeros_like(replays), kept


@rest(SECONDS)
@pytest.mark.parametrize("kernels", grid(["native"], ["sdpa"]))
@pytest.mark.parametrize("kind", ["lfm2", "qwen3.5"])
@pytest.mark.parametrize("plant", [None, _keeps_drafts, _forgets_drafts])
def test_states_with_wrong_drafts_or_without_right_ones_change_outputs(
    plant: Callable[..., Any] | None, kind: str, kernels: str, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    require(kernels)
    settings: dict[str, Any] = {"model": str(model(kind)), "dtype": "float32", "attention_backend": kernels}
    settings["deterministic"] = False
    rng = random.Random(1)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    requests = [([rng.randrange(TOKENS) for _ in range(9)], params) for _ in range(4)]
    wanted = [each.token_ids for each in run(requests, retract=False, speculation="off", **settings)]
    if plant is not None:
        real = packing._replays
        monkeypatch.setattr(
            packing, "_replays", lambda step, layout: plant(*real(step, layout), layout.q_len)
        )
    drafter = Known("partly", wanted, TOKENS)
    found = run(requests, retract=False, drafter=drafter, max_draft_tokens=4, **settings)
    assert ([each.token_ids for each in found] == wanted) == (plant is None)
