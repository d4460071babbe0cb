"""Resources that replicas ask a cluster for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

__all__ = ["Node", "Share", "share"]


class Node(NamedTuple):
    """Resources of a node of the cluster, in use or not."""

    cpus: float
    gpus: float


class Share(NamedTuple):
    """Resources of one replica, and its engine's settings with these."""

    cpus: int
    gpus: int
    settings: dict[str, Any]


def share(settings: dict[str, Any], nodes: Sequence[Node], replicas: int) -> Share:
    """One GPU for each replica, if its device says so, or may be one and there are enough. Else the threads
    that it is to have, or as many as each of them can get on these nodes, at least one."""
    device = settings.get("device", "auto")
    gpus = int(sum(int(each.gpus) for each in nodes))
    if str(device).startswith("cuda") or (device == "auto" and gpus >= replicas):
        # Ray shows an actor its own GPU only, as the first one.
        return Share(1, 1, settings | {"device": "cuda"})
    cpus = settings.get("threads") or _cpus(nodes, replicas)
    return Share(cpus, 0, settings | {"threads": cpus})


def _cpus(nodes: Sequence[Node], replicas: int) -> int:
    most = int(max((each.cpus for each in nodes), default=1))
    for cpus in range(most, 1, -1):
        if sum(each.cpus // cpus for each in nodes) >= replicas:
            return cpus
    return 1
