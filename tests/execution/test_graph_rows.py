"""What captured steps read of their rows: every step has a graph that wastes little and reads what the plain
forward reads, and nothing is sent while nothing changes. Engines with graphs are in ``test_streams``."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from aioinfer.config import EngineConfig
from aioinfer.execution.decoding.relay import Relay
from aioinfer.execution.decoding.sampling_metadata import SamplingTable
from aioinfer.execution.decoding.token_graphs import CapturedTokens
from aioinfer.execution.decoding.tokens import TokenDecoding, TokenKind, TokenPacker
from aioinfer.execution.grammar_worker import GrammarWorker
from aioinfer.execution.graph_shapes import MAX_CHUNKS, GraphShape, GraphShapes, mixed_shapes
from aioinfer.execution.graphs import graphs_unsupported
from aioinfer.execution.packed import PackedStep
from aioinfer.execution.packing import Packer
from aioinfer.model.batch import Batch
from aioinfer.params import SamplingParams
from aioinfer.sampling.batch import WIDE_TOP_K
from aioinfer.sampling.sampler import Sampler
from aioinfer.scheduling.step import Generating, NewRequestData, Row, Step, TableUpdate

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


@pytest.mark.parametrize("most", [0, 1, 2, 3, 5, 8, 9, 64, 100])
def test_sizes_reach_the_most_and_waste_at_most_seven_rows(most: int) -> None:
    shapes = shapes_of(max_running_requests=100, decode_graph_rows=most)
    sizes = sorted(rows for rows, tokens, _ in shapes if not tokens)
    assert sizes == sorted(set(sizes))
    assert max(sizes, default=0) == most
    for rows in range(1, most + 1):
        assert min(size for size in sizes if size >= rows) - rows <= 7


def test_graphs_need_cuda_kernels_that_ask_the_host_nothing_and_a_model_of_our_own() -> None:
    cuda: Any = SimpleNamespace(type="cuda")
    assert graphs_unsupported(cuda, "triton", True) is None
    assert graphs_unsupported(cuda, "triton", True, "triton") is None
    assert "cpu" in (graphs_unsupported(torch.device("cpu"), "triton", True) or "")
    assert "sdpa" in (graphs_unsupported(cuda, "sdpa", True) or "")
    assert "experts" in (graphs_unsupported(cuda, "triton", True, "grouped") or "")
    assert "transformers" in (graphs_unsupported(cuda, "triton", False) or "")


@pytest.mark.parametrize(
    ("asked", "wide"),
    [
        ({"temperature": 0.0, "top_p": 0.5}, (False, False)),
        ({"top_p": 0.5}, (True, False)),
        ({"top_p": 0.5, "top_k": 20}, (False, False)),
        ({"min_p": 0.5}, (False, False)),
        ({"top_k": WIDE_TOP_K}, (False, False)),
        ({"top_k": WIDE_TOP_K + 1, "top_p": 0.5}, (False, True)),
    ],
)
def test_the_host_knows_which_rows_may_keep_more_than_a_list_holds(
    asked: dict[str, Any], wide: tuple[bool, bool]
) -> None:
    """Also if other rows do not."""
    table = SamplingTable(3)
    for slot, params in enumerate(({"temperature": 0.0}, asked, {"top_k": 1}), 1):
        table.admit(slot, NewRequestData(SamplingParams(**params), slot, frozenset(), [1, 2], ()))
    found = table.metadata(np.array([1, 2, 3]))
    assert (found.wide_nucleus, found.wide_top_k) == wide
    found = table.metadata(np.array([1, 3]))
    assert (found.wide_nucleus, found.wide_top_k) == (False, False)


# -- what a graph reads --------------------------------------------------------------------------------

PAGES, PAGE, SLOTS, VOCAB = 6, 4, 9, 512
CPU = torch.device("cpu")


class Model:
    """Keeps its batch, and likes the token behind each position's own; multiples of 3 it cannot compute."""

    capturable = True
    invariant = True
    seconds: Mapping[str, float] = MappingProxyType({})
    spec: Any = SimpleNamespace(vocab_size=VOCAB)

    def forward(self, batch: Batch, attention: Any) -> torch.Tensor:
        self.batch = batch
        if batch.hidden_rows is not None:
            batch.hidden = torch.where(batch.input_ids[batch.hidden_rows] % 3 > 0, 1.0, torch.inf)[:, None]
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
            Packer(TokenPacker(SLOTS), SLOTS, PAGES, PAGE, each, hidden=True)
            for each in (shapes, GraphShapes())
        ]
        self.sent = 0
        #: by slot, what its newest tenant asked for
        self.asked: dict[int, NewRequestData] = {}

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
            pages = [rng.randint(1, 90) for _ in range(PAGES)]
            params = SamplingParams(temperature=slot / 8, top_k=rng.randint(1, 50), top_p=1 / slot)
            seed = rng.choice([-1, -(2**63), rng.randrange(1000)])
            data = self.asked[slot] = NewRequestData(params, seed, frozenset(), [1], [])
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

    def pack(self, step: Step, *, follows: bool = False) -> Packed:
        given, plain = (packer.pack(step) for packer in self.packers)
        assert plain.shape is None
        return Packed(given, plain, dict(self.asked), follows)

    def decode_on(self, packed: PackedStep) -> Step:
        """The step behind one without drafts: everything that sampled decodes."""
        slots, positions = (packed.sections[name] for name in ("sample_slots", "sample_positions"))
        return decodes(packed.step_id + 1, dict(zip(slots.tolist(), positions.tolist(), strict=True)))

    def compute(self, packed: Packed) -> None:
        """Replay a step, and look at what it read."""
        given, sent = packed.given, self.sent
        assert given.shape is not None
        if not packed.follows and self.random.random() < 0.1:
            # A step has failed: anything may be there.
            self.captured.forget()
            for held in (rows := self.captured._rows).slots, rows.starts, rows.seeds, rows.table:
                held.random_(0, 5)
        changed = self.captured.update(given, given.shape, self.send)
        if packed.follows:
            assert given.shape == GraphShape(SLOTS)
            assert not changed
            assert self.sent == sent
        check_columns(self, packed)
        self.captured.forward(given.shape)
        self.captured.moved_on()
        check_batch(self, given, packed.plain)
        wanted = self.model.batch.input_ids[self.model.batch.logits_rows] + 1
        likeliest = self.captured.logits(given).argmax(1)
        assert likeliest.tolist() == wanted[: len(likeliest)].tolist()
        plain = packed.plain
        last = plain.sections["input_ids"][plain.sections["cu_q"][1:] - 1]
        broken = self.captured.broken.tolist()
        assert all(broken[row - plain.num_decodes] == (last[row] % 3 == 0) for row in plain.watched)


class Packed(NamedTuple):
    """A step packed for a graph and for none, what its slots' tenants asked for, and whether its rows are
    those of the step before."""

    given: PackedStep
    plain: PackedStep
    asked: dict[int, NewRequestData]
    follows: bool


def decodes(number: int, rows: dict[int, int], tables: tuple[TableUpdate, ...] = (), **more: Any) -> Step:
    """A step of these slots at these positions."""
    nobody: list[Any] = [None] * len(rows)
    slots, starts = (np.array([*each], np.int64) for each in (rows.keys(), rows.values()))
    return Step(number, Generating(nobody, slots, starts, tables=tables, **more), (), len(rows))


def check_columns(desk: Desk, packed: Packed) -> None:
    """The rows that sample are there with what they ask for, and the others are padding."""
    rows, given = desk.captured._rows, packed.given
    slots = given.sections["sample_slots"][: len(given.work.tables.rows)].tolist()
    asked, count = [packed.asked[slot] for slot in slots], len(slots)
    assert rows.slots.tolist() == slots + [0] * (SLOTS + MAX_CHUNKS - count)
    assert rows.starts[:count].tolist() == (given.sections["sample_positions"][:count] - 1).tolist()
    assert rows.seeds[:count].tolist() == [each.seed for each in asked]
    assert rows.top_k[:count].tolist() == [each.params.top_k for each in asked]
    assert rows.temperature[:count].tolist() == [each.params.temperature for each in asked]


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
    """Whatever steps there were before, and however many are packed by then. And a step of those that sampled
    finds its rows there."""
    desk, waiting = Desk(seed), deque[Packed]()
    number = found = 0
    while number < 40:
        number += 1
        step = desk.step(number, drafting=seed % 2 == 0)
        waiting.append(desk.pack(step))
        given = waiting[-1].given
        if given.work.sample_rows and not step.generating.drafts:
            number, found = number + 1, found + 1
            waiting.append(desk.pack(desk.decode_on(given), follows=True))
        while len(waiting) > 2 * (seed % 3):
            desk.compute(waiting.popleft())
    assert found, "none sampled"


def test_rows_that_go_on_send_nothing_and_changes_send_once() -> None:
    desk = Desk(0)
    new = {slot: NewRequestData(SamplingParams(), 1, frozenset(), [1], []) for slot in (1, 3)}

    def changed(rows: dict[int, int], *tables: TableUpdate, **more: Any) -> bool:
        given = desk.packers[0].pack(decodes(1, rows, tables, **more))
        assert given.shape is not None
        found = desk.captured.update(given, given.shape, desk.send)
        desk.captured.moved_on()
        return found

    assert changed({3: 0, 1: 0}, (3, 0, [7]), (1, 0, [9]), new_requests=new)
    assert not any(changed({3: position, 1: position}) for position in range(1, PAGE))
    assert desk.sent == 1
    assert changed({3: PAGE, 1: PAGE}, (3, 1, [8]), (1, 1, [2]))
    assert changed({1: PAGE + 1}), "a row left"
    assert desk.sent == 3
    desk.captured.forget()
    assert changed({1: PAGE + 2}), "after a failure nothing is known"


def test_steps_that_read_more_than_samples_are_no_replays() -> None:
    packer = Packer(TokenPacker(SLOTS), SLOTS, PAGES, PAGE, GraphShapes(mixed_shapes(SLOTS, 64)))
    output = SimpleNamespace(images=None)
    request: Any = SimpleNamespace(
        prompt_ids=[1, 2, 3, 4], params=SamplingParams(prompt_logprobs=1), output=output
    )

    def shape(**more: Any) -> GraphShape | None:
        data = NewRequestData(request.params, 1, frozenset(), [1, 2, 3, 4], [])
        row = Row(request, 1, 0, 3, [1, 2, 3], True, [1], 0, data, **more)
        generating = Generating([], np.empty(0, np.int64), np.empty(0, np.int64))
        return packer.pack(Step(1, generating, (row,), 3)).shape

    assert shape() == GraphShape(4, 16, 16)
    assert shape(scores=(0, 3)) is None
