"""TLS of a server, checked before a model loads."""

from __future__ import annotations

import ssl

from aioinfer.config import ServerConfig
from aioinfer.errors import ConfigError

__all__ = ["tls_context"]


def tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    """The context of ``tls_certificate``, ``tls_key`` and ``tls_ca``; None without them.

    With ``tls_ca``, clients need a certificate that it has signed. Raises ConfigError.
    """
    if config.tls_certificate is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    key = config.tls_key or config.tls_certificate
    for setting, path in (("tls_certificate", config.tls_certificate), ("tls_key", key)):
        _check_readable(setting, path)
    try:
        # OpenSSL would ask for a password on the terminal.
        context.load_cert_chain(config.tls_certificate, key, password=_no_password)
    except _Encrypted:
        raise ConfigError(f"tls_key: {key} is encrypted: give a key without a password") from None
    except ssl.SSLError as error:
        raise ConfigError(_why(error, config.tls_certificate, key)) from error
    if config.tls_ca is not None:
        _check_readable("tls_ca", config.tls_ca)
        try:
            context.load_verify_locations(config.tls_ca)
        except ssl.SSLError as error:
            raise ConfigError(f"tls_ca: {config.tls_ca} holds no certificates in PEM format") from error
        context.verify_mode = ssl.CERT_REQUIRED
    return context


class _Encrypted(Exception):
    """A password was asked for."""


def _no_password() -> str:
    raise _Encrypted


def _check_readable(setting: str, path: str) -> None:
    try:
        with open(path, "rb"):
            pass
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{setting}: {path}: {reason}") from error


def _why(error: ssl.SSLError, certificate: str, key: str) -> str:
    if error.reason == "KEY_VALUES_MISMATCH":
        return f"tls_key: {key} is not the key of the certificate {certificate}"
    return f"tls_certificate: {certificate} and tls_key: {key} hold no certificate and key in PEM format"
