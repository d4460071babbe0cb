"""Roles: some replicas compute prompts and others go on with them.

A replica that computes a long prompt computes the tokens of its streams in the same steps, so each of these
steps is long. With roles, streams are decoded where no long prompt comes: Splitwise (arXiv 2311.18677),
DistServe (arXiv 2401.09670). What a prompt's KV costs to move is in docs/parallel.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias, cast, get_args

from aioinfer.errors import ConfigError, shown

__all__ = ["Role", "checked_role", "checked_roles", "checked_tokens"]

#: what a replica computes: long prompts, everything else, or all
Role: TypeAlias = Literal["prefill", "decode", "both"]


def checked_role(role: object) -> Role:
    """Raises ConfigError."""
    if role not in get_args(Role):
        raise ConfigError(f"role must be one of {', '.join(get_args(Role))}, got {shown(role)}")
    return cast("Role", role)


def checked_roles(roles: Sequence[str], replicas: int) -> list[Role]:
    """One per replica; without any, all have both. Raises ConfigError."""
    if isinstance(roles, str) or not isinstance(roles, Sequence):
        raise ConfigError(f"roles must be a list with one role per replica, got {shown(roles)}")
    found: list[Role] = [checked_role(each) for each in roles or ["both"] * replicas]
    if len(found) != replicas:
        raise ConfigError(f"roles: {len(found)} for {replicas} replicas")
    if "both" not in found:
        for needed in ("prefill", "decode"):
            if needed not in found:
                raise ConfigError(f"roles: at least one replica must have the role {needed!r} or 'both'")
    return found


def checked_tokens(tokens: object) -> int:
    """A positive number of tokens. Raises ConfigError."""
    if type(tokens) is not int or tokens < 1:
        raise ConfigError(f"prefill_tokens must be a positive number of tokens, got {shown(tokens)}")
    return tokens
