"""``python -m bench adapters``; see :mod:`bench.adapters.command`."""
