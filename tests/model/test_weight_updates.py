"""Other weights in place of those of a loaded model: the bits of a model that was loaded with them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from aioinfer.errors import ConfigError, OutOfMemory
from aioinfer.ledger import LEDGER
from aioinfer.model.updates.recipe import NewTensors, prepare_update
from aioinfer.system.memory import Available
from tests.checkpoint.test_formats import FORMATS
from tests.model import harness
from tests.model.block_models import block_config, write_checkpoint
from tests.model.checkpoints import FAMILIES, IN_ENGINES, RECURRENT, make_model
from tests.model.harness import attention_for, build_batch, require, row_states, state_pool
from tests.tiers import SECONDS, rest

CPU = torch.device("cpu")
#: one of each way in which tensors become parts of a model
KINDS = [
    *("llama-gqa-tied", "llama-biases", "qwen3-wide-untied", "qwen3-moe-mixed", "mixtral", "gpt2-wide"),
    *("glm4", "gpt-oss", "gemma2", "gemma4-shared", "gemma4-keys", "gemma4-experts"),
    *("lfm2-biases", "lfm2-moe", "qwen3.5", "qwen3.5-moe", "granite", "cohere2", "opt", "ernie4.5-moe"),
    *("deepseek-v3", "falcon-h1", "nemotron-h-moe"),
]


FILE = "model.safetensors"


def go_on() -> None:
    """Nobody wants to end it."""


def load(path: Path, kernels: str = "native", **options: Any) -> Any:
    options = {"dtype": "float32", "block_size": 4 if "llada2" in path.name else None, **options}
    return harness.load(path, kernels=kernels, **options)


def write(kind: str, path: Path, seed: int) -> Path:
    """A checkpoint of a family. Neighbouring seeds have nothing in common but their shapes."""
    if kind == "llada2":
        write_checkpoint(path, block_config(), seed=seed)
    else:
        make_model(*{**FAMILIES, **RECURRENT}[kind], path, seed=seed)
    return path


@pytest.fixture
def pair(tmp_path: Path) -> Callable[[str], tuple[Path, Path]]:
    """Writes two checkpoints of one family."""

    def written(kind: str) -> tuple[Path, Path]:
        return write(kind, tmp_path / f"{kind}-one", 1), write(kind, tmp_path / f"{kind}-two", 2)

    return written


def items(path: Path) -> list[tuple[object, object]]:
    return [*load_file(path / "model.safetensors").items()]


def update(model: Any, given: NewTensors) -> None:
    prepare_update(model, given, go_on).install()


def last(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """A tensor with another last number."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[-1] = value
        return tensor

    return change


@torch.inference_mode()
def logits(model: Any, kernels: str = "native") -> torch.Tensor:
    ids = [(7 * i + 3) % 100 for i in range(40)]
    states = row_states(state_pool(model.spec, 1), [(0, 1)])
    batch = build_batch([(ids, 0, [1, 2, 3])], 16, num_decodes=0, logits_rows=range(40), states=states)
    found: torch.Tensor = model.forward(batch, attention_for(model.spec, 5, 16, kernels))
    return found


def kernels_of(kind: str) -> Iterator[str]:
    return (kernels for name, kernels in IN_ENGINES if name == kind)


@rest(SECONDS)
@pytest.mark.parametrize("kind", KINDS)
def test_an_updated_model_has_the_bits_of_one_that_was_loaded_anew(
    pair: Callable[[str], tuple[Path, Path]], kind: str
) -> None:
    """Every family, on torch's kernels and, where these can, on native ones; from a directory and from
    memory."""
    one, two = pair(kind)
    for kernels in kernels_of(kind):
        require(kernels)
        expected = logits(load(two, kernels), kernels)
        model = load(one, kernels)
        before = logits(model, kernels)
        assert not torch.equal(before, expected)
        update(model, two)
        assert torch.equal(logits(model, kernels), expected)
        own = bool(model.spec.layer_kernels)
        update(model, items(one) if own else [*load(one, kernels).state().items()])
        assert torch.equal(logits(model, kernels), before)


@rest(SECONDS)
def test_tensors_whose_names_lack_the_prefix_are_those_of_the_model(
    pair: Callable[[str], tuple[Path, Path]],
) -> None:
    one, two = pair("llama-gqa-tied")
    expected = logits(load(two, "sdpa"), "sdpa")
    for path in (one, two):
        named = {name.removeprefix("model."): tensor for name, tensor in load_file(path / FILE).items()}
        save_file(named, path / FILE, {"format": "pt"})
    layers = [item for item in items(two) if str(item[0]).startswith("layers.")]
    others = [item for item in items(two) if item[0] not in dict(layers)]
    for given in ([two], [two / FILE], [layers, others]):
        model = load(one, "sdpa")
        for part in given:
            update(model, part)  # type: ignore[arg-type]
        assert torch.equal(logits(model, "sdpa"), expected)


@pytest.mark.parametrize(("kind", "quantization"), [("qwen3-wide-untied", "int8"), ("qwen3.5-moe", "int4")])
def test_rounded_weights_are_rounded_again(
    pair: Callable[[str], tuple[Path, Path]], kind: str, quantization: str
) -> None:
    require("native")
    one, two = pair(kind)
    options = {"quantization": quantization, "dtype": "bfloat16"}
    expected, model = logits(load(two, **options)), load(one, **options)
    update(model, two)
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("kind", ["qwen3.5-equal", "qwen3-wide-untied"])
@pytest.mark.parametrize("kernels", ["sdpa", "native"])
def test_weights_may_come_in_parts(pair: Callable[[str], tuple[Path, Path]], kind: str, kernels: str) -> None:
    """Layer by layer, the norms of a checkpoint with two heads by themselves, the embedding last."""
    require(kernels)
    one, two = pair(kind)
    expected, model = logits(load(two, kernels), kernels), load(one, kernels)
    left = dict(items(two))
    first = {name: left.pop(name) for name in [*left] if str(name).endswith("q_norm.weight")}
    layers = {name: left.pop(name) for name in [*left] if "layers" in str(name)}
    for part in (first, layers, left):
        if part:
            assert not torch.equal(logits(model, kernels), expected)
            update(model, [*part.items()])
    assert torch.equal(logits(model, kernels), expected)


def test_experts_may_be_stacked_or_not(pair: Callable[[str], tuple[Path, Path]]) -> None:
    require("native")
    one, two = pair("qwen3-moe")
    expected, model, given = logits(load(two, "sdpa"), "sdpa"), load(one, "sdpa"), dict(items(two))
    for layer in range(3):
        at = f"model.layers.{layer}.mlp.experts"
        names = [f"{name}_proj.weight" for name in ("gate", "up", "down")]
        each: list[Any] = [[given.pop(f"{at}.{e}.{name}") for name in names] for e in range(8)]
        given[f"{at}.gate_up_proj"] = torch.stack([torch.cat(expert[:2]) for expert in each])
        given[f"{at}.down_proj"] = torch.stack([expert[2] for expert in each])
    update(model, [*given.items()])
    assert torch.equal(logits(model, "sdpa"), expected)


_Q, _NORM = "model.layers.1.self_attn.q_proj.weight", "model.layers.1.input_layernorm.weight"
_HEAD = "lm_head.weight"
#: tensors in place of others, what makes others of them, or None for what is not there; and what is said
WRONG: list[tuple[dict[Any, Any], str]] = [
    ({_Q: None}, f"{_Q} is missing: .* can be replaced together only"),
    ({"model.layers.9.x.weight": torch.ones(2)}, "1 unexpected tensors, first model.layers.9.x.weight"),
    ({_Q: lambda t: t[:, :-1]}, rf"{_Q} is shaped \(64, 47\), the config says \(64, 48\)"),
    ({_Q: lambda t: t.to(torch.int32)}, f"{_Q} is of type torch.int32"),
    ({_Q: "weights"}, f"{_Q} must be a tensor of torch, got 'weights'"),
    ({_Q: lambda t: t.to("meta")}, f"{_Q} is no plain tensor in memory"),
    ({_Q: last(math.nan)}, f"{_Q} has infinity or NaN"),
    ({_NORM: last(math.inf)}, f"{_NORM} has infinity or NaN"),
    ({_NORM: lambda t: t * math.nan}, f"{_NORM} has infinity or NaN"),
    (
        {_HEAD: torch.ones(211, 48)},
        f"{_HEAD} is not model.embed_tokens.weight, and the model has one matrix for both",
    ),
    ({5: torch.ones(2)}, "names of tensors must be text, got 5"),
]


@pytest.mark.parametrize("kernels", ["sdpa", "native"])
def test_wrong_tensors_are_refused_by_name_and_change_nothing(tmp_path: Path, kernels: str) -> None:
    require(kernels)
    path = tmp_path / "tied"
    make_model("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}, path, seed=1)
    model = load(path, kernels)
    before, right = logits(model, kernels), items(path)
    for changes, message in (*WRONG, (dict.fromkeys(dict(right)), "there are no tensors")):
        given = dict(right)
        for name, change in changes.items():
            given[name] = change(given[name]) if callable(change) else change
        given = {name: tensor for name, tensor in given.items() if tensor is not None}
        with pytest.raises(ConfigError, match=f"^weights: .*{message}"):
            update(model, [*given.items()])
        assert torch.equal(logits(model, kernels), before), message


def test_wrong_checkpoints_are_refused_and_change_nothing(
    pair: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    one, two = pair("qwen3")
    model = load(one, "sdpa")
    before = logits(model, "sdpa")
    lacking = dict(items(two))
    del lacking[_NORM]
    save_file(lacking, tmp_path / "lacking.safetensors")  # type: ignore[arg-type]
    (tmp_path / "cut.safetensors").write_bytes((two / "model.safetensors").read_bytes()[:-100])
    for path, message in (
        (tmp_path / "nothing", "there is no directory"),
        (tmp_path / "lacking.safetensors", f"the checkpoint has no tensor {_NORM}"),
        (tmp_path / "cut.safetensors", "cannot be read"),
        (
            write("qwen3-wide-untied", tmp_path / "wide", 1),
            "head_dim of the config is 32, and the model's is 16",
        ),
        (write("llama-gqa-tied", tmp_path / "llama", 1), "of the config is .*, and the model's is"),
    ):
        with pytest.raises(ConfigError, match=f"^weights: .*{message}"):
            update(model, path)
        assert torch.equal(logits(model, "sdpa"), before)
    update(model, two / "model.safetensors")
    assert torch.equal(logits(model, "sdpa"), logits(load(two, "sdpa"), "sdpa"))


def test_tensors_are_not_kept_and_may_be_of_another_type(pair: Callable[[str], tuple[Path, Path]]) -> None:
    one, two = pair("qwen3")
    for kernels in ("sdpa", "native"):
        require(kernels)
        model, given = load(one, kernels), [*load_file(two / "model.safetensors").items()]
        update(model, [(name, torch.nn.Parameter(tensor.double())) for name, tensor in given])
        expected = logits(load(two, kernels), kernels)
        assert torch.equal(logits(model, kernels), expected)
        update(model, [*given])
        for _, tensor in given:
            tensor.fill_(7)
        assert torch.equal(logits(model, kernels), expected)


@pytest.mark.parametrize("kernels", ["native", "sdpa", "transformers"])
def test_what_an_update_copies_is_claimed_until_it_is_written(
    pair: Callable[[str], tuple[Path, Path]], kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = kernels != "transformers"
    backend = kernels if own else "sdpa"
    require(backend)
    left = 1 << 30
    monkeypatch.setattr(LEDGER, "available", lambda: Available(LEDGER.untaken() + left, "control group"))
    one, two = pair("qwen3")
    model = load(one, backend, force_transformers=not own)
    before, left = logits(model, backend), 1 << 15  # enough for rotary factors
    for given in (two, items(two)) if own else (two,):
        with pytest.raises(OutOfMemory, match=r"^update_weights: .* GiB are needed, and the control group"):
            update(model, given)
    assert torch.equal(logits(model, backend), before)
    left = 1 << 30
    prepared = prepare_update(model, two, go_on)
    claimed = LEDGER.entries()["update_weights"].promised
    sizes = [tensor.nbytes for tensor in load_file(two / FILE).values()]
    assert 0 < claimed <= 4 * max(sizes) if own else sum(sizes) <= claimed < 1.1 * sum(sizes)
    prepared.install()
    assert "update_weights" not in LEDGER.entries()


def test_reading_can_be_ended(pair: Callable[[str], tuple[Path, Path]]) -> None:
    class Enough(Exception):
        pass

    def stop() -> None:
        raise Enough

    one, two = pair("qwen3")
    with pytest.raises(Enough):
        prepare_update(load(one, "sdpa"), two, stop)


def test_mapped_weights_are_not_replaced(
    pair: Callable[[str], tuple[Path, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require("native")
    monkeypatch.setenv("AIOINFER_CACHE", str(tmp_path / "cache"))
    one, two = pair("qwen3")
    with pytest.raises(ConfigError, match="weights: cache_weights: packed weights are mapped from a file"):
        update(load(one, cache_weights=True), two)


def quantise(path: Path, name: str) -> Path:
    """Write a checkpoint's projections anew, in a format of quantised ones."""
    config, encode, _ = FORMATS[name]
    tensors: dict[str, torch.Tensor] = {}
    for key, tensor in load_file(path / "model.safetensors").items():
        if "_proj" not in key or "layers.2.self_attn.k_proj" in key:
            tensors[key] = tensor
            continue
        module = key.removesuffix(".weight")
        tensors |= {f"{module}.{part}": value for part, value in encode(tensor)[0].items()}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    stated = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**stated, "quantization_config": config}))
    return path


@rest(SECONDS)
@pytest.mark.parametrize("name", ["awq", "packed-8", "fp8-blocks"])
def test_quantised_checkpoints_replace_quantised_ones(tmp_path: Path, name: str) -> None:
    require("native")
    one, two = (quantise(write("qwen3-blocks", tmp_path / f"{seed}", seed), name) for seed in (1, 2))
    for kernels in ("sdpa", "native"):
        expected, model = logits(load(two, kernels), kernels), load(one, kernels)
        update(model, two)
        assert torch.equal(logits(model, kernels), expected)
        if kernels == "sdpa" or not FORMATS[name][2]:
            continue
        with pytest.raises(ConfigError, match="must be quantised as in the checkpoint that was loaded"):
            update(model, write("qwen3-blocks", tmp_path / "plain", 2))
        assert torch.equal(logits(model, kernels), expected)
