"""``python -m bench.peers``; see :mod:`bench.peers.command`."""

import sys

from bench.peers.command import main

if __name__ == "__main__":
    sys.exit(main())
