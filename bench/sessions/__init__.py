"""``python -m bench sessions``; see :mod:`bench.sessions.command`."""
