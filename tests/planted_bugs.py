"""Bugs planted on purpose, to see that a state machine finds them."""

from __future__ import annotations

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

#: Many more examples than a bug needs, for which ones are drawn depends on what else is loaded: Hypothesis
#: mixes in constants of the code under test. Found is enough; nobody reads the smallest example.
_HUNT = settings(
    max_examples=5000,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    report_multiple_bugs=False,
)
_SYMPTOMS = (AssertionError, IndexError, KeyError, RuntimeError, ValueError, pytest.fail.Exception)


def assert_found(machine: type[RuleBasedStateMachine]) -> None:
    """The machine's rules come upon what is wrong with its subject."""
    with pytest.raises(_SYMPTOMS):
        run_state_machine_as_test(machine, settings=_HUNT)
