"""ServerConfig: how the engine is served over HTTP."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Literal

from aioinfer.config.options import (
    AT_LEAST_ONE,
    NOT_NEGATIVE,
    POSITIVE,
    Bounds,
    Settings,
    check_fields,
    option,
    register,
)
from aioinfer.config.values import shown
from aioinfer.errors import ConfigError

__all__ = ["EXCHANGE_GIB", "PREFILL_TOKENS", "ServerConfig", "given_server", "is_loopback"]

#: defaults of dispatchers
PREFILL_TOKENS, EXCHANGE_GIB = 256, 4.0


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig(Settings):
    """Settings of ``aioinfer serve``.

    Raises:
        ConfigError: a field has the wrong type or is out of bounds; the message begins with its name.
    """

    host: str = option("127.0.0.1", "server", "address to listen on")
    port: int = option(8000, "server", "port to listen on; 0: any free port", Bounds(0, 65535))
    uds: str | None = option(None, "server", "path of a Unix socket to listen on instead of host and port")
    uds_mode: str = option("600", "server", "permissions of the Unix sockets, in octal digits")
    tls_certificate: str | None = option(None, "server", "PEM file of a certificate chain: serve HTTPS")
    tls_key: str | None = option(None, "server", "PEM file of its key; default: in the same file")
    tls_ca: str | None = option(None, "server", "PEM file of authorities: clients need a certificate of one")
    api_key: str | None = option(None, "server", "bearer token that clients must send")
    api_keys: str | None = option(None, "server", "YAML file of further keys with names and limits")
    insecure: bool = option(False, "server", "allow a non-loopback host without an API key")
    served_model_name: str | None = option(
        None, "server", "names of the model in the API, separated by commas; default: the directory's name"
    )
    access_log: bool = option(False, "server", "log one line per request")
    access_log_format: Literal["text", "json"] = option("text", "server", "form of these lines")
    playground: bool = option(True, "server", "a page at / to try the model with")
    metrics: bool = option(True, "observing", "answer /metrics in the formats of Prometheus")
    vllm_metrics: bool = option(True, "observing", "show metrics by the names of vLLM, too, for its boards")
    admin_port: int | None = option(
        None, "server", "port of the admin routes on 127.0.0.1; 0: any free port", Bounds(0, 65535)
    )
    admin_uds: str | None = option(None, "server", "path of a Unix socket for the admin routes")
    admin_key: str | None = option(None, "server", "bearer token that admin requests must send")
    #: Absolute paths in requests must lie in it, relative ones begin at it; links that lead out are refused.
    lora_root: str | None = option(
        None, "server", "directory from which requests may load LoRA adapters; default: they may not"
    )
    weights_root: str | None = option(
        None, "server", "directory from which operators may load other weights; default: none may be loaded"
    )
    #: Separated by commas. Keeps pages away whose name has been pointed to this server (DNS rebinding).
    allowed_hosts: str | None = option(
        None,
        "server",
        "hosts of requests besides loopback names; *: any; default: any with a key or not on loopback",
    )
    cors_origins: str | None = option(
        None, "server", "origins of web pages that may use the server, as in https://a.b,https://c.d; *: any"
    )

    replicas: int = option(
        1,
        "replicas",
        "engines that serve as one, each in a child process; 1: in this process",
        Bounds(1, 256),
    )
    ray: str | None = option(
        None, "replicas", "Ray cluster that places the replicas on its nodes: auto or HOST:PORT"
    )
    routing: Literal["round_robin", "total_requests", "total_tokens", "prefix", "p2c", "hash"] = option(
        "prefix", "replicas", "which replica a request goes to"
    )
    on_loss: Literal["identical", "continue", "fail"] = option(
        "continue",
        "replicas",
        "a stream whose replica is lost goes on where it is identical, anywhere, or fails",
    )

    #: Prompts with ``prefill_tokens`` to compute, or more, are computed there; streams go on in the others.
    prefill_replicas: int = option(
        0,
        "replicas",
        "of these engines, how many compute long prompts, and nothing else",
        NOT_NEGATIVE,
    )
    prefill_tokens: int = option(
        PREFILL_TOKENS, "replicas", "tokens to compute from which on a prompt goes to these", AT_LEAST_ONE
    )
    exchange_gib: float = option(
        EXCHANGE_GIB,
        "replicas",
        "memory in GiB in which they leave KV for the others",
        POSITIVE,
    )

    max_body_mib: float | None = option(
        None,
        "connections",
        "largest request body in MiB; default: 1, and 64 bytes per token of the context, at most 16; of "
        "embeddings and scores 16; of a model that reads images 24",
        POSITIVE,
    )
    #: The parser of JSON holds up all else while it runs, 0.1 to 0.5 us per value on a Xeon.
    max_body_values: int | None = option(
        None,
        "connections",
        "JSON values and keys of a request body; default: 262144, or twice the context",
        AT_LEAST_ONE,
    )
    max_messages: int = option(4096, "connections", "messages of a chat", AT_LEAST_ONE)
    #: Separated by commas: a.b, a.b:8080, *.a.b, or * for any. Addresses that are not public are never
    #: connected to, whatever a name resolves to.
    image_hosts: str | None = option(
        None, "connections", "hosts that images of requests are fetched from; default: none, data URIs only"
    )
    image_timeout: float = option(
        10.0, "connections", "seconds until an image is fetched, redirects included", POSITIVE
    )
    max_stored_responses: int = option(
        1024, "sessions", "responses that are stored for a key; 0: none are", NOT_NEGATIVE
    )
    stored_response_timeout: float = option(
        3600.0, "sessions", "seconds without use until a stored response is forgotten", POSITIVE
    )
    max_sessions_per_key: int = option(16, "sessions", "sessions of a key; 0: there are none", NOT_NEGATIVE)
    session_ttl: float = option(
        3600.0, "sessions", "seconds without use until a session is deleted; requests may set fewer", POSITIVE
    )
    sessions_dir: str | None = option(
        None, "sessions", "directory that sessions are saved to; default: they cannot be saved"
    )
    max_answer_logprobs: int | None = option(
        None,
        "connections",
        "logprobs in an answer, alternatives included; default: 262144, or those of one choice",
        AT_LEAST_ONE,
    )
    max_connections: int | None = option(
        None,
        "connections",
        "open connections; default: 4096, fewer if the limit of open files is low",
        AT_LEAST_ONE,
    )
    header_timeout: float = option(
        10.0, "connections", "seconds until a new connection has sent a request's headers", POSITIVE
    )
    body_timeout: float = option(
        30.0, "connections", "seconds from a request's headers to the end of its body", POSITIVE
    )
    idle_timeout: float = option(
        75.0, "connections", "seconds between requests before a connection is closed", POSITIVE
    )
    ping_interval: float = option(
        5.0, "connections", "seconds of silence before an SSE comment is sent", POSITIVE
    )
    send_timeout: float = option(
        30.0, "connections", "seconds without a read before a client is disconnected", POSITIVE
    )
    stall_timeout: float = option(
        120.0, "connections", "seconds without a finished step before /health returns 503", POSITIVE
    )
    drain_timeout: float = option(
        30.0, "limits", "seconds that SIGTERM waits for running requests", NOT_NEGATIVE
    )

    def __post_init__(self) -> None:
        check_fields(self)
        _check_listening(self)
        if self.uds is None and not is_loopback(self.host) and not (self.needs_key or self.insecure):
            raise ConfigError(f"host {self.host} is not loopback: give an api_key, or insecure=True")
        if 0 < self.replicas <= self.prefill_replicas:
            raise ConfigError(f"prefill_replicas must be fewer than replicas, which are {self.replicas}")

    @property
    def roles(self) -> list[str]:
        """What each of the replicas computes; empty: everything."""
        prefill = self.prefill_replicas
        return ["prefill"] * prefill + ["decode"] * (self.replicas - prefill) if prefill else []

    @property
    def needs_key(self) -> bool:
        """Clients must send a key."""
        return self.api_key is not None or self.api_keys is not None

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names in ``served_model_name``; empty: the model's own."""
        return tuple(name.strip() for name in (self.served_model_name or "").split(",") if name.strip())

    @property
    def socket_mode(self) -> int:
        """``uds_mode`` as a number."""
        return int(self.uds_mode, 8)


def given_server(config: object) -> ServerConfig:
    """A config as it was passed to a server, or the defaults. Raises ConfigError: it is something else."""
    if config is None:
        return ServerConfig()
    if isinstance(config, ServerConfig):
        return config
    raise ConfigError(f"config must be a ServerConfig; got {shown(config)}")


def is_loopback(host: str) -> bool:
    """True for a name or address that leads to this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        # Names below localhost are reserved, too (RFC 6761, section 6.3).
        return host == "localhost" or host.endswith(".localhost")


def _check_listening(config: ServerConfig) -> None:
    if not re.fullmatch("0?[0-7]{3}", config.uds_mode):
        raise ConfigError(f"uds_mode must be three octal digits such as 660, got {shown(config.uds_mode)}")
    for name in ("uds", "admin_uds", "lora_root", "weights_root", "sessions_dir"):
        path = getattr(config, name)
        if path == "":
            raise ConfigError(f"{name} must be a path, not empty")
        if path is not None and "\0" in path:
            raise ConfigError(f"{name} must be a path, which has no NUL characters")
    for name in ("tls_key", "tls_ca"):
        if getattr(config, name) is not None and config.tls_certificate is None:
            raise ConfigError(f"{name} needs tls_certificate")
    if config.uds is not None and config.uds == config.admin_uds:
        raise ConfigError("admin_uds must be another path than uds")
