"""The tokenizer of a directory: as tokenizer.json says, or as transformers makes it of other files."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from aioinfer.checkpoint.libraries import importing_transformers
from aioinfer.checkpoint.regular import check_regular
from aioinfer.checkpoint.tensors import check_pointer, read_json_object
from aioinfer.checkpoint.tokenizer_growth import check_growth
from aioinfer.errors import ConfigError

__all__ = ["tokenizer_in"]

_WHOLE, _SETTINGS, _TEKKEN = "tokenizer.json", "tokenizer_config.json", "tekken.json"
#: files of which transformers may make a tokenizer
_VOCABULARIES = ("vocab.json", "vocab.txt", "tokenizer.model", "tiktoken.model", _TEKKEN)
#: tokens with a role, which classes of tokenizers have defaults for
_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")
_ADVICE = (
    "save the tokenizer with transformers where it can be read (AutoTokenizer, save_pretrained) and put its "
    f"{_WHOLE} here, or move these files away to give token ids alone"
)


def tokenizer_in(path: Path) -> Any | None:
    """A tokenizer of transformers; None if the directory has no file of one. Raises ConfigError if it has
    only files that cannot be read; whatever else transformers raises for files that are damaged."""
    check_regular(_texts(path), _root(path))
    stated = _object(path / _SETTINGS)
    if (path / _WHOLE).is_file():
        check_pointer(path / _WHOLE)
        check_growth(path / _WHOLE)
        return _as_stated(path, stated)
    found = [name for name in (_SETTINGS, *_VOCABULARIES) if (path / name).is_file()]
    return _by_class(path, found) if found else None


def _texts(path: Path) -> list[Path]:
    """Files whose text clients can be shown: templates, and vocabularies that are lists of words."""
    names = ("*.jinja", "additional_chat_templates/*.jinja", "*.txt")
    return [file for name in names for file in path.glob(name)]


def _root(path: Path) -> Path:
    """The directory that links among the files of a model lead into: a cache of the hub keeps them beside its
    snapshots."""
    found = path.resolve()
    return found.parent.parent if found.parent.name == "snapshots" else found


def _as_stated(path: Path, stated: dict[str, Any]) -> Any:
    """What tokenizer.json says. The class that the config names would make another one of its vocabulary:
    Llama's has its own rules for spaces, whatever the file's are."""
    with importing_transformers():
        from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
    vocabulary = tokenizer.get_vocab()
    for role, token in _defaults(path, stated).items():
        if role not in stated and getattr(tokenizer, role) is None and token in vocabulary:
            setattr(tokenizer, role, token)
    return tokenizer


def _defaults(path: Path, stated: dict[str, Any]) -> dict[str, str]:
    """Tokens with a role that the class of a tokenizer has where the files name none, as those of GPT-2."""
    with importing_transformers():
        from transformers.models.auto import tokenization_auto as auto

    config = _object(path / "config.json")
    name = stated.get("tokenizer_class") or config.get("tokenizer_class")
    name = name or auto.TOKENIZER_MAPPING_NAMES.get(str(config.get("model_type")))
    kind = auto.tokenizer_class_from_name(name) if isinstance(name, str) else None
    if kind is None:
        return {}
    parameters = inspect.signature(kind.__init__).parameters
    defaults = {role: parameters[role].default for role in _ROLES if role in parameters}
    return {role: token for role, token in defaults.items() if isinstance(token, str)}


def _by_class(path: Path, found: list[str]) -> Any:
    """What transformers makes of other files. Raises ConfigError."""
    with importing_transformers():
        from transformers import AutoTokenizer

    files = f"{path.name} has no {_WHOLE}, and {', '.join(found)}"
    if found == [_TEKKEN]:
        raise ConfigError(f"model: {files} does not say how texts begin and end: {_ADVICE}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path,
            config=_unknown_config(path),
            local_files_only=True,
            # Otherwise transformers asks on the terminal to run the directory's code.
            trust_remote_code=False,
        )
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(f"model: {files} cannot be read ({reason}): {_ADVICE}") from error
    if tokenizer.is_fast and len(tokenizer) <= len(tokenizer.added_tokens_decoder):
        # Some classes make one without any vocabulary.
        raise ConfigError(f"model: {files} are no vocabulary: {_ADVICE}")
    return tokenizer


def _unknown_config(path: Path) -> Any:
    """The config of a model type that transformers does not know; None for known types.

    Without it, AutoTokenizer logs a long warning for an unknown type before it loads the tokenizer anyway.
    """
    with importing_transformers():
        from transformers import CONFIG_MAPPING, PreTrainedConfig

    stated = _object(path / "config.json")
    kind = stated.get("model_type")
    return None if kind is None or kind in CONFIG_MAPPING else PreTrainedConfig.from_dict(stated)


def _object(file: Path) -> dict[str, Any]:
    return read_json_object(file) if file.is_file() else {}
