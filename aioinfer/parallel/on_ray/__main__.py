"""The keeper: the driver of Ray for a dispatcher, whose child it is.

python -m aioinfer.parallel.on_ray ADDRESS
"""

from __future__ import annotations

import os
import sys


def main() -> int:
    """Returns the exit status."""
    # Whatever writes to standard output, Ray's import included, must not write between answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    from aioinfer.parallel.on_ray.keeper import keep

    (address,) = sys.argv[1:]
    return keep(address, answers)


if __name__ == "__main__":
    raise SystemExit(main())
