"""Several engines that look like one: :class:`Dispatcher`.

Read ``dispatching`` first, and in it :meth:`~aioinfer.parallel.dispatching.Dispatching._pump`: the queue, and
what becomes of a stream. ``record`` is what a stream has, ``replica`` an engine wherever it runs, ``local``
one on the same loop, ``placing`` and ``policies`` say which one gets a request.
"""

from aioinfer.parallel.dispatcher import Dispatcher
from aioinfer.parallel.policies import Candidate, RoutingPolicy
from aioinfer.parallel.stats import DispatcherStats, ReplicaStats

__all__ = ["Candidate", "Dispatcher", "DispatcherStats", "ReplicaStats", "RoutingPolicy"]
