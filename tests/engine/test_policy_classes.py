"""Queue policies of an application's own: what is wrong with one is said by its name."""

from __future__ import annotations

import abc
from collections.abc import Iterator
from typing import Any

import pytest

from aioinfer import ConfigError, SamplingParams, StepFailed
from aioinfer.scheduling.policy import Policy, Ranked
from aioinfer.scheduling.sequence import Sequence
from tests.engine.conftest import MakeEngine


class Shortest(Ranked, abc.ABC):
    """Its metaclass is not ``type``."""

    def rank(self, request: Sequence) -> int:
        return len(request.prompt_ids)


class Abstract(Policy, abc.ABC):
    @abc.abstractmethod
    def weigh(self, request: Sequence) -> int: ...


class Narrow(Policy):
    def __init__(self) -> None:
        super().__init__(None)  # type: ignore[arg-type]


class Broken(Policy):
    def __init__(self, *arguments: Any) -> None:
        raise OSError("no table of weights")


class Unable(Ranked):
    def rank(self, request: Sequence) -> Any:
        raise LookupError("nothing is known of it")


async def test_a_class_of_any_metaclass_is_a_policy(make_engine: MakeEngine) -> None:
    async with make_engine(policy=Shortest) as engine:
        assert (
            len((await engine.generate([1, 2], SamplingParams(max_tokens=3, ignore_eos=True))).token_ids) == 3
        )


@pytest.mark.parametrize(
    ("policy", "why"), [(Abstract, "weigh"), (Narrow, "argument"), (Broken, "no table of weights")]
)
async def test_a_policy_that_cannot_be_made_is_an_error_of_its_setting(
    make_engine: MakeEngine, policy: type, why: str
) -> None:
    with pytest.raises(ConfigError, match=f"policy {policy.__name__}.*{why}"):
        await make_engine(policy=policy).start()


class Silent(Policy):
    """Offers nothing while ``quiet``."""

    quiet = True

    def order(self) -> Iterator[Sequence]:
        return iter(()) if self.quiet else super().order()


async def test_a_policy_that_offers_nothing_ends_the_requests_that_wait(make_engine: MakeEngine) -> None:
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    async with make_engine(policy=Silent) as engine:
        with pytest.raises(StepFailed) as caught:
            await engine.generate([1, 2], params)
        assert "silent" in str(caught.value.__cause__)
        Silent.quiet = False
        try:
            assert len((await engine.generate([1, 2], params)).token_ids) == 3
        finally:
            Silent.quiet = True


async def test_a_policy_that_cannot_queue_a_request_is_logged(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    async with make_engine(policy=Unable) as engine:
        with pytest.raises(StepFailed):
            await engine.generate([1, 2], SamplingParams(max_tokens=3))
    (record,) = [each for each in caplog.records if each.exc_info]
    assert "could not be queued" in record.getMessage()
    assert "nothing is known of it" in str(record.exc_info)
