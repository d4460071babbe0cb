"""``python -m bench cpu``; see :mod:`bench.cpu.command`."""
