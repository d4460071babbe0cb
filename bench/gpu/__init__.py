"""``python -m bench gpu``; see :mod:`bench.gpu.command`."""
