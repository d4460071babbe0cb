"""``python -m bench overlap``; see :mod:`bench.overlap.command`."""
