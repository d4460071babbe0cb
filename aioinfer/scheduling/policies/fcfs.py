"""First come, first served."""

from __future__ import annotations

from aioinfer.scheduling.policy import Policy

__all__ = ["Fcfs"]


class Fcfs(Policy):
    """First come, first served."""
