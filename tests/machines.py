"""Hypothesis's state machines, as tests that take the same course each time."""

from __future__ import annotations

from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from tests.tiers import scaled

__all__ = ["run_machine"]


def run_machine(machine: type[RuleBasedStateMachine], most: int, least: int) -> None:
    """``most``: examples in full, ``least``: in the quick tier."""
    lawful = settings(
        max_examples=scaled(most, least),
        stateful_step_count=40,
        deadline=None,
        derandomize=True,
        database=None,
    )
    run_state_machine_as_test(machine, settings=lawful)
