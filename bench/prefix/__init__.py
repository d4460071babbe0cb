"""``python -m bench prefix``; see :mod:`bench.prefix.command`."""
