"""``python -m bench fanout``; see :mod:`bench.fanout.command`."""
