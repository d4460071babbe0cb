"""AdapterFiles: a LoRA adapter in a directory as PEFT writes it.

Reading needs neither network nor thread, and runs no code: pickled weights are refused. Which layers of a
model an adapter belongs to is decided by :mod:`aioinfer.model.adapters.targets`.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import regex

from aioinfer.checkpoint.adapter_config import AdapterConfig
from aioinfer.checkpoint.adapter_tensors import read_tensors
from aioinfer.checkpoint.regular import check_regular, open_regular
from aioinfer.errors import ConfigError, shown

if TYPE_CHECKING:
    import torch

__all__ = ["ADAPTER_FILES", "AdapterFiles", "Factors", "module_key"]

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
#: the files of a directory that are read
ADAPTER_FILES = (_CONFIG, _WEIGHTS)
#: bytes of a config; those of large models with a rank for every module have some 100 KB
_LARGEST_CONFIG = 4 << 20
#: of the names of tensors
_PEFT = "base_model.model."
#: what is in front of the layers of the same model in one class of transformers or another, and in wrappers
#: of models for more than text; the first that fits counts
_PREFIXES = (
    "model.language_model.",
    "model.text_model.",
    "language_model.model.",
    "language_model.",
    "transformer.",
    "model.",
)
#: "default" is the name that PEFT gives to an adapter in memory; it writes files without
_PARTS = {
    "A": regex.compile(r"(.+)\.lora_(?:A(?:\.[^.]+)?\.weight|embedding_A(?:\.[^.]+)?)"),
    "B": regex.compile(r"(.+)\.lora_(?:B(?:\.[^.]+)?\.weight|embedding_B(?:\.[^.]+)?)"),
    "magnitude": regex.compile(r"(.+)\.lora_magnitude_vector(?:\.[^.]+){0,2}"),
    "bias": regex.compile(r"(.+)\.lora_B(?:\.[^.]+)?\.bias"),
}
#: of these, numbers for each output: of DoRA, and behind B
_VECTORS = ("magnitude", "bias")
#: a whole weight: of modules_to_save, or of a head or an embedding that PEFT writes beside its matrices
_SAVED = regex.compile(r"(.+?)(?:\.modules_to_save(?:\.[^.]+)?|\.base_layer)?\.weight")
#: what other tensors of an adapter are, by a part of their names; the first that fits counts
_OTHERS = (
    ("trainable_tokens_", "vectors of tokens, which are not supported"),
    (".bias", "a bias, which is not supported"),
)


_Halves: TypeAlias = "dict[str, dict[str, tuple[str, torch.Tensor]]]"


class Factors(NamedTuple):
    """The factors of the matrix ``scale * b @ a`` that is added to a weight [outputs, inputs]."""

    #: of the module, in the model that was trained
    name: str
    #: [rank, inputs] and [outputs, rank], as they are stored
    a: torch.Tensor
    b: torch.Tensor
    scale: float
    #: of DoRA, [outputs]: the norm of each row of the weight with the product; None: it is not changed
    magnitude: torch.Tensor | None = None
    #: [outputs], what is added to the outputs of B; None: nothing
    bias: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """The matrices of an adapter, in memory of their own."""

    path: Path
    config: AdapterConfig
    #: by :func:`module_key` of their names
    modules: Mapping[str, Factors]
    #: names and whole weights, by the same, that replace those of the model
    saved: Mapping[str, tuple[str, torch.Tensor]]
    #: a hash of the bytes that were read, 16 hexadecimal digits
    fingerprint: str

    @classmethod
    def read(cls, path: Path, most_bytes: int = sys.maxsize) -> AdapterFiles:
        """The adapter in a directory, whose tensors take at most ``most_bytes``. Raises ConfigError that
        names the field or tensor that is wrong."""
        _check_directory(path)
        content, stated = _config_of(path / _CONFIG)
        config = AdapterConfig.read(stated)
        file = read_tensors(path / _WEIGHTS, most_bytes)
        halves, saved = _halves(file.tensors)
        modules: dict[str, Factors] = {}
        for name, found in halves.items():
            factors, key = _factors(name, found, config), module_key(name)
            if key in modules:
                raise ConfigError(f"adapter: {name} is there as {modules[key].name}, too")
            modules[key] = factors
        if not modules:
            raise ConfigError(f"adapter: {_WEIGHTS} has no matrices of an adapter")
        for name in sorted(config.saved):
            if not any(f".{key}".endswith(f".{name}") for key in saved):
                raise ConfigError(f"adapter: there is no tensor of {name} (modules_to_save)")
        fingerprint = hashlib.sha256(hashlib.sha256(content).digest() + file.digest).hexdigest()[:16]
        return cls(path, config, modules, saved, fingerprint)

    @property
    def rank(self) -> int:
        """The largest of its modules."""
        return max(len(factors.a) for factors in self.modules.values())

    @property
    def bound(self) -> bool:
        """Whether what is computed with it follows from the weights of the model."""
        return self.config.dora or bool(self.saved)

    def selects(self, key: str) -> bool:
        """Whether the config chooses the module with this key, if it is a linear layer. Raises
        ConfigError."""
        return self.config.selects(self.name_of(key))

    def name_of(self, key: str) -> str:
        """The name of the module with this key in the model that was trained, which may have been a
        wrapper."""
        some = next(iter(self.modules))
        return self.modules[some].name.removesuffix(some) + key


def module_key(name: str) -> str:
    """The name of a module without what differs between the classes that have it."""
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


def _check_directory(path: Path) -> None:
    try:
        names = {entry.name for entry in path.iterdir()}
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise ConfigError(f"adapter: {shown(path.name)} cannot be read: {reason}") from error
    if _CONFIG not in names:
        raise ConfigError(f"adapter: {path.name} has no {_CONFIG}")
    if _WEIGHTS not in names:
        pickled = any(name.endswith((".bin", ".pt", ".pth")) for name in names)
        more = "; pickled weights (.bin, .pt) are not loaded" if pickled else ""
        raise ConfigError(f"adapter: {path.name} has no {_WEIGHTS}{more}")
    try:
        check_regular(path / name for name in ADAPTER_FILES)
    except ConfigError as error:
        raise ConfigError(f"adapter: {error}") from None


def _config_of(file: Path) -> tuple[bytes, dict[str, object]]:
    """The content of a config, and the object that it is."""
    try:
        opened, _ = open_regular(file, _LARGEST_CONFIG)
        with opened:
            content = opened.read()
        stated = json.loads(content)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"adapter: {_CONFIG} cannot be read: {error}") from error
    if not isinstance(stated, dict):
        raise ConfigError(f"adapter: {_CONFIG} holds no JSON object")
    return content, stated


def _halves(tensors: Mapping[str, torch.Tensor]) -> tuple[_Halves, dict[str, tuple[str, torch.Tensor]]]:
    """By module, "A" and "B", "magnitude" and "bias" with the name and the numbers of their tensors; and
    whole weights by their keys."""
    halves: _Halves = {}
    saved: dict[str, tuple[str, torch.Tensor]] = {}
    for name in sorted(tensors):
        own = name.removeprefix(_PEFT)
        matches = ((half, pattern.fullmatch(own)) for half, pattern in _PARTS.items())
        half, match = next((each for each in matches if each[1]), ("", None))
        if match is None and (whole := _SAVED.fullmatch(own)):
            key = module_key(whole[1])
            if key in saved:
                raise ConfigError(f"adapter: {name} is there as {saved[key][0]}, too")
            saved[key] = name, tensors[name]
            continue
        if match is None:
            found = next((what for part, what in _OTHERS if part in name), "no matrix of an adapter")
            raise ConfigError(f"adapter: {name} is {found}")
        module = halves.setdefault(match[1], {})
        if half in module:
            raise ConfigError(f"adapter: {name} is there as {module[half][0]}, too")
        module[half] = name, tensors[name]
    return halves, saved


def _factors(module: str, halves: Mapping[str, tuple[str, torch.Tensor]], config: AdapterConfig) -> Factors:
    for half in "AB":
        if half not in halves:
            other = next(iter(halves.values()))[0]
            raise ConfigError(f"adapter: {other} is there, and lora_{half} of the module is not")
    for half, field, stated in (
        (_VECTORS[0], "use_dora", config.dora),
        (_VECTORS[1], "lora_bias", config.lora_bias),
    ):
        if stated != (half in halves):
            said = f"{field} is {'true' if stated else 'false'}"
            raise ConfigError(f"adapter: {said}, and {module} has {'no' if stated else 'a'} tensor of it")
    rank = config.rank_of(module)
    (a_name, a), (b_name, b) = halves["A"], halves["B"]
    for name, tensor in (a_name, a), (b_name, b):
        if tensor.dim() != 2:
            raise ConfigError(f"adapter: {name} is shaped {tuple(tensor.shape)}, not a matrix")
    for name, tensor, dimension in (a_name, a, 0), (b_name, b, 1):
        if tensor.shape[dimension] != rank:
            raise ConfigError(f"adapter: {name} is shaped {tuple(tensor.shape)}, the config says rank {rank}")
    if config.targets is not None and not config.selects(module):
        raise ConfigError(f"adapter: {a_name} belongs to no module that the config chooses (target_modules)")
    magnitude, bias = (_vector(halves[half], len(b)) if half in halves else None for half in _VECTORS)
    return Factors(module, a, b, config.scale_of(module), magnitude, bias)


def _vector(found: tuple[str, torch.Tensor], outputs: int) -> torch.Tensor:
    """A number for each output. Raises ConfigError."""
    name, tensor = found
    if tensor.shape != (outputs,):
        raise ConfigError(f"adapter: {name} is shaped {tuple(tensor.shape)}, not ({outputs},)")
    return tensor
