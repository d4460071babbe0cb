"""Several engines that look like one: :class:`Dispatcher`.

Read ``dispatching`` first, and what becomes of a stream; ``sending`` has the queue, and in it
:meth:`~aioinfer.parallel.sending.Sending._pump`. ``record`` is what a stream has, ``replica`` an engine
wherever it runs, ``local`` one on the same loop, ``placing`` and ``policies`` say which one gets a request.
"""

from aioinfer.parallel.dispatcher import Dispatcher
from aioinfer.parallel.policies import Candidate, RoutingPolicy
from aioinfer.parallel.stats import DispatcherStats, ReplicaStats

__all__ = ["Candidate", "Dispatcher", "DispatcherStats", "ReplicaStats", "RoutingPolicy"]
