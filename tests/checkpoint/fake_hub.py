"""A hub on loopback: the routes of its protocol that downloads use, and the ways in which they go wrong."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

__all__ = ["FakeHub", "Repository", "fake_hub"]

#: files of at least so many bytes are said to have a checksum, as large files on the hub do
_LARGE = 1 << 16
_PIECE = 1 << 16


@dataclass
class Repository:
    """A model on the hub."""

    #: revision -> name -> contents
    revisions: dict[str, dict[str, bytes]]
    gated: bool = False
    #: names that are listed and cannot be had
    lost: set[str] = field(default_factory=set)
    #: name -> checksum that is stated instead of the true one
    checksums: dict[str, str] = field(default_factory=dict)

    def found(self, revision: str) -> tuple[str, dict[str, bytes]]:
        """The hash of a revision, which is a name or a hash, and its files. Raises KeyError."""
        for name, files in self.revisions.items():
            commit = hashlib.sha1(f"{name} {len(self.revisions)}".encode()).hexdigest()
            if revision in (name, commit):
                return commit, files
        raise KeyError(revision)


class FakeHub:
    """What it holds, what it was asked, and how it misbehaves."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        #: method, path and range of every request
        self.requests: list[tuple[str, str, str]] = []
        #: bytes of bodies of files
        self.sent = 0
        #: close the connection after so many bytes of a body, as often as there are entries
        self.cuts: list[int] = []
        #: stand still after so many bytes of a body, until it is set
        self.stall: int | None = None
        self.released = threading.Event()
        #: a body stands still
        self.stalling = threading.Event()
        self.url = ""

    def asked(self, part: str) -> list[tuple[str, str, str]]:
        """The requests whose path has this in it."""
        return [request for request in self.requests if part in request[1]]


def _etag(contents: bytes) -> str:
    """The name of a file among the blobs of a cache."""
    algorithm = hashlib.sha256 if len(contents) >= _LARGE else hashlib.sha1
    return algorithm(contents).hexdigest()


def _handler(hub: FakeHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def _answer(self) -> None:
            wanted = self.headers.get("Range", "")
            hub.requests.append((self.command, self.path, wanted))
            path, _, _ = self.path.partition("?")
            parts = path.strip("/").split("/")
            if parts[:2] == ["api", "models"]:
                self._info("/".join(parts[2:4]), parts[5] if len(parts) > 4 else "main")
            elif len(parts) > 4 and parts[2] == "resolve":
                self._file("/".join(parts[:2]), parts[3], "/".join(parts[4:]), wanted)
            else:
                self._error(404, "EntryNotFound")

        def _info(self, name: str, revision: str) -> None:
            repository = hub.repositories.get(name)
            if repository is None:
                self._error(401, "RepoNotFound")
                return
            try:
                commit, files = repository.found(revision)
            except KeyError:
                self._error(404, "RevisionNotFound")
                return
            siblings: list[dict[str, Any]] = []
            for file, contents in files.items():
                sibling: dict[str, Any] = {
                    "rfilename": file, "size": len(contents), "blobId": _etag(contents),
                }  # fmt: skip
                if len(contents) >= _LARGE:
                    checksum = repository.checksums.get(file) or hashlib.sha256(contents).hexdigest()
                    sibling["lfs"] = {"sha256": checksum, "size": len(contents), "pointerSize": 130}
                siblings.append(sibling)
            body = json.dumps({"id": name, "modelId": name, "sha": commit, "siblings": siblings}).encode()
            self._send(200, {"Content-Type": "application/json"}, body)

        def _file(self, name: str, revision: str, file: str, wanted: str) -> None:
            """A file of a revision that was listed."""
            repository = hub.repositories[name]
            commit, files = repository.found(revision)
            if repository.gated:
                self._error(403, "GatedRepo")
                return
            if file not in files or file in repository.lost:
                self._error(404, "EntryNotFound")
                return
            contents = files[file]
            headers = {"ETag": f'"{_etag(contents)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
            status, begin = 200, 0
            if wanted.startswith("bytes="):
                begin = int(wanted.removeprefix("bytes=").split("-")[0])
                status = 206
                headers["Content-Range"] = f"bytes {begin}-{len(contents) - 1}/{len(contents)}"
            self._send(status, headers, contents[begin:], slow=len(contents) >= _LARGE)

        def _error(self, status: int, code: str) -> None:
            self._send(status, {"X-Error-Code": code, "X-Error-Message": code}, b"")

        def _send(self, status: int, headers: dict[str, str], body: bytes, *, slow: bool = False) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "HEAD":
                return
            cut = hub.cuts.pop(0) if slow and hub.cuts else None
            stall = hub.stall if slow else None
            for start in range(0, len(body), _PIECE):
                if cut is not None and start >= cut:
                    self.close_connection = True
                    return
                if stall is not None and start >= stall:
                    self.wfile.flush()
                    hub.stalling.set()
                    hub.released.wait(60)
                    stall = None
                piece = body[start : start + _PIECE]
                hub.sent += len(piece)
                self.wfile.write(piece)

        def handle(self) -> None:
            try:
                super().handle()
            except ConnectionError:
                pass  # a client that went away

        def log_message(self, *_: Any) -> None:
            pass

    return Handler


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """A hub that listens until it is left."""
    hub = FakeHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.released.set()
        server.shutdown()
        server.server_close()
        thread.join()


def contents_of(folder: Path) -> dict[str, bytes]:
    """The files of a model directory, as a revision."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
