"""AdapterConfig: what the adapter_config.json of a LoRA adapter says, in the format of PEFT.

A field that changes the arithmetic and is not supported is refused by name; a field of the training alone is
ignored. Patterns in it are regular expressions, with a bound on their time.
"""

from __future__ import annotations

import dataclasses
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import regex

from aioinfer.errors import ConfigError, shown, why

__all__ = ["AdapterConfig"]

#: fields that change what a layer computes, with what they are; refused unless they say no
_REFUSED = {
    "use_qalora": "QA-LoRA pools the inputs",
    "use_bdlora": "its matrices are block-diagonal",
    "layer_replication": "it repeats layers of the model",
    "trainable_token_indices": "it changes vectors of tokens",
    "ensure_weight_tying": "it ties what it makes of the embedding and of the head",
    "target_parameters": "it adapts parameters that are no linear layers",
    "alora_invocation_tokens": "it is active after certain tokens only",
    "arrow_config": "it routes tokens to adapters",
    "kasa_config": "it changes the weights of the model",
    "monteclora_config": "its factors are random",
    "megatron_config": "it was trained on layers of Megatron",
}
#: of init_lora_weights, those that leave the weights of the model as they were
_PLAIN_STARTS = ("gaussian", "orthogonal", "eva", "mica")
#: other fields that PEFT writes
_KNOWN = frozenset(
    {
        *("alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config"),
        *("eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode"),
        *("init_lora_weights", "layers_pattern", "layers_to_transform", "loftq_config", "lora_alpha"),
        *("lora_bias", "modules_to_save", "use_dora"),
        *("lora_dropout", "lora_ga_config", "megatron_core", "peft_type", "peft_version"),
        *("qalora_group_size", "r", "rank_pattern", "revision", "runtime_config", "target_modules"),
        *("task_type", "use_rslora", "velora_config"),
    }
)
_LONGEST_PATTERN = 1000
#: of the processor: for one match, and for all patterns of a config with all modules of a model
_SECONDS_PER_MATCH = 0.25
_SECONDS = 1.0
#: of a rank, and of the number of a layer
_LARGEST = 2**20
#: a pattern of which only dots stand for anything else
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]*")
#: the number of a layer in the name of a module
_LAYER = r".*?\.[^.]*\.(?P<index>\d+)\."


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """Ranks and scales of the modules of an adapter, by their names in the model that was trained."""

    rank: int
    alpha: float
    #: whether the scale is ``alpha / sqrt(rank)``, not ``alpha / rank`` (arXiv 2312.03732)
    root: bool
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    #: whether the weights of the layers are stored as [inputs, outputs]
    transposed: bool
    #: names, or the ends of names after a dot; or one regular expression. None: not stated
    targets: str | frozenset[str] | None
    excluded: str | frozenset[str]
    layers: frozenset[int] | None
    layer_patterns: tuple[str, ...]
    #: modules have magnitudes (DoRA, arXiv 2402.09353); and biases behind B
    dora: bool
    lora_bias: bool
    #: names of modules that have whole weights of their own
    saved: frozenset[str]
    _matcher: _Matcher = dataclasses.field(default_factory=lambda: _Matcher(), compare=False, repr=False)

    @classmethod
    def read(cls, stated: Mapping[str, Any]) -> AdapterConfig:
        """Read the object in the file. Raises ConfigError."""
        _check_features(stated)
        take = partial(_take, stated)
        layers = stated.get("layers_to_transform")
        if type(layers) is int:
            layers = [layers]
        if layers is not None and not (isinstance(layers, list) and all(map(_is_count, layers))):
            raise _invalid("layers_to_transform", "numbers of layers", layers)
        return cls(
            rank=take("r", _is_rank, "a rank, from 1 on"),
            alpha=float(take("lora_alpha", _is_number, "a finite number")),
            root=take("use_rslora", _is_bool, "true or false", False),
            ranks=_pattern(stated, "rank_pattern", _is_rank, "ranks, from 1 on"),
            alphas=_pattern(stated, "alpha_pattern", _is_number, "finite numbers"),
            transposed=take("fan_in_fan_out", _is_bool, "true or false", False),
            targets=_names(stated, "target_modules"),
            excluded=_names(stated, "exclude_modules") or frozenset(),
            # As in PEFT, an empty list is none.
            layers=frozenset(layers) if layers else None,
            layer_patterns=_patterns(stated),
            dora=take("use_dora", _is_bool, "true or false", False),
            lora_bias=take("lora_bias", _is_bool, "true or false", False),
            saved=frozenset(take("modules_to_save", _are_names, "names of modules", [])),
        )

    def rank_of(self, module: str) -> int:
        """The rank of a module. Raises ConfigError, as all below: a pattern is none."""
        rank: int = self._matcher.find(self.ranks, module, "rank_pattern", self.rank)
        return rank

    def scale_of(self, module: str) -> float:
        """The factor of the products of a module."""
        rank = self.rank_of(module)
        alpha: float = self._matcher.find(self.alphas, module, "alpha_pattern", self.alpha)
        return alpha / (math.sqrt(rank) if self.root else rank)

    def selects(self, module: str) -> bool:
        """Whether the fields that choose modules choose this one, if it is a linear layer."""
        if self.targets is None or _named(self._matcher, self.excluded, module, "exclude_modules"):
            return False
        if not _named(self._matcher, self.targets, module, "target_modules"):
            return False
        if self.layers is None or isinstance(self.targets, str) or module in self.targets:
            return True
        patterns = [rf"(?:^|.*?\.){pattern}\.(?P<index>\d+)\." for pattern in self.layer_patterns]
        for pattern in patterns or [_LAYER]:
            found = self._matcher.match(pattern, module, "layers_pattern")
            if found is not None:
                return int(found["index"]) in self.layers
        return False


def _check_features(stated: Mapping[str, Any]) -> None:
    """Raise ConfigError for the first field that asks for what is not computed here."""
    kind = stated.get("peft_type")
    if kind != "LORA":
        raise ConfigError(f"adapter: peft_type is {shown(kind)}; LORA is supported")
    for field, reason in _REFUSED.items():
        if stated.get(field):
            raise ConfigError(f"adapter: {field} is not supported: {reason}")
    if stated.get("use_dora") and stated.get("lora_bias"):
        raise ConfigError("adapter: lora_bias is not supported with use_dora, nor is it by PEFT")
    bias = stated.get("bias", "none")
    if bias != "none":
        raise ConfigError(f"adapter: bias is {shown(bias)}; trained biases of the model are not supported")
    start = stated.get("init_lora_weights", True)
    if not isinstance(start, bool | None) and str(start).lower() not in _PLAIN_STARTS:
        raise ConfigError(
            f"adapter: init_lora_weights is {shown(start)}, which changes the weights of the model; PEFT can "
            "save such an adapter converted (path_initial_model_for_weight_conversion)"
        )
    for field in sorted(stated.keys() - _KNOWN - _REFUSED.keys()):
        # A number or a text alone switches nothing on.
        if stated[field] and isinstance(stated[field], bool | list | dict):
            raise ConfigError(f"adapter: the field {shown(field)} is not known here, and may change results")


_MISSING = object()


def _take(
    stated: Mapping[str, Any], field: str, valid: Callable[[Any], bool], words: str, default: Any = _MISSING
) -> Any:
    value = stated.get(field)
    if value is None and default is not _MISSING:
        return default
    if not valid(value):
        raise _invalid(field, words, value)
    return value


def _invalid(field: str, words: str, value: Any) -> ConfigError:
    return ConfigError(f"adapter: {field} must be {words}, got {shown(value)}")


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_rank(value: Any) -> bool:
    return type(value) is int and 1 <= value <= _LARGEST


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _LARGEST


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e30


def _pattern(
    stated: Mapping[str, Any], field: str, valid: Callable[[Any], bool], words: str
) -> dict[str, Any]:
    values = stated.get(field) or {}
    if not isinstance(values, dict) or not all(map(valid, values.values())):
        raise _invalid(field, f"patterns of modules with {words}", values)
    return values


def _names(stated: Mapping[str, Any], field: str) -> str | frozenset[str] | None:
    values = stated.get(field)
    if values is None or isinstance(values, str):
        return values
    if not _are_names(values):
        raise _invalid(field, "names of modules, or a pattern", values)
    return frozenset(values)


def _are_names(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(name, str) for name in values)


def _patterns(stated: Mapping[str, Any]) -> tuple[str, ...]:
    values = stated.get("layers_pattern")
    if values is None or isinstance(values, str):
        return (values,) if values else ()
    if not _are_names(values):
        raise _invalid("layers_pattern", "names of modules, or a pattern", values)
    return tuple(values)


def _named(matcher: _Matcher, names: str | frozenset[str], module: str, field: str) -> bool:
    """Whether names, or a pattern of them, name a module."""
    if isinstance(names, str):
        if names == "":
            return False
        if names == "all-linear":
            return True
        return matcher.match(names, module, field, whole=True) is not None
    while module not in names:
        _, dot, module = module.partition(".")
        if not dot:
            return False
    return True


class _Matcher:
    """Matches the patterns of one config within one bound on the time that all of it takes: an adapter is
    read on a thread that other loads wait for."""

    def __init__(self) -> None:
        self._compiled: dict[str, Any] = {}
        #: by field and module, what was found
        self._values: dict[tuple[str, str], Any] = {}
        #: by field: patterns, the last part of those that are plain, and values
        self._tables: dict[str, list[tuple[str, str | None, Any]]] = {}
        self._left = _SECONDS

    def find(self, values: Mapping[str, Any], module: str, field: str, default: Any) -> Any:
        """The value of the first pattern that a name ends with. Raises as :meth:`match`."""
        if (field, module) not in self._values:
            table = self._tables.get(field)
            if table is None:
                table = self._tables[field] = [
                    (pattern, _last_part(pattern, field), value) for pattern, value in values.items()
                ]
            self._values[field, module] = self._found(table, module, field, default)
        return self._values[field, module]

    def _found(
        self, table: Sequence[tuple[str, str | None, Any]], module: str, field: str, default: Any
    ) -> Any:
        began, before = time.thread_time(), self._left
        try:
            for pattern, last, value in table:
                if last is None:
                    if self.match(rf"(.*\.)?({pattern})$", module, field) is not None:
                        return value
                elif module.endswith(last) and _ends_with(module, pattern):
                    return value
        finally:
            self._left = min(self._left, before - (time.thread_time() - began))
        if self._left <= 0 and table:
            raise _slow(field, table[-1][0])
        return default

    def match(self, pattern: str, text: str, field: str, *, whole: bool = False) -> Any:
        """The match, or None. Raises ConfigError: the pattern is none, or takes too long."""
        _check_length(pattern, field)
        began = time.thread_time()
        try:
            if self._left <= 0:
                raise TimeoutError
            compiled = self._compiled.get(pattern)
            if compiled is None:
                compiled = self._compiled[pattern] = regex.compile(pattern, cache_pattern=False)
            match = compiled.fullmatch if whole else compiled.match
            # ``concurrent``: without the interpreter's lock.
            return match(text, timeout=min(self._left, _SECONDS_PER_MATCH), concurrent=True)
        except TimeoutError:
            raise _slow(field, pattern) from None
        except (regex.error, RecursionError, OverflowError) as error:
            raise ConfigError(
                f"adapter: {field} has no regular expression in {shown(pattern)}: {why(error)}"
            ) from error
        finally:
            self._left -= time.thread_time() - began


def _check_length(pattern: str, field: str) -> None:
    if len(pattern) > _LONGEST_PATTERN:
        raise ConfigError(f"adapter: {field} has a pattern of {len(pattern)} characters")


def _slow(field: str, pattern: str) -> ConfigError:
    return ConfigError(f"adapter: {field} takes too long to match {shown(pattern)}")


def _last_part(pattern: str, field: str) -> str | None:
    """The part after the last dot of a plain pattern; None for other patterns. Raises ConfigError."""
    _check_length(pattern, field)
    return pattern.rpartition(".")[2] if _PLAIN_NAME.fullmatch(pattern) else None


def _ends_with(module: str, pattern: str) -> bool:
    """Whether a name is a plain pattern, or ends with it after a dot."""
    before = len(module) - len(pattern)
    if before < 0 or (before and module[before - 1] != "."):
        return False
    return all(a == b or b == "." for a, b in zip(module[before:], pattern, strict=True))
