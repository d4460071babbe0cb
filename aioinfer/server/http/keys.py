"""Keys: who may use a server, and how much.

Keys are kept as hashes only. A key is looked up by a hash under a secret of this process, so that the time
of a look-up says nothing about the keys that there are.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import re
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any

from aiohttp import web

from aioinfer.config import ServerConfig
from aioinfer.config.values import read_yaml, shown
from aioinfer.errors import ConfigError
from aioinfer.server.http.failures import Failure, Refused

__all__ = ["Key", "Keys", "check_name", "digest_of", "new_key"]

_NAME = re.compile(r"[A-Za-z0-9._@:-]{1,64}")
_FIELDS = ("name", "key", "sha256", "concurrency", "tokens_per_minute")
_MOST_KEYS = 10_000
_LEAST_LENGTH = 8
_MINUTE = 60.0


def new_key() -> str:
    """A new key of 256 random bits."""
    return f"sk-{secrets.token_urlsafe(32)}"


def digest_of(key: str) -> str:
    """The SHA-256 of a key in hexadecimal, as ``api_keys`` files have it."""
    return _digest(key).hex()


class Key:
    """One key: its name and its limits, where None is no limit.

    ``tokens_per_minute`` is a bucket of that size, which fills evenly within a minute. Prompt and output
    of a call are taken out when it ends, and may take the bucket below zero: calls are refused until it is
    above again. All in O(1), without timers.
    """

    __slots__ = ("_at", "_clock", "_level", "_open", "concurrency", "name", "tokens_per_minute")

    def __init__(
        self,
        name: str,
        *,
        concurrency: int | None = None,
        tokens_per_minute: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.concurrency = concurrency
        self.tokens_per_minute = tokens_per_minute
        self._open = 0
        self._clock = clock
        self._at = clock()
        self._level = float(tokens_per_minute or 0)

    def enter(self) -> None:
        """A call for tokens begins. Raises Refused (429)."""
        if self.concurrency is not None and self._open >= self.concurrency:
            message = f"the key {self.name} has {self._open} calls open, its limit (concurrency)"
            raise _limited(message, "concurrency_limit_exceeded", 1)
        if self.tokens_per_minute is not None and self._filled() <= 0:
            message = f"the key {self.name} has used its {self.tokens_per_minute} tokens per minute"
            raise _limited(message, "rate_limit_exceeded", max(1, math.ceil(self._seconds_until(1))))
        self._open += 1

    def leave(self, tokens: int) -> None:
        """A call that :meth:`enter` let in has ended, and has used ``tokens``."""
        self._open -= 1
        if self.tokens_per_minute is not None:
            self._level = self._filled() - tokens

    def headers(self) -> dict[str, str]:
        """OpenAI's headers of the limit on tokens."""
        if self.tokens_per_minute is None:
            return {}
        left = max(0, int(self._filled()))
        full = self._seconds_until(self.tokens_per_minute)
        return {
            "x-ratelimit-limit-tokens": str(self.tokens_per_minute),
            "x-ratelimit-remaining-tokens": str(left),
            "x-ratelimit-reset-tokens": f"{full:.3f}".rstrip("0").rstrip(".") + "s",
        }

    def _filled(self) -> float:
        assert self.tokens_per_minute is not None
        now = self._clock()
        rate = self.tokens_per_minute / _MINUTE
        self._level = min(self.tokens_per_minute, self._level + rate * max(0.0, now - self._at))
        self._at = now
        return self._level

    def _seconds_until(self, level: float) -> float:
        assert self.tokens_per_minute is not None
        return max(0.0, (level - self._level) * _MINUTE / self.tokens_per_minute)


class Keys:
    """The keys of a server; empty: none is asked for."""

    def __init__(self, keys: Mapping[bytes, Key]) -> None:
        """``keys``: by SHA-256."""
        self._secret = secrets.token_bytes(32)
        self._keys = {self._blind(digest): key for digest, key in keys.items()}

    @classmethod
    def of(cls, config: ServerConfig) -> Keys:
        """``api_key`` and the file ``api_keys``. Raises ConfigError."""
        keys: dict[bytes, Key] = {}
        if config.api_keys is not None:
            keys = _read(config.api_keys)
        if config.api_key is not None:
            key, digest = Key("api_key"), _digest(config.api_key)
            if digest not in keys and key.name in {each.name for each in keys.values()}:
                # What is kept for a key is found by its name.
                raise ConfigError(f"{config.api_keys}: the name {key.name} is that of the setting")
            keys.setdefault(digest, key)
        return cls(keys)

    @classmethod
    def single(cls, name: str, key: str | None) -> Keys:
        """One key without limits, or none."""
        return cls({} if key is None else {_digest(key): Key(name)})

    @property
    def given(self) -> bool:
        """Requests need a key."""
        return bool(self._keys)

    def check(self, request: web.BaseRequest) -> Key | None:
        """The key of a request: a bearer token in ``Authorization``, else ``x-api-key``; None: none is
        asked for. Raises Refused (401)."""
        if not self._keys:
            return None
        # The name of a scheme is case-insensitive (RFC 9110, section 11.1).
        scheme, _, token = request.headers.get("Authorization", "").strip().partition(" ")
        bearer = token.strip() if scheme.lower() == "bearer" else ""
        given = [each for each in (bearer, request.headers.get("x-api-key", "").strip()) if each]
        if not given:
            message = "the API key is missing: send it as 'Authorization: Bearer KEY'"
            raise _unauthorized(message, None, "Bearer")
        for each in given:
            if (key := self._keys.get(self._blind(_digest(each)))) is not None:
                return key
        raise _unauthorized("wrong API key", "invalid_api_key", 'Bearer error="invalid_token"')

    def _blind(self, digest: bytes) -> bytes:
        return hmac.digest(self._secret, digest, "sha256")


def _read(path: str) -> dict[bytes, Key]:
    """The keys of a file, by SHA-256. Messages name entries by number, and show no key."""
    entries = read_yaml(path)
    if not isinstance(entries, list) or not 1 <= len(entries) <= _MOST_KEYS:
        raise ConfigError(f"{path} must hold a list of 1 to {_MOST_KEYS} keys")
    keys: dict[bytes, Key] = {}
    names: set[str] = set()
    for number, entry in enumerate(entries, 1):
        digest, key = _entry(entry, f"{path}, key {number}")
        if key.name in names:
            raise ConfigError(f"{path}, key {number}: the name {key.name} occurs twice")
        if digest in keys:
            raise ConfigError(f"{path}, key {number}: the same key as that of {keys[digest].name}")
        names.add(key.name)
        keys[digest] = key
    return keys


def _entry(entry: Any, where: str) -> tuple[bytes, Key]:
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} must be a mapping of {', '.join(_FIELDS)}")
    if unknown := [str(name) for name in entry if name not in _FIELDS]:
        raise ConfigError(f"{where} has the unknown field {shown(unknown[0])}; known: {', '.join(_FIELDS)}")
    name = check_name(entry.get("name"), where)
    limits: dict[str, int | None] = {}
    for field in ("concurrency", "tokens_per_minute"):
        value = entry.get(field)
        if value is not None and (type(value) is not int or not 1 <= value < 2**53):
            raise ConfigError(f"{where}: {field} must be an integer from 1 on, got {shown(value)}")
        limits[field] = value
    key = Key(name, concurrency=limits["concurrency"], tokens_per_minute=limits["tokens_per_minute"])
    return _entry_digest(entry, where), key


def check_name(name: Any, where: str) -> str:
    """Raises ConfigError, which begins with ``where``, unless a name of a key is short and plain."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"{where}: name must be 1 to 64 letters, digits and characters of ._@:-")
    return name


def _entry_digest(entry: Mapping[str, Any], where: str) -> bytes:
    key, digest = entry.get("key"), entry.get("sha256")
    if (key is None) == (digest is None):
        raise ConfigError(f"{where} needs either key or sha256")
    if digest is not None:
        if not isinstance(digest, str) or not re.fullmatch("[0-9A-Fa-f]{64}", digest):
            raise ConfigError(f"{where}: sha256 must be 64 hexadecimal digits in quotes")
        return bytes.fromhex(digest)
    if not isinstance(key, str) or len(key) < _LEAST_LENGTH or key != key.strip() or not key.isprintable():
        raise ConfigError(
            f"{where}: key must be text of at least {_LEAST_LENGTH} characters, without spaces around"
        )
    return _digest(key)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()


def _unauthorized(message: str, code: str | None, challenge: str) -> Refused:
    headers = {"WWW-Authenticate": challenge}
    return Refused(Failure(401, "authentication_error", message, code=code, headers=headers))


def _limited(message: str, code: str, seconds: int) -> Refused:
    return Refused(
        Failure(429, "rate_limit_error", message, code=code, headers={"Retry-After": str(seconds)})
    )
