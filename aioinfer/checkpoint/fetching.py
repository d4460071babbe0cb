"""A program that downloads a model of a hub for another process.

It reads what to download from its input, an object with the fields of HubModel, and writes lines of JSON:
``{"done": bytes, "total": bytes}``, and at the end ``{"entry": path}`` or ``{"error": text}``. SIGINT ends
it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from aioinfer.checkpoint.hub import INDEX, HubModel, entry_of, wanted_files
from aioinfer.checkpoint.tensors import read_json_object
from aioinfer.errors import ConfigError

__all__ = ["Output", "fetch", "main"]

_SLICE = 8 << 20


class Output:
    """Writes messages to the other process."""

    def __init__(self, descriptor: int) -> None:
        self._file = os.fdopen(descriptor, "w")
        self.done = self.total = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def say(self, **message: Any) -> None:
        print(json.dumps(message), file=self._file, flush=True)

    def advance(self, size: int) -> None:
        self.done += size
        self.say(done=self.done, total=self.total)


@dataclass(frozen=True, slots=True)
class _File:
    """A file of a repository."""

    name: str
    size: int
    #: sha256 in hex digits, of large files; None where the hub states none
    checksum: str | None
    #: its name among the blobs of the cache
    blob: str | None

    @classmethod
    def of(cls, sibling: Any) -> Self:
        lfs = sibling.lfs
        checksum = None if lfs is None else lfs["sha256"] if isinstance(lfs, dict) else lfs.sha256
        return cls(sibling.rfilename, sibling.size or 0, checksum, checksum or sibling.blob_id)


def fetch(model: HubModel, output: Output) -> Path:
    """Download a model; returns its directory or GGUF file. Raises ConfigError, and the library's errors."""
    from huggingface_hub import HfApi, constants

    info = HfApi().model_info(
        model.repository,
        revision=model.revision,
        files_metadata=True,
        timeout=constants.HF_HUB_ETAG_TIMEOUT,
    )
    assert info.sha is not None
    siblings = {each.rfilename: each for each in info.siblings or []}
    wanted = wanted_files(siblings, model)
    repository = _Repository(model.repository, info.sha, output)
    if INDEX in wanted:
        repository.get([_File.of(siblings[INDEX])])
        shards = read_json_object(repository.snapshot / INDEX).get("weight_map")
        names = set(shards.values()) if isinstance(shards, dict) else set()
        wanted += sorted(name for name in names if isinstance(name, str) and name in siblings)
    repository.get([_File.of(siblings[name]) for name in wanted])
    repository.name_revision(model.revision or constants.DEFAULT_REVISION)
    return entry_of(repository.snapshot, wanted)


class _Repository:
    """A repository in the hub's local cache."""

    def __init__(self, name: str, commit: str, output: Output) -> None:
        from huggingface_hub import constants
        from huggingface_hub.file_download import repo_folder_name

        folder = repo_folder_name(repo_id=name, repo_type="model")
        self._name, self._commit, self._output = name, commit, output
        self._cache = Path(constants.HF_HUB_CACHE)
        self._folder = self._cache / folder
        self._locks = self._cache / ".locks" / folder
        self.snapshot = self._folder / "snapshots" / commit

    def get(self, files: Sequence[_File]) -> None:
        """Download those that are missing, one after the other."""
        missing = [file for file in files if not (self.snapshot / file.name).exists()]
        new = [file for file in missing if not file.blob or not (self._folder / "blobs" / file.blob).exists()]
        size = sum(file.size for file in new)
        self._check_space(size)
        self._output.total += size
        for file in missing:
            self._remove_orphans(file)
            self._get_one(file)

    def _get_one(self, file: _File) -> None:
        from huggingface_hub import hf_hub_download

        path = Path(
            hf_hub_download(self._name, file.name, revision=self._commit, tqdm_class=_bar(self._output))
        )
        if file.checksum is None:
            return
        digest = hashlib.sha256()
        with path.open("rb") as opened:
            while piece := opened.read(_SLICE):
                digest.update(piece)
        if digest.hexdigest() != file.checksum:
            path.resolve().unlink(missing_ok=True)
            path.unlink(missing_ok=True)
            raise ConfigError(
                f"{file.name} of {self._name} arrived damaged: its checksum is not the hub's. "
                "It was removed; try again"
            )

    def name_revision(self, revision: str) -> None:
        """Make the commit known by the name under which it was asked for."""
        if revision == self._commit:
            return
        ref = self._folder / "refs" / revision
        ref.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=ref.parent, delete=False) as file:
            file.write(self._commit)
        os.replace(file.name, ref)

    def _remove_orphans(self, file: _File) -> None:
        """Remove parts of a file that killed processes have left; a downloading process holds its lock."""
        from filelock import FileLock, Timeout

        lock = self._locks / f"{file.blob}.lock"
        if file.blob is None or not lock.is_file():
            return
        with contextlib.suppress(Timeout, OSError), FileLock(lock, timeout=0):
            for orphan in (self._folder / "blobs").glob(f"{file.blob}.*.incomplete"):
                orphan.unlink(missing_ok=True)

    def _check_space(self, size: int) -> None:
        """Raise ConfigError if the disk of the cache has no room for ``size`` bytes."""
        existing = next(folder for folder in (self._cache, *self._cache.parents) if folder.is_dir())
        free = shutil.disk_usage(existing).free
        if size > free:
            raise ConfigError(
                f"{self._name} takes {size / 2**30:.1f} GiB, and the disk of {self._cache} has "
                f"{free / 2**30:.1f} GiB left: HF_HOME names another place"
            )


def _bar(output: Output) -> Any:
    """A class as the library makes bars of; theirs would start threads."""

    class Bar:
        n = total = 0

        def __init__(self, *_: Any, **options: Any) -> None:
            pass

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def update(self, size: float | None = 1) -> None:
            output.advance(int(size or 0))

        def __getattr__(self, name: str) -> Any:
            return lambda *_, **__: None

    return Bar


def _explained(model: HubModel, error: BaseException) -> str:
    """A message that names the failure and what to do about it."""
    from huggingface_hub import constants, errors

    name, hub = model.repository, constants.ENDPOINT
    if isinstance(error, ConfigError):
        return str(error).removeprefix("model: ")
    if isinstance(error, errors.GatedRepoError):
        return (
            f"{name} is gated: accept its conditions at {hub}/{name}, and log in ('hf auth login', or a "
            "token in HF_TOKEN)"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{name} has no revision {model.revision}"
    if isinstance(error, errors.RepositoryNotFoundError | errors.HFValidationError):
        return f"{hub} has no model {name}, or it is private: then log in ('hf auth login', or HF_TOKEN)"
    if isinstance(error, errors.RemoteEntryNotFoundError):
        return f"a file of {name} is missing at {hub}: {error}"
    if isinstance(error, errors.OfflineModeIsEnabled):
        return (
            f"{model} is not in the hub's local cache, and HF_HUB_OFFLINE forbids to download it: run "
            f"'{model.command}' where a network is"
        )
    if isinstance(error, errors.HfHubHTTPError):
        return f"{hub} refused {name}: {error}"
    return (
        f"{model} is not in the hub's local cache, and {hub} cannot be reached or the download failed: "
        f"{type(error).__name__}: {error}. '{model.command}' fetches it by hand"
    )


def main() -> int:
    """Returns the exit status."""
    # Also where the other process ignores it, as one that a shell put in the background does.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # Only messages go where the other process reads.
    output = Output(os.dup(1))
    os.dup2(2, 1)
    model = HubModel(**json.load(sys.stdin))
    try:
        output.say(entry=str(fetch(model, output)))
    except KeyboardInterrupt:
        return 130
    except BaseException as error:
        output.say(error=" ".join(_explained(model, error).split()))
        return 1
    return 0
