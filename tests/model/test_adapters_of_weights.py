"""DoRA, biases of adapters, and adapters of heads and embeddings: as weights into which they are merged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.errors import ConfigError
from aioinfer.model.updates.recipe import prepare_update
from aioinfer.params import SamplingParams
from tests.model.adapters import factors, write_adapter
from tests.model.checkpoints import greedy_each, make_checkpoint
from tests.model.harness import load, require
from tests.model.kernels import kernels_or_skip
from tests.model.test_adapters import ROWS, installed, logits, shapes_of, stored_name
from tests.tiers import SECONDS, SLOW_MODEL, nightly, points, rest, thinned

Weights = dict[str, torch.Tensor]
SCALE = 3.0
#: slots of ROWS
SLOTS = [1, 0, 2, 1, 2]


class Base:
    """A checkpoint, a model of it, and adapters of that."""

    def __init__(self, name: str, kernels: str, path: Path) -> None:
        require(kernels)
        self.path, self.kernels, self._path = path / "base", kernels, path
        self.oracle = make_checkpoint(name, self.path)
        self.model = self.load(self.path)
        foreign = kernels == "transformers"
        self.shapes = shapes_of(self.load(self.path) if foreign else load(self.path, kernels="sdpa"))
        self.weights: Weights = load_file(self.path / "model.safetensors")
        self.transposed = name.startswith("gpt2")

    def load(self, path: Path, **options: Any) -> Any:
        how = {"force_transformers": True} if self.kernels == "transformers" else {"kernels": self.kernels}
        return load(path, **how, **options)

    def matrices(self, seed: int, *names: str) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Of the modules whose names end so, or of all."""
        chosen = {name: shape for name, shape in self.shapes.items() if not names or name.endswith(names)}
        return factors(chosen, dict.fromkeys(chosen, 4), seed=seed, dtype=torch.float32)

    def write(self, number: int, matrices: Any, further: Mapping[str, torch.Tensor], **fields: Any) -> Path:
        fields = {"lora_alpha": SCALE * 4, "fan_in_fan_out": self.transposed, **fields}
        return write_adapter(self._path / f"adapter-{number}", matrices, further=further, **fields)

    def merged(self, number: int, changed: Weights) -> Path:
        """A checkpoint with some of its weights changed; its head is its own."""
        to = self._path / f"merged-{number}"
        shutil.copytree(self.path, to)
        weights = {**self.weights, **changed}
        if (
            "lm_head.weight" not in weights
            and (words := self.weights.get("model.embed_tokens.weight")) is not None
        ):
            weights["lm_head.weight"] = words.clone()
            config = json.loads((to / "config.json").read_text())
            (to / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
        save_file(weights, to / "model.safetensors", metadata={"format": "pt"})
        return to

    def check(self, adapters: list[Path], merged: list[Path]) -> None:
        """Rows with adapters and without, in one batch and alone."""
        base = logits(self.model, ROWS, None, self.kernels)
        remove = installed(self.model, *adapters)
        oracles = [self.model, *map(self.load, merged)]
        mixed = logits(self.model, ROWS, SLOTS, self.kernels)
        for at, (row, slot) in enumerate(zip(ROWS, SLOTS, strict=True)):
            alone = logits(self.model, [row], [slot], self.kernels)[0]
            # A native row has the same bits in any company.
            near = 0.0 if self.kernels == "native" else 1e-3
            torch.testing.assert_close(mixed[at], alone, rtol=near, atol=near)
            wanted = logits(oracles[slot], [row], None, self.kernels)[0]
            torch.testing.assert_close(mixed[at], wanted, rtol=1e-3, atol=1e-3)
            assert bool(slot) == (not torch.allclose(mixed[at], base[at], atol=0.1))
        remove()
        assert torch.equal(logits(self.model, ROWS, None, self.kernels), base)


def with_norms(base: Base, seed: int) -> tuple[Any, Weights, Weights]:
    """Matrices, magnitudes and the weights that they make, by the definition of DoRA."""
    matrices = base.matrices(seed)
    random = torch.Generator().manual_seed(seed)
    norms: Weights = {}
    changed: Weights = {}
    for name, (a, b) in matrices.items():
        stored = f"{stored_name(name, base.path)}.weight"
        weight = base.weights[stored].T if base.transposed else base.weights[stored]
        whole = weight.double() + SCALE * b.double() @ a.double()
        norm = weight.norm(dim=1) * (0.5 + torch.rand(len(b), generator=random))
        norms[f"{name}.lora_magnitude_vector"] = norm
        whole = (norm.double() / whole.norm(dim=1))[:, None] * whole
        changed[stored] = (whole.T if base.transposed else whole).float().contiguous()
    return matrices, norms, changed


DORA = points(
    [("llama-biases", "sdpa"), ("gpt2", "sdpa"), ("qwen3.5", "native"), ("llama-gelu", "transformers")],
    [
        ("qwen3", "sdpa"), ("glm4", "sdpa"), ("qwen3-next", "sdpa"), ("qwen3", "native"),
        ("llama-biases", "native"), ("qwen3", "transformers"),
    ],
)  # fmt: skip


@rest(SECONDS)
@pytest.mark.parametrize(("name", "kernels"), DORA)
def test_rows_with_dora_are_those_of_merged_weights(tmp_path: Path, name: str, kernels: str) -> None:
    base = Base(name, kernels, tmp_path)
    adapters, merged = [], []
    for number in (1, 2):
        matrices, norms, changed = with_norms(base, number)
        adapters.append(base.write(number, matrices, norms, use_dora=True))
        merged.append(base.merged(number, changed))
    base.check(adapters, merged)


@nightly(SLOW_MODEL)
def test_results_are_rescaled_in_front_of_kernels_in_triton(tmp_path: Path) -> None:
    kernels_or_skip("cpu")
    base = Base("qwen3", "triton", tmp_path)
    matrices, norms, changed = with_norms(base, 1)
    path = base.write(1, matrices, norms, use_dora=True)
    base.check([path, path], [merged := base.merged(1, changed), merged])


@pytest.mark.parametrize("kernels", thinned(["native", "sdpa", "transformers"], 3))
def test_biases_behind_b_are_added(tmp_path: Path, kernels: str) -> None:
    base = Base("llama-biases", kernels, tmp_path)
    adapters, merged = [], []
    for number in (1, 2):
        matrices = base.matrices(number, "q_proj", "down_proj", "gate_proj")
        further, changed = {}, {}
        for name, (a, b) in matrices.items():
            further[f"{name}.lora_B.bias"] = bias = torch.randn(len(b)) * 0.1
            changed[f"{name}.bias"] = base.weights[f"{name}.bias"] + SCALE * bias
            changed[f"{name}.weight"] = base.weights[f"{name}.weight"] + SCALE * b @ a
        adapters.append(base.write(number, matrices, further, lora_bias=True))
        merged.append(base.merged(number, changed))
    base.check(adapters, merged)


HEADS = points(
    [("llama-gqa-tied", "sdpa"), ("gemma2", "native")],
    [("qwen3", "sdpa"), ("smollm3", "native"), ("qwen3", "transformers"), ("gemma2", "transformers")],
)


def heads(base: Base) -> Iterator[tuple[Path, Weights]]:
    """Adapters of the head, and what they make of the weights: one of low rank, beside those of layers; one
    of the whole head; and with DoRA."""
    words = base.weights["model.embed_tokens.weight"]
    head = base.weights.get("lm_head.weight", words)
    for number in (1, 2, 3):
        own = factors({"lm_head": tuple(head.shape)}, {"lm_head": 4}, seed=number, dtype=torch.float32)  # type: ignore[dict-item]
        a, b = own["lm_head"]
        matrices = base.matrices(number, "q_proj")
        changed = {
            f"{name}.weight": base.weights[f"{name}.weight"] + SCALE * b @ a
            for name, (a, b) in matrices.items()
        }
        whole = head + SCALE * b @ a
        fields: dict[str, Any] = {}
        further: Weights = {}
        if number == 2:
            further, fields = {"lm_head.weight": whole}, {"modules_to_save": ["lm_head"]}
        else:
            # PEFT writes the head beside.
            matrices, further = matrices | own, {"lm_head.base_layer.weight": head}
        if number == 3:
            matrices, fields = own, {"use_dora": True}
            norms = head.norm(dim=1) * 1.5
            further["lm_head.lora_magnitude_vector"] = norms
            whole, changed = (norms / whole.norm(dim=1))[:, None] * whole, {}
        yield base.write(number, matrices, further, **fields), {**changed, "lm_head.weight": whole}


@pytest.mark.parametrize(("name", "kernels"), HEADS)
def test_heads_have_adapters(tmp_path: Path, name: str, kernels: str) -> None:
    base = Base(name, kernels, tmp_path)
    made = [(path, base.merged(number, changed)) for number, (path, changed) in enumerate(heads(base))]
    for first, second in ((0, 1), (1, 2)):
        base.check([made[first][0], made[second][0]], [made[first][1], made[second][1]])


WORDS = points(
    [("gemma2", "native"), ("qwen3", "transformers")], [("qwen3", "sdpa"), ("llama-gqa-tied", "sdpa")]
)


@pytest.mark.parametrize(("name", "kernels"), WORDS)
def test_embeddings_have_adapters(tmp_path: Path, name: str, kernels: str) -> None:
    """Of the vectors as a whole, and of low rank; where the head is the embedding, it stays."""
    base = Base(name, kernels, tmp_path)
    key, words = "model.embed_tokens", base.weights["model.embed_tokens.weight"]
    a, b = torch.randn(4, len(words)) * 0.2, torch.randn(words.shape[1], 4) * 0.2
    adapters, merged = [], []
    for number in (1, 2):
        matrices = base.matrices(number, "q_proj")
        whole = words + SCALE * a.T @ b.T if number == 1 else words.flip(0)
        further = {f"{key}.lora_embedding_A": a, f"{key}.lora_embedding_B": b}
        if number == 2:
            further = {f"{key}.weight": whole.contiguous()}
        fields = {"modules_to_save": ["embed_tokens"]} if number == 2 else {}
        adapters.append(
            base.write(number, matrices, further, **fields, target_modules=["q_proj", "embed_tokens"])
        )
        changed = {
            f"{each}.weight": base.weights[f"{each}.weight"] + SCALE * b @ a
            for each, (a, b) in matrices.items()
        }
        merged.append(base.merged(number, {**changed, f"{key}.weight": whole.contiguous()}))
    base.check(adapters, merged)


@pytest.mark.parametrize("kernels", thinned(["native", "sdpa"], 2))
async def test_an_engine_continues_with_the_head_of_an_adapter(tmp_path: Path, kernels: Any) -> None:
    base = Base("qwen3-blocks", kernels, tmp_path)
    path, changed = next(iter(heads(base)))
    oracle = base.oracle
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6], [*range(7, 40)]]
    config = EngineConfig(
        model=str(base.path),
        dtype="float32",
        num_pages=64,
        threads=1,
        attention_backend=kernels,
        chunk_size=5,
    )
    async with Engine(config) as engine:
        await engine.load_adapter("a", path)
        for adapter in ("a", None):
            streams = [
                engine.generate(prompt, SamplingParams(max_tokens=8, temperature=0), adapter=adapter)
                for prompt in prompts
            ]
            found = [[*(await stream).token_ids] for stream in streams]
            if adapter is None:
                oracle.load_state_dict(base.weights)
            else:
                oracle.load_state_dict({**base.weights, **changed})
            assert found == greedy_each(oracle, prompts, 8, found)


@pytest.mark.parametrize("kernels", thinned(["native", "sdpa", "transformers"], 3))
def test_adapters_that_are_made_of_the_weights_exclude_others(tmp_path: Path, kernels: str) -> None:
    base = Base("qwen3", kernels, tmp_path)
    matrices, norms, _ = with_norms(base, 1)
    dora, plain = base.write(1, matrices, norms, use_dora=True), base.write(2, matrices, {})
    model = base.model
    prepared = model.adapters.prepare(dora)
    model.adapters.install(1, prepared)
    with pytest.raises(ConfigError, match="weights: an adapter is loaded that was made of the weights"):
        prepare_update(model, base.path, lambda: None)
    model.adapters.remove(1)
    prepare_update(model, base.path, lambda: None).install()
    model.adapters.install(1, model.adapters.prepare(plain))
    with pytest.raises(ConfigError, match="the weights that the model was loaded with, and others have"):
        model.adapters.install(2, prepared)
    with pytest.raises(ConfigError, match="the weights that the model was loaded with, and others have"):
        model.adapters.prepare(dora)


def test_parts_that_do_not_fit_the_model_are_refused_by_name(tmp_path: Path) -> None:
    base = Base("qwen3", "sdpa", tmp_path)
    words = base.weights["model.embed_tokens.weight"]
    matrices = base.matrices(1, "q_proj")
    low = {"model.embed_tokens.lora_embedding_A": torch.ones(4, len(words))}
    vectors = {f"{name}.lora_magnitude_vector": torch.ones(len(b)) for name, (_, b) in matrices.items()}
    zeros = {name: (a, b * 0) for name, (a, b) in matrices.items()}
    wrong: list[tuple[str, Any, Weights, dict[str, Any]]] = [
        ("lm_head.weight is shaped", matrices, {"lm_head.weight": words[1:]}, {}),
        ("lm_head.weight is shaped", matrices, {"lm_head.weight": words.flatten()}, {}),
        ("embed_tokens.weight is shaped", matrices, {"model.embed_tokens.weight": words[1:]}, {}),
        ("is a weight of its own", matrices, {"model.norm.weight": torch.ones(48)}, {}),
        ("is a weight of its own", matrices, {"model.layers.0.self_attn.k_proj.weight": words}, {}),
        (
            "is not the embedding of the model", matrices,
            {**low, "model.embed_tokens.lora_embedding_B": torch.ones(7, 4)}, {},
        ),
        (
            "embed_tokens has rank 65; max_lora_rank is 64", matrices,
            {
                "model.embed_tokens.lora_embedding_A": torch.ones(65, len(words)),
                "model.embed_tokens.lora_embedding_B": torch.ones(48, 65),
            },
            {"rank_pattern": {"embed_tokens": 65}},
        ),
        (
            "is an embedding, of which DoRA is not supported", matrices,
            {
                **vectors, **low, "model.embed_tokens.lora_embedding_B": torch.ones(48, 4),
                "model.embed_tokens.lora_magnitude_vector": torch.ones(48),
            },
            {"use_dora": True},
        ),
        (
            "lm_head.base_layer.weight is a weight of its own",
            {**matrices, "lm_head": (torch.ones(4, 48), torch.ones(len(words), 4))},
            {"lm_head.base_layer.weight": words + 1}, {},
        ),
    ]  # fmt: skip
    for number, (said, given, further, fields) in enumerate(wrong):
        fields = {"target_modules": ["q_proj", "embed_tokens", "lm_head"], **fields}
        if "lm_head" not in given:
            fields["target_modules"].remove("lm_head")
        path = base.write(number, given, {name: each.clone() for name, each in further.items()}, **fields)
        with pytest.raises(ConfigError) as caught:
            base.model.adapters.prepare(path)
        assert said in str(caught.value), number
    # Rows without a norm.
    for parameter in (f"{name}.weight" for name in matrices):
        base.weights[parameter] = base.weights[parameter] * 0
    model = base.load(base.merged(9, {}))
    path = base.write(99, zeros, vectors, use_dora=True)
    with pytest.raises(ConfigError, match="have no norm to divide by"):
        model.adapters.prepare(path)


@pytest.mark.parametrize("kernels", thinned(["native", "sdpa"], 2))
def test_files_that_have_changed_are_not_read_again(tmp_path: Path, kernels: str) -> None:
    """Nothing of them is kept open once a model is loaded, until an adapter needs the weights."""
    base = Base("qwen3", kernels, tmp_path)
    matrices, norms, _ = with_norms(base, 1)
    dora = base.write(1, matrices, norms, use_dora=True)
    file = base.path / "model.safetensors"
    model = base.load(base.path)
    file.unlink()
    save_file({**base.weights, "further": torch.ones(1)}, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="the files of the model have changed since it was loaded"):
        model.adapters.prepare(dora)
    assert base.load(base.merged(1, {})).adapters.prepare(dora).rank == 4
