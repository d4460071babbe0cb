"""The rule by which the backends of attention, experts and sampling are chosen."""

from __future__ import annotations

import pytest
import torch

from aioinfer.errors import ConfigError
from aioinfer.model.backend import Backend, UnsupportedReason, choose_backend

CPU = torch.device("cpu")


def test_the_first_backend_that_can_run_is_chosen_and_the_reason_names_the_others() -> None:
    asked: list[str] = []

    def candidate(name: str, reason: str | None) -> UnsupportedReason:
        def unsupported_reason() -> str | None:
            asked.append(name)
            return reason

        return unsupported_reason

    candidates = {
        "fast": candidate("fast", "there is no compiler"),
        "good": candidate("good", "sizes are odd"),
        "plain": candidate("plain", None),
        "other": candidate("other", None),
    }
    chosen = choose_backend("some_backend", "auto", candidates, ("fast", "good", "plain", "other"), CPU)
    assert chosen == Backend("plain", "there is no compiler, and sizes are odd")
    assert asked == ["fast", "good", "plain"]
    assert choose_backend("some_backend", "auto", candidates, ("other",), CPU).reason == "the device is a cpu"
    assert choose_backend("some_backend", "plain", candidates, (), CPU) == Backend("plain", "asked for")


def test_a_named_backend_that_cannot_run_is_an_error_that_names_the_option() -> None:
    candidates: dict[str, UnsupportedReason] = {"fast": lambda: "there is no compiler", "plain": lambda: None}
    with pytest.raises(ConfigError, match=r"^some_backend: fast was asked for, and there is no compiler$"):
        choose_backend("some_backend", "fast", candidates, ("fast", "plain"), CPU)
    with pytest.raises(ConfigError, match=r"^some_backend: no backend can run: there is no compiler$"):
        choose_backend("some_backend", "auto", candidates, ("fast",), CPU)
