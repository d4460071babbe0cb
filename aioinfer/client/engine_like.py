"""EngineLike: what an application and the server hold: one engine, or a dispatcher of several."""

from __future__ import annotations

from abc import abstractmethod
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from aioinfer.client.session_calls import Sessions
from aioinfer.client.threadsafe import ThreadsafeEngine
from aioinfer.execution.device import DeviceInfo, Progress
from aioinfer.loop.service import EngineState, Service
from aioinfer.loop.updating import UpdateMode, WeightSource
from aioinfer.observe.stats import EngineStats
from aioinfer.observe.timeline import Timeline

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from aioinfer.observe.metrics.measuring import Measuring

__all__ = ["EngineLike"]


class EngineLike(Sessions):
    """Takes requests, as :class:`Sessions` says, is started and closed, and can be observed."""

    # -- life -----------------------------------------------------------------------------------

    @abstractmethod
    async def start(self, progress: Progress | None = None) -> None:
        """Begin to serve on the running loop."""

    @abstractmethod
    async def aclose(self, *, drain: bool = False, timeout: float | None = None) -> None:
        """Stop serving. Idempotent; with ``drain``, open requests may finish first."""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Drain for up to ``config.drain_timeout`` seconds, and close; after an exception, close at once."""
        await self.aclose(drain=kind is None)

    @abstractmethod
    def _started(self) -> Service[Any]:
        """The service of the latest start. Raises EngineClosed before the start."""

    def threadsafe(self) -> ThreadsafeEngine:
        """The same for other threads than that of its loop, and for other loops; it can be used until the
        engine is closed. On any thread. Raises EngineClosed, EngineFailed."""
        serving = self._started()
        serving.check_running()
        return ThreadsafeEngine(self, serving)

    # -- pausing --------------------------------------------------------------------------------

    @abstractmethod
    async def pause(self) -> None:
        """Launch no more steps; returns when those in flight have resolved."""

    @abstractmethod
    def resume(self) -> None:
        """Go on after :meth:`pause`. Idempotent."""

    @abstractmethod
    def flush_cache(self) -> int:
        """Forget all cached prefixes; returns how many pages that freed at once."""

    # -- weights --------------------------------------------------------------------------------

    @abstractmethod
    async def update_weights(
        self, source: WeightSource, *, mode: UpdateMode = "keep", version: int | None = None
    ) -> int:
        """Go on with other weights of the same model; returns their version. See
        :meth:`aioinfer.Engine.update_weights`."""

    @property
    @abstractmethod
    def weight_version(self) -> int:
        """Version of the weights that compute the next step. Raises EngineClosed before the start."""

    # -- observing ------------------------------------------------------------------------------

    @property
    @abstractmethod
    def state(self) -> EngineState:
        """The state of the engine between its start and its end."""

    @property
    def closed(self) -> bool:
        """Nothing more comes from it until it is started again."""
        return self.state in (EngineState.NEW, EngineState.CLOSED)

    @property
    def ready(self) -> bool:
        """Requests are accepted."""
        return self.state is EngineState.RUNNING

    @property
    def degraded(self) -> bool:
        """A part of it does not take requests: of a dispatcher, a replica."""
        return False

    @property
    @abstractmethod
    def info(self) -> DeviceInfo:
        """Limits of model and device, and what was decided at the start. Raises EngineClosed before that."""

    @abstractmethod
    def stats(self) -> EngineStats:
        """A snapshot, cheap enough to take every second. Raises EngineClosed before the start."""

    @property
    @abstractmethod
    def timeline(self) -> Timeline:
        """Recent events of loop, launch thread and device. Raises EngineClosed before the start."""

    @property
    @abstractmethod
    def measuring(self) -> Measuring:
        """Source of the metrics; histograms count from the first look at it on."""

    def register(
        self,
        registry: CollectorRegistry,
        *,
        engine: str = "0",
        model_name: str | None = None,
        vllm: bool = False,
    ) -> None:
        """Show the metrics in a registry of ``prometheus_client``, until it is closed.

        Before the start, too. Gauges and counters are read when the registry is collected, on any thread;
        histograms count from here on. docs/monitoring.md lists the metrics.

        Args:
            registry: ``prometheus_client.REGISTRY``, for example, or one of your own.
            engine: value of the label that tells engines of one registry apart.
            model_name: value of that label; default: the model's name in the config.
            vllm: the names of vLLM as well; the same for all engines of a registry.

        Raises ConfigError: the engine or its labels are in the registry already, or a metric's name is.
        """
        from aioinfer.observe.metrics.collector import Labels

        name = self.config.model_name if model_name is None else model_name
        self.measuring.register(registry, Labels(name, engine), vllm=vllm)

    def unregister(self, registry: CollectorRegistry) -> None:
        """Undo :meth:`register`. Raises ConfigError: the engine is not in the registry."""
        self.measuring.unregister(registry)
