"""``python -m bench kernels``; see :mod:`bench.kernels.command`."""
