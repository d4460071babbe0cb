"""``python -m bench serving``; see :mod:`bench.serving.command`."""
