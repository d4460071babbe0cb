"""ServedModel: what a dispatcher itself knows of the model that its replicas compute."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from aioinfer.chat.answers import ChatFormat
from aioinfer.chat.asking import import_chats
from aioinfer.checkpoint.sentences import Sentences
from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.errors import ConfigError, EngineError
from aioinfer.execution.device import DeviceInfo, Progress
from aioinfer.execution.opening import Opening
from aioinfer.loop import factory
from aioinfer.loop.intake import Intake
from aioinfer.observe.stats import EngineStats
from aioinfer.observe.timeline import Timeline
from aioinfer.parallel.replica import Replica
from aioinfer.params import SamplingParams

if TYPE_CHECKING:
    from aioinfer.text.tokenizer import Tokenizer

__all__ = ["ServedModel", "bring_up", "check_same_model"]


class ServedModel(NamedTuple):
    """Facts of the first replica when it started, or of the model's files."""

    info: DeviceInfo
    #: has the fields of a sum of none
    stats: EngineStats
    tokenizer: Tokenizer | None
    default_params: SamplingParams
    sentences: Sentences
    chat_format: ChatFormat
    timeline: Timeline

    @classmethod
    def of(cls, engine: Engine) -> Self:
        """Facts of an engine that has started."""
        return cls(
            engine.info,
            engine.stats(),
            engine.tokenizer,
            engine.default_params,
            engine.sentences,
            engine.chat_format,
            engine.timeline,
        )

    @classmethod
    async def load(cls, config: EngineConfig, intake: Intake, info: DeviceInfo, stats: EngineStats) -> Self:
        """Read the tokenizer and what else the model's files say; ``config``: located. Raises ConfigError."""
        tokenizer = await intake.run(factory.load_tokenizer, config)
        params = await intake.run(factory.default_params, config, info)
        await intake.run(import_chats)
        form = await intake.run(ChatFormat.of, tokenizer, config.tool_call_parser, config.reasoning_parser)
        sentences = await intake.run(factory.sentences, config)
        return cls(info, stats, tokenizer, params, sentences, form, Timeline())


async def bring_up(
    config: EngineConfig, replicas: Sequence[Replica], intake: Intake, progress: Progress | None
) -> ServedModel:
    """Launch the replicas, those elsewhere side by side. Raises as they do."""
    first = replicas[0]
    engine: Engine | None = getattr(first, "engine", None)
    if engine is not None:
        for replica in replicas:
            await replica.launch(progress)
        return ServedModel.of(engine)
    config = await _located(config, intake, progress)
    await _all(replica.launch() for replica in replicas)
    stats = first.stats()
    if stats is None:
        raise EngineError(f"the replica {first.name} was lost while others started")
    return await ServedModel.load(config, intake, first.info, stats)


async def _all(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Do all of these at once. If one raises, the others are cancelled, and its error is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            for work in works:
                group.create_task(work)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0]  # noqa: B904 - its cause is its own


async def _located(config: EngineConfig, intake: Intake, progress: Progress | None) -> EngineConfig:
    """The config with its model's place on this machine, downloaded if need be. Raises ConfigError."""
    opening = Opening(progress)
    try:
        return await intake.run(factory.located, config, opening)
    except asyncio.CancelledError:
        opening.cancel()
        raise


def check_same_model(replica: Replica, known: DeviceInfo) -> None:
    """Raise ConfigError unless a replica has the model that is known."""
    found = replica.info
    for name in ("fingerprint", "vocab_size", "block_size", "max_model_len"):
        if getattr(known, name) != getattr(found, name):
            raise ConfigError(
                f"{replica.name} has {name} {getattr(found, name)}, not {getattr(known, name)}: "
                "the engines of a dispatcher must have one model"
            )
