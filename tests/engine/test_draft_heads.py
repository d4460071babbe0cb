"""Draft heads draft what their definitions say, and change no bit of an output."""

from __future__ import annotations

import json
import logging
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from aioinfer.cli.doctor import examine
from aioinfer.config import EngineConfig
from aioinfer.errors import ConfigError, OutOfMemory
from aioinfer.execution import torch_device
from aioinfer.execution.draft_checks import load_draft_head
from aioinfer.llm import LLM
from aioinfer.params import SamplingParams
from aioinfer.sampling.sampler import Sampler
from bench.speculation.heads import find_heads
from tests.engine.test_speculation import alike
from tests.engine.test_speculative_models import SAMPLERS, asked, run
from tests.model.harness import require
from tests.speculation.heads import KINDS, Head, make, write_head
from tests.speculation.plain_heads import Plain
from tests.tiers import SECONDS, SIMULATION, grid, nightly, rest

#: with each sampler
REQUESTS = 125

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "threads": 1,
    "adaptive_drafts": False,
    "overlap_steps": 0,
    "page_size": 16,
}


#: heads of models that attend, and of models with a recurrent state
EVERY = [*KINDS, *(f"{kind}-recurrent" for kind in ("mtp", "mtp-moe", "eagle3", "dflash"))]


class Heads(dict[str, Head]):
    """Made when they are asked for."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory

    def __missing__(self, kind: str) -> Head:
        plain = kind.removesuffix("-recurrent")
        self[kind] = head = make(plain, self._factory.mktemp(kind), recurrent=kind != plain)
        return head


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Heads:
    return Heads(tmp_path_factory)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, torch.Tensor]]:
    """Positions of drafts, and the logits that they are drawn from, in their order."""
    found: list[tuple[int, torch.Tensor]] = []
    draw = Sampler.draw

    def drawing(self: Sampler, logits: torch.Tensor, batch: Any) -> torch.Tensor:
        found.extend(zip(batch.positions.tolist(), logits.clone(), strict=True))
        return draw(self, logits, batch)

    monkeypatch.setattr(Sampler, "draw", drawing)
    return found


def compare(plain: Plain, ids: list[int], drawn: list[tuple[int, torch.Tensor]], most: int) -> int:
    """All drafts of a request with these tokens beside those of a plain head; returns how many there were."""
    at, count = 0, 0
    while at < len(drawn):
        start = drawn[at][0]
        stop = at + 1
        while stop < len(drawn) and drawn[stop][0] == start + stop - at:
            stop += 1
            if stop - at == most:
                break
        if plain.kind == "dflash" and (stop - at != most or (start - 1) % 16 > 16 - most - 1):
            at = stop
            continue  # the end of a page may cut its block
        wanted = plain.drafts(ids[:start], stop - at)
        for (_, found), each in zip(drawn[at:stop], wanted, strict=True):
            finite = each.isfinite()
            assert torch.equal(finite, found.isfinite())
            torch.testing.assert_close(found[finite], each[finite], atol=1e-3, rtol=1e-3)
        count += stop - at
        at = stop
    return count


@rest(SECONDS)
@pytest.mark.parametrize("kernels", ["sdpa", "native"])
@pytest.mark.parametrize("kind", grid([*KINDS, "mtp-recurrent"], EVERY[7:]))
def test_a_head_drafts_what_a_plain_one_does(
    kind: str, kernels: str, heads: dict[str, Head], drawn: list[tuple[int, torch.Tensor]]
) -> None:
    """After chunks, decodes, right and wrong drafts, and behind a prefix that another request computed."""
    require(kernels)
    head, most = heads[kind], 7 if kind.startswith("dflash") else 3
    plain, prompt = Plain(head), [3 + 5 * at % 800 for at in range(45)]
    config = EngineConfig(
        model=str(head.model),
        speculation=head.speculation,
        attention_backend=kernels,
        max_draft_tokens=most,
        chunk_size=16,
        **SETTINGS,
    )
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    with LLM(config) as llm:
        for ids in (prompt, [*prompt[:40], 7, 8, 9]):
            drawn.clear()
            (found,) = llm.generate([ids], params)
            tokens = [*ids, *found.token_ids]
            assert compare(plain, tokens, drawn, most) > 20


@pytest.mark.parametrize(
    ("kind", "sampler"),
    [pytest.param(kind, sampler, marks=nightly(SIMULATION)) for kind in EVERY for sampler in SAMPLERS]
    + [pytest.param(kind, "warm", marks=rest(SECONDS)) for kind in ("mtp-recurrent", "eagle3", "dflash")],
)
def test_outputs_have_the_bits_of_those_without_drafts(
    kind: str, sampler: str, heads: dict[str, Head], request: pytest.FixtureRequest
) -> None:
    """Tokens, logprobs, text, reasons and usage; with windows, page sizes, chunks and retraction."""
    require("native")
    head = heads[kind]
    long = request.node.get_closest_marker("nightly") is not None
    requests = asked(REQUESTS if long else 24, sampler)
    settings: dict[str, Any] = {"model": str(head.model), "dtype": "float32"}
    wanted = run(requests, retract=False, speculation="off", **settings)
    for number in range(6 if long else 2):
        rng = random.Random(number)
        found = run(
            requests,
            retract=number % 2 == 1,
            speculation=head.speculation,
            overlap_steps=number % 3,
            page_size=rng.choice([16, 32]),
            chunk_size=rng.choice([16, 512]),
            max_draft_tokens=rng.choice([3, 8, 40]),
            max_step_tokens=rng.choice([64, 2048]),
            adaptive_drafts=number == 4,
            **settings,
        )
        for one, other in zip(found, wanted, strict=True):
            alike(one, other)


# -- heads that do not fit -----------------------------------------------------------------------------

#: changes of an EAGLE-3 head's config and tensors, and what the error says
EAGLE3 = {
    "another size": ({"hidden_size": 32, "head_dim": 8}, {}, "it has 32 hidden states, and the model 64"),
    "other tokens": ({"vocab_size": 900}, {}, "it has 900 tokens, and the model 864"),
    "no product": ({}, {"fc.weight": None}, "no tensor fc.weight"),
    "no queries": ({}, {"midlayer.self_attn.q_proj.weight": None}, "no tensor midlayer.self_attn.q_proj"),
    "no norm": ({}, {"midlayer.hidden_norm.weight": None}, "no tensor midlayer.hidden_norm.weight"),
    "fewer layers": ({}, {"fc.weight": (64, 128)}, r"fc.weight is shaped \(64, 128\)"),
    "narrow queries": (
        {},
        {"midlayer.self_attn.q_proj.weight": (64, 64)},
        r"q_proj.weight is shaped \(64, 64\)",
    ),
    "more tensors": ({}, {"midlayer.self_attn.q_norm.weight": (16,)}, "1 unexpected tensors"),
    "no ids": ({}, {"d2t": None}, "it drafts 300 of 864 tokens, and has no d2t"),
    "wild ids": ({}, {"d2t": torch.full((300,), 800)}, "d2t does not name 300 tokens"),
    "equal ids": ({}, {"d2t": -torch.arange(300)}, "d2t does not name 300 tokens"),
    "fewer ids": ({}, {"d2t": torch.zeros(299, dtype=torch.int64)}, r"d2t is shaped \(299,\)"),
    "a larger head": ({"draft_vocab_size": 301}, {}, r"lm_head.weight is shaped \(300, 64\)"),
    "two layers": ({"num_hidden_layers": 2}, {}, "a head of 2 layers is not supported"),
    "a layer too far": ({"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, {}, "the model has 6"),
    "layers by name": ({"eagle_aux_hidden_state_layer_ids": ["1"]}, {}, "are no numbers of layers"),
    "an odd gate": ({"hidden_act": "tanh"}, {}, "not supported"),
    "odd positions": ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, {}, "not supported"),
}
DFLASH = {
    "no product": ({}, {"fc.weight": None}, "no tensor fc.weight"),
    "no norm": ({}, {"hidden_norm.weight": None}, "no tensor hidden_norm.weight"),
    "no layer": ({"num_hidden_layers": 3}, {}, "no tensor model.layers.2"),
    "no block": ({"block_size": None}, {}, "block_size must be a number of tokens"),
    "another mask": ({"dflash_config": {"mask_token_id": 864}}, {}, "mask_token_id of dflash_config"),
    "other layers": (
        {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [0, 1, 6]}}, {}, "the model has 6"
    ),
    "two layers": ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": [0, 1]}}, {}, "is shaped"),
}  # fmt: skip


def started(model: Path, speculation: object, **settings: Any) -> None:
    with LLM(EngineConfig(model=str(model), speculation=str(speculation), threads=1, **settings)):
        pass


@rest(SECONDS)
@pytest.mark.parametrize(
    ("kind", "case"),
    [*(("eagle3", case) for case in EAGLE3), *(("dflash", case) for case in DFLASH)],
)
def test_a_head_that_does_not_fit_is_one_clear_error(
    kind: str, case: str, heads: dict[str, Head], tmp_path: Path
) -> None:
    config, tensors, message = (EAGLE3 if kind == "eagle3" else DFLASH)[case]
    made = load_file(Path(heads[kind].speculation) / "model.safetensors")
    for name, change in tensors.items():
        if change is None:
            del made[name]
        else:
            made[name] = change if isinstance(change, torch.Tensor) else torch.zeros(change)
    stated = json.loads((Path(heads[kind].speculation) / "config.json").read_text())
    write_head(tmp_path / "head", {**stated, **config}, made)
    with pytest.raises(ConfigError, match=f"^speculation: .*{message}"):
        started(heads[kind].model, tmp_path / "head")


@rest(SECONDS)
def test_a_head_in_a_damaged_file_is_an_error(heads: dict[str, Head], tmp_path: Path) -> None:
    for kind in ("eagle3", "dflash"):
        folder = tmp_path / kind
        shutil.copytree(heads[kind].speculation, folder)
        content = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(content[: len(content) // 2])
        with pytest.raises(ConfigError, match=r"^speculation: the weights of"):
            started(heads[kind].model, folder)


@rest(SECONDS)
@pytest.mark.parametrize("kernels", ["sdpa", "native"])
@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_a_head_that_states_fewer_positions_than_the_model_drafts_at_all_of_them(
    kind: str, kernels: str, heads: dict[str, Head], tmp_path: Path
) -> None:
    """EAGLE-3 heads state 2,048 as a rule, whatever their model has; prompts and outputs go beyond."""
    require(kernels)
    folder = tmp_path / "head"
    shutil.copytree(heads[kind].speculation, folder)
    stated = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**stated, "max_position_embeddings": 32}))
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    found = []
    for speculation in ("off", str(folder)):
        config = EngineConfig(
            model=str(heads[kind].model),
            speculation=speculation,
            attention_backend=kernels,
            max_draft_tokens=4,
            **SETTINGS,
        )
        with LLM(config) as llm:
            found.append([each.token_ids for each in llm.generate([[5, 6, 7], [8] * 70], params)])
            drafted = llm.stats().drafted_tokens
    assert found[0] == found[1]
    assert drafted > 2 * 40


@rest(SECONDS)
def test_models_without_hidden_states_have_no_heads(heads: dict[str, Head]) -> None:
    with pytest.raises(ConfigError, match=r"^speculation: no EAGLE-3 head can draft: transformers"):
        started(heads["eagle3"].model, heads["eagle3"].speculation, transformers_fallback=True)
    with pytest.raises(
        ConfigError, match=r"^speculation: no DFlash head can draft: the model does not write"
    ):
        started(Path("tiny-diffusion"), heads["dflash"].speculation)


@rest(SECONDS)
@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("mtp.fc.weight", "no tensor fc.weight"),
        ("mtp.layers.0.self_attn.k_proj.weight", "no tensor model.layers.0.self_attn.k_proj.weight"),
        ("mtp.", "the checkpoint does not have it"),
    ],
)
def test_a_model_with_a_damaged_mtp_layer_runs_without(
    change: str, told: str, heads: dict[str, Head], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(heads["mtp"].model, folder)
    tensors = load_file(folder / "model.safetensors")
    left = {name: tensor for name, tensor in tensors.items() if not name.startswith(change)}
    save_file(left, folder / "model.safetensors", metadata={"format": "pt"})
    with caplog.at_level(logging.WARNING, "aioinfer"), LLM(EngineConfig(model=str(folder), threads=1)) as llm:
        (found,) = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=3, ignore_eos=True))
        assert llm._core.info.draft_head == ""
    assert len(found.token_ids) == 3
    assert [record.getMessage() for record in caplog.records if told in record.getMessage()]


@rest(SECONDS)
def test_a_model_whose_mtp_layer_finds_no_memory_runs_without(
    heads: dict[str, Head], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A head that was asked for is an error."""

    def full(*_: object) -> None:
        raise OutOfMemory("the weights take 1.00 GiB, and 0.50 are left")

    def load(config: EngineConfig, options: Any, model: Any, kind: str, claim: object) -> Any:
        return load_draft_head(config, options, model, kind, full)

    monkeypatch.setattr(torch_device, "load_draft_head", load)
    with caplog.at_level(logging.WARNING, "aioinfer"):
        started(heads["mtp"].model, "auto")
    assert "does not draft: the weights take 1.00 GiB" in caplog.text
    with pytest.raises(OutOfMemory, match="the weights take"):
        started(heads["eagle3"].model, heads["eagle3"].speculation)


@rest(SECONDS)
@pytest.mark.parametrize("kind", ["mtp", "mtp-deepseek"])
def test_an_mtp_layer_drafts_for_a_model_whose_weights_are_cached(
    kind: str, heads: dict[str, Head], tmp_path: Path
) -> None:
    require("native")
    folder = tmp_path / "model"
    shutil.copytree(heads[kind].model, folder)
    for _ in range(2):
        with LLM(EngineConfig(model=str(folder), cache_weights=True, threads=1)) as llm:
            assert llm._core.info.draft_head == "MTP"


@rest(SECONDS)
def test_the_doctor_says_what_drafts(heads: dict[str, Head]) -> None:
    def told(model: object, speculation: str) -> str:
        findings = examine(EngineConfig(model=str(model), speculation=speculation))
        return next(each.text for each in findings if each.subject == "speculation")

    assert told(heads["mtp"].model, "auto").startswith("the MTP layer of the checkpoint and lookup")
    assert told("tiny-chat", "auto") == "lookup (the checkpoint has no MTP layer)"
    assert told("tiny-chat", "off") == "off (asked for)"
    assert told(heads["eagle3"].model, heads["eagle3"].speculation).startswith("EAGLE-3: ")


@rest(SECONDS)
def test_pages_have_room_for_the_entries_of_a_head(heads: dict[str, Head]) -> None:
    sizes = []
    for speculation in ("lookup", "auto"):
        with LLM(EngineConfig(model=str(heads["mtp"].model), speculation=speculation, threads=1)) as llm:
            info = llm._core.info
            sizes.append(info.page_bytes)
            assert ("drafts by MTP" in info.description) == (speculation == "auto")
    # Four layers that attend, and one more.
    assert sizes[1] * 4 == sizes[0] * 5


# -- what heads bring -----------------------------------------------------------------------------------


@rest(SECONDS)
@pytest.mark.parametrize("overlap", [0, 1])
def test_a_row_brings_all_drafts_of_a_head_that_is_right_and_none_of_one_that_is_not(
    overlap: int, tmp_path: Path
) -> None:
    require("native")
    settings: dict[str, Any] = {"threads": 1, "adaptive_drafts": False, "overlap_steps": overlap}
    params = SamplingParams(temperature=0, max_tokens=41, ignore_eos=True)
    found, drafted = [], []
    for model, head in find_heads("tiny", tmp_path):
        config = EngineConfig(model=str(model), speculation=str(head), max_draft_tokens=3, **settings)
        with LLM(config) as llm:
            found.append(llm.generate([[5, 6, 7], [*range(40, 90)]], params))
            stats = llm.stats()
        drafted.append((stats.accepted_tokens, stats.rejected_tokens))
    repeated, counted = ([result.token_ids for result in each] for each in found)
    assert repeated == [[7] * 41, [89] * 41]
    assert counted == [[*range(8, 49)], [*range(90, 131)]]
    (accepted, none), (nothing, rejected) = drafted
    assert none == nothing == 0
    assert accepted >= 2 * 41 * 3 / 4 - 8
    assert rejected > accepted


@rest(SECONDS)
@pytest.mark.parametrize("kind", ["mtp", "dflash"])
def test_entries_are_stored_with_pages(
    kind: str, heads: dict[str, Head], drawn: list[tuple[int, torch.Tensor]], tmp_path: Path
) -> None:
    """Another engine drafts from them, and what it computes itself, just as the first one."""
    require("native")
    head, prompt = heads[kind], [3 + 5 * at % 800 for at in range(80)]
    most = 7 if kind == "dflash" else 3
    config = EngineConfig(
        model=str(head.model),
        speculation=head.speculation,
        prefix_cache_dir=str(tmp_path / "pages"),
        max_draft_tokens=most,
        **SETTINGS,
    )
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    for cached in (0, 64):
        drawn.clear()
        with LLM(config) as llm:
            (found,) = llm.generate([prompt], params)
        assert found.usage.cached_tokens == cached
        assert compare(Plain(head), [*prompt, *found.token_ids], drawn, most) > 5


@rest(SECONDS)
def test_entries_of_one_head_are_not_those_of_another(heads: dict[str, Head], tmp_path: Path) -> None:
    """Pages are stored under the name of the head whose entries they have."""
    require("native")
    head, folder = heads["eagle3"], tmp_path / "further"
    shutil.copytree(head.speculation, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["fc.weight"] *= 2
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    cached = []
    for speculation in (head.speculation, str(folder), str(folder), head.speculation):
        config = EngineConfig(
            model=str(head.model),
            speculation=speculation,
            prefix_cache_dir=str(tmp_path / "pages"),
            **SETTINGS,
        )
        with LLM(config) as llm:
            (found,) = llm.generate([[3 + 5 * at % 800 for at in range(80)]], params)
        cached.append(found.usage.cached_tokens)
    assert cached == [0, 0, 64, 64]


@rest(SECONDS)
def test_a_head_of_random_weights_needs_no_files(heads: dict[str, Head], tmp_path: Path) -> None:
    folder = tmp_path / "head"
    folder.mkdir()
    shutil.copy(Path(heads["eagle3"].speculation) / "config.json", folder)
    config = EngineConfig(
        model=str(heads["eagle3"].model), speculation=str(folder), load_format="random", threads=1
    )
    with LLM(config) as llm:
        (found,) = llm.generate([[3, 8, 13]], SamplingParams(max_tokens=8, ignore_eos=True))
        assert (llm._core.info.draft_head, len(found.token_ids)) == ("EAGLE-3", 8)


@rest(SECONDS)
@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("kind", ["mtp-moe", "eagle3", "dflash"])
def test_matrices_of_heads_are_quantised_as_those_of_models(
    kind: str, quantization: str, heads: dict[str, Head]
) -> None:
    require("native")
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=20, ignore_eos=True)
    found = []
    for speculation in ("off", heads[kind].speculation):
        config = EngineConfig(
            model=str(heads[kind].model),
            speculation=speculation,
            quantization=quantization,
            max_draft_tokens=4,
            **SETTINGS,
        )
        with LLM(config) as llm:
            found.append([each.token_ids for each in llm.generate([[5, 6, 7], [8] * 30], params)])
    assert found[0] == found[1]
