"""``python -m bench families``; see :mod:`bench.families.command`."""
