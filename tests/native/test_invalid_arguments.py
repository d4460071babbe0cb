"""No index, size or fork ends the process or hangs it: each is an error of its call, or works."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from aioinfer.config import EngineConfig
from aioinfer.model.attention.base import AttentionParams
from aioinfer.model.attention.pool import KVShape
from aioinfer.model.batch import Batch
from aioinfer.model.heads import HeadNorm
from aioinfer.model.inspection import LoadOptions
from aioinfer.model.layer import Embedding, Layer, Trunk
from aioinfer.model.loader import load_model
from aioinfer.model.mixers.self_attention import SelfAttention
from aioinfer.model.moe.experts import ExpertWeights
from aioinfer.model.moe.native_experts import NativeExperts, NativeRouter
from aioinfer.model.moe.routing import SoftmaxRouter
from aioinfer.model.native import NativeDecoder, NativeMLP
from aioinfer.model.native_linear import NativeLinear
from aioinfer.model.norm import Norm
from aioinfer.model.per_layer import PerLayerPart
from aioinfer.model.quantization import Rounding
from aioinfer.model.spec import ModelSpec
from aioinfer.native.arguments import AddNormArguments
from aioinfer.native.bindings import (
    InvalidArguments,
    ThreadPool,
    shared_thread_pool,
)
from aioinfer.sampling.batch import SamplingBatch
from aioinfer.sampling.native_sampler import NativeLogits, NativeLogprobs, sample_tokens
from tests.model.harness import attention_for, build_batch
from tests.model.mixtures import native_experts
from tests.native.support import Bench, Heads, Row, draw_rows, normal
from tests.sampling.support import make_batch
from tests.tiers import PROGRAM, rest

PAGES, PAGE_SIZE = 20, 8
#: far away, and just outside of anything small
EXTREMES = [-(2**63), -1, 10**9, 2**62, 2**63 - 1]
ARRAYS = ["input_ids", "positions", "slot_mapping", "cu_q", "kv_len", "block_table", "logits_rows"]
VOCAB = 40


def int64(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


@pytest.fixture(scope="module")
def decoder() -> NativeDecoder:
    model = load_model(EngineConfig().model_path, LoadOptions(dtype="float32", device=torch.device("cpu")))
    assert isinstance(model, NativeDecoder)
    return model


def step() -> Batch:
    """Two rows on pages of a pool of ``PAGES``."""
    return build_batch(
        [([5], 11, [3, 7]), ([1, 2, 3, 4, 9, 8, 7, 6, 5, 4], 0, [19, 20])], PAGE_SIZE, num_decodes=1
    )


def changed(batch: Batch, name: str, at: int, value: int) -> Batch:
    array = getattr(batch, name).clone()
    array.view(-1)[at] = value
    return replace(batch, **{name: array})


@pytest.mark.parametrize("name", ARRAYS)
def test_a_decoder_refuses_a_step_whose_indices_lie_beyond_its_memory(
    decoder: NativeDecoder, name: str
) -> None:
    """One index at a time, the first and the last of each array; a good step gives what it gave before."""
    spec = decoder.spec
    attention = attention_for(spec, PAGES, PAGE_SIZE, "native")
    wanted = decoder.forward(step(), attention)
    ends = {
        "input_ids": spec.vocab_size,
        "positions": 10**6,
        "slot_mapping": (PAGES + 1) * PAGE_SIZE,
        "cu_q": len(step().input_ids) + 1,
        "kv_len": 2 * PAGE_SIZE + 1,
        "block_table": PAGES + 1,
        "logits_rows": len(step().input_ids),
    }
    for at in (0, -1):
        for value in (*EXTREMES, ends[name]):
            with pytest.raises(InvalidArguments, match=name):
                decoder.forward(changed(step(), name, at, value), attention)
    assert torch.equal(decoder.forward(step(), attention), wanted)


@pytest.mark.parametrize("name", ["slot_mapping", "cu_q", "kv_len", "block_table"])
def test_attention_refuses_rows_beyond_its_pool(name: str) -> None:
    heads = Heads.draw(random.Random(1), torch.float32, rotary_dim=0, norm=None)
    bench = Bench(heads, PAGE_SIZE)
    row = Row(normal(10, heads.width, heads.head_dim, seed=1), 0)
    bench.deal([row])
    batch = bench.batch([(row, 0, 10)])
    kv = heads.kv_heads
    q, k, v = row.qkv.split((heads.heads, kv, kv), 1)
    for value in EXTREMES:
        with pytest.raises(InvalidArguments, match=name):
            bench.attention(0, q, k, v, changed(batch, name, -1, value), heads.scoring)
    assert bench.attention(0, q, k, v, batch, heads.scoring).isfinite().all()


def test_norms_refuse_sizes_that_vectors_do_not_divide_and_sums_without_a_summand() -> None:
    pool, memory, out = shared_thread_pool(2), torch.ones(64), torch.empty(64)
    at = memory.data_ptr()
    good: dict[str, Any] = {
        "pool": pool.handle,
        "hidden": at,
        "delta": None,
        "count": 2,
        "size": 16,
        "weight": at,
        "bias": None,
        "eps": 1e-6,
        "sums": None,
        "out": out.data_ptr(),
    }
    changes: list[dict[str, Any]] = [{"size": 0}, {"size": 24}, {"size": -16}, {"count": -1}, {"sums": at}]
    for bad in (*changes, {"delta": at}):
        with pytest.raises(InvalidArguments):
            pool.kernels.call(AddNormArguments(**{**good, **bad}), "float32")


def test_pages_after_the_end_of_a_sequence_are_not_looked_at(decoder: NativeDecoder) -> None:
    """Tables are as wide as the longest row needs; entries after a shorter one's pages are padding."""
    attention = attention_for(decoder.spec, PAGES, PAGE_SIZE, "native")
    batch = build_batch([([5], 0, [3]), ([1] * 10, 0, [19, 20])], PAGE_SIZE, num_decodes=0)
    assert torch.equal(
        decoder.forward(changed(batch, "block_table", 1, 10**9), attention),
        decoder.forward(batch, attention),
    )


def test_random_arrays_are_refused_or_computed(decoder: NativeDecoder) -> None:
    """Several hostile numbers at once, anywhere; among them those that happen to be valid."""
    attention = attention_for(decoder.spec, PAGES, PAGE_SIZE, "native")
    refused = 0
    for seed in range(300):
        rng, batch = random.Random(seed), step()
        for _ in range(rng.choice([1, 1, 2, 5])):
            name = rng.choice(ARRAYS)
            at = rng.randrange(getattr(batch, name).numel())
            value = rng.choice([*EXTREMES, rng.randrange(-3, 40), rng.randrange(-300, 300)])
            batch = changed(batch, name, at, value)
        try:
            logits = decoder.forward(batch, attention)
        except InvalidArguments:
            refused += 1
        else:
            assert len(logits) == 2, f"seed {seed}"
    assert 100 < refused < 300


def test_layers_that_do_not_fit_each_other_are_refused_when_a_decoder_is_made() -> None:
    """A head of another size than the vocabulary would write beyond the logits."""
    pool = shared_thread_pool(1)
    good = load_model(EngineConfig().model_path, LoadOptions(dtype="float32", device=torch.device("cpu")))
    spec, hidden = good.spec, good.spec.hidden_size

    def linear(outputs: int, inner: int) -> NativeLinear:
        return NativeLinear(pool, normal(outputs, inner, seed=0), None)

    norm = Norm(torch.ones(hidden), 1e-6)
    trunk, words = Trunk(Embedding(), [], norm, None), normal(spec.vocab_size, hidden, seed=2)
    with pytest.raises(ValueError, match="outputs for"):
        NativeDecoder(pool, spec, trunk, words, linear(spec.vocab_size + 32, hidden))
    plain = linear(spec.vocab_size, hidden)
    with pytest.raises(InvalidArguments, match="not quantised"):
        NativeDecoder(pool, spec, trunk, plain, linear(spec.vocab_size, hidden))
    gated = NativeLinear(pool, normal(2 * spec.vocab_size, hidden, seed=0), None, Rounding(8, 32), gated=True)
    with pytest.raises(InvalidArguments, match="are gated"):
        NativeDecoder(pool, spec, trunk, plain, gated)


class ShortRope:
    """A table of eight positions."""

    table = (normal(8, 16, seed=0), normal(8, 16, seed=1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope": ShortRope()}, "a table of 8 positions"),
        ({"mixer_norm": Norm(torch.ones(3), 1e-6)}, "norms of one decoder"),
        ({"mlp_norm": Norm(torch.ones(64), 0.1)}, "norms of one decoder"),
        ({"mlp": "tall"}, "weights of another size"),
        ({"mlp": "odd"}, "no multiple of a vector"),
        ({"qk_norm": "small"}, "needs 48 contiguous elements"),
        ({"params": AttentionParams(0.25, shared=True), "qkv": "queries"}, "no layer before it stores"),
        ({"per_layer": "other"}, "no inputs of its own"),
        ({"scale": 0.5}, "scaled behind a part without a norm"),
    ],
    ids=["rope", "size", "eps", "mlp", "middle", "qk_norm", "shared", "per layer", "scale"],
)
def test_parts_that_do_not_fit_a_layer_are_refused_when_it_is_added(
    change: dict[str, Any], message: str
) -> None:
    """A decoder of two heads of 16 and a residual of 64 takes nothing else."""
    pool, spec = shared_thread_pool(1), small_spec()

    def linear(outputs: int, inner: int) -> NativeLinear:
        return NativeLinear(pool, normal(outputs, inner, seed=0), None)

    norm = Norm(torch.ones(64), 1e-6)
    parts = {
        "tall": NativeMLP(linear(32, 48), linear(64, 32)),
        "odd": NativeMLP(linear(20, 64), linear(64, 20)),
        "small": HeadNorm(torch.ones(2, 16), 1e-6, whole=True),
        "queries": linear(32, 64),
        "other": PerLayerPart(linear(16, 64), "gelu_tanh", linear(64, 16), norm),
    }
    good: dict[str, Any] = {
        "mixer_norm": norm,
        "mlp_norm": norm,
        "mlp": NativeMLP(linear(32, 64), linear(64, 32), "gelu_tanh"),
        "per_layer": None,
        "scale": 1.0,
    }
    heads: dict[str, Any] = {"num_heads": 2, "kv": KVShape(1, 16), "kv_layer": 0, "rope": None}
    heads |= {"qkv": linear(64, 64), "params": AttentionParams(0.25), "out": linear(64, 32)}
    words, head = normal(spec.vocab_size, 64, seed=1), linear(spec.vocab_size, 64)

    def make(change: dict[str, Any]) -> None:
        mixer = SelfAttention(**{name: change.get(name, part) for name, part in heads.items()})
        layer = Layer(mixer=mixer, **{name: change.get(name, part) for name, part in good.items()})
        NativeDecoder(pool, spec, Trunk(Embedding(), [layer], norm, None), words, head)

    heads["qk_norm"] = None
    make({})
    with pytest.raises(ValueError, match=message):
        make({key: parts[value] if isinstance(value, str) else value for key, value in change.items()})


def small_spec() -> ModelSpec:
    return ModelSpec(
        architecture="Small",
        num_layers=1,
        kv_layers=(KVShape(1, 16),),
        hidden_size=64,
        vocab_size=97,
        max_model_len=100,
        dtype=torch.float32,
        eos_token_ids=frozenset(),
        num_parameters=0,
    )


def test_experts_that_do_not_exist_are_refused() -> None:
    pool = shared_thread_pool(2)
    stack = ExpertWeights(normal(4, 64, 32, seed=0), normal(4, 32, 32, seed=1))
    experts = native_experts(pool, stack)
    values, weights = normal(3, 32, seed=1), torch.ones(3, 2)
    for bad in (*EXTREMES, 4):
        with pytest.raises(InvalidArguments, match=r"chosen\[5\]"):
            experts(values, weights, torch.tensor([[0, 1], [2, 3], [3, bad]]))
    layers = native_experts(pool, stack, Rounding(8, 32)).layers
    with pytest.raises(InvalidArguments, match="several formats"):
        NativeExperts(pool, [*experts.layers, *layers])
    with pytest.raises(InvalidArguments, match="another size"):
        NativeExperts(
            pool,
            [*experts.layers, (NativeLinear(pool, normal(96, 32, seed=0), None, gated=True), layers[0][1])],
        )
    plain = NativeLinear(pool, normal(32, 32, seed=0), None)
    with pytest.raises(InvalidArguments, match="gated"):
        NativeExperts(pool, [*experts.layers, (plain, experts.layers[0][1])])
    for top_k in (0, 5, -1):
        with pytest.raises(InvalidArguments, match="top_k"):
            NativeRouter(pool, SoftmaxRouter(normal(4, 32, seed=0), top_k, normalize=True), torch.float32)


def test_matrix_products_of_sizes_that_vectors_do_not_divide_are_refused() -> None:
    pool = shared_thread_pool(2)
    layer = NativeLinear(pool, normal(40, 17, seed=0), None)
    with pytest.raises(InvalidArguments, match="inner dimension"):
        layer(normal(3, 17, seed=0))
    with pytest.raises(InvalidArguments, match="gated"):
        NativeLinear(pool, normal(2 * 17, 16, seed=0), None, gated=True)
    layer = NativeLinear(pool, normal(40, 16, seed=0), None)
    values, out = normal(3, 32, seed=0), torch.empty(3, 40)
    layer.packed.inner = 32
    with pytest.raises(InvalidArguments, match="not that of the weights"):
        layer.packed.apply(values.data_ptr(), 3, out.data_ptr())
    with pytest.raises(InvalidArguments):
        NativeLinear(pool, values[:0], None)


def sampling(rows: int, **changes: Any) -> SamplingBatch:
    return replace(make_batch([{}] * rows), **changes)


@pytest.mark.parametrize("bad", [*EXTREMES, VOCAB])
def test_sampling_refuses_bans_and_masks_of_rows_and_tokens_that_do_not_exist(bad: int) -> None:
    pool = shared_thread_pool(2)
    logits = normal(3, VOCAB, seed=0)
    before = logits.clone()
    sample = partial(sample_tokens, pool, logits)
    with pytest.raises(InvalidArguments, match="banned_ids"):
        sample(sampling(3, banned_rows=int64(0, 2), banned_ids=int64(1, bad)))
    with pytest.raises(InvalidArguments, match="banned_rows"):
        sample(sampling(3, banned_rows=int64(0, bad), banned_ids=int64(1, 1)))
    processors = NativeLogits(pool)
    with pytest.raises(InvalidArguments, match="rows"):
        processors.apply_masks_(logits, int64(0, bad), torch.zeros(2, 2, dtype=torch.int32))
    counts, row_of = torch.zeros(2, VOCAB, dtype=torch.int32), int64(0, 1, 0, 1)
    with pytest.raises(InvalidArguments, match="slots"):
        processors.penalise(logits, counts, row_of, sampling(3, slots=int64(0, 1, bad)))
    with pytest.raises(InvalidArguments, match="row_of"):
        processors.penalise(logits, counts, int64(0, 1, 0, bad), sampling(3, slots=int64(0, 1, 2)))
    assert torch.equal(logits, before)


@pytest.mark.parametrize("top_k", [-1, -(2**63), 2**63 - 1, VOCAB, VOCAB + 1])
def test_a_top_k_that_is_none_keeps_all_tokens(top_k: int) -> None:
    logits = normal(3, VOCAB, seed=0)
    wanted = sample_tokens(shared_thread_pool(2), logits, sampling(3))
    batch = sampling(3, top_k=torch.full((3,), top_k, dtype=torch.int64))
    assert torch.equal(sample_tokens(shared_thread_pool(2), logits, batch), wanted)


def test_parameters_that_are_no_numbers_give_some_token() -> None:
    logits = normal(3, VOCAB, seed=0)
    for value in (float("nan"), float("inf"), -1.0, 1e-45, 0.0):
        for name in ("temperature", "top_p", "min_p"):
            batch = sampling(3, **{name: torch.full((3,), value)})
            tokens = sample_tokens(shared_thread_pool(2), logits, batch)
            assert all(-VOCAB < token < VOCAB for token in tokens.tolist()), (name, value)


def test_without_a_vocabulary_there_is_nothing_to_sample() -> None:
    pool = shared_thread_pool(2)
    with pytest.raises(InvalidArguments):
        sample_tokens(pool, torch.empty(3, 0), sampling(3))
    with pytest.raises(InvalidArguments):
        NativeLogprobs(pool, torch.empty(3, 0), 0)


def test_blocks_of_no_positions_are_refused() -> None:
    """A division by zero would end the process."""
    heads = Heads.draw(random.Random(2), torch.float32)
    bench = Bench(heads, PAGE_SIZE)
    rows = draw_rows(random.Random(2), heads, 2)
    for block in (0, -1):
        heads.scoring = heads.scoring._replace(block=block)
        with pytest.raises(InvalidArguments, match="block"):
            bench.deal(rows)
            bench.step([(rows[0], 0, len(rows[0].qkv))])


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


@rest(PROGRAM)
def test_a_forked_process_computes_with_threads_of_its_own() -> None:
    """Also where a thread of the parent is computing at that moment, and where it ends the parent's pools."""
    said = run("""if True:
        import os, signal, threading
        import torch
        from aioinfer.model.native_linear import NativeLinear
        from aioinfer.native.bindings import ThreadPool, shared_thread_pool

        weight, values = torch.randn(200, 64), torch.randn(9, 64)
        layer = NativeLinear(shared_thread_pool(3), weight, None)
        other = NativeLinear(ThreadPool(2), weight, None)
        wanted, over = layer(values), threading.Event()

        def compute():
            while not over.is_set():
                layer(values)

        busy = threading.Thread(target=compute)
        busy.start()
        for _ in range(5):
            child = os.fork()
            if child == 0:
                signal.alarm(30)
                fine = torch.equal(layer(values), wanted) and torch.equal(layer(values), wanted)
                del other
                new = NativeLinear(shared_thread_pool(3), weight, None)
                os._exit(0 if fine and torch.equal(new(values), wanted) else 1)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        over.set()
        busy.join()
        print(torch.equal(layer(values), wanted))
    """)
    assert said.split() == ["0"] * 5 + ["True"]


def test_a_pool_has_a_thread() -> None:
    for threads in (0, -1):
        with pytest.raises(InvalidArguments, match="threads"):
            ThreadPool(threads)
