"""Sessions in files: an archive of pages whose header is the session itself.

Pages are in it under their names, which say all that their KV depends on: where an engine has another
arithmetic, another adapter or another page size, it does not find them, and computes the tokens again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from aioinfer.errors import InvalidRequest, shown
from aioinfer.images.stored import with_restored, with_stored
from aioinfer.inputs import check_ids
from aioinfer.request import JobOptions
from aioinfer.tiers.archive import Archive, ArchiveError, ArchiveWriter

if TYPE_CHECKING:
    from aioinfer.loop.service import Service

__all__ = ["Saved", "load", "save"]

_VERSION = 1


class Saved(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The header of a session's file."""

    kind: Literal["session"] = "session"
    version: Annotated[int, Meta(ge=_VERSION, le=_VERSION)] = _VERSION
    #: tells the model's files from others; and the model's name, for messages
    fingerprint: str
    model: str
    #: the arithmetic that computed the KV
    numerics: str
    #: those of images are words, which are negative
    token_ids: list[Annotated[int, Meta(ge=-(1 << 31), le=(1 << 31) - 1)]]
    messages: list[dict[str, Any]]
    #: of all its turns
    options: dict[str, Any]
    #: tells the files of its adapter from others; empty without one
    adapter_fingerprint: str


async def save(
    serving: Service[Any],
    path: str | os.PathLike[str],
    token_ids: Sequence[int],
    messages: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any],
    adapter_fingerprint: str,
) -> int:
    """Write a session with what is cached of its tokens; returns how many of these that is. As
    :meth:`aioinfer.Session.save`."""
    info = serving.info
    saved = Saved(
        fingerprint=info.fingerprint,
        model=info.model,
        numerics=info.numerics,
        token_ids=list(token_ids),
        messages=with_stored(messages),
        options=dict(options),
        adapter_fingerprint=adapter_fingerprint,
    )
    salt, adapter = options.get("cache_salt") or "", options.get("adapter")
    writers: list[ArchiveWriter] = []
    begin = partial(_begin, writers, _path(path), msgspec.structs.asdict(saved))
    try:
        with _refusing(serving):
            writer = await serving.use_file(begin)
            count = await serving.store(token_ids, salt, adapter, writer)
            await serving.use_file(writer.finish)
            return count
    finally:
        for each in writers:
            each.close()


def _begin(writers: list[ArchiveWriter], path: str, header: Mapping[str, Any]) -> ArchiveWriter:
    """On a worker thread, whose caller may have left."""
    writers.append(ArchiveWriter(path, header))
    return writers[0]


async def load(
    serving: Service[Any], path: str | os.PathLike[str], adapters: Mapping[str, str]
) -> tuple[Archive, Saved]:
    """Open a session's file, and check what it says. ``adapters``: fingerprints of those that are loaded, by
    name. The caller closes the archive. Raises InvalidRequest with the field ``path``."""
    with _refusing(serving):
        archive = await serving.use_file(Archive, _path(path))
    try:
        return archive, _checked(serving, archive.header, adapters)
    except InvalidRequest as error:
        archive.close()
        raise InvalidRequest("path", f"{os.fspath(path)}: {error.message}", code=error.code) from error


def _checked(serving: Service[Any], header: Mapping[str, Any], adapters: Mapping[str, str]) -> Saved:
    info = serving.info
    try:
        saved = msgspec.convert(header, Saved)
    except msgspec.ValidationError as error:
        raise InvalidRequest("path", f"holds no session that this release reads: {error}") from None
    if saved.fingerprint != info.fingerprint:
        raise InvalidRequest(
            "path",
            f"its session is of the model {saved.model!r} with other files than this engine's "
            f"({info.model!r}): {saved.fingerprint} and {info.fingerprint}",
        )
    unknown = saved.options.keys() - JobOptions.__annotations__.keys()
    if unknown:
        raise InvalidRequest("path", f"its session has the unknown option {shown(min(unknown))}")
    saved.messages, images = with_restored(saved.messages, "messages")
    check_ids("token_ids", [each for each in saved.token_ids if each >= 0 or not images], info.vocab_size)
    adapter = saved.options.get("adapter")
    if adapter is not None and adapters.get(adapter) != saved.adapter_fingerprint:
        raise InvalidRequest("path", f"its adapter {shown(adapter)} is not loaded from the same files")
    return saved


@contextmanager
def _refusing(serving: Service[Any]) -> Iterator[None]:
    """Say as engines do what is wrong with a file, and that the engine was closed."""
    try:
        yield
    except ArchiveError as error:
        raise InvalidRequest("path", str(error)) from error
    except RuntimeError:
        serving.check_running()  # else its threads have ended
        raise


def _path(path: str | os.PathLike[str]) -> str:
    """Raises InvalidRequest."""
    try:
        found = os.fspath(path)
    except TypeError:
        found = ""
    if not isinstance(found, str) or not found or "\0" in found:
        raise InvalidRequest("path", f"must be the path of a file, got {shown(path)}")
    return found
