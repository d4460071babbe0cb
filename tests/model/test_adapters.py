"""Adapters in the layers of models: as weights into which they are merged, whoever else is in the batch."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from aioinfer.errors import ConfigError
from aioinfer.model.adapters.slots import TorchAdapters
from aioinfer.model.adapters.targets import HEAD, AdapterTargets
from aioinfer.model.inspection import LoadOptions
from aioinfer.model.loader import load_model
from tests.model.adapters import factors, write_adapter
from tests.model.checkpoints import make_checkpoint
from tests.model.harness import Driver, attention_for, build_batch, load, require, row_states, state_pool
from tests.model.kernels import kernels_or_skip
from tests.tiers import SECONDS, SLOW_MODEL, nightly, rest

CPU = torch.device("cpu")
PAGE = 8
#: families with fused projections, rows in another order, transposed matrices, biases, tensors that a layer
#: has twice, recurrent layers, and experts beside what is adapted
SOME = [
    *("qwen3", "llama-biases", "phi3", "glm4", "gpt2", "gemma3", "gemma4-keys", "gemma4-shared"),
    *("qwen3-moe", "gpt-oss", "lfm2", "qwen3.5", "qwen3-next", "smollm3", "olmo2", "granite", "cohere2"),
    *("gpt-neox", "opt", "ernie4.5-moe", "falcon-h1"),
]
#: of transformers' own code
FOREIGN = ["persimmon", "opt-350m", "cohere-norms", "llama-rope-dynamic"]


class Trained(NamedTuple):
    """An adapter of all layers of a model, and the model that it is merged into."""

    path: Path
    merged: Path


def merge(base: Path, to: Path, matrices: dict[str, Any], scale: float, *, transposed: bool = False) -> Path:
    """A checkpoint whose weights are ``w + scale * b @ a``; ``transposed``: they are stored so."""
    shutil.copytree(base, to)
    weights = load_file(to / "model.safetensors")
    for name, (a, b) in matrices.items():
        weight = weights[f"{name}.weight"]
        change = scale * b.double() @ a.double()
        changed = weight.double() + (change.T if transposed else change)
        weights[f"{name}.weight"] = changed.to(weight.dtype)
    save_file(weights, to / "model.safetensors", metadata={"format": "pt"})
    return to


def targets_of(model: Any) -> AdapterTargets:
    adapters = model.adapters
    assert isinstance(adapters, TorchAdapters)
    return adapters.targets


def shapes_of(model: Any) -> dict[str, tuple[int, int]]:
    """The modules of the layers of a model that can be adapted."""
    found = {}
    for layer in targets_of(model).layers:
        for target in layer.targets:
            if target.name == HEAD:
                continue
            rows = target.stop - target.start if target.places is None else len(target.places)
            found[target.name] = rows, layer.inputs
    return found


def stored_name(name: str, path: Path) -> str:
    """Of a module, in the checkpoint: transformers' modules have a prefix that some checkpoints do not."""
    return name if f"{name}.weight" in load_file(path / "model.safetensors") else name.split(".", 1)[1]


class Models:
    """Checkpoints of families with adapters of their own, each made once."""

    def __init__(self, base: Path) -> None:
        self._base = base
        self.path = functools.cache(self._make)
        self.load = functools.cache(self._load_base)
        self.trained = functools.cache(self._train)
        self.merged = functools.cache(self._load_merged)

    def _make(self, name: str) -> Path:
        path = self._base / name
        path.mkdir()
        make_checkpoint(name, path)
        return path

    def _load_base(self, name: str, kernels: str = "sdpa", **options: Any) -> Any:
        return self._load(self.path(name), kernels, **options)

    def _load(self, path: Path, kernels: str, **options: Any) -> Any:
        own = {"force_transformers": True} if kernels == "transformers" else {"kernels": kernels}
        return load(path, **own, **options)

    def _train(self, name: str, seed: int, rank: int = 4) -> Trained:
        foreign = name in FOREIGN
        model, base = self.load(name, "transformers" if foreign else "sdpa"), self.path(name)
        shapes = shapes_of(model)
        matrices = factors(shapes, dict.fromkeys(shapes, rank), seed=seed, dtype=torch.float32)
        transposed = targets_of(model).layers[0].transposed
        path = write_adapter(
            self._base / f"{name}-{seed}", matrices, r=rank, lora_alpha=3 * rank, fan_in_fan_out=transposed
        )
        stored = {stored_name(module, base): pair for module, pair in matrices.items()}
        to = self._base / f"{name}-{seed}-merged"
        return Trained(path, merge(base, to, stored, 3.0, transposed=transposed))

    def _load_merged(self, name: str, seed: int, kernels: str) -> Any:
        return self._load(self.trained(name, seed).merged, kernels)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


ROWS = [[3], [7, 8, 9], list(range(20, 57)), [5, 5], [11]]


@torch.inference_mode()
def logits(
    model: Any, rows: Sequence[Sequence[int]], slots: Sequence[int] | None, kernels: str
) -> torch.Tensor:
    """Of the last token of each prompt."""
    kernels = "sdpa" if kernels == "transformers" else kernels
    chosen: Any = kernels
    attention = attention_for(model.spec, 40, PAGE, chosen)
    pages, each = iter(range(1, 41)), []
    for ids in rows:
        each.append((ids, 0, [next(pages) for _ in range(-(-len(ids) // PAGE))]))
    states = row_states(state_pool(model.spec, 40), [(0, at + 1) for at in range(len(rows))])
    batch = build_batch(each, PAGE, num_decodes=0, states=states)
    if slots is not None:
        batch.adapter_slots = list(slots)
        batch.adapters = torch.tensor(batch.adapter_slots)
    return model.forward(batch, attention).float()


def installed(model: Any, *adapters: Path) -> Callable[[], None]:
    """In slots from 1 on; returns what removes them."""
    for slot, path in enumerate(adapters, 1):
        model.adapters.install(slot, model.adapters.prepare(path))

    def remove() -> None:
        for slot in range(1, len(adapters) + 1):
            model.adapters.remove(slot)

    return remove


def check_mixed(models: Models, name: str, kernels: str) -> None:
    """Rows with adapters a, b and none, in one batch and alone."""
    model = models.load(name, kernels)
    remove = installed(model, models.trained(name, 1).path, models.trained(name, 2).path)
    slots, native = [1, 0, 2, 1, 2], kernels == "native"
    # A native row has the same bits in any company.
    near = {"rtol": 0.0, "atol": 0.0} if native else {"rtol": 1e-3, "atol": 1e-3}
    mixed = logits(model, ROWS, slots, kernels)
    for at, (row, slot) in enumerate(zip(ROWS, slots, strict=True)):
        alone = logits(model, [row], [slot] if slot else None, kernels)[0]
        oracle = models.merged(name, slot, kernels) if slot else model
        torch.testing.assert_close(mixed[at], alone, **near)
        torch.testing.assert_close(mixed[at], logits(oracle, [row], None, kernels)[0], rtol=1e-3, atol=1e-3)
    base = logits(model, ROWS, None, kernels)
    assert all(not torch.allclose(mixed[at], base[at], atol=0.1) for at in (0, 2, 3, 4))
    remove()
    assert torch.equal(logits(model, ROWS, None, kernels), base)


MIXED = [
    *((name, "sdpa") for name in SOME),
    *((name, "transformers") for name in ("qwen3", "gpt2", "phi3", *FOREIGN)),
    *((name, "native") for name in ("qwen3", "llama-biases", "phi3", "gpt2-wide", "gemma4-experts", "glm4")),
    *((name, "native") for name in ("qwen3.5", "lfm2", "falcon-h1", "nemotron-h")),
    *(("deepseek-v3", kernels) for kernels in ("native", "sdpa")),
]


@rest(SECONDS)
@pytest.mark.parametrize(("name", "kernels"), MIXED)
def test_a_row_is_as_with_merged_weights_in_any_company(models: Models, name: str, kernels: str) -> None:
    require(kernels)
    check_mixed(models, name, kernels)


@pytest.mark.native
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_rounded_weights_take_adapters_too(models: Models, quantization: Any) -> None:
    rounded, exact = (models.load("qwen3", "native", quantization=each) for each in (quantization, "auto"))
    base = logits(rounded, ROWS, None, "native")
    for model in (rounded, exact):
        installed(model, models.trained("qwen3", 1).path)
    slots = [1, 0, 1, 1, 0]
    mixed, wanted = logits(rounded, ROWS, slots, "native"), logits(exact, ROWS, slots, "native")
    for at, (row, slot) in enumerate(zip(ROWS, slots, strict=True)):
        assert torch.equal(mixed[at], logits(rounded, [row], [slot] if slot else None, "native")[0])
        assert torch.equal(mixed[at], base[at]) == (slot == 0)
    # Nearer to unrounded weights with the adapter than to themselves without it.
    assert (mixed - wanted)[2].norm() < 0.5 * (base - wanted)[2].norm()


@rest(SECONDS)
@pytest.mark.parametrize("kernels", ["sdpa", "transformers"])
def test_sequences_that_come_and_go_are_those_of_merged_weights(models: Models, kernels: str) -> None:
    """Prompts in chunks beside decodes, rows with adapters that change places."""
    model = models.load("qwen3", kernels)
    remove = installed(model, models.trained("qwen3", 1).path, models.trained("qwen3", 2).path)
    prompts = [[at + 3, *range(20 * at, 20 * at + 9 * at)] for at in range(6)]
    slots = [1, 0, 2, 2, 1, 0]
    driven = Driver(model, chunk=5, kernels="sdpa").run(prompts, 6, gap=2, slots=slots)
    remove()
    for sequence, prompt, slot in zip(driven, prompts, slots, strict=True):
        oracle = models.merged("qwen3", slot, kernels) if slot else model
        alone = Driver(oracle, chunk=64, kernels="sdpa").run([prompt], 6)[0]
        assert sequence.ids == alone.ids


@nightly(SLOW_MODEL)
@pytest.mark.parametrize("name", ["qwen3", "glm4", "qwen3.5"])
def test_kernels_in_triton_compute_the_same(models: Models, name: str) -> None:
    kernels_or_skip("cpu")
    check_mixed(models, name, "triton")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "kernels", ["sdpa", pytest.param("triton", marks=nightly(SLOW_MODEL)), "transformers"]
)
def test_half_precision_differs_from_merged_weights_by_rounding(
    models: Models, dtype: str, kernels: str
) -> None:
    if kernels == "triton":
        kernels_or_skip("cpu")
    trained, options = models.trained("qwen3", 1), {"dtype": dtype, "device": CPU}
    options |= {"force_transformers": True} if kernels == "transformers" else {"kernels": kernels}
    model, merged = (
        load_model(path, LoadOptions(**options)) for path in (models.path("qwen3"), trained.merged)
    )
    installed(model, trained.path)
    got, expected = logits(model, ROWS, [1] * 5, kernels), logits(merged, ROWS, None, kernels)
    exact = logits(models.merged("qwen3", 1, "sdpa"), ROWS, None, "sdpa")
    error, bound = (each.sub(exact).abs().mean() for each in (got, expected))
    assert error < 2 * bound


def check_merged(models: Models, adapter: Path, matrices: Any, scale: float) -> None:
    """A model with an adapter computes what one does into which it is merged."""
    model, path = models.load("qwen3"), models.path("qwen3")
    remove = installed(model, adapter)
    got = logits(model, ROWS, [1] * 5, "sdpa")
    remove()
    oracle = load(merge(path, adapter.parent / "merged", matrices, scale), kernels="sdpa")
    torch.testing.assert_close(got, logits(oracle, ROWS, None, "sdpa"), rtol=1e-3, atol=1e-3)


def test_an_adapter_of_some_layers_leaves_the_others(models: Models, tmp_path: Path) -> None:
    every = shapes_of(models.load("qwen3"))
    shapes = {name: shape for name, shape in every.items() if "layers.1.mlp.up" in name}
    matrices = factors(shapes, dict.fromkeys(shapes, 3), seed=5, dtype=torch.bfloat16)
    path = write_adapter(tmp_path / "a", matrices, r=3, use_rslora=True, layers_to_transform=[1])
    check_merged(models, path, matrices, 16 / 3**0.5)


def test_ranks_and_scales_by_module_are_those_of_the_patterns(models: Models, tmp_path: Path) -> None:
    shapes = shapes_of(models.load("qwen3"))
    ranks = {name: 17 if name.endswith("k_proj") else 2 for name in shapes}
    matrices = factors(shapes, ranks, seed=6, dtype=torch.float32)
    path = write_adapter(
        tmp_path / "a", matrices, r=2, rank_pattern={"k_proj": 17}, lora_alpha=2, alpha_pattern={"k_proj": 34}
    )
    keys = {name: (a, 2 * b) if name.endswith("k_proj") else (a, b) for name, (a, b) in matrices.items()}
    check_merged(models, path, keys, 1.0)


@pytest.mark.native
def test_a_native_row_whose_slot_is_empty_is_refused(models: Models) -> None:
    model = models.load("qwen3", "native")
    for slot in (9, -1):
        with pytest.raises(ValueError, match="a row's adapter is not there"):
            logits(model, ROWS, [0, slot, 0, 0, 0], "native")


@pytest.mark.parametrize(
    ("kernels", "dtype", "message"),
    [
        ("sdpa", "float16", "not finite in float16"),
        pytest.param("native", "bfloat16", "that the model's type does not have", marks=pytest.mark.native),
    ],
)
def test_numbers_that_the_models_type_cannot_hold_are_refused(
    models: Models, tmp_path: Path, kernels: Any, dtype: str, message: str
) -> None:
    shapes = {
        name: shape for name, shape in shapes_of(models.load("qwen3")).items() if name.endswith("q_proj")
    }
    matrices = factors(shapes, dict.fromkeys(shapes, 4), seed=5, dtype=torch.float32)
    next(iter(matrices.values()))[0][0, 0] = torch.finfo(torch.float32).max
    model = load(models.path("qwen3"), dtype=dtype, kernels=kernels)
    with pytest.raises(ConfigError, match=message):
        model.adapters.prepare(write_adapter(tmp_path, matrices))


@pytest.mark.parametrize("kernels", ["sdpa", "transformers"])
def test_slots_that_cannot_be_are_refused(models: Models, kernels: str) -> None:
    model = models.load("qwen3", kernels)
    adapter = model.adapters.prepare(models.trained("qwen3", 1).path)
    with pytest.raises(ValueError, match="slot 0 cannot take an adapter"):
        model.adapters.install(0, adapter)
    model.adapters.remove(4)  # it may be empty
    with pytest.raises(ValueError, match="slot 4 has no adapter"):
        logits(model, ROWS, [0, 4, 0, 0, 0], kernels)
    model.adapters.install(4, adapter)
    with pytest.raises(ValueError, match="slot 4 cannot take an adapter"):
        model.adapters.install(4, adapter)
    assert logits(model, ROWS, [0, 4, 0, 0, 0], kernels).isfinite().all()
    model.adapters.remove(4)


def test_a_forward_that_fails_leaves_no_adapters_behind(models: Models) -> None:
    model = models.load("qwen3")
    remove = installed(model, models.trained("qwen3", 1).path)
    base = logits(model, ROWS, None, "sdpa")
    batch = build_batch([([3], 0, [1])], PAGE, num_decodes=0, logits_rows=[99])
    batch.adapter_slots = [1]
    with pytest.raises(IndexError):
        model.forward(batch, attention_for(model.spec, 4, PAGE, "sdpa"))
    assert torch.equal(logits(model, ROWS, None, "sdpa"), base)
    remove()


@pytest.mark.parametrize("kernels", ["sdpa", "transformers"])
def test_without_adapters_layers_are_bare(models: Models, kernels: str) -> None:
    model = models.load("qwen3", kernels, max_lora_rank=0)
    assert model.adapters is None
    assert model.adapter_reason == "max_lora_rank is 0"
    assert torch.equal(
        logits(model, ROWS, None, kernels), logits(models.load("qwen3", kernels), ROWS, None, kernels)
    )


@pytest.mark.parametrize("name", ["gemma4-shared", "qwen3-next", "lfm2-moe", "gpt2", "qwen3-moe"])
def test_all_linear_layers_but_those_of_experts_are_targets(models: Models, name: str) -> None:
    """Every matrix of the layers in the checkpoint is adapted, or is of a kind that is not."""
    found = {stored_name(module, models.path(name)) for module in shapes_of(models.load(name))}
    stored = load_file(models.path(name) / "model.safetensors")
    fixed = ("embed_tokens", "lm_head", "wte", "wpe", "experts", "shared_expert", "conv1d", "conv.conv")
    fixed += ("mlp.gate.", "feed_forward.gate.", "router", "per_layer", "norm", "ln_", "expert_bias")
    fixed += ("A_log", "dt_bias", "layer_scalar", "bias")
    left = {key.removesuffix(".weight") for key in stored if not any(part in key for part in fixed)}
    assert left == found


@pytest.mark.parametrize("inner", ["language_model", "text_model"])
def test_wrapped_models_take_the_names_of_the_wrapper(models: Models, tmp_path: Path, inner: str) -> None:
    model = models.load("qwen3")
    shapes = shapes_of(model)
    matrices = factors(shapes, dict.fromkeys(shapes, 4), seed=1, dtype=torch.float32)
    outer = {name.replace("model.", f"model.{inner}.", 1): pair for name, pair in matrices.items()}
    pattern = rf"model\.{inner}\..*_proj"
    path = write_adapter(tmp_path, outer, lora_alpha=12, target_modules=pattern)
    remove = installed(model, path)
    got = logits(model, ROWS, [1] * 5, "sdpa")
    remove()
    remove = installed(model, models.trained("qwen3", 1).path)
    assert torch.equal(got, logits(model, ROWS, [1] * 5, "sdpa"))
    remove()
