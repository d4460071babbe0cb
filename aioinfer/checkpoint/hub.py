"""Models of a hub: found in its local cache, or downloaded into it by huggingface_hub.

``HF_HOME``, ``HF_ENDPOINT``, ``HF_HUB_OFFLINE`` and tokens have the meaning that they have there. Of a
repository only the files that this package reads are downloaded: the config, the tokenizer, and one form of
the weights. A process of its own downloads (:mod:`aioinfer.checkpoint.fetching`): it can be ended at any
time, and the interpreter of the event loop is not held up.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from aioinfer.errors import ConfigError

__all__ = ["INDEX", "HubModel", "Progress", "cached", "cached_models", "download", "entry_of", "wanted_files"]

#: ``progress(stage, done, total)``, called several times a second; an exception of it ends the work
Progress = Callable[[str, int, int], None]

_NAME = re.compile(
    r"(?P<repository>[\w][\w.-]*/[\w][\w.-]*)(:(?P<variant>[\w.-]+))?(@(?P<revision>[\w][\w./-]*))?"
)
#: besides weights; what a tokenizer and a generation need
_SMALL = re.compile(
    r"config\.json|generation_config\.json|tokenizer[^/]*\.json|special_tokens_map\.json|added_tokens\.json"
    r"|tokenizer\.model|vocab\.json|merges\.txt|chat_template\.(json|jinja)|(hf_)?quant(ize)?_config\.json"
    r"|additional_chat_templates/[^/]+\.jinja"
    # modules of sentence-transformers lie in directories of any name
    r"|modules\.json|config_sentence_transformers\.json|sentence_bert_config\.json|\w[^/]*/config\.json"
)
#: one of them is there if there is a tokenizer
_TOKENIZERS = {"tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json"}
INDEX = "model.safetensors.index.json"
#: the end of the name of a GGUF file's part
_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
#: runs the other process, with this package where this process has it
_PROGRAM = """
import sys
sys.path.append(sys.argv[1])
from aioinfer.checkpoint.fetching import main
sys.exit(main())
"""
#: seconds between two calls of a progress function
_LOOK = 0.1
#: seconds that a process has for removing what has not arrived completely
_LEAVING = 5.0


@dataclass(frozen=True, slots=True)
class HubModel:
    """The name of a model on a hub."""

    repository: str
    #: of a repository with several GGUF files: a part of the file's name
    variant: str | None = None
    revision: str | None = None

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """``org/name``, ``org/name:variant``, ``org/name@revision``; None for anything else."""
        match = _NAME.fullmatch(text)
        if match is None or ".." in text:
            return None
        return cls(match["repository"], match["variant"], match["revision"])

    def __str__(self) -> str:
        variant = "" if self.variant is None else f":{self.variant}"
        return f"{self.repository}{variant}{'' if self.revision is None else f'@{self.revision}'}"

    @property
    def command(self) -> str:
        """The shell command that downloads it."""
        revision = "" if self.revision is None else f" --revision {self.revision}"
        include = "" if self.variant is None else f" --include '*{self.variant}*.gguf'"
        return f"hf download {self.repository}{revision}{include}"


# -- the cache -----------------------------------------------------------------------------------------


def cached(model: HubModel, *, complete: bool = True) -> Path | None:
    """The path of a model in the hub's local cache; None if it is not there.

    ``complete``: with a tokenizer; otherwise the weights suffice.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        # Whether all is there is decided below: others than this package may have filled the cache.
        folder = Path(
            snapshot_download(
                model.repository, revision=model.revision, local_files_only=True, allow_patterns=[]
            )
        )
    except (LocalEntryNotFoundError, HFValidationError, OSError):
        return None
    names = [str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()]
    try:
        entry = entry_of(folder, wanted_files(names, model, loosely=False))
        if entry.suffix == ".gguf":
            from aioinfer.checkpoint.gguf.file import parts_of

            parts_of(entry)
        else:
            from aioinfer.checkpoint.tensors import weight_files

            weight_files(folder)
            if complete and not _TOKENIZERS & set(names):
                return None
    except ConfigError:
        return None
    return entry


def cached_models() -> dict[str, Path]:
    """The models in the hub's local cache that can be loaded as they are: name -> directory or file."""
    from huggingface_hub import constants

    found = {}
    for folder in sorted(Path(constants.HF_HUB_CACHE).glob("models--*--*")):
        name = folder.name.removeprefix("models--").replace("--", "/", 1)
        model = HubModel.parse(name)
        path = None if model is None else cached(model)
        if path is not None:
            found[name] = path
    return found


def entry_of(folder: Path, wanted: Sequence[str]) -> Path:
    """The part of a snapshot that is loaded: its GGUF file, the first one of several parts, or all of it."""
    ggufs = [name for name in wanted if name.endswith(".gguf")]
    return folder / ggufs[0] if ggufs else folder


def wanted_files(names: Iterable[str], model: HubModel, *, loosely: bool = True) -> list[str]:
    """Names of the files of a repository that are needed; of sharded weights the index. Raises ConfigError if
    it holds no model that can be loaded.

    ``loosely``: a variant may also be a part of a word of a file's name.
    """
    names = sorted(names)
    small = [name for name in names if _SMALL.fullmatch(name)]
    if model.variant is None and "config.json" in small:
        for weights in ("model.safetensors", INDEX):
            if weights in names:
                return [*small, weights]
    ggufs = [name for name in names if name.endswith(".gguf") and "mmproj" not in name.lower()]
    if model.variant is not None:
        ggufs = _of_variant(ggufs, model.variant, loosely)
    models = {_PART.sub("", name) for name in ggufs}
    if len(models) == 1:
        return ggufs
    if ggufs:
        raise ConfigError(
            f"model: {model.repository} holds several GGUF files, name one as "
            f"{model.repository}:PART_OF_ITS_NAME: {', '.join(ggufs)}"
        )
    raise ConfigError(
        f"model: {model} holds neither config.json with safetensors nor a GGUF file that can be loaded "
        "(pickled weights are not)"
    )


def _of_variant(names: list[str], variant: str, loosely: bool) -> list[str]:
    """The names with the variant as a word, or else as a part of one."""
    word = re.compile(rf"(?<![a-z0-9]){re.escape(variant.lower())}(?![a-z0-9_])")
    found = [name for name in names if word.search(name.lower())]
    if found or not loosely:
        return found
    return [name for name in names if variant.lower() in name.lower()]


# -- downloading ---------------------------------------------------------------------------------------


def download(model: HubModel, allowed: bool, progress: Progress | None = None) -> Path:
    """Download what is needed of a model; the directory or GGUF file. Blocks.

    Files that are in the cache already are not downloaded again, connections that break are taken up where
    they broke, and files with a checksum are compared with it.

    Raises:
        ConfigError: it is not allowed, or failed; with what to do about it.
        Exception: that of ``progress``, which is called several times a second.
    """
    if not allowed:
        raise ConfigError(
            f"model: {model} is neither a directory nor in the hub's local cache. Downloads are not allowed "
            f"here: set download, or run '{model.command}'"
        )
    state = 0, 1
    with _process(model) as process:
        for message in _messages(process):
            if "error" in message:
                raise ConfigError(f"model: {message['error']}")
            if "entry" in message:
                if progress is not None:
                    progress("download", state[1], state[1])
                return Path(message["entry"])
            if message:
                state = min(message["done"], message["total"]), max(1, message["total"])
            if progress is not None:
                progress("download", *state)
        raise ConfigError(f"model: the process that downloads {model} has ended with status {process.wait()}")


@contextmanager
def _process(model: HubModel) -> Iterator[subprocess.Popen[bytes]]:
    """The process that downloads; it is ended with the context."""
    quiet = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_VERBOSITY": "error"}
    try:
        process = subprocess.Popen(
            # Modules in the working directory are not imported.
            [sys.executable, "-P", "-c", _PROGRAM, str(Path(__file__).parents[2])],
            env={**os.environ, **quiet},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            # An interrupt of the terminal is for this process, which ends the other one.
            start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        raise ConfigError(f"model: {model} cannot be downloaded: {error}") from error
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        with suppress(OSError):  # it has ended: its last message says so
            process.stdin.write(json.dumps(asdict(model)).encode())
            process.stdin.close()
        yield process
    finally:
        if process.poll() is None:
            # It removes files that have not arrived completely.
            process.send_signal(signal.SIGINT)
            try:
                process.wait(_LEAVING)
            except subprocess.TimeoutExpired:
                process.kill()
        process.wait()
        process.stdout.close()


def _messages(process: subprocess.Popen[bytes]) -> Iterator[dict[str, Any]]:
    """The messages of a process until it ends; empty ones while it says nothing."""
    assert process.stdout is not None
    pending = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while True:
            if not selector.select(_LOOK):
                yield {}
                continue
            data = os.read(process.stdout.fileno(), 1 << 16)
            if not data:
                return
            *lines, pending = (pending + data).split(b"\n")
            yield from map(json.loads, lines)
