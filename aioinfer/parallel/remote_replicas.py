"""The replicas of a dispatcher that run in other processes."""

from __future__ import annotations

from collections.abc import Sequence

from aioinfer.config import EngineConfig, given
from aioinfer.errors import ConfigError, shown
from aioinfer.parallel.processes import ProcessReplica
from aioinfer.parallel.remote import SocketReplica

__all__ = ["remote_replicas"]

#: child processes of one dispatcher
_MOST = 256


def remote_replicas(
    engines: Sequence[object],
    config: EngineConfig | None,
    processes: int,
    ray: str | None,
    addresses: Sequence[str],
    token: str,
) -> list[SocketReplica]:
    """Child processes, or replicas that a Ray cluster places, or one at each address; none where there are
    ``engines``. Raises ConfigError."""
    if type(processes) is not int or not 0 <= processes <= _MOST:
        raise ConfigError(f"processes must be in [0, {_MOST}], got {shown(processes)}")
    if isinstance(addresses, str) or not all(isinstance(each, str) for each in addresses):
        raise ConfigError(f"addresses must be a list of texts, got {shown(addresses)}")
    if bool(engines) + bool(processes) + bool(addresses) > 1:
        raise ConfigError("processes: one of engines, processes and addresses can be given")
    if config is not None and engines:
        raise ConfigError("config: that of an engine belongs to the engine")
    if ray is not None and not processes:
        raise ConfigError("ray: processes must be given, how many replicas the cluster is to place")
    config = given(config)
    if ray is not None:
        return _on_ray(config, processes, ray)
    children: list[SocketReplica] = [
        ProcessReplica(config, f"process-{number}", number=number, children=processes)
        for number in range(processes)
    ]
    return children or [
        SocketReplica(address, f"remote-{number}", token=token) for number, address in enumerate(addresses)
    ]


def _on_ray(config: EngineConfig, replicas: int, address: str) -> list[SocketReplica]:
    from aioinfer.parallel.on_ray.cluster import RayCluster
    from aioinfer.parallel.on_ray.replica import RayReplica

    cluster = RayCluster(address, replicas)
    return [RayReplica(cluster, config, f"ray-{number}") for number in range(replicas)]
