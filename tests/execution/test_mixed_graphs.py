"""Mixed steps and prefills as graphs, on the stand-in for CUDA's: every step has a graph that wastes little,
which reads of the step's rows what the plain forward reads of them; and the tokens are the same."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.execution.decoding.relay import Relay
from aioinfer.execution.decoding.token_graphs import CapturedTokens
from aioinfer.execution.decoding.tokens import TokenDecoding, TokenKind, TokenPacker
from aioinfer.execution.grammar_worker import GrammarWorker
from aioinfer.execution.graph_shapes import MAX_CHUNKS, GraphShape, GraphShapes, mixed_shapes
from aioinfer.execution.launcher import ThreadLauncher
from aioinfer.execution.packed import PackedStep
from aioinfer.execution.packing import Packer
from aioinfer.execution.torch_device import TorchDevice
from aioinfer.model.batch import Batch
from aioinfer.params import SamplingParams
from aioinfer.sampling.sampler import Sampler
from aioinfer.scheduling.step import Generating, NewRequestData, Row, Step, TableUpdate
from tests.execution.test_decode_graphs import GraphedDevice, config
from tests.model.checkpoints import greedy
from tests.model.kernels import kernels_or_skip
from tests.tiers import EMULATED, SLOW_MODEL, nightly, points

# -- shapes --------------------------------------------------------------------------------------------


def shapes_of(**settings: Any) -> GraphShapes:
    spec: Any = SimpleNamespace(states=(), generates=True)
    return TokenKind(spec).graph_shapes(EngineConfig(**settings))


@pytest.mark.parametrize("most_rows", [1, 3, 64, 256, 512])
def test_every_step_has_a_graph_that_wastes_little(most_rows: int) -> None:
    """A fifth of the positions behind the decodes, or a few dozen; of the decodes three in four, or as many
    as are few beside these."""
    rows = min(most_rows, 512)
    shapes = shapes_of(max_running_requests=rows, decode_graph_rows=rows)
    for tokens in range(1, 2049, 7):
        for decodes in {0, 1, rows // 3, rows - 1, rows}:
            found = shapes.fit(GraphShape(decodes, tokens, min(tokens, 3)))
            assert found is not None, (decodes, tokens)
            assert found.rows >= decodes
            assert found.tokens >= tokens
            assert found.tokens - tokens <= max(63, 0.2 * found.tokens)
            assert found.rows <= max(4, 4 * decodes) or found.rows - decodes <= found.tokens / 8
    assert len(shapes) <= 90 + rows // 8


def test_the_number_of_chunks_is_bounded_and_none_is_cut_off() -> None:
    shapes = shapes_of()
    assert shapes.fit(GraphShape(5, 100, 64)) == GraphShape(16, 128, MAX_CHUNKS)
    assert shapes.fit(GraphShape(5, 16, 16)) == GraphShape(16, 16, 16)
    assert shapes.fit(GraphShape(5, 17, 17)) == GraphShape(16, 32, 32)
    assert shapes.fit(GraphShape(5, 100, MAX_CHUNKS + 1)) is None
    assert shapes.fit(GraphShape(65)) is None
    assert shapes.fit(GraphShape(5, 2049, 1)) is None


@pytest.mark.parametrize(
    ("settings", "mixed"),
    [
        ({}, True),
        ({"prefill_graph_tokens": 0}, False),
        ({"decode_graph_rows": 0}, False),
        ({"mixed": False}, True),
    ],
)
def test_what_is_captured_follows_the_settings(settings: dict[str, Any], mixed: bool) -> None:
    shapes = shapes_of(**settings)
    assert any(tokens for _, tokens, _ in shapes) == mixed
    assert bool(shapes) == (settings.get("decode_graph_rows") != 0)
    if settings.get("mixed") is False:
        assert {rows for rows, tokens, _ in shapes if tokens} == {1}
    sizes = [rows + tokens for rows, tokens, _ in shapes]
    assert sizes == sorted(sizes, reverse=True), "the largest is captured first"


def test_a_model_with_recurrent_state_has_graphs_of_decodes_alone() -> None:
    spec: Any = SimpleNamespace(states=("a state",), generates=True)
    assert not any(tokens for _, tokens, _ in TokenKind(spec).graph_shapes(EngineConfig()))


def test_a_model_that_gives_no_tokens_has_no_graphs() -> None:
    spec: Any = SimpleNamespace(states=(), generates=False)
    assert not TokenKind(spec).graph_shapes(EngineConfig())


# -- what a graph reads --------------------------------------------------------------------------------

PAGES, PAGE, SLOTS, VOCAB = 6, 4, 9, 512
CPU = torch.device("cpu")


class Model:
    """Keeps its batch, and likes the token behind each position's own."""

    capturable = True
    invariant = True
    seconds: Mapping[str, float] = MappingProxyType({})
    spec: Any = SimpleNamespace(vocab_size=VOCAB)

    def forward(self, batch: Batch, attention: Any) -> torch.Tensor:
        self.batch = batch
        return torch.nn.functional.one_hot(batch.input_ids[batch.logits_rows] + 1, VOCAB).float()


class Desk:
    """Random steps, and what captured steps read of them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.model, self.relay = Model(), Relay(SLOTS, CPU)
        self.relay.scatter(torch.arange(1, SLOTS + 1), 100 + torch.arange(1, SLOTS + 1))
        shapes = GraphShapes([GraphShape(SLOTS), *mixed_shapes(SLOTS, 64)])
        decoding: Any = TokenDecoding(Sampler(SLOTS, VOCAB, CPU, "torch"), self.relay, GrammarWorker())
        attention: Any = None
        self.captured: CapturedTokens = decoding.captured(
            self.model, attention, shapes=shapes, max_pages=PAGES, page_size=PAGE
        )
        self.packers = [
            Packer(TokenPacker(SLOTS), SLOTS, PAGES, PAGE, each) for each in (shapes, GraphShapes())
        ]
        self.sent = 0
        self.tables: list[list[int]] = [[] for _ in range(SLOTS + 1)]

    def send(self, array: Any) -> torch.Tensor:
        self.sent += 1
        return torch.from_numpy(array.copy())

    def step(self, number: int, *, drafting: bool) -> Step:
        """Decodes, perhaps rows with drafts, and chunks of new requests, of which some end their prompts."""
        rng, nobody = self.random, None
        slots = rng.sample(range(1, SLOTS + 1), rng.randint(1, SLOTS))
        kinds = sorted(rng.choice(["decode", "draft", "chunk"]) for _ in slots)
        kinds = [kind for kind in ("decode", "draft", "chunk") for each in kinds if each == kind]
        if not drafting:
            kinds = ["decode" if kind == "draft" else kind for kind in kinds]
        generating, starts, lengths, drafts, tables = [], [], [], [], []
        chunks: list[Row] = []
        new: dict[int, NewRequestData] = {}
        for slot, kind in zip(slots, kinds, strict=True):
            length = {"decode": 1, "draft": rng.randint(2, 4), "chunk": rng.randint(1, 9)}[kind]
            start = rng.randint(0, PAGES * PAGE - length - 1)
            pages = self.tables[slot] = [rng.randint(1, 90) for _ in range(PAGES)]
            params = SamplingParams(temperature=slot / 8, top_k=slot, top_p=1 / slot)
            data = NewRequestData(params, 1000 + slot, frozenset(), [1], [])
            if kind == "chunk":
                ids = [rng.randint(1, 90) for _ in range(length)]
                chunks.append(Row(nobody, slot, start, length, ids, rng.random() < 0.5, pages, 0, data))  # type: ignore[arg-type]
                continue
            new[slot] = data
            generating.append(slot)
            starts.append(start)
            lengths.append(length)
            tables.append((slot, 0, pages))
            if kind == "draft":
                drafts.append([rng.randint(1, 90) for _ in range(length - 1)])
        rows = Generating(
            [nobody] * len(generating),  # type: ignore[list-item]
            *(np.array(each, np.int64) for each in (generating, starts)),
            np.array(lengths, np.int64) if drafts else None,
            tables=tables,
            new_requests=new,
            drafts=drafts,
        )
        return Step(number, rows, tuple(chunks), sum(lengths) + sum(row.length for row in chunks))

    def decode_on(self, packed: PackedStep) -> Step:
        """The step behind one without drafts: everything that sampled decodes."""
        slots = packed.sections["sample_slots"]
        tables: list[TableUpdate] = []
        nobody: Any = None
        positions = packed.sections["sample_positions"]
        return Step(
            packed.step_id + 1,
            Generating([nobody] * len(slots), slots, positions, tables=tables),
            (),
            len(slots),
        )


def check_batch(desk: Desk, given: PackedStep, plain: PackedStep) -> None:
    """The rows of a captured step are those of the plain one, and the others are padding."""
    batch, shape, decodes = desk.model.batch, given.shape, plain.num_decodes
    assert shape is not None
    parts = plain.sections.split(torch.from_numpy(plain.sections.ints.copy()))
    desk.relay.gather(parts["input_ids"], parts["slots"], decodes, parts.get("verified"))
    cu_q, table = parts["cu_q"].tolist(), parts["block_table"].view(-1, plain.num_pages)
    begins = batch.cu_q.tolist()
    assert begins[0] == 0
    assert begins == sorted(begins)
    assert begins[-1] == len(batch.input_ids) == len(batch.positions) == shape.rows + shape.tokens
    assert len(batch.kv_len) == len(batch.block_table) == len(begins) - 1
    where: dict[int, int] = {}
    for row, kv_len in enumerate(parts["kv_len"].tolist()):
        at = row if row < decodes else shape.rows + row - decodes
        ours, theirs = slice(begins[at], begins[at + 1]), slice(cu_q[row], cu_q[row + 1])
        where |= dict(zip(range(cu_q[row], cu_q[row + 1]), range(begins[at], begins[at + 1]), strict=True))
        assert batch.input_ids[ours].tolist() == parts["input_ids"][theirs].tolist()
        assert batch.positions[ours].tolist() == parts["positions"][theirs].tolist()
        assert batch.slot_mapping[ours].tolist() == parts["slot_mapping"][theirs].tolist()
        assert batch.kv_len[at] == kv_len
        pages = -(-kv_len // PAGE)
        assert batch.block_table[at, :pages].tolist() == table[row, :pages].tolist()
    wanted = parts["logits_rows"].tolist()
    assert batch.logits_rows[: len(wanted)].tolist() == [where[token] for token in wanted]
    used = set(where.values())
    padding = [token for token in range(begins[-1]) if token not in used]
    assert not batch.slot_mapping[padding].any(), "padding is written to the null page"
    rows = {row if row < decodes else shape.rows + row - decodes for row in range(len(plain.q_lens))}
    others = [row for row in range(len(batch.kv_len)) if row not in rows]
    assert not batch.kv_len[others].any(), "padding has a context"
    assert bool((batch.input_ids >= 0).all())
    assert bool((batch.positions < PAGES * PAGE).all())


@torch.inference_mode()
@pytest.mark.parametrize("seed", range(12))
def test_a_graph_reads_of_each_row_what_the_plain_forward_reads(seed: int) -> None:
    """Whatever steps there were before. And a step of those that sampled finds its rows there."""
    desk = Desk(seed)
    number = found = 0
    for _ in range(25):
        number += 1
        step = desk.step(number, drafting=seed % 2 == 0)
        given, plain = (packer.pack(step) for packer in desk.packers)
        assert given.shape is not None
        assert plain.shape is None
        desk.captured.update(given, given.shape, desk.send)
        desk.captured.forward(given.shape)
        desk.captured.moved_on()
        check_batch(desk, given, plain)
        likeliest = desk.captured.logits(given).argmax(1)
        wanted = desk.model.batch.input_ids[desk.model.batch.logits_rows][: len(likeliest)] + 1
        assert likeliest.tolist() == wanted.tolist()
        if step.generating.drafts or not given.work.sample_rows:
            continue
        number, found = number + 1, found + 1
        after = desk.decode_on(given)
        given, plain = (packer.pack(after) for packer in desk.packers)
        assert given.shape == GraphShape(SLOTS)
        sent = desk.sent
        assert not desk.captured.update(given, given.shape, desk.send), seed
        assert desk.sent == sent, seed
        desk.captured.forward(given.shape)
        desk.captured.moved_on()
        check_batch(desk, given, plain)
    assert found, "none sampled"


def test_steps_that_read_more_than_samples_are_no_replays() -> None:
    packer = Packer(TokenPacker(SLOTS), SLOTS, PAGES, PAGE, GraphShapes(mixed_shapes(SLOTS, 64)))
    request: Any = SimpleNamespace(prompt_ids=[1, 2, 3, 4], params=SamplingParams(prompt_logprobs=1))

    def shape(**more: Any) -> GraphShape | None:
        data = NewRequestData(request.params, 1, frozenset(), [1, 2, 3, 4], [])
        row = Row(request, 1, 0, 3, [1, 2, 3], True, [1], 0, data, **more)
        generating = Generating([], np.empty(0, np.int64), np.empty(0, np.int64))
        return packer.pack(Step(1, generating, (row,), 3)).shape

    assert shape() == GraphShape(4, 16, 16)
    assert shape(scores=(0, 3)) is None


# -- with the engine around it -------------------------------------------------------------------------


class Counted(GraphedDevice):
    """Counts the forwards that are no replays."""

    eager = 0

    def open(self, progress: Any = None) -> Any:
        info = super().open(progress)
        runner: Any = self._backend._runner  # type: ignore[union-attr]
        model = runner.model
        forward = model.forward

        def counted(batch: Batch, attention: Any) -> torch.Tensor:
            self.eager += 1
            result: torch.Tensor = forward(batch, attention)
            return result

        runner.model = SimpleNamespace(spec=model.spec, forward=counted)
        self.forwards = runner.graphs._forwards
        return info

    @property
    def mixed_replays(self) -> int:
        return sum(graph.replays for shape, graph in self.forwards.items() if shape.tokens)


def settings(path: Path, **changes: Any) -> EngineConfig:
    return config(
        path,
        **{
            "prefill_graph_tokens": 16,
            "max_step_tokens": 16,
            "chunk_size": 7,
            "max_running_requests": 4,
            "speculation": "off",
            **changes,
        },
    )


async def staggered(
    settings: EngineConfig, requests: list[tuple[list[int], SamplingParams]], device: TorchDevice
) -> list[list[int]]:
    """Each request begins when the one before has a token."""
    async with Engine(settings, launcher=lambda _: ThreadLauncher(device)) as engine:
        tasks = []
        for prompt, params in requests:
            stream = engine.generate(prompt, params)
            async for _ in stream:
                break
            tasks.append(stream)
        return [(await stream).token_ids for stream in tasks]


@pytest.fixture
def model(checkpoint: Callable[[str], tuple[Path, Any]]) -> tuple[Path, Any]:
    kernels_or_skip("cpu")
    return checkpoint("llama-mqa")


PROMPTS = [[5, 6, 7], list(range(40, 60)), [9], list(range(3, 20))]


@nightly(EMULATED)
@pytest.mark.parametrize(("window", "count"), points([(1, 2)], [(0, 4), (1, 4), (2, 4)]))
async def test_arrivals_beside_decodes_are_replays_and_give_the_tokens_of_transformers(
    model: tuple[Path, Any], window: int, count: int
) -> None:
    path, oracle = model
    chosen = settings(path, overlap_steps=window)
    device = Counted(chosen)
    wanted = SamplingParams(temperature=0, max_tokens=2 * count, ignore_eos=True)
    found = await staggered(chosen, [(prompt, wanted) for prompt in PROMPTS[:count]], device)
    assert found == [greedy(oracle, prompt, 2 * count) for prompt in PROMPTS[:count]]
    assert device.mixed_replays >= 2 * count, "one of the short prompts, three of the others"
    assert device.eager == 0


@nightly(SLOW_MODEL)
async def test_every_kind_of_row_arrives_as_without_graphs(model: tuple[Path, Any]) -> None:
    path, _ = model
    kinds: list[dict[str, Any]] = [
        {"top_k": 20, "top_p": 0.9},
        {"frequency_penalty": 1.5, "repetition_penalty": 1.2},
        {"logit_bias": {7: 4.0}, "temperature": 2.0, "min_p": 0.01},
        {"logprobs": 3, "prompt_logprobs": 1},
    ]
    requests = [
        (prompt, SamplingParams(**{"seed": at, "max_tokens": 6, "ignore_eos": True, **kind}))
        for at, (prompt, kind) in enumerate(zip(PROMPTS, kinds, strict=True))
    ]
    chosen = settings(path)
    plain = await staggered(chosen, requests, TorchDevice(chosen))
    device = Counted(chosen)
    assert await staggered(chosen, requests, device) == plain
    assert device.mixed_replays
    assert 0 < device.eager <= 6, "where a prompt is scored"


@nightly(SLOW_MODEL)
async def test_drafts_are_verified_by_replays(model: tuple[Path, Any]) -> None:
    path, oracle = model
    prompts = [[5, 6, 7, 8] * 4, [11, 12, 13] * 4, [5, 6, 7, 8] * 3]
    chosen = settings(path, speculation="lookup", adaptive_drafts=False, max_draft_tokens=3)
    device = Counted(chosen)
    wanted = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
    async with Engine(chosen, launcher=lambda _: ThreadLauncher(device)) as engine:
        results = await asyncio.gather(*[engine.generate(prompt, wanted) for prompt in prompts])
        drafted = engine.stats().drafted_tokens
    assert [result.token_ids for result in results] == [greedy(oracle, prompt, 14) for prompt in prompts]
    assert drafted
    assert device.eager == 0
