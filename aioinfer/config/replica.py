"""ReplicaConfig: where a replica of a dispatcher listens."""

from __future__ import annotations

from dataclasses import dataclass

from aioinfer.config.options import Settings, check_fields, option, register
from aioinfer.config.values import shown
from aioinfer.errors import ConfigError

__all__ = ["ReplicaConfig"]


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaConfig(Settings):
    """Settings of ``aioinfer replica``: where it listens for its dispatcher.

    Raises:
        ConfigError: a field has the wrong type or is out of bounds; the message begins with its name.
    """

    socket: str | None = option(None, "replicas", "path of a Unix socket to listen on, for this user only")
    address: str | None = option(
        None, "replicas", "PORT or HOST:PORT to listen on instead; host by default 127.0.0.1; needs a token"
    )
    replica_token: str | None = option(None, "replicas", "what a dispatcher must show, 16 characters or more")

    def __post_init__(self) -> None:
        check_fields(self)
        if (self.socket is None) == (self.address is None):
            raise ConfigError("socket or address must be given, and not both: where the replica listens")
        if self.socket == "":
            raise ConfigError("socket must be a path, not empty")
        if self.address is not None:
            _ = self.host_and_port
            if self.replica_token is None:
                raise ConfigError("replica_token must be given with address: anybody could connect")
        if self.replica_token is not None and len(self.replica_token) < _SHORTEST:
            raise ConfigError(f"replica_token must have at least {_SHORTEST} characters")

    @property
    def host_and_port(self) -> tuple[str, int]:
        """The parts of ``address``. Raises ConfigError."""
        host, _, port = (self.address or "").rpartition(":")
        if not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
            raise ConfigError(f"address must be PORT or HOST:PORT, got {shown(self.address)}")
        return host.strip("[]") or "127.0.0.1", int(port)


_SHORTEST = 16
