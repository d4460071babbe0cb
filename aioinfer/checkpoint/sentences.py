"""Sentences: how a checkpoint embeds, from the files of sentence-transformers.

``modules.json`` lists what follows the model, the ``config.json`` in the directory of its pooling module
(usually ``1_Pooling``) says how it pools, and ``config_sentence_transformers.json`` has the texts that are
put in front of queries and documents. ``sentence_bert_config.json`` has the length up to which the model was
made to read. Of a reranker that answers by a token, ``config.json`` in the directory
of its module LogitScore says which tokens these are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias

from aioinfer.checkpoint.regular import read_regular
from aioinfer.checkpoint.tensors import MOST_JSON, read_json_object
from aioinfer.errors import ConfigError, shown, why

__all__ = ["Sentences"]

Mode: TypeAlias = Literal["last", "cls", "mean"]

#: the usual directories of modules
_DIRECTORIES = {"Pooling": "1_Pooling", "LogitScore": "1_LogitScore"}
_PROMPTS = "config_sentence_transformers.json"
_LENGTH = "sentence_bert_config.json"
#: names of modes, in the older form after ``pooling_mode_``
_MODES: Mapping[str, Mode] = {
    "cls": "cls",
    "cls_token": "cls",
    "lasttoken": "last",
    "mean": "mean",
    "mean_tokens": "mean",
}
_MODULES = ("Transformer", "Pooling", "Normalize")


@dataclass(frozen=True, slots=True)
class Sentences:
    """The recommendations of an embedding model; the defaults are those of any other model."""

    #: the checkpoint has such files
    stated: bool = False
    pooling: Mode = "last"
    normalize: bool = True
    #: texts in front of an input, by name, and the name of the one that is used where none is named
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    #: a requirement that is not computed here; empty: none
    unsupported: str = ""
    #: it pools: it was made for embeddings
    embeds: bool = False
    #: of a reranker: the tokens that say that a document answers, and that it does not. One by itself: its
    #: logit is the score; none: the file that has them is missing
    answers: tuple[int, ...] | None = None
    #: tokens of an input, at most; None: as many as the model's context has
    max_tokens: int | None = None
    #: the class of what makes a score of a classifier's logit, without its package
    activation: str = "Sigmoid"

    @classmethod
    def of(cls, path: Path) -> Self:
        """Read the recommendations of a directory; any other path has none. Raises ConfigError."""
        modules = path / "modules.json"
        if not modules.is_file():
            return cls(activation=_activation(path))
        listed = _modules(modules)
        kinds = [kind for kind, _ in listed]
        pooling: Mode = "last"
        unsupported, answers = "", None
        for kind, where in listed:
            if kind == "Pooling":
                pooling, unsupported = _pooling(path / where / "config.json")
            elif kind == "LogitScore":
                answers = _answers(path / where / "config.json")
        if kinds.count("Pooling") > 1:
            unsupported = "it pools more than once"
        further = [kind for kind in kinds if kind not in _MODULES]
        if further:
            unsupported = f"its embeddings pass through {', '.join(further)}"
        file = path / _PROMPTS
        stated = read_json_object(file) if file.is_file() else {}
        prompts = stated.get("prompts") or {}
        default = stated.get("default_prompt_name")
        texts = isinstance(prompts, dict) and all(isinstance(each, str) for each in prompts.values())
        if not texts or not (default is None or default in list(prompts)):
            raise ConfigError(f"model: the prompts in {_PROMPTS} make no sense")
        return cls(
            stated=True,
            pooling=pooling,
            normalize="Normalize" in kinds,
            prompts=prompts,
            default_prompt=default,
            unsupported=unsupported,
            embeds="Pooling" in kinds,
            answers=answers,
            max_tokens=_max_tokens(path / _LENGTH),
            activation=_activation(path),
        )

    def with_prompt(self, text: str, name: str | None) -> str:
        """A text after the prompt of this name; None: after the default one, if there is one."""
        name = self.default_prompt if name is None else name
        return text if name is None else self.prompts[name] + text


def _modules(file: Path) -> list[tuple[str, str]]:
    """The classes of modules, without their packages, and their directories."""
    import json

    try:
        modules: Any = json.loads(read_regular(file, MOST_JSON))
        kinds = [str(module["type"]).rpartition(".")[2] for module in modules]
        places = [
            module.get("path", _DIRECTORIES.get(kind, ""))
            for kind, module in zip(kinds, modules, strict=True)
        ]
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ConfigError(f"model: {file.name} cannot be read: {why(error)}") from error
    found = list(zip(kinds, places, strict=True))
    for kind, where in found:
        if kind in _DIRECTORIES and not (isinstance(where, str) and Path(where).name == where != ".."):
            raise ConfigError(f"model: {file.name} has no directory in the path {shown(where)}")
    return found


def _pooling(file: Path) -> tuple[Mode, str]:
    """The mode of pooling, and a reason why it is not computed here."""
    if not file.is_file():
        return "last", f"how it pools is in a file that is missing ({file.parent.name}/{file.name})"
    stated = read_json_object(file)
    mode_or_modes = stated.get("pooling_mode") or []
    wanted = mode_or_modes if isinstance(mode_or_modes, list) else [mode_or_modes]
    if not all(isinstance(each, str) for each in wanted):
        raise ConfigError(f"model: pooling_mode is {shown(mode_or_modes)} in {file.parent.name}/{file.name}")
    prefix = "pooling_mode_"
    wanted = [
        *wanted,
        *(name.removeprefix(prefix) for name in stated if name.startswith(prefix) and stated[name]),
    ]
    if not wanted:
        return "mean", ""
    mode = _MODES.get(wanted[0])
    if len(wanted) > 1 or mode is None:
        return "last", f"it pools by {' and '.join(map(shown, wanted))}"
    if mode == "mean" and stated.get("include_prompt") is False:
        return mode, "it pools without the prompt's tokens"
    return mode, ""


def _answers(file: Path) -> tuple[int, ...]:
    """The tokens of a LogitScore. Raises ConfigError."""
    if not file.is_file():
        return ()
    stated = read_json_object(file)
    found: list[Any] = [stated.get("true_token_id"), stated.get("false_token_id")]
    if found[1] is None:
        found.pop()
    if not all(type(each) is int and each >= 0 for each in found) or len(set(found)) < len(found):
        raise ConfigError(f"model: {file.parent.name}/{file.name} names no tokens to score by")
    return tuple(found)


def _max_tokens(file: Path) -> int | None:
    """The maximum length of an input. Raises ConfigError."""
    found = (read_json_object(file) if file.is_file() else {}).get("max_seq_length")
    if found is not None and (type(found) is not int or found < 1):
        raise ConfigError(f"model: max_seq_length is {shown(found)} in {file.name}")
    return found


def _activation(path: Path) -> str:
    """The function from a logit to a score, as versions of CrossEncoder state it, newest first."""
    files = [path / name for name in (_PROMPTS, "config.json")]
    newest, config = (read_json_object(file) if file.is_file() else {} for file in files)
    inner = config.get("sentence_transformers")
    for stated in (
        newest.get("activation_fn"),
        inner.get("activation_fn") if isinstance(inner, dict) else None,
        config.get("sbert_ce_default_activation_function"),
    ):
        if stated is not None:
            return str(stated).rpartition(".")[2]
    return "Sigmoid"
