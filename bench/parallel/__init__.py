"""``python -m bench parallel``; see :mod:`bench.parallel.command`."""
