"""Directories of LoRA adapters: what is read of them, and one clear error for whatever is wrong."""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from aioinfer.checkpoint.adapter import AdapterFiles
from aioinfer.checkpoint.regular import open_regular
from aioinfer.errors import ConfigError
from tests.model.adapters import FIELDS, factors, write_adapter, write_config
from tests.tiers import SECONDS, rest

Q, K = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"
SHAPES = {Q: (12, 8), K: (6, 8)}
PREFIX = "base_model.model."
#: fields that change what a layer computes
REFUSED = (
    "use_qalora", "trainable_token_indices", "target_parameters", "ensure_weight_tying",
    "alora_invocation_tokens", "arrow_config", "kasa_config", "monteclora_config", "megatron_config",
)  # fmt: skip


def matrices(**ranks: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    by_name = {name: ranks.get(name.rpartition(".")[2], 4) for name in SHAPES}
    return factors(SHAPES, by_name, seed=1, dtype=torch.float32)


def retouch(path: Path, change: Any) -> None:
    """Change the tensors of an adapter, a dict, in place."""
    file = path / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


@pytest.mark.parametrize("infix", ["", ".default", ".mine"])
@pytest.mark.parametrize("prefix", [PREFIX, ""])
def test_matrices_and_scales_are_those_of_the_files(tmp_path: Path, infix: str, prefix: str) -> None:
    wrote = matrices()
    files = AdapterFiles.read(write_adapter(tmp_path, wrote, prefix=prefix, infix=infix, lora_alpha=6))
    assert files.modules.keys() == {name.removeprefix("model.") for name in wrote}
    assert files.rank == 4
    for name, (a, b) in wrote.items():
        found = files.modules[name.removeprefix("model.")]
        assert found.name == name
        assert found.a.equal(a)
        assert found.b.equal(b)
        assert found.scale == 1.5


def test_rslora_divides_by_the_root_of_the_rank(tmp_path: Path) -> None:
    files = AdapterFiles.read(write_adapter(tmp_path, matrices(), lora_alpha=6, use_rslora=True))
    assert {found.scale for found in files.modules.values()} == {3.0}


def test_patterns_give_ranks_and_scales_to_modules(tmp_path: Path) -> None:
    path = write_adapter(
        tmp_path,
        matrices(q_proj=2, k_proj=3),
        lora_alpha=6,
        r=7,
        rank_pattern={"q_proj": 2, r"model\.layers\.[0-9]+\.self_attn\.(k|v)_proj": 3},
        alpha_pattern={"layers.0.self_attn.q_proj": 5, "proj": 99},
    )
    modules = AdapterFiles.read(path).modules
    scales = {name.rpartition(".")[2]: found.scale for name, found in modules.items()}
    assert scales == {"q_proj": 2.5, "k_proj": 2.0}


@pytest.mark.parametrize("outer", ["model.language_model.", "language_model.model.", "language_model.", ""])
def test_modules_in_wrappers_have_the_names_that_they_have_without(tmp_path: Path, outer: str) -> None:
    wrote = {name.replace("model.", outer, 1): pair for name, pair in matrices().items()}
    files = AdapterFiles.read(write_adapter(tmp_path, wrote))
    assert files.modules.keys() == {name.removeprefix("model.") for name in SHAPES}
    assert files.name_of("layers.9.mlp") == f"{outer}layers.9.mlp"


def test_what_concerned_training_is_ignored(tmp_path: Path) -> None:
    changes = {"lora_dropout": 0.5, "init_lora_weights": "gaussian", "eva_config": {"rho": 2.0}}
    path = write_adapter(tmp_path, matrices(), **changes, later_field=None, later_number=3, revision="x")
    assert AdapterFiles.read(path).rank == 4


def test_a_config_of_an_old_version_has_fewer_fields(tmp_path: Path) -> None:
    path = write_adapter(tmp_path, matrices())
    few = {name: FIELDS[name] for name in ("peft_type", "r", "lora_alpha", "bias", "fan_in_fan_out")}
    (path / "adapter_config.json").write_text(json.dumps(few))
    assert len(AdapterFiles.read(path).modules) == 2


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'"),
        ({"peft_type": None}, "peft_type is None"),
        ({"use_bdlora": {"nblocks": 2}}, "use_bdlora is not supported"),
        ({"layer_replication": [[0, 2], [1, 3]]}, "layer_replication is not supported"),
        *(({field: True}, f"{field} is not supported") for field in REFUSED),
        *(({"bias": bias}, f"bias is '{bias}'") for bias in ("all", "lora_only")),
        *(
            ({"init_lora_weights": way}, f"init_lora_weights is '{way}'")
            for way in ("pissa_niter_16", "loftq")
        ),
        ({"use_something_new": True}, "use_something_new"),
        ({"use_dora": True}, "use_dora is true, and model.layers.0.self_attn.k_proj has no tensor of it"),
        ({"lora_bias": True}, "lora_bias is true, and model.layers.0.self_attn.k_proj has no tensor of it"),
        ({"use_dora": True, "lora_bias": True}, "lora_bias is not supported with use_dora"),
        ({"use_dora": "yes"}, "use_dora must be true or false, got 'yes'"),
        ({"lora_bias": 1}, "lora_bias must be true or false, got 1"),
        ({"modules_to_save": "lm_head"}, "modules_to_save must be names of modules, got 'lm_head'"),
        ({"modules_to_save": [1]}, "modules_to_save must be names of modules"),
        ({"modules_to_save": ["lm_head"]}, "there is no tensor of lm_head (modules_to_save)"),
        ({"new_config": {"on": 1}}, "new_config"),
        ({"r": 0}, "r must be a rank, from 1 on, got 0"),
        ({"r": True}, "r must be a rank"),
        ({"r": None}, "r must be a rank"),
        ({"r": 5}, "lora_A.weight is shaped (4, 8), the config says rank 5"),
        ({"rank_pattern": {"q_proj": 3}}, "q_proj.lora_A.weight is shaped (4, 8), the config says rank 3"),
        ({"rank_pattern": {"q_proj": "3"}}, "rank_pattern must be patterns of modules with ranks"),
        ({"rank_pattern": [3]}, "rank_pattern must be"),
        ({"rank_pattern": {"(q_proj": 4}}, "rank_pattern has no regular expression in "),
        ({"rank_pattern": {"q" * 2000: 4}}, "rank_pattern has a pattern of 20"),
        ({"alpha_pattern": {"q_proj": math.inf}}, "alpha_pattern must be"),
        ({"lora_alpha": "16"}, "lora_alpha must be a finite number, got '16'"),
        ({"lora_alpha": math.nan}, "lora_alpha must be a finite number, got nan"),
        ({"use_rslora": 1}, "use_rslora must be true or false, got 1"),
        ({"target_modules": 3}, "target_modules must be names of modules"),
        ({"target_modules": ["v_proj"]}, "k_proj.lora_A.weight belongs to no module that the config chooses"),
        ({"target_modules": r".*\.q_proj"}, "k_proj.lora_A.weight belongs to no module"),
        ({"exclude_modules": ["q_proj"]}, "q_proj.lora_A.weight belongs to no module"),
        ({"layers_to_transform": [1]}, "k_proj.lora_A.weight belongs to no module"),
        ({"layers_to_transform": "x"}, "layers_to_transform must be numbers of layers"),
        ({"layers_to_transform": 0, "layers_pattern": "blocks"}, "belongs to no module"),
    ],
)
def test_a_config_that_is_not_supported_is_refused_by_field(
    tmp_path: Path, fields: dict[str, Any], said: str
) -> None:
    path = write_adapter(tmp_path, matrices(), **fields)
    with pytest.raises(ConfigError) as caught:
        AdapterFiles.read(path)
    message = str(caught.value)
    assert message.startswith("adapter: ")
    assert said in message
    assert "\n" not in message


def _drop(name: str) -> Any:
    return lambda tensors: tensors.pop(PREFIX + name)


def _put(name: str, tensor: torch.Tensor) -> Any:
    return lambda tensors: tensors.update({PREFIX + name: tensor})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_drop(f"{Q}.lora_B.weight"), "q_proj.lora_A.weight is there, and lora_B of the module is not"),
        (_drop(f"{Q}.lora_A.weight"), "q_proj.lora_B.weight is there, and lora_A of the module is not"),
        (dict.clear, "has no matrices of an adapter"),
        (_put(f"{Q}.lora_A.other.weight", torch.ones(4, 8)), "is there as"),
        (_put(f"{Q}.lora_B.weight", torch.ones(12, 5)), "(12, 5), the config says rank 4"),
        (_put(f"{Q}.lora_A.weight", torch.ones(0, 8)), "(0, 8), the config says rank 4"),
        (_put(f"{Q}.lora_A.weight", torch.ones(4)), "is shaped (4,), not a matrix"),
        (_put(f"{Q}.lora_A.weight", torch.ones(4, 8, dtype=torch.int8)), "holds int8"),
        (_put(f"{Q}.lora_A.weight", torch.full((4, 8), math.inf)), "numbers that are not finite"),
        (_put(f"{Q}.lora_B.weight", torch.full((12, 4), math.nan)), "numbers that are not finite"),
        (_put(f"{Q}.lora_B.bias", torch.ones(12)), "lora_bias is false, and model.layers.0.self_attn.q_proj"),
        (_put(f"{Q}.bias", torch.ones(12)), "q_proj.bias is a bias"),
        (_put(f"{Q}.lora_magnitude_vector.weight", torch.ones(12)), "use_dora is false, and model.layers.0"),
        (_put("model.embed_tokens.lora_embedding_A", torch.ones(4, 9)), "lora_B of the module is not"),
        (_put("token_adapter.trainable_tokens_delta", torch.ones(9, 8)), "vectors of tokens"),
        (_put("some\nthing", torch.ones(2)), "some\\nthing' is no name of a tensor"),
        (_put("s" * 500, torch.ones(2)), "is no name of a tensor"),
        (_put("something", torch.ones(2)), "something is no matrix of an adapter"),
        (_put(f"language_{Q}.lora_A.weight", torch.ones(4, 8)), "lora_B of the module is not"),
    ],
)
def test_a_tensor_that_is_wrong_is_refused_by_name(tmp_path: Path, change: Any, said: str) -> None:
    path = write_adapter(tmp_path, matrices())
    retouch(path, change)
    with pytest.raises(ConfigError) as caught:
        AdapterFiles.read(path)
    assert str(caught.value).startswith("adapter: ")
    assert said in str(caught.value)


NORMS = {f"{name}.lora_magnitude_vector": torch.rand(len(b)) for name, (_, b) in matrices().items()}


@pytest.mark.parametrize("end", ["", ".weight", ".default.weight", ".default"])
def test_magnitudes_have_the_names_of_all_versions(tmp_path: Path, end: str) -> None:
    further = {f"{name}{end}": norm for name, norm in NORMS.items()}
    files = AdapterFiles.read(write_adapter(tmp_path, matrices(), further=further, use_dora=True))
    for found in files.modules.values():
        assert found.magnitude is not None
        assert found.magnitude.equal(NORMS[f"{found.name}.lora_magnitude_vector"])
        assert found.bias is None
    assert files.bound


def test_whole_weights_are_those_of_heads_and_embeddings(tmp_path: Path) -> None:
    names = ["lm_head.weight", "model.embed_tokens.modules_to_save.default.weight"]
    further = {name: torch.ones(9, 8) for name in names}
    path = write_adapter(tmp_path, matrices(), further=further, modules_to_save=["lm_head"])
    files = AdapterFiles.read(path)
    assert {key: name for key, (name, _) in files.saved.items()} == {
        "lm_head": f"{PREFIX}{names[0]}",
        "embed_tokens": f"{PREFIX}{names[1]}",
    }
    retouch(path, _put("lm_head.base_layer.weight", torch.ones(9, 8)))
    with pytest.raises(ConfigError, match=r"lm_head.weight is there as .*lm_head.base_layer.weight, too"):
        AdapterFiles.read(path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        *((_drop(name), "use_dora is true, and model.layers.0.self_attn") for name in NORMS),
        *(
            (_put(name, tensor), f"{name} {said}")
            for name in NORMS
            for tensor, said in (
                (torch.ones(5), "is shaped (5,), not ("),
                (torch.ones(12, 1), "is shaped (12, 1), not ("),
                (torch.tensor(1.0), "is shaped (), not ("),
                (torch.ones(0), "is shaped (0,), not ("),
                (torch.full((12,), math.nan), "has numbers that are not finite"),
                (torch.ones(12, dtype=torch.int32), "holds int32"),
            )
        ),
        *((_put(f"{name}.default", torch.ones(12)), "is there as") for name in NORMS),
        (_drop(f"{Q}.lora_A.weight"), "lora_A of the module is not"),
        (_put("model.norm.lora_magnitude_vector", torch.ones(8)), "lora_A of the module is not"),
        (_put(f"{Q}.lora_B.bias", torch.ones(12)), "lora_bias is false, and"),
    ],
)
def test_magnitudes_that_are_wrong_are_refused_by_name(tmp_path: Path, change: Any, said: str) -> None:
    path = write_adapter(tmp_path, matrices(), further=NORMS, use_dora=True)
    retouch(path, change)
    with pytest.raises(ConfigError) as caught:
        AdapterFiles.read(path)
    assert said in str(caught.value)


def test_a_module_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    a, b = matrices()[Q]
    path = write_adapter(tmp_path, {Q: (a, b), f"language_model.{Q}": (a.clone(), b.clone())})
    with pytest.raises(ConfigError, match="is there as"):
        AdapterFiles.read(path)


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    path = write_adapter(tmp_path, matrices())
    (path / "adapter_model.safetensors").rename(path / "adapter_model.bin")
    with pytest.raises(ConfigError, match=r"has no adapter_model\.safetensors; pickled weights"):
        AdapterFiles.read(path)


def test_directories_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        AdapterFiles.read(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"has no adapter_config\.json"):
        AdapterFiles.read(tmp_path)
    write_config(tmp_path)
    with pytest.raises(ConfigError, match=r"has no adapter_model\.safetensors$"):
        AdapterFiles.read(tmp_path)
    (tmp_path / "adapter_config.json").write_text("[")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"adapter: adapter_config\.json cannot be read"):
        AdapterFiles.read(tmp_path)


@rest(SECONDS)
def test_damaged_weights_are_an_error_and_nothing_else(tmp_path: Path) -> None:
    path = write_adapter(tmp_path, matrices())
    file = path / "adapter_model.safetensors"
    whole, rng = file.read_bytes(), random.Random(5)
    header = int.from_bytes(whole[:8], "little") + 8
    for size in (0, 7, 8, header - 1, header, len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(ConfigError, match=r"^adapter: adapter_model\.safetensors cannot be read: "):
            AdapterFiles.read(path)
    for _ in range(400):
        damaged = bytearray(whole)
        damaged[rng.randrange(header)] = rng.randrange(256)
        file.write_bytes(damaged)
        try:
            AdapterFiles.read(path)
        except ConfigError as error:
            assert str(error).startswith("adapter: ")


def test_a_header_that_describes_no_file_is_refused(tmp_path: Path) -> None:
    path = write_adapter(tmp_path, matrices())
    name = f"{PREFIX}{Q}.lora_A.weight"
    good = {"dtype": "F32", "shape": [4, 8], "data_offsets": [0, 128]}
    for wrong in (
        *({"data_offsets": places} for places in ([0, 120], [2**30, 2**30 + 128], [128, 0], 0, None)),
        *({"shape": shape} for shape in ([4, -8], [2**39, 2**39], [2**63, 2], "48")),
        *({"dtype": dtype} for dtype in ("F64", "I8", ["F32"], None)),
    ):
        header = json.dumps({name: {**good, **wrong}}).encode()
        whole = len(header).to_bytes(8, "little") + header + bytes(128)
        (path / "adapter_model.safetensors").write_bytes(whole)
        with pytest.raises(
            ConfigError, match=r"^adapter: (adapter_model.safetensors cannot be read|.* holds)"
        ):
            AdapterFiles.read(path)
    long = (17 << 20).to_bytes(8, "little") + b"{" + b" " * (17 << 20)
    (path / "adapter_model.safetensors").write_bytes(long)
    with pytest.raises(ConfigError, match="its header has 17825792 bytes"):
        AdapterFiles.read(path)


def test_headers_of_any_length_are_read(tmp_path: Path) -> None:
    """The numbers need not begin at a multiple of their size."""
    path, wrote = write_adapter(tmp_path, matrices()), matrices()
    file = path / "adapter_model.safetensors"
    whole = file.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    for more in range(1, 8):
        header = whole[8 : 8 + length] + b" " * more
        file.write_bytes(len(header).to_bytes(8, "little") + header + whole[8 + length :])
        modules = AdapterFiles.read(path).modules
        assert all(modules[name.removeprefix("model.")].a.equal(a) for name, (a, _) in wrote.items())


@rest(SECONDS)
def test_a_pattern_cannot_take_forever(tmp_path: Path) -> None:
    path = write_adapter(tmp_path, matrices(), target_modules=r"(?:\w|\w\w|\w\w\w|[\w.])*(?<!j)")
    with pytest.raises(ConfigError, match="target_modules takes too long to match"):
        AdapterFiles.read(path)


def test_all_patterns_of_a_config_have_one_bound_on_their_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock on which every match takes a hundredth of a second."""
    clock = itertools.count()
    monkeypatch.setattr("aioinfer.checkpoint.adapter_config.time.thread_time", lambda: next(clock) / 100)
    few, many = ({f"(x+x+)+y{index}": 4 for index in range(count)} for count in (20, 200))
    assert AdapterFiles.read(write_adapter(tmp_path / "few", matrices(), rank_pattern=few)).rank == 4
    path = write_adapter(tmp_path / "many", matrices(), rank_pattern=many)
    with pytest.raises(ConfigError, match="rank_pattern takes too long to match"):
        AdapterFiles.read(path)


def test_a_rank_for_every_module_of_a_large_model_is_read(tmp_path: Path) -> None:
    ranks = {f"model.layers.{layer}.self_attn.{name}": 3 for layer in range(1, 400) for name in "qkvo"}
    ranks |= {"layers.0.self_attn.k_proj": 3, "q.proj": 2}
    path = write_adapter(tmp_path, matrices(q_proj=2, k_proj=3), rank_pattern=ranks)
    assert {len(each.a) for each in AdapterFiles.read(path).modules.values()} == {2, 3}


def test_files_that_change_later_do_not_change_what_was_read(tmp_path: Path) -> None:
    path = write_adapter(tmp_path, matrices())
    files = AdapterFiles.read(path)
    before = {name: found.a.clone() for name, found in files.modules.items()}
    file = path / "adapter_model.safetensors"
    file.write_bytes(bytes(file.stat().st_size))
    assert all(found.a.equal(before[name]) for name, found in files.modules.items())


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_only_regular_files_are_read(tmp_path: Path, name: str) -> None:
    path = write_adapter(tmp_path / "a", matrices())
    kept = tmp_path / "kept"
    (path / name).rename(kept)
    os.mkfifo(path / name)
    with pytest.raises(ValueError, match="it is no regular file"):
        open_regular(path / name, 1)  # a file may become a pipe after it was looked at: nothing waits
    with pytest.raises(ConfigError, match=f"adapter: '{name}' is no regular file"):
        AdapterFiles.read(path)
    (path / name).unlink()
    (path / name).symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match=f"adapter: '{name}' is no regular file"):
        AdapterFiles.read(path)
    (path / name).unlink()
    (path / name).symlink_to(kept)
    assert AdapterFiles.read(path).rank == 4


def test_a_config_has_a_bounded_size(tmp_path: Path) -> None:
    path = write_adapter(tmp_path, matrices())
    with (path / "adapter_config.json").open("a") as file:
        file.write(" " * (4 << 20))
    with pytest.raises(ConfigError, match=r"adapter_config\.json cannot be read: it has 4\d+ bytes"):
        AdapterFiles.read(path)


def test_weights_that_are_too_large_are_refused_before_they_are_read(tmp_path: Path) -> None:
    path = write_adapter(tmp_path, matrices())
    os.truncate(path / "adapter_model.safetensors", 1 << 40)  # more than any memory, and nothing on the disk
    with pytest.raises(ConfigError, match="it has 1099511627776 bytes; 1000 are the most that are read"):
        AdapterFiles.read(path, 1000)


def test_the_fingerprint_is_of_what_was_read(tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a", matrices())
    first = AdapterFiles.read(path)
    assert AdapterFiles.read(shutil.copytree(path, tmp_path / "b")).fingerprint == first.fingerprint

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{PREFIX}{Q}.lora_A.weight"][0, 0] += 1

    retouch(path, change)
    assert AdapterFiles.read(path).fingerprint != first.fingerprint
    other = write_adapter(tmp_path / "c", matrices(), lora_alpha=3)
    assert AdapterFiles.read(other).fingerprint != first.fingerprint


@pytest.mark.parametrize(
    ("names", "selects"),
    [
        (["q_proj", "k_proj"], True),
        (["self_attn.q_proj", "0.self_attn.k_proj"], True),
        ([Q, K], True),
        (["roj", "", "model"], False),
        (["self_attn"], False),
    ],
)
def test_names_are_whole_names_or_their_ends_after_a_dot(
    tmp_path: Path, names: list[str], *, selects: bool
) -> None:
    path = write_adapter(tmp_path, matrices(), target_modules=names)
    refusal = pytest.raises(ConfigError, match="belongs to no module that the config chooses")
    with nullcontext() if selects else refusal:
        assert len(AdapterFiles.read(path).modules) == 2
