"""Models of a hub: found in its local cache, or downloaded into it by huggingface_hub.

``HF_HOME``, ``HF_ENDPOINT``, ``HF_HUB_OFFLINE`` and tokens have the meaning that they have there. Of a
repository only the files that this package reads are downloaded: the config, the tokenizer, and one form of
the weights.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from aioinfer.errors import ConfigError

__all__ = ["HubModel", "Progress", "cached", "cached_models", "download", "wanted_files"]

_NAME = re.compile(
    r"(?P<repository>[\w][\w.-]*/[\w][\w.-]*)(:(?P<variant>[\w.-]+))?(@(?P<revision>[\w][\w./-]*))?"
)
#: besides weights; what a tokenizer and a generation need
_SMALL = re.compile(
    r"config\.json|generation_config\.json|tokenizer.*\.json|special_tokens_map\.json|added_tokens\.json"
    r"|tokenizer\.model|vocab\.json|merges\.txt|chat_template\.(json|jinja)|additional_chat_templates/.*\.jinja"
)
_INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"(?!consolidated)[^/]+-\d+-of-\d+\.safetensors")
#: the end of the name of a GGUF file's part
_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
#: ``progress(stage, done, total)``, called several times a second; what it raises ends the work
Progress = Callable[[str, int, int], None]
#: threads that download files
_THREADS = 4
#: seconds between two calls of a progress function
_LOOK = 0.1
_SLICE = 8 << 20


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
        return None if match is None else cls(match["repository"], match["variant"], match["revision"])

    def __str__(self) -> str:
        variant = "" if self.variant is None else f":{self.variant}"
        return f"{self.repository}{variant}{'' if self.revision is None else f'@{self.revision}'}"

    @property
    def command(self) -> str:
        """What downloads it."""
        revision = "" if self.revision is None else f" --revision {self.revision}"
        include = "" if self.variant is None else f" --include '*{self.variant}*.gguf'"
        return f"hf download {self.repository}{revision}{include}"


def cached(model: HubModel) -> Path | None:
    """Where the hub's local cache holds all that is needed of a model; None if it does not."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = snapshot_download(
            model.repository,
            revision=model.revision,
            local_files_only=True,
            # Whether all is there is decided below: others than this package may have filled the cache.
            allow_patterns=["config.json"],
        )
    except (LocalEntryNotFoundError, HFValidationError, OSError):
        return None
    return _whole(Path(folder), model)


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


def _whole(folder: Path, model: HubModel) -> Path | None:
    """What a snapshot holds, if it is complete."""
    names = [str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()]
    try:
        wanted = wanted_files(names, model)
    except ConfigError:
        return None
    entry = _entry(folder, wanted)
    try:
        if _INDEX in wanted:
            from aioinfer.checkpoint.tensors import weight_files

            weight_files(folder)
        elif _PART.search(entry.name):
            from aioinfer.checkpoint.gguf_file import parts_of

            parts_of(entry)
    except ConfigError:
        return None
    return entry


def _entry(folder: Path, wanted: Sequence[str]) -> Path:
    """What is loaded of a snapshot: its GGUF file, the first one of several parts, or all of it."""
    ggufs = [name for name in wanted if name.endswith(".gguf")]
    return folder / ggufs[0] if ggufs else folder


def wanted_files(names: Iterable[str], model: HubModel) -> list[str]:
    """Which files of a repository are needed. Raises ConfigError if it holds no model that can be loaded."""
    names = sorted(names)
    small = [name for name in names if _SMALL.fullmatch(name)]
    if model.variant is None and "config.json" in small:
        weights = [name for name in names if name == "model.safetensors"]
        if not weights and _INDEX in names:
            weights = [_INDEX, *(name for name in names if _SHARD.fullmatch(name))]
        if weights:
            return small + weights
    ggufs = [name for name in names if name.endswith(".gguf") and "mmproj" not in name.lower()]
    if model.variant is not None:
        ggufs = [name for name in ggufs if model.variant.lower() in name.lower()]
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


# -- downloading ---------------------------------------------------------------------------------------


def download(model: HubModel, allowed: bool, progress: Progress | None = None) -> Path:
    """Download what is needed of a model; the directory or GGUF file. Blocks.

    Files that are in the cache already are not downloaded again, connections that break are taken up where
    they broke, and files with a checksum are compared with it.

    Raises:
        ConfigError: it is not allowed, or failed; with what to do about it.
        What ``progress`` raises: it is called several times a second.
    """
    if not allowed:
        raise ConfigError(
            f"model: {model} is neither a directory nor in the hub's local cache. Downloads are not allowed "
            f"here: set download, or run '{model.command}'"
        )
    from huggingface_hub import HfApi, constants

    def ask() -> Any:
        return HfApi().model_info(
            model.repository,
            revision=model.revision,
            files_metadata=True,
            timeout=constants.HF_HUB_ETAG_TIMEOUT,
        )

    with _Explaining(model):
        info = _beside(ask, progress)
    assert info.sha is not None
    siblings = {each.rfilename: each for each in info.siblings or []}
    wanted = wanted_files(siblings, model)
    files = [_File(name, siblings[name].size or 0, _checksum_of(siblings[name])) for name in wanted]
    missing = [file for file in files if not file.cached(model.repository, info.sha)]
    _check_space(Path(constants.HF_HUB_CACHE), sum(file.size for file in missing), model)
    downloads = _Downloads(model.repository, info.sha, missing)
    with _Explaining(model), downloads:
        while not downloads.wait(_LOOK):
            if progress is not None:
                progress("download", downloads.done, downloads.total)
        downloads.check()
    if progress is not None:
        progress("download", downloads.total, downloads.total)
    with _Explaining(model):
        # Nothing is left to download: this makes the revision known by its name.
        folder = _beside(lambda: _snapshot(model, info.sha, wanted), progress)
    return _entry(folder, wanted)


def _beside(call: Callable[[], Any], progress: Progress | None) -> Any:
    """What a call on a thread of its own returns or raises. What ``progress`` raises ends the waiting."""
    ended = threading.Event()
    result: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            result.append(call())
        except BaseException as error:
            errors.append(error)
        ended.set()

    threading.Thread(target=run, daemon=True, name="aioinfer-hub").start()
    while not ended.wait(_LOOK):
        if progress is not None:
            progress("download", 0, 0)
    if errors:
        raise errors[0]
    return result[0]


def _snapshot(model: HubModel, commit: str, wanted: Sequence[str]) -> Path:
    from huggingface_hub import hf_hub_download

    last = Path(hf_hub_download(model.repository, wanted[0], revision=model.revision))
    folder = last.parents[len(Path(wanted[0]).parts) - 1]
    # The revision may have moved on since: what was downloaded is what is loaded.
    return folder.with_name(commit)


@dataclass(frozen=True, slots=True)
class _File:
    name: str
    size: int
    #: sha256 in hex digits, of large files; None where the hub states none
    checksum: str | None

    def cached(self, repository: str, commit: str) -> bool:
        from huggingface_hub import try_to_load_from_cache

        return isinstance(try_to_load_from_cache(repository, self.name, revision=commit), str)


def _checksum_of(sibling: Any) -> str | None:
    lfs = sibling.lfs
    return None if lfs is None else lfs["sha256"] if isinstance(lfs, dict) else lfs.sha256


class _Stopped(BaseException):
    """On a thread whose download is not wanted any more."""


class _Downloads:
    """Downloads files on threads of its own, which end with the process; as a context, it stops them."""

    def __init__(self, repository: str, commit: str, files: Sequence[_File]) -> None:
        self._repository, self._commit = repository, commit
        self._files = list(files)
        self.total = sum(file.size for file in files)
        self.done = 0
        self._lock = threading.Lock()
        self._stopped = False
        self._error: BaseException | None = None
        self._ended = threading.Condition()
        self._threads = min(_THREADS, len(files))
        for number in range(self._threads):
            threading.Thread(target=self._run, daemon=True, name=f"aioinfer-download-{number}").start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        # A thread that waits for the network sees it when that answers or times out; nobody waits for it.
        self._stopped = True

    def wait(self, seconds: float) -> bool:
        """Whether all threads have ended."""
        with self._ended:
            return self._ended.wait_for(lambda: self._threads == 0, seconds)

    def check(self) -> None:
        """Raise what the first download that failed has raised."""
        if self._error is not None:
            raise self._error

    def advanced(self, size: int) -> None:
        """So many bytes have arrived. Raises _Stopped."""
        if self._stopped:
            raise _Stopped
        with self._lock:
            self.done += size

    def _run(self) -> None:
        try:
            while not self._stopped:
                with self._lock:
                    if not self._files:
                        break
                    file = self._files.pop(0)
                self._download(file)
        except _Stopped:
            pass
        except BaseException as error:
            self._error = self._error or error
            self._stopped = True
        with self._ended:
            self._threads -= 1
            self._ended.notify_all()

    def _download(self, file: _File) -> None:
        from huggingface_hub import hf_hub_download

        path = Path(
            hf_hub_download(self._repository, file.name, revision=self._commit, tqdm_class=self._bar())
        )
        if file.checksum is None:
            return
        digest = hashlib.sha256()
        with path.open("rb") as opened:
            while piece := opened.read(_SLICE):
                self.advanced(0)
                digest.update(piece)
        if digest.hexdigest() != file.checksum:
            path.resolve().unlink(missing_ok=True)
            path.unlink(missing_ok=True)
            raise ConfigError(
                f"model: {file.name} of {self._repository} arrived damaged: its checksum is not the hub's. "
                "It was removed; try again"
            )

    def _bar(self) -> Any:
        """A class like tqdm, of which the download of a file makes an object."""
        from tqdm import tqdm

        downloads = self

        class Bar(tqdm):  # type: ignore[misc]
            def __init__(self, *_: Any, **options: Any) -> None:
                super().__init__(disable=True)

            def update(self, n: float | None = 1) -> None:
                downloads.advanced(int(n or 0))

        return Bar


def _check_space(cache: Path, size: int, model: HubModel) -> None:
    """Raise ConfigError if the disk of the cache has no room for so many bytes."""
    existing = next(folder for folder in (cache, *cache.parents) if folder.is_dir())
    free = shutil.disk_usage(existing).free
    if size > free:
        raise ConfigError(
            f"model: {model} takes {size / 2**30:.1f} GiB, and the disk of {cache} has "
            f"{free / 2**30:.1f} GiB left: HF_HOME names another place"
        )


class _Explaining:
    """Turns what a hub or the way to it can raise into a ConfigError that says what to do."""

    def __init__(self, model: HubModel) -> None:
        self._model = model

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or isinstance(error, ConfigError):
            return
        text = self._explained(error)
        if text is not None:
            raise ConfigError(f"model: {text}") from error

    def _explained(self, error: BaseException) -> str | None:
        from huggingface_hub import constants, errors
        from huggingface_hub.utils import HFValidationError

        model, name, hub = self._model, self._model.repository, constants.ENDPOINT
        if isinstance(error, errors.GatedRepoError):
            return (
                f"{name} is gated: accept its conditions at {hub}/{name}, and log in ('hf auth login', or a "
                "token in HF_TOKEN)"
            )
        if isinstance(error, errors.RevisionNotFoundError):
            return f"{name} has no revision {model.revision}"
        if isinstance(error, errors.RepositoryNotFoundError | HFValidationError):
            return f"{hub} has no model {name}, or it is private: then log in ('hf auth login', or HF_TOKEN)"
        if isinstance(error, errors.EntryNotFoundError) and not isinstance(
            error, errors.LocalEntryNotFoundError
        ):
            return f"a file of {name} is missing at {hub}: {error}"
        if isinstance(error, errors.OfflineModeIsEnabled):
            return (
                f"{model} is not in the hub's local cache, and HF_HUB_OFFLINE forbids to download it: run "
                f"'{model.command}' where a network is"
            )
        if isinstance(error, errors.HfHubHTTPError):
            return f"{hub} refused {name}: {error}"
        if isinstance(error, OSError) or type(error).__module__.partition(".")[0].startswith("httpx"):
            return (
                f"{model} is not in the hub's local cache, and {hub} cannot be reached or the download "
                f"failed: {type(error).__name__}: {error}. '{model.command}' fetches it by hand"
            )
        return None
