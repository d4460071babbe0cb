"""Routers and experts in C++: the formula, the bits, and the models that have them from end to end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from aioinfer.checkpoint.tensors import SafetensorsTensors
from aioinfer.cli.doctor import examine
from aioinfer.config import EngineConfig
from aioinfer.errors import ConfigError
from aioinfer.model.attention.native_attention import NativeAttention
from aioinfer.model.attention.pool import KVPool
from aioinfer.model.backend import Backend
from aioinfer.model.decoder import Decoder
from aioinfer.model.inspection import LoadOptions
from aioinfer.model.kernels import choose_experts
from aioinfer.model.loader import load_model
from aioinfer.model.moe.native_experts import NativeRouter
from aioinfer.model.moe.routing import GroupedSigmoidRouter, Rule, SoftmaxRouter
from aioinfer.model.moe.sparse import SparseMLP, StoredExperts
from aioinfer.model.native import NativeDecoder
from aioinfer.model.weights import Weights
from aioinfer.native.bindings import InvalidArguments, ThreadPool
from tests.model.block_models import Plain, Rows, block_config, write_checkpoint, write_config
from tests.model.harness import build_batch, make_pool
from tests.model.mixtures import Mixture, by_native
from tests.model.test_block_diffusion import SHAPES, run, tokens
from tests.model.test_routing import plain_grouped, plain_softmax

pytestmark = pytest.mark.native
CPU = torch.device("cpu")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
#: what native layers take: multiples of 16
WIDE = {"intermediate_size": 48, "moe_intermediate_size": 16}


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_biases_that_do_not_fit_are_refused() -> None:
    task = Mixture.make(1, clamped=True)
    assert task.stack.biases is not None
    task.stack = replace(task.stack, biases=(task.stack.biases[0][:, :-1], task.stack.biases[1]))
    with pytest.raises(ValueError, match="needs 32 contiguous elements"):
        by_native(task)
    with pytest.raises(InvalidArguments, match="expert"):
        by_native(Mixture.make(1)).packed.set_biases(5, 0, 0)


def softmax(num_experts: int, top_k: int, hidden: int = 32, *, normalize: bool = True) -> SoftmaxRouter:
    return SoftmaxRouter(noise(num_experts, hidden), top_k, normalize)


def sigmoid(*rule: Any, hidden: int = 32, bias: float | None = 0.3) -> GroupedSigmoidRouter:
    num_experts, *rest = rule
    extra = None if bias is None else bias + 0.2 * noise(num_experts, seed=2)
    return GroupedSigmoidRouter(noise(num_experts, hidden), extra, *rest)


def listed(rule: Rule, hidden: torch.Tensor) -> list[dict[int, float]]:
    """Expert to weight of every token, as the rule is written."""
    logits = (hidden.double() @ rule.weight.double().T).tolist()
    if isinstance(rule, SoftmaxRouter):
        return [plain_softmax(row, rule.top_k, rule.normalize) for row in logits]
    bias = [0.0] * len(rule.weight) if rule.bias is None else rule.bias.double().tolist()
    groups = rule.num_groups, rule.top_groups
    return [plain_grouped(row, bias, rule.top_k, *groups, rule.scale, rule.normalize) for row in logits]


@pytest.mark.parametrize(
    "rule",
    [
        softmax(128, 8),
        softmax(8, 2, normalize=False),
        softmax(5, 5),
        softmax(1, 1),
        sigmoid(256, 8, 8, 4, True, 2.5),
        sigmoid(256, 8, 8, 4, True, 2.5, bias=-2.0),
        sigmoid(64, 6, 1, 1, False, 1.0, bias=None),
        sigmoid(16, 3, 16, 4, True, 1.0),
        sigmoid(12, 4, 3, 1, False, 2.0),
    ],
)
def test_routers_follow_their_rules(rule: Rule) -> None:
    hidden = noise(50, 32, seed=1)
    weights, experts = NativeRouter(ThreadPool(2), rule, torch.float32)(hidden)
    for w, e, expected in zip(weights.tolist(), experts.tolist(), listed(rule, hidden), strict=True):
        assert dict(zip(e, w, strict=True)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("rule", [softmax(9, 3), sigmoid(9, 3, 3, 2, True, 1.0, bias=None)])
def test_of_equal_experts_the_first(rule: Rule) -> None:
    """Three different experts, three times."""
    rule.weight.copy_(noise(3, 32).repeat(3, 1))
    hidden = noise(40, 32, seed=1)
    _, experts = NativeRouter(ThreadPool(2), rule, torch.float32)(hidden)
    best = (hidden @ rule.weight[:3].T).argmax(-1)
    assert torch.equal(experts[:, 0], best)
    if isinstance(rule, SoftmaxRouter):
        assert torch.equal(experts, best[:, None] + torch.tensor([0, 3, 6]))
    else:
        # Groups are equal, too: the first two of three are open.
        assert torch.equal(experts[:, 1], best + 3)


@pytest.mark.parametrize("rule", [softmax(8, 3), sigmoid(8, 3, 4, 2, True, 2.5)])
@pytest.mark.parametrize("junk", [float("nan"), float("inf"), float("-inf")])
def test_a_token_that_is_no_number_goes_somewhere(rule: Rule, junk: float) -> None:
    router, hidden = NativeRouter(ThreadPool(1), rule, torch.float32), noise(20, 32, seed=1)
    clean = router(hidden)
    hidden[2] = junk
    hidden[4, 3] = junk
    weights, experts = router(hidden)
    assert bool(((experts >= 0) & (experts < 8)).all())
    assert all(len(set(row)) == 3 for row in experts.tolist())
    others = [0, 1, 3, *range(5, 20)]
    assert torch.equal(weights[others], clean[0][others])
    assert torch.equal(experts[others], clean[1][others])


@DTYPES
def test_a_token_has_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    sizes = {"top_k": 3, "num_experts": 7, "hidden": 48, "middle": 32}
    task = Mixture.make(61, dtype=dtype, **sizes)
    rule = sigmoid(7, 3, 7, 5, True, 2.5, hidden=48)
    results = []
    for threads in (1, 2, 3):
        part = SparseMLP(NativeRouter(ThreadPool(threads), rule, dtype), by_native(task, threads))
        together = part(task.hidden)
        results.append(together)
        for some in ([60], [5, 4], list(range(0, 61, 2)), list(range(30))):
            assert torch.equal(part(task.hidden[some]), together[some])
    assert all(torch.equal(result, results[0]) for result in results)


def over_pool(model: Any) -> Any:
    """Native attention over as many pages as a pool has, with NaN in all of them."""

    def make(pool: KVPool) -> NativeAttention:
        pages, page_size = pool.keys[0].shape[:2]
        spec = model.spec
        attention = NativeAttention(
            ThreadPool(2), spec.kv_layers,
            num_pages=pages, page_size=page_size, dtype=spec.dtype,
        )  # fmt: skip
        for cells in attention._cells:
            cells.fill_(float("nan"))
        return attention

    return make


def prepare(path: Path, config: dict[str, Any], block: int, **settings: Any) -> Rows:
    tensors = write_checkpoint(path, config)
    size = block if "mask_token_id" in config else None
    model = load_model(path, LoadOptions(dtype="float32", device=CPU, block_size=size, **settings))
    return Rows(model, Plain(config, tensors, block), attention=over_pool(model))


QWEN3 = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "mask_token_id": None}
FAMILIES: dict[str, tuple[int, dict[str, Any]]] = {
    **{f"llada2-{name}": (8, SHAPES[name]) for name in SHAPES if "quarter" not in name and name != "dense"},
    "sdar": (4, {"family": "sdar_moe"}),
    "sdar-tied": (4, {"family": "sdar_moe", "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "qwen3": (1, {"family": "sdar_moe", **QWEN3}),
    "qwen3-without-norm": (1, {"family": "sdar_moe", **QWEN3, "norm_topk_prob": False}),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_what_its_description_says(tmp_path: Path, name: str) -> None:
    block, changes = FAMILIES[name]
    rows = prepare(tmp_path, block_config(**WIDE, **changes), block)
    assert isinstance(rows.model, NativeDecoder)
    assert rows.model.spec.expert_kernels == "native"
    if block > 1:
        run(rows, block)
        return
    rows.step([("a", 0, tokens(20, 1)), ("b", 0, tokens(1, 2))])
    rows.step([("a", 20, tokens(1, 3)), ("b", 1, tokens(1, 4)), ("c", 0, tokens(33, 5))])
    rows.step([("c", 33, tokens(1, 6)), ("b", 2, tokens(1, 7))])


@DTYPES
def test_the_same_as_layer_by_layer(tmp_path: Path, dtype: torch.dtype) -> None:
    """With dense layers between sparse ones, whose inner size is another."""
    changes = {**QWEN3, "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    write_config(tmp_path, block_config("sdar_moe", **WIDE, **changes))
    name = str(dtype).removeprefix("torch.")
    batch = build_batch(
        [(tokens(30), 0, [3, 1]), (tokens(3), 0, [2])], 16, num_decodes=0, logits_rows=range(33)
    )
    logits = []
    for experts, kind in (("auto", NativeDecoder), ("loop", Decoder)):
        settings: dict[str, Any] = {"dtype": name, "load_format": "random", "experts": experts}
        model = load_model(tmp_path, LoadOptions(device=CPU, **settings))
        assert isinstance(model, kind)
        logits.append(model.forward(batch, over_pool(model)(make_pool(model.spec, 4, 16))).float())
    bound = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(*logits, rtol=bound, atol=bound * float(logits[1].abs().max()))


@pytest.mark.parametrize("layout", ["one by one", "together", "apart"])
def test_experts_are_read_one_by_one_whatever_the_checkpoint(tmp_path: Path, layout: str) -> None:
    gate, up, down = noise(4, 16, 32), noise(4, 16, 32, seed=1), noise(4, 32, 16, seed=2)
    if layout == "together":
        tensors = {"at.gate_up_proj": torch.cat((gate, up), 1), "at.down_proj": down}
    elif layout == "apart":
        tensors = {"at.gate_proj": gate, "at.up_proj": up, "at.down_proj": down}
    else:
        named = {"gate": gate, "up": up, "down": down}.items()
        tensors = {f"at.{e}.{n}_proj.weight": t[e].clone() for n, t in named for e in range(4)}
    save_file(tensors, tmp_path / "model.safetensors")

    def stored() -> StoredExperts:
        return StoredExperts(
            Weights(SafetensorsTensors(tmp_path), dtype=torch.float32, device=CPU), "at", 4, 32, 16
        )

    stack = stored().stacked()
    seen = set()
    for index, (gate_up, own) in enumerate(stored().each()):
        assert torch.equal(gate_up, stack.gate_up[index])
        assert torch.equal(own, stack.down[index])
        seen.add(gate_up.data_ptr())
    # In one place after the other, or mapped.
    assert len(seen) == (4 if layout == "together" else 1)


def test_native_experts_go_with_native_layers() -> None:
    def choose(wanted: Any = "auto", **changes: Any) -> Backend:
        return choose_experts(CPU, 48, 32, torch.float32, wanted, **changes)

    assert choose(native=True) == Backend("native", "the device is a cpu")
    assert choose("native", native=True) == Backend("native", "asked for")
    assert choose("loop", native=True) == Backend("loop", "asked for")
    assert choose() == Backend("grouped", "the layers are not native")
    with pytest.raises(
        ConfigError, match=r"^moe_backend: native was asked for, and the layers are not native"
    ):
        choose("native")


@pytest.mark.parametrize(("middle", "experts"), [(32, "native: the device"), (24, "grouped: the layers")])
def test_the_doctor_says_what_computes(tmp_path: Path, middle: int, experts: str) -> None:
    write_config(tmp_path, block_config(**{**WIDE, "moe_intermediate_size": middle}))
    config = EngineConfig(model=str(tmp_path), load_format="random", device="cpu")
    found = {finding.subject: finding.text for finding in examine(config)}
    assert found["experts"].startswith(experts)
    assert found["operations"].startswith("native:" if middle == 32 else "torch: inner dimensions")
