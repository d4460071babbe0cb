"""TLS: what a server shows, whom it lets in, and files that cannot be used."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import trustme
from cryptography.hazmat.primitives import serialization

from aioinfer.cli.main import main
from aioinfer.config import ServerConfig
from aioinfer.errors import ConfigError
from aioinfer.server.http.connections import Connections
from aioinfer.server.http.tls import tls_context
from tests.server.calls import Http, http
from tests.server.conftest import Serving, age
from tests.server.test_adversity import ENDLESS, until

BODY = {**ENDLESS, "max_tokens": 3}


class Files:
    """An authority, and certificates of this machine by it."""

    def __init__(self, directory: Path) -> None:
        self.authority = trustme.CA()
        issued = self.authority.issue_cert("127.0.0.1", "localhost")
        self.certificate = str(directory / "cert.pem")
        self.key = str(directory / "key.pem")
        self.both = str(directory / "both.pem")
        self.ca = str(directory / "ca.pem")
        Path(self.certificate).write_bytes(b"".join(each.bytes() for each in issued.cert_chain_pems))
        issued.private_key_pem.write_to_path(self.key)
        issued.private_key_and_cert_chain_pem.write_to_path(self.both)
        self.authority.cert_pem.write_to_path(self.ca)

    def client(self, *, certificate: bool = False) -> ssl.SSLContext:
        context = ssl.create_default_context()
        self.authority.configure_trust(context)
        if certificate:
            self.authority.issue_cert("client@example.org").configure_cert(context)
        return context


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("tls"))


@asynccontextmanager
async def trusting(files: Files, url: str, *, certificate: bool = False) -> AsyncIterator[Http]:
    connector = aiohttp.TCPConnector(ssl=files.client(certificate=certificate))
    async with aiohttp.ClientSession(url, connector=connector) as session:
        yield Http(session)


@pytest.mark.parametrize("one_file", [False, True])
async def test_a_server_with_tls(serving: Serving, files: Files, one_file: bool) -> None:
    server = {"tls_certificate": files.certificate, "tls_key": files.key}
    if one_file:
        server = {"tls_certificate": files.both}
    async with serving(server=server) as served, trusting(files, served.url) as client:
        assert served.url.startswith("https://127.0.0.1:")
        for stream in (True, False):
            assert "length" in (await client.post("/v1/completions", {**BODY, "stream": stream})).text
        # A page of this server is of its origin.
        assert (await client.get("/v1/models", Origin=served.url)).status == 200
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await served.get("/v1/models")
        async with http(served.url.replace("https", "http")) as plain:
            with pytest.raises(aiohttp.ClientError):
                await plain.get("/v1/models")


async def test_clients_need_a_certificate_where_an_authority_is_named(serving: Serving, files: Files) -> None:
    server = {"tls_certificate": files.both, "tls_ca": files.ca}
    async with serving(server=server) as served:
        async with trusting(files, served.url, certificate=True) as client:
            assert (await client.get("/health")).status == 200
        async with trusting(files, served.url) as client:
            with pytest.raises((aiohttp.ClientError, ssl.SSLError, ConnectionError)):
                await client.get("/health")


async def test_a_client_that_begins_no_handshake_is_not_waited_for(serving: Serving, files: Files) -> None:
    async with serving(server={"tls_certificate": files.both, "header_timeout": 0.05}) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        assert await reader.read() == b""
        writer.close()


async def test_connections_are_limited_and_watched_as_without_tls(
    serving: Serving, files: Files, connections: list[Connections]
) -> None:
    """A client that sends no request behind its handshake."""
    server = {"tls_certificate": files.both, "header_timeout": 600.0, "max_connections": 2}
    async with serving(server=server) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port, ssl=files.client())
        await until(lambda: len(connections[0]) == 1)
        age(connections[0])
        assert await reader.read() == b""
        writer.close()
        async with trusting(files, served.url) as client:
            assert (await client.get("/health")).status == 200


async def test_tls_on_a_unix_socket(serving: Serving, files: Files) -> None:
    path = f"/tmp/aioinfer-tls-{os.getpid()}"
    server = {"uds": path, "tls_certificate": files.both}
    async with serving(server=server):
        reader, writer = await asyncio.open_unix_connection(
            path, ssl=files.client(), server_hostname="localhost"
        )
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()
    assert not await asyncio.to_thread(os.path.exists, path)


def broken(files: Files, directory: Path) -> list[tuple[dict[str, Any], str]]:
    """Settings, and what is wrong with their files."""
    empty, other, locked = (directory / f"{name}.pem" for name in ("empty", "other", "locked"))
    empty.touch()
    trustme.CA().issue_cert("x.example").private_key_pem.write_to_path(other)
    key = serialization.load_pem_private_key(Path(files.key).read_bytes(), None)
    secret = serialization.BestAvailableEncryption(b"password")
    form = serialization.PrivateFormat.PKCS8
    locked.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, secret))
    own, missing = {"tls_certificate": files.certificate}, "/no/such.pem"
    unread = "hold no certificate and key in PEM format"
    return [
        ({"tls_certificate": missing, "tls_key": files.key}, f"tls_certificate: {missing}: No such file"),
        ({**own, "tls_key": missing}, f"tls_key: {missing}: No such file"),
        (own, unread),
        ({"tls_certificate": str(empty), "tls_key": files.key}, unread),
        ({"tls_certificate": files.key, "tls_key": files.certificate}, unread),
        ({**own, "tls_key": str(other)}, "is not the key of the certificate"),
        ({**own, "tls_key": str(locked)}, "is encrypted: give a key without a password"),
        ({"tls_certificate": files.both, "tls_ca": str(empty)}, "holds no certificates in PEM format"),
    ]


def test_files_that_cannot_be_used_are_one_plain_line(
    files: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for given, message in broken(files, tmp_path):
        with pytest.raises(ConfigError, match=message):
            tls_context(ServerConfig(**given))
        flags = [text for name, value in given.items() for text in (f"--{name.replace('_', '-')}", value)]
        assert main(["serve", "/no/such/model", "--port", "0", *flags]) == 2
        complaint = capsys.readouterr().err
        assert message in complaint
        assert complaint.count("\n") == 1


def test_a_key_without_a_certificate_is_refused() -> None:
    for name in ("tls_key", "tls_ca"):
        with pytest.raises(ConfigError, match=f"{name} needs tls_certificate"):
            ServerConfig(**{name: "x.pem"})


def test_old_versions_are_not_spoken(files: Files) -> None:
    context = tls_context(ServerConfig(tls_certificate=files.both))
    assert context.minimum_version >= ssl.TLSVersion.TLSv1_2
