"""The keeper: the driver of Ray for a dispatcher, whose child it is.

    python -m aioinfer.parallel.on_ray.keeper ADDRESS

It takes commands from standard input and writes events to standard output, a line of JSON each, and ends with
its input; its actors end with it.

======== =================================== ==========================================================
command  fields                              events in answer
======== =================================== ==========================================================
place    number, replicas, settings, token,  ``placed`` with host, port and pid; ``waiting``: there is no
         path                                room; ``died`` with why
end      number, kill                        ``ended``
======== =================================== ==========================================================

``died`` comes later, too. At the beginning: ``imported``, then ``connected``, or ``unreachable`` with why.
``path``: of the Unix socket that passes bytes on to the replica. ``died`` has ``error``, too, if that is the
engine's, or ``setting`` for a ConfigError.
"""

from __future__ import annotations

import os
import sys

__all__ = ["main"]


def main() -> int:
    """Returns the exit status."""
    # Whatever writes to standard output, Ray's import included, must not write between events.
    events = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    from aioinfer.parallel.on_ray.keeping import keep

    (address,) = sys.argv[1:]
    return keep(address, events)


if __name__ == "__main__":
    raise SystemExit(main())
