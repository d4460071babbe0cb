"""aioinfer: a language-model inference engine that lives inside an asyncio program.

Names are loaded on first use: importing the package takes milliseconds, does not import torch and changes
no global state.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

from aioinfer._version import __version__ as __version__

if TYPE_CHECKING:
    from aioinfer.budget import TokenBudget
    from aioinfer.chat.results import ChatDelta, ChatResult, ToolCall
    from aioinfer.client.chats import ChatStream
    from aioinfer.client.disconnects import until_disconnected
    from aioinfer.client.filling import Filled, FillStream
    from aioinfer.client.mapping import ResultMap
    from aioinfer.client.rows import ChatRow
    from aioinfer.client.search import ScoredResult
    from aioinfer.client.sessions import HeldPrefix, Session
    from aioinfer.client.threadsafe import RemoteStream, ThreadsafeEngine
    from aioinfer.config import EngineConfig, ServerConfig
    from aioinfer.embeddings.embedding import Embedding
    from aioinfer.embeddings.scoring import Scores
    from aioinfer.engine import Engine, EngineState
    from aioinfer.errors import (
        AioInferError,
        Cancelled,
        ConfigError,
        ConstraintFailed,
        EngineClosed,
        EngineError,
        EngineFailed,
        InvalidRequest,
        OutOfMemory,
        ProcessorFailed,
        Rejected,
        RequestError,
        StepFailed,
        TimedOut,
        WrongLoop,
    )
    from aioinfer.llm import LLM
    from aioinfer.observe.stats import EngineStats
    from aioinfer.outputs import AdapterInfo, Chunk, Draft, RequestMetrics, Result, Usage
    from aioinfer.params import DiffusionParams, Grammar, SamplingParams
    from aioinfer.pooling import Pooling
    from aioinfer.resuming.record import StreamCheckpoint
    from aioinfer.steering.steer import Steer
    from aioinfer.stream import Stream
    from aioinfer.text.tool_calls import ToolCallDelta

# No output unless the application configures logging; the root logger belongs to the application.
logging.getLogger("aioinfer").addHandler(logging.NullHandler())

_HOME = {
    "AdapterInfo": "outputs",
    "AioInferError": "errors",
    "Cancelled": "errors",
    "ChatDelta": "chat.results",
    "ChatResult": "chat.results",
    "ToolCall": "chat.results",
    "ChatRow": "client.rows",
    "ChatStream": "client.chats",
    "Chunk": "outputs",
    "ConfigError": "errors",
    "ConstraintFailed": "errors",
    "DiffusionParams": "params",
    "Draft": "outputs",
    "Embedding": "embeddings.embedding",
    "Engine": "engine",
    "EngineClosed": "errors",
    "EngineConfig": "config",
    "EngineError": "errors",
    "EngineFailed": "errors",
    "EngineState": "engine",
    "EngineStats": "observe.stats",
    "FillStream": "client.filling",
    "Filled": "client.filling",
    "Grammar": "params",
    "HeldPrefix": "client.sessions",
    "InvalidRequest": "errors",
    "LLM": "llm",
    "OutOfMemory": "errors",
    "Pooling": "pooling",
    "ProcessorFailed": "errors",
    "Rejected": "errors",
    "RemoteStream": "client.threadsafe",
    "RequestError": "errors",
    "RequestMetrics": "outputs",
    "Result": "outputs",
    "ResultMap": "client.mapping",
    "SamplingParams": "params",
    "ScoredResult": "client.search",
    "Scores": "embeddings.scoring",
    "ServerConfig": "config",
    "Session": "client.sessions",
    "Steer": "steering.steer",
    "StepFailed": "errors",
    "Stream": "stream",
    "StreamCheckpoint": "resuming.record",
    "ThreadsafeEngine": "client.threadsafe",
    "TimedOut": "errors",
    "TokenBudget": "budget",
    "ToolCallDelta": "text.tool_calls",
    "Usage": "outputs",
    "WrongLoop": "errors",
    "until_disconnected": "client.disconnects",
}

__all__ = [
    "LLM",
    "AdapterInfo",
    "AioInferError",
    "Cancelled",
    "ChatDelta",
    "ChatResult",
    "ChatRow",
    "ChatStream",
    "Chunk",
    "ConfigError",
    "ConstraintFailed",
    "DiffusionParams",
    "Draft",
    "Embedding",
    "Engine",
    "EngineClosed",
    "EngineConfig",
    "EngineError",
    "EngineFailed",
    "EngineState",
    "EngineStats",
    "FillStream",
    "Filled",
    "Grammar",
    "HeldPrefix",
    "InvalidRequest",
    "OutOfMemory",
    "Pooling",
    "ProcessorFailed",
    "Rejected",
    "RemoteStream",
    "RequestError",
    "RequestMetrics",
    "Result",
    "ResultMap",
    "SamplingParams",
    "ScoredResult",
    "Scores",
    "ServerConfig",
    "Session",
    "Steer",
    "StepFailed",
    "Stream",
    "StreamCheckpoint",
    "ThreadsafeEngine",
    "TimedOut",
    "TokenBudget",
    "ToolCall",
    "ToolCallDelta",
    "Usage",
    "WrongLoop",
    "until_disconnected",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
