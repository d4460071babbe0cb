"""The package: imports without side effects, public names, configuration and parameters."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import aioinfer
from aioinfer import errors
from aioinfer.checkpoint.locate import bundled_models
from aioinfer.config import EngineConfig, ServerConfig, parse_setting
from aioinfer.execution.device import DeviceInfo
from aioinfer.loop import factory
from aioinfer.loop.factory import decide
from aioinfer.params import SamplingParams

PROBE = """
import asyncio, gc, json, logging, os, signal, sys, threading, warnings
def interpreter(): return sys.getswitchinterval(), gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()
handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
environment, root = dict(os.environ), list(logging.getLogger().handlers)
filters, threads, settings = list(warnings.filters), threading.active_count(), interpreter()
import aioinfer
aioinfer.Engine, aioinfer.EngineConfig, aioinfer.SamplingParams, aioinfer.errors
aioinfer.Engine(aioinfer.EngineConfig())
print(json.dumps({
    "heavy": sorted({"torch", "transformers", "aiohttp", "uvloop", "pydantic"} & sys.modules.keys()),
    "signals": handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
    "environment": environment == dict(os.environ),
    "logging": root == logging.getLogger().handlers,
    "warnings": filters == warnings.filters,
    "policy": type(asyncio.get_event_loop_policy()).__module__,
    "threads": threading.active_count() - threads,
    "interpreter": interpreter() == settings,
}))
"""


def test_importing_is_light_and_changes_nothing() -> None:
    output = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True).stdout
    assert json.loads(output) == {
        "heavy": [],
        "signals": True,
        "environment": True,
        "logging": True,
        "warnings": True,
        "policy": "asyncio.unix_events",
        "threads": 0,
        "interpreter": True,
    }


def test_help_imports_no_torch() -> None:
    code = (
        "import sys; from aioinfer.cli.main import main\n"
        "try: main(['serve', '--help', 'all'])\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    for name in ("--max-running-requests", "--overlap-steps", "--api-key", "--config"):
        assert name in shown


def test_the_public_names() -> None:
    assert aioinfer.__all__ == sorted(aioinfer.__all__, key=lambda name: (not name.isupper(), name))
    for name in aioinfer.__all__:
        assert getattr(aioinfer, name).__name__ == name
    assert set(aioinfer.__all__) <= set(dir(aioinfer))
    with pytest.raises(AttributeError):
        aioinfer.nothing_like_it  # noqa: B018


def test_every_error_is_in_the_tree_that_the_docstring_draws() -> None:
    drawn = errors.__doc__ or ""
    for name in errors.__all__:
        error = getattr(errors, name)
        assert issubclass(error, errors.AioInferError)
        assert name in drawn


class OverBudget(errors.RequestError):
    """An error of a caller's own, whose arguments have names."""

    def __init__(self, *, budget: int) -> None:
        super().__init__(f"over {budget}")
        self.budget = budget


#: errors whose arguments are not one message
ARGUMENTS: dict[str, Callable[[], errors.AioInferError]] = {
    "InvalidRequest": lambda: errors.InvalidRequest("n", "must be 1", code="unsupported_parameter"),
    "ConstraintFailed": lambda: errors.ConstraintFailed(["grammar", "bad_words"], "leave no token"),
    "Rejected": lambda: errors.Rejected("the queue is full", 2.5),
    "OverBudget": lambda: OverBudget(budget=3),
    "TimedOut": lambda: errors.TimedOut("waiting", 1.5),
}


@pytest.mark.parametrize("name", [*errors.__all__, "OverBudget"])
def test_every_error_can_be_copied_and_pickled(name: str) -> None:
    kind = getattr(errors, name, OverBudget)
    error = ARGUMENTS[name]() if name in ARGUMENTS else kind("a message")
    error.add_note("a note")
    copies: list[Callable[[Any], Any]] = [copy.copy, copy.deepcopy]
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        copies.append(lambda each, protocol=protocol: pickle.loads(pickle.dumps(each, protocol)))
    for copied in [make(error) for make in copies]:
        assert type(copied) is kind
        assert copied.args == error.args
        assert str(copied) == str(error) != ""
        assert vars(copied) == vars(error)
        # A copy is an error like any other.
        with pytest.raises(kind):
            raise copied


def test_a_synchronous_model_keeps_torchs_global_state() -> None:
    import torch

    before = torch.is_grad_enabled(), torch.get_num_threads(), torch.get_default_dtype()
    with aioinfer.LLM(EngineConfig(threads=1)) as llm:
        prompt = [{"role": "user", "content": "What is 20 + 22?"}]
        assert llm.generate([prompt], progress=False)[0].text == "20 + 22 = 42"
        assert torch.is_grad_enabled()
    assert before == (torch.is_grad_enabled(), torch.get_num_threads(), torch.get_default_dtype())


SECRET_FREE = Path(aioinfer.__file__).parent


def test_nothing_banned_is_used_in_the_library() -> None:
    for file in SECRET_FREE.rglob("*.py"):
        text = file.read_text()
        for banned in (
            "asyncio.wait_for(",
            "import wait_for",
            "set_event_loop_policy",
            "get_event_loop()",
            "os.environ[",
        ):
            assert banned not in text, (file.name, banned)
        if file.relative_to(SECRET_FREE).parts[0] in ("scheduling", "cache"):
            assert "import time" not in text, file.name


# -- configuration -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"overlap_steps": 3}, "overlap_steps"),
        ({"dtype": "int4"}, "dtype"),
        ({"page_size": 0}, "page_size"),
        ({"page_size": 1.5}, "page_size"),
        ({"page_size": True}, "page_size"),
        ({"max_running_requests": 10, "max_step_tokens": 5}, "max_step_tokens"),
        ({"waiting_timeout": -1.0}, "waiting_timeout"),
        ({"waiting_timeout": float("nan")}, "waiting_timeout"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
        ({"model": None}, "model"),
        ({"max_grammar_bytes": 1 << 30}, r"in \[1, 1048576\], got 1073741824"),
        ({"launch_mode": "fork"}, "launch_mode"),
        ({"switch_interval": 2.0}, "switch_interval"),
        ({"gc": "never"}, "gc"),
    ],
)
def test_a_bad_setting_is_refused_by_name(changes: dict[str, object], message: str) -> None:
    with pytest.raises(errors.ConfigError, match=message):
        EngineConfig(**changes)  # type: ignore[arg-type]


def test_settings_are_parsed_from_text() -> None:
    assert parse_setting(EngineConfig, "overlap_steps", "2") == 2
    assert parse_setting(EngineConfig, "running_timeout", "1.5") == 1.5
    assert parse_setting(EngineConfig, "transformers_fallback", "yes") is True
    assert parse_setting(EngineConfig, "num_pages", "none") is None
    assert parse_setting(EngineConfig, "model", "/models/x") == "/models/x"
    with pytest.raises(errors.ConfigError):
        parse_setting(EngineConfig, "overlap_steps", "two")


def test_a_public_host_needs_a_key() -> None:
    with pytest.raises(errors.ConfigError, match="loopback"):
        ServerConfig(host="0.0.0.0")
    assert ServerConfig(host="0.0.0.0", api_key="k").host == "0.0.0.0"
    assert ServerConfig(host="0.0.0.0", insecure=True).host == "0.0.0.0"


@pytest.mark.parametrize("setting", ["tool_call_parser", "reasoning_parser"])
def test_parsers_are_known_by_name(setting: str) -> None:
    assert getattr(EngineConfig(), setting) == "auto"
    assert getattr(EngineConfig(**{setting: None}), setting) is None  # type: ignore[arg-type]
    with pytest.raises(errors.ConfigError, match=setting):
        EngineConfig(**{setting: "morse"})  # type: ignore[arg-type]


def test_the_default_model_is_bundled() -> None:
    assert EngineConfig().model in bundled_models()
    assert (EngineConfig().model_path / "config.json").is_file()


# -- parameters ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [-0.1, float("nan"), float("inf"), "1", None, True]),
        ("top_p", [0, -1, 1.1, float("nan")]),
        ("top_k", [-2, 1.5]),
        ("min_p", [-0.1, 1.1]),
        ("seed", [2**63, 1.0, "x"]),
        ("max_tokens", [-1, 1.5]),
        ("min_tokens", [-1, None]),
        ("repetition_penalty", [0, -1, float("nan")]),
        ("presence_penalty", [-2.1, 2.1]),
        ("frequency_penalty", [-2.1, float("inf")]),
        ("stop", ["", [""], [1], ["x"] * 17, ["x" * 1025]]),
        ("stop_token_ids", [[-1], [1.5], [True], list(range(1025))]),
        ("ignore_eos", [1, None]),
    ],
)
def test_a_bad_parameter_is_refused_by_name(field: str, values: list[object]) -> None:
    for value in values:
        if field == "stop" and value == "":
            continue  # an empty string is no stop at all, as in OpenAI's API
        with pytest.raises(errors.InvalidRequest) as caught:
            SamplingParams(**{field: value})  # type: ignore[arg-type]
        assert caught.value.field == field, value
    with pytest.raises(errors.InvalidRequest, match="min_tokens"):
        SamplingParams(min_tokens=5, max_tokens=4)


@pytest.mark.parametrize(
    ("block_size", "asynchronous", "decided"),
    [
        (None, False, (1, 1, None)),
        (None, True, (1, 1, None)),
        (16, True, (1, 1, None)),
        (16, False, (0, 4, 256)),
    ],
)
def test_unset_fields_are_resolved_with_the_model(
    block_size: int | None, asynchronous: bool, decided: tuple[int, int, int | None]
) -> None:
    def settings(config: EngineConfig) -> tuple[int | None, int | None, int | None]:
        found = decide(config, block_size, asynchronous=asynchronous)
        return found.overlap_steps, found.max_rounds, found.max_prefill_tokens

    assert settings(EngineConfig()) == decided
    asked = EngineConfig(overlap_steps=2, max_rounds=7, max_prefill_tokens=64)
    assert settings(asked) == (2, 7, 64)
    assert settings(EngineConfig(overlap_steps=0))[1] == 4


@pytest.mark.parametrize(("device", "seconds"), [("cpu", 0.2), ("cuda:0", 0.0), ("", 0.0)])
def test_steps_have_a_time_by_default_on_a_cpu_only(
    monkeypatch: pytest.MonkeyPatch, cpu_step_time: float, device: str, seconds: float
) -> None:
    monkeypatch.setattr(factory, "_CPU_STEP", cpu_step_time)
    info = DeviceInfo(10, 10, 10, frozenset(), "", device=device)

    def target(given: float | None = None) -> float | None:
        config = EngineConfig(itl_target=given)
        return decide(config, None, asynchronous=False, info=info).itl_target

    assert (target(), target(0.5), target(0)) == (seconds, 0.5, 0)
